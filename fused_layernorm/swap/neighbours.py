# SPDX-License-Identifier: Apache-2.0
"""swap_norms(model, neighbours=True): the activation behind a norm is applied by the norm's kernel.

The blocks of diffusers' UNets and VAEs, and of models like them, call a norm and then an
activation. In the forward of a swapped module (rewritten.py) the two are one call of `_activated`,
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
from collections.abc import Iterator, Mapping
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
from . import channels, groups, rewritten, rms, source
from .activations import activation_of
from .classes import Forward, Known, must_be_called
from .registry import is_fused, kind_of_class
from .rewritten import are_as_read, attribute_of_self, before, method_of_self
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
    if hasattr(cls, "_parts") and not are_as_read(cls):
        return None
    return activation_of(act) if are_as_read(type(self)) else None


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


_SEQUENTIAL_FORWARD = stock.own_forward(nn.Sequential)

# ---- Forwards.

_NORM = re.compile(r"norm", re.IGNORECASE)
_ACT = re.compile(r"act|non_?linear|silu|relu|gelu|swish", re.IGNORECASE)
_MOVED = ".movedim(-1, 1)"  # an elementwise operation changes places with it
_FUNCTION = re.compile(r"silu|(leaky_)?relu|gelu")

Pairs = set[tuple[str, str]]  # the norm's attribute, and the activation as the source says it


def _norm_call(node: Any) -> str | None:
    """norm1, for a call of self.norm1 on positional arguments."""
    if isinstance(node, ast.Call) and node.args and not node.keywords:
        name = attribute_of_self(node.func)
        if name and _NORM.search(name) and not any(isinstance(a, ast.Starred) for a in node.args):
            return name
    return None


def _activation_of(node: Any) -> ast.expr | None:
    """What a call on one argument calls, if by its name it is an activation."""
    if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
        return None
    name = attribute_of_self(node.func)
    if name is not None:
        return node.func if _ACT.search(name) else None
    is_function = _FUNCTION.fullmatch(ast.unparse(node.func).rpartition(".")[2])
    return node.func if is_function and not isinstance(node.func, ast.Call) else None


def _target(statement: Any) -> str | None:
    """The name that a statement assigns to, if it does nothing else."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        return target.id if isinstance(target, ast.Name) else None
    return None


def _is_norm(statement: Any, name: str) -> bool:
    return _target(statement) == name and _norm_call(before(_MOVED, statement.value)) is not None


def _is_activation(statement: Any) -> str | None:
    """x, for `x = act(x)`."""
    name = _target(statement)
    if name is None or _activation_of(statement.value) is None:
        return None
    return name if ast.unparse(statement.value.args[0]) == name else None


def _modulation(statement: Any, name: str) -> tuple[ast.expr, ast.expr] | None:
    """scale and shift, for `x = x * (1 + scale) + shift` of two names."""
    if _target(statement) != name:
        return None
    found = re.fullmatch(rf"{name} \* \(1 \+ (\w+)\) \+ (\w+)", ast.unparse(statement.value))
    if found is None or name in found.groups():
        return None
    scale, shift = (ast.Name(one, ast.Load()) for one in found.groups())
    return scale, shift


class _Rewrite:
    """Replaces the norms and activations of a forward, and notes which."""

    def __init__(self) -> None:
        self.pairs: Pairs = set()

    def block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        statements = [*statements]
        for i in range(len(statements) - 1, 0, -1):
            if i < len(statements):  # a push takes up to two away
                self._push(statements, i)
        found: list[ast.stmt] = []
        while statements:
            statement = statements.pop(0)
            taken = self._fused(statement, statements)
            del statements[:taken]
            for field in ("body", "orelse", "finalbody"):
                inner = getattr(statement, field, None)
                if isinstance(inner, list) and inner:
                    setattr(statement, field, self.block(inner))
            found.append(statement)
        return found

    def _push(self, statements: list[ast.stmt], i: int) -> None:
        """Moves the activation at i into the branches of the `if` before it, where a norm waits,
        and with it a norm that stands before a condition of plain names."""
        name, before = _is_activation(statements[i]), statements[i - 1]
        if name is None or not isinstance(before, ast.If):
            return
        first = statements[i - 2] if i > 1 else None
        if _ends_in_norm(before.body, name) or _ends_in_norm(before.orelse, name):
            first = None
        elif first is None or not _is_norm(first, name) or not _is_plain_test(before.test, name):
            return
        act = statements.pop(i)
        if first is not None:
            statements.pop(i - 2)
        for field in ("body", "orelse"):
            branch = [] if first is None else [copy.deepcopy(first)]
            setattr(before, field, [*branch, *getattr(before, field), copy.deepcopy(act)])

    def _fused(self, statement: ast.stmt, following: list[ast.stmt]) -> int:
        """Fuses a statement with those behind it, and returns how many of these it has taken."""
        for node in _expressions(statement):
            function = _activation_of(node)
            if function is not None and _norm_call(node.args[0]) is not None:
                self._call(node.args[0], function, node)
        name = _target(statement)
        if name is None or not _is_norm(statement, name) or not following:
            return 0
        assert isinstance(statement, ast.Assign)
        call, numbers = before(_MOVED, statement.value), _modulation(following[0], name)
        behind = 1 if numbers is None or call is not statement.value else 2
        if len(following) < behind or _is_activation(following[behind - 1]) != name:
            return 0
        if behind == 2 and len(call.args) != 1:
            return 0
        function = _activation_of(following[behind - 1].value)  # type: ignore[attr-defined]
        assert function is not None
        self._call(call, function, call, () if behind == 1 else numbers or ())
        return behind

    def _call(self, norm: Any, act: ast.expr, into: Any, numbers: Any = ()) -> None:
        self.pairs.add((norm.func.attr, ast.unparse(act)))
        name = "_modulated" if numbers else "_activated"
        arguments = [act, norm.func, *norm.args, *numbers]
        into.func = method_of_self(name)
        into.args = [ast.copy_location(one, into) for one in arguments]


def _expressions(statement: ast.stmt) -> Iterator[Any]:
    """The calls of a statement, without those of statements inside it."""
    pending: list[ast.AST] = [statement]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Call):
            yield node
        pending += [
            one for one in ast.iter_child_nodes(node) if not isinstance(one, (ast.stmt, ast.Lambda))
        ]


def _ends_in_norm(branch: list[ast.stmt], name: str) -> bool:
    if not branch:
        return False
    *before, last = branch
    if isinstance(last, ast.If):
        return _ends_in_norm(last.body, name) or _ends_in_norm(last.orelse, name)
    if before and _modulation(last, name) is not None:
        last = before[-1]
    return _is_norm(last, name)


def _is_plain_test(test: ast.expr, name: str) -> bool:
    """Whether it makes no difference if the condition is asked before the norm is called."""
    plain = (ast.Name, ast.Attribute, ast.Constant, ast.Compare, ast.Is, ast.IsNot, ast.Load)
    nodes = [*ast.walk(test)]
    return all(isinstance(node, plain) and getattr(node, "id", "") != name for node in nodes)


def class_of(cls: type[nn.Module]) -> type[nn.Module] | str | None:
    """The subclass that applies activations by the norms' kernels; None where there are none."""
    if issubclass(cls, nn.Sequential) and cls.__iter__ is nn.Sequential.__iter__:
        if cls.forward is not _SEQUENTIAL_FORWARD:
            return None
        parts = (Part(cls, "forward", cls.forward),)
        return rewritten.subclass(cls, Known(KIND, _in_sequence), parts, _in_sequence, class_of)
    outer = getattr(cls, "forward", None)  # that of a compiled class raises
    names = rewritten.names_in(outer)
    if not (any(map(_NORM.search, names)) and any(map(_ACT.search, names))):
        return None
    try:
        made = source.decorated(outer)
        tree, rewrite = made.tree, _Rewrite()
        tree.body = rewrite.block(tree.body)
        if not rewrite.pairs:
            return None
        forward = source.rebuilt(made, tree)
    except source.Unreadable as error:
        return str(error)
    return rewritten.subclass(
        cls,
        Known(KIND, _activated),
        (Part(cls, "forward", outer),),
        forward,
        class_of,
        _activated=_activated,
        _modulated=_modulated,
        _pairs=frozenset(rewrite.pairs),
        _globals=made.function.__globals__,
    )


def has_pair(module: nn.Module, made: Any, planned: Planned) -> bool:
    """Whether a kernel will compute a norm of the module with the activation behind it.

    Where there is a reason in the place of a class, whether it belongs in the log.
    """

    def kind(one: nn.Module) -> str:
        return kind_of_class(planned.get(one, type(one)))

    def is_known(one: nn.Module) -> bool:
        return one in planned or is_fused(one)

    if isinstance(made, str):
        return any(is_known(one) and kind(one) == "group" for one in module.children())
    if made._known.forward is _in_sequence:
        children = [*module._modules.values()]
        return any(
            is_pair(norm, act, planned.get(norm))
            for norm, act in itertools.pairwise(children)
            if norm is not None
        )
    for name, act in made._pairs:
        norm, is_own = module._modules.get(name), act.startswith("self.")
        of, found = (module, act[5:]) if is_own else (made._globals, act)
        if norm is None or not is_known(norm):
            continue
        if is_pair(norm, _attribute(of, found), planned.get(norm)):
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
