# SPDX-License-Identifier: Apache-2.0
"""Attention modules that cut q, k and v out of one projection: which forwards do, and the call of
qkv_norm_rope, which gives the projection one gradient.

A forward's source says which names are views of one tensor; their strides say at each call whether
they are its q, k and v. A forward that writes into any tensor is left.
"""

from __future__ import annotations

import ast
from typing import Any, NamedTuple

import torch
from torch import Tensor

_VIEWS = {"view", "transpose", "permute", "unbind", "chunk", "split", "unflatten"}


class Whole(NamedTuple):
    """What qkv_norm_rope is given of q, k and v in one tensor."""

    qkv: Tensor
    layout: str
    num_kv_heads: int
    head_dim: int


def whole_of(whole: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Whole | None:
    """The tensor of which these, (batch, heads, positions, columns), are all; None if they are not,
    or if it has no gradient.

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
    at = whole.storage_offset()
    for part, count in ((q, heads), (k, kv), (v, kv)):
        is_here = part.storage_offset() == at and part.stride() == strides
        if not is_here or part.shape != (q.shape[0], count, positions, cols):
            return None
        at, first = at + first, second
    return Whole(found, "h3d" if whole.dim() == 4 else "3hd", kv, cols)


# ---- Sources.


def _root(value: ast.expr) -> str | None:
    """The name of which an expression is a view."""
    while True:
        if isinstance(value, ast.Subscript):
            value = value.value
        elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            if value.func.attr not in _VIEWS:
                return None
            value = value.func.value
        else:
            return value.id if isinstance(value, ast.Name) else None


def _writes(forward: ast.FunctionDef) -> bool:
    """Whether a forward may write into a tensor."""
    for node in ast.walk(forward):
        stores = isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(
            node.ctx, ast.Load
        )
        is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        name = node.func.attr if is_method else ""  # type: ignore[attr-defined]
        is_out = isinstance(node, ast.keyword) and node.arg in ("out", "inplace")
        if stores or is_out or isinstance(node, ast.AugAssign):
            return True
        if name.endswith("_") and not name.endswith("__"):
            return True
    return False


def _names(target: ast.expr) -> list[str]:
    every = target.elts if isinstance(target, ast.Tuple) else [target]
    return [one.id for one in every if isinstance(one, ast.Name)]


def add_v(forward: ast.FunctionDef, is_call: Any) -> None:
    """`q, k = call(...)` becomes `q, k, v = call(..., v, whole)`, where q and k, and one name more,
    are views of one tensor that has a name, and is_call says that this is the call."""
    origins: dict[str, str] = {}  # of names that are views
    for i, statement in enumerate(forward.body):
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        value: Any = getattr(statement, "value", None)
        if len(targets) == 1 and is_call(value):
            pair = _names(targets[0])
            whole = {origins.get(name) for name in pair}
            later = {n.id for s in forward.body[i + 1 :] for n in ast.walk(s)
                     if isinstance(n, ast.Name)}  # fmt: skip
            others = [n for n, o in origins.items() if {o} == whole and n not in pair]
            others = [name for name in others if name in later]
            if len(pair) != 2 or len(others) != 1 or _writes(forward):
                return
            targets[0].elts.append(ast.Name(others[0], ast.Store()))  # type: ignore[attr-defined]
            value.args += [ast.Name(others[0], ast.Load()), ast.Name(*whole, ast.Load())]
            return
        root = _root(value) if len(targets) == 1 else None
        root = origins.get(root or "", root)
        stored = [n.id for n in ast.walk(statement)
                  if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]  # fmt: skip
        for name in stored:
            origins.pop(name, None)
            origins = {n: o for n, o in origins.items() if o != name or n == name}
        if root is not None and root not in stored:
            origins |= dict.fromkeys(_names(targets[0]), root)
