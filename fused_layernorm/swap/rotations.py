# SPDX-License-Identifier: Apache-2.0
"""swap_norms(model, neighbours=True): attention modules whose q and k are rotated by the kernels.

transformers writes the same rotation in each model's file, as a function apply_rotary_pos_emb that
the attention's forward calls. The forward of a swapped module (rewrite.py) calls `_rotated` in its
place. Where the last thing that happens to q and k before the rotation is `self.q_norm` and
`self.k_norm`, these calls are left out of the forward, and norm and rotation are one kernel. The
function is known by the digest of its source, and so is Liger's, which may stand in its place. A
call that the kernels do not take gets the norms' own forwards and the function that the forward
finds under that name. The kernels read cos and sin once for each pair of columns: that both hold
each value twice, as the rotary embeddings of transformers give them, is taken for granted.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..heads import qk_norm_rope, qkv_norm_rope
from ..stock import are_supported, has_kernels
from . import packed, rewrite, rms, source
from .classes import Known, is_as_read, must_be_called
from .rewrite import Rules, Template, attribute_of_self, target_of

FUNCTION = "apply_rotary_pos_emb"
KIND = "rotation"  # of the swapped classes, beside layer, rms and registered


class Rotation(NamedTuple):
    """What a function rotates by. It is given cos and sin of all rotated columns."""

    interleaved: bool = False
    once: bool = False  # the first half of cos and sin holds each pair's value
    partial: bool = False  # only as many columns are rotated as cos has
    keeps_dtype: bool = False  # the result has q's dtype; otherwise q's and cos's are promoted


# From the digest of apply_rotary_pos_emb and the functions that it calls, without decorators; in
# comments a model that has it. The second of a line had an argument position_ids, before
# transformers 5.
SOURCES: dict[str, Rotation] = {
    digest: rotation
    for digests, rotation in (
        ("6922d206ec751dc2 62380bac24241fdd", Rotation()),  # llama
        ("e9a8aadde98dff5b 2c8a318a1d377ae6", Rotation(partial=True)),  # gpt_neox
        ("8d61390b28a94d9c e4a565c859160ae8", Rotation(partial=True)),  # phi3
        ("3de9e6a335fe556a 10547c0feab1d2a3", Rotation(keeps_dtype=True)),  # olmo2
        ("4540e3863830158a 3fe1dd310493db23", Rotation(keeps_dtype=True)),  # modernbert
        ("cc185f615eebaf13 91e30ab1dc7dd407", Rotation(True, keeps_dtype=True)),  # cohere
        ("4c0d925fd3f34deb 00483a36817e7667", Rotation(True, True, True)),  # glm
        ("47670ed22499e77d 6004dd35a1051883", Rotation(True, True, False, True)),  # ernie4_5
        # liger_rotary_pos_emb of liger-kernel 0.8.5
        ("c3de4d72201d9049", Rotation(partial=True, keeps_dtype=True)),
    )
    for digest in digests.split()
}

# ---- What a swapped forward calls.


def _rotated(
    self: Any,
    function: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    v: Tensor | None = None,
    whole: Any = None,
) -> tuple[Tensor, ...]:
    """q and k, (batch, heads, positions, columns), normalized if the class says so, and rotated;
    and v, where it is given with the tensor of which all three may be views."""
    kernel = function is self._function and is_supported(self._rotation, q, k, cos, sin)
    kernel = kernel and is_as_read(type(self))
    norm = None
    if self._norms:
        norm = _norm_of(self.q_norm, self.k_norm, q) if kernel else None
        if norm is None:
            q, k, whole = self.q_norm(q), self.k_norm(k), None
            kernel = kernel and is_supported(self._rotation, q, k, cos, sin)
    if kernel and v is not None and whole is not None:
        found = packed.whole_of(whole, q, k, v, self._in_order)
        if found is not None:
            return rotate(self._rotation, q, k, cos, sin, norm, found)
    if kernel:
        q, k = rotate(self._rotation, q, k, cos, sin, norm)
    else:
        q, k = function(q, k, cos, sin)
    return (q, k) if v is None else (q, k, v)


def is_supported(rotation: Rotation, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the kernels rotate these as the library's function does."""
    if not are_supported(q, k, cos, sin) or not has_kernels(q) or q.dim() != 4 or k.dim() != 4:
        return False
    keeps, size = rotation.keeps_dtype and cos.dtype is torch.float32, cos.shape[-1]
    return (
        q.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and k.dtype is q.dtype
        and (cos.dtype is q.dtype or keeps)
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


def _norm_of(q_norm: Any, k_norm: Any, q: Tensor) -> tuple[rms.Norm, rms.Norm] | None:
    """The norms of q and k, if the kernel computes what the two modules do."""
    found: list[rms.Norm] = []
    for module in (q_norm, k_norm):
        norm = rms.norm_of(module, q)
        if norm is None or must_be_called(module) or not is_as_read(type(module)):
            return None
        weight = norm.weight
        if weight is None or not are_supported(q, weight) or weight.shape != q.shape[3:]:
            return None
        if norm.dtypes.get((q.dtype, weight.dtype)) is not q.dtype or type(norm.eps) is not float:
            return None
        found.append(norm)
    of_q, of_k = found
    return (of_q, of_k) if of_q[1:] == of_k[1:] else None


def rotate(
    rotation: Rotation,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[rms.Norm, rms.Norm] | None = None,
    whole: packed.Whole | None = None,
) -> tuple[Tensor, ...]:
    size = cos.shape[-1]
    if rotation.once:
        cos, sin = cos[..., : size // 2], sin[..., : size // 2]
    options: Any = {"rotary_dim": size, "interleaved": rotation.interleaved, "seq_dim": 2}
    q_weight = k_weight = None
    if norms is None:
        options["statistic"] = None
    else:
        of_q, of_k = norms
        q_weight, k_weight = of_q.weight, of_k.weight
        options |= {"eps": of_q.eps, **of_q.variant._asdict()}
    if whole is None:
        return qk_norm_rope(q, k, q_weight, k_weight, cos, sin, **options)
    options |= whole._asdict()
    return qkv_norm_rope(options.pop("qkv"), q_weight, k_weight, cos, sin, **options)


# ---- Their source.

_ROTATION = Template(f"{FUNCTION}(Q, K, COS, SIN)", f"self._rotated({FUNCTION}, Q, K, COS, SIN)")
_ROTATED = Template(f"self._rotated({FUNCTION}, Q, K, COS, SIN)")
_HEADS: Rules = {"NORM": lambda node: attribute_of_self(node) in ("q_norm", "k_norm")}
_NORM_OF_HEADS = Template("NORM(X)", "X")
_BEFORE_ROTATION = Template("NORM(X).transpose(1, 2)"), _NORM_OF_HEADS


def _ends_in_norms(forward: ast.FunctionDef) -> bool:
    """Whether the norms of heads are the last that happens to q and k before the rotation.

    Such is `x = self.q_norm(...)` or `x = self.q_norm(...).transpose(1, 2)`, and the next statement
    that mentions x is the rotation. Between the first norm and the rotation stand nothing but
    assignments to names; each norm is mentioned once in all of the forward.
    """
    mentioned = [node.attr for node in ast.walk(forward) if isinstance(node, ast.Attribute)]
    if any(mentioned.count(name) != 1 for name in ("q_norm", "k_norm")):
        return False
    given: dict[str, str] = {}  # from q_norm and k_norm to the name that has its result
    for statement in forward.body:
        value: Any = getattr(statement, "value", None)
        rotation = _ROTATION.match(value, {})
        if rotation is not None:
            names = [ast.unparse(rotation[name]) for name in "QK"]
            return names == [given.get("q_norm"), given.get("k_norm")]
        names = [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]
        if given and (not _assigns_names(statement) or {*names} & {*given.values()}):
            return False
        bound = next(filter(None, (one.match(value, _HEADS) for one in _BEFORE_ROTATION)), None)
        if bound is not None:
            target = target_of(statement)
            if target is None or not _assigns_names(statement):
                return False
            given[attribute_of_self(bound["NORM"])] = target
    return False


def _assigns_names(statement: ast.stmt) -> bool:
    """Whether a statement assigns to names, and does nothing else."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return False
    target = statement.targets[0]
    targets = target.elts if isinstance(target, ast.Tuple) else [target]
    inner = (isinstance(node, ast.NamedExpr) for node in ast.walk(statement.value))
    return not any(inner) and all(isinstance(one, ast.Name) for one in targets)


def class_of(cls: type[nn.Module]) -> type[nn.Module] | str | None:
    """The subclass that rotates by the kernels, or the reason why there is none.

    None for a class whose forward calls no function of this name.
    """
    if FUNCTION not in rewrite.names_in(cls):
        return None
    return rewrite.remade(cls, Known(KIND, _rotated), class_of, _remake)


def _remake(made: source.Decorated) -> Any:
    function = source.read_function(made.function.__globals__, FUNCTION)
    rotation = None if function is None else SOURCES.get(function.digest)
    if function is None or rotation is None:
        return f"the source of its {FUNCTION} is not one that fused_layernorm knows"
    norms = _ends_in_norms(made.tree)
    rewriter = rewrite.Rewriter(_HEADS, _ROTATION, *([_NORM_OF_HEADS] if norms else []))
    tree = rewriter.visit(made.tree)
    in_order = bool(packed.add_v(tree, _ROTATED))
    if sum("COS" in bound for bound in rewriter.found) != 1:
        return f"its forward does not call {FUNCTION}(q, k, cos, sin) once"
    members: dict[str, Any] = {"_norms": norms, "_rotated": _rotated, "_rotation": rotation}
    members |= {"_in_order": in_order, "_function": staticmethod(function.parts[0].function)}
    return source.rebuilt(made, tree), function.parts, members
