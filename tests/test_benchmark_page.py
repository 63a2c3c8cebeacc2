# SPDX-License-Identifier: Apache-2.0
"""The rendered results: README and page are of the results files, and say what these hold."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("no benchmarks beside these tests", allow_module_level=True)
sys.path.insert(0, str(ROOT))  # the benchmarks are no part of the installed package

from benchmarks import plot, report, results  # noqa: E402

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
    made |= {
        "rms_norm": "QuACK",
        "skipped": ["liger: liger-kernel is not installed", "cudnn: no time"],
    }
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
    times = {f"rms_{name}us": 8.0 for name in ("eager_", "eager_best_", "ours_", "ours_best_")}
    made["call_overhead"] = {"grad": times}
    shown, left_out = report.newest([{**made, **OLD, "device": "NVIDIA G2"}, made])
    assert shown["device"] == made["device"]
    assert [line.split(",")[0] for line in left_out] == [
        "the results of the NVIDIA G2", "sweep_compile", "overhead_stamp"
    ]  # fmt: skip
    text = report.page(shown, left_out)
    assert "none is slower (measured on 2026-01-02). The" in text
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
    monkeypatch.setattr(plot, "STEPS", tmp_path / "docs" / "steps.svg")
    monkeypatch.setattr(plot, "PLOTS", tmp_path / "docs" / "plots")
    plot.PLOTS.mkdir(parents=True)
    monkeypatch.setattr(report, "PAGE", tmp_path / "docs" / "benchmarks.md")
    monkeypatch.setattr(report, "README", tmp_path / "README.md")
    monkeypatch.setattr(report, "FRAMEWORKS", tmp_path / "FRAMEWORKS.md")
    for path, blocks in report.blocks_of({}).items():
        lines = [form.format(name) for name in blocks for form in (report.BEGIN, report.END)]
        path.write_text("\n".join(lines))
    (plot.PLOTS / "old.svg").write_text("")
    old = "FRAMEWORKS.md, README.md, benchmarks.md, nvidia-g1-80gb.svg, old.svg, steps.svg"
    with pytest.raises(SystemExit, match=f"^not of the results files: {old};"):
        report.main(["--check"])
    report.main(["--write"])
    report.main(["--check"])
    assert sorted(path.name for path in plot.PLOTS.iterdir()) == ["nvidia-g1-80gb.svg"]
    first = plot.STEPS.read_text()
    report.main(["--write"])
    assert plot.STEPS.read_text() == first, "drawing again changes nothing"
    results.write(tmp_path / "g1.json", {**made, "date": "2026-02-02T03:04:05+00:00"})
    with pytest.raises(SystemExit, match="not of the results files: README"):
        report.main(["--check"])
