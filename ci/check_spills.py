# SPDX-License-Identifier: Apache-2.0
"""Fail if a CUDA kernel spills registers to local memory.

Reads what `ptxas -v` printed during a build (FUSED_LAYERNORM_PTXAS_VERBOSE=1) and names every
kernel with a stack frame or with spills beyond those in ALLOWED: such a kernel moves bytes that its
work does not need.

    python ci/check_spills.py build.log
"""

import argparse
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple


class Allowed(NamedTuple):
    """Kernels that may keep up to `stack` bytes a thread in local memory, and why."""

    pattern: str  # searched for in the demangled name
    stack: int
    reason: str


# The first rule that matches counts. A kernel's template arguments are its norm, which begins with
# the types (of x, the parameters, y), then the elements of a vector and the vectors of a thread. In
# backward's block kernels there follow two flags: whether rows come by bulk copies and, for whole
# rows only, whether xhat and g are kept. Forward's block kernels have all arguments but the norm at
# the end of the name, in a geometry type.
ALLOWED = [
    Allowed(r"<(Norm<Types<)?double,", 1256, "float64 is there for its digits, not for its speed"),
    Allowed(r"stream_sums_kernel<.*, MayBeAffineAndModulateRow, Identity>, 1>", 384,
            "single elements of rows that each have a modulation of their own"),
    Allowed(r"(backward|stream)\w*_kernel<.*(Identity|Activate)>, 1[,>]", 368,
            "rows that are not aligned are bound by scalar accesses"),
    Allowed(r"backward_(block|split)_kernel<.*>, \d, \d, false[,>]", 304,
            "rows without bulk copies: one or two for each block, or a chip that has none"),
    Allowed(r"backward_(block_kernel<.*>, \d, \d, true, false>|split_kernel<.*>, \d, \d, true>)",
            32, "rows of 32 columns a thread: a few bytes a row"),
    Allowed(r"backward_rows_kernel<.*>, (8, 4|4, 8)>", 48,
            "32 columns a thread, more than models'"),
    Allowed(r"backward_rows_kernel<.*(Types<\w+, float, float>.*>, 8, 2|GatedGradient, .*>, 4, 2)>",
            24, "float32 beside half-precision x, and short rows of float32: a few numbers a row"),
    Allowed(r"forward_block_kernel<.*<\w+, float, float>.* OrPlain<Adding<true> >.* 8, \(Moves\)0,",
            56, "eight vectors of a gated sum, in halves beside a y of float32"),
    Allowed(r"forward_\w+_kernel<.*, MayBeAffineAndModulate, ", 40,
            "weight and bias beside a modulation, which few rows have"),
    Allowed(r"forward_ring_kernel<.*, true>", 40,
            "most of weight and bias of a row of the whole chip in registers"),
    Allowed(r"backward_group_kernel<.*, (4, 8|8, 4), true>", 80,
            "rows of 32 columns a thread, longer than those of models"),
    Allowed(r"forward_stream_sums_kernel<", 16,
            "one kernel for whatever is summed, of rows that no other strategy takes"),
    Allowed(r"(backward_group(_warp)?|modulated_param_grad|stream_sums)_kernel<", 8,
            "two numbers, beside running sums of groups"),
    Allowed(r"gate_backward_kernel<", 16, "four rows at once in two types"),
    Allowed(r"backward_warp_kernel<Norm<Types<(__half|__nv_bfloat16), .*>, 8>",
            40, "x and dy of the next row in registers, and a residual's gradient or float32 "
            "parameters"),
    Allowed(r"forward_block_kernel<Norm<Types<(__half|__nv_bfloat16), float, .* 8, \(Moves\)0,", 56,
            "eight vectors beside float32 parameters, and a loop for weights that are not plain"),
    Allowed(r"forward_block_kernel<.*, Plain, ColumnAffine, (Activate>.* 4, \(Moves\)0"
            r"|Identity>.* 4, \(Moves\)1),", 8,
            "four vectors: the flag of RMSNorm, or of a weight that is not plain"),
    Allowed(r"forward_\w+_kernel<Norm<Types<(__half|__nv_bfloat16), float, ", 24,
            "float32 parameters beside half-precision x: a number or two"),
    Allowed(r"forward_block_kernel<.* Adding<false>, .* 8, \(Moves\)0,", 8,
            "the pivot's second element, beside all that a thread keeps of its row"),
    Allowed(r"forward_\w+_kernel<.* OrPlain<Adding<false> >, ", 16,
            "one kernel for all that is fused, of rare types and of rows that begin anywhere"),
]  # fmt: skip


class Kernel(NamedTuple):
    name: str
    arch: str
    stack: int
    spill_stores: int
    spill_loads: int
    registers: int


def parse(log: str) -> list[Kernel]:
    """The kernels in a log, in order. ptxas prints four lines for each, with others in between."""
    pattern = re.compile(
        r"Compiling entry function '(?P<name>\w+)' for '(?P<arch>\w+)'"
        r"(?:(?!Compiling entry).)*?(?P<stack>\d+) bytes stack frame, "
        r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
        r"(?:(?!Compiling entry).)*?Used (?P<registers>\d+) registers",
        re.DOTALL,
    )
    return [
        Kernel(m["name"], m["arch"], int(m["stack"]), int(m["stores"]), int(m["loads"]),
               int(m["registers"]))
        for m in pattern.finditer(log)
    ]  # fmt: skip


def demangle(names: list[str]) -> list[str]:
    if not shutil.which("c++filt"):
        return names
    result = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    )
    return re.sub(r"fused_layernorm::|\(anonymous namespace\)::", "", result.stdout).splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("log", type=Path)
    log = parser.parse_args().log.read_text(errors="replace")
    kernels = parse(log)
    compiled = log.count("Compiling entry function")
    if not kernels or len(kernels) != compiled:
        print(f"read {len(kernels)} of {compiled} kernels in the log: nothing is shown by that")
        return 1

    spilling = [k for k in kernels if k.stack or k.spill_stores or k.spill_loads]
    bad = 0
    allowed: Counter[Allowed] = Counter()
    for kernel, name in zip(spilling, demangle([k.name for k in spilling]), strict=True):
        rule = next((rule for rule in ALLOWED if re.search(rule.pattern, name)), None)
        if rule is not None and kernel.stack <= rule.stack:
            allowed[rule] += 1
            continue
        bad += 1
        print(
            f"SPILLS: {name}"
            f" ({kernel.arch}): {kernel.stack} bytes of stack, {kernel.spill_stores} stored, "
            f"{kernel.spill_loads} loaded, {kernel.registers} registers"
        )
    for rule in ALLOWED:
        print(f"{allowed[rule]} kernels may spill up to {rule.stack} bytes: {rule.reason}")
    most = max(k.registers for k in kernels)
    archs = " ".join(sorted({k.arch for k in kernels}))
    print(
        f"{len(kernels)} kernels for {archs}, at most {most} registers: "
        f"{sum(allowed.values())} that may spill, {bad} that may not and do"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
