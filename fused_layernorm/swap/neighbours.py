# SPDX-License-Identifier: Apache-2.0
"""swap_norms(model, neighbours=True): the activation behind a norm is applied by the norm's kernel.

The blocks of diffusers' UNets and VAEs, and of models like them, call a norm and then an
activation. In the forward of a swapped module (rewrite.py) the two are one call of `_activated`,
or, where numbers of channels modulate the norm's result in between, of `_modulated`. Which norms
and activations these are is seen at each call: other ones, ones with hooks and all on a device
without kernels are called as the source says. A module is swapped if it has such a pair.
An nn.Sequential, or a class that has its forward, is swapped where a norm stands before an
activation.

A kernel rounds once, where the library rounds after each operation.
"""

from __future__ import annotations

import ast
import copy
import inspect
import itertools
import re
import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from .. import stock
from ..groups import (
    KEEPS_CHANNELS_LAST,
    FusedGroupNorm,
    as_pytorch_reads,
    group_norm,
    has_one_value,
)
from ..modules import is_bare
from . import channels, groups, rms, source
from .activations import activation_of
from .classes import Forward, Known, is_as_read, is_fused, kind_of, must_be_called
from .rewrite import (
    Fill,
    Rewriter,
    Rules,
    Template,
    attribute_of_self,
    names_in,
    subclass,
    target_of,
)
from .source import Part

KIND = "activation"  # of the swapped classes
Planned = Mapping[nn.Module, type[nn.Module]]  # the classes that a swap will give

# ---- What a swapped forward calls.


def _activated(self: Any, act: Any, norm: Any, x: Any, *rest: Any) -> Any:
    """act(norm(x, *rest))"""
    activation = _fused_activation(self, act, norm, x)
    if activation is not None:
        y = _of_norm(self, norm, activation, x, *rest)
        if y is not None:
            return y
    return act(norm(x, *rest))


def _modulated(self: Any, act: Any, norm: Any, x: Any, scale: Any, shift: Any) -> Any:
    """act(norm(x) * (1 + scale) + shift)"""
    activation = _fused_activation(self, act, norm, x)
    if activation is not None and _is_plain_group_norm(norm) and _takes(norm, x):
        x, parameters = _in_order(self, x), (norm.weight, norm.bias, norm.eps)
        y = groups.modulated(x, norm.num_groups, *parameters, scale, shift, activation)
        if y is not None:
            return y
    return act(norm(x) * (1 + scale) + shift)


def _fused_activation(self: Any, act: Any, norm: Any, x: Any) -> str | None:
    """The activation's name, if norm and activation may be one call of a kernel."""
    if not stock.has_kernels(x) or not isinstance(norm, nn.Module) or must_be_called(norm):
        return None
    cls: Any = type(norm)
    if hasattr(cls, "_parts") and not is_as_read(cls):
        return None
    return activation_of(act) if is_as_read(type(self)) else None


def _takes(norm: Any, x: Tensor) -> bool:
    is_stock = nn.GroupNorm.forward is stock.GROUP_NORM_FORWARD
    is_stock = is_stock and F.group_norm is stock.group_norm
    supported = stock.norm_is_supported(x, norm.weight, norm.bias, norm.eps)
    is_known = is_stock and x.dim() > 1 and supported
    return is_known and not has_one_value(x, norm.num_groups)


def _is_plain_group_norm(norm: Any) -> bool:
    cls: Any = type(norm)
    return cls.forward is FusedGroupNorm.forward and is_bare(norm)


def _of_norm(self: Any, norm: Any, activation: str, x: Tensor, *rest: Any) -> Tensor | None:
    if _is_plain_group_norm(norm):
        if rest or not _takes(norm, x):
            return None
        parameters = (norm.weight, norm.bias, norm.eps)
        y: Tensor = group_norm(
            _in_order(self, x), norm.num_groups, *parameters, activation=activation
        )
        return y
    known = getattr(type(norm), "_known", None)
    if known is None or not stock.are_supported(x, *rest, *norm._parameters.values()):
        return None
    if known.forward in ACTIVATED:
        return known.forward(norm, x, *rest, activation=activation)
    norm_of = None if rest else rms.NORMS.get(known.forward)
    found = None if norm_of is None else norm_of(norm)
    return None if found is None else rms.normalized(x, *found, activation=activation)


# The forwards, of the tables of norms, that apply an activation too.
ACTIVATED: set[Forward] = {
    *(groups.instance_norm, groups.of_group_norm, groups.timm),
    *(groups.ada, groups.kandinsky3, groups.cosmos),
    *(channels.wan, channels.kandinsky6, channels.per_channel),
}


def _in_order(self: Any, x: Tensor) -> Tensor:
    """x, in the order of memory in which the result may lie.

    Where PyTorch's group_norm would make a channels_last tensor contiguous, it may stay if the
    module's convolutions have weights of channels_last: they give the same strides from both.
    """
    if x.is_contiguous() or not x.is_cuda or KEEPS_CHANNELS_LAST:
        return as_pytorch_reads(x)
    order = suggest_memory_format(x)
    if order is torch.contiguous_format or not x.is_contiguous(memory_format=order):
        return as_pytorch_reads(x)
    weights = [one.weight for one in self.children() if isinstance(one, _ConvNd)]
    if isinstance(self, nn.Sequential) or not weights:
        return as_pytorch_reads(x)
    keeps = all(w.dim() < 4 or w.is_contiguous(memory_format=order) for w in weights)
    return x if keeps else as_pytorch_reads(x)


# ---- Sequences.


def _in_sequence(self: Any, input: Any) -> Any:
    modules = [*self._modules.values()]
    i = 0
    while i < len(modules):
        module = modules[i]
        if i + 1 < len(modules) and is_pair(module, modules[i + 1]):
            input = _activated(self, modules[i + 1], module, input)
            i += 2
        else:
            input = module(input)
            i += 1
    return input


def is_pair(norm: Any, act: Any, cls: Any = None) -> bool:
    """Whether these are a norm, which has this class or will have it, and an activation that a
    kernel computes together."""
    cls = cls or type(norm)
    if not isinstance(norm, nn.Module) or activation_of(act) is None or must_be_called(norm):
        return False
    if cls.forward is FusedGroupNorm.forward and (cls is not type(norm) or is_bare(norm)):
        return True
    known = getattr(cls, "_known", None)
    return known is not None and (known.forward in ACTIVATED or known.forward in rms.NORMS)


# ---- Their source.

_NORM = re.compile(r"norm", re.IGNORECASE)
_ACT = re.compile(r"act|non_?linear|silu|relu|gelu|swish", re.IGNORECASE)
_FUNCTIONS = re.compile(r"silu|(leaky_)?relu|gelu")


def _is_activation(node: Any) -> bool:
    """Whether what a call calls is by its name an activation."""
    if name := attribute_of_self(node):
        return _ACT.search(name) is not None
    last = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return _FUNCTIONS.fullmatch(last) is not None


def _is_name(node: Any) -> bool:
    return isinstance(node, ast.Name)


_PAIR: Rules = {
    "NORM": lambda node: _NORM.search(attribute_of_self(node)) is not None,
    "ACT": _is_activation,
    **dict.fromkeys(("NAME", "SCALE", "SHIFT"), _is_name),
}
_PAIRS = (  # an elementwise operation changes places with movedim
    Template("ACT(NORM(*X))", "self._activated(ACT, NORM, *X)"),
    Template("ACT(NORM(*X).movedim(-1, 1))", "self._activated(ACT, NORM, *X).movedim(-1, 1)"),
    Template(
        "ACT(NORM(X) * (1 + SCALE) + SHIFT)", "self._modulated(ACT, NORM, X, SCALE, SHIFT)"
    ),
)  # fmt: skip
_OF_NORMS = Template("NORM(*X)"), Template("NORM(*X).movedim(-1, 1)")
_OF_ACTIVATION, _OF_MODULATION = Template("ACT(NAME)"), Template("NAME * (1 + SCALE) + SHIFT")


def _is(statement: Any, name: str, *templates: Template) -> bool:
    """Whether a statement gives the name a value of one of these; NAME is the name itself."""
    if target_of(statement) != name:
        return False
    for template in templates:
        bound = template.match(statement.value, _PAIR)
        if bound is not None and ("NAME" not in bound or bound["NAME"].id == name):
            return True
    return False


class _Activations(Rewriter):
    """Also finds a norm and its activation in statements that follow each other."""

    def __init__(self) -> None:
        super().__init__(_PAIR, *_PAIRS)

    def visit(self, node: Any) -> Any:
        for field in ("body", "orelse", "finalbody"):
            if isinstance(statements := getattr(node, field, None), list):
                setattr(node, field, self._joined(statements))
        return super().visit(node)

    def _joined(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        statements = [*statements]
        for i in range(len(statements) - 1, 0, -1):
            if i < len(statements):  # a push takes up to two away
                _push(statements, i)
        joined: list[ast.stmt] = []
        while statements:
            first: Any = statements.pop(0)
            for count in range(1, 1 + min(2, len(statements))):
                value = _inlined(first, statements[:count])
                if value is not None and any(one.match(value, _PAIR) for one in _PAIRS):
                    first.value = value
                    del statements[:count]
                    break
            joined.append(first)
        return joined


def _inlined(first: Any, following: Iterable[Any]) -> Any:
    """The value of statements that all assign to one name, of which each uses it once."""
    name = target_of(first)
    if name is None:
        return None
    value = first.value
    for statement in following:
        names = [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]
        if target_of(statement) != name or names.count(name) != 2:
            return None
        value = Fill({name: value}).visit(copy.deepcopy(statement.value))
    return value


def _push(statements: list[Any], i: int) -> None:
    """Moves the activation at i into the branches of the `if` before it, where a norm waits,
    and with it a norm that stands before a condition of plain names."""
    name, before = target_of(statements[i]), statements[i - 1]
    if name is None or not _is(statements[i], name, _OF_ACTIVATION):
        return
    if not isinstance(before, ast.If):
        return
    first = statements[i - 2] if i > 1 else None
    if _ends_in_norm(before.body, name) or _ends_in_norm(before.orelse, name):
        first = None
    elif not _is(first, name, *_OF_NORMS) or not _is_plain_test(before.test, name):
        return
    act = statements.pop(i)
    if first is not None:
        statements.pop(i - 2)
    for field in ("body", "orelse"):
        branch = [] if first is None else [copy.deepcopy(first)]
        setattr(before, field, [*branch, *getattr(before, field), copy.deepcopy(act)])


def _ends_in_norm(branch: list[ast.stmt], name: str) -> bool:
    if not branch:
        return False
    *before, last = branch
    if isinstance(last, ast.If):
        return _ends_in_norm(last.body, name) or _ends_in_norm(last.orelse, name)
    if before and _is(last, name, _OF_MODULATION):
        last = before[-1]
    return _is(last, name, *_OF_NORMS)


def _is_plain_test(test: ast.expr, name: str) -> bool:
    """Whether it makes no difference if the condition is asked before the norm is called."""
    plain = (ast.Name, ast.Attribute, ast.Constant, ast.Compare, ast.Is, ast.IsNot, ast.Load)
    return all(
        isinstance(node, plain) and getattr(node, "id", "") != name for node in ast.walk(test)
    )


def class_of(cls: type[nn.Module]) -> type[nn.Module] | str | None:
    """The subclass that applies activations by the norms' kernels; None where there are none."""
    if issubclass(cls, nn.Sequential) and cls.__iter__ is nn.Sequential.__iter__:
        if cls.forward is not _SEQUENTIAL_FORWARD:
            return None
        forward, known = _in_sequence, Known(KIND, _in_sequence)
        return subclass(cls, known, (Part(cls, "forward", cls.forward),), forward, class_of)
    outer = getattr(cls, "forward", None)  # that of a compiled class raises
    names = names_in(outer)
    if not (any(map(_NORM.search, names)) and any(map(_ACT.search, names))):
        return None
    try:
        made, rewriter = source.decorated(outer), _Activations()
        tree = rewriter.visit(made.tree)
        if not rewriter.found:
            return None
        forward = source.rebuilt(made, tree)
    except source.Unreadable as error:
        return str(error)
    pairs = {(bound["NORM"].attr, ast.unparse(bound["ACT"])) for bound in rewriter.found}
    return subclass(
        cls,
        Known(KIND, _activated),
        (Part(cls, "forward", outer),),
        forward,
        class_of,
        _activated=_activated,
        _modulated=_modulated,
        _pairs=frozenset(pairs),
        _globals=made.function.__globals__,
    )


_SEQUENTIAL_FORWARD = stock.own_forward(nn.Sequential)


def has_pair(module: nn.Module, made: Any, planned: Mapping[nn.Module, type[nn.Module]]) -> bool:
    """Whether a kernel will compute a norm of the module with the activation behind it, once the
    planned classes are given.

    Where there is a reason in the place of a class, whether it belongs in the log.
    """

    def is_known(one: nn.Module) -> bool:
        return one in planned or is_fused(one)

    if isinstance(made, str):
        children = filter(is_known, module.children())
        return any(kind_of(planned.get(one, type(one))) == "group" for one in children)
    if made._known.forward is _in_sequence:
        return any(
            norm is not None and is_pair(norm, act, planned.get(norm))
            for norm, act in itertools.pairwise(module._modules.values())
        )
    for name, act in made._pairs:
        norm, is_own = module._modules.get(name), act.startswith("self.")
        if norm is not None and is_known(norm):
            found = _attribute(module if is_own else made._globals, act.removeprefix("self."))
            if is_pair(norm, found, planned.get(norm)):
                return True
    return False


def _attribute(owner: Any, names: str) -> Any:
    """What stands under these names in a module or in globals, without running anything."""
    for name in names.split("."):
        if isinstance(owner, nn.Module):
            own = {**vars(owner), **owner._modules}
            owner = own.get(name, inspect.getattr_static(type(owner), name, None))
            owner = owner.__func__ if isinstance(owner, staticmethod) else owner
        elif isinstance(owner, dict):
            owner = owner.get(name)
        else:
            owner = vars(owner).get(name) if isinstance(owner, types.ModuleType) else None
    return owner
