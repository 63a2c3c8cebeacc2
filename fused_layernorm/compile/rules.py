# SPDX-License-Identifier: Apache-2.0
"""The rules: which norms this package's kernels compute, and which are left to Inductor.

The rules are data, each with its measurement. The first rule that fits decides. All measurements
are from an H200 in bfloat16, unless a rule says otherwise; times are device times in microseconds.
The training steps are compiled steps of whole models with two to eight layers, measured in one run
that takes the variants in turns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

# The device types that the rules are for. Tests add the CPU, where the operators run on PyTorch's.
DEVICES = {"cuda"}
SMALL = 1 << 24  # elements


class Fusion(Enum):
    """What is computed in one piece."""

    PLAIN = "norm"
    RESIDUAL = "residual addition and norm"
    ACTIVATED = "norm and activation"
    MODULATED = "modulated or gated norm"
    GROUPS = "norm of groups of channels"
    GATED = "norm with a gate behind or before it"


class Choice(Enum):
    """What computes a norm."""

    KERNEL = "this package, forward and backward"
    INDUCTOR = "Inductor forward, this package backward"
    PYTORCH = "PyTorch's own operator, forward and backward, of which Inductor makes kernels"


class Problem(NamedTuple):
    """What the rules depend on; cols, of groups the elements of one, is None where it is not known
    when the graph is compiled."""

    fusion: Fusion
    cols: int | None
    has_neighbours: bool = True  # elementwise operations next to it, which Inductor would fuse
    # Whether what is normalized together does not lie side by side, or as Inductor decides.
    is_apart: bool = False
    with_inductor: bool = True  # else the graph runs as it is, uncompiled
    deterministic: bool = False
    # Whether autocast casts around the norm, in a call. A graph shows these casts.
    with_hidden_casts: bool = False
    statistic: str = "layer"  # or "rms", or "instance" of groups of one channel
    # Whether a call asks, while Dynamo traces it and before the graph is there.
    is_call: bool = False
    differentiates: bool = True  # whether a call has a backward pass
    has_parameters: bool = True  # else a modulation follows, which a call does not show
    is_small: bool = False  # whether a call's input is known to have fewer than SMALL elements


class Rule(NamedTuple):
    choice: Choice
    reason: str  # with the measurement
    fusions: tuple[Fusion, ...] = tuple(Fusion)
    cols: Container[int] | None = None
    where: Mapping[str, Any] = MappingProxyType({})  # what other fields of a problem must be

    def fits(self, problem: Problem) -> bool:
        return (
            problem.fusion in self.fusions
            and (self.cols is None or problem.cols in self.cols)
            and all(getattr(problem, name) == value for name, value in self.where.items())
        )


# Of calls whose graph has no backward pass, where nothing but the norm and its neighbours counts.
_FORWARD: Mapping[str, Any] = {"is_call": True, "differentiates": False}

RULES = (
    Rule(Choice.KERNEL, "no compiler follows that would make a kernel of it",
        where={"with_inductor": False}),
    Rule(Choice.KERNEL,
        "deterministic algorithms are asked for: Inductor's forward is not batch-invariant",
        where={"deterministic": True}),
    Rule(Choice.PYTORCH,
        "forward alone of small groups, which Inductor joins to what is around them: with SiLU "
        "between two convolutions, in ms, 0.568 so, 0.592 with our kernel at 40960 elements a "
        "group, 0.609 and 0.623 at 81920; but 0.454 and 0.428 at 163840, 1.77 and 1.34 at 2097152",
        (Fusion.GROUPS,), range(1 << 17), _FORWARD),
    Rule(Choice.PYTORCH,
        "forward alone of instances, whose neighbours our kernel leaves out: chains of KernelBench "
        "in float32 take 9.18 ms so, 10.02 with our kernel at 15876 elements, 5.63, 4.16 at 262144",
        (Fusion.GROUPS,), range(1 << 18),
        {**_FORWARD, "has_neighbours": True, "statistic": "instance"}),
    Rule(Choice.PYTORCH,
        "forward alone of groups, whose neighbours our kernel leaves out: chains of KernelBench in "
        "float32 take 2.16 ms so, 2.47 with our kernel at 107632 elements a group, 11.63 and 12.20 "
        "at 492156, but 16.49 and 15.43 at 532512, 5.29 and 4.56 at 2097152",
        (Fusion.GROUPS,), range(1 << 19),
        {**_FORWARD, "has_neighbours": True, "statistic": "layer"}),
    Rule(Choice.KERNEL,
        "groups of channels: with SiLU on an H100 218 against Inductor's 362 forward at 1 x 128 x "
        "1024 x 1024, 35 against 78 backward at 1 x 512 x 128 x 128; in channels_last 31.6 against "
        "36.8 and 49.6 against 119 at 2 x 320 x 128 x 128",
        (Fusion.GROUPS,)),
    Rule(Choice.INDUCTOR,
        "a gated norm: forward both keep pace with memory; backward, on an H100, Inductor takes "
        "262 at 524288 x 128, 512 at 131072 x 1024, 647 at 16384 x 8192, our kernels 248, 517, 580",
        (Fusion.GATED,)),
    Rule(Choice.PYTORCH,
        "casts of autocast around it that only Inductor can fuse with it: a training step of ViT "
        "takes 5.39 ms stock, 5.41 with our backward kernel, Swin 12.45 and 12.51, ConvNeXt 6.29 "
        "and 6.93; the backend sees the casts, and is faster than stock",
        (Fusion.PLAIN,), range(1, 1025), {"with_hidden_casts": True}),
    Rule(Choice.PYTORCH,
        "forward alone of rows that Inductor reads once, and so joins to their neighbours: chains "
        "of KernelBench in float32 take 9.87 ms so, 10.39 with our kernel at 64 columns, 22.01 and "
        "23.04 with GELU behind; a sum and its norm 9.5 and 11.8 at 8192 x 640, modulated 9.6 and "
        "17.4; a step of SDXL 23.42 ms and 23.56",
        (Fusion.PLAIN,), range(1, 1025), _FORWARD),
    Rule(Choice.PYTORCH,
        "a norm whose modulation our kernel leaves out: a training step of DiT takes 14.46 ms so, "
        "14.58 with our kernel, of the host's time 18.7 and 19.4; of SD3.5 60.2 and 60.6; forward "
        "alone a gated sum, norm and modulation 41.0 and 47.3 at 8192 x 1600 (39.5, 33.6 at 1152)",
        (Fusion.PLAIN,), range(1025, 16385), {"is_call": True, "has_parameters": False}),
    Rule(Choice.PYTORCH,
        "modulation of few elements: of a training step of DiT, 32 x 256 x 1152, the host takes "
        "17.4 ms so, 18.7 with our kernel, which keeps launches apart, and the GPU 14.8 and 14.5",
        (Fusion.MODULATED,), range(1025, 16385),
        {"is_call": True, "has_parameters": False, "is_small": True}),
    Rule(Choice.KERNEL,
        "modulation: 21 against Inductor's 65 forward, 39 against 84 backward at 64 x 256 x 1152, "
        "with a gate 40 against 77 and 68 against 115; training steps of DiT 5.80 ms stock, 5.50 "
        "so, of SD3.5 20.40, 19.81",
        (Fusion.MODULATED,)),
    Rule(Choice.KERNEL,
        "an activation behind: 36 against Inductor's 57 at 32768 x 1024, 137 against 329 at 4096",
        (Fusion.ACTIVATED,)),
    Rule(Choice.INDUCTOR,
        "elements that lie apart, or that Inductor lays out itself beside convolutions: a training "
        "step of ConvNeXt takes 6.29 ms stock, 6.31 with our forward kernel, 5.64 so",
        (Fusion.PLAIN, Fusion.RESIDUAL), where={"is_apart": True}),
    Rule(Choice.PYTORCH,
        "a call of RMSNorm, which only Inductor can fuse with what is around it, backward too: on "
        "an H100 a training step of Qwen3 takes 104.9 ms so, 106.3 with our backward kernels; of "
        "Llama 198.1, 199.4; of Gemma 3 106.3, 106.8",
        (Fusion.PLAIN,), where={"statistic": "rms", "is_call": True}),
    Rule(Choice.INDUCTOR,
        "RMSNorm: on an H100 Inductor's forward is at 0.90 to 1.00 of copy speed, 36.7 at 32768 x "
        "768, 95.7 at 2048, 183 at 4096, with a residual 376 at 4096, its backward at 0.51 to 0.90",
        (Fusion.PLAIN, Fusion.RESIDUAL), where={"statistic": "rms"}),
    Rule(Choice.INDUCTOR,
        "a width at which Inductor is as fast: 10.3 and 10.3 at 256, 27.5 and 26.7 at 768, 36.2 "
        "and 35.0 at 1024; a training step of BERT takes 12.04 ms stock, 12.01 with our forward "
        "kernel, 11.89 so, of ViT 5.39, 5.26, 5.20, of GPT-2 12.92, 12.76, 12.73",
        (Fusion.PLAIN, Fusion.RESIDUAL), range(256, 1025, 256)),
    Rule(Choice.INDUCTOR,
        "elementwise neighbours to fuse with, at a width at which Inductor loses less than their "
        "round trip through memory costs: 66 against 99 at 2048, 132 against 183 at 4096, 143 and "
        "139 at 8192, where one copy takes 68, 130, 129",
        (Fusion.PLAIN,), range(256, 16385, 256), {"has_neighbours": True}),
    Rule(Choice.KERNEL,
        "any other width: 21 against Inductor's 71 at 1152, 38 against 68 at 1021, 20.5 against "
        "27 at 96, 66 against 99 at 2048, 264 against 340 at 32768; with a residual 261 against "
        "274 at 4096; a training step of Swin takes 12.45 ms stock, 11.83 so"),
)  # fmt: skip


def choose(problem: Problem) -> Rule:
    """The rule that decides; the last one fits everything."""
    return next(rule for rule in RULES if rule.fits(problem))


def digest() -> str:
    """A digest that changes with the rules, for the keys of caches."""
    return hashlib.sha256(repr((RULES, SMALL, sorted(DEVICES))).encode()).hexdigest()[:16]
