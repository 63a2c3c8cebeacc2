# SPDX-License-Identifier: Apache-2.0
"""The rendered results: README and page are of the results files, and say what these hold."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("no benchmarks beside these tests", allow_module_level=True)
sys.path.insert(0, str(ROOT))  # the benchmarks are no part of the installed package

from benchmarks import plot, report, results, run  # noqa: E402
from benchmarks.cases import SHORT_NAMES  # noqa: E402


def row(op, rows, cols, dtype, tensors=2, **more):
    """A row whose time is that of a copy of two tensors at 4 TB/s; eager takes three times it."""
    identity = {"op": op, "rows": rows, "cols": cols, "dtype": dtype}
    size = results.case_of({**identity, **more}).tensor_bytes
    us = size / 2e6
    base = {"bytes": tensors * size, "copy_us": us, "ours_us": us, "eager_us": 3 * us}
    return {**identity, **base, **more}


@pytest.fixture
def made():
    bf16 = ((32_768, 1024), (65_536, 2048), (32_768, 4096))
    fp32 = ((8192, 1024), (8192, 4096), (16_384, 4096), (1, 768))
    rows = [
        *(row("forward", *size, "bfloat16") for size in bf16),
        *(row("forward", *size, "float32") for size in fp32),
        row("backward", 32_768, 4096, "bfloat16", tensors=3),
    ]
    return {"device": "NVIDIA G1 80GB", "driver": "1.2", "torch": "2.13.0", "rows": rows,
            "date": "2026-01-02T03:04:05+00:00", "csrc_sha256": "0123456789abcdef" * 4}  # fmt: skip


def test_the_files_are_of_the_results():
    report.main(["--check"])


def test_results_file_round_trip(made, tmp_path):
    path = tmp_path / "results" / "gpu.json"
    results.write(path, made)
    assert results.read(path) == made
    assert len(path.read_text().splitlines()) > len(made["rows"]), "one line per measurement"
    results.update(path, "sweep", {"worst": []})
    assert results.read(path) == {**made, "sweep": {"worst": []}}


def test_summary_shows_every_row_and_what_was_skipped(made):
    del made["rows"][0]["ours_us"]
    made["skipped"] = ["eager: no time"]
    _, *lines, text = run.summary(made).split("\n", len(made["rows"]) + 1)
    for case, line in zip(map(results.case_of, made["rows"]), lines, strict=True):
        assert case.op in line
    assert f"of {len(made['rows']) - 1} rows pass" in text
    assert "eager: no time" in text


def test_cards_stand_side_by_side(made):
    other = {**made, "device": "NVIDIA G2", "clocks": "SM 1980 MHz", "rows": made["rows"][:3]}
    made |= {"rms_norm": "QuACK", "skipped": ["cudnn: no time"]}
    made["rows"][3]["liger_us"] = 1.0
    assert report.cards([made, other]) == ["G1", "G2"]
    assert report.cards([made, made]) == ["G1 80GB", "G1 80GB"]
    block = report.readme_block([made, other])
    assert "| G1 forward | G1 backward | G2 forward | G2 backward |" in block
    cells = "134 us, 100%, 3.0x, - | 134 us, 150%, 3.0x, - | 134 us, 100%, 3.0x, - | -"
    assert f"| LayerNorm, 4,096 wide | 32,768 x 4,096 bf16 | {cells} |" in block
    text = report.page([made, other])
    assert "| clocks | - | SM 1980 MHz |" in text
    assert "- cudnn: no time\n" in text
    assert "| kernels of eager RMSNorm | QuACK | - |" in text
    assert "| peers not installed | Apex, QuACK | Liger, Apex, QuACK, cuDNN |" in text
    assert "| LayerNorm, backward | G1 | 1 | 150% (150%) | eager PyTorch 3.0x (3.0x) |" in text
    assert (
        "| 8,192 x 4,096 | float32 | 67.1 | 67.1 | 100% | 3.00x | - | - | - | - | - | - |" in text
    )


def test_the_readme_shows_few_rows_of_few_or_no_results(made):
    for _, shape, short, op in report.README_ROWS:
        if len(shape) > 3:
            continue
        samples = {"samples": shape[0], "modulation": "sample"} if len(shape) == 3 else {}
        rows = shape[0] * shape[1] if samples else shape[0]
        made["rows"].append(row(f"{op}forward", rows, shape[-1], SHORT_NAMES[short], **samples))
    block = report.readme_block([made])
    assert block.count("\n| ") == 1 + report.README_LINES
    assert report.readme_block([]) == report.NO_RESULTS
    text = f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n"
    assert report.replace_block(text, "new") == text.replace("old", "new")
    with pytest.raises(ValueError, match="expected one"):
        report.replace_block("no markers", "new")


def test_what_falls_short_is_listed(made):
    def section():
        text = report.page([made])
        return text[text.index("## What falls short") : text.index("## Every case")]

    assert section().count("None.") == 2
    slow, beaten = made["rows"][0], made["rows"][1]
    slow["ours_us"] = slow["copy_us"] / 0.6
    beaten["compile_us"] = 0.5 * beaten["ours_us"]
    assert "| G1 | LayerNorm, forward | 32,768 x 1,024 | bfloat16 | 60% |" in section()
    assert "| 65,536 x 2,048 | bfloat16 | compile | 134 | 67.1 | 0.50x |" in section()


def test_parts_of_another_day_say_so(made):
    worst = row("forward", 8, 71, "bfloat16", compile_us=2.7) | {"ours_us": 3.0, "eager_us": 3.3}
    same = {"date": made["date"], "csrc_sha256": made["csrc_sha256"]}
    older = {"date": "2026-01-01T03:04:05+00:00", "csrc_sha256": "0"}
    made["sweep"] = {**same, "points": 2000, "slower": 0, "worst": [worst]}
    made["sweep_compile"] = {**older, "points": 250, "slower": 1, "worst": [worst]}
    made["overhead_stamp"] = older
    made["call_overhead"] = {"grad": {"ours_us": 9.0, "rms_eager_us": 8.0, "rms_ours_us": 6.0}}
    made["models"] = {**older, "rows": [
        {"model": "BERT", "mode": "training", "variant": variant, "device_ms": ms}
        for variant, ms in (("eager", 20.0), ("swap", 18.0))
    ]}  # fmt: skip
    text = report.page([made])
    assert "none is slower (measured on 2026-01-02). The" in text
    assert "1 is slower (measured on 2026-01-01, of another state of csrc). The" in text
    assert "| LayerNorm, forward | 8 x 71 | bfloat16 | 3.00 | 2.70 | 0.90x |" in text
    assert "| forward with gradients | 9.00 | 8.00 | 6.00 (0.75) |" in text
    assert "| BERT | training | swapped | - | 18.0 (0.90) | - | - |" in text
    assert "| whole models | 2026-01-01 |" in text


def test_curves_are_bandwidth_of_the_largest_tensors(made):
    drawn = plot.roofline_curves(made["rows"], "forward")
    assert [(label, cols) for label, _, cols, _ in drawn] == [
        ("copy speed", [1024, 2048, 4096]),
        ("bfloat16", [1024, 2048, 4096]),
    ]
    assert drawn[0][3] == pytest.approx([4.0] * 3)
    assert plot.curve(made["rows"][-1:], "ours_us")[1] == pytest.approx([6.0])  # a third tensor
    assert plot.points_of(made["rows"], "forward", "float32")[-1]["rows"] == 16_384


def test_old_files_are_found_and_written_anew(made, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    cpu = {"date": "2026", "csrc_sha256": "0", "threads": 1, "call_overhead": {}, "tensors": []}
    results.write(tmp_path / "cpu.json", {"device": "A CPU", "torch": "2.13.0", "cpu": cpu})
    assert results.by_card() == []
    made["rows"].append(row("rms_forward", 32_768, 4096, "bfloat16"))
    results.write(tmp_path / "g1.json", made)
    results.write(tmp_path / "g0.json", {**made, "device": "G0", "date": "2025-01-01"})
    assert [found["device"] for found in results.by_card()] == ["NVIDIA G1 80GB", "G0"]
    monkeypatch.setattr(results, "ROOT", tmp_path)
    for name in ("PICTURE", "BLOCK_PICTURE", "PLOTS"):
        monkeypatch.setattr(plot, name, tmp_path / "docs" / f"{name}.svg")
    plot.PLOTS.mkdir(parents=True)
    monkeypatch.setattr(report, "PAGE", tmp_path / "docs" / "benchmarks.md")
    monkeypatch.setattr(report, "README", tmp_path / "README.md")
    report.README.write_text(f"{report.BEGIN}\n{report.END}\n")
    (plot.PLOTS / "old.svg").write_text("")
    assert len(report.outdated(results.by_card())) == 6
    report.main(["--write"])
    report.main(["--check"])
    assert "(measured on 2026, of another state of csrc)" in report.PAGE.read_text()
    first = plot.PICTURE.read_text()
    assert "RMSNorm, backward" in first
    report.main(["--write"])
    assert plot.PICTURE.read_text() == first, "drawing again changes nothing"
    results.write(tmp_path / "g1.json", {**made, "date": "2026-02-02T03:04:05+00:00"})
    with pytest.raises(SystemExit, match="is not of the results files"):
        report.main(["--check"])
