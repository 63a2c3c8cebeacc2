"""The rules: which layer norms this package's kernels compute, and which are left to Inductor.

They are data, with the measurement beside each. The first rule that fits decides. All were measured
on an H200 in bfloat16, unless they say otherwise; times are of the device, in microseconds.
"""

from __future__ import annotations

import hashlib
from enum import Enum
from typing import NamedTuple

# Where the pass does anything. Tests add the CPU, where the operators are PyTorch's own.
DEVICES = {"cuda"}


class Kind(Enum):
    """What is computed in one piece."""

    PLAIN = "layer norm"
    RESIDUAL = "residual addition and layer norm"
    ACTIVATED = "layer norm and activation"
    MODULATED = "modulated or gated layer norm"


class Choice(Enum):
    """Who computes the forward pass. The backward pass is this package's in any case."""

    KERNEL = "this package's kernel"
    INDUCTOR = "Inductor's kernel"


class Problem(NamedTuple):
    """What the rules look at; cols is None where it is not known when the graph is compiled."""

    kind: Kind
    cols: int | None
    has_neighbours: bool  # elementwise operations beside it, with which Inductor would fuse it
    with_inductor: bool = True  # or the graph runs as it stands
    deterministic: bool = False


class Rule(NamedTuple):
    choice: Choice
    reason: str  # and the measurement
    kinds: tuple[Kind, ...] = tuple(Kind)
    has_neighbours: bool | None = None  # either
    cols: tuple[int, int] = (1, 2**63)  # at least and at most
    multiple_of: int = 1
    with_inductor: bool | None = None
    deterministic: bool | None = None

    def fits(self, problem: Problem) -> bool:
        least, most = self.cols
        takes_any_cols = self.multiple_of == 1 and (least, most) == (1, 2**63)
        return (
            problem.kind in self.kinds
            and self.has_neighbours in (None, problem.has_neighbours)
            and self.with_inductor in (None, problem.with_inductor)
            and self.deterministic in (None, problem.deterministic)
            and (
                takes_any_cols
                or (
                    problem.cols is not None
                    and least <= problem.cols <= most
                    and problem.cols % self.multiple_of == 0
                )
            )
        )


RULES = (
    Rule(
        Choice.KERNEL,
        "no compiler follows that would make a kernel of it",
        with_inductor=False,
    ),
    Rule(
        Choice.KERNEL,
        "deterministic algorithms are asked for: Inductor's forward is not batch-invariant",
        deterministic=True,
    ),
    Rule(
        Choice.KERNEL,
        "modulation: Inductor 66 forward and 85 backward at 64 x 256 x 1152, 79 and 115 with a "
        "gate, where one copy takes 20; ours to be measured",
        kinds=(Kind.MODULATED,),
    ),
    Rule(
        Choice.KERNEL,
        "an activation behind: 36 against Inductor's 57 at 32768 x 1024, 137 against 329 at 4096",
        kinds=(Kind.ACTIVATED,),
    ),
    Rule(
        Choice.INDUCTOR,
        "a width at which Inductor is as fast: 10.3 and 10.3 at 256, 27.5 and 26.7 at 768, 36.2 "
        "and 35.0 at 1024; a compiled training step of BERT takes 13.82 ms stock, 13.83 with our "
        "forward kernel, 13.64 so",
        kinds=(Kind.PLAIN, Kind.RESIDUAL),
        cols=(256, 1024),
        multiple_of=256,
    ),
    Rule(
        Choice.INDUCTOR,
        "elementwise neighbours to fuse with, at a width at which Inductor loses less than their "
        "round trip through memory costs: 66 against 99 at 2048, 132 against 183 at 4096, 143 and "
        "139 at 8192, where one copy takes 68, 130, 129; whole models to be measured",
        kinds=(Kind.PLAIN,),
        has_neighbours=True,
        cols=(1, 16384),
        multiple_of=256,
    ),
    Rule(
        Choice.KERNEL,
        "any other width: 21 against Inductor's 71 at 1152, 38 against 68 at 1021, 20.5 against "
        "27 at 96, 66 against 99 at 2048, 264 against 340 at 32768; with a residual 261 against "
        "274 at 4096; widths such as 192, 384 and 1280 are to be measured",
    ),
)


def choose(problem: Problem) -> Rule:
    """The rule that decides; the last one fits everything."""
    return next(rule for rule in RULES if rule.fits(problem))


def digest() -> str:
    """What changes with the rules, for the keys of caches."""
    return hashlib.sha256(repr((RULES, sorted(DEVICES))).encode()).hexdigest()[:16]
