# SPDX-License-Identifier: Apache-2.0
"""Changes that the tests must notice: each is made, the tests named beside it run, and undone.

    python ci/mutations.py                   all but those in kernels; needs no GPU
    python ci/mutations.py --only plan       of one kind, or of one name
    python ci/mutations.py --only kernel     on a machine with a GPU and nvcc: compiles the kernels
    python ci/mutations.py --patch few-rows-warps   prints one of them as a patch
    python ci/mutations.py --check           only whether each can still be made; part of make lint

A change that its tests do not notice is a test to write. The libraries in fused_layernorm/ are put
back afterwards; those of the plan are built without kernels.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fused_layernorm"
OPERATORS = {"FUSED_LAYERNORM_CPU_OPERATORS": "1"}
PYTHON_AUTOGRAD = {**OPERATORS, "FUSED_LAYERNORM_PYTHON_AUTOGRAD": "1"}


class Mutation(NamedTuple):
    name: str
    kind: str  # python, autograd, plan or kernel: what is compiled for it
    file: str
    old: str  # stands once in the file
    new: str
    tests: tuple[str, ...]  # arguments of pytest
    env: Mapping[str, str] = MappingProxyType({})


# The plans' principles: these mutations must be caught without the golden file.
PRINCIPLES = ("tests/test_plan.py", "-k", "not golden")
PLANS = ("tests/test_plan.py",)
ROWS = ("tests/test_accuracy.py", "tests/test_rows.py", "tests/test_every_norm.py", "-m",
        "not on_cpu")  # fmt: skip
AUTOGRAD = ("tests/test_autograd.py", "tests/test_autograd_library.py")

MUTATIONS = [
    # ---- Python.
    Mutation("formulas-eps", "python", "fused_layernorm/ops/formulas.py",
             "(variance - variance.detach())", "variance",
             ("tests/test_autograd.py",), PYTHON_AUTOGRAD),
    Mutation("formulas-gate", "python", "fused_layernorm/ops/operators.py",
             "b.input.to(acc) * b.gate.to(acc)", "b.input.to(acc) * b.input.to(acc)",
             ("tests/test_accuracy.py",), OPERATORS),
    Mutation("autograd-only-residual", "python", "fused_layernorm/ops/family.py",
             "gradients[\"x\"] = dresidual", "gradients[\"x\"] = None",
             ("tests/test_autograd.py", "tests/test_accuracy.py"),
             PYTHON_AUTOGRAD),
    Mutation("formulas-centered", "python", "fused_layernorm/ops/formulas.py",
             "torch.zeros_like(rstd), rstd, None", "torch.ones_like(rstd), rstd, None",
             ("tests/test_accuracy.py",), OPERATORS),
    Mutation("vmap-per-sample-sums", "python", "fused_layernorm/ops/vmap.py",
             "t.unflatten(0, (size, -1)).sum(1)", "t.unflatten(0, (size, -1))[:, 0]",
             AUTOGRAD, OPERATORS),
    Mutation("distributed-partial", "python", "fused_layernorm/distributed.py",
             "if is_whole else Partial()", "if is_whole else Replicate()",
             ("tests/test_distributed.py",)),
    Mutation("swap-own-forward", "python", "fused_layernorm/swap/registry.py",
             "if own is not None:\n        return _of", "if False:\n        return _of",
             ("tests/test_swap.py",)),
    Mutation("reading-unbiased", "python", "fused_layernorm/compile/reading.py",
             "if keepdim and is_biased else None", "if keepdim else None",
             ("tests/test_graph_pass.py",)),
    Mutation("replace-write-between", "python", "fused_layernorm/compile/replace.py",
             "    if len({effects.regions[node] for node in reads}) > 1:", "    if False:",
             ("tests/test_graph_pass.py",)),
    Mutation("effects-inplace", "python", "fused_layernorm/compile/effects.py",
             "    if given.get(\"inplace\", False) is not False:", "    if False:",
             ("tests/test_graph_effects.py",)),
    Mutation("override-count", "python", "fused_layernorm/override.py",
             "        if not _in_force[key]:\n            load",
             "        if _in_force[key]:\n            load",
             ("tests/test_override.py",)),
    Mutation("second-order-statistics", "python", "fused_layernorm/ops/formulas.py",
             "    variance = centered.square().mean(dims, keepdim=True)\n",
             "    variance = centered.square().mean(dims, keepdim=True).detach()\n",
             AUTOGRAD, OPERATORS),
    # ---- Autograd in C++.
    Mutation("second-order-lost", "autograd", "csrc/per_torch/autograd.h",
             "if (differentiation != Differentiation::kNone) return differentiate_in_python",
             "if (differentiation == Differentiation::kForwardMode) return differentiate_in_python",
             AUTOGRAD, OPERATORS),
    Mutation("forward-mode-lost", "autograd", "csrc/per_torch/operators.h",
             "has_tangent |= tensor->_fw_grad(/*level=*/0).defined();",
             "", AUTOGRAD, OPERATORS),
    Mutation("bias-for-activation", "autograd", "csrc/per_torch/autograd.h",
             "if (!needs_z && call.weight) kept.bias = nullptr;",
             "if (call.weight) kept.bias = nullptr;",
             ("tests/test_autograd.py", "tests/test_accuracy.py"), OPERATORS),
    Mutation("shift-of-samples", "autograd", "csrc/per_torch/autograd.h",
             "shift.sym_sizes() == dy.sym_sizes()", "true", AUTOGRAD, OPERATORS),
    Mutation("only-residual-used", "autograd", "csrc/per_torch/autograd.h",
             "if constexpr (Op::kHasResidual) dx = gradients[1];", "",
             ("tests/test_autograd.py", "tests/test_accuracy.py"), OPERATORS),
    # ---- Plans.
    Mutation("warp-last-rows", "plan", "csrc/forward/warp.h",
             "plan.blocks = ceil_div(problem.rows, kForwardWarpThreads / plan.lanes);",
             "plan.blocks = problem.rows / (kForwardWarpThreads / plan.lanes) + 1 - "
             "(problem.rows % 7 == 1);", PRINCIPLES),
    Mutation("team-of-one-row", "plan", "csrc/backward/teams.h",
             "static_cast<int>(problem.cols), kBackwardThreads, 1, forced);\n  if (!team || (",
             "static_cast<int>(problem.cols), problem.rows == 1 ? 256 : kBackwardThreads, 1, "
             "forced);\n  if (!team || (", PRINCIPLES),
    Mutation("stream-unaligned", "plan", "csrc/forward/stream.h",
             "plan.width = problem.aligned ? vector_width_of(problem) : 1;",
             "plan.width = vector_width_of(problem);", PRINCIPLES),
    Mutation("old-chips-ring", "plan", "csrc/backward/teams.h",
             "return device.capability >= 90 && has_ring_kernels(",
             "return device.capability >= 80 && has_ring_kernels(", PRINCIPLES),
    Mutation("partials-too-small", "plan", "csrc/base/partial_sums.h",
             "+= int64_t{2} * sets * problem.cols * acc_size_of(problem.x);",
             "+= int64_t{2} * sets * problem.cols * size_of(problem.x);",
             PRINCIPLES),
    Mutation("tuned-teams", "plan", "csrc/backward/tuning.h",
             "    {1984, 2048, 3},", "    {1976, 2048, 3},", PLANS),
    Mutation("tuned-ring-bytes", "plan", "csrc/backward/tuning.h",
             "half_ring_bytes = 60000,", "half_ring_bytes = 70000,", PLANS),
    Mutation("tuned-many-rows", "plan", "csrc/backward/tuning.h",
             "int few_teams_rows = 16;", "int few_teams_rows = 17;", PLANS),
    # ---- Kernels, each in a file of its own so that little is compiled.
    Mutation("few-rows-warps", "kernel", "csrc/backward/few_rows.cu",
             "for (int w = 1; w < warps; ++w) sum += sums[w * kCols + c];",
             "for (int w = 2; w < warps; ++w) sum += sums[w * kCols + c];", ROWS),
    Mutation("few-rows-lanes", "kernel", "csrc/backward/few_rows.cu",
             "for (int offset = kLanes; offset < kWarpSize; offset *= 2) {",
             "for (int offset = kLanes; offset < kWarpSize / 2; offset *= 2) {", ROWS),
    Mutation("stream-last-chunk", "kernel", "csrc/forward/stream.cu",
             "use(Acc(min(chunks.cols, p.cols - i * chunks.cols)), parts[i]);",
             "use(Acc(chunks.cols), parts[i]);", ROWS),
    Mutation("ring-meeting", "kernel", "csrc/forward/ring.cu",
             "use(cols, slots.values[k]);", "use(cols, slots.values[0]);", ROWS),
    Mutation("dscale-bias", "kernel", "csrc/backward/param_grad.cu",
             "sum[j] = weight[j] * sum[j] + bias[j] * of_shift[j];", "sum[j] = weight[j] * sum[j];",
             ROWS),
    Mutation("dweight-modulated", "kernel", "csrc/backward/param_grad.cu",
             "for (int j = 0; j < kWidth; ++j) factors[j] += Acc(1);", "", ROWS),
    Mutation("warp-second-sums", "kernel", "csrc/backward/warp.cu",
             "if (!sink.wanted()) return;\n  if (chain_rows > 0) grads.take(second_sums);",
             "if (!sink.wanted()) return;", ROWS),
    Mutation("backward-stream-missing", "kernel", "csrc/backward/stream.cu",
             "      if (share.has(k)) dy[k] = load<Use::kReadOnly, kWidth>(element(dy_row, col));",
             "      dy[k] = load<Use::kReadOnly, kWidth>(element(dy_row, col));",
             ("tests/test_accuracy.py", "-k", "every_strategy and stream")),
    Mutation("split-lag", "kernel", "csrc/backward/split.cu",
             "        sums = collected[(i - lag) % kMostCollected];",
             "        sums = collected[i % kMostCollected];", ROWS),
]  # fmt: skip


def changed(mutation: Mutation) -> tuple[str, str]:
    """The text of the mutation's file, and what becomes of it."""
    text = (ROOT / mutation.file).read_text()
    if text.count(mutation.old) != 1:
        sys.exit(f"{mutation.name}: {mutation.file} has its text {text.count(mutation.old)} times")
    return text, text.replace(mutation.old, mutation.new)


def build(kind: str) -> bool:
    env = {**os.environ, **({} if kind == "kernel" else {"FUSED_LAYERNORM_CPU_ONLY": "1"})}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=ROOT, env=env, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stdout[-2000:], done.stderr[-2000:])
    return done.returncode == 0


def outcome(mutation: Mutation) -> str:
    """What the tests say of a mutation: caught, NOT CAUGHT, or that it cannot be tried."""
    path = ROOT / mutation.file
    text, mutated = changed(mutation)
    try:
        path.write_text(mutated)
        if mutation.kind != "python" and not build(mutation.kind):
            return "does not compile"
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, *mutation.tests],
            cwd=ROOT,
            env={**os.environ, **mutation.env},
            check=False,
            capture_output=True,
            text=True,
        )
    finally:
        path.write_text(text)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode == 1 and failed:
        return f"caught by {failed[0].split(' - ')[0].split(' ', 1)[1]}"
    return "NOT CAUGHT" if done.returncode == 0 else f"pytest exits with {done.returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="a kind or a name, several times")
    parser.add_argument("--patch", metavar="NAME", help="print it, and run nothing")
    parser.add_argument("--check", action="store_true", help="whether each can be made, no more")
    arguments = parser.parse_args()
    if arguments.check:
        print(f"{len([changed(m) for m in MUTATIONS])} mutations can be made")
        return 0
    wanted = arguments.only or ["python", "autograd", "plan"]
    chosen = [m for m in MUTATIONS if {m.name, m.kind} & {arguments.patch, *wanted}]
    if arguments.patch:
        (mutation,) = (m for m in chosen if m.name == arguments.patch)
        before, after = (text.splitlines(keepends=True) for text in changed(mutation))
        names = (f"a/{mutation.file}", f"b/{mutation.file}")
        sys.stdout.writelines(difflib.unified_diff(before, after, *names))
        return 0
    found = {}
    with tempfile.TemporaryDirectory() as kept:
        libraries = [path for path in PACKAGE.glob("**/*.so") if path.is_file()]
        for library in libraries:
            (Path(kept) / library.relative_to(PACKAGE)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(library, Path(kept) / library.relative_to(PACKAGE))
        try:
            for mutation in chosen:
                found[mutation.name] = outcome(mutation)
                print(f"{mutation.kind:<8} {mutation.name:<24} {found[mutation.name]}", flush=True)
        finally:
            shutil.copytree(kept, PACKAGE, dirs_exist_ok=True)
    caught = sum(text.startswith("caught") for text in found.values())
    print(f"{caught} of {len(found)} caught")
    return 0 if caught == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
