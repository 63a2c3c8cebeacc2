# SPDX-License-Identifier: Apache-2.0
"""q, k and v that are views of one projection, which qkv_norm_rope gives one gradient.

A forward's source says which names are views of one tensor; their strides say at each call whether
they are its q, k and v. A forward that writes into any tensor is left.
"""

from __future__ import annotations

import ast
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import rewrite
from .rewrite import PARTS, VIEWS, Template


def whole_of(
    whole: Tensor, q: Tensor, k: Tensor, v: Tensor, in_order: bool
) -> tuple[Tensor, dict[str, Any]] | None:
    """The tensor of which these, (batch, heads, positions, columns), are all, and the options with
    which qkv_norm_rope takes it; None if they are not, or if it has no gradient.

    in_order: whether the source says that they stand in this order. (Dynamo has no offsets.)

    It is (batch, positions, columns of all), or as GPT-NeoX has it (batch, heads, positions, 3
    columns), or as timm has it (3, batch, heads, positions, columns).
    """
    if not torch.is_grad_enabled() or not whole.requires_grad or q.dim() != 4 or q.dim() != v.dim():
        return None
    (_, heads, positions, cols), kv = q.shape, k.shape[1]
    if whole.dim() == 3 and whole.shape[2] == (heads + 2 * kv) * cols:
        found, step, first, second = whole, cols, heads * cols, kv * cols
    elif whole.dim() == 4 and whole.shape[3] == 3 * cols and heads == kv == whole.shape[1]:
        found, step, first, second = whole.transpose(1, 2), whole.stride(1), cols, cols
        found = found.unflatten(3, (3, cols))
    elif whole.dim() == 5 and whole.shape[0] == 3:
        found, step = whole.permute(1, 3, 0, 2, 4), whole.stride(2)
        first = second = whole.stride(0)
    else:
        return None
    strides = (found.stride(0), step, found.stride(1), 1)
    for part, count in ((q, heads), (k, kv), (v, kv)):
        if part.shape != (q.shape[0], count, positions, cols) or part.stride() != strides:
            return None
    if not torch.compiler.is_dynamo_compiling():
        at = (part.storage_offset() - whole.storage_offset() for part in (q, k, v))
        in_order = (*at,) == (0, first, first + second)
    layout = "h3d" if whole.dim() == 4 else "3hd"
    options = {"layout": layout, "num_kv_heads": kv, "head_dim": cols}
    return (found, options) if in_order else None


# ---- Sources.


def _root(value: Any) -> tuple[str | None, bool]:
    """The name of which an expression is a view, and whether it is all of it."""
    is_whole = True
    while True:
        match value:
            case ast.Name(id=name):
                return name, is_whole
            case ast.Subscript(value=value):
                is_whole = False
            case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in VIEWS:
                is_whole = is_whole and name not in PARTS
            case _:
                return None, False


class _View(NamedTuple):
    """A name that is a view of another."""

    whole: str
    first: str | None = None  # what it is of a row: from this text, or number, to that
    last: str | None = None


def _views(statement: Any, views: dict[str, _View]) -> dict[str, _View]:
    """The names to which a statement assigns views."""
    names, value = rewrite.assigned_names(statement), getattr(statement, "value", None)
    root, is_whole = _root(value)
    if root is None:
        return {}
    if root in views:
        return dict.fromkeys(names, views[root] if is_whole else _View(views[root].whole))
    if len(names) > 1:
        return {name: _View(root, str(i), str(i + 1)) for i, name in enumerate(names)}
    match value:  # whole[..., first:last]
        case ast.Subscript(ast.Name(), ast.Tuple([_, ast.Slice(first, last)])):
            ends = [None if end is None else ast.unparse(end) for end in (first, last)]
            return dict.fromkeys(names, _View(root, *ends))
    return dict.fromkeys(names, _View(root))


def add_v(forward: ast.FunctionDef, call: Template) -> bool | None:
    """`q, k = call(...)` becomes `q, k, v = call(..., v, whole)`, where q and k, and one name more,
    are views of one tensor that has a name. Whether they are its parts in this order; None where
    nothing is changed."""
    views: dict[str, _View] = {}
    for i, statement in enumerate(forward.body):
        if call.match(getattr(statement, "value", None), {}) is not None:
            following = forward.body[i + 1 :]
            return None if rewrite.writes(forward) else _add(statement, following, views)
        stored = {n.id for n in ast.walk(statement)
                  if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}  # fmt: skip
        found = _views(statement, views)
        views = {n: v for n, v in views.items() if not {n, v.whole} & stored}
        views |= {n: v for n, v in found.items() if v.whole not in stored}
    return None


def _add(call: Any, following: list[ast.stmt], views: dict[str, _View]) -> bool | None:
    pair = rewrite.assigned_names(call)
    if len(pair) != 2 or not {*pair} <= {*views}:
        return None
    q, k = (views[name] for name in pair)
    later = {n.id for one in following for n in ast.walk(one) if isinstance(n, ast.Name)}
    others = [n for n, v in views.items() if v.whole == q.whole and n not in pair and n in later]
    if q.whole != k.whole or len(others) != 1:
        return None
    call.targets[0].elts.append(ast.Name(others[0], ast.Store()))
    call.value.args += [ast.Name(others[0], ast.Load()), ast.Name(q.whole, ast.Load())]
    ends = [(q.last, k.first), (k.last, views[others[0]].first)]
    return q.first in (None, "0") and all(last == first is not None for last, first in ends)
