# SPDX-License-Identifier: Apache-2.0
"""Classes of swapped modules whose forward is compiled from the source of their class's own.

What rotations.py and neighbours.py replace in a forward is in them; everything else of the forward,
in any release of a library, stays as it is.
"""

from __future__ import annotations

import ast
import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from .classes import Forward, Known, is_as_read, is_made, made_class
from .source import Part

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

    def reduce_ex(self: Any, protocol: Any) -> Any:
        if not is_made(type(self)):
            return object.__reduce_ex__(self, protocol)
        state: Any = object.__reduce_ex__(self, max(2, protocol))[2:]
        return _unpickled, (self._swapped_from, class_of), *state

    wrap = functools.partial(_or_stock, forward)
    return made_class(cls, known, parts, wrap=wrap, __reduce_ex__=reduce_ex, **members)


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


def are_as_read(cls: type) -> bool:
    """As is_as_read, which Dynamo cannot trace: it asks while it traces."""
    return is_as_read(cls)


are_as_read._dynamo_marked_constant = True  # type: ignore[attr-defined]


# ---- What stands in a forward.


def names_in(forward: Any) -> tuple[str, ...]:
    """What the function under a forward's decorators names; nothing, if there is no function."""
    while isinstance(forward, types.FunctionType) and hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    code = getattr(forward, "__code__", None)
    return () if code is None else code.co_names


def attribute_of_self(node: Any) -> str | None:
    """norm1, for self.norm1."""
    is_own = isinstance(node, ast.Attribute) and ast.unparse(node) == f"self.{node.attr}"
    return node.attr if is_own else None


def method_of_self(name: str) -> ast.expr:
    return ast.Attribute(ast.Name("self", ast.Load()), name, ast.Load())


def before(call: str, value: Any) -> Any:
    """What stands before a method's call, such as ".transpose(1, 2)", or the value without one."""
    is_method = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
    return value.func.value if is_method and ast.unparse(value).endswith(call) else value
