# SPDX-License-Identifier: Apache-2.0
"""Forwards that are made anew from the source of a class's own, with calls of ours in the places
that templates describe; everything else, in any release of a library, stays as it is.

modulated.py, rotations.py and neighbours.py have the templates, and what the new forwards call.
"""

from __future__ import annotations

import ast
import copy
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from .classes import Forward, Known, made_class
from .source import Part

Rules = Mapping[str, Callable[[Any], bool]]
Bound = dict[str, Any]

# ---- Templates.


class Template:
    """An expression, and what stands in its place.

    A name in capitals is any expression, or one of which its rule says so; `*X` is all arguments of
    a call.
    """

    def __init__(self, pattern: str, instead: str = "None") -> None:
        self.pattern, self.instead = (ast.parse(t, mode="eval").body for t in (pattern, instead))

    def match(self, node: Any, rules: Rules) -> Bound | None:
        bound: Bound = {}
        return bound if _matches(self.pattern, node, rules, bound) else None

    def fill(self, bound: Bound) -> Any:
        return Fill(bound).visit(copy.deepcopy(self.instead))


def _matches(pattern: Any, node: Any, rules: Rules, bound: Bound) -> bool:
    if isinstance(pattern, ast.Name) and pattern.id.isupper():
        bound[pattern.id] = node
        return pattern.id not in rules or rules[pattern.id](node)
    if isinstance(pattern, list) and pattern and isinstance(pattern[0], ast.Starred):
        star: Any = pattern[0].value
        bound[star.id] = node
        return bool(node) and not any(isinstance(one, ast.Starred) for one in node)
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, list):
        return len(pattern) == len(node) and all(
            _matches(one, other, rules, bound) for one, other in zip(pattern, node, strict=True)
        )
    if not isinstance(pattern, ast.AST):
        return bool(pattern == node)
    fields = (name for name in pattern._fields if name not in ("ctx", "kind"))
    return all(
        _matches(getattr(pattern, name), getattr(node, name, None), rules, bound) for name in fields
    )


class Fill(ast.NodeTransformer):
    def __init__(self, bound: Bound) -> None:
        self.bound = bound

    def visit_Name(self, node: ast.Name) -> Any:
        return self.bound.get(node.id, node)

    def visit_Starred(self, node: Any) -> Any:
        return self.bound.get(node.value.id, node)


class Rewriter(ast.NodeTransformer):
    """Puts what templates say in the places of what they describe, and notes what was there."""

    def __init__(self, rules: Rules, *templates: Template) -> None:
        self.rules, self.templates, self.found = rules, templates, list[Bound]()

    def visit(self, node: Any) -> Any:
        for template in self.templates:
            bound = template.match(node, self.rules)
            if bound is not None:
                self.found.append(bound)
                return self.visit(ast.copy_location(template.fill(bound), node))
        return self.generic_visit(node)


def attribute_of_self(node: Any) -> str:
    """norm1, for self.norm1; nothing for anything else."""
    is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return node.attr if is_own and node.value.id == "self" else ""


def target_of(statement: Any) -> str | None:
    """The name that a statement assigns to, if it does nothing else."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        return target.id if isinstance(target, ast.Name) else None
    return None


# ---- The classes.

ClassOf = Callable[[type[nn.Module]], "type[nn.Module] | str | None"]


def subclass(
    cls: type[nn.Module],
    known: Known,
    parts: tuple[Part, ...],
    forward: Forward,
    class_of: ClassOf,
    **members: Any,
) -> type[nn.Module]:
    """The subclass with this forward, which `class_of` finds again where a module is unpickled."""
    wrap = functools.partial(_or_stock, forward)
    again = _unpickled, (cls, class_of)
    return made_class(cls, known, parts, again, wrap=wrap, **members)


def _or_stock(fused: Forward, made: Any) -> Forward:
    """The forward; the stock one for a module that was unswapped while somebody kept it, and where
    that is not the one that was read."""
    cls, read = made._swapped_from, made._parts[0].function

    @functools.wraps(read)  # torch.jit.script compiles what is wrapped
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_fused = cls.forward is read and hasattr(type(self), "_swapped_from")
        return (fused if is_fused else cls.forward)(self, *args, **kwargs)

    return forward


def _unpickled(cls: type[nn.Module], class_of: ClassOf) -> nn.Module:
    made = class_of(cls)
    made = made if isinstance(made, type) else cls  # another release of the library
    return made.__new__(made)


def names_in(forward: Any) -> tuple[str, ...]:
    """What the function under a forward's decorators names; nothing, if there is no function."""
    while isinstance(forward, types.FunctionType) and hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    code = getattr(forward, "__code__", None)
    return () if code is None else code.co_names
