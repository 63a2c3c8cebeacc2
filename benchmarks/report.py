"""The results file as text: the whole table, or the README's block of numbers.

python -m benchmarks.report             prints the table
python -m benchmarks.report --readme    rewrites the block in README.md between its markers, and
                                        draws the picture of a block of DiT
python -m benchmarks.report --check     fails if they are not made from the results file
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks import plot, results
from benchmarks.cases import parse_case
from benchmarks.plot import newest
from benchmarks.run import summary

BEGIN = "<!-- benchmarks: made by python -m benchmarks.report --readme -->"
END = "<!-- benchmarks: end -->"
NO_RESULTS = (
    "No results yet: the numbers come from a run of `make bench` on a CUDA machine, which writes "
    "`benchmarks/results/`."
)

# The README's rows: (op, rows, cols, what it is).
ROWS = (
    ("forward", 4_194_304, 64, "KernelBench, transposed convolution chain"),
    ("forward", 200_704, 96, "ConvNeXt"),
    ("forward", 32_768, 768, "BERT-base, ViT-B"),
    ("forward", 32_768, 1024, "ViT-L"),
    ("forward", 32_768, 4096, ""),
    ("forward", 16_384, 8192, ""),
    ("forward", 8192, 32_768, ""),
    ("forward", 2048, 262_144, ""),
    ("forward", 16, 4_194_304, "KernelBench, LayerNorm problem"),
    ("backward", 4_194_304, 64, ""),
    ("backward", 32_768, 768, ""),
    ("backward", 32_768, 4096, ""),
    ("backward", 8192, 32_768, ""),
    ("backward", 16, 4_194_304, ""),
    ("gelu_scale_forward", 4_194_304, 64, "LayerNorm + GELU + scale"),
    ("gelu_scale_backward", 4_194_304, 64, ""),
    ("add_forward", 32_768, 1024, "residual + LayerNorm"),
    ("add_backward", 32_768, 1024, ""),
)

PEERS = {"cudnn_us": "cuDNN", "quack_us": "QuACK", "liger_us": "Liger", "apex_us": "apex"}

# The README's modulated norms: (size and dtype, "" or " per-token", what it is), the first two as
# `parse_case` reads them.
MODULATED_ROWS = (
    ("64x256x1152 bf16", "", "DiT-XL/2"),
    ("1x4608x3072 bf16", "", "Flux"),
    ("1x4608x3072 bf16", " per-token", "modulated per token"),
    ("4x4250x2432 bf16", "", "SD3.5-large"),
    ("8x4096x1152 bf16", "", "PixArt"),
    ("2x17776x3072 bf16", "", "CogVideoX"),
    ("1x32760x5120 bf16*fp32", "", "Wan 14B, modulated in float32"),
)
MODULATED_OPS = ("ada_forward", "ada_backward", "add_ada_forward", "add_ada_backward")


def readme_block(report: dict[str, Any]) -> str:
    """The block in Markdown: tables, pictures, and the machine on which they were measured."""
    if not report.get("rows"):
        return NO_RESULTS
    known = {
        (row["op"], row["rows"], row["cols"]): row
        for row in report["rows"]
        if (case := results.case_of(row)).target is not None and not (case.modulated or case.mixed)
    }
    peers = [key for key in PEERS if any(row.get(key) for row in known.values())]
    lines = [
        "![Achieved bandwidth against columns, forward and backward](docs/bandwidth.svg)",
        "",
        "| operator | rows x columns | time | of copy speed | faster than eager | than "
        f"torch.compile |{''.join(f' than {PEERS[key]} |' for key in peers)}",
        f"|-|-|-:|-:|-:|-:|{'-:|' * len(peers)}",
    ]
    for op, rows, cols, note in ROWS:
        row = known.get((op, rows, cols))
        if row is None or "ours_us" not in row:
            continue
        case, ours = results.case_of(row), row["ours_us"]
        name = op.replace("_", " ") + (f" ({note})" if note else "")
        size = f"{rows:,} x {cols:,} {case.dtype}"
        ratio = f"{100 * case.ratio(ours, row['copy_us']):.0f}%"
        lines.append(
            f"| {name} | {size} | {ours:.0f} us | {ratio} | "
            f"{_times(row.get('eager_us'), ours)} | {_times(row.get('compile_us'), ours)} |"
            + "".join(f" {_times(row.get(key), ours)} |" for key in peers)
        )
    lines += [
        "",
        f"Time on the device; {'a dash: no such operator, or not timed; ' if peers else ''}"
        "of copy speed: the least bytes the operator must move, over its time, "
        "as a share of what an elementwise copy of the same tensor reaches in the same run.",
    ]
    lines += _modulated_lines(report["rows"])
    if plot.has_block(report):
        lines += [
            "",
            "![Device time of a block of DiT: eager, torch.compile, ours]"
            f"({plot.BLOCK_PICTURE.relative_to(results.ROOT).as_posix()})",
        ]
    lines += _step_lines(report.get("training_step", []))
    lines += _model_lines(report.get("models", {}).get("rows", []))
    lines += _overhead_lines(report.get("call_overhead", {}))
    lines += [
        "",
        f"{report['device']}, driver {report['driver']}, torch {report['torch']}, {days(report)}.",
    ]
    return "\n".join(lines)


def days(report: dict[str, Any]) -> str:
    """The day of the run, and those of host times and models if they are of another run."""
    day = report["date"][:10]
    parts = {"host times": "overhead_stamp", "models": "models"}
    found = {name: report.get(key, {}).get("date", day)[:10] for name, key in parts.items()}
    others = [f"{name} {its_day}" for name, its_day in found.items() if its_day != day]
    return f"{day} ({', '.join(others)})" if others else day


def _modulated_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Modulated norms: a line for each size, a cell for each operator."""
    known = {results.case_of(row).name: row for row in rows}
    lines = []
    for size, per, note in MODULATED_ROWS:
        cells = []
        for op in MODULATED_OPS:
            case = parse_case(f"{size} {op}{per}")
            row = known.get(case.name, {})
            if ours := row.get("ours_us"):
                others = (_times(row.get(key), ours) for key in ("eager_us", "compile_us"))
                share = f"{100 * case.ratio(ours, row['copy_us']):.0f}%"
                cells.append(", ".join((f"{ours:.0f} us", share, *others)))
            else:
                cells.append("-")
        if any(cell != "-" for cell in cells):
            shape = " x ".join(f"{extent:,}" for extent in case.shape)
            lines.append(f"| {note}, {shape} | {' | '.join(cells)} |")
    if not lines:
        return []
    return [
        "",
        "| modulated norm: time, of copy speed, faster than eager, than torch.compile | forward | "
        "backward | gated sum and norm, forward | backward |",
        "|-|-:|-:|-:|-:|",
        *lines,
    ]


def _step_lines(steps: list[dict[str, Any]]) -> list[str]:
    if not steps:
        return []
    return [
        "",
        "| forward + backward of the module, wall time | ours | nn.LayerNorm | |",
        "|-|-:|-:|-:|",
        *(
            f"| {entry['name']} | {entry['ours_us']:.0f} us | {entry['eager_us']:.0f} us | "
            f"{_times(entry['eager_us'], entry['ours_us'])} |"
            for entry in steps
        ),
    ]


VARIANTS = (
    ("eager", "eager"),
    ("swap", "swapped"),
    ("compiled", "torch.compile"),
    ("fused_eager", 'backend="fused_layernorm", then eager'),
    ("fused_compiled", 'backend="fused_layernorm", then Inductor'),
)


def _model_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Whole models: a step's device time, in brackets without matrix products and attention."""
    steps: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        if {"device_ms", "products_ms"} <= row.keys():
            steps.setdefault((row["model"], row["mode"]), {})[row["variant"]] = row
    lines = [
        f"| {model}, {mode} | {' | '.join(_step(found.get(name)) for name, _ in VARIANTS)} |"
        for (model, mode), found in steps.items()
    ]
    if not lines:
        return []
    return [
        "",
        f"| a step in bfloat16, device time in ms | {' | '.join(label for _, label in VARIANTS)} |",
        f"|-|{'-:|' * len(VARIANTS)}",
        *lines,
        "",
        "In brackets stands the time without the kernels of matrix products and attention, which "
        "follows the clock of the chip less. Under Dynamo PyTorch computes the attention of "
        "transformers' BERT and ViT by many kernels, with any backend.",
    ]


def _step(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    return f"{row['device_ms']:.2f} ({row['device_ms'] - row['products_ms']:.2f})"


def _overhead_lines(calls: dict[str, dict[str, float]]) -> list[str]:
    """Host time a layer, and in brackets its ratio to nn.LayerNorm's."""
    ways = (
        ("no_grad", "forward without gradients"),
        ("grad", "forward with gradients"),
        ("backward", "backward"),
        ("autocast", "forward with gradients under autocast, bfloat16 input"),
    )
    if not all("override_us" in calls.get(way, {}) for way, _ in ways):
        return []
    lines = [
        "",
        "| host time a layer, 100 norms on 4 x 256 | nn.LayerNorm | FusedLayerNorm | "
        "`override_aten()` |",
        "|-|-:|-:|-:|",
    ]
    for way, label in ways:
        entry = calls[way]
        cells = [
            f"{entry[f'{name}_us']:.1f} us ({entry[f'{name}_us'] / entry['eager_us']:.2f})"
            for name in ("ours", "override")
        ]
        lines.append(f"| {label} | {entry['eager_us']:.1f} us | {' | '.join(cells)} |")
    return lines


def _times(other: float | None, ours: float, digits: int = 1) -> str:
    return "-" if other is None else f"{other / ours:.{digits}f}x"


def replace_block(text: str, block: str) -> str:
    """A README with the text between the markers replaced."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"expected one {BEGIN} and one {END}")
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n{block}\n{END}{tail}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("results", nargs="?", type=Path)
    parser.add_argument("--readme", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args(argv)
    readme = results.ROOT / "README.md"
    if not (arguments.readme or arguments.check):
        print(text_of(results.read(arguments.results or newest())))
        return
    report = {}
    if arguments.results or any(results.RESULTS.glob("*.json")):
        report = results.read(arguments.results or newest())
    old = readme.read_text()
    new = replace_block(old, readme_block(report))
    if arguments.check:
        if new != old or not picture_is_of(report):
            raise SystemExit("README.md is not up to date: python -m benchmarks.report --readme")
    else:
        readme.write_text(new)
        if plot.has_block(report):
            plot.plot_block(report, plot.BLOCK_PICTURE)


def picture_is_of(report: dict[str, Any]) -> bool:
    """Whether the picture of a DiT block is of the report, or absent if the report has no block."""
    if not plot.has_block(report):
        return not plot.BLOCK_PICTURE.exists()
    path = plot.BLOCK_PICTURE
    return path.exists() and plot.block_stamp(report) in path.read_text()


def text_of(report: dict[str, Any]) -> str:
    """The whole results file as text, and whether csrc is the same as when it was measured."""
    here = results.csrc_sha256()
    same = report["csrc_sha256"] == here
    code = "this code" if same else "OTHER code: csrc has changed since"
    head = (
        f"{report['device']}, driver {report['driver']}, torch {report['torch']}, "
        f"{report['date']}; made from {code}"
    )
    if host := report.get("overhead_stamp"):
        same = host["csrc_sha256"] == here
        head += f"; host times {host['date']}, of {'this' if same else 'OTHER'} code"
    blocks = [head, summary(report)]
    if "sweep" in report:
        from benchmarks.sweep import text

        blocks.append("sweep:\n" + text(report["sweep"]))
    if "sweep_compile" in report:
        from benchmarks.sweep import text

        blocks.append("sweep against torch.compile:\n" + text(report["sweep_compile"]))
    if "models" in report:
        from benchmarks.models import text as models_text

        blocks.append("models:\n" + models_text(report["models"]))
    cpu = results.read(results.RESULTS / "cpu.json")
    if cpu:
        from benchmarks.overhead import cpu_text

        blocks.append(f"{cpu['device']}, torch {cpu['torch']}:\n" + cpu_text(cpu["cpu"]))
    return "\n\n".join(blocks)


if __name__ == "__main__":
    main()
