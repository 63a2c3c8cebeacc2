# SPDX-License-Identifier: Apache-2.0
"""swap_norms(model, neighbours=True): attention modules whose q and k are normalized and rotated.

transformers writes the same rotation in each model's file, as a function apply_rotary_pos_emb that
the attention's forward calls. The forward of a swapped module (rewrite.py) calls `_rotated` in its
place. Where the last thing that happens to q and k before the rotation is `self.q_norm` and
`self.k_norm`, norms and rotation are one kernel. The function is known by the digest of its source,
and so is Liger's, which may stand in its place. A call that the kernels do not take gets the norms'
own forwards and the function that the forward finds under that name. The kernels read cos and sin
once for each pair of columns: that both hold each value twice, as the rotary embeddings of
transformers give them, is taken for granted.

Other forwards only normalize q and k, as timm's do: `q, k = self.q_norm(q), self.k_norm(k)`. There,
and behind a rotation, q, k and v of one projection give it one gradient: the forward's source says
which names are views of one tensor, and their strides say at each call whether they are its q, k
and v. A forward that writes into any tensor is not looked at so.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..heads import qk_norm_rope, qkv_norm_rope
from ..stock import are_supported, has_kernels
from . import rewrite, rms, source
from .classes import Known, forward_of, is_as_read, is_fused, must_be_called
from .forwards import result_of
from .rewrite import PARTS, VIEWS, Rules, Template, assigned_names, attribute_of_self

FUNCTION = "apply_rotary_pos_emb"


class Rotation(NamedTuple):
    """What a function rotates by. It is given cos and sin of all rotated columns."""

    interleaved: bool = False
    once: bool = False  # the first half of cos and sin holds each pair's value
    partial: bool = False  # only as many columns are rotated as cos has
    keeps_dtype: bool = False  # the result has q's dtype; otherwise q's and cos's are promoted


# By the digest of apply_rotary_pos_emb and what it calls, without decorators: rows of known.txt.
SOURCES: dict[str, Rotation] = {}

# ---- What a swapped forward calls.


def _rotated(
    self: Any,
    function: Callable[..., Any] | None,
    q: Tensor,
    k: Tensor,
    cos: Any,
    sin: Any,
    v: Tensor | None = None,
    whole: Any = None,
) -> tuple[Tensor, ...]:
    """q and k, (batch, heads, positions, columns), normalized if the class says so, and rotated, if
    there is a function; and v, where it is given with the tensor of which all may be views."""
    rotation, is_known = self._rotation, function is self._function and is_as_read(type(self))
    serves = is_known and is_supported(rotation, q, k, cos, sin)
    of_q = of_k = None
    if self._norms:
        if serves:
            of_q, of_k = _norm_of(self.q_norm, q), _norm_of(self.k_norm, q)
        if of_q is None or of_k is None or of_q[2:] != of_k[2:]:
            q = _called(self.q_norm, q, self._transposes)
            k = _called(self.k_norm, k, self._transposes)
            of_q = of_k = whole = None
            serves = is_known and is_supported(rotation, q, k, cos, sin)
    if serves and whole is not None and v is not None:
        found = _whole_of(whole, q, k, v, self._in_order)
        if found is not None:
            given, options = _arguments(rotation, cos, sin, of_q, of_k)
            return qkv_norm_rope(found[0], *given, **options | found[1])
    if serves and function is not None:
        given, options = _arguments(rotation, cos, sin, of_q, of_k)
        q, k = qk_norm_rope(q, k, *given, **options)
    elif function is not None:
        q, k = function(q, k, cos, sin)
    elif of_q is not None:
        q, k = self.q_norm(q), self.k_norm(k)
    return (q, k) if v is None else (q, k, v)


def _called(norm: Any, x: Tensor, transposes: bool) -> Tensor:
    """The norm's own call, of heads as the class's forward has them, before or behind transpose."""
    return norm(x.transpose(1, 2)).transpose(1, 2) if transposes else norm(x)


def is_supported(rotation: Rotation | None, q: Tensor, k: Tensor, cos: Any, sin: Any) -> bool:
    """Whether the kernels rotate these as the library's function does."""
    if not are_supported(q, k, cos, sin) or not has_kernels(q) or q.dim() != 4 or k.dim() != 4:
        return False
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16) or k.dtype is not q.dtype:
        return False
    if rotation is None:
        return True
    keeps, size = rotation.keeps_dtype and cos.dtype is torch.float32, cos.shape[-1]
    return (
        (cos.dtype is q.dtype or keeps)
        and sin.dtype is cos.dtype
        and cos.dim() == 3
        and sin.shape == cos.shape
        and cos.shape[0] in (1, q.shape[0])
        and q.shape[0] == k.shape[0]
        and q.shape[2] == k.shape[2] == cos.shape[1]
        and q.shape[3] == k.shape[3]
        and (size == q.shape[3] or (rotation.partial and 0 < size < q.shape[3]))
        and size % 2 == 0
        and not (cos.requires_grad or sin.requires_grad)
    )


# Weight, bias, eps, statistic and variant.
_Norm = tuple[Tensor | None, Tensor | None, float, str, rms.Variant]


def _norm_of(module: Any, x: Tensor) -> _Norm | None:
    """The norm that a module computes of heads, if the kernel computes the same."""
    norm, bias, is_layer = rms.norm_of(module, x), None, False
    if norm is None:
        is_layer = result_of(module) == ""
        if not (is_layer or (forward_of(type(module)) is rms.timm and not module._fast_norm)):
            return None
        if torch.is_autocast_enabled(x.device.type) or (*module.normalized_shape,) != x.shape[3:]:
            return None
        bias = getattr(module, "bias", None)
        norm = rms.Norm(module.weight, module.eps, rms.PLAIN, rms.ONE)
    elif norm.weight is None:
        return None
    for one in (norm.weight, bias):
        if one is not None and (
            one.shape != x.shape[3:] or norm.dtypes.get((x.dtype, one.dtype)) is not x.dtype
        ):
            return None
    if type(norm.eps) is not float:
        return None
    if not is_layer and (must_be_called(module) or not is_fused(module)):
        return None
    if not are_supported(x, norm.weight, bias):
        return None
    return norm.weight, bias, norm.eps, "layer" if is_layer else "rms", norm.variant


def _arguments(
    rotation: Rotation | None, cos: Any, sin: Any, of_q: _Norm | None, of_k: _Norm | None
) -> tuple[tuple[Any, Any, Any, Any], dict[str, Any]]:
    """The arguments of qk_norm_rope behind q and k."""
    weights: tuple[Any, Any] = (None, None)
    options: dict[str, Any] = {"statistic": None, "seq_dim": 2}
    if of_q is not None and of_k is not None:
        weights, (_, _, eps, statistic, variant) = (of_q[0], of_k[0]), of_q
        options |= {"q_bias": of_q[1], "k_bias": of_k[1], "eps": eps, "statistic": statistic}
        options |= variant._asdict()
    if rotation is not None:
        size = cos.shape[-1]
        options |= {"rotary_dim": size, "interleaved": rotation.interleaved}
        if rotation.once:
            cos, sin = cos[..., : size // 2], sin[..., : size // 2]
    return (*weights, cos, sin), options


def _whole_of(
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


# ---- Their source.

_CALL = "self._rotated(FUNCTION, Q, K, COS, SIN)"
_OF_HEADS = Template("NORM(*X)"), Template("NORM(*X).transpose(1, 2)")
_ROTATION = Template("FUNCTION(Q, K, COS, SIN)", _CALL)
_SITES = (
    Template("FUNCTION(Q_NORM(Q), K_NORM(K), COS, SIN)", _CALL),
    Template(
        "FUNCTION(Q_NORM(Q).transpose(1, 2), K_NORM(K).transpose(1, 2), COS, SIN)",
        "self._rotated(FUNCTION, Q.transpose(1, 2), K.transpose(1, 2), COS, SIN)",
    ),
    _ROTATION,
    Template("(Q_NORM(Q), K_NORM(K))", "self._rotated(None, Q, K, None, None)"),
)
_RULES: Rules = {
    "FUNCTION": lambda node: isinstance(node, ast.Name) and node.id == FUNCTION,
    "NORM": lambda node: attribute_of_self(node) in ("q_norm", "k_norm"),
    "Q_NORM": lambda node: attribute_of_self(node) == "q_norm",
    "K_NORM": lambda node: attribute_of_self(node) == "k_norm",
}


def known_of(cls: type[nn.Module]) -> Known | None:
    """What the forward of a class may become, by the names in it."""
    names = rewrite.names_in(cls)
    if FUNCTION in names:
        return Known("rotation", _rotated)
    is_of_heads = {"q_norm", "k_norm"} <= {*names}
    return Known("heads", _rotated, ("q_norm", "k_norm")) if is_of_heads else None


def class_of(cls: type[nn.Module]) -> type[nn.Module] | str | None:
    """The subclass that normalizes or rotates q and k by the kernels, or the reason why there is
    none; None for a class whose forward does neither."""
    known = known_of(cls)
    return None if known is None else rewrite.remade(cls, known, class_of, _remake)


def _remake(made: source.Decorated) -> Any:
    names, rotation, function = made.function.__globals__, None, None
    rotates = FUNCTION in made.function.__code__.co_names
    if rotates:
        function = source.read_function(names, FUNCTION)
        rotation = None if function is None else SOURCES.get(function.digest)
        if function is None or rotation is None:
            return f"the source of its {FUNCTION} is not one that fused_layernorm knows"
        rewrite.postpone(made.tree.body, _OF_HEADS, [_ROTATION], _RULES, may_call=True)
    transposes = any(_SITES[1].match(node, _RULES) for node in ast.walk(made.tree))
    rewriter = rewrite.Rewriter(_RULES, *(_SITES[:3] if rotates else _SITES[3:]))
    tree = rewriter.visit(made.tree)
    in_order = _add_v(tree, Template(_CALL))
    if len(rewriter.found) != 1 or (in_order is None and not rotates):
        return f"its forward does not call {FUNCTION}(q, k, cos, sin) once" if rotates else None
    parts = () if function is None else function.parts
    members = {
        "_rotated": _rotated, "_rotation": rotation, "_norms": "Q_NORM" in rewriter.found[0],
        "_function": staticmethod(parts[0].function) if parts else None,
        "_in_order": bool(in_order), "_transposes": transposes,
    }  # fmt: skip
    return source.rebuilt(made, tree), parts, members


# ---- The names that are views of one tensor.


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
    names, value = assigned_names(statement), getattr(statement, "value", None)
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


def _add_v(forward: ast.FunctionDef, call: Template) -> bool | None:
    """`q, k = call(...)` becomes `q, k, v = call(..., v, whole)`, where q and k, and one name more,
    are views of one named tensor: whether they are its parts in this order; None if not changed."""
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
    pair = assigned_names(call)
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
