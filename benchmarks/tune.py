# SPDX-License-Identifier: Apache-2.0
"""Times this package alone under forced plans, for tuning.

    python -m benchmarks.tune "8192x12288 bf16 gelu_forward | vecs=5 | vecs=8" \\
                              "32768x4096 bf16 backward | teams=1 | bulk=0 | stages=3" \\
                              "16x4194304 fp32 forward | strategy=stream"
    python -m benchmarks.tune "2048x2048 bf16 backward | strategy=* vecs=* teams=*"

Each argument is a case, "ROWSxCOLS DTYPE OP", and after bars the options to force one after the
other (parts of a plan, in the words of `force_plan` in csrc/bindings/force_plan.h). The plan's own
choice is always timed first. A * stands for every value that its part can have beside the other
parts, and for none where a strategy lacks the part; the fastest plans are then named at the end.
Each plan is timed once: options without a plan, and those that give a plan already listed, are
named and not timed. --file reads such lines from a file (# starts a comment). --list prints the
options of each case and times nothing, also without a GPU. Each result is compared with PyTorch's
own, so that a fast but wrong plan is noticed. That comparison slows some kernels down
(benchmarks/compare.py says which), so plans that load in different ways are better timed with --no-
check.

A small call's time depends on where its data is. By itself each plan is timed as in the benchmark,
with up to 256 inputs; --ways adds the time with so few inputs that they stay in L2 from call to
call, and the time right behind a kernel that writes the input (in backward dy), as in a model. The
best plan of one way may be the worst of another (128 x 1024 bfloat16, spread and by logical warps:
2.42 and 2.15 us, 1.89 and 2.20, 2.47 and 2.00).
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks import timing
from benchmarks.cases import EPS, Case, parse_case
from benchmarks.ours import Inputs, make_inputs, ours, require_kernels, time_calls

PLANNED = "(plan)"  # the label of the plan's own choice
FASTEST = 8  # plans that are named
STRATEGIES = ("warp", "spread", "block", "ring", "split", "stream", "few_rows",
              "group", "rows")  # fmt: skip
HOPPER = {"capability": 90, "sms": 132, "shared_memory": 232448, "l2_bytes": 50 << 20}

Plan = dict[str, Any]


def parse_line(line: str, forces: list[str]) -> tuple[Case, list[str]]:
    """A case and its list of forced options."""
    case, *own = (part.strip() for part in line.split("|"))
    return parse_case(case), [*forces, *own]


@torch.enable_grad()
def reference(case: Case, t: Inputs) -> list[torch.Tensor]:
    """What PyTorch gives for a case, in float32."""
    if case.modulated:
        return _modulated_reference(case, t)
    # Detached: float() of float32 is the input itself, which must not require gradients.
    assert t.weight is not None
    x, weight = (tensor.detach().float() for tensor in (t.x, t.weight))
    bias = None if t.bias is None else t.bias.detach().float()

    def norm(x: torch.Tensor) -> torch.Tensor:
        if case.is_rms:
            return torch.nn.functional.rms_norm(x, (case.cols,), weight, EPS)
        return torch.nn.functional.layer_norm(x, (case.cols,), weight, bias, EPS)

    activation, scale = case.activation
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]]
    functions = {"gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}
    if not case.backward:
        extra = []
        if t.residual is not None:
            x = (x + t.residual.float()).to(t.x.dtype)
            extra = [x]
            x = x.float()
        y = norm(x)
        if activation is not None:
            y = functions[activation](y)
        return [y * scale, *extra]
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias) if tensor is not None]
    y = norm(x)
    if activation is not None:
        y = functions[activation](y)
    assert t.dy is not None
    dx, *of_parameters = torch.autograd.grad(y * scale, leaves, t.dy.float())
    if t.dresidual is not None:
        dx = dx + t.dresidual.float()
    return [dx, *of_parameters]


def _modulated_reference(case: Case, t: Inputs) -> list[torch.Tensor]:
    """As `reference`; backward by autograd of the forward, in the order of `ours`."""

    def leaf(tensor: torch.Tensor | None) -> torch.Tensor:
        assert tensor is not None
        return tensor.detach().float().clone().requires_grad_(case.backward)

    def modulated(x: torch.Tensor) -> torch.Tensor:
        norm = torch.nn.functional.rms_norm if case.is_rms else torch.nn.functional.layer_norm
        return norm(x, (case.cols,), eps=EPS) * (1 + scale) + shift

    shift, scale = leaf(t.shift), leaf(t.scale)
    if not case.backward:
        x = t.x.float()
        if t.residual is None:
            return [modulated(x)]
        total = (t.residual.float() + leaf(t.gate) * x).to(t.x.dtype)
        return [modulated(total.float()), total]
    assert t.dy is not None
    dy = t.dy.float()
    if t.dresidual is None:
        x = leaf(t.x)
        return list(torch.autograd.grad(modulated(x), (x, shift, scale), dy))
    x, gate = leaf(t.input), leaf(t.gate)
    residual = (t.x.float() - gate * x).detach().requires_grad_()
    total = residual + gate * x
    return list(
        torch.autograd.grad(
            (modulated(total), total), (x, residual, gate, shift, scale), (dy, t.dresidual.float())
        )
    )


def error(result: object, expected: list[torch.Tensor]) -> float:
    """The largest relative error (in the 2-norm) over the outputs; NaN if any output has one."""
    outputs = [result] if isinstance(result, torch.Tensor) else list(result)  # type: ignore[call-overload]
    worst = 0.0
    for out, want in zip(outputs, expected, strict=True):
        difference = float((out.float() - want.float()).norm() / want.float().norm())
        if not difference <= worst:  # also true of NaN, which then stays
            worst = difference
        if worst != worst:
            break
    return worst


class Ways:
    """Times calls of a case in two more ways than the benchmark does."""

    def __init__(self, case: Case, inputs: list[Inputs], seconds: float) -> None:
        self.case = case
        self.seconds = seconds
        tensors = [one.x if one.dy is None else one.dy for one in inputs]
        # Each write stores the same values again, so that results can still be checked.
        self.writes: list[timing.Call] = [
            functools.partial(torch.mul, tensor.clone(), 1, out=tensor) for tensor in tensors
        ]
        self.writes_us = self._time(self.writes)

    def resident(self, calls: list[timing.Call]) -> float:
        """Microseconds of a call, where all calls' tensors together fill at most a quarter of L2.

        A call that is larger than that is timed alone, and its tensors may leave L2.
        """
        return self._time(calls[: max(1, timing.l2_bytes() // (4 * self.case.bytes))])

    def written(self, calls: list[timing.Call]) -> float:
        """Microseconds that a call adds to a kernel that writes its input right in front of it."""

        def both(write: timing.Call, call: timing.Call) -> timing.Call:
            return lambda: (write(), call())[1]

        pairs = [both(*pair) for pair in zip(self.writes, calls, strict=True)]
        return self._time(pairs) - self.writes_us

    def _time(self, calls: list[timing.Call]) -> float:
        return time_calls(self.case, calls, seconds=self.seconds)


def tune(case: Case, forces: list[str], arguments: argparse.Namespace) -> None:
    """Times one case as planned and under each of the options, and prints a line for each."""
    check, seconds = not arguments.no_check, arguments.seconds
    force = torch.ops.fused_layernorm._force
    copy_us = timing.copy_time(case.rows, case.cols, case.torch_dtype, seconds=seconds)
    target = "" if case.target is None else f", target {case.target:.2f}"
    print(f"\n{case.name}: copy {copy_us:.1f} us{target}", flush=True)
    inputs = make_inputs(case)
    expected = reference(case, inputs[0]) if check else []
    calls = [ours(case, one) for one in inputs]
    ways = Ways(case, inputs, seconds) if arguments.ways else None
    times: list[tuple[float, str]] = []
    for label, plan in options_of(case, forces, current_device()):
        try:
            force(None if label == PLANNED else label)
            wrong = error(calls[0](), expected) if check else 0.0
            torch.cuda.synchronize()
            us = time_calls(case, calls, seconds=seconds)
            note = f"  error {wrong:.1e}" if check else ""
            if ways:
                note += f"  in L2 {ways.resident(calls):.2f}, written {ways.written(calls):.2f}"
        except (RuntimeError, ValueError) as problem:
            sentence = str(problem).strip().splitlines()[0]
            print(f"  {label:<48} failed: {sentence}", flush=True)
            if "CUDA error" in str(problem):  # the context is lost: all later calls would fail
                raise
            continue
        finally:
            force(None)
        times.append((us, label))
        if arguments.plan:
            note += f"\n    {json.dumps(plan)}"
        print(f"  {label:<48} {us:9.2f} us  ratio {case.ratio(us, copy_us):.3f}{note}", flush=True)
    if any("*" in options for options in forces):
        fastest = "; ".join(f"{us:.2f} us {label}" for us, label in sorted(times)[:FASTEST])
        print(f"  the fastest: {fastest}", flush=True)


def options_of(case: Case, forces: list[str], device: dict[str, int]) -> Iterator[tuple[str, Plan]]:
    """The options to time, each with its plan: the plan's own choice first, and no plan twice.

    Prints why options of `forces` without a * are left out.
    """
    own = plan_under(None, case, device)
    names = {json.dumps(own): PLANNED}
    yield PLANNED, own
    for forced in forces:
        for options in expanded(case, forced, device):
            try:
                plan = plan_under(options, case, device)
            except ValueError as problem:
                print(f"  {options:<48} failed: {str(problem).splitlines()[0]}", flush=True)
                continue
            name = names.setdefault(json.dumps(plan), options)
            if name == options:
                yield options, plan
            elif "*" not in forced:
                print(f"  {options:<48} is {name}", flush=True)


def expanded(case: Case, options: str, device: dict[str, int]) -> Iterator[str]:
    """The options with values in the place of every *, from the first to the last."""
    words = options.split()
    star = next((i for i, word in enumerate(words) if word.endswith("=*")), None)
    if star is None:
        yield options
        return
    field = words[star].removesuffix("=*")
    possible = False
    for value in values_of(field, device):
        tried = [*words[:star], f"{field}={value}", *words[star + 1 :]]
        try:
            plan_under(" ".join(word for word in tried if "*" not in word), case, device)
        except ValueError:
            continue
        possible = True
        yield from expanded(case, " ".join(tried), device)
    if not possible:
        yield from expanded(case, " ".join(words[:star] + words[star + 1 :]), device)


def values_of(field: str, device: dict[str, int]) -> Iterable[str | int]:
    """The values that a * stands for. Numbers go up to the kernels' limits or beyond them."""
    sms = device["sms"]
    values: dict[str, Iterable[str | int]] = {
        "strategy": STRATEGIES,
        "vecs": range(1, 33),
        "teams": range(1, 17),
        "bulk": (0, 1),
        "stages": range(1, 9),
        "lag": range(1, 4),
        "long": (0, 1),
        # For each number of rows that run at once, the most blocks that each row can have.
        "blocks_per_row": sorted({sms // (sms // blocks) for blocks in range(1, sms + 1)}),
    }
    if field not in values:
        raise ValueError(f"expected one of {', '.join(values)} before =*, got {field!r}")
    return values[field]


def current_device() -> dict[str, int]:
    """The current device's properties that plans depend on; without one, those of H100 and H200."""
    if not torch.cuda.is_available():
        return HOPPER
    device: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "capability": 10 * device.major + device.minor,
        "sms": device.multi_processor_count,
        "shared_memory": device.shared_memory_per_block_optin,
        "l2_bytes": device.L2_cache_size,
    }


def plan_under(options: str | None, case: Case, device: dict[str, int]) -> Plan:
    """The plan of a case on a device under these options; raises ValueError if there is none."""
    force = torch.ops.fused_layernorm._force
    force(options)
    try:
        return plan_of(case, device)
    finally:
        force(None)


def plan_of(case: Case, device: dict[str, int]) -> Plan:
    """The plan of a case on a device, under the options in force."""
    problem: dict[str, Any] = {
        "backward": case.backward, "residual": case.residual, "y_dtype": case.torch_out_dtype,
        "weight_dtype": case.torch_weight_dtype, "has_epilogue": case.activation != (None, 1.0),
    }  # fmt: skip
    if case.modulated:
        problem["weight_dtype"] = case.torch_modulation_dtype
        *groups, _ = case.modulation_shape
        problem["group_rows"] = case.rows // math.prod(groups)
        problem["gated"] = case.backward and case.residual
    describe = torch.ops.fused_layernorm._plan
    plan = json.loads(describe(case.rows, case.cols, case.torch_dtype, **problem, **device))
    if plan is None:  # no plan for both: the norm and its gate have a launch each
        problem["gated"] = False
        plan = json.loads(describe(case.rows, case.cols, case.torch_dtype, **problem, **device))
    return cast(Plan, plan)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("lines", nargs="*", metavar="CASE | FORCE | ...")
    parser.add_argument("--file", help="read further lines from this file")
    parser.add_argument("--force", action="append", default=[], help="options tried on every case")
    parser.add_argument("--list", action="store_true", help="print the options, time nothing")
    parser.add_argument("--no-check", action="store_true", help="do not compare with PyTorch")
    parser.add_argument("--ways", action="store_true", help="time small calls in two more ways")
    parser.add_argument("--plan", action="store_true", help="print the plan of each line")
    parser.add_argument("--seconds", type=float, default=0.03, help="device time per measurement")
    arguments = parser.parse_args(argv)
    lines = list(arguments.lines)
    if arguments.file:
        text = Path(arguments.file).read_text()
        lines += [line.split("#")[0] for line in text.splitlines()]
    work = [parse_line(line, arguments.force) for line in lines if line.strip()]

    if arguments.list:
        import fused_layernorm  # noqa: F401  (registers the operators)

        for case, forces in work:
            print(f"\n{case.name}")
            for label, plan in options_of(case, forces, current_device()):
                print(f"  {label:<48} {json.dumps(plan) if arguments.plan else ''}".rstrip())
        return
    require_kernels()
    for case, forces in work:
        tune(case, forces, arguments)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
