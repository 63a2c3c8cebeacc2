# SPDX-License-Identifier: Apache-2.0
"""swap_norms(model, neighbours=True): the activation behind a norm is applied by the norm's kernel.

The blocks of diffusers' UNets and VAEs, and of models like them, call a norm and then an
activation. In the forward of a swapped module (rewrite.py) the two are one call of `_activated`,
or, where numbers of channels modulate the norm's result in between, of `_modulated`. Which norms
and activations these are is seen at each call: other ones, ones with hooks and all on a device
without kernels are called as the source says. A module is swapped if it has such a pair; so is an
nn.Sequential, or a class that has its forward, in which a norm stands before an activation.

A kernel rounds once, where the library rounds after each operation.
"""

from __future__ import annotations

import ast
import copy
import inspect
import itertools
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch.nn.modules.conv import _ConvNd

from .. import stock
from ..groups import KEEPS_CHANNELS_LAST, as_pytorch_reads
from . import classes, groups, rewrite, rms, source
from .classes import Known, forward_of, is_as_read, is_fused, must_be_called
from .groups import activation_of, is_plain_group_norm, takes_activation
from .rewrite import Rules, Template, attribute_of_self, target_of

Planned = dict[nn.Module, type[nn.Module]]  # the classes that a swap will give

# ---- What a swapped forward calls.


def _activated(self: Any, act: Any, norm: Any, x: Any, *rest: Any) -> Any:
    """act(norm(x, *rest))"""
    activation = _fused_activation(self, act, norm, x)
    y = None if activation is None else _of_norm(self, norm, activation, x, *rest)
    return act(norm(x, *rest)) if y is None else y


def _modulated(self: Any, act: Any, norm: Any, x: Any, scale: Any, shift: Any) -> Any:
    """act(norm(x) * (1 + scale) + shift)"""
    activation, y = _fused_activation(self, act, norm, x), None
    if activation is not None and is_plain_group_norm(norm) and stock.are_supported(x):
        of = (norm.num_groups, norm.weight, norm.bias, norm.eps)
        y = groups.modulated(_in_order(self, x), of, scale, shift, activation)
    return act(norm(x) * (1 + scale) + shift) if y is None else y


def _fused_activation(self: Any, act: Any, norm: Any, x: Any) -> str | None:
    """The activation's name, if norm and activation may be one call of a kernel."""
    if not stock.has_kernels(x) or not isinstance(norm, nn.Module) or must_be_called(norm):
        return None
    return activation_of(act) if is_fused(norm) and is_as_read(type(self)) else None


def _of_norm(self: Any, norm: Any, activation: str, x: Tensor, *rest: Any) -> Tensor | None:
    if is_plain_group_norm(norm) and not rest:
        return groups.of_group_norm(norm, x, activation, lambda x: _in_order(self, x))
    if not stock.are_supported(x, *rest, *norm._parameters.values()):
        return None
    forward = forward_of(type(norm))
    if forward is not None and takes_activation(forward):
        return forward(norm, x, *rest, activation=activation)
    found = None if rest else rms.norm_of(norm, x)
    return None if found is None else rms.normalized(x, *found, activation=activation)


def _in_order(self: Any, x: Tensor) -> Tensor:
    """x, in the order of memory in which the result may lie.

    Where PyTorch's group_norm would make a channels_last tensor contiguous, it may stay if the
    module's convolutions have weights of channels_last: they give the same strides from both.
    """
    if x.is_contiguous() or not x.is_cuda or KEEPS_CHANNELS_LAST or isinstance(self, nn.Sequential):
        return as_pytorch_reads(x)
    order = suggest_memory_format(x)
    weights = [one.weight for one in self.children() if isinstance(one, _ConvNd)]
    keeps = (
        order is not torch.contiguous_format
        and x.is_contiguous(memory_format=order)
        and weights
        and all(w.dim() < 4 or w.is_contiguous(memory_format=order) for w in weights)
    )
    return x if keeps else as_pytorch_reads(x)


# ---- Sequences.


def _in_sequence(self: Any, input: Any) -> Any:
    modules = [*self._modules.values()]
    while modules:
        module = modules.pop(0)
        if modules and activation_of(modules[0]) is not None:
            input = _activated(self, modules.pop(0), module, input)
        else:
            input = module(input)
    return input


def is_pair(norm: Any, act: Any, cls: Any = None) -> bool:
    """Whether these are a norm, which has this class or will have it, and an activation that a
    kernel computes together."""
    if not isinstance(norm, nn.Module) or activation_of(act) is None or must_be_called(norm):
        return False
    if is_plain_group_norm(norm, cls):
        return True
    forward = forward_of(cls or type(norm))
    return forward in rms.NORMS or (forward is not None and takes_activation(forward))


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


_RULES: Rules = {
    "NORM": lambda node: _NORM.search(attribute_of_self(node)),
    "ACT": _is_activation,
    **dict.fromkeys(("NAME", "SCALE", "SHIFT"), lambda node: isinstance(node, ast.Name)),
}
_PAIRS = (  # an elementwise operation changes places with movedim
    Template("ACT(NORM(*X))", "self._activated(ACT, NORM, *X)"),
    Template("ACT(NORM(*X).movedim(-1, 1))", "self._activated(ACT, NORM, *X).movedim(-1, 1)"),
    Template("ACT(NORM(X) * (1 + SCALE) + SHIFT)", "self._modulated(ACT, NORM, X, SCALE, SHIFT)"),
)
_OF_NORMS = Template("NORM(*X)"), Template("NORM(*X).movedim(-1, 1)")
_MODULATED = Template("NORM(*X) * (1 + SCALE) + SHIFT")
_OF_ACTIVATION = Template("ACT(NAME)")


def _is(statement: Any, name: str, *templates: Template) -> bool:
    """Whether a statement gives the name a value of one of these; NAME is the name itself."""
    found = (one.match(getattr(statement, "value", None), _RULES) for one in templates)
    names = (getattr(bound.get("NAME"), "id", name) for bound in found if bound is not None)
    return name != "" and target_of(statement) == name and name in names


def _join(tree: ast.AST) -> None:
    """Brings a norm and its activation, in statements that follow each other, into one of them."""
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            if isinstance(statements := getattr(node, field, None), list):
                for i in range(len(statements) - 1, 0, -1):
                    if i < len(statements):  # a push takes up to two away
                        _push(statements, i)
                uses = [*_PAIRS, _MODULATED]
                rewrite.postpone(statements, [*_OF_NORMS, _MODULATED], uses, _RULES)


def _push(statements: list[Any], i: int) -> None:
    """Moves the activation at i into the branches of the `if` before it, where a norm may wait,
    and with it a norm that stands before a condition of plain names."""
    name, before = target_of(statements[i]), statements[i - 1]
    if not isinstance(before, ast.If) or not _is(statements[i], name, _OF_ACTIVATION):
        return
    norm = statements[i - 2 : i - 1] if i > 1 else []
    moves = norm and _is(norm[0], name, *_OF_NORMS) and _is_plain(before.test, name)
    act, norm = statements.pop(i), norm if moves else []
    del statements[i - 1 - len(norm) : i - 1]
    for field in ("body", "orelse"):
        setattr(before, field, copy.deepcopy([*norm, *getattr(before, field), act]))


def _is_plain(test: ast.expr, name: str) -> bool:
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
        known, part = Known("activation", _in_sequence), source.Part(cls, "forward", cls.forward)
        return classes.made_class(cls, known, (part,), (class_of,), forward=_in_sequence)
    names = rewrite.names_in(cls)
    if not (any(map(_NORM.search, names)) and any(map(_ACT.search, names))):
        return None
    return rewrite.remade(cls, Known("activation", _activated), class_of, _remake)


_SEQUENTIAL_FORWARD = stock.own_forward(nn.Sequential)


def _remake(made: source.Decorated) -> Any:
    _join(made.tree)
    rewriter = rewrite.Rewriter(_RULES, *_PAIRS)
    tree = rewriter.visit(made.tree)
    if not rewriter.found:
        return None
    pairs = {(bound["NORM"].attr, ast.unparse(bound["ACT"])) for bound in rewriter.found}
    members = {"_activated": _activated, "_modulated": _modulated, "_pairs": frozenset(pairs)}
    members["_globals"] = made.function.__globals__
    return source.rebuilt(made, tree), (), members


def has_pair(module: nn.Module, made: Any, planned: Planned) -> bool:
    """Whether the module has a norm and activation for one kernel, once it has its planned class.

    Where there is a reason in the place of a class, whether it belongs in the log.
    """

    def is_known(one: Any) -> bool:
        return one is not None and (one in planned or is_fused(one))

    if isinstance(made, str):
        children = filter(is_known, module.children())
        return any(classes.kind_of(planned.get(one, type(one))) == "group" for one in children)
    if forward_of(made) is _in_sequence:
        pairs: Any = itertools.pairwise(module._modules.values())
    else:
        names, parts = made._globals, module._modules
        pairs = ((parts.get(norm), _found(module, names, act)) for norm, act in made._pairs)
    return any(is_known(norm) and is_pair(norm, act, planned.get(norm)) for norm, act in pairs)


def _found(module: nn.Module, names: dict[str, Any], expression: str) -> Any:
    """What an expression of names finds in a method of the module, without running anything."""
    first, *rest = expression.split(".")
    found: Any = module if first == "self" else names.get(first)
    for name in rest:
        children = found._modules if isinstance(found, nn.Module) else {}
        found = children.get(name) or inspect.getattr_static(found, name, None)
        found = found.__func__ if isinstance(found, staticmethod) else found
    return found
