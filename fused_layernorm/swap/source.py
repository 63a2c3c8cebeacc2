# SPDX-License-Identifier: Apache-2.0
"""What a forward is, read from its source: by that the registry knows what a class computes.

A source counts only if it compiles to the code that is loaded: a file may have changed since its
import. What was read is also kept by identity, so that a forward, a method or a function that
somebody replaces later is not taken for the one that was read.
"""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import hashlib
import inspect
import textwrap
import tokenize
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from ..stock import GROUP_NORM_FORWARD, LAYER_NORM_FORWARD, RMS_NORM_FORWARD, GroupNorm, LayerNorm

INHERITED = "nn.LayerNorm.forward"  # the digest of a class that has nn.LayerNorm's forward
INHERITED_RMS = "nn.RMSNorm.forward"  # and of one that has nn.RMSNorm's
INHERITED_GROUP = "nn.GroupNorm.forward"  # and of one that has nn.GroupNorm's

Trees = list[ast.FunctionDef]

# What inspect, ast and compile raise where there is no source, and what is raised here.
UNREADABLE = (OSError, TypeError, ValueError, SyntaxError, IndexError, tokenize.TokenError)


class Part(NamedTuple):
    """A function that was read: an attribute of a class, or a global of a module."""

    owner: Any  # the class, or the dictionary of the module's globals
    name: str
    function: Any

    def is_as_read(self) -> bool:
        if isinstance(self.owner, dict):
            return self.owner.get(self.name) is self.function
        return getattr(self.owner, self.name, None) is self.function


class Source(NamedTuple):
    """A forward and what it calls: its digest, and its parts, of which the forward is the first."""

    digest: str
    parts: tuple[Part, ...]

    def is_as_read(self) -> bool:
        return all(part.is_as_read() for part in self.parts)


def read(cls: type) -> Source | None:
    """The source of the class's forward as it is now, or None if it cannot be read.

    It covers the forward, the methods that it calls on self, and the functions of the same module
    that these call by name; comments, layout, docstrings and annotations do not change the digest.
    Functions of other modules are parts, but not in the digest. A forward that calls super's
    forward can be read only if that is nn.LayerNorm's or nn.GroupNorm's.
    """
    owners = [base for base in cls.__mro__ if "forward" in vars(base)]
    if not owners:
        return None
    forward = vars(owners[0])["forward"]
    parts = [Part(cls, "forward", forward)]
    if forward is GROUP_NORM_FORWARD:
        return Source(INHERITED_GROUP, (*parts,))
    if forward is LAYER_NORM_FORWARD or forward is RMS_NORM_FORWARD:
        return Source(INHERITED if forward is LAYER_NORM_FORWARD else INHERITED_RMS, (*parts,))
    if not isinstance(forward, types.FunctionType):
        return None

    def function(name: str) -> ast.FunctionDef | None:
        found = forward.__globals__.get(name)
        if not isinstance(found, types.FunctionType):
            return None
        parts.append(Part(forward.__globals__, name, found))
        return tree_of(found) if found.__module__ == forward.__module__ else None

    def method(name: str) -> ast.FunctionDef | None:
        found = inspect.getattr_static(cls, name, None)
        if not isinstance(found, types.FunctionType):
            return None
        parts.append(Part(cls, name, found))
        return tree_of(found)

    try:
        tree = tree_of(forward)
        called = trees(tree, function, method)
    except UNREADABLE:
        return None
    if any("super" in called_names(one) for one in (tree, *called)):
        base = owners[1] if owners[1:] else None
        if base not in (LayerNorm, GroupNorm):
            return None
        of_base = LAYER_NORM_FORWARD if base is LayerNorm else GROUP_NORM_FORWARD
        parts.append(Part(base, "forward", of_base))
    return Source(digest_of_trees(tree, called), (*parts,))


def read_function(owner: dict[str, Any], name: str) -> Source | None:
    """The source of a global function, and of the functions of its module that it calls."""
    outer = owner.get(name)
    if not isinstance(outer, types.FunctionType):
        return None
    parts = [Part(owner, name, outer)]
    try:
        made = decorated(outer)
        called = []
        for callee in called_names(made.tree):
            found = made.function.__globals__.get(callee)
            if isinstance(found, types.FunctionType):
                parts.append(Part(made.function.__globals__, callee, found))
                called.append(decorated(found).tree)
    except UNREADABLE:
        return None
    return Source(digest_of_trees(made.tree, called), (*parts,))


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


# ---- Sources that are those of the code that is loaded.


def tree_of(function: types.FunctionType) -> ast.FunctionDef:
    """The source of a function; raises one of UNREADABLE if it is not that of the loaded code."""
    code = function.__code__
    # Given a wrapper, and not its code, inspect would return the source of the wrapped function.
    tree = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise TypeError(f"{function.__qualname__} is no plain function")
    lines, _ = inspect.findsource(code)
    if code not in _compiled("".join(lines), code.co_filename):
        raise ValueError(f"the source of {function.__qualname__} is not that of the loaded code")
    return tree


@functools.lru_cache(maxsize=8)
def _compiled(text: str, filename: str) -> set[types.CodeType]:
    """All codes of a file. (One function compiled by itself would not be the same everywhere: what
    a file imports, the compiler calls in another way.)"""
    pending = [compile(text, filename, "exec", dont_inherit=True)]
    found = set()
    while pending:
        code = pending.pop()
        found.add(code)
        pending += [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return found


_FUTURE = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


class Decorated(NamedTuple):
    """A function under its decorators."""

    function: Any  # the innermost
    tree: ast.FunctionDef  # without the decorators
    decorators: list[ast.expr]


def decorated(outer: Any) -> Decorated:
    """A function and its source, where `outer` is what the decorators in the source make of it.

    Raises one of UNREADABLE where somebody has wrapped it in something else.
    """
    function = cast(Any, inspect.unwrap(outer))
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"{outer!r} is no function")
    tree = tree_of(function)
    decorators, tree.decorator_list = tree.decorator_list, []
    if outer is not function:
        again: Any = execute(function, tree, decorators)
        while outer is not function:
            if getattr(again, "__code__", None) is not outer.__code__:
                raise ValueError(f"{function.__qualname__} was wrapped")
            outer, again = outer.__wrapped__, again.__wrapped__
    return Decorated(function, tree, decorators)


def execute(
    function: types.FunctionType, tree: ast.FunctionDef, decorators: list[ast.expr]
) -> types.FunctionType:
    """The function that a definition makes where `function` stands, which has no closure."""
    if function.__code__.co_freevars:
        raise ValueError(f"{function.__qualname__} has a closure")
    tree = copy.deepcopy(tree)
    tree.decorator_list = decorators
    module = ast.fix_missing_locations(ast.Module([tree], []))
    first: Any = [*decorators, tree][0]
    ast.increment_lineno(module, function.__code__.co_firstlineno - first.lineno)
    flags = function.__code__.co_flags & _FUTURE
    made: dict[str, Any] = {}
    exec(
        compile(module, function.__code__.co_filename, "exec", flags, True),
        function.__globals__,
        made,
    )
    result: types.FunctionType = made[tree.name]
    return result
