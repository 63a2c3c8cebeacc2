"""The documentation's benchmark page agrees with the results file, and has a curve per dtype."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("no benchmarks beside these tests", allow_module_level=True)
sys.path.insert(0, str(ROOT))  # the benchmarks are no part of the installed package

from benchmarks import diffusion, page, plot, results  # noqa: E402
from benchmarks.plot import newest  # noqa: E402


def row(op, rows, cols, dtype, **more):
    case = results.case_of({"op": op, "rows": rows, "cols": cols, "dtype": dtype, **more})
    copy_us = case.tensor_bytes / 2e6
    base = {**results.row_of(case), "copy_us": copy_us, "ours_us": copy_us, "eager_us": 3 * copy_us}
    return base | more


@pytest.fixture
def report():
    rows = [
        row("forward", 32_768, 1024, "bfloat16"),
        row("forward", 65_536, 2048, "bfloat16"),
        row("forward", 32_768, 4096, "bfloat16"),
        row("forward", 8192, 1024, "float32"),
        row("forward", 8192, 2047, "float32"),
        row("forward", 8192, 4096, "float32"),
        row("forward", 16_384, 4096, "float32"),
        row("forward", 1, 768, "float32"),
        row("backward", 32_768, 1024, "bfloat16"),
    ]
    return {
        "device": "GPU",
        "driver": "1.2",
        "torch": "2.13.0",
        "python": "3.11",
        "date": "2026-01-02T03:04:05+00:00",
        "csrc_sha256": "0123456789abcdef" * 4,
        "rows": rows,
    }


def test_page_and_plots_are_of_the_results_file():
    assert page.outdated(results.read(newest())) == []


def test_one_curve_for_each_dtype(report):
    assert page.plotted_types(report["rows"]) == ["bfloat16", "float32"]
    for types, cols in (("bfloat16", [1024, 2048, 4096]), ("float32", [1024, 2047, 4096])):
        rows = page.points(report["rows"], "forward", types)
        assert [row["cols"] for row in rows] == cols
        assert {row["dtype"] for row in rows} == {types}
        assert plot.curve(rows, "ours_us")[0] == cols
    # Two rows have 4,096 columns. The one with the larger tensor is taken.
    assert page.points(report["rows"], "forward", "float32")[-1]["rows"] == 16_384


def test_the_roofline_has_a_curve_for_each_dtype_under_copy_speed(report):
    made = page.roofline_curves(report["rows"], "forward")
    assert [(label, cols) for label, _, cols, _ in made] == [
        ("copy speed", [1024, 2047, 2048, 4096]),
        ("bfloat16", [1024, 2048, 4096]),
        ("float32", [1024, 2047, 4096]),
    ]
    assert made[0][3] == pytest.approx([4.0] * 4)


def test_curves_are_bandwidth(report):
    (bfloat16,) = [r for r in report["rows"] if r["op"] == "backward"]
    assert plot.curve([bfloat16], "copy_us")[1] == pytest.approx([4.0])  # two tensors
    assert plot.curve([bfloat16], "ours_us")[1] == pytest.approx([6.0], rel=1e-3)  # and a third
    assert plot.curve([bfloat16], "compile_us") == ([], [])


def test_types_are_a_curve_of_their_own():
    mixed = row("forward", 8192, 1024, "bfloat16", weight_dtype="float32", out_dtype="float32")
    assert page.types_of(mixed) == "bfloat16, weights float32, y float32"
    assert page.plot_path(page.types_of(mixed)).name == (
        "bandwidth-bfloat16-weights-float32-y-float32.svg"
    )


def test_what_falls_short_is_listed(report):
    def section():
        text = page.page(report)
        return text[text.index("## What falls short") : text.index("## Every case")]

    assert section().count("None.") == 2
    slow, beaten = report["rows"][0], report["rows"][1]
    slow["ours_us"] = slow["copy_us"] / 0.6
    beaten["compile_us"] = 0.5 * beaten["ours_us"]
    assert "| Forward | 32,768 x 1,024 | bfloat16 | 60% |" in section()
    assert "| Forward | 65,536 x 2,048 | bfloat16 | compile |" in section()
    assert "0.50x" in section()


def test_sweeps_are_told_apart(report):
    worst = row("forward", 8, 71, "bfloat16", compile_us=0.0)
    worst |= {"ours_us": 3.0, "eager_us": 3.3, "compile_us": 2.7}
    same = {"date": "2026-01-02T03:04:05+00:00", "csrc_sha256": report["csrc_sha256"]}
    report["sweep"] = {**same, "points": 2000, "slower": 0, "worst": [worst]}
    older = {"date": "2026-01-01T03:04:05+00:00", "csrc_sha256": "0"}
    report["sweep_compile"] = {**older, "points": 250, "slower": 1, "worst": [worst]}
    text = page.page(report)
    assert "Of 2,000 shapes timed against eager PyTorch, forward and backward, none is" in text
    assert "Of 250 shapes timed against torch.compile, forward and backward, 1 is slower" in text
    assert "none is slower (measured on 2026-01-02). The" in text
    assert "1 is slower (measured on 2026-01-01, of another state of csrc). The" in text
    assert "| Forward | 8 x 71 | bfloat16 | 3.00 | 3.30 | 1.10x |" in text
    assert "| Forward | 8 x 71 | bfloat16 | 3.00 | 2.70 | 0.90x |" in text


def test_every_case_and_peer_is_in_the_tables(report):
    report["rows"][0]["apex_us"] = 2.5 * report["rows"][0]["ours_us"]
    text = page.page(report)
    assert "x apex" in text
    assert "2.50x" in text
    for r in report["rows"]:
        assert f"| {r['rows']:,} x {r['cols']:,} | {r['dtype']} |" in text


def test_modulated_norms_say_their_samples(report):
    sizes = {"samples": 4, "modulation": "sample"}
    report["rows"] += [
        row("ada_forward", 16_384, 1152, "bfloat16", **sizes, compile_us=None),
        row("ada_forward", 16_384, 1152, "bfloat16", **sizes, modulation_dtype="float32"),
        row("ada_forward", 16_384, 1152, "bfloat16", samples=4, modulation="token"),
    ]
    text = page.page(report)
    part = text[text.index("### Modulated LayerNorm, forward") :]
    assert "| samples x tokens x columns |" in part
    assert "| 4 x 4,096 x 1,152 | bfloat16 |" in part
    assert "| 4 x 4,096 x 1,152 | bfloat16, modulation float32 |" in part
    assert "| 4 x 4,096 x 1,152 | bfloat16, per token |" in part
    assert page.plotted_types(report["rows"]) == ["bfloat16", "float32"]


def test_the_picture_of_a_block_stands_with_the_models(report):
    report["models"] = {"rows": [
        {"model": diffusion.BLOCKS, "mode": mode, "variant": variant, "device_ms": 3.0,
         "products_ms": 2.0, "kernels": 17}
        for mode in ("inference", "training") for variant in ("eager", "operators")
    ]}  # fmt: skip
    text = page.page(report)
    assert "](dit-block.svg)" in text
    assert "| 3.00 (1.00) | - | 17 |" in text


def test_host_times_and_models(report):
    report["overhead_stamp"] = {"date": "2026-01-02T03:04:05+00:00", "csrc_sha256": "0"}
    report["call_overhead"] = {
        "no_grad": {"eager_us": 10.0, "ours_us": 9.0, "override_us": 11.0},
        "grad": {"eager_us": 20.0, "ours_us": 25.0},
    }
    report["training_step"] = [{"name": "BERT", "ours_us": 100.0, "eager_us": 200.0}]
    report["models"] = {
        "rows": [
            {"model": "BERT", "mode": "training", "variant": "eager", "wall_ms": 20.0},
            {
                "model": "BERT",
                "mode": "training",
                "variant": "swap",
                "wall_ms": 18.0,
                "layer_norm_ms": 1.5,
            },
        ]
    }
    text = page.page(report)
    assert "(measured on 2026-01-02, of another state of csrc, as the next table)" in text
    assert "| forward without gradients | 10.0 | 9.00 (0.90) | 11.0 (1.10) |" in text
    assert "| forward with gradients | 20.0 | 25.0 (1.25) | - |" in text
    assert "| BERT | 200 | 100 (0.50) |" in text
    assert "| BERT | training | stock | 20.0 | - | - | - |" in text
    assert "| BERT | training | swapped | 18.0 (0.90) | - | 1.50 | - |" in text


def test_page_says_what_was_left_out(report):
    assert "Not measured in this run" not in page.page(report)
    report["skipped"] = ["cudnn: no time", "overhead: no time"]
    text = page.page(report)
    assert "Not measured in this run:\n\n- cudnn: no time\n- overhead: no time\n" in text


def test_an_old_page_or_plot_is_found(report, monkeypatch, tmp_path):
    monkeypatch.setattr(page, "PAGE", tmp_path / "benchmarks.md")
    monkeypatch.setattr(page, "PLOTS", tmp_path / "plots")
    page.PLOTS.mkdir()
    assert len(page.outdated(report)) == 4  # the page, two dtypes' plots and that of all
    page.PAGE.write_text(page.page(report))
    for types in page.plotted_types(report["rows"]):
        page.plot_path(types).write_text(f"<svg>{page.stamp(report)}</svg>")
    page.roofline_path().write_text(f"<svg>{page.stamp(report)}</svg>")
    assert page.outdated(report) == []
    (page.PLOTS / "bandwidth-int8.svg").write_text("")
    assert page.outdated(report) == ["bandwidth-int8.svg is no plot of the results file"]
    (page.PLOTS / "bandwidth-int8.svg").unlink()
    report["date"] = "2026-02-02T03:04:05+00:00"
    assert len(page.outdated(report)) == 4


def test_plots_are_drawn(report, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(page, "PLOTS", tmp_path)
    page.plot(report, "float32")
    drawn = page.plot_path("float32").read_text()
    assert page.stamp(report) in drawn
    assert "LayerNorm on one GPU, float32" in drawn
    page.plot(report, "float32")
    assert page.plot_path("float32").read_text() == drawn
    page.plot_roofline(report)
    assert page.stamp(report) in page.roofline_path().read_text()
