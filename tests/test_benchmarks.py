# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' arithmetic, tables and files, and that what they time computes the same thing."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("no benchmarks beside these tests", allow_module_level=True)
sys.path.insert(0, str(ROOT))  # the benchmarks are no part of the installed package

import libraries  # noqa: E402

from benchmarks import (  # noqa: E402
    cases,
    compare,
    diffusion,
    heads,
    models,
    ours,
    overhead,
    providers,
    results,
    sweep,
    timing,
    tune,
    turns,
)
from benchmarks.cases import CASES, HEAD_OPS, OPS, Case, parse_case  # noqa: E402


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(timing, "DEVICE", "cpu")
    monkeypatch.setattr(timing, "l2_bytes", lambda: 1000)
    monkeypatch.setattr(timing, "input_count", lambda *arguments, **options: 2)


@pytest.mark.parametrize(
    ("text", "row", "once"),
    [  # the bytes of a row of 30 columns, by column, and those that are moved once
        ("100x30 bf16 forward", 2 * 2, 2 * 2),
        ("100x30 bf16 backward", 3 * 2, 3 * 2),
        ("100x30 bf16 gelu_scale_backward", 3 * 2, 4 * 2),
        ("100x30 bf16 add_forward", 4 * 2, 2 * 2),
        ("100x30 bf16 add_backward", 4 * 2, 3 * 2),
        ("100x30 bf16+fp32>fp32 forward", 2 + 4, 2 * 4),
        ("100x30 bf16+fp32>fp32 backward", 2 + 4 + 2, 3 * 4),
        ("100x30 bf16+fp32>fp32 add_backward", 3 * 2 + 4, 3 * 4),
        ("100x30 bf16+fp32 add_forward", 4 * 2, 2 * 4),
        ("4x25x30 bf16 ada_forward", 2 * 2, 2 * 4 * 2),
        ("4x25x30 bf16*fp32 add_ada_forward", 4 * 2, 3 * 4 * 4),
        ("4x25x30 bf16 add_ada_backward", 6 * 2, 5 * 4 * 2),
        ("4x25x30 bf16 ada_forward per-token", 4 * 2, 0),
        ("4x25x30 bf16 ada_backward per-token", 5 * 2, 0),  # dy is that of shift
        ("4x25x30 bf16 add_ada_backward per-token", 10 * 2, 0),
    ],
)
def test_bytes_are_the_least_that_must_move(text, row, once):
    assert parse_case(text).bytes == 30 * (100 * row + once)


def test_every_operator_has_a_case_with_a_target():
    with_target = [case for case in CASES if case.target is not None]
    assert {case.op for case in with_target} == {*OPS, *HEAD_OPS}
    assert all(0.3 < (case.target or 0) < 1.4 for case in with_target)
    assert len({case.name for case in CASES}) == len(CASES)
    sizes = {(f"{case.size} {case.types}", case.op): case.target for case in CASES}
    assert {key: sizes[key] for key in cases._RATIOS} == cases._RATIOS


def test_parse_case():
    mixed = Case("backward", 5, 7, "bfloat16", weight_dtype="float32", out_dtype="float32")
    assert parse_case("5x7 bf16+fp32>fp32 backward") == mixed
    per_token = parse_case("2x5x7 bf16 ada_forward per-token")
    assert (per_token.samples, per_token.modulation) == (2, "token")
    for case in CASES:
        assert parse_case(case.text) == case
    for text in ("", "5x7 bf16", "5x7 int8 forward", "5x7 bf16 f", "5x7 bf16>fp32+fp32 forward",
                 "5x7 bf16 ada_forward", "2x5x7 bf16 forward", "5x7 bf16 forward per-token",
                 "2x5x7 bf16*int8 ada_forward"):  # fmt: skip
        with pytest.raises(ValueError, match=r"expected|unknown"):
            parse_case(text)


def options_of(line):
    case, forces = tune.parse_line(line, [])
    return dict(tune.options_of(case, forces, tune.HOPPER))


@pytest.mark.parametrize("document", ["benchmarks/tune.py", "CONTRIBUTING.md"])
def test_documented_tuning_times_a_plan_for_each_option(document):
    text = (ROOT / document).read_text()
    lines = re.findall(r'"(\d+x\d+ [^"]+\|[^"]+)"', text)
    assert lines
    for line in lines:
        assert len(options_of(line)) >= 1 + line.count("|") + 5 * ("*" in line), line


def test_tune_tries_every_value():
    """A * is the same as its values by hand, but for plans that were there before."""
    line = "2048x65536 bf16 backward"
    stages, blocks = range(1, 10), range(1, 133)
    by_hand = [f"blocks_per_row={n} stages={m}" for n in blocks if n == 132 // (132 // n)
               for m in stages]  # fmt: skip
    expected = options_of(" | ".join([line, *by_hand]))
    found = options_of(f"{line} | blocks_per_row=* stages=*")
    assert found == expected
    assert len(found) > 50
    plans = [json.dumps(plan) for plan in found.values()]
    assert len(plans) == len(set(plans))


@pytest.mark.parametrize(("op", "strategy"), [("forward", "warp"), ("add_forward", "block")])
def test_tune_plans_what_a_case_fuses(op, strategy):
    """So the printed plan is the one that was timed."""
    plan = tune.plan_of(Case(op, 32768, 1024, "bfloat16"), tune.HOPPER)
    assert plan["strategy"] == strategy


PLAIN_OPS = ("forward", "backward", "add_forward", "add_backward")
MODULATED = tuple(op for op in OPS if "ada" in op)
PROBLEMS = [
    *(f"6x20 float32 {op}" for op in OPS if "ada" not in op and "channels" not in op),
    *(f"2x20x3x1 float32 {op}" for op in OPS if "channels" in op),
    # Not backward in float16: on a CPU, ATen's wants mean and rstd in float16 then.
    "6x20 float64 forward", "6x20 float64 backward", "6x20 float16 forward",
    *(f"6x20 {types} {op}" for op in PLAIN_OPS
      for types in ("bf16+fp32", "bf16+fp32>fp32", "fp16+fp32>fp32")),
    *(f"3x4x20 {types} {op}{per}" for op in MODULATED
      for types in ("float32", "bf16*fp32") for per in ("", " per-token")),
]  # fmt: skip


def dtypes_of(case):
    if not case.backward:
        return [case.torch_out_dtype, case.torch_dtype][: 1 + case.residual]
    if case.modulation:
        modulations = [case.torch_modulation_dtype] * (2 + case.residual)
        return [case.torch_dtype] * (1 + case.residual) + modulations
    return [case.torch_dtype, *[case.torch_weight_dtype] * (1 if case.is_rms else 2)]


@pytest.mark.parametrize("text", PROBLEMS)
def test_all_providers_compute_the_same(text, on_cpu):
    case = parse_case(text)
    bfloat16 = 2e-2 if case.modulation else 1.2e-2
    tolerance = {"float16": 2e-3, "bfloat16": bfloat16}.get(case.dtype, 1e-5)
    inputs = ours.make_inputs(case)
    with torch.no_grad():
        expected = tune.reference(case, inputs[0])
        assert not inputs[0].x.requires_grad
        names = ["ours", "eager"]
        if case.op in ("rms_forward", "rms_backward") and not case.mixed:
            names.append("llama")
        for name in names:
            calls: Any = providers.PROVIDERS[name](case, inputs)
            first, second = calls
            result = first()
            assert tune.error(result, expected) < tolerance, name
            outputs = [result] if isinstance(result, torch.Tensor) else list(result)
            assert [output.dtype for output in outputs] == dtypes_of(case), name
            assert [output.shape for output in outputs] == [want.shape for want in expected], name
            assert tune.error(second(), expected) > 1e-2, "the inputs are not distinct"


@pytest.mark.parametrize("op", HEAD_OPS)
def test_all_providers_compute_the_same_of_heads(op, on_cpu):
    case = parse_case(f"2x3x4x8 float32 {op}")
    assert (case.rows, case.size, case.name) == (48, "2x3x4x8", f"{op} 2x3x4x8 float32")
    assert case.bytes == (3 if case.backward else 2) * 48 * 8 * 4
    assert results.case_of(results.row_of(case)) == case
    inputs = ours.make_inputs(case)
    mine, eager = providers.PROVIDERS["ours"], providers.PROVIDERS["eager"]
    found: Any = zip(inputs, mine(case, inputs) or (), eager(case, inputs) or (), strict=True)
    results_of = []
    for one, own, stock in found:
        results_of.append(own())
        assert tune.error(own(), stock()) < 1e-5
        if case.backward:
            of_compiler = heads.backward(case, False)(*heads.arguments(case, one))
            assert tune.error(own(), of_compiler) < 1e-5
        elif case.rotates:
            of_norm = torch.nn.functional.rms_norm(one.x[:, :, 0], (8,), one.weight, 1e-5)
            assert tune.error(own()[0], [of_norm]) > 0.1, "the rotation is there"
    assert tune.error(*results_of) > 1e-2, "the inputs are not distinct"
    with pytest.raises(ValueError, match="expected SAMPLES"):
        parse_case(f"2x3 float32 {op}")


@pytest.mark.parametrize(
    "text",
    [f"6x20 {types} {op}" for op in PLAIN_OPS for types in ("float32", "bf16+fp32>fp32")]
    + [f"3x4x20 {types} {op}" for op in MODULATED for types in ("float32", "bf16*fp32")],
)
def test_compile_takes_the_functions_whole(text, on_cpu, monkeypatch):
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: compile(f, backend="aot_eager", **how))
    case = parse_case(text)
    inputs = ours.make_inputs(case)
    calls = providers.compile_calls(case, inputs)
    with torch.no_grad():
        assert tune.error(calls[0](), tune.reference(case, inputs[0])) < 2e-2


def test_sweep_against_another(on_cpu, monkeypatch):
    def calls_of(name):
        return lambda case, inputs: [lambda: (name, case)]

    def graph_time(calls, **how):
        name, case = calls[0]()
        return {"ours": 3.0, "eager": 1.0, "compile": 2.0 if case.cols == 1 else 6.0}[name]

    monkeypatch.setattr(timing, "graph_time", graph_time)
    names = {name: calls_of(name) for name in ("ours", "eager", "compile")}
    monkeypatch.setattr(providers, "PROVIDERS", names)
    cases = [case for case in sweep.points((1, 8), [1, 64]) if not case.is_rms]
    part = sweep.sweep(cases, 60.0, "compile")
    assert (part["against"], part["points"], part["left_out"]) == ("compile", 16, 0)
    assert part["slower"] == 8
    assert {row["ratio"] for row in part["worst"]} == {0.5, 1.5}
    assert "of which slower than compile: 8" in sweep.text(part)
    assert sweep.sweep(cases, 60.0)["slower"] == 16
    # A helper that compiles ahead gets them as text.
    assert [parse_case(case.text) for case in sweep.points()[:50]] == sweep.points()[:50]


def test_csrc_sha256_with_and_without_git(tmp_path):
    """Both know the same files, and git's ignored ones are not among them."""
    (tmp_path / "csrc" / "sub").mkdir(parents=True)
    for name, content in (("csrc/b.cu", "b"), ("csrc/a.h", "a"), ("csrc/sub/c.h", "c")):
        (tmp_path / name).write_text(content)
    expected = results.csrc_sha256(tmp_path)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "add", "csrc"], check=True)
    (tmp_path / ".gitignore").write_text("*.o")
    (tmp_path / "csrc" / "ignored.o").write_text("not part of the sources")
    assert results.csrc_sha256(tmp_path) == expected
    (tmp_path / "csrc" / "sub" / "c.h").write_text("changed")
    assert results.csrc_sha256(tmp_path) != expected


def test_verdict():
    def verdict(case, **times):
        return results.verdict(case, {**results.row_of(case), **times})

    case = Case("forward", 32768, 1024, "bfloat16", 0.9)
    assert verdict(case, copy_us=9.0, ours_us=10.0) == "PASS"
    assert verdict(case, copy_us=9.0, ours_us=10.1) == "MISS target"
    assert verdict(case, copy_us=9.0, ours_us=10.0, eager_us=9.9, compile_us=9.0) == "MISS eager"
    assert verdict(case, copy_us=9.0) == ""
    fused = Case("gelu_forward", 32768, 1024, "bfloat16", 0.9)
    slow = {"copy_us": 9.0, "ours_us": 11.0, "eager_us": 10.0, "compile_us": 9.9}
    assert verdict(fused, **slow) == "MISS target, eager, compile"
    assert verdict(fused, copy_us=9.0, ours_us=10.0, eager_us=20.0, compile_us=None) == "PASS"
    guarded = Case("forward", 32768, 768, "bfloat16", weight_dtype="float32")
    assert verdict(guarded, copy_us=9.0, ours_us=99.0) == ""
    assert verdict(guarded, copy_us=9.0, ours_us=10.1, eager_us=10.0) == "MISS eager"


class FakeSide(compare.Side):
    """A build that takes `us(job)` microseconds, or raises."""

    def __init__(self, label, us, bits=1):
        super().__init__(label, [])
        self.us, self.bits, self.asked = us, bits, []

    def ask(self, **message):
        self.asked.append(message["do"])
        if message["do"] == "prepare":
            self.job = compare.Job(Case(**message["case"]), message["statistics"])
            return {"bits": [self.bits]}
        return {"us": self.us(self.job)} if message["do"] == "time" else {}


JOBS = compare.jobs_of([Case("forward", 64, 64, "float32"), Case("backward", 64, 64, "float32")])


@pytest.mark.parametrize(
    ("old_us", "new_us", "slower"),
    [(100.0, 100.9, False), (100.0, 101.1, True), (2.0, 2.09, False), (2.0, 2.11, True),
     (100.0, 50.0, False)],
)  # fmt: skip
def test_compare_flags_what_is_slower(old_us, new_us, slower):
    old, new = FakeSide("old", lambda job: old_us), FakeSide("new", lambda job: new_us, bits=2)
    made = compare.compare(JOBS, old, new, 60)
    assert [row["slower"] for row in made["rows"]] == [slower] * 3
    assert made["rows"][0]["ratio"] == pytest.approx(new_us / old_us, abs=1e-4)
    assert ("first_ratio" in made["rows"][0]) == slower  # what looks slower is measured again
    assert not made["rows"][0]["same_bits"]
    assert old.asked == new.asked
    assert old.asked.count("prepare") == old.asked.count("free") == 3 * (1 + slower)
    text = compare.text(made, 100)
    assert "forward+stats 64x64 float32" in text
    assert f"{3 * slower} SLOWER" in text


def test_compare_says_what_failed_and_what_was_left_out():
    """What the old build lacks is skipped, each reason once; what the new lacks fails."""

    def fail(job):
        raise compare.Failed("no such kernel")

    fine = FakeSide("new", lambda job: 1.0)
    made = compare.compare(JOBS, FakeSide("old", fail), fine, 60)
    assert not any(row["slower"] for row in made["rows"])
    assert compare.text(made, 100).count("old: no such kernel") == 1
    made = compare.compare(JOBS, FakeSide("old", lambda job: 1.0), FakeSide("new", fail), 60)
    assert all(row["slower"] for row in made["rows"])
    assert compare.text(made, 100).count("FAILED new: no such kernel") == len(JOBS)
    made = compare.compare(JOBS, FakeSide("old", lambda job: 1.0), fine, -1)
    assert made["left_out"] == [job.name for job in JOBS]


STUB = """
import json, sys, time
print(json.dumps({"info": "stub"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["do"] == "die":
        break
    if asked["do"] == "hang":
        time.sleep(60)
    answer = {"error": "bad"} if asked["do"] == "fail" else {"us": 3.0}
    print(json.dumps(answer), flush=True)
"""


def test_compare_talks_to_a_process_and_outlives_it(monkeypatch):
    side = compare.Side("old", [sys.executable, "-c", STUB])
    assert side.start() == "stub"
    assert side.ask(do="time") == {"us": 3.0}
    with pytest.raises(compare.Failed, match="bad"):
        side.ask(do="fail")
    with pytest.raises(compare.Failed, match="the process ended"):
        side.ask(do="die")
    assert side.ask(do="time") == {"us": 3.0}, "it was started anew"
    monkeypatch.setattr(compare, "ANSWER", 0.2)
    with pytest.raises(compare.Failed, match="no answer"):
        side.ask(do="hang")
    assert side.process is None


class FakeGraph:
    """A graph that runs its calls once and takes a microsecond."""

    def __init__(self, calls, count):
        self.outputs = [call() for call in calls]

    def time(self, *arguments):
        return 1.0

    def free(self):
        self.outputs = []


OUTPUTS = {"forward": 3, "add_forward": 4, "backward": 3, "ada_forward": 3, "add_ada_forward": 4,
           "ada_backward": 3, "add_ada_backward": 5}  # fmt: skip


@pytest.mark.parametrize(
    ("op", "types"),
    [(op, types) for op in OUTPUTS for types in
     ("float32", "bf16*fp32" if "ada" in op else "bf16+fp32>fp32")],
)  # fmt: skip
def test_compare_process_prepares_times_and_frees(op, types, on_cpu, monkeypatch):
    import fused_layernorm  # noqa: F401  (the composite stands for the kernels)

    monkeypatch.setattr(timing, "Graph", FakeGraph)
    answers: list[dict] = []

    def ask(**message):
        compare.serve(bench, [json.dumps(message)], answers.append)
        return answers[-1]

    bench = compare.Bench()
    samples = "2x" if "ada" in op else ""
    case = dataclasses.asdict(parse_case(f"{samples}6x20 {types} {op}"))
    with_stats = not op.endswith("backward")
    first = ask(do="prepare", case=case, statistics=with_stats, seed=1)
    assert bench.graph is not None
    assert len(bench.graph.outputs[0]) == OUTPUTS[op]
    assert ask(do="time", seconds=0.1) == {"us": 1.0}
    assert ask(do="free") == {}
    assert bench.graph is None
    assert ask(do="prepare", case=case, statistics=with_stats, seed=1) == first
    assert ask(do="prepare", case=case, statistics=with_stats, seed=2) != first
    wrong = {**case, "rows": -1}
    assert "error" in ask(do="prepare", case=wrong, statistics=with_stats, seed=1)


def test_overhead_measures_steps_and_device_times(on_cpu, monkeypatch):
    monkeypatch.setattr(overhead, "LAYERS", 2)
    monkeypatch.setattr(overhead, "STEPS", (("tiny", (2, 3, 8)),))

    def kernels_of(call):
        call()
        return [timing.Kernel("a", 6.0, 1)]

    monkeypatch.setattr(timing, "kernels_of", kernels_of)
    parts = overhead.measure(rounds=2)
    assert {entry["ours_device_us"] for entry in parts["call_overhead"].values()} == {3.0, 6.0}
    steps = parts["training_step"]
    assert [(step["dtype"], step["weight_dtype"], step["autocast"]) for step in steps] == [
        ("bfloat16", "float32", True),
        ("bfloat16", "bfloat16", False),
        ("float32", "float32", False),
    ]
    for step in steps:
        assert 0 < step["ours_best_us"] <= step["ours_us"]
        assert step["eager_device_us"] == 3.0  # two inputs
    assert "tiny 2x3x8" in overhead.steps_text(steps)


def test_a_chain_ends_where_it_began(on_cpu, monkeypatch):
    """A visit leaves no gradients behind, and each way computes what it should."""
    monkeypatch.setattr(overhead, "LAYERS", 3)
    seen = []

    def measure(call):
        result = call()
        seen.append(result)
        return 3.0, result

    with overhead.variant_of("ours") as module:
        chain = overhead.Chain(module)
    assert chain.visit(measure)["step"] == 2.0
    no_grad, _, grad, _, autocast, _ = seen
    assert not no_grad.requires_grad
    assert grad.requires_grad
    assert torch.equal(no_grad, grad)
    assert len(autocast) == 3
    assert all(norm.weight.grad is None for norm in chain.norms)
    assert all(x.grad is None and x.dtype == torch.bfloat16 for x in chain.halves)


def tiny_model():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    return model, {"input": torch.randn(4, 8)}, lambda output: output.float().square().mean()


def test_models_measure_one_row_a_variant(on_cpu, monkeypatch):
    def kernels_of(call):
        call()
        return [timing.Kernel("vectorized_layer_norm_kernel", 30.0, 2),
                timing.Kernel("gemm", 70.0, 3)]  # fmt: skip

    def broken():
        raise ValueError("no such size")

    monkeypatch.setattr(timing, "kernels_of", kernels_of)
    chosen = {"tiny": models.Model("torch", tiny_model), "broken": models.Model("torch", broken),
              "foreign": models.Model("no_such_package", tiny_model)}  # fmt: skip
    part = models.run(chosen, ("eager", "swap"), models.MODES, 0.0)
    rows = part["rows"]
    assert [(row["mode"], row["variant"]) for row in rows] == [
        (mode, variant) for mode in ("training", "inference") for variant in ("eager", "swap")
    ]
    for row in rows:
        assert (row["device_ms"], row["layer_norm_ms"], row["kernels"]) == (0.1, 0.03, 5)
        assert row["products_ms"] == 0.07
        assert 0 < row["wall_best_ms"] <= row["wall_ms"]
    assert abs(rows[0]["loss"] - rows[1]["loss"]) < 1e-2 * rows[0]["loss"]
    assert "broken, training: no such size" in part["skipped"]
    assert "foreign: no_such_package is not installed" in part["skipped"]
    assert "0.10 (x1.000)" in models.text(part)


def test_models_variants_are_what_they_say(monkeypatch):
    from fused_layernorm import FusedLayerNorm

    model, _, _ = tiny_model()
    swapped = models.prepared(model, "swap")
    assert isinstance(swapped.get_submodule("1"), FusedLayerNorm)
    for other in (model, models.prepared(model, "eager"), models.prepared(model, "override")):
        assert type(other.get_submodule("1")) is torch.nn.LayerNorm
    entered = []
    monkeypatch.setattr("fused_layernorm.override_aten", lambda: entered.append(1))
    for variant in models.VARIANTS:
        models.around(variant)
    assert len(entered) == 1
    monkeypatch.setattr(torch, "compile", lambda model, **how: how)
    asked = {variant: models.compiled(model, variant) for variant in models.VARIANTS}
    fused = {"backend": "fused_layernorm"}
    assert {variant: how for variant, how in asked.items() if how is not model} == {
        "compiled": {}, "swap_compiled": {}, "operators_compiled": {}, "fused_compiled": fused,
        "fused_eager": {**fused, "options": {"fused_layernorm.then": "eager"}},
    }  # fmt: skip


def test_turns(tmp_path, monkeypatch):
    """Nobody measures while anyone prepares; what fails or takes too long is said."""
    (tmp_path / "a_turn.py").write_text(
        "import sys, time\n"
        "from pathlib import Path\n"
        "from benchmarks import turns\n"
        "name, log, lock = sys.argv[1], sys.argv[2], Path(sys.argv[4])\n"
        "def note(what):\n"
        "    with open(log, 'a') as file: file.write(f'{what}\\n')\n"
        "with turns.preparing(lock):\n"
        "    note('prepares')\n"
        "    while Path(log).read_text().count('prepares') < 2: time.sleep(0.01)\n"
        "    time.sleep(0.2 * int(name))\n"
        "    note('is prepared')\n"
        "with turns.measuring(lock):\n"
        "    note('begins')\n"
        "    time.sleep(0.05)\n"
        "    note('ends')\n"
        "if name == '1': sys.exit('no such model')\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(turns.__file__).parents[1]}")
    log = tmp_path / "log"
    calls = [[name, str(log)] for name in "01"]
    assert turns.run("a_turn", calls, 2, 60.0) == [None, "ended with 1: no such model"]
    lines = log.read_text().splitlines()
    assert lines[2:] == ["is prepared", "is prepared", *["begins", "ends"] * 2]
    assert turns.run("a_turn", calls, 1, -1.0) == 2 * ["no time"]
    log.unlink()
    assert turns.run("a_turn", calls[:1], 1, 0.5) == ["ended with -9: "]  # it waits for another


DIFFUSION = {
    "blocks": lambda: diffusion.blocks(layers=2, size=(2, 4, 16), heads=2),
    "dit": lambda: diffusion.dit(layers=2, heads=2, batch=2, side=4),
    "sd3": lambda: diffusion.sd3(layers=2, heads=2, batch=2, side=4, words=3, text=8),
    "flux": lambda: diffusion.flux(layers=1, single_layers=1, heads=1, side=2, words=3, text=8),
    "wan": lambda: diffusion.wan(layers=2, heads=1, hidden=16, frames=2, height=4, width=4,
                                 words=3, text=8),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFUSION)
def test_diffusion_transformers_train_and_infer(name, on_cpu, monkeypatch):
    """Twice built from one seed they give one loss; fused, the same but for rounding."""
    if name != "blocks":
        libraries.get("diffusers")
    monkeypatch.setattr(timing, "kernels_of", lambda call: [timing.Kernel("gemm", 1.0, 1)])
    chosen = {"tiny": models.Model("torch", DIFFUSION[name], half=True)}
    variants = ("eager", "swap", "operators")
    part = models.run(chosen, variants, models.MODES, 0.0)
    assert part["skipped"] == []
    measured = ["eager", "operators" if name == "blocks" else "swap"]
    assert [row["variant"] for row in part["rows"]] == 2 * measured
    losses = [row["loss"] for row in part["rows"]]
    assert max(losses) - min(losses) < 1e-2 * losses[0]
    again = models.run(chosen, variants, ("training",), 0.0)
    assert [row["loss"] for row in again["rows"]] == losses[:2]


def test_half_models_keep_what_must_stay_in_float32():
    model, _, _ = tiny_model()
    model._keep_in_fp32_modules = ["1"]
    model[0].register_buffer("steps", torch.arange(3))
    dtypes = {name: tensor.dtype for name, tensor in models.halved(model).state_dict().items()}
    assert dtypes == {
        "0.weight": torch.bfloat16, "0.bias": torch.bfloat16, "0.steps": torch.int64,
        "1.weight": torch.float32, "1.bias": torch.float32,
    }  # fmt: skip
