# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' arithmetic and files; what they time computes the same thing; README and page are
of the results files, and say what these hold.
"""
# ruff: noqa: E402

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._functorch.config
import torch.utils._pytree as pytree

import fused_layernorm

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("no benchmarks beside these tests", allow_module_level=True)
sys.path.insert(0, str(ROOT))  # the benchmarks are no part of the installed package

from benchmarks import compare, ours, overhead, providers, report, results, run, sweep, timing
from benchmarks.cases import CASES, Case, parse_case, the_list
from benchmarks.families import OPS
from benchmarks.turns import collect


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(timing, "DEVICE", "cpu")
    monkeypatch.setattr(timing, "input_count", lambda *arguments, **options: 2)


@pytest.mark.parametrize(
    ("text", "row", "once"),
    [  # the bytes of a row of 30 columns, by column, and those that are moved once
        ("100x30 bf16 forward", 2 * 2, 2 * 2),
        ("100x30 bf16 gelu_scale_backward", 3 * 2, 4 * 2),
        ("100x30 bf16 add_rms_forward", 4 * 2, 1 * 2),
        ("100x30 bf16+fp32>fp32 add_backward", 3 * 2 + 4, 3 * 4),
        ("4x25x30 bf16*fp32 add_ada_forward", 4 * 2, 3 * 4 * 4),
        ("4x25x30 bf16 add_ada_backward", 6 * 2, 5 * 4 * 2),
        ("4x25x30 bf16 ada_backward per-token", 5 * 2, 0),  # dy is that of shift
        ("1x25x2x30 bf16 qk_norm_rope_backward", 3 * 2, 0),
        ("100x30 bf16 gated_backward", 5 * 2, 2 * 2),
    ],
)
def test_bytes_are_the_least_that_must_move(text, row, once):
    assert parse_case(text).bytes == 30 * (100 * row + once)


def test_cases_and_their_texts():
    assert {case.op for case in CASES if case.target is not None} == {*OPS}
    assert all(0.3 < (case.target or 0.5) < 1.4 for case in CASES)
    assert len({case.name for case in CASES}) == len(CASES)
    for case in (*CASES, *sweep.points()[:50]):
        assert parse_case(case.name) == results.case_of(results.row_of(case)) == case
    mixed = Case("backward", (5, 7), "bfloat16", weight_dtype="float32", out_dtype="float32")
    assert parse_case("5x7 bf16+fp32>fp32 backward") == mixed
    for text in ("", "5x7 bf16", "5x7 int8 forward", "5x7 bf16 f", "5x7 bf16>fp32+fp32 forward",
                 "5x7 bf16 ada_forward", "2x5x7 bf16 forward", "5x7 bf16 forward per-token",
                 "2x5x7 bf16*int8 ada_forward", "2x3 bf16 qk_norm_forward"):  # fmt: skip
        with pytest.raises(ValueError, match=r"expected|unknown|are not those"):
            parse_case(text)


COMPILED = ("gelu_scale_forward", "backward", "add_backward", "add_ada_backward", "rms_backward",
            "channels_backward", "qk_norm_rope_backward")  # fmt: skip
PLAIN_OPS = ("forward", "backward", "add_forward", "add_backward")
SIZES = {"rows": "6x20", "samples": "3x4x20", "image": "2x64x3x1", "heads": "2x3x4x8"}
PROBLEMS = [
    *(f"{SIZES[OPS[op].layout]} float32 {op}" for op in OPS),
    "6x20 float64 forward", "6x20 float64 backward", "6x20 float16 forward",
    *(f"6x20 {types} {op}" for op in PLAIN_OPS for types in ("bf16+fp32", "bf16+fp32>fp32")),
    *(f"3x4x20 bf16*fp32 {op}{per}" for op in OPS if "ada" in op for per in ("", " per-token")),
]  # fmt: skip


def error(outputs, expected):
    """The largest relative error (in the 2-norm) over the outputs; NaN if any output has one."""
    pairs = zip(outputs, expected, strict=True)
    errors = [(out.float() - want.float()).norm() / want.float().norm() for out, want in pairs]
    return float(torch.stack(errors).max())  # NaN is the largest


@pytest.mark.parametrize("text", PROBLEMS)
@torch._functorch.config.patch(donated_buffer=False)  # as benchmarks.run has it
def test_all_providers_compute_the_same(text, on_cpu, monkeypatch):
    """Ours, eager, compiled and Llama's class, with the shapes and dtypes of each other."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: compile(f, backend="aot_eager", **how))
    case = parse_case(text)
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2}.get(case.dtype, 1e-5)
    inputs = ours.make_inputs(case)
    expected = providers.reference(case, inputs[0])
    dtypes = None
    names = ["ours", "eager", "llama", "compile"]
    for name in names if case.op in COMPILED and case.dtype == "float32" else names[:3]:
        calls = providers.PROVIDERS[name](case, inputs)
        if calls is None:
            assert name == "llama"  # which is RMSNorm, and of one dtype
            continue
        first, second = ((lambda call=call: pytree.tree_leaves(call())) for call in calls)
        for outputs in (first(), first()):  # a backward's first call runs forward, too
            assert error(outputs, expected) < tolerance, name
        assert [one.shape for one in outputs] == [want.shape for want in expected], name
        assert (dtypes := dtypes or [one.dtype for one in outputs]) == [o.dtype for o in outputs]
        assert error(second(), expected) > 1e-2, "the inputs are not distinct"


def test_csrc_sha256_with_and_without_git(tmp_path):
    """Both know the same files, none of them ignored by git, and comments do not count."""
    (tmp_path / "csrc" / "sub").mkdir(parents=True)
    for name in ("csrc/b.cu", "csrc/a.h", "csrc/sub/c.h"):
        (tmp_path / name).write_text(name)
    expected = results.csrc_sha256(tmp_path)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    for name, text, same in ((".gitignore", "*.o", True), ("csrc/ignored.o", "no source", True),
                             ("csrc/a.h", "  // A comment.\ncsrc/a.h", True),
                             ("csrc/sub/c.h", "changed", False)):  # fmt: skip
        (tmp_path / name).write_text(text)
        assert (results.csrc_sha256(tmp_path) == expected) is same


@pytest.mark.parametrize(
    ("op", "times", "verdict"),
    [
        ("forward", {"ours_us": 10.0}, "PASS"),
        ("forward", {"ours_us": 10.1}, "MISS target"),
        ("forward", {"ours_us": 10.0, "eager_us": 9.9, "compile_us": 9.0}, "MISS eager"),
        ("gelu_forward", {"ours_us": 11.0, "eager_us": 10.0, "compile_us": 9.9},
         "MISS target, eager, compile"),
        ("forward", {}, ""),
    ],
)  # fmt: skip
def test_verdict(op, times, verdict):
    case = Case(op, (32768, 1024), "bfloat16", 0.9)
    assert results.verdict(case, {**results.row_of(case), "copy_us": 9.0, **times}) == verdict


class FakeSide(compare.Side):
    """A build that takes `us` microseconds, or cannot prepare anything if that is None."""

    def __init__(self, label, us, bits=1):
        super().__init__(label)
        self.us, self.given, self.prepared = us, bits, 0

    def prepare(self, job, inputs):
        self.prepared += 1
        if self.us is None:
            raise RuntimeError("no such kernel")

    def time(self):
        return self.us

    def bits(self):
        return [torch.tensor(self.given)]


JOBS = compare.jobs_of([parse_case("8192x4096 fp32 forward"), Case("backward", (8, 8), "float32")])


@pytest.mark.parametrize(
    ("old_us", "new_us", "slower", "said"),
    [
        (100.0, 102.9, False, "; 3 differ in some bit; 0 SLOWER"),
        (2.0, 2.29, False, "0 SLOWER"),
        (100.0, 103.1, True, "3 SLOWER by more than 3% and 0.3 us"),
        (None, 1.0, False, "skipped old: no such kernel"),  # it may lack the operator
        (1.0, None, True, "FAILED new: no such kernel"),
    ],
)
def test_compare_flags_what_is_slower(old_us, new_us, slower, said, on_cpu):
    sides = [FakeSide("old", old_us), FakeSide("new", new_us, bits=2)]
    made = compare.compare(JOBS, [*sides, FakeSide("eager", 102.0)], 60)
    assert [row["slower"] for row in made["rows"]] == [slower] * 3
    assert said in compare.text(made, 100)
    assert ("slower than eager PyTorch: 3" in compare.text(made, 100)) == (new_us == 103.1)
    again = slower and new_us is not None  # what looks slower is measured again
    assert ("first_ratio" in made["rows"][0]) == again
    assert [side.prepared for side in sides] == 2 * [3 * (1 + again)]
    assert compare.compare(JOBS, sides, -1)["left_out"] == [job.name for job in JOBS]


class CalledGraph:
    """timing.Graph without a GPU: the calls' outputs, and what they move as the time."""

    def __init__(self, calls, bytes_per_call):
        self.outputs = [call() for call in calls]
        self.time = lambda *arguments: 1.0 * bytes_per_call
        self.free = self.outputs.clear


@pytest.mark.parametrize(
    "op", ["rms_forward", "backward", "group_nhwc_backward", "qk_norm_forward"]
)
def test_compare_measures_bits_and_eager(op, on_cpu, monkeypatch, tmp_path):
    monkeypatch.setattr(timing, "Graph", CalledGraph)
    case = parse_case(f"{SIZES[OPS[op].layout]} bfloat16 {op}")
    sides = [compare.Side(label) for label in ("old", "new", "eager")]
    made = compare.compare([compare.Job(case)], sides, 60)
    (row,) = made["rows"]
    assert (row["ratio"], row["same_bits"], row["slower"]) == (1.0, True, False)
    assert row["old_us"] == row["eager_us"] > 0
    results.write(tmp_path / "compare.json", made)
    assert results.read(tmp_path / "compare.json") == made
    monkeypatch.setattr(compare.Side, "bits", lambda self: [torch.tensor(id(self))])
    assert not compare.measure(compare.Job(case), sides, 1)["same_bits"]


def test_compare_takes_a_part_of_the_list():
    cases = the_list()
    assert len({case.name for case in cases}) == len(cases)
    assert {*CASES} < {*cases}
    assert max(case.tensor_bytes for case in cases) == 1 << 30
    assert {job.case.cols for job in compare.jobs_of(cases, "x4096 ,x768 ")} == {4096, 768}
    points = sweep.group_points()
    assert len({case.name for case in points}) == 300
    assert points[:9] == sweep.group_points(9)


def test_two_builds_in_one_process(tmp_path):
    """Each has operators of its own, and neither those of the package."""
    library = Path(fused_layernorm.__file__).parent / "libfused_layernorm.so"
    program = f"""
import torch
from pathlib import Path
from benchmarks import cases, compare, ours
names = [compare.load(Path({str(library.parent)!r}), number, Path({str(tmp_path)!r}))
         for number in (0, 1)]
device = dict(capability=90, sms=132, shared_memory=232448, l2_bytes=50 << 20)
old, new = (getattr(torch.ops, name) for name in names)
plan = lambda ops: ops._plan(4096, 4096, torch.bfloat16, backward=True, **device)
before = plan(new)
old._force("strategy=stream")
assert plan(new) == before != plan(old)
assert not hasattr(torch.ops.fused_layernorm, "_plan")
case = cases.parse_case("8x8 fp32 forward")
assert ours.missing_operator(case, namespace="no_such_build") == "layer_norm"
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_two_gpus_have_a_half_each(monkeypatch):
    def found(module, calls, *_):
        kept = [row for call in calls.values() for row in rows if row["op"] in call[1].split(",")]
        return {"rows": kept[lost:], "skipped": ["quack: -", "quack: -"]}

    rows = [results.row_of(case) for case in CASES]
    monkeypatch.setattr("benchmarks.turns.collect", found)
    for lost in (0, 1):
        with pytest.raises(SystemExit, match="quack") if lost else contextlib.nullcontext():
            assert run.on_two_gpus(9.0) == {"rows": rows, "skipped": ["quack: -"]}


def test_overhead_measures_steps_and_device_times(on_cpu, monkeypatch):
    monkeypatch.setattr(overhead, "LAYERS", 2)
    monkeypatch.setattr(overhead, "STEPS", (("tiny", (2, 3, 8)),))
    monkeypatch.setattr(timing, "kernels_of", lambda call: [timing.Kernel(str(call()), 6.0, 1)])
    parts = overhead.measure(rounds=2)
    assert {entry["ours_device_us"] for entry in parts["call_overhead"].values()} == {3.0, 6.0}
    steps = parts["training_step"]
    assert [step["autocast"] for step in steps] == [True, False, False]
    assert all(0 < step["ours_best_us"] <= step["ours_us"] for step in steps)
    assert {step["eager_device_us"] for step in steps} == {3.0}  # two inputs
    assert "tiny 2x3x8" in overhead.steps_text(steps)


TURN = """
import sys, time
from pathlib import Path
from benchmarks import turns
name, (log, output, lock) = sys.argv[1], map(Path, sys.argv[2::2])
def note(what):
    with log.open("a") as file: file.write(f"{what} ")
with turns.preparing(lock):
    note("prepares")
    while log.read_text().count("prepares") < 2: time.sleep(0.01)
    time.sleep(0.2 * int(name))
    note("prepared")
with turns.measuring(lock):
    note("begins")
    time.sleep(0.05)
    note("ends")
output.write_text('{"rows": [5], "skipped": ["a variant"]}')
if name == "1": sys.exit("no such model")
"""


def test_turns(tmp_path, monkeypatch):
    """Nobody measures while anyone prepares; what fails or takes too long is said."""
    (tmp_path / "a_turn.py").write_text(TURN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    log = tmp_path / "log"
    calls = {f"model {name}": [name, str(log)] for name in "01"}
    skipped = ["a variant", "a variant", "model 1: ended with 1: no such model"]
    assert collect("a_turn", calls, 2, 60.0) == {"rows": [5, 5], "skipped": skipped}
    assert log.read_text().split()[2:] == ["prepared", "prepared", *["begins", "ends"] * 2]
    assert [*collect("a_turn", calls, 1, -1.0).values()] == [[], [f"{n}: no time" for n in calls]]
    log.unlink()
    del calls["model 1"]  # for which the other waits
    killed = collect("a_turn", calls, 1, 0.5)
    assert killed == {"rows": [], "skipped": ["model 0: no time: it was killed"]}
    assert "a: ended with 1" in collect("no_such_module", {"a": []}, 1, 60.0)["skipped"][0]


# ---- What is shown of the results.

NEW = {"date": "2026-01-02T03:04:05+00:00", "csrc_sha256": "0123456789abcdef" * 4}
OLD = {"date": "2026-01-01T03:04:05+00:00", "csrc_sha256": "0"}


def row(op, rows, cols, dtype, tensors=2, **more):
    """A row whose time is that of a copy of two tensors at 4 TB/s; eager takes three times it."""
    identity = {"op": op, "rows": rows, "cols": cols, "dtype": dtype}
    size = results.case_of({**identity, **more}).tensor_bytes
    us = size / 2e6
    base = {"bytes": tensors * size, "copy_us": us, "ours_us": us, "eager_us": 3 * us}
    return {**identity, **base, **more}


def model_row(variant, wall, **more):
    name = "transformers Qwen3, 2048 wide, 6 layers, 4x4096"
    row = {"model": name, "mode": "training", "variant": variant, "wall_ms": wall, **more}
    return {**row, "layer_norm_ms": 1.0, "peak_gib": 3.0, "kernels": 7}


@pytest.fixture
def made():
    rows = [
        *(row("forward", *size, "bfloat16") for size in ((32_768, 1024), (32_768, 4096))),
        *(row("forward", *size, "float32") for size in ((8192, 4096), (1, 768))),
        row("backward", 32_768, 4096, "bfloat16", tensors=3),
        row("rms_forward", 32_768, 4096, "bfloat16", liger_us=400.0),
    ]
    versions = {"driver": "1.2", "torch": "2.13.0", "python": "3.12", "rms_norm": "ATen"}
    return {"device": "NVIDIA G1 80GB", "clocks": "-", **versions, "rows": rows, **NEW,
            "models": {**NEW, "rows": [model_row("eager", 200.0, device_ms=20.0),
                                       model_row("swap", 100.0, device_ms=18.0)]}}  # fmt: skip


def test_the_files_are_of_the_results():
    report.main(["--check"])


def test_page_and_readme_say_what_was_measured(made):
    skipped = ["liger: liger-kernel is not installed", "cudnn: no time"]
    made |= {"rms_norm": "QuACK", "skipped": skipped}
    text = report.page(made, ["the results of the G2"])
    assert "| kernels of eager RMSNorm | QuACK |" in text
    assert "| peers not installed | FLA, FlashInfer, QuACK |" in text
    assert "Not measured:\n\n- cudnn: no time\n" in text
    assert "Left out:\n\n- the results of the G2\n" in text
    faster = "eager PyTorch 3.0x (3.0x), Liger 3.0x (3.0x)"
    assert f"| RMSNorm, forward | 1 | 100% (100%) | {faster} |" in text
    assert "| 8,192 x 4,096 | float32 | 67.1 | 67.1, 100%, 3.00x, - | - |" in text
    swapped = "swapped | 100 (0.50) | 18.0 (0.90) | 1.00 (1.00) | 3.00 (1.00) | 7 |"
    assert f"| {made['models']['rows'][0]['model']} | training | {swapped}" in text
    blocks = report.blocks_of(made)[report.README]
    cells = "134 us, 100%, 3.0x, - | -"
    assert f"| RMSNorm of Llama | 32,768 x 4,096 bf16 | {cells} |" in blocks["norms"]
    assert "81,920 tokens/s (3.0 GiB) | **2.00x (3.0 GiB)** |" in blocks["models"]
    assert "`neighbours=True`: **training Qwen3 2.0x**." in blocks["models"]
    assert set(report.blocks_of({})[report.README].values()) == {report.NO_RESULTS}
    assert report.NO_RESULTS in report.page({}, [])
    lines = [form.format(name) for name in blocks for form in (report.BEGIN, report.END)]
    text = "before\n{}\nold\n{}\nbetween\n{}\nold\n{}\nafter\n".format(*lines)
    assert report.filled(text, dict.fromkeys(blocks, "new")) == text.replace("old", "new")
    with pytest.raises(ValueError, match="expected one"):
        report.filled("no markers", blocks)


def test_only_results_of_one_code_are_shown(made):
    """The report that is newest, and of it what is of its own code."""
    worst = row("forward", 8, 71, "bfloat16", compile_us=2.7) | {"ours_us": 3.0, "eager_us": 3.3}
    made["sweep"] = {**NEW, "points": 2000, "slower": 0, "worst": [worst]}
    made["sweep_compile"] = {**OLD, "points": 250, "slower": 1, "worst": [worst]}
    made["overhead_stamp"] = OLD
    made["models"] |= OLD
    assert report.models({"models": made["models"]})  # as the process of one model prints it
    times = {f"rms_{name}us": 8.0 for name in ("eager_", "eager_best_", "ours_", "ours_best_")}
    made["call_overhead"] = {"grad": times}
    shown, left_out = report.newest([{**made, **OLD, "device": "NVIDIA G2"}, made])
    assert shown["device"] == made["device"]
    assert [line.split(",")[0] for line in left_out] == [
        "the results of the NVIDIA G2", "sweep_compile", "overhead_stamp"
    ]  # fmt: skip
    text = report.page(shown, left_out)
    assert "none is slower (measured on 2026-01-02). The" in text
    code = f"{OLD['date'][:10]}, csrc {OLD['csrc_sha256'][:8]}"  # models are shown with it
    assert f"| whole models | {code} |" in text
    assert f"a step took (measured on {code})" in text
    assert "| LayerNorm, forward | 8 x 71 | bfloat16 | 3.00 | 3.30 | 1.10x |" in text
    assert "against torch.compile" not in text
    assert "Host time" not in text
    assert "FusedRMSNorm" in report.page({**made, "overhead_stamp": NEW}, [])


def test_old_files_are_found_and_written_anew(made, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    for stamp, shown in ((NEW, True), (OLD, False)):
        cpu = {**stamp, "threads": 1, "call_overhead": {}}
        results.write(tmp_path / "cpu.json", {"device": "A CPU", "torch": "2", "cpu": cpu})
        assert ("## A CPU" in report.page(made, [])) == shown
    assert results.by_card() == []
    results.write(tmp_path / "g1.json", made)
    assert results.read(tmp_path / "g1.json") == made
    results.write(tmp_path / "g0.json", {**made, **OLD, "device": "G0"})
    monkeypatch.setattr(results, "ROOT", tmp_path)
    steps, plots = tmp_path / "docs" / "steps.svg", tmp_path / "docs" / "plots"
    monkeypatch.setattr("benchmarks.plot.STEPS", steps)
    monkeypatch.setattr("benchmarks.plot.PLOTS", plots)
    plots.mkdir(parents=True)
    monkeypatch.setattr(report, "PAGE", tmp_path / "docs" / "benchmarks.md")
    monkeypatch.setattr(report, "README", tmp_path / "README.md")
    monkeypatch.setattr(report, "FRAMEWORKS", tmp_path / "FRAMEWORKS.md")
    for path, blocks in report.blocks_of({}).items():
        lines = [form.format(name) for name in blocks for form in (report.BEGIN, report.END)]
        path.write_text("\n".join(lines))
    (plots / "old.svg").write_text("")
    old = "FRAMEWORKS.md, README.md, benchmarks.md, nvidia-g1-80gb.svg, old.svg, steps.svg"
    with pytest.raises(SystemExit, match=f"^not of the results files: {old};"):
        report.main(["--check"])
    report.main(["--write"])
    report.main(["--check"])
    assert sorted(path.name for path in plots.iterdir()) == ["nvidia-g1-80gb.svg"]
    first = steps.read_text()
    report.main(["--write"])
    assert steps.read_text() == first, "drawing again changes nothing"
    results.write(tmp_path / "g1.json", {**made, "date": "2026-02-02T03:04:05+00:00"})
    with pytest.raises(SystemExit, match="not of the results files: README"):
        report.main(["--check"])
