"""The benchmarks' arithmetic, tables and files, and that what they time computes the same thing."""

import hashlib
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("no benchmarks beside these tests", allow_module_level=True)
sys.path.insert(0, str(ROOT))  # the benchmarks are no part of the installed package

from benchmarks import (  # noqa: E402
    ours,
    plot,
    providers,
    report,
    results,
    run,
    sweep,
    timing,
    tune,
)
from benchmarks.cases import CASES, OPS, Case, parse_case  # noqa: E402


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(timing, "DEVICE", "cpu")
    monkeypatch.setattr(timing, "l2_bytes", lambda: 1000)
    monkeypatch.setattr(timing, "input_count", lambda *arguments, **options: 2)


def made_up(cases=CASES):
    """A results file in which ours takes 10 us, eager 20, compile 15, and a copy 8."""
    times = {"copy_us": 8.0, "ours_us": 10.0, "eager_us": 20.0, "compile_us": 15.0}
    return {
        "device": "Made-up GPU",
        "driver": "1.0",
        "torch": "2.11.0",
        "date": "2026-01-02T03:04:05+00:00",
        "csrc_sha256": "0" * 64,
        "rows": [{**results.row_of(case), **times} for case in cases],
    }


@pytest.mark.parametrize(
    ("op", "tensors", "columns"),
    [
        ("forward", 2, 2),
        ("backward", 3, 3),
        ("gelu_scale_forward", 2, 2),
        ("gelu_scale_backward", 3, 4),
        ("add_forward", 4, 2),
        ("add_backward", 4, 3),
        ("silu_forward", 2, 2),
    ],
)
def test_bytes_are_the_least_that_must_move(op, tensors, columns):
    case = Case(op, 100, 30, "bfloat16")
    assert case.bytes == tensors * 100 * 30 * 2 + columns * 30 * 2


def test_ratio_is_one_at_copy_speed():
    case = Case("forward", 1 << 20, 64, "float32")
    assert case.ratio(100.0, 100.0) == pytest.approx(1.0, rel=1e-5)
    assert case.ratio(200.0, 100.0) == pytest.approx(0.5, rel=1e-5)


def test_every_operator_has_a_case_and_every_case_a_target():
    assert {case.op for case in CASES} == set(OPS)
    assert all(case.target is not None and 0.3 < case.target < 1.4 for case in CASES)
    assert len({case.name for case in CASES}) == len(CASES)


def test_floor_by_size_and_columns():
    assert Case("forward", 32768, 4096, "bfloat16").floor == 0.93
    assert Case("forward", 128, 1_048_576, "float32").floor is None
    assert Case("forward", 512, 4096, "bfloat16").floor is None
    assert Case("backward", 32768, 4096, "bfloat16").floor == 0.85
    assert Case("backward", 4096, 65536, "bfloat16").floor == 0.72
    assert Case("backward", 16, 4_194_304, "float32").floor == 0.57


def test_parse_case():
    assert parse_case("4194304x64 fp32 backward") == next(
        case for case in CASES if case.name == "backward 4194304x64 float32"
    )
    assert parse_case("5x7 float16 forward") == Case("forward", 5, 7, "float16")


@pytest.mark.parametrize(
    "text", ["", "5x7 bf16", "5 bf16 forward", "5x7 int8 forward", "5x7 bf16 f"]
)
def test_parse_case_names_what_is_wrong(text):
    with pytest.raises(ValueError, match=r"expected|unknown"):
        parse_case(text)


def test_tune_line():
    line = "5x7 bf16 forward | vecs=4 | strategy=block vecs=8"
    case, forces = tune.parse_line(line, ["lag=1"])
    assert case.name == "forward 5x7 bfloat16"
    assert forces == [None, "lag=1", "vecs=4", "strategy=block vecs=8"]


def forced_plan(case, options, device):
    force = torch.ops.fused_layernorm._force
    force(options)
    try:
        return tune.plan_of(case, device)
    finally:
        force(None)


@pytest.mark.parametrize("document", ["benchmarks/tune.py", "README.md"])
def test_documented_tuning_times_a_plan_for_each_option(document):
    h200 = {"capability": 90, "sms": 132, "shared_memory": 232448}
    text = (ROOT / document).read_text()
    lines = re.findall(r'"(\d+x\d+ [^"]+\|[^"]+)"', text)
    assert lines
    for line in lines:
        case, forces = tune.parse_line(line, [])
        plans = [forced_plan(case, options, h200) for options in forces]
        assert len(plans) > 1
        assert all(one != other for one, other in itertools.combinations(plans, 2)), line


@pytest.mark.parametrize("op", OPS)
def test_tune_plans_the_whole_problem(op):
    """What a case fuses, so that the printed plan is the one that was timed."""
    device = {"capability": 90, "sms": 132, "shared_memory": 232448}
    plans = {
        tune.plan_of(Case(op, 32768, cols, "bfloat16"), device)["strategy"]
        for cols in (1024, 36_864)
    }
    planned = {
        "forward": {"warp", "resident"},
        "add_forward": {"block"},
        "backward": {"block", "split"},
        "add_backward": {"block", "split"},
    }
    fused = {"block", "split"} if op.endswith("backward") else {"warp", "block"}
    assert plans == planned.get(op, fused)


def test_tune_error_keeps_nan():
    good = torch.ones(4)
    bad = torch.tensor([1.0, float("nan"), 1.0, 1.0])
    assert tune.error((good, good), [good, good]) == 0.0
    assert tune.error((bad, good), [good, good]) != tune.error((good, good), [good, good])
    assert str(tune.error((bad, good), [good, good])) == "nan"


def test_counts_cover_the_cache_and_fill_a_replay():
    l2 = 60 << 20
    assert timing.input_count(1 << 30, l2) == 2
    assert timing.input_count(20 << 20, l2) == 9
    assert timing.input_count(1000, l2) == timing.MAX_INPUTS
    assert timing.call_count(2, 1 << 30) == 4
    assert timing.call_count(200, 20 << 20) == 200
    assert timing.call_count(2, 1000) == timing.MAX_CALLS


@pytest.mark.parametrize("op", OPS)
def test_all_providers_compute_the_same(op, on_cpu):
    case = Case(op, 6, 20, "float32")
    inputs = ours.make_inputs(case)
    with torch.no_grad():
        expected = tune.reference(case, inputs[0])
        assert not inputs[0].x.requires_grad
        for name in ("ours", "eager"):
            calls = providers.PROVIDERS[name](case, inputs)
            assert len(calls) == 2
            result = calls[0]()
            assert tune.error(result, expected) < 1e-5, name
            assert tune.error(calls[1](), expected) > 1e-2, "the inputs are not distinct"


def test_compiled_backward_recomputes_what_eager_saves(on_cpu):
    case = Case("gelu_scale_backward", 6, 20, "float32")
    inputs = ours.make_inputs(case)
    arguments = providers._arguments(case, inputs[0])
    result = providers._backward(case, pre=False)(*arguments)
    assert tune.error(result, tune.reference(case, inputs[0])) < 1e-5


def test_sweep_points_and_inputs(on_cpu):
    cases = sweep.points()
    assert {1, 2, 71 + 1, 4096} <= {case.cols for case in cases}
    assert max(case.cols for case in cases) <= 4200
    assert {case.rows for case in cases} == set(sweep.ROWS)
    assert cases == sweep.points()
    buffers = sweep.Buffers(1 << 12)
    one, two = buffers.inputs(Case("backward", 8, 33, "float32"))
    assert one.x.shape == one.dy.shape == (8, 33)
    assert not torch.equal(one.x, two.x)
    assert two.x.data_ptr() % 16 == 0


def sha_by_hand(root, names):
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode() + b"\0" + (root / name).read_bytes())
    return digest.hexdigest()


def test_csrc_sha256_with_and_without_git(tmp_path):
    (tmp_path / "csrc" / "sub").mkdir(parents=True)
    for name, content in (("csrc/b.cu", "b"), ("csrc/a.h", "a"), ("csrc/sub/c.h", "c")):
        (tmp_path / name).write_text(content)
    expected = sha_by_hand(tmp_path, ["csrc/a.h", "csrc/b.cu", "csrc/sub/c.h"])
    assert results.csrc_sha256(tmp_path) == expected

    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "add", "csrc"], check=True)
    (tmp_path / "csrc" / "untracked.o").write_text("not part of the sources")
    assert results.csrc_sha256(tmp_path) == expected
    (tmp_path / "csrc" / "a.h").write_text("changed")
    assert results.csrc_sha256(tmp_path) != expected


def test_results_file_round_trip(tmp_path):
    path = tmp_path / "results" / "gpu.json"
    written = made_up()
    results.write(path, written)
    assert results.read(path) == written == json.loads(path.read_text())
    assert len(path.read_text().splitlines()) > len(CASES), "one line per measurement"
    results.update(path, "sweep", {"worst": []})
    assert results.read(path) == {**written, "sweep": {"worst": []}}


def test_default_path_has_a_plain_name():
    assert results.default_path("NVIDIA H200 (80 GB)").name == "nvidia-h200-80-gb.json"


def row(case, **times):
    return {**results.row_of(case), **times}


def test_verdict():
    case = Case("forward", 32768, 1024, "bfloat16", 0.9)
    assert results.verdict(case, row(case, copy_us=9.0, ours_us=10.0)) == "PASS"
    assert results.verdict(case, row(case, copy_us=9.0, ours_us=10.1)) == "MISS target"
    slow = row(case, copy_us=9.0, ours_us=10.0, eager_us=9.9, compile_us=9.0)
    assert results.verdict(case, slow) == "MISS eager"
    fused = Case("gelu_forward", 32768, 1024, "bfloat16", 0.9)
    slow = row(fused, copy_us=9.0, ours_us=11.0, eager_us=10.0, compile_us=9.9)
    assert results.verdict(fused, slow) == "MISS target, eager, compile"
    assert results.verdict(case, row(case, copy_us=9.0)) == ""


def test_summary_shows_every_row_and_what_was_skipped():
    made = made_up()
    del made["rows"][0]["ours_us"]
    made["rows"][1]["quack_us"] = 12.5
    made["skipped"] = ["eager: no time"]
    made["call_overhead"] = {"no_grad": {"ours_us": 2.2, "eager_us": 2.0}}
    made["training_step"] = [{"name": "BERT", "ours_us": 50.0, "eager_us": 125.0}]
    text = run.summary(made)
    lines = text.splitlines()
    assert lines[0] == results.HEADER
    assert all(case.op in line for case, line in zip(CASES, lines[1:], strict=False))
    assert "quack 12.5" in lines[2]
    assert f"of {len(CASES) - 1} targets reached" in text
    assert "eager: no time" in text
    assert "x1.10" in text
    assert "2.50 times faster" in text


def test_plot_takes_the_largest_tensor_of_each_width():
    lines = plot.points(made_up(), "forward")
    cols, speeds = lines["ours"]
    assert cols == sorted(set(cols))
    assert 4_194_304 in cols
    wide = next(case for case in CASES if case.op == "forward" and case.cols == 768)
    assert wide.rows == 32768
    assert speeds[cols.index(768)] == pytest.approx(wide.bytes / 10.0 / 1e6)
    copied = lines["copy"][1][cols.index(768)]
    assert copied == pytest.approx(2 * wide.tensor_bytes / 8.0 / 1e6)


def test_plot_draws(tmp_path):
    pytest.importorskip("matplotlib")
    plot.plot(made_up(), tmp_path / "picture.svg")
    first = (tmp_path / "picture.svg").read_text()
    assert "<svg" in first
    plot.plot(made_up(), tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").read_text() == first


def test_report_block():
    block = report.readme_block(made_up())
    assert block.count("\n| ") >= len(report.ROWS) - 1
    assert "2.0x" in block
    assert "Made-up GPU" in block
    assert report.readme_block({}) == report.NO_RESULTS
    text = f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n"
    new = report.replace_block(text, "new")
    assert new == f"before\n{report.BEGIN}\nnew\n{report.END}\nafter\n"
    with pytest.raises(ValueError, match="expected one"):
        report.replace_block("no markers", "new")


def test_readme_has_the_numbers_of_the_results_file():
    report.main(["--check"])


def test_unknown_names_are_refused():
    with pytest.raises(SystemExit, match="unknown op"):
        run.select("forwards", None)
    assert [case.cols for case in run.select("add_forward", "x1024")] == [1024]
