# SPDX-License-Identifier: Apache-2.0
"""Whether a site may become one operator, and the replacement. Neither adds a guard."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import maybe_get_fake_mode
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from ..ops.arguments import DTYPES, HALF, name_of
from ..ops.formulas import fields_of
from ..ops.operators import Arguments, describe, values
from .effects import Effects
from .reading import before_casts, dtype_of, is_tensor, name_of_target, read, spellings, value_of
from .sites import Site, are_equal, is_contiguous

_KEPT = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom", "seq_nr")


class NotFused(Exception):
    """Why a site stays as it is."""


class Replacement(NamedTuple):
    """A checked site: what to call, with what, and where."""

    site: Site
    arguments: Arguments  # nodes where the operator takes tensors
    before: Node  # which the call stands
    narrowed: Narrowed | None  # how the kernel rounds in autocast's place, if it does


def check(site: Site, effects: Effects, functional: bool) -> Replacement:
    """The replacement of a site; raises NotFused where the operator would not take the operands, or
    the graph writes into a tensor or changes a mode between the nodes.

    functional: whether the graph is freed of writes before it is differentiated, as by AOTAutograd.
    """
    _, in_transform = effects.regions[site.norm]
    if in_transform:
        raise NotFused("it is inside a torch.func transform")
    for node in site.nodes:
        value = value_of(node)
        if isinstance(value, Tensor) and value.dtype not in DTYPES:
            raise NotFused(f"{node.name} is of {name_of(value.dtype)}")
    narrowed = None if effects.writers(site.y) else _narrowed(site.y)
    arguments = _arguments(site, dtype_of(site.y) if narrowed is None else narrowed.dtype)
    operands = _nodes(values(arguments))
    if not site.nodes.isdisjoint(operands):
        raise NotFused("an operand is what the operator would replace")
    is_activated = site.activation is not None or site.factor != 1.0
    if arguments.is_modulated and is_activated and not site.of_groups:
        raise NotFused("no operator has both a gate and an activation")
    before = _place(site, operands)
    _check_effects(site, arguments, effects, functional)
    return Replacement(site, arguments, before, narrowed)


def _arguments(site: Site, out_dtype: torch.dtype) -> Arguments:
    """The operator's arguments, taken from before the casts that the operator does not need."""
    found: dict[str, Any] = {"input": _chain(site.input)[-1], "residual": site.residual}
    dtypes = {dtype_of(value) for value in found.values() if value is not None}
    if dtypes & set(HALF):
        dtypes.add(torch.float32)
    found["weight"], found["bias"] = _of_one_dtype(site.weight, site.bias, dtypes)
    for name in ("gate", "shift", "scale"):
        value = getattr(site, name)
        fitting = [v for v in _chain(value) if dtype_of(v) in dtypes]
        if value is not None and not fitting:
            beside = " and ".join(sorted(map(name_of, dtypes)))
            raise NotFused(f"{name} is of {name_of(dtype_of(value))}, beside {beside}")
        found[name] = fitting[-1] if fitting else None
    rounded = None if found["weight"] is None else site.rounded
    dtype = dtype_of(found["input"])
    if rounded not in (None, dtype):
        raise NotFused(
            f"the norm is rounded to {name_of(rounded)} before its weight, "
            f"beside an input of {name_of(dtype)}"
        )
    options = ("normalized_ndim", "eps", "activation", "statistic", "weight_offset")
    found |= {name: getattr(site, name) for name in options}
    rounds = rounded is not None
    return describe(**found, output_scale=site.factor, out_dtype=out_dtype,
                    round_before_weight=rounds)  # fmt: skip


def _chain(value: Node | None) -> list[Any]:
    """The value, and the values that it was widened from."""
    return [] if value is None else before_casts(value, only_widening=True)


def _of_one_dtype(weight: Any, bias: Any, dtypes: set[torch.dtype]) -> tuple[Any, Any]:
    for w, b in itertools.product(_chain(weight)[::-1] or [None], _chain(bias)[::-1] or [None]):
        found = {dtype_of(p) for p in (w, b) if p is not None}
        if len(found) <= 1 and found <= dtypes:
            return w, b
    raise NotFused("weight and bias are not of one dtype that the kernels take beside input's")


def _nodes(values: Iterable[Any]) -> list[Node]:
    return [node for node in values if isinstance(node, Node)]


def _place(site: Site, operands: list[Node]) -> Node:
    """The node before which the operator is to stand: the last one or, of an operator that also
    gives the sum, which may be used elsewhere, one as early as its operands allow."""
    total = site.residual_out
    if total is None:
        return site.y
    after = max([total, *operands])
    if site.y < after:
        raise NotFused(f"{after.name} comes after the norm")
    gone: set[Node] = set()  # what the operator leaves without a user
    for node in sorted(site.nodes, reverse=True):
        if node in (site.y, total) or gone.issuperset(node.users):
            gone.add(node)
    for user in total.users:
        if user not in gone and user <= after:
            raise NotFused(f"{user.name} uses the sum before {after.name} is there")
    return after.next


def _check_effects(site: Site, arguments: Arguments, effects: Effects, functional: bool) -> None:
    """Raises NotFused if something changes between what is computed and where the operator does.

    Without Inductor nothing may write either, later, into what only the operator's backward reads.
    """
    reads = set(site.nodes)  # what reads in the operator's place: casts of its operands do, too
    for name, value in site.operands.items():
        chain = _chain(value)
        reads.update(chain[: chain.index(getattr(arguments, name))])
    if len({effects.regions[node] for node in reads}) > 1:
        raise NotFused("autocast or the gradient mode changes in between")
    a, start, end, total = arguments, min(reads), site.y, site.residual_out
    x = a.input if total is None else total
    saved: list[Any] = [a.gate, a.shift, a.scale, a.weight, a.bias, a.gate and a.input]
    saved.append(None if x is site.saved else x)
    for nodes, begin, last, what in (
        (_nodes(values(a)), start, end, "an operand in between"),
        (_nodes([total]), total or start, end, "the sum before it is normalized"),
        (reads - {end, total}, start, end, "what is computed in between"),
        ([] if functional else _nodes(saved), start, None, "what backward reads"),
    ):
        node = effects.write_between(nodes, begin, last)
        if node is not None:
            raise NotFused(f"{node.name} writes into {what}")


# ---- Results that autocast casts to half precision wherever they are used. A graph has no node for
# ---- such a cast, but a matrix product or a convolution that returns half precision from float32.
# ---- Where these alone read a norm's result, perhaps in another layout, the kernel may round it:
# ---- the numbers are the same, and half as many bytes are written and read, in backward too.

# What autocast runs in half precision.
_CASTING = {
    *spellings("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm"),
    *spellings("conv1d", "conv2d", "conv3d", "scaled_dot_product_attention"),
}
# What returns, as views do, the elements of its first argument in another layout; pads count only
# if they add nothing but zeros.
_PADS = {*spellings("pad")}
_MOVING = {*spellings("getitem", "movedim", "contiguous", "clone", "roll"), *_PADS}


class Narrowed(NamedTuple):
    """The dtype to round a result to, and the nodes that change its layout before it is cast."""

    dtype: torch.dtype
    moved: tuple[Node, ...]  # in the order of the graph


def _narrowed(y: Node) -> Narrowed | None:
    """How the kernel may round the result y; None if something reads y in float32.

    The gradients of several readers are then summed in half precision. float16 lacks the range for
    that, so there only one reader is allowed.
    """
    if dtype_of(y) is not torch.float32:
        return None
    dtypes: list[torch.dtype] = []  # of the readers
    moved = [y]
    for node in moved:  # grows
        for user in node.users:
            if user.op not in ("call_function", "call_method") or not is_tensor(user):
                return None
            if user.target in _CASTING and dtype_of(user) in HALF:
                dtypes.append(dtype_of(user))
            elif not _is_moved(user, node):
                return None
            elif user not in moved:
                moved.append(user)
    if len(set(dtypes)) != 1 or (torch.float16 in dtypes and len(dtypes) > 1):
        return None
    return Narrowed(dtypes[0], tuple(sorted(moved[1:])))


def _is_moved(user: Node, node: Node) -> bool:
    """Whether user is the node's result in another layout."""
    call, given = read(user), [*user.args[1:], *user.kwargs.values()]
    return (
        (user.target in _MOVING or (call is not None and call.name == "view"))
        and user.args[:1] == (node,)
        and user.all_input_nodes == [node]
        # A view in another dtype shows the bytes, not the numbers.
        and not any(isinstance(value, torch.dtype) for value in given)
        and (user.target not in _PADS or all(v in ("constant", None, 0) for v in given[1:]))
    )


# ---- The replacement -----------------------------------------------------------------------------


@contextlib.contextmanager
def making(graph: Graph, before: Node, beside: Node, effects: Effects) -> Iterator[Any]:
    """Gives what makes nodes before a node, in the modes of `beside`; an error erases them."""
    made: list[Node] = []

    def make(target: Any, args: Any, kwargs: Any = None, op: str = "call_function") -> Node:
        node = graph.create_node(op, target, args, kwargs or {})
        made.append(node)
        node.meta.update({key: value for key, value in beside.meta.items() if key in _KEPT})
        node.meta[_key_of(beside)] = example_of(node)
        effects.regions[node] = effects.regions[beside]
        return node

    try:
        with graph.inserting_before(before):
            yield make
    except Exception:
        while made:
            graph.erase_node(made.pop())
        raise


def _key_of(node: Node) -> str:
    """The key of a node's example in its metadata."""
    return "example_value" if "example_value" in node.meta else "val"


def example_of(node: Node, value_of: Callable[[Node], Any] = value_of) -> Any:
    """The node's result for the examples of its arguments; it adds no guard."""
    args, kwargs = map_arg(node.args, value_of), map_arg(node.kwargs, value_of)
    fake_mode = next(filter(None, map(maybe_get_fake_mode, tree_leaves((args, kwargs)))), None)
    shape_env = None if fake_mode is None else fake_mode.shape_env
    unguarded = contextlib.nullcontext() if shape_env is None else shape_env.suppress_guards()
    with torch.no_grad(), unguarded:
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]


def apply(replacement: Replacement, fused: OpOverload, graph: Graph, effects: Effects) -> None:
    """Replaces the site by the operator `fused`.

    Where an operator of rows with a residual or a modulation would copy rows in every call, the
    copy stands before it: the compiler may fuse it with what precedes it, and backward reuses it.

    Raises NotFused, and leaves the graph as it was, where a result would differ in dtype, device,
    shape or strides.
    """
    site, arguments = replacement.site, replacement.arguments
    olds = [site.y] if site.residual_out is None else [site.y, site.residual_out]
    with making(graph, replacement.before, site.norm, effects) as make:
        given: dict[str, Any] = dict(zip(arguments._fields, values(arguments), strict=True))
        for view in site.scale_views:
            args = (given["scale"], *view.args[1:])
            given["scale"] = make(view.target, args, view.kwargs, view.op)
        if not site.of_groups and (site.residual is not None or site.is_modulated):
            for name in ("input", "residual"):
                if given[name] is not None and is_apart(given[name], site):
                    given[name] = make(torch.ops.aten.contiguous.default, (given[name],))
        given["num_groups"] = site.num_groups
        node = make(fused, tuple(given[name] for name in fields_of(fused)))
        outputs = [node]
        if site.residual_out is not None:
            outputs = [make(operator.getitem, (node, i)) for i in range(2)]
        elif site.of_groups and not _users_do_not_mind(site.y, node):
            outputs = [make(torch.ops.aten.contiguous.default, (node,))]
        dtypes = [arguments.out_dtype, *map(dtype_of, olds[1:])]
        for old, output, dtype in zip(olds, outputs, dtypes, strict=True):
            _check_alike(old, output, dtype, site.of_groups)
    # The old examples are kept: they share memory with those of views that stay in the graph.
    examples = [value_of(old) for old in olds]
    if replacement.narrowed or not have_same_strides(examples[0], value_of(outputs[0])):
        examples[0] = value_of(outputs[0])
    key = _key_of(site.norm)
    if site.residual_out is not None:
        node.meta[key] = tuple(examples)
    for old, output, example in zip(olds, outputs, examples, strict=True):
        output.meta[key] = example
        old.replace_all_uses_with(output)
    for old in olds:
        erase(old, graph)
    for moved in replacement.narrowed.moved if replacement.narrowed else ():
        moved.meta[key] = example_of(moved)


def is_apart(operand: Any, site: Site) -> bool:
    """Whether it is not known, without a guard, that what is normalized together lies together."""
    return not is_contiguous(value_of(operand), value_of(operand).dim() - site.normalized_ndim)


def _check_alike(old: Node, new: Node, dtype: Any, of_groups: bool) -> None:
    """Raises NotFused unless the new node gives a tensor like the old one's, but of this dtype.

    The strides of groups need not be the same where nobody minds.
    """
    one, other = value_of(old), value_of(new)
    alike = {
        "dtype": other.dtype == dtype,
        "device": one.device == other.device,
        "shape": are_equal(one.shape, other.shape),
        "strides": of_groups or have_same_strides(one, other),
    }
    for what, is_same in alike.items():
        if not is_same:
            raise NotFused(f"the {what} would not be known to be that of {old.name}")


def have_same_strides(one: Tensor, other: Tensor) -> bool:
    """As far as it is known; the stride of a dimension of one element does not matter."""
    counted = [i for i, size in enumerate(one.shape) if not are_equal([size], [1])]
    return are_equal(*([tensor.stride(i) for i in counted] for tensor in (one, other)))


def _users_do_not_mind(old: Node, new: Node) -> bool:
    """Whether what reads the old node gives results of the same strides from the new one.

    A convolution with a channels_last weight does. PyTorch's group_norm gives a contiguous tensor
    from one of channels_last, which the convolution behind it would copy.
    """
    if have_same_strides(value_of(old), value_of(new)):
        return True
    for user in old.users:
        if "conv" not in name_of_target(user.target) or user.op != "call_function":
            return False
        found = example_of(user, lambda node: value_of(new if node is old else node))
        if not is_tensor(user) or not are_equal(found.stride(), value_of(user).stride()):
            return False
    return True


def erase(node: Node, graph: Graph) -> None:
    """Erases an unused node, and its inputs that are unused then, as far as `read` knows them."""
    if node._erased or node.users or read(node) is None:
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for input in inputs:
        erase(input, graph)
