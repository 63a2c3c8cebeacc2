# SPDX-License-Identifier: Apache-2.0
"""Forwards that are made anew from the source of a class's own, with calls of ours in the places
that templates describe; everything else, in any release of a library, stays as it is.
"""

from __future__ import annotations

import ast
import copy
import re
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from . import source
from .classes import Known, made_class
from .source import Part

Rules = Mapping[str, Callable[[Any], Any]]
Bound = dict[str, Any]


class Template:
    """An expression, and what stands in its place.

    A name in capitals is any expression, or one that its rule accepts; `*X` is all arguments.
    """

    def __init__(self, pattern: str, instead: str = "None") -> None:
        self.pattern, self.instead = (ast.parse(t, mode="eval").body for t in (pattern, instead))

    def match(self, node: Any, rules: Rules) -> Bound | None:
        bound: Bound = {}
        return bound if _matches(self.pattern, node, rules, bound) else None


def _matches(pattern: Any, node: Any, rules: Rules, bound: Bound) -> bool:
    if isinstance(pattern, ast.Name) and pattern.id.isupper():
        bound[pattern.id] = node
        return pattern.id not in rules or bool(rules[pattern.id](node))
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, list):
        if pattern and isinstance(pattern[0], ast.Starred):
            bound[pattern[0].value.id] = node  # type: ignore[attr-defined]
            return bool(node) and not any(isinstance(one, ast.Starred) for one in node)
        return len(pattern) == len(node) and all(
            _matches(one, other, rules, bound) for one, other in zip(pattern, node, strict=True)
        )
    if not isinstance(pattern, ast.AST):
        return bool(pattern == node)
    fields = (name for name in pattern._fields if name not in ("ctx", "kind"))
    return all(
        _matches(getattr(pattern, name), getattr(node, name, None), rules, bound) for name in fields
    )


def filled(expression: Any, bound: Bound) -> Any:
    """A copy of the expression, with what is bound in the places of the names."""

    class Fill(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> Any:
            return bound.get(node.id, node)

        def visit_Starred(self, node: Any) -> Any:
            found = bound.get(getattr(node.value, "id", ""))
            return found if isinstance(found, list) else self.generic_visit(node)

    return Fill().visit(copy.deepcopy(expression))


class Rewriter(ast.NodeTransformer):
    """Puts what templates say in the places of what they describe, and notes what was there."""

    def __init__(self, rules: Rules, *templates: Template) -> None:
        self.rules, self.templates, self.found = rules, templates, list[Bound]()

    def visit(self, node: Any) -> Any:
        for template in self.templates:
            bound = template.match(node, self.rules)
            if bound is not None:
                self.found.append(bound)
                return self.visit(ast.copy_location(filled(template.instead, bound), node))
        return self.generic_visit(node)


def attribute_of_self(node: Any) -> str:
    """norm1, for self.norm1; nothing for anything else."""
    is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return node.attr if is_own and node.value.id == "self" else ""


def assigned_names(statement: Any) -> list[str]:
    """The names that a statement assigns to; none if it is no assignment to names alone."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return []
    target = statement.targets[0]
    targets = target.elts if isinstance(target, ast.Tuple) else [target]
    names = [one.id for one in targets if isinstance(one, ast.Name)]
    return names if len(names) == len(targets) else []


def target_of(statement: Any) -> str:
    """The one name that a statement assigns to, or ""."""
    names = assigned_names(statement)
    return names[0] if names and isinstance(statement.targets[0], ast.Name) else ""


def writes(tree: ast.AST) -> bool:
    """Whether something in the tree may write into a tensor, or into a name in an expression."""
    for node in ast.walk(tree):
        match node:
            case ast.AugAssign() | ast.NamedExpr() | ast.keyword(arg="out" | "inplace"):
                return True
            case ast.Subscript(ctx=ctx) | ast.Attribute(ctx=ctx) if not isinstance(ctx, ast.Load):
                return True
            case ast.Call(func=ast.Attribute(attr=name)) if re.search(r"[^_]_$", name):
                return True
    return False


# Methods that give a view, or parts of it.
PARTS = {"unbind", "chunk", "split"}
VIEWS = {"view", "transpose", "permute", "unflatten", *PARTS}


def _calls(tree: ast.AST) -> bool:
    """Whether something in the tree calls more than methods that give views: a module or a function
    may write into what it is given."""
    called = (one.func for one in ast.walk(tree) if isinstance(one, ast.Call))
    return any(attribute_of_self(one) or getattr(one, "attr", "") not in VIEWS for one in called)


def postpone(
    statements: list[Any],
    norms: Sequence[Template],
    uses: Sequence[Template],
    rules: Rules,
    is_known: bool = False,
    may_call: bool = False,
) -> None:
    """`h = norm(x)` becomes `h = x`, and h in a statement that uses it `norm(h)`, if its value is
    then what a template of `uses` describes.

    Of a source that is not known, that is the first statement that mentions h; it mentions it once
    and gives it anew, and what stands between the two only assigns other names. It calls nothing
    that might write into x, unless may_call says that it does not.
    """
    for i, statement in enumerate(statements):
        name, value = target_of(statement), getattr(statement, "value", None)
        found = ((norm, bound) for norm in norms if (bound := norm.match(value, rules)))
        norm, bound = next(found, (None, {}))
        later = [one for one in statements[i + 1 :] if _names(one)[name]]
        if norm is None or not later:
            continue
        x, *others = bound["X"]
        moved = filled(norm.pattern, {**bound, "X": [ast.Name(name, ast.Load()), *others]})
        for use in later if is_known else later[:1]:
            between = statements[i + 1 : statements.index(use)]
            is_blocked = not may_call and any(map(_calls, between))
            if not is_known and (is_blocked or not _may_move(moved, name, between, use)):
                continue
            value = filled(getattr(use, "value", None), {name: copy.deepcopy(moved)})
            if any(one.match(value, rules) for one in uses):
                use.value, statement.value = value, x


def _may_move(moved: ast.AST, name: str, between: list[Any], use: Any) -> bool:
    for one in between:
        names = assigned_names(one)
        if not names or writes(one.value) or _names(moved).keys() & {*names}:
            return False
    return name in assigned_names(use) and not writes(use.value) and _names(use.value)[name] == 1


def _names(node: ast.AST) -> Counter[str]:
    return Counter(one.id for one in ast.walk(node) if isinstance(one, ast.Name))


def names_in(cls: type[nn.Module]) -> tuple[str, ...]:
    """What the forward of a class names, under its decorators; nothing if it is no function."""
    forward: Any = getattr(cls, "forward", None)  # that of a compiled class raises
    while isinstance(forward, types.FunctionType) and hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return getattr(getattr(forward, "__code__", None), "co_names", ())


def remade(
    cls: type[nn.Module], known: Known, class_of: Callable[..., Any], remake: Callable[..., Any]
) -> type[nn.Module] | str | None:
    """The subclass whose forward `remake` gives, or the reason why there is none.

    class_of: finds it again where a module is unpickled. remake: gives of a source.Decorated the
    forward, what was read beside it, and members of the class; or says why there is none.
    """
    outer = cls.forward
    try:
        found = remake(source.decorated(outer))
    except source.Unreadable as error:
        return str(error)
    if not isinstance(found, tuple):
        return found
    forward, parts, members = found
    parts = (Part(cls, "forward", outer), *parts)
    return made_class(cls, known, parts, (class_of,), forward=forward, **members)
