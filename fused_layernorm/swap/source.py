# SPDX-License-Identifier: Apache-2.0
"""Digests of the source of a class's forward, by which table.py knows what it computes."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
import tokenize
import types
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

INHERITED = "nn.LayerNorm.forward"  # the digest of a class that has nn.LayerNorm's forward
INHERITED_RMS = "nn.RMSNorm.forward"  # and of one that has nn.RMSNorm's

Trees = list[ast.FunctionDef]

# What inspect and ast raise where there is no source, or where a file has changed since its import.
_UNREADABLE = (OSError, TypeError, ValueError, SyntaxError, IndexError, tokenize.TokenError)


def digest(cls: type[nn.Module]) -> str | None:
    """A digest of the source of the class's forward, or None if the source cannot be read.

    It covers the forward, the methods that it calls on self, and the functions of the same module
    that these call by name; comments, layout, docstrings and annotations do not change it. A
    forward that calls super's forward has a digest only if that is nn.LayerNorm's.
    """
    owners = [base for base in cls.__mro__ if "forward" in vars(base)]
    forward = vars(owners[0])["forward"]
    if forward is nn.LayerNorm.forward:
        return INHERITED
    if forward is nn.RMSNorm.forward:
        return INHERITED_RMS
    if not isinstance(forward, types.FunctionType):
        return None
    may_call_super = owners[1:2] == [nn.LayerNorm]
    return _digest_of_function(forward, cls, may_call_super, _methods_of(cls))  # type: ignore[arg-type]


def _methods_of(cls: type[nn.Module]) -> tuple[types.FunctionType, ...]:
    """The methods of the class and its bases: somebody may have replaced one since it was read."""
    members = (member for base in cls.__mro__ for member in vars(base).values())
    return tuple(member for member in members if isinstance(member, types.FunctionType))


@functools.lru_cache(maxsize=1000)
def _digest_of_function(
    forward: types.FunctionType,
    cls: type[nn.Module],
    may_call_super: bool,
    methods: tuple[types.FunctionType, ...],
) -> str | None:
    def function(name: str) -> ast.FunctionDef | None:
        found = forward.__globals__.get(name)
        if not isinstance(found, types.FunctionType) or found.__module__ != forward.__module__:
            return None
        return _tree(found)

    def method(name: str) -> ast.FunctionDef | None:
        found = inspect.getattr_static(cls, name, None)
        return _tree(found) if isinstance(found, types.FunctionType) else None

    try:
        tree = _tree(forward)
        called = trees(tree, function, method)
    except _UNREADABLE:
        return None
    calls_super = any("super" in called_names(one) for one in (tree, *called))
    return None if calls_super and not may_call_super else digest_of_trees(tree, called)


def forward_of(cls: type[nn.Module], known: Any) -> Any:
    """The forward that replaces the class's, or None if `known` does not know its source.

    known: a module with SOURCES, from digests to forwards for classes of any module, and CLASSES,
    the same for each class, by (module, class), whose forward calls functions of other modules.
    """
    found = digest(cls)
    if found is None:
        return None
    return known.CLASSES.get((cls.__module__, cls.__qualname__), known.SOURCES).get(found)


def trees(
    forward: ast.FunctionDef,
    function: Callable[[str], ast.FunctionDef | None],
    method: Callable[[str], ast.FunctionDef | None],
) -> Trees:
    """What a forward calls, in the order of digest_of_trees.

    `function` and `method` give the source of what has this name in the module and in the class,
    or None for what the digest leaves out.
    """
    names = called_names(forward)
    methods: dict[str, ast.FunctionDef] = {}
    pending = [forward]
    while pending:
        for name in called_methods(pending.pop()):
            found = None if name in methods else method(name)
            if found is not None:
                methods[name] = found
                pending.append(found)
    of_methods = [methods[name] for name in sorted(methods)]
    further = {name for tree in of_methods for name in called_names(tree)} - {*names}
    functions = [[*filter(None, map(function, group))] for group in (names, sorted(further))]
    return [*functions[0], *of_methods, *functions[1]]


def digest_of_trees(forward: ast.FunctionDef, called: Sequence[ast.FunctionDef]) -> str:
    """The digest of a forward and what it calls, in the order of `trees`."""
    text = repr([_canonical(tree) for tree in (forward, *called)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def called_names(forward: ast.FunctionDef) -> list[str]:
    calls = (node.func for node in ast.walk(forward) if isinstance(node, ast.Call))
    return sorted({function.id for function in calls if isinstance(function, ast.Name)})


def called_methods(forward: ast.FunctionDef) -> list[str]:
    """The names that the function calls on self: of methods, and of submodules."""
    calls = (node.func for node in ast.walk(forward) if isinstance(node, ast.Call))
    return sorted(
        {
            function.attr
            for function in calls
            if isinstance(function, ast.Attribute)
            and isinstance(function.value, ast.Name)
            and function.value.id == "self"
        }
    )


def _tree(function: types.FunctionType) -> ast.FunctionDef:
    # Given a wrapper, and not its code, inspect would return the source of the wrapped function.
    tree = ast.parse(textwrap.dedent(inspect.getsource(function.__code__))).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise TypeError(f"{function.__qualname__} is no plain function")
    return tree


_NOT_CODE = {"annotation", "returns", "ctx", "kind", "type_comment", "type_params"}


def _canonical(node: object) -> object:
    """A syntax tree as nested tuples, the same under every version of Python."""
    if isinstance(node, list):
        return [_canonical(item) for item in node]
    if not isinstance(node, ast.AST):
        return node
    fields = {name: value for name, value in ast.iter_fields(node) if name not in _NOT_CODE}
    if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
        fields["body"] = node.body[1:]
    return (
        type(node).__name__,
        *((name, _canonical(value)) for name, value in fields.items() if value not in (None, [])),
    )
