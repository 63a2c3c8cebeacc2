# SPDX-License-Identifier: Apache-2.0
"""The rules: which norms this package's kernels compute, and which are left to Inductor.

The rules are data, each with its measurement. The first rule that fits decides. All measurements
are from an H200 in bfloat16, unless a rule says otherwise; times are device times in microseconds.
The training steps are compiled steps of whole models with two to eight layers, measured in one run
that takes the variants in turns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

# The device types that the rules are for. Tests add the CPU, where the operators run on PyTorch's.
DEVICES = {"cuda"}


class Fusion(Enum):
    """What is computed in one piece."""

    PLAIN = "norm"
    RESIDUAL = "residual addition and norm"
    ACTIVATED = "norm and activation"
    MODULATED = "modulated or gated norm"
    GROUPS = "norm of groups of channels"
    GATED = "norm with a gate behind or before it"


class Columns(Enum):
    """How the elements lie that are normalized together."""

    TOGETHER = "side by side"
    CHANNELS = "apart, where the kernels read them, as the channels of contiguous NCHW"
    APART = "apart otherwise, or as Inductor decides"


class Choice(Enum):
    """What computes a norm."""

    KERNEL = "this package, forward and backward"
    INDUCTOR = "Inductor forward, this package backward"
    PYTORCH = "PyTorch's own operator, forward and backward, of which Inductor makes kernels"


class Problem(NamedTuple):
    """What the rules depend on; cols is None where it is not known when the graph is compiled."""

    fusion: Fusion
    cols: int | None
    has_neighbours: bool  # elementwise operations next to it, which Inductor would fuse
    columns: Columns = Columns.TOGETHER
    keeps_order: bool = False  # whether y lies as x does: written out over one dimension
    with_inductor: bool = True  # else the graph runs as it is, uncompiled
    deterministic: bool = False
    # Whether autocast casts around the norm. A call does not show these casts; a graph does, so it
    # has False here.
    with_hidden_casts: bool = False
    statistic: str = "layer"  # or "rms"
    # Whether a call asks, while Dynamo traces it and before the graph is there.
    is_call: bool = False


class Rule(NamedTuple):
    choice: Choice
    reason: str  # with the measurement
    fusions: tuple[Fusion, ...] = tuple(Fusion)
    cols: tuple[int, int] | None = None  # at least and at most
    multiple_of: int = 1  # of which cols is a multiple
    where: Mapping[str, Any] = MappingProxyType({})  # what other fields of a problem must be

    def fits(self, problem: Problem) -> bool:
        return (
            problem.fusion in self.fusions
            and all(getattr(problem, name) == value for name, value in self.where.items())
            and (self.cols is None or self._fits_cols(problem.cols, *self.cols))
        )

    def _fits_cols(self, cols: int | None, least: int, most: int) -> bool:
        return cols is not None and least <= cols <= most and cols % self.multiple_of == 0


RULES = (
    Rule(
        Choice.KERNEL,
        "no compiler follows that would make a kernel of it",
        where={"with_inductor": False},
    ),
    Rule(
        Choice.KERNEL,
        "deterministic algorithms are asked for: Inductor's forward is not batch-invariant",
        where={"deterministic": True},
    ),
    Rule(
        Choice.KERNEL,
        "groups of channels: with SiLU on an H100 218 against Inductor's 362 forward at 1 x 128 x "
        "1024 x 1024, 10.2 against 12.3 at 2 x 1280 x 32 x 32, 35 against 78 backward at 1 x 512 x "
        "128 x 128; in channels_last 31.6 against 36.8 and 49.6 against 119 at 2 x 320 x 128 x 128",
        fusions=(Fusion.GROUPS,),
    ),
    Rule(
        Choice.INDUCTOR,
        "a gated norm: forward both keep pace with memory; backward, on an H100, Inductor takes "
        "262 at 524288 x 128, 512 at 131072 x 1024 and 647 at 16384 x 8192, our kernels 248, 517 "
        "and 580 (copying the five tensors would take 232, 457 and 457)",
        fusions=(Fusion.GATED,),
    ),
    Rule(
        Choice.PYTORCH,
        "written out over a dimension that no kernel reads where it lies (a few pixels of many "
        "channels, thousands of channels), or beside convolutions, whose results Inductor may turn "
        "to channels_last: our operator would need copies each way, Inductor's own kernels none",
        where={"columns": Columns.APART, "keeps_order": True},
    ),
    Rule(
        Choice.PYTORCH,
        "casts of autocast around it that only Inductor can fuse with it: a training step of ViT "
        "takes 5.39 ms stock, 5.41 with our backward kernel (transformers' 8.26, 8.38), Swin 12.45 "
        "and 12.51, ConvNeXt 6.29 and 6.93; the backend sees the casts, and is faster than stock",
        fusions=(Fusion.PLAIN,),
        cols=(1, 1024),
        where={"with_hidden_casts": True},
    ),
    Rule(
        Choice.KERNEL,
        "modulation: 21 against Inductor's 65 forward, 39 against 84 backward at 64 x 256 x 1152, "
        "with a gate 40 against 77 and 68 against 115; training steps of DiT 5.80 ms stock, 5.65 "
        "with Inductor's forward, 5.50 so, of SD3.5 20.40, 20.00, 19.81",
        fusions=(Fusion.MODULATED,),
    ),
    Rule(
        Choice.KERNEL,
        "an activation behind: 36 against Inductor's 57 at 32768 x 1024, 137 against 329 at 4096",
        fusions=(Fusion.ACTIVATED,),
    ),
    Rule(
        Choice.KERNEL,
        "channels of contiguous images, read where they lie: on an H100, by shape, 1.03 to 2.04 "
        "times as fast as Inductor's kernels forward and 1.02 to 1.86 times backward; if permuted, "
        "which writes NHWC, 0.99 to 2.53 and 1.26 to 2.10 times",
        fusions=(Fusion.PLAIN,),
        where={"columns": Columns.CHANNELS},
    ),
    Rule(
        Choice.INDUCTOR,
        "elements that lie apart and that our kernels would copy, or channels beside convolutions, "
        "which Inductor lays out itself: a training step of ConvNeXt takes 6.29 ms stock, 6.31 "
        "with our forward kernel and a copy before it, 5.64 so",
        fusions=(Fusion.PLAIN, Fusion.RESIDUAL),
        where={"columns": Columns.APART},
    ),
    Rule(
        Choice.PYTORCH,
        "a call of RMSNorm, which only Inductor can fuse with the residual additions and rotations "
        "around it, backward too: on an H100 a training step of Qwen3 takes 104.9 ms so, 106.3 "
        "with our backward kernels, 103.5 where our backend fuses them; of Llama 198.1, 199.4, "
        "196.2; of Gemma 3 106.3, 106.8, 104.2",
        fusions=(Fusion.PLAIN,),
        where={"statistic": "rms", "is_call": True},
    ),
    Rule(
        Choice.INDUCTOR,
        "RMSNorm: on an H100 Inductor's forward is at 0.90 to 1.00 of copy speed, 36.7 at 32768 x "
        "768, 95.7 at 2048, 183 at 4096, 21.0 at 4096 x 2880, with a residual 376 at 32768 x 4096, "
        "its backward at 0.51 to 0.90",
        fusions=(Fusion.PLAIN, Fusion.RESIDUAL),
        where={"statistic": "rms"},
    ),
    Rule(
        Choice.INDUCTOR,
        "a width at which Inductor is as fast: 10.3 and 10.3 at 256, 27.5 and 26.7 at 768, 36.2 "
        "and 35.0 at 1024; a training step of BERT takes 12.04 ms stock, 12.01 with our forward "
        "kernel, 11.89 so, of ViT 5.39, 5.26, 5.20, of GPT-2 12.92, 12.76, 12.73",
        fusions=(Fusion.PLAIN, Fusion.RESIDUAL),
        cols=(256, 1024),
        multiple_of=256,
    ),
    Rule(
        Choice.INDUCTOR,
        "elementwise neighbours to fuse with, at a width at which Inductor loses less than their "
        "round trip through memory costs: 66 against 99 at 2048, 132 against 183 at 4096, 143 and "
        "139 at 8192, where one copy takes 68, 130, 129",
        fusions=(Fusion.PLAIN,),
        cols=(1, 16384),
        multiple_of=256,
        where={"has_neighbours": True},
    ),
    Rule(
        Choice.KERNEL,
        "any other width: 21 against Inductor's 71 at 1152, 38 against 68 at 1021, 20.5 against "
        "27 at 96, 66 against 99 at 2048, 264 against 340 at 32768; with a residual 261 against "
        "274 at 4096; a training step of Swin (96 to 768) takes 12.45 ms stock, 11.88 with "
        "Inductor's forward, 11.83 so",
    ),
)


def choose(problem: Problem) -> Rule:
    """The rule that decides; the last one fits everything."""
    return next(rule for rule in RULES if rule.fits(problem))


def digest() -> str:
    """A digest that changes with the rules, for the keys of caches."""
    return hashlib.sha256(repr((RULES, sorted(DEVICES))).encode()).hexdigest()[:16]
