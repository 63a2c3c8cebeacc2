# SPDX-License-Identifier: Apache-2.0
"""What a forward is, read from its source: by that the registry knows what a class computes.

A source counts only if it compiles to the code that is loaded: a file may have changed since its
import. What was read is also kept by identity, so that a forward, a method or a function that
somebody replaces later is not taken for the one that was read.
"""

from __future__ import annotations
import __future__

import ast
import functools
import hashlib
import inspect
import re
import textwrap
import tokenize
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..stock import FORWARDS, GroupNorm, LayerNorm, RMSNorm

# The digests of classes that have the forward of a class of PyTorch.
_INHERITED: dict[Any, str] = {
    FORWARDS[cls]: f"nn.{cls.__name__}.forward" for cls in (LayerNorm, RMSNorm, GroupNorm)
}
_BASES = (LayerNorm, GroupNorm)  # that super() may be


class Unreadable(Exception):
    """A forward that cannot be read, or be made anew; the message says why."""


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


def read(cls: type) -> Source | None:
    """The source of the class's forward as it is now, or None if it cannot be read.

    It covers the forward, the methods that it calls on self, and the functions of the same module
    that these call by name; comments, layout, docstrings and annotations do not change the digest.
    Functions of other modules are parts, but not in the digest. A forward that calls super's
    forward can be read only if that is nn.LayerNorm's or nn.GroupNorm's.
    """
    forward = inspect.getattr_static(cls, "forward", None)
    parts = [Part(cls, "forward", forward)]
    if not isinstance(forward, types.FunctionType):
        return None
    if forward in _INHERITED:
        return Source(_INHERITED[forward], (*parts,))

    def enter(owner: Any, name: str, found: Any) -> ast.FunctionDef | None:
        if not isinstance(found, types.FunctionType):
            return None
        parts.append(Part(owner, name, found))
        is_covered = owner is cls or found.__module__ == forward.__module__
        return tree_of(found) if is_covered else None

    names = forward.__globals__
    try:
        tree = tree_of(forward)
        called = trees(
            tree,
            lambda name: enter(names, name, names.get(name)),
            lambda name: enter(cls, name, inspect.getattr_static(cls, name, None)),
        )
    except Unreadable:
        return None
    if any("super" in called_names(one) for one in (tree, *called)):
        _, base, *_ = (one for one in cls.__mro__ if "forward" in vars(one))
        if base not in _BASES:
            return None
        parts.append(Part(base, "forward", FORWARDS[base]))
    return Source(digest_of_trees(tree, called), (*parts,))


def read_function(owner: dict[str, Any], name: str) -> Source | None:
    """The source of a global function, and of the functions that it calls, without decorators."""
    function: Any = owner.get(name)
    parts: list[Part] = []

    def enter(owner: dict[str, Any], name: str) -> ast.FunctionDef | None:
        if not isinstance(owner.get(name), types.FunctionType):
            return None
        parts.append(Part(owner, name, owner[name]))
        made = decorated(owner[name])
        if made.wrappers:
            raise Unreadable(f"{name} is wrapped")
        return made.tree

    try:
        tree = enter(owner, name)
        called = trees(tree, lambda name: enter(function.__globals__, name)) if tree else []
    except Unreadable:
        return None
    return None if tree is None else Source(digest_of_trees(tree, called), (*parts,))


def trees(
    forward: ast.FunctionDef,
    function: Callable[[str], ast.FunctionDef | None],
    method: Callable[[str], ast.FunctionDef | None] = lambda name: None,
) -> list[ast.FunctionDef]:
    """What a forward calls, in the order of digest_of_trees.

    `function` and `method` give the source of what has this name in the module and in the class,
    or None for what the digest leaves out.
    """
    names = called_names(forward)
    methods: dict[str, ast.FunctionDef] = {}
    pending = [forward]
    while pending:
        for name in called_names(pending.pop(), of_self=True):
            found = None if name in methods else method(name)
            if found is not None:
                methods[name] = found
                pending.append(found)
    of_methods = [methods[name] for name in sorted(methods)]
    further = {name for tree in of_methods for name in called_names(tree)} - {*names}
    first, last = ([*filter(None, map(function, group))] for group in (names, sorted(further)))
    return [*first, *of_methods, *last]


def digest_of_trees(forward: ast.FunctionDef, called: Sequence[ast.FunctionDef]) -> str:
    """The digest of a forward and what it calls, in the order of `trees`."""
    text = repr([_canonical(tree) for tree in (forward, *called)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def called_names(forward: ast.FunctionDef, of_self: bool = False) -> list[str]:
    """The names that a function calls, or those that it calls on self: methods and submodules."""
    called: list[Any] = [node.func for node in ast.walk(forward) if isinstance(node, ast.Call)]
    if not of_self:
        return sorted({one.id for one in called if isinstance(one, ast.Name)})
    attributes = [one for one in called if isinstance(one, ast.Attribute)]
    return sorted({one.attr for one in attributes if getattr(one.value, "id", "") == "self"})


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
    """The source of a function; raises Unreadable if it is not that of the loaded code."""
    code = function.__code__
    try:
        # Of a wrapper, and not its code, inspect would return the source of what is wrapped.
        tree = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
        lines, _ = inspect.findsource(code)
        codes = _compiled("".join(lines), code.co_filename)
    except (OSError, TypeError, ValueError, SyntaxError, IndexError, tokenize.TokenError):
        raise Unreadable("its forward has no source") from None
    if not isinstance(tree, ast.FunctionDef):
        raise Unreadable("its forward is no plain function")
    if code not in codes:
        raise Unreadable("the source of its forward is not that of the loaded code")
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
    """A function, and what its decorators have made of it."""

    function: Any
    tree: ast.FunctionDef  # without the decorators
    wrappers: tuple[Any, ...]  # the outermost first; each calls the next


def decorated(outer: Any) -> Decorated:
    """A function and its source; raises Unreadable where a wrapper hides what it calls."""
    wrappers = []
    while isinstance(outer, types.FunctionType) and hasattr(outer, "__wrapped__"):
        inner: Any = outer.__wrapped__
        if not any(_holds(cell, inner) for cell in outer.__closure__ or ()):
            raise Unreadable("a decorator of its forward hides what it calls")
        wrappers.append(outer)
        outer = inner
    if not isinstance(outer, types.FunctionType):
        raise Unreadable("its forward is no plain function")
    tree = tree_of(outer)
    first = min([node.lineno for node in tree.decorator_list] + [tree.lineno])
    ast.increment_lineno(tree, outer.__code__.co_firstlineno - first)
    tree.decorator_list = []
    return Decorated(outer, tree, (*wrappers,))


def _holds(cell: types.CellType, value: object) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # it is empty
        return False


def rebuilt(made: Decorated, tree: ast.FunctionDef) -> types.FunctionType:
    """The function with this body, in copies of its wrappers.

    Nothing of the definition runs: neither decorators, nor defaults, nor annotations.
    """
    function = made.function
    new = _copy(function, _code_of(function, tree), function.__closure__)
    inner = function
    for wrapper in reversed(made.wrappers):
        closure = tuple(
            types.CellType(new) if _holds(cell, inner) else cell
            for cell in wrapper.__closure__ or ()
        )
        outer = _copy(wrapper, wrapper.__code__, closure)
        vars(outer).update({k: new for k, value in vars(wrapper).items() if value is inner})
        inner, new = wrapper, outer
    return new


def _copy(
    function: types.FunctionType, code: types.CodeType, closure: tuple[types.CellType, ...] | None
) -> types.FunctionType:
    names = function.__globals__
    made = types.FunctionType(code, names, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    del vars(functools.update_wrapper(made, function))["__wrapped__"]
    return made


def _code_of(function: types.FunctionType, tree: ast.FunctionDef) -> types.CodeType:
    """The code of a definition that stands where the function stands."""
    if function.__code__.co_freevars:
        raise Unreadable("its forward uses variables of a function around it, or super()")
    if any(re.match(r"_\w+__", name) and name[1] != "_" for name in function.__code__.co_names):
        raise Unreadable("its forward uses names that are private to its class")
    module = ast.fix_missing_locations(ast.Module([tree], []))
    flags = function.__code__.co_flags & _FUTURE
    outer = compile(module, function.__code__.co_filename, "exec", flags, True)
    for code in outer.co_consts:
        if isinstance(code, types.CodeType) and code.co_name == tree.name:
            return code
    raise Unreadable("its forward has type parameters")
