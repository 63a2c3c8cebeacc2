# SPDX-License-Identifier: Apache-2.0
"""The families of norms that are not of plain rows: over one dimension, groups of channels, gated
ones, and heads with a rotation. numerics.py says what a family is made of.

At the end stand the problems that test_every_norm.py takes from all families.
"""

import itertools
import math
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numerics
import reference
import torch
import torch.nn.functional as F
from numerics import Problem, misaligned, modulated, swapped, within

import fused_layernorm as fl

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64

# Of input, residual (None: none), modulations, weight (None: none).
MODULATED_DTYPES: Any = [
    (F32, F32, F32, F32), (BF16, BF16, BF16, BF16), (F16, F16, F16, F16), (BF16, BF16, F32, None),
    (F16, F16, F32, F32), (BF16, BF16, BF16, F32), (BF16, BF16, F32, BF16), (BF16, F32, BF16, None),
    (BF16, F32, F32, F32), (F16, F32, F16, F16), (F32, BF16, F32, None), (F64, F64, F64, F64),
]  # fmt: skip

# Without types: mypy cannot count tensors that are passed with a star.
functions: Any = fl
formulas: Any = reference

# Orders of memory of (N, C, *).
ORDERS: dict[str, Any] = {
    # A clone has contiguous strides in dimensions of size 1, too.
    "contiguous": lambda x: x.clone(memory_format=torch.contiguous_format),
    "channels_last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "misaligned": misaligned,
    "slice of channels": lambda x: within(x, 1, 2, 1),
    "channels outside": numerics.ROW_LAYOUTS["transposed leading"],
}


def is_like(result, tensor):
    return result.stride() == torch.empty_like(tensor).stride()


@dataclass(frozen=True)
class Channels(Problem):
    """A norm over dimension 1 of (N, C, *). Its tensors are views whose channels come last, as
    those of all norms of rows: shape is (N, *, C)."""

    LAYOUTS = {**ORDERS, "every second pixel": numerics.LAYOUTS["every second"]}  # noqa: RUF012

    _: KW_ONLY
    by_view: bool = False  # called as models write it, on a permuted view and without `dim`

    def draw(self, randn):
        t = Problem.draw(replace(self, layout="contiguous", dy_layout=None), randn)
        for name, layout in (("x", self.layout), ("dy", self.dy_layout or "contiguous")):
            t[name] = self.LAYOUTS[layout](t[name].movedim(-1, 1)).movedim(1, -1)
        return t

    def forward(self, t, **options):
        if self.by_view:
            return super().forward(t)
        whole = t.but(x=t.x.movedim(-1, 1))
        return (super().forward(whole, normalized_shape=None, dim=1, **options)[0].movedim(1, -1),)

    def check_strides(self, t, results):
        if self.by_view:
            assert results["y"].is_contiguous()
            return
        for name in {"y", "dx"} & {*results}:
            assert is_like(results[name].movedim(-1, 1), t.x.movedim(-1, 1)), name


def over_channels(shape, dtype=F32, weight_dtype=None, **options):
    """The norm over dimension 1 of `shape`."""
    n, c, *pixels = shape
    return Channels((n, *pixels, c), dtype, weight_dtype, **options)


@dataclass(frozen=True)
class Groups(numerics.Call):
    """A norm of groups of channels."""

    NAMES = ("x", "shift", "scale", "weight", "bias")
    HAVE_ROWS = ("x", "dy", "shift", "scale")
    OF_ROWS = ("y", "dx", "dshift", "dscale")
    LAYOUTS = {  # noqa: RUF012
        **ORDERS,
        "positions turned": lambda x: x.movedim(2, -1).contiguous().movedim(-1, 2),
        "turned": lambda x: swapped(x, 1, -1),
        "misaligned channels_last": lambda x: misaligned(x.movedim(1, -1)).movedim(-1, 1),
        "slice of channels_last": lambda x: within(x.movedim(1, -1), -1, 1, 1).movedim(-1, 1),
        "expanded": lambda x: x[:1].expand(x.shape),
    }

    _: KW_ONLY
    groups: int = 1
    modulation: str = "none"  # or "both", "shift", "scale"
    weight_layout: str = "contiguous"  # of numerics.LAYOUTS

    def draws(self, sample):
        # An error's mean over few numbers is left to chance: it is taken over some fifty at least.
        return max(64 // min(self.shape[1], 64), super().draws(sample))

    def dtype_of(self, name):
        return super().dtype_of("dweight" if name in ("dshift", "dscale") else name)

    def draw(self, randn):
        n, channels, *rest = self.shape
        weight_dtype = self.weight_dtype or self.dtype
        x = self.LAYOUTS[self.layout]((randn(self.shape) + self.mean).to(self.dtype))
        dy = randn(self.shape, self.out_dtype or self.dtype)
        t = {"x": x, "dy": self.LAYOUTS[self.dy_layout or self.layout](dy)}
        lies = numerics.LAYOUTS[self.weight_layout]
        if self.affine in ("both", "weight"):
            t["weight"] = lies(1 + randn((channels,), weight_dtype) / 2)
        if self.affine in ("both", "bias"):
            t["bias"] = lies(randn((channels,), weight_dtype))
        # Halves of one tensor, as models make them; shift has trailing dimensions.
        shift, scale = randn((n, 2 * channels), weight_dtype).chunk(2, 1)
        if self.modulation in ("both", "shift"):
            t["shift"] = shift.reshape(n, channels, *[1] * len(rest))
        if self.modulation in ("both", "scale"):
            t["scale"] = scale
        return t

    def forward(self, t):
        x, *modulations, weight, bias = (getattr(t, name) for name in self.NAMES)
        options: Any = {"activation": self.activation, "out_dtype": self.out_dtype}
        if self.modulation == "none":
            options["scale"] = self.scale
            return (fl.group_norm(x, self.groups, weight, bias, self.eps, **options),)
        given = (*modulations, weight, bias, self.eps)
        return (functions.ada_group_norm(x, self.groups, *given, **options),)

    def check_strides(self, t, results):
        for name in {"y", "dx"} & {*results}:
            assert is_like(results[name], t.x), name

    def formula(self, t):
        given = (getattr(t, name) for name in self.NAMES[1:])
        options = (self.eps, self.activation, self.scale)
        return (formulas.group_norm(t.x, self.groups, *given, *options).y,)

    def stock(self, t):
        is_whole = t.bias is None or t.weight is not None  # PyTorch's backward wants both
        weight = t.weight if is_whole else torch.ones_like(t.bias)
        y = torch.group_norm(t.x, self.groups, weight, t.bias, self.eps)
        ones = [1] * (t.x.dim() - 2)
        y = y if t.scale is None else y * (1 + t.scale.reshape(*t.scale.shape[:2], *ones))
        y = y if t.shift is None else y + t.shift
        return (numerics.activate(y, self.activation) * self.scale,)


def of_groups(shape, groups, dtypes=(F32, None), **others):
    return Groups(shape, *dtypes, groups=groups, **others)


@dataclass(frozen=True)
class Gated(numerics.Call):
    """An RMSNorm with a gate behind it or in front."""

    NAMES = ("x", "gate", "weight", "bias")
    HAVE_ROWS = ("x", "gate", "dy")
    OF_ROWS = ("y", "dx", "dgate")
    # A slice of a projection's columns, as Qwen3-Next and Mamba 2 cut the gate out, and others.
    LAYOUTS = {  # noqa: RUF012
        "contiguous": torch.clone,
        "sliced": lambda t: within(t, -1, 8, t.shape[-1]),
        "misaligned": misaligned,
        "transposed": numerics.ROW_LAYOUTS["transposed"],
        "expanded": lambda t: t[:1].expand(t.shape),
    }

    _: KW_ONLY
    gate_dtype: torch.dtype | None = None  # by default dtype
    gate_layout: str = "contiguous"
    gate_first: bool = False
    gate_activation: str = "silu"
    group_size: int | None = None

    def dtype_of(self, name):
        return self.gate_dtype or self.dtype if name == "dgate" else super().dtype_of(name)

    @property
    def form(self) -> Any:
        names = ("gate_first", "gate_activation", "group_size", "weight_offset")
        return {name: getattr(self, name) for name in names}

    def draw(self, randn):
        columns, of = self.shape[-1:], F64
        t = {
            "x": randn(self.shape, self.dtype, of),
            "gate": randn(self.shape, self.gate_dtype or self.dtype, of),
            "weight": randn(columns, self.weight_dtype or self.dtype, of),
            "bias": randn(columns, self.weight_dtype or self.dtype, of),
            "dy": randn(self.shape, self.out_dtype or self.dtype),
        }
        for name in ("weight", "bias"):
            t[name] = t[name] if self.affine in ("both", name) else None
        for name, layout in (("x", self.layout), ("gate", self.gate_layout), ("dy", self.layout)):
            t[name] = self.LAYOUTS[layout](t[name])
        return t

    def forward(self, t):
        options = {**self.form, "out_dtype": self.out_dtype, "round_before_weight": self.rounds}
        return (fl.rms_norm_gated(t.x, t.gate, t.weight, self.eps, bias=t.bias, **options),)

    def formula(self, t, rounding=None):
        given = (getattr(t, name) for name in self.NAMES)
        if rounding is not None:
            rounding = (rounding, torch.promote_types(rounding, self.weight_dtype or rounding))
        return (formulas.rms_norm_gated(*given, self.eps, rounding=rounding, **self.form),)

    stock = formula  # elementary functions of PyTorch, in its tensors' type


GATED_FORMS: list[dict[str, Any]] = [
    {"gate_first": first, "gate_activation": activation, "group_size": size}
    for first, activation, size in itertools.product((False, True), ("silu", "sigmoid"), (None, 8))
]


@dataclass(frozen=True)
class Heads(numerics.Call):
    """Norm and rotation of q and k: shape is (batch, positions, columns)."""

    NAMES = ("q", "k", "q_weight", "k_weight", "q_bias", "k_bias")
    OUTPUTS = {"q_out": "dq_out", "k_out": "dk_out"}  # noqa: RUF012
    HAVE_ROWS = ("q", "k", "dq_out", "dk_out")
    OF_ROWS = ("q_out", "k_out", "dq", "dk")
    BITS_OF_ANY_GRADIENTS = False
    GREATEST_FACTOR = None
    SLACK = (2.0**-23, 2.0**-52)

    _: KW_ONLY
    heads: tuple[int, int] = (6, 2)
    rotary: int | None = None
    statistic: str | None = "rms"
    affine: str = "weight"  # or none, both
    angles: str = "positions"  # or samples, doubled, strided, none
    angle_dtype: torch.dtype = F32
    interleaved: bool = False
    seq_dim: int = 1
    eps: float = 1e-6

    def draws(self, sample):
        return 3

    def draw(self, randn):
        batch, positions, cols = self.shape
        q, k = (randn((batch, positions, n, cols), self.dtype) + self.mean for n in self.heads)
        q, k = HEAD_LAYOUTS[self.layout](q, k)
        dq, dk = (randn(x.shape, self.dtype) for x in (q, k))
        if self.seq_dim == 2:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
            dq, dk = (dy.transpose(1, 2).contiguous() for dy in (dq, dk))
        t = {"q": q, "k": k, "dq_out": dq, "dk_out": dk, "cos": None, "sin": None}
        weight_dtype = self.weight_dtype or self.dtype
        if self.affine != "none":
            t |= {n: 1 + randn((cols,), weight_dtype) / 2 for n in ("q_weight", "k_weight")}
        if self.affine == "both":
            t |= {n: randn((cols,), weight_dtype) for n in ("q_bias", "k_bias")}
        if self.angles == "none":
            return t
        shape = (batch, positions) if self.angles == "samples" else (positions,)
        angle = 10 * randn((*shape, (self.rotary or cols) // 2))
        cos, sin = angle.cos().to(self.angle_dtype), angle.sin().to(self.angle_dtype)
        if self.angles == "doubled":
            cos, sin = (
                u.repeat_interleave(2, -1)[None]
                if self.interleaved
                else torch.cat([u, u], -1)[None]
                for u in (cos, sin)
            )
        if self.angles == "strided":
            cos, sin = torch.view_as_real(torch.complex(cos.float(), sin.float())).unbind(-1)
        return t | {"cos": cos, "sin": sin}

    @property
    def rotation(self) -> Any:
        rotary = self.rotary if self.angles != "none" else None
        return {"rotary_dim": rotary, "interleaved": self.interleaved, "seq_dim": self.seq_dim}

    @property
    def options(self) -> Any:
        kind = {"statistic": self.statistic, "weight_offset": self.weight_offset}
        return {"eps": self.eps, **kind, **self.rotation}

    def forward(self, t):
        return functions.qk_norm_rope(
            t.q, t.k, t.q_weight, t.k_weight, t.cos, t.sin, q_bias=t.q_bias, k_bias=t.k_bias,
            round_before_weight=self.rounds, **self.options,
        )  # fmt: skip

    def check_strides(self, t, results):
        if self.layout in ("packed", "heads first", "positions first"):
            assert is_like(results["q_out"], t.q)
            assert is_like(results["k_out"], t.k)

    def _sides(self, t):
        return ((t.q, t.q_weight, t.q_bias), (t.k, t.k_weight, t.k_bias))

    def formula(self, t, rounding=None):
        return tuple(
            reference.norm_rope(x, w, t.cos, t.sin, bias=b, rounding=rounding, **self.options)
            for x, w, b in self._sides(t)
        )

    def stock(self, t):
        def normalized(x, weight, bias):
            if self.statistic is None:
                return x
            w = weight if weight is None else weight + self.weight_offset
            if self.statistic == "layer":
                return F.layer_norm(x, x.shape[-1:], w, bias, self.eps)
            y = F.rms_norm(x, x.shape[-1:], w, self.eps)
            return y if bias is None else y + bias

        sides = self._sides(t)
        return tuple(reference.rotate(normalized(*s), t.cos, t.sin, **self.rotation) for s in sides)

    def of_all(self, t, found, function, *, is_exact, backward):
        results = super().of_all(t, found, function, is_exact=is_exact, backward=backward)
        if is_exact and self.rounds and self.affine != "none":
            rounded = self.formula(t, self.dtype)
            results |= dict(zip(self.OUTPUTS, rounded, strict=True))
        return results

    def rounding_of(self, name, expected):
        roundings = super().rounding_of(name, expected)
        if self.rounds and name in self.OUTPUTS:
            # A value behind a rounding to x's dtype may be the other of two neighbours, times a
            # weight and a rotation.
            roundings = roundings + 8 * torch.finfo(self.dtype).eps * (1 + numerics.HALF_SLACK)
        return roundings


def of_heads(cols=64, dtype=BF16, *, batch=2, positions=5, **others):
    return Heads((batch, positions, cols), dtype, **others)


def _packed(q, k):
    """Slices of one tensor of q, k and v."""
    qkv = torch.cat([q, k, torch.full_like(k, math.nan)], 2)
    return qkv[:, :, : q.shape[2]], qkv[:, :, q.shape[2] : q.shape[2] + k.shape[2]]


HEAD_LAYOUTS: dict[str, Any] = {
    "contiguous": lambda q, k: (q, k),
    "packed": _packed,
    "heads first": lambda q, k: (swapped(q, 1, 2), swapped(k, 1, 2)),
    "positions first": lambda q, k: (swapped(q, 0, 1), k),
    "misaligned": lambda q, k: (misaligned(q), misaligned(k)),
    "columns apart": lambda q, k: (numerics.LAYOUTS["every second"](q), k),
}


@dataclass(frozen=True)
class Packed(Heads):
    """The same of q, k and v in one tensor."""

    NAMES = ("qkv", "q_weight", "k_weight", "q_bias", "k_bias")  # type: ignore[assignment]
    OUTPUTS = {**Heads.OUTPUTS, "v": "dv"}  # noqa: RUF012
    HAVE_ROWS = ("qkv", "dq_out", "dk_out", "dv")
    OF_ROWS = ("q_out", "k_out", "v", "dqkv")
    LAYOUTS = {  # noqa: RUF012
        "contiguous": torch.clone,
        "positions first": lambda qkv: swapped(qkv, 0, 1),
        "misaligned": misaligned,
        "columns apart": numerics.LAYOUTS["every second"],
        "parts first": lambda qkv: qkv.movedim(2, 0).contiguous().movedim(0, 2),
        "sliced": lambda qkv: within(qkv, -1, 16, 8),
    }

    _: KW_ONLY
    packing: str = "3hd"
    in_rows: bool = True  # of three dimensions, not five

    def draw(self, randn):
        plain: Any = replace(self, layout="contiguous", seq_dim=1)
        t = Heads.draw(plain, randn)
        q, k, v = t.pop("q"), t.pop("k"), randn(t["dk_out"].shape, self.dtype)
        if self.packing == "3hd":
            qkv = torch.cat((q, k, v), 2)
        else:
            of_q = q.unflatten(2, (k.shape[2], -1))
            qkv = torch.cat((of_q, k.unsqueeze(3), v.unsqueeze(3)), 3).flatten(2, 3)
        if self.in_rows:
            qkv = qkv.flatten(2)
        else:
            qkv = qkv.unflatten(2, (3, -1) if self.packing == "3hd" else (-1, 3))
        t |= {"qkv": self.LAYOUTS[self.layout](qkv), "dv": randn(v.shape, self.dtype)}
        if self.seq_dim == 2:
            t |= {n: t[n].transpose(1, 2).contiguous() for n in self.OUTPUTS.values()}
        return t

    def split(self, qkv):
        """q, k and v in qkv."""
        cols, kv = self.shape[-1], self.heads[1]
        heads = qkv.flatten(2, -2) if qkv.dim() == 5 else qkv.unflatten(2, (-1, cols))
        if self.packing == "3hd":
            found = heads.split((self.heads[0], kv, kv), 2)
        else:
            groups = heads.unflatten(2, (kv, -1))
            q, k, v = groups.split((groups.shape[3] - 2, 1, 1), 3)
            found = q.flatten(2, 3), k.squeeze(3), v.squeeze(3)
        return [x.transpose(1, 2) for x in found] if self.seq_dim == 2 else found

    def forward(self, t):
        shape = {"num_kv_heads": self.heads[1], "head_dim": self.shape[-1]} if self.in_rows else {}
        return functions.qkv_norm_rope(
            t.qkv, t.q_weight, t.k_weight, t.cos, t.sin, q_bias=t.q_bias, k_bias=t.k_bias,
            round_before_weight=self.rounds, layout=self.packing, **shape, **self.options,
        )  # fmt: skip

    def check_strides(self, t, results):
        if (dqkv := results.get("dqkv")) is not None and self.layout not in UNLIKE_QKV:
            assert is_like(dqkv, t.qkv)
        for name, part in zip(("q_out", "k_out", "v"), self.split(t.qkv), strict=True):
            assert name not in results or results[name].shape == part.shape

    def _sides(self, t):
        q, k, _ = self.split(t.qkv)
        return ((q, t.q_weight, t.q_bias), (k, t.k_weight, t.k_bias))

    def formula(self, t, rounding=None):
        return (*super().formula(t, rounding), self.split(t.qkv)[2])

    def stock(self, t):
        return (*super().stock(t), self.split(t.qkv)[2])


UNLIKE_QKV = ("columns apart", "parts first")  # whose gradient is autograd's own


def of_packed(cols=64, dtype=BF16, *, batch=2, positions=5, **others):
    return Packed((batch, positions, cols), dtype, **others)


PACKED: list[Any] = [
    of_packed(), of_packed(packing="h3d"), of_packed(packing="h3d", heads=(3, 3)),
    *(of_packed(packing=packing, in_rows=False, heads=(3, 3), seq_dim=seq_dim, layout=layout)
      for packing in ("3hd", "h3d") for seq_dim in (1, 2)
      for layout in ("contiguous", "positions first", "parts first", "misaligned")),
    *(of_packed(packing=packing, layout=layout, seq_dim=2, dtype=F32, cols=16)
      for packing in ("3hd", "h3d") for layout in ("positions first", "columns apart", "sliced")),
    *(of_packed(cols=cols, packing=packing, heads=heads, interleaved=cols == 80)
      for cols, heads in ((2, (2, 2)), (6, (6, 1)), (80, (40, 8)), (128, (20, 4)), (254, (2, 2)),
                          (256, (5, 5)))
      for packing in ("3hd", "h3d")),
    of_packed(statistic="layer", affine="both", rotary=16, packing="h3d", weight_dtype=F32),
    *(of_packed(statistic=None, affine="none", packing=packing, dtype=dtype, rotary=rotary,
                heads=heads)
      for packing, dtype, rotary, heads in (("3hd", BF16, None, (4, 2)), ("h3d", F16, 32, (6, 2)),
                                            ("h3d", F32, 16, (3, 3)), ("3hd", BF16, 20, (3, 3)))),
    of_packed(angles="none", affine="both"), of_packed(rounds=True, packing="h3d"),
    of_packed(angles="samples", dtype=F16), of_packed(dtype=F64), of_packed(cols=258, dtype=F32),
    of_packed(positions=700, batch=3, heads=(16, 4)),
    of_packed(positions=300, heads=(12, 4), packing="h3d", statistic=None, affine="none"),
    # Both sides of what one warp holds at once, and heads of sides of different sizes.
    *(of_packed(cols=cols, heads=heads, packing="h3d", positions=3)
      for cols in (64, 128) for heads in ((1, 1), (2, 1), (9, 3), (33, 11))),
]  # fmt: skip

# ---- The problems of every norm.

# With the strategies of forward and backward on an H100.
GROUP_KERNELS: list[Any] = [
    (of_groups((3, 64, 40, 40), 8, (BF16, None), activation="silu"), "held held"),
    (of_groups((3, 64, 56, 56), 8, (BF16, None), activation="silu"), "held held"),  # of two blocks
    (of_groups((2, 160, 64, 64), 8, (BF16, None), activation="silu"), "held split"),  # of eight
    (of_groups((2, 144, 64, 64), 8, (BF16, None), activation="silu"), "held tiles"),
    (of_groups((2, 320, 32, 32), 8, (BF16, F32), modulation="both", activation="silu"),
     "held tiles"),
    (of_groups((2, 80, 128, 128), 8, (BF16, None), activation="silu"), "split split"),
    (of_groups((1, 128, 128, 128), 8, (BF16, None), activation="silu"), "split split"),
    (of_groups((2, 128, 128, 128), 8, (F32, None), activation="gelu"), "split split"),
    (of_groups((1, 32, 512, 512), 8, (F16, F32), activation="silu"), "split split"),
    (of_groups((1, 16, 512, 512), 1, (BF16, None), activation="silu"), "split split"),
    (of_groups((1, 24, 262, 260), 2, (BF16, F32), modulation="both"), "split split"),
    # So many groups that their places in the blocks' shared memory are used again.
    (of_groups((6, 320, 160, 136), 32, (BF16, None), activation="silu"), "split split"),
    (of_groups((1, 64, 512, 512), 1, (BF16, None), activation="silu"), "tiles tiles"),
    (of_groups((3, 64, 101, 103), 8, (BF16, None), activation="silu"), "held held"),  # of eight
    (of_groups((3, 64, 131, 133), 8, (BF16, None), activation="silu"), "tiles tiles"),
    (of_groups((1, 8, 16, 64, 64), 8, (F32, None), activation="leaky_relu"), "split tiles"),
    (of_groups((2, 32, 64, 64), 32, (F16, F32), out_dtype=F32, activation="leaky_relu"),
     "held held"),
    (of_groups((2, 33, 57, 59), 11, (F32, None), out_dtype=BF16, activation="relu"), "held held"),
    *((of_groups((n, channels, side, side), 32, dtypes, layout="channels_last", activation="silu",
          modulation=modulation), "tiles tiles")
      for n, channels, side, modulation in ((2, 320, 64, "none"), (1, 1280, 32, "both"),
                                            (3, 128, 100, "none"), (2, 2560, 16, "scale"),
                                            (1, 4160, 9, "none"))
      for dtypes in ((BF16, None), (F32, None), (F16, F32))),
    (of_groups((3, 75, 33, 31), 5, (BF16, None), layout="channels_last"), "tiles tiles"),
    (of_groups((3, 64, 33, 31), 8, (BF16, None), layout="misaligned channels_last"), "tiles tiles"),
    (of_groups((3, 64, 56, 56), 8, (BF16, None), layout="misaligned"), "held held"),
    *((of_groups((5, 30, 37, 41), 5, (half, F32), out_dtype=y, activation="silu"), "held held")
      for half, y in ((BF16, None), (F16, F32))),
    # Vectors of float32 with elements of two channels, of a block, of two and of eight.
    *((of_groups((3, 12, height, 31), 3, (F32, None), modulation="both", activation=activation),
       "held held")
      for height, activation in ((37, "silu"), (91, "leaky_relu"), (301, None))),
    (of_groups((3, 12, 301, 31), 4, (F32, None)), "held tiles"),  # a group is no whole vectors
    # One position: groups of some lanes, of a warp, of a block, of two to eight blocks; of single
    # elements; of more than eight blocks hold.
    *((of_groups((67, channels), channels // of_group, dtypes, out_dtype=y),
       "held tiles" if of_group > 32_768 else "one_position one_position")
      for channels, of_group, dtypes, y in (
          (1024, 32, (F32, None), None), (2048, 64, (F64, None), None),
          (4096, 16, (BF16, F32), None), (4096, 16, (BF16, None), F32),
          (6144, 3072, (F16, None), None), (8192, 4096, (F32, None), None),
          (16_400, 8200, (F32, None), None), (32_768, 32_768, (F16, F32), F32),
          (3072, 2, (F32, None), None), (1020, 20, (BF16, F32), None),
          (1010, 101, (BF16, None), F32), (4099, 4099, (F32, None), None),
          (32_776, 32_776, (F32, None), None))),
    # channels_last in one tile: several slices, each of whole groups, and with groups in two.
    *((of_groups((3, channels, 3, 3), groups, (F32, None), layout="channels_last",
                 modulation="both", activation="silu"), "tiles tiles")
      for channels, groups in ((1280, 32), (1280, 5), (24, 1))),
]  # fmt: skip

# A few of every family, of which no result is large.
SMALL: list[Any] = [
    Problem((9, 64)),
    Problem((5, 3, 257), BF16, F32, activation="gelu", scale=0.5),
    Problem((40, 1000), BF16, statistic="rms", weight_offset=1.0, affine="weight"),
    Problem((50, 8191)), Problem((30, 40_000), BF16),
    Problem((9, 1024), BF16, residual_dtype=F32, activation="silu"),
    modulated((3, 7, 64)), modulated((3, 7, 96), "token", dtypes=(BF16, BF16, F32, None)),
    modulated((3, 7, 64), gated=True, dtypes=(BF16, F32, BF16, F32)),
    over_channels((3, 24, 4, 8)), over_channels((3, 16, 7, 7), BF16, statistic="rms", by_view=True),
    over_channels((3, 40, 6, 5), BF16, F32, layout="channels_last", activation="silu"),
    of_groups((3, 12, 5, 8), 4, modulation="both", activation="silu"),
    of_groups((3, 12, 50), 4, (BF16, F32), layout="channels_last", activation="relu"),
    Gated((9, 64), BF16, affine="weight", group_size=16),
    Gated((9, 128), affine="weight", gate_first=True),
    Gated((5, 1024), BF16, F32, gate_activation="sigmoid", gate_layout="sliced", affine="none"),
    Heads((3, 5, 64), BF16, layout="packed"),
    Heads((3, 5, 24), statistic="layer", affine="both", rotary=8, interleaved=True, seq_dim=2),
    Packed((3, 5, 64), BF16), Packed((3, 5, 16), packing="h3d", seq_dim=2),
    Packed((3, 5, 16), statistic=None, affine="none", packing="h3d"),
]  # fmt: skip

# Without a single element.
EMPTY: list[Any] = [
    *(Problem(shape) for shape in [(0, 8), (2, 0, 8), (0, 3, 4), (2, 0), (0, 0)]),
    Problem((0, 64), statistic="rms"),
    *(Problem(shape, residual_dtype=F32, activation="gelu")
      for shape in [(0, 8), (2, 0), (3, 0, 5)]),
    *(modulated(shape, kind, gated=True) for shape in [(0, 4, 8), (3, 0, 8), (3, 4, 0)]
      for kind in ("all", "sample", "token", "position")),
    *(over_channels(shape) for shape in [(0, 4, 3, 3), (2, 4, 0, 3), (2, 0, 3, 3)]),
    *(of_groups(shape, 2, (BF16, F32), modulation="both", activation="silu")
      for shape in [(0, 4, 3), (2, 4, 0), (0, 4), (2, 4, 3, 0)]),
    *(Gated(shape, BF16) for shape in [(0, 8), (2, 0), (0, 3, 8)]),
    Heads((0, 3, 8)), Heads((2, 0, 8)), Heads((2, 3, 8), heads=(0, 0)),
    Packed((0, 3, 8)), Packed((2, 0, 8), packing="h3d"),
    Packed((2, 0, 8), statistic=None, affine="none"),
]  # fmt: skip

# One for every strategy of the GPU, whose samples or rows do not depend on the batch. (Forward and
# backward of GROUP_KERNELS belong to them.)
KERNELS: list[Any] = [
    *(Problem((3000, cols), dtype)
      for dtype in (F32, BF16)
      for cols in (3, 64, 256, 257, 1023, 1024, 4096, 8191, 16_384, 40_000)),
    *(Problem((3000, cols), dtype, residual_dtype=F32, activation="gelu")
      for dtype in (F32, BF16) for cols in (64, 1024, 8191, 40_000)),
    *(Problem((3000, cols), dtype, F32, affine="weight")
      for dtype in (F32, BF16) for cols in (3, 1000, 70_000)),
    *(Problem((300, cols), BF16, statistic="rms", affine="weight", rounds=rounds)
      for cols in (64, 1021, 4096, 16_384) for rounds in (False, True)),
    # By the ring, of which plans give some of these rows to others.
    *(Problem(shape, dtype, forced=("ring", None))
      for shape, dtype in [((37, 150_528), F32), ((5, 4_194_304), F32), ((37, 65_536), BF16)]),
    *(modulated((301, 9, cols), kind, gated=gated) for cols in (3, 64, 257, 1152, 4096, 8193, 40000)
      for kind in ("sample", "token", "number of a sample") for gated in (False, True)),
    *(over_channels(shape, BF16)
      for shape in [(700, 64, 7, 7), (300, 768, 11, 11), (600, 384, 14, 14), (600, 96, 8, 19),
                    (16, 4096, 15, 15)]),
    *(replace(problem, shape=(5, *problem.shape[1:])) for problem, _ in
      [*GROUP_KERNELS[:9], GROUP_KERNELS[13], GROUP_KERNELS[17]]),
    of_groups((5, 12, 5, 7), 3, (BF16, F32), modulation="both", layout="channels_last"),
    *(Gated((700, cols), BF16, affine="weight", group_size=size, gate_first=first)
      for first in (False, True)
      for cols, size in [(128, None), (1024, 256), (8192, None), (8192, 1024), (100, None)]),
    Heads((4, 37, 128), BF16, statistic="layer", affine="both"),
    *(Heads((4, positions, cols), BF16, rotary=rotary, layout="packed")
      for positions, cols, rotary in [(2000, 128, None), (65, 80, 32)]),
    *(Packed((4, positions, cols), BF16, rotary=rotary, packing=packing)
      for positions, cols, rotary, packing in [(2000, 128, None, "3hd"), (65, 80, 32, "h3d")]),
    Packed((4, 700, 64), BF16, statistic=None, affine="none", packing="h3d"),
]  # fmt: skip
