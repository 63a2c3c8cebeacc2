# SPDX-License-Identifier: Apache-2.0
"""Digests of the source of a class's forward, by which swap_table knows what it computes."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
import types
from collections.abc import Sequence

from torch import nn

INHERITED = "nn.LayerNorm.forward"  # the digest of a class that has nn.LayerNorm's forward


def digest(cls: type[nn.Module]) -> str | None:
    """A digest of the source of the class's forward, or None if the source cannot be read.

    It covers the forward and the functions of the same module that the forward calls by name;
    comments, layout, docstrings and annotations do not change it. A forward that calls super's
    forward has a digest only if that is nn.LayerNorm's.
    """
    owners = [base for base in cls.__mro__ if "forward" in vars(base)]
    forward = vars(owners[0])["forward"]
    if forward is nn.LayerNorm.forward:
        return INHERITED
    if not isinstance(forward, types.FunctionType):
        return None
    found, calls_super = _digest_of_function(forward)
    if calls_super and owners[1] is not nn.LayerNorm:
        return None
    return found


def digest_of_trees(forward: ast.FunctionDef, called: Sequence[ast.FunctionDef]) -> str:
    """The digest of a forward and the functions that it calls, in the order of called_names."""
    text = repr([_canonical(tree) for tree in (forward, *called)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def called_names(forward: ast.FunctionDef) -> list[str]:
    calls = (node.func for node in ast.walk(forward) if isinstance(node, ast.Call))
    return sorted({function.id for function in calls if isinstance(function, ast.Name)})


@functools.cache
def _digest_of_function(forward: types.FunctionType) -> tuple[str | None, bool]:
    """The digest, and whether the function calls super()."""
    try:
        tree = _tree(forward)
        names = called_names(tree)
        called = [forward.__globals__.get(name) for name in names]
        trees = [
            _tree(function)
            for function in called
            if isinstance(function, types.FunctionType)
            and function.__module__ == forward.__module__
        ]
    except (OSError, TypeError, SyntaxError):
        return None, False
    return digest_of_trees(tree, trees), "super" in names


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
