# SPDX-License-Identifier: Apache-2.0
"""The families of operators that are measured, one row of a table each.

A family says how its tensors lie, how many of them must move, which operator of this package
computes it, and how models write it in PyTorch (`stock`). All else follows: the inputs
(benchmarks.ours), the other providers' results and gradients (benchmarks.providers), the operators'
names (`<family>forward`, `<family>backward`), the headings of the page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Case: TypeAlias = Any  # a case of benchmarks.cases, which knows this table
EPS = 1e-5
Tensors = dict[str, Tensor]
Stock = Callable[[Case, Tensors], Any]

# How x lies.
ROWS = "rows"  # rows x columns
SAMPLES = "samples"  # samples x tokens x columns, with modulations of a sample or of a token
IMAGE = "image"  # N x C x H x W
HEADS = "heads"  # samples x positions x heads x columns of q and of k, inside a packed qkv tensor


@dataclass(frozen=True)
class Family:
    """One row of the table.

    `inputs` are the tensors of a forward call, in the order in which our backward operator gives
    the gradients of those that have one. `tensors` is how many tensors of x's size must move,
    forward and backward, y or dy among them. `operator` is the name of this package's; `options`
    those of its arguments that are no tensors and have other values than OPTIONS. `groups` of an
    image is how many groups its channels have, each of which is a row.
    """

    name: str
    title: str
    stock: Stock
    operator: str = "layer_norm"
    inputs: tuple[str, ...] = ("x", "weight", "bias")
    tensors: tuple[int, int] = (2, 3)
    layout: str = ROWS
    groups: int | None = None
    ways: tuple[str, ...] = ("forward", "backward")
    activation: str | None = None
    scale: float = 1.0
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def residual(self) -> bool:
        return "residual" in self.inputs

    @property
    def nhwc(self) -> bool:
        """Whether y and dx have the channels of a pixel side by side."""
        return self.layout == IMAGE and "nhwc" in self.name

    @property
    def gradients(self) -> tuple[str, ...]:
        """The inputs that have a gradient of their own; that of a plain sum's residual is x's."""
        without = {"cos", "sin"} if "gate" in self.inputs else {"cos", "sin", "residual"}
        return tuple(name for name in self.inputs if name not in without)

    @property
    def operators(self) -> tuple[str, str]:
        """Forward and backward; a plain sum's gradients are those of its norm."""
        of_norm = "layer_norm" if self.operator == "add_layer_norm" else self.operator
        return self.operator, f"{of_norm}_backward"


def norm(case: Case, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """The case's norm of the last dimension, in y's dtype. PyTorch takes no half-precision x beside
    float32 parameters: x is cast, as autocast does."""
    x = x if weight is None else x.to(weight.dtype)
    y = (F.rms_norm(x, (case.cols,), weight, EPS) if RMS[0] in case.family.options
         else F.layer_norm(x, (case.cols,), weight, bias, EPS))  # fmt: skip
    return y.to(case.torch_out_dtype) if case.mixed else y


def activated(case: Case, y: Tensor) -> Tensor:
    activation, scale = case.family.activation, case.family.scale
    y = y if activation is None else getattr(F, activation)(y)
    return y if scale == 1.0 else y * scale


def plain(case: Case, t: Tensors) -> Any:
    return activated(case, norm(case, t["x"], t["weight"], t.get("bias")))


def added(case: Case, t: Tensors) -> Any:
    total = t["x"] + t["residual"]
    return norm(case, total, t["weight"], t.get("bias")), total


def modulated(case: Case, t: Tensors) -> Any:
    """As diffusion transformers write it: beside float32 modulations x and the sum are cast."""
    wide, x = case.torch_modulation_dtype, t["x"]
    if case.family.residual:
        x = (t["residual"].to(wide) + t["gate"] * x).to(case.torch_dtype)
    y = (norm(case, x.to(wide)) * (1 + t["scale"]) + t["shift"]).to(case.torch_dtype)
    return (y, x) if case.family.residual else y


def to_nchw(rows: Tensor) -> Tensor:
    """The same (N, H, W, C) in memory of NCHW."""
    return rows.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)


class _GradientInNchw(torch.autograd.Function):
    """x itself; its gradient goes back to a network in NCHW."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return to_nchw(dx)


def channels(case: Case, t: Tensors) -> Any:
    """x is a permuted view of NCHW; what follows takes NCHW, or in the nhwc families NHWC."""
    if case.family.nhwc:
        return norm(case, t["x"], t["weight"], t["bias"])
    x: Any = _GradientInNchw.apply(t["x"]) if torch.is_grad_enabled() else t["x"]
    return to_nchw(norm(case, x, t["weight"], t["bias"]))


def groups(case: Case, t: Tensors) -> Any:
    return activated(case, F.group_norm(t["x"], case.groups, t["weight"], t["bias"], EPS))


def heads(case: Case, t: Tensors) -> Any:
    """RMSNorm of q and k, and the rotation of halves as transformers writes it."""
    found = []
    for name in ("q", "k"):
        y = F.rms_norm(t[name], (case.cols,), t[f"{name}_weight"], EPS)
        if "cos" in t:
            half = case.cols // 2
            turned = torch.cat((-y[..., half:], y[..., :half]), dim=-1)
            y = y * t["cos"].unsqueeze(-2) + turned * t["sin"].unsqueeze(-2)
        found.append(y)
    return tuple(found)


def packed(case: Case, t: Tensors) -> Any:
    """The same of qkv, which has v's heads behind them; v is a result whose gradient comes back."""
    q, k, v = t["qkv"].chunk(3, dim=2)
    found = heads(case, {**t, "q": q, "k": k})
    return (*found, v) if case.backward else found


def gated(case: Case, t: Tensors) -> Any:
    """As Qwen3-Next and Mamba 2 write it: in float32, rounded to x's dtype in front of weight."""
    is_first = case.family.name == "gate_first_"
    x, value = t["x"].float(), F.silu(t["gate"].float())
    x = x * value if is_first else x
    y = t["weight"] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)).to(case.torch_dtype)
    return (y if is_first else y * value).to(case.torch_out_dtype)


RMS = (("statistic", "rms"),)
XW, XGW, XRW = ("x", "weight"), ("x", "gate", "weight"), ("x", "residual", "weight")
ADA, GATED = ("x", "shift", "scale"), ("residual", "x", "gate", "shift", "scale")
WEIGHTS, TURN = ("q_weight", "k_weight"), ("cos", "sin")

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("", "LayerNorm", plain),
        Family("gelu_scale_", "LayerNorm, GELU and a scale", plain, activation="gelu", scale=2.0),
        Family("add_", "Residual addition and LayerNorm", added, "add_layer_norm", (*XRW, "bias"),
               (4, 4)),
        Family("silu_", "LayerNorm and SiLU", plain, ways=("forward",), activation="silu"),
        Family("gelu_", "LayerNorm and GELU", plain, ways=("forward",), activation="gelu"),
        Family("ada_", "Modulated LayerNorm", modulated, "ada_layer_norm", ADA, layout=SAMPLES),
        Family("add_ada_", "Gated sum and modulated LayerNorm", modulated, "add_ada_layer_norm",
               GATED, (4, 6), SAMPLES),
        Family("rms_", "RMSNorm", plain, inputs=XW, options=RMS),
        Family("add_rms_", "Residual addition and RMSNorm", added, "add_layer_norm", XRW, (4, 4),
               options=RMS),
        Family("channels_", "LayerNorm over channels", channels, layout=IMAGE,
               options=(("keeps_order", True),)),
        Family("channels_nhwc_", "LayerNorm over channels, x NCHW and y NHWC", channels,
               layout=IMAGE),
        Family("ada_rms_", "Modulated RMSNorm", modulated, "ada_layer_norm", ADA, layout=SAMPLES,
               options=RMS),
        Family("qk_norm_", "RMSNorm of the heads of q and k", heads, "qk_norm_rope",
               ("q", "k", *WEIGHTS), layout=HEADS, options=RMS),
        Family("qk_norm_rope_", "RMSNorm and rotation of the heads of q and k", heads,
               "qk_norm_rope", ("q", "k", *WEIGHTS, *TURN), layout=HEADS, options=RMS),
        Family("qkv_norm_rope_", "RMSNorm and rotation of packed q, k and v", packed,
               "qkv_norm_rope", ("qkv", *WEIGHTS, *TURN), (2, 4), HEADS, options=RMS),
        *(Family(name, title, gated, "rms_norm_gated", XGW, (3, 5), options=(
            *RMS, ("gate_first", name == "gate_first_"), ("round_before_weight", True)))
          for name, title in (("gated_", "RMSNorm, then a gate"),
                              ("gate_first_", "A gate, then RMSNorm"))),
        *(Family(f"group_{silu}{nhwc}", f"GroupNorm{' and SiLU' if silu else ''}{of}", groups,
                 "group_norm", layout=IMAGE, groups=32, activation="silu" if silu else None)
          for silu in ("", "silu_") for nhwc, of in (("", ""), ("nhwc_", ", NHWC"))),
    )
}  # fmt: skip


OPS = {f"{family.name}{way}": family for family in FAMILIES.values() for way in family.ways}


def family_of(op: str) -> Family:
    """The family of an operator; raises ValueError for an unknown one."""
    if op not in OPS:
        raise ValueError(f"unknown op {op!r}: known are {', '.join(OPS)}")
    return OPS[op]
