# SPDX-License-Identifier: Apache-2.0
"""Whether a site may become one operator, and the replacement.

`check` raises NotFused, with the reason, where the operator would not take the operands, and where
the graph writes into a tensor or changes a mode between the nodes. `apply` raises NotFused where
the result would have another dtype (unless autocast casts it, see autocast.py), shape or strides.
No check adds a guard to a symbolic shape.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import maybe_get_fake_mode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from ..ops import load
from ..ops.arguments import DTYPES, HALF, name_of
from ..ops.operators import Arguments, describe, values
from . import autocast
from .effects import Effects
from .patterns import Viewed
from .reading import before_casts, dtype_of, is_number, is_tensor, read, value_of
from .rules import Columns
from .sites import Site, are_equal, is_parameter, shape_of

_KEPT_META = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom", "seq_nr")


class NotFused(Exception):
    """Why a site stays as it is."""


class Replacement(NamedTuple):
    """A checked site: what to call, with what, and where."""

    site: Site
    arguments: Arguments  # nodes where the operator takes tensors; scale may be Viewed
    after: Node | None  # insert the call after this node; None: before the site's last node
    narrowed: autocast.Narrowed | None  # how the kernel rounds in autocast's place, if it does


def check(site: Site, effects: Effects, functional: bool) -> Replacement:
    """The replacement of a site; raises NotFused where there is none.

    functional: whether the graph is made free of writes before it is differentiated, as AOTAutograd
    does.
    """
    if effects.in_transform(site.norm):
        raise NotFused("it is inside a torch.func transform")
    _check_values(site)
    narrowed = None if effects.is_written(site.y) else autocast.narrowed(site.y)
    arguments = _arguments(site, dtype_of(site.y) if narrowed is None else narrowed.dtype)
    operands = _nodes(values(arguments))
    reads = _read_nodes(site, arguments)
    start = min(reads)
    after = max([site.residual_out, *operands]) if site.residual_out is not None else None
    is_activated = site.activation is not None or site.factor != 1.0
    if arguments.is_modulated and is_activated and not site.is_activated_after_modulation:
        raise NotFused("no operator has both a gate and an activation")
    _check_order(site, after)
    _check_effects(site, arguments, reads, start, effects)
    if not functional:
        _check_saved(site, arguments, start, effects)
    return Replacement(site, arguments, after, narrowed)


def _check_values(site: Site) -> None:
    for name in ("input", "residual", "gate", "weight", "bias", "shift", "scale"):
        node = getattr(site, name)
        if node is None:
            continue
        if not isinstance(node, Viewed) and not is_tensor(node):
            raise NotFused(f"{name} is no tensor with an example of its shape")
        value = value_of(node.base if isinstance(node, Viewed) else node)
        if value.device != value_of(site.norm).device:
            raise NotFused(f"{name} is on {value.device}, the norm on {value_of(site.norm).device}")
    if not is_number(site.eps):
        raise NotFused("eps is no number")
    for node in site.nodes:
        value = value_of(node)
        if isinstance(value, Tensor) and value.dtype not in DTYPES:
            raise NotFused(f"{node.name} is of {name_of(value.dtype)}")
    if not are_equal(shape_of(site.y), shape_of(site.norm)):
        raise NotFused("the result's shape is not known to be the norm's")
    for name in ("weight", "bias"):
        parameter = getattr(site, name)
        if parameter is not None and not is_parameter(parameter, site):
            raise NotFused(f"{name} is not known to have the normalized shape")


def _arguments(site: Site, out_dtype: torch.dtype) -> Arguments:
    """The operator's arguments, taken from before the casts that the operator does not need."""
    residual = site.residual
    input = _narrowest(site.input, None)
    dtypes = {dtype_of(input)} | ({dtype_of(residual)} if residual is not None else set())
    if dtypes & set(HALF):
        dtypes.add(torch.float32)
    weight, bias = _of_one_dtype(site.weight, site.bias, dtypes)
    gate, shift, scale = (
        None if value is None else _narrowest(value, dtypes, name)
        for name, value in (("gate", site.gate), ("shift", site.shift), ("scale", site.scale))
    )
    rounded = None if weight is None else site.rounded
    if rounded not in (None, dtype_of(input)):
        raise NotFused(
            f"the norm is rounded to {name_of(rounded)} before its weight, "
            f"beside an input of {name_of(dtype_of(input))}"
        )
    nodes: Any = {"residual": residual, "gate": gate, "shift": shift, "scale": scale}
    return describe(
        input,
        **nodes,
        weight=weight,
        bias=bias,
        normalized_ndim=site.normalized_ndim,
        eps=site.eps,
        activation=site.activation,
        output_scale=site.factor,
        out_dtype=out_dtype,
        statistic=site.statistic,
        weight_offset=site.weight_offset,
        round_before_weight=rounded is not None,
        keeps_order=site.dim is not None,
    )


def _chain(value: Node | Viewed) -> list[Any]:
    """The value, and the values that it was widened from."""
    if isinstance(value, Viewed):
        return [value._replace(base=base) for base in _chain(value.base)]
    return before_casts(value, only_widening=True)


def _dtype(value: Node | Viewed) -> torch.dtype:
    return dtype_of(value.base if isinstance(value, Viewed) else value)


def _narrowest(value: Any, dtypes: set[torch.dtype] | None, name: str = "input") -> Any:
    found = [v for v in _chain(value) if dtypes is None or _dtype(v) in dtypes]
    if not found:
        beside = " and ".join(sorted(name_of(dtype) for dtype in dtypes or ()))
        raise NotFused(f"{name} is of {name_of(_dtype(value))}, beside {beside}")
    return found[-1]


def _of_one_dtype(weight: Any, bias: Any, dtypes: set[torch.dtype]) -> tuple[Any, Any]:
    weights: list[Any] = [None] if weight is None else _chain(weight)[::-1]
    biases: list[Any] = [None] if bias is None else _chain(bias)[::-1]
    for w in weights:
        for b in biases:
            found = {_dtype(p) for p in (w, b) if p is not None}
            if len(found) <= 1 and found <= dtypes:
                return w, b
    raise NotFused("weight and bias are not of one dtype that the kernels take beside input's")


def _nodes(values: Iterable[Any]) -> list[Node]:
    """The nodes among these values, with the base of a Viewed."""
    bases = (value.base if isinstance(value, Viewed) else value for value in values)
    return [base for base in bases if isinstance(base, Node)]


def _read_nodes(site: Site, arguments: Arguments) -> set[Node]:
    """The nodes whose reads the operator replaces: the site's, and casts of its operands."""
    found = set(site.nodes)
    for name in ("input", "residual", "gate", "weight", "bias", "shift", "scale"):
        value = getattr(site, name)
        if value is None:
            continue
        used = getattr(arguments, name)
        for step in _chain(value):
            if step == used:
                break
            found.add(step.base if isinstance(step, Viewed) else step)
    return found


def _check_order(site: Site, after: Node | None) -> None:
    if after is None or site.residual_out is None:
        return
    if site.y < after:
        raise NotFused(f"{after.name} comes after the norm")
    gone: set[Node] = set()  # what the operator leaves without a user
    for node in sorted(site.nodes, reverse=True):
        if node in (site.y, site.residual_out) or gone.issuperset(node.users):
            gone.add(node)
    for user in site.residual_out.users:
        if user not in gone and user <= after:
            raise NotFused(f"{user.name} uses the sum before {after.name} is there")


def _check_effects(
    site: Site, arguments: Arguments, reads: set[Node], start: Node, effects: Effects
) -> None:
    if not effects.in_one_region(reads):
        raise NotFused("autocast or the gradient mode changes in between")
    if (node := effects.write_between(_nodes(values(arguments)), start, site.y)) is not None:
        raise NotFused(f"{node.name} writes into an operand in between")
    if site.residual_out is not None:
        node = effects.write_between([site.residual_out], site.residual_out, site.y)
        if node is not None:
            raise NotFused(f"{node.name} writes into the sum before it is normalized")
    inner = reads - {site.y, site.residual_out}
    if (node := effects.write_between(inner, start, site.y)) is not None:
        raise NotFused(f"{node.name} writes into what is computed in between")


def _check_saved(site: Site, arguments: Arguments, start: Node, effects: Effects) -> None:
    """Raises NotFused if the graph writes into what only the operator's backward would read."""
    x = arguments.input if site.residual_out is None else site.residual_out
    saved = _nodes([arguments.gate, arguments.shift, arguments.scale])
    if x is not site.saved:
        saved += _nodes([x])
    if (node := effects.write_between(saved, start)) is not None:
        raise NotFused(f"{node.name} writes into what backward reads")


# ---- The replacement -----------------------------------------------------------------------------


class Maker:
    """Makes nodes at the graph's insertion point, and can erase them again."""

    def __init__(self, graph: Graph, beside: Node, effects: Effects) -> None:
        self._graph, self._beside, self._effects = graph, beside, effects
        self._key = "example_value" if "example_value" in beside.meta else "val"
        self._made: list[Node] = []

    def make(self, target: Any, args: Any, kwargs: Any = None, op: str = "call_function") -> Node:
        node = self._graph.create_node(op, target, args, kwargs or {})
        self._made.append(node)
        for name in _KEPT_META:
            if name in self._beside.meta:
                node.meta[name] = self._beside.meta[name]
        self.set_example(node, example_of(node))
        self._effects.place(node, self._beside)
        return node

    def make_views(self, node: Any, views: Iterable[Node]) -> Any:
        """The node under the views that the graph applies to another."""
        for view in views:
            node = self.make(view.target, (node, *view.args[1:]), view.kwargs, view.op)
        return node

    def set_example(self, node: Node, value: Any) -> None:
        node.meta[self._key] = value

    def undo(self) -> None:
        while self._made:
            self._graph.erase_node(self._made.pop())


@contextlib.contextmanager
def making(graph: Graph, before: Node, beside: Node, effects: Effects) -> Iterator[Maker]:
    """Makes nodes before a node, in the modes of the one beside them; an error erases them."""
    maker = Maker(graph, beside, effects)
    try:
        with graph.inserting_before(before):
            yield maker
    except BaseException:
        maker.undo()
        raise


def example_of(node: Node) -> Any:
    """The node's result for the examples of its arguments; it adds no guard."""
    args, kwargs = map_arg(node.args, value_of), map_arg(node.kwargs, value_of)
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    fake_modes = (maybe_get_fake_mode(tensor) for tensor in tensors)
    shape_envs = {mode.shape_env for mode in fake_modes if mode is not None}
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for shape_env in filter(None, shape_envs):
            stack.enter_context(shape_env.suppress_guards())
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]


def apply(
    replacement: Replacement, fused: OpOverload, graph: Graph, effects: Effects, columns: Columns
) -> None:
    """Replaces the site by the operator `fused`.

    A copy stands before an operator of rows that would copy in every call, so that the compiler may
    fuse it with what precedes it, and backward reuses it. None stands where `columns` are read in
    place, nor where y lies as x does.

    Raises NotFused, and leaves the graph as it was, where a result would differ in dtype, device,
    shape or strides.
    """
    site, arguments = replacement.site, replacement.arguments
    following = site.y if replacement.after is None else replacement.after.next
    olds = [site.y] if site.residual_out is None else [site.y, site.residual_out]
    with making(graph, following, site.norm, effects) as maker:
        if isinstance(arguments.scale, Viewed):
            scale = maker.make_views(arguments.scale.base, arguments.scale.views)
            arguments = arguments._replace(scale=scale)
        in_place = columns is Columns.CHANNELS or site.dim is not None or not site.has_rows
        rows: dict[str, Any] = {
            name: maker.make(torch.ops.aten.contiguous.default, (operand,))
            for name in (() if in_place else ("input", "residual"))
            if (operand := getattr(arguments, name)) is not None
            and columns_of(operand, site) is not Columns.TOGETHER
        }
        for name in ("weight", "bias") if site.dim is not None else ():
            if (parameter := getattr(arguments, name)) is not None:
                rows[name] = maker.make(torch.ops.aten.reshape.default, (parameter, [-1]))
        order = _order(site)
        if order is not None:
            input = rows.get("input", arguments.input)
            rows["input"] = maker.make(torch.ops.aten.permute.default, (input, order))
        arguments = arguments._replace(**rows)
        node = maker.make(fused, site.lay_out(arguments))
        outputs = [site.as_read(node, maker)]
        if order is not None:
            back = [order.index(i) for i in range(len(order))]
            outputs = [maker.make(torch.ops.aten.permute.default, (node, back))]
        if site.residual_out is not None:
            outputs = [maker.make(operator.getitem, (node, i)) for i in range(2)]
        dtypes = [arguments.out_dtype, *map(dtype_of, olds[1:])]
        for old, output, dtype in zip(olds, outputs, dtypes, strict=True):
            check_alike(old, output, dtype)
    # The old examples are kept: they share memory with those of views that stay in the graph.
    values = [value_of(old) for old in olds]
    if replacement.narrowed is not None or not _have_same_strides(site.y, outputs[0]):
        values[0] = value_of(outputs[0])
    if order is None and site.has_rows:
        maker.set_example(node, values[0] if site.residual_out is None else tuple(values))
    for old, output, value in zip(olds, outputs, values, strict=True):
        maker.set_example(output, value)
        old.replace_all_uses_with(output)
    for old in olds:
        erase(old, graph)
    for moved in () if replacement.narrowed is None else replacement.narrowed.moved:
        maker.set_example(moved, example_of(moved))


def _order(site: Site) -> list[int] | None:
    """The order in which an operator of rows takes the dimensions; None if it is theirs.

    One normalized dimension comes last. Otherwise it is the order of the result in memory.

    A written-out norm of heads (B, H, S, D) that are a view of (B, S, H, D) gives its result in the
    view's strides, where the operator would give a contiguous one. It also reads that order without
    a copy. Symbolic strides are compared by their hints: `check_alike` finds a wrong order.
    """
    value = value_of(site.y)
    if site.dim is not None:
        return [*(i for i in range(value.dim()) if i != site.dim), site.dim]
    if site.residual is not None or site.is_modulated or not site.has_rows:
        return None
    leading = value.dim() - site.normalized_ndim
    # A size, or the number that a symbolic size had in the example; None if it had none.
    strides: list[Any] = [
        stride.node.hint if isinstance(stride, torch.SymInt) else stride
        for stride in value.stride()[:leading]
    ]
    if None in strides:
        return None
    counted = [i for i in range(leading) if not are_equal([value.shape[i]], [1])]
    if counted == sorted(counted, key=lambda i: -strides[i]):
        return None
    return [*sorted(range(leading), key=lambda i: -strides[i]), *range(leading, value.dim())]


# The kernels of a norm alone read channels where they lie, unless a block cannot hold a sector of
# each in backward. Few pixels with many of them stay with Inductor: some such images are copied
# (`favors_copies` in csrc/channels/tuning.h), and of the others nobody measured both.
_FEW_PIXELS, _MANY_CHANNELS, _MOST_CHANNELS = load.operators._limit("few_pixels"), 128, 2048


def columns_of(operand: Any, site: Site) -> Columns:
    """How the elements lie that are normalized together, as far as it is known without a guard."""
    value = value_of(operand)
    order = list(range(value.dim())) if site.dim is None else _order(site) or []
    sizes, strides = ([given[i] for i in order] for given in (value.shape, value.stride()))
    first = len(order) - site.normalized_ndim
    if is_run(sizes[first:], strides[first:], 1):
        return Columns.TOGETHER
    samples, pixels = first, 1
    while samples and are_equal([strides[samples - 1]], [pixels]):
        samples -= 1
        pixels *= sizes[samples]
    channels = math.prod(sizes[first:])
    are_planes = (
        not (site.residual is not None or site.is_modulated)
        and is_run(sizes[first:], strides[first:], pixels)
        and (not samples or is_run(sizes[:samples], strides[:samples], strides[samples - 1]))
        and statically_known_true(channels <= _MOST_CHANNELS)
        and (
            statically_known_true(channels <= _MANY_CHANNELS)
            or not statically_known_true(pixels < _FEW_PIXELS)
        )
    )
    return Columns.CHANNELS if are_planes else Columns.APART


def is_run(sizes: list[Any], strides: list[Any], step: Any) -> bool:
    """Whether dimensions are known to lie as one whose elements are `step` apart."""
    expected = [step]
    for size in sizes[:0:-1]:
        expected.insert(0, expected[0] * size)
    return are_equal(strides, expected)


def check_alike(old: Node, new: Node, dtype: Any) -> None:
    """Raises NotFused unless the new node gives a tensor like the old one's, but of this dtype."""
    one, other = value_of(old), value_of(new)
    if other.dtype != dtype:
        raise NotFused(f"{old.name} is of dtype {dtype}, not {other.dtype}")
    if one.device != other.device:
        raise NotFused(f"{old.name} is of device {one.device}, not {other.device}")
    if not are_equal(one.shape, other.shape):
        raise NotFused(f"the shape is not known to be that of {old.name}")
    if not _have_same_strides(old, new):
        raise NotFused(f"{old.name} is not contiguous")


def _have_same_strides(one: Node, other: Node) -> bool:
    """As far as it is known; the stride of a dimension of one element does not matter."""
    tensors = value_of(one), value_of(other)
    counted = [i for i, size in enumerate(tensors[0].shape) if not are_equal([size], [1])]
    return are_equal(*([tensor.stride(i) for i in counted] for tensor in tensors))


def erase(node: Node, graph: Graph) -> None:
    """Erases an unused node, and its inputs that are unused then, as far as `read` knows them."""
    if node._erased or node.users or read(node) is None:
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for input in inputs:
        erase(input, graph)
