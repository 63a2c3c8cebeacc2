# SPDX-License-Identifier: Apache-2.0
"""What a node of an FX graph computes, in the terms of the patterns.

One operation is spelled in many ways: as a function, a method, an operator. `read` gives one `Call`
for all of them, or None for a node that occurs in no pattern. A Call has no side effects.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from ..ops import load
from ..ops.arguments import DTYPES, HALF, rms_eps
from ..ops.aten_forward import VARIANTS

aten = torch.ops.aten


class Call(NamedTuple):
    """An operation on nodes, numbers and other Calls.

    `over` is the dimensions of a reduction, or the number of dimensions of a norm.
    """

    name: str
    operands: tuple[Any, ...]
    over: Any = None


def value_of(node: Any) -> Any:
    """The example of a node's result (fake tensors in graphs of Dynamo and of torch.export)."""
    if not isinstance(node, Node):
        return node
    return node.meta.get("example_value", node.meta.get("val"))


def is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(value_of(node), Tensor)


def dtype_of(node: Any) -> torch.dtype:
    return value_of(node).dtype


def is_number(value: Any) -> bool:
    """Whether this is a number, or a node that gives one."""
    numbers, found = (int, float, torch.SymInt, torch.SymFloat), value_of(value)
    return isinstance(found, numbers) and not isinstance(found, bool)


# ---- A reader for each operation: its signature has the arguments that it understands ------------

_Reader = Callable[..., Call | None]
_readers: dict[Any, tuple[_Reader, inspect.Signature]] = {}
_readers_of_nodes: dict[Any, _Reader] = {}  # these take the node itself


def reads(*targets: Any, node: bool = False) -> Callable[[_Reader], _Reader]:
    """Registers a reader of these functions, operators, or methods by name.

    The reader takes the arguments of such a call or, with `node`, its node.
    """

    def register(reader: _Reader) -> _Reader:
        for target in targets:
            if node:
                _readers_of_nodes[target] = reader
            else:
                _readers[target] = reader, inspect.signature(reader)
        return reader

    return register


def read(value: Any) -> Call | None:
    """What a node computes; a Call is returned as it is."""
    if isinstance(value, Call):
        return value
    if not isinstance(value, Node) or value.op not in ("call_function", "call_method"):
        return None
    if value.target in _readers_of_nodes:
        return _readers_of_nodes[value.target](value)
    if value.target not in _readers:
        return None
    reader, signature = _readers[value.target]
    try:
        bound = signature.bind(*value.args, **value.kwargs)
    except TypeError:
        return None
    return reader(*bound.args, **bound.kwargs)


@reads(operator.add, torch.add, "add", "__add__", "__radd__", aten.add.Tensor, aten.add.Scalar)
def _add(input: Any, other: Any, *, alpha: Any = 1) -> Call | None:
    return Call("add", (input, other)) if alpha == 1 else None


@reads(operator.sub, torch.sub, "sub", "__sub__", aten.sub.Tensor, aten.sub.Scalar)
def _sub(input: Any, other: Any, *, alpha: Any = 1) -> Call | None:
    return Call("sub", (input, other)) if alpha == 1 else None


def _is_one(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == 1


@reads(operator.mul, torch.mul, torch.multiply, "mul", "multiply", "__mul__", "__rmul__")
@reads(aten.mul.Tensor, aten.mul.Scalar)
def _mul(input: Any, other: Any) -> Call:
    if _is_one(input) or _is_one(other):
        return Call("same", (other if _is_one(input) else input,))
    return Call("mul", (input, other))


@reads(operator.truediv, torch.div, torch.true_divide, "div", "true_divide", "__truediv__")
@reads(aten.div.Tensor, aten.div.Scalar)
def _div(input: Any, other: Any) -> Call:
    return Call("same", (input,)) if _is_one(other) else Call("div", (input, other))


@reads(torch.addcmul, "addcmul", aten.addcmul.default)
def _addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Call | None:
    return Call("add", (input, Call("mul", (tensor1, tensor2)))) if value == 1 else None


@reads(operator.pow, torch.pow, "pow", "__pow__", aten.pow.Tensor_Scalar)
def _pow(input: Any, exponent: Any) -> Call:
    roots = {0.5: "sqrt", -0.5: "rsqrt"}
    if isinstance(exponent, float) and exponent in roots:
        return Call(roots[exponent], (input,))
    return Call("pow", (input, exponent))


reads(torch.square, "square", aten.square.default)(lambda input: Call("pow", (input, 2)))


def _reads_unary(name: str, *targets: Any) -> None:
    def reader(input: Any, inplace: Any = False) -> Call | None:
        return None if inplace else Call(name, (input,))

    reads(*targets, name, getattr(torch, name, None), getattr(aten, name).default)(reader)


_reads_unary("sqrt")
_reads_unary("rsqrt")
_reads_unary("sigmoid", F.sigmoid)
_reads_unary("relu", F.relu)
_reads_unary("silu", F.silu, torch._C._nn.silu)


def _reduction(name: str, input: Any, dim: Any) -> Call | None:
    """A reduction that keeps its dimensions, which `over` counts from the front."""
    if not is_tensor(input) or dim is None:
        return None
    ndim = value_of(input).dim()
    dims = (dim,) if isinstance(dim, int) else dim
    if not isinstance(dims, (tuple, list)) or not all(isinstance(d, int) for d in dims):
        return None
    return Call(name, (input,), tuple(sorted(d % ndim for d in dims)))


@reads(torch.mean, "mean", aten.mean.dim)
def _mean(
    input: Any, dim: Any = None, keepdim: Any = False, *, axis: Any = None, dtype: Any = None
) -> Call | None:
    dim = axis if dim is None else dim
    return _reduction("mean", input, dim) if keepdim and dtype is None else None


def _reads_var(name: str, *targets: Any) -> None:
    def reader(
        input: Any, dim: Any = None, unbiased: Any = True, keepdim: Any = False, *,
        correction: Any = None,
    ) -> Call | None:  # fmt: skip
        is_biased = correction == 0 if correction is not None else unbiased in (False, 0)
        return _reduction(name, input, dim) if keepdim and is_biased else None

    reads(*targets)(reader)


_reads_var("var", torch.var, "var", aten.var.correction, aten.var.dim)
_reads_var("var_mean", torch.var_mean, aten.var_mean.correction, aten.var_mean.dim)


@reads(F.gelu, torch._C._nn.gelu, aten.gelu.default)
def _gelu(input: Any, approximate: str = "none") -> Call | None:
    names = {"none": "gelu", "tanh": "gelu_tanh"}
    return Call(names[approximate], (input,)) if approximate in names else None


@reads(F.leaky_relu, torch._C._nn.leaky_relu, aten.leaky_relu.default)
def _leaky_relu(input: Any, negative_slope: Any = 0.01, inplace: Any = False) -> Call | None:
    return None if inplace or negative_slope != 0.01 else Call("leaky_relu", (input,))


@reads(F.dropout, torch.dropout, aten.dropout.default)
def _dropout(input: Any, p: Any = 0.5, training: Any = True, inplace: Any = False) -> Call | None:
    """Dropout that drops nothing."""
    return None if inplace or (training and p != 0) else Call("same", (input,))


def _norm(name: str, shape: Any, input: Any, weight: Any, bias: Any, eps: Any, *more: Any) -> Call:
    """A norm by its input, weight, bias, eps, weight_offset and round_before_weight."""
    operands = (input, weight, bias, rms_eps(eps, value_of(input)), *(more or (0.0, False)))
    return Call(name, operands, len(shape))


@reads(F.layer_norm, torch.layer_norm, aten.layer_norm.default)
def _layer_norm(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5,
    cudnn_enable: Any = True,
) -> Call | None:  # fmt: skip
    return _norm("layer_norm", normalized_shape, input, weight, bias, eps)


@reads(torch.native_layer_norm, aten.native_layer_norm.default)
def _native_layer_norm(input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: Any) -> Call:
    return _norm("native_layer_norm", normalized_shape, input, weight, bias, eps)


@reads(F.rms_norm, torch.rms_norm, aten.rms_norm.default)
def _rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Call:
    return _norm("rms_norm", normalized_shape, input, weight, None, eps)


@reads(torch._fused_rms_norm, aten._fused_rms_norm.default)
def _fused_rms_norm(input: Any, normalized_shape: Any, weight: Any, eps: Any) -> Call:
    return _norm("_fused_rms_norm", normalized_shape, input, weight, None, eps)


@reads(load.layer_norm, VARIANTS[load.layer_norm])
def _fused_layer_norm(*args: Any, **kwargs: Any) -> Call | None:
    """This package's operator or its aten_ variant, which a swapped module calls."""
    a = load.call_of(load.layer_norm)(*args, **kwargs)
    if a.activation is not None or a.output_scale != 1.0 or a.keeps_order:
        return None
    options = (a.weight_offset, a.round_before_weight)
    return _norm(
        f"{a.statistic}_norm", range(a.normalized_ndim), a.input, a.weight, a.bias, a.eps, *options
    )


# ---- Readers that take the node itself -----------------------------------------------------------


@reads("to", "float", "half", "bfloat16", "double", "type", "type_as", node=True)
@reads(aten.to.dtype, aten.to.device, aten._to_copy.default, aten.type_as.default, node=True)
@reads(torch.ops.prims.convert_element_type.default, node=True)
def _cast(node: Node) -> Call | None:
    """A cast to another floating dtype, or the same, that keeps device, shape and strides."""
    input = node.args[0] if node.args else None
    if not is_tensor(input) or not is_tensor(node) or "memory_format" in node.kwargs:
        return None
    before, after = value_of(input), value_of(node)
    are_known = {before.dtype, after.dtype} <= set(DTYPES) and before.device == after.device
    return Call("cast", (input,)) if are_known else None


@reads(operator.getitem, node=True)
def _getitem(node: Node) -> Call | None:
    """An index that makes a view of a tensor, or that selects one of several results."""
    input, index = node.args
    indices = index if isinstance(index, tuple) else (index,)
    if is_tensor(input):
        is_view = all(i is None or i is Ellipsis or isinstance(i, slice) for i in indices)
        return Call("view", (input,)) if is_view else None
    found = read(input)
    if found is None or index not in (0, 1):
        return None
    if found.name in _FIRST_OF_SEVERAL and index == 0:
        return found._replace(name=_FIRST_OF_SEVERAL[found.name])
    if found.name == "var_mean":
        return found._replace(name="mean" if index else "var")
    return None


# Norms that also give their statistics, and the names of those that give the first result only.
_FIRST_OF_SEVERAL = {
    "native_layer_norm": "layer_norm",
    "_fused_rms_norm": "rms_norm",
    "native_group_norm": "group_norm",
}


@reads("unsqueeze", "squeeze", "view", "reshape", "expand", "transpose", "permute", node=True)
@reads("flatten", "unflatten", torch.flatten, torch.unflatten, node=True)
@reads(torch.unsqueeze, torch.squeeze, torch.reshape, torch.transpose, torch.permute, node=True)
@reads(aten.unsqueeze.default, aten.slice.Tensor, aten.view.default, node=True)
@reads(aten.reshape.default, aten.expand.default, node=True)
def _view(node: Node) -> Call | None:
    input = node.args[0] if node.args else None
    if not is_tensor(input) or not is_tensor(node) or dtype_of(input) != dtype_of(node):
        return None
    return Call("view", (input,))


def before_casts(node: Any, *, only_widening: bool) -> list[Any]:
    """The node, the node that it is a cast of, the one before that, and so on.

    A cast from half precision to float32 loses nothing: `only_widening` stops at any other cast.
    """
    found = [node]
    while (call := read(node)) is not None and call.name in ("cast", "same"):
        (source,) = call.operands
        if not is_tensor(source):
            break
        before, after = dtype_of(source), dtype_of(node)
        if only_widening and before != after and not (before in HALF and after is torch.float32):
            break
        node = source
        found.append(node)
    return found


def origin(node: Any) -> Any:
    """The tensor that holds the node's numbers before they were widened."""
    return before_casts(node, only_widening=True)[-1]


def is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
