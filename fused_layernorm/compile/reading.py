# SPDX-License-Identifier: Apache-2.0
"""What a node of an FX graph computes, in the terms of the patterns.

One operation is spelled in many ways: as a function, a method, an operator. `read` gives one `Call`
for all of them, or None for a node that occurs in no pattern. A Call has no side effects.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._prims_common import canonicalize_dims
from torch.fx import Node

from ..ops import formulas, load
from ..ops.arguments import DTYPES, HALF, rms_eps
from ..ops.operators import GROUP_NORM, VARIANTS

aten = torch.ops.aten


class Call(NamedTuple):
    """An operation on nodes, numbers and other Calls."""

    name: str
    operands: Any  # a tuple; of a norm that is called, the fields of its Site
    over: Any = None  # the dimensions of a reduction


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


def name_of_target(target: Any) -> str:
    """The name of a function or method, without its module."""
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


# ---- A reader for each operation: its signature has the arguments that it understands ------------

_Reader = Callable[..., Call | None]
_readers: dict[Any, Callable[[Node], Call | None]] = {}  # by target


def spellings(*names: Any) -> Iterator[Any]:
    """PyTorch's functions and operators of these names, and its methods, which are their names.
    What is no name stands for itself."""
    for name in names:
        yield name
        if not isinstance(name, str):
            continue
        for module in (operator, torch, F, torch._C._nn):
            if hasattr(module, name):
                yield getattr(module, name)
        packet = getattr(aten, name, None)
        overloads = [] if packet is None else [getattr(packet, o) for o in packet.overloads()]
        yield from (one for one in overloads if not one._schema.is_mutable)


def reads(*names: Any, node: bool = False) -> Callable[[_Reader], _Reader]:
    """Registers a reader, which takes the arguments of a call or, with `node`, its node."""

    def register(reader: _Reader) -> _Reader:
        of_node = reader if node else lambda one: reader(*one.args, **one.kwargs)
        _readers.update(dict.fromkeys(spellings(*names), of_node))
        return reader

    return register


def read(value: Any) -> Call | None:
    """What a node computes; a Call is returned as it is."""
    if isinstance(value, Call):
        return value
    if not isinstance(value, Node) or value.op not in ("call_function", "call_method"):
        return None
    reader = _readers.get(value.target)
    try:
        return None if reader is None else reader(value)
    except TypeError:  # it understands no such arguments
        return None


def _product(name: str, input: Any, other: Any) -> Call:
    """A product or quotient; one that changes nothing is the same."""
    kept = (input,) if other == 1 else (other,) if name == "mul" and input == 1 else ()
    return Call("same", kept) if kept else Call(name, (input, other))


def _unary(name: str) -> _Reader:
    return lambda input, inplace=False: None if inplace else Call(name, (input,))


def _power(input: Any, exponent: Any) -> Call:
    name = {0.5: "sqrt", -0.5: "rsqrt"}.get(exponent) if isinstance(exponent, float) else None
    return Call(name, (input,)) if name else Call("pow", (input, exponent))


# fmt: off
reads("add", "__add__", "__radd__")(
    lambda input, other, *, alpha=1: Call("add", (input, other)) if alpha == 1 else None)
reads("sub", "__sub__")(
    lambda input, other, *, alpha=1: Call("sub", (input, other)) if alpha == 1 else None)
reads("addcmul")(
    lambda input, tensor1, tensor2, *, value=1:
    Call("add", (input, Call("mul", (tensor1, tensor2)))) if value == 1 else None)
reads("mul", "multiply", "__mul__", "__rmul__")(
    lambda input, other: _product("mul", input, other))
reads("div", "truediv", "true_divide", "__truediv__")(
    lambda input, other: _product("div", input, other))
reads("pow", "__pow__")(_power)
reads("square")(lambda input: Call("pow", (input, 2)))
for _name in ("sqrt", "rsqrt", "sigmoid", "relu", "silu"):
    reads(_name)(_unary(_name))
reads("leaky_relu")(
    lambda input, negative_slope=0.01, inplace=False:
    None if inplace or negative_slope != 0.01 else Call("leaky_relu", (input,)))
reads("gelu")(
    lambda input, approximate="none":
    Call("gelu" if approximate == "none" else "gelu_tanh", (input,)))
# Dropout that drops nothing.
reads("dropout")(
    lambda input, p=0.5, training=True, inplace=False:
    None if inplace or (training and p != 0) else Call("same", (input,)))
# fmt: on


def _reduction(name: str, input: Any, dim: Any) -> Call | None:
    """A reduction that keeps its dimensions, which `over` counts from the front."""
    if not is_tensor(input) or dim is None:
        return None
    dims = canonicalize_dims(value_of(input).dim(), (dim,) if isinstance(dim, int) else dim)
    return Call(name, (input,), tuple(sorted(dims)))


@reads("mean")
def _mean(
    input: Any, dim: Any = None, keepdim: Any = False, *, axis: Any = None, dtype: Any = None
) -> Call | None:
    dim = axis if dim is None else dim
    return _reduction("mean", input, dim) if keepdim and dtype is None else None


def _var(name: str) -> _Reader:
    def reader(
        input: Any, dim: Any = None, unbiased: Any = True, keepdim: Any = False, *,
        correction: Any = None,
    ) -> Call | None:  # fmt: skip
        is_biased = correction == 0 if correction is not None else unbiased in (False, 0)
        return _reduction(name, input, dim) if keepdim and is_biased else None

    return reader


reads("var")(_var("var"))
reads("var_mean")(_var("var_mean"))


def _norm(input: Any, weight: Any, bias: Any, eps: Any, **more: Any) -> Call:
    eps = rms_eps(eps, value_of(input))
    return Call("norm", {"input": input, "weight": weight, "bias": bias, "eps": eps, **more})


# fmt: off
reads("layer_norm", "native_layer_norm")(
    lambda input, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True:
    _norm(input, weight, bias, eps, normalized_ndim=len(normalized_shape)))
reads("rms_norm", "_fused_rms_norm")(
    lambda input, normalized_shape, weight=None, eps=None:
    _norm(input, weight, None, eps, normalized_ndim=len(normalized_shape), statistic="rms"))
reads("group_norm")(
    lambda input, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True:
    _norm(input, weight, bias, eps, num_groups=num_groups))
reads("native_group_norm")(
    lambda input, weight, bias, N, C, HxW, group, eps:
    _norm(input, weight, bias, eps, num_groups=group))
# fmt: on


@reads(F.instance_norm)
def _instance_norm(
    input: Any, running_mean: Any = None, running_var: Any = None, weight: Any = None,
    bias: Any = None, use_input_stats: Any = True, momentum: Any = 0.1, eps: Any = 1e-5,
) -> Call | None:  # fmt: skip
    """Without running statistics: as many groups as channels."""
    if running_mean is not None or running_var is not None or use_input_stats is not True:
        return None
    if not is_tensor(input) or value_of(input).dim() < 3:
        return None
    return _norm(input, weight, bias, eps, num_groups=value_of(input).shape[1])


# ---- Readers that take the node itself -----------------------------------------------------------


@reads(load.layer_norm, VARIANTS[load.layer_norm], GROUP_NORM.plain, node=True)
def _own_norm(node: Any) -> Call | None:
    """This package's operators, which swapped modules call."""
    a = formulas.call_of(node.target)(*node.args, **node.kwargs)
    if a.activation is not None or a.is_modulated or a.output_scale != 1.0:
        return None
    if "keeps_order" in a._fields and a.keeps_order:  # groups always do
        return None
    names = ("normalized_ndim", "num_groups", "statistic", "weight_offset")
    given = {name: getattr(a, name) for name in names if hasattr(a, name)}
    dtype = getattr(value_of(a.input), "dtype", None)
    given["rounded"] = dtype if a.round_before_weight and dtype in HALF else None
    return _norm(a.input, a.weight, a.bias, a.eps, **given)


@reads("to", "float", "half", "bfloat16", "double", "type", "type_as", "_to_copy", node=True)
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
    """An index that makes a view of a tensor, or selects of several results the first, the norm."""
    input, index = node.args
    indices = index if isinstance(index, tuple) else (index,)
    if is_tensor(input):
        is_view = all(i is None or i is Ellipsis or isinstance(i, slice) for i in indices)
        return Call("view", (input,)) if is_view else None
    found = read(input)
    if found is None:
        return None
    if found.name == "var_mean" and index in (0, 1):
        return found._replace(name="mean" if index else "var")
    return found if found.name == "norm" and index == 0 else None


@reads("unsqueeze", "squeeze", "view", "reshape", "expand", "transpose", "permute", node=True)
@reads("flatten", "unflatten", aten.slice.Tensor, node=True)
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
