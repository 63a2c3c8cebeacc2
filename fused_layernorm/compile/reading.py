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

from ..ops import formulas, load
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
# By target; a reader without a signature takes the node itself.
_readers: dict[Any, tuple[_Reader, inspect.Signature | None]] = {}


def reads(*targets: Any, node: bool = False) -> Callable[[_Reader], _Reader]:
    """Registers a reader of these functions, operators, or methods by name.

    The reader takes the arguments of such a call or, with `node`, its node.
    """

    def register(reader: _Reader) -> _Reader:
        signature = None if node else inspect.signature(reader)
        _readers.update(dict.fromkeys(targets, (reader, signature)))
        return reader

    return register


def read(value: Any) -> Call | None:
    """What a node computes; a Call is returned as it is."""
    if isinstance(value, Call):
        return value
    if not isinstance(value, Node) or value.op not in ("call_function", "call_method"):
        return None
    if value.target not in _readers:
        return None
    reader, signature = _readers[value.target]
    if signature is None:
        return reader(value)
    try:
        bound = signature.bind(*value.args, **value.kwargs)
    except TypeError:
        return None
    return reader(*bound.args, **bound.kwargs)


def _is_one(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == 1


def _product(name: str, input: Any, other: Any) -> Call:
    """A product or quotient; one that changes nothing is the same."""
    kept = (input,) if _is_one(other) else (other,) if name == "mul" and _is_one(input) else ()
    return Call("same", kept) if kept else Call(name, (input, other))


def _unary(name: str) -> _Reader:
    return lambda input, inplace=False: None if inplace else Call(name, (input,))


def _power(input: Any, exponent: Any) -> Call:
    name = {0.5: "sqrt", -0.5: "rsqrt"}.get(exponent) if isinstance(exponent, float) else None
    return Call(name, (input,)) if name else Call("pow", (input, exponent))


# fmt: off
reads(operator.add, torch.add, "add", "__add__", "__radd__", aten.add.Tensor, aten.add.Scalar)(
    lambda input, other, *, alpha=1: Call("add", (input, other)) if alpha == 1 else None)
reads(operator.sub, torch.sub, "sub", "__sub__", aten.sub.Tensor, aten.sub.Scalar)(
    lambda input, other, *, alpha=1: Call("sub", (input, other)) if alpha == 1 else None)
reads(torch.addcmul, "addcmul", aten.addcmul.default)(
    lambda input, tensor1, tensor2, *, value=1:
    Call("add", (input, Call("mul", (tensor1, tensor2)))) if value == 1 else None)
reads(operator.mul, torch.mul, torch.multiply, "mul", "multiply", "__mul__", "__rmul__",
      aten.mul.Tensor, aten.mul.Scalar)(lambda input, other: _product("mul", input, other))
reads(operator.truediv, torch.div, torch.true_divide, "div", "true_divide", "__truediv__",
      aten.div.Tensor, aten.div.Scalar)(lambda input, other: _product("div", input, other))
reads(operator.pow, torch.pow, "pow", "__pow__", aten.pow.Tensor_Scalar)(_power)
reads(torch.square, "square", aten.square.default)(lambda input: Call("pow", (input, 2)))
reads(torch.sqrt, "sqrt", aten.sqrt.default)(_unary("sqrt"))
reads(torch.rsqrt, "rsqrt", aten.rsqrt.default)(_unary("rsqrt"))
reads(torch.sigmoid, F.sigmoid, "sigmoid", aten.sigmoid.default)(_unary("sigmoid"))
reads(torch.relu, F.relu, "relu", aten.relu.default)(_unary("relu"))
reads(F.silu, torch._C._nn.silu, "silu", aten.silu.default)(_unary("silu"))
reads(F.leaky_relu, torch._C._nn.leaky_relu, aten.leaky_relu.default)(
    lambda input, negative_slope=0.01, inplace=False:
    None if inplace or negative_slope != 0.01 else Call("leaky_relu", (input,)))
# Dropout that drops nothing.
reads(F.dropout, torch.dropout, aten.dropout.default)(
    lambda input, p=0.5, training=True, inplace=False:
    None if inplace or (training and p != 0) else Call("same", (input,)))
# fmt: on


@reads(F.gelu, torch._C._nn.gelu, aten.gelu.default)
def _gelu(input: Any, approximate: str = "none") -> Call | None:
    names = {"none": "gelu", "tanh": "gelu_tanh"}
    return Call(names[approximate], (input,)) if approximate in names else None


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


def _norm(name: str, shape: Any, input: Any, weight: Any, bias: Any, eps: Any, *more: Any) -> Call:
    """A norm by its input, weight, bias, eps, weight_offset and round_before_weight."""
    operands = (input, weight, bias, rms_eps(eps, value_of(input)), *(more or (0.0, False)))
    return Call(name, operands, len(shape))


# fmt: off
reads(F.layer_norm, torch.layer_norm, aten.layer_norm.default)(
    lambda input, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True:
    _norm("layer_norm", normalized_shape, input, weight, bias, eps))
reads(torch.native_layer_norm, aten.native_layer_norm.default)(
    lambda input, normalized_shape, weight, bias, eps:
    _norm("native_layer_norm", normalized_shape, input, weight, bias, eps))
reads(F.rms_norm, torch.rms_norm, aten.rms_norm.default)(
    lambda input, normalized_shape, weight=None, eps=None:
    _norm("rms_norm", normalized_shape, input, weight, None, eps))
reads(torch._fused_rms_norm, aten._fused_rms_norm.default)(
    lambda input, normalized_shape, weight, eps:
    _norm("_fused_rms_norm", normalized_shape, input, weight, None, eps))
# fmt: on


@reads(load.layer_norm, VARIANTS[load.layer_norm])
def _fused_layer_norm(*args: Any, **kwargs: Any) -> Call | None:
    """This package's operator or its aten_ variant, which a swapped module calls."""
    a = formulas.call_of(load.layer_norm)(*args, **kwargs)
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
