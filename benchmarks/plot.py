"""The README's picture, from the results file: achieved bandwidth against columns.

python -m benchmarks.plot [RESULTS.json] [--output docs/bandwidth.svg]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks import results

# What a line shows: (key, label, style).
LINES = (
    ("copy", "copy speed", {"color": "0.6", "linestyle": "--", "linewidth": 1.5}),
    ("ours", "fused_layernorm", {"color": "#0b6e4f", "marker": "o", "linewidth": 2.2}),
    ("compile", "torch.compile", {"color": "#e08e0b", "marker": "s", "linewidth": 1.4}),
    ("eager", "PyTorch eager", {"color": "#b3392f", "marker": "^", "linewidth": 1.4}),
)
PICTURE = results.ROOT / "docs" / "bandwidth.svg"
SMALLEST = 16 << 20  # smaller tensors are bound by the launch, not by memory


def points(report: dict[str, Any], op: str) -> dict[str, tuple[list[int], list[float]]]:
    """Per line the columns and TB/s; of several sizes with the same columns the largest tensor.

    Only cases that have a target: those that guard other dtypes are no part of the picture.
    """
    largest: dict[int, dict[str, Any]] = {}
    for row in report["rows"]:
        case = results.case_of(row)
        if case.op != op or case.tensor_bytes < SMALLEST or case.target is None:
            continue
        known = largest.get(case.cols)
        if known is None or results.case_of(known).tensor_bytes < case.tensor_bytes:
            largest[case.cols] = row
    lines: dict[str, tuple[list[int], list[float]]] = {}
    for key, _, _ in LINES:
        cols, speeds = [], []
        for col, row in sorted(largest.items()):
            us = row.get(f"{key}_us")
            if us is None:
                continue
            moved = 2 * results.case_of(row).tensor_bytes if key == "copy" else row["bytes"]
            cols.append(col)
            speeds.append(moved / us / 1e6)
        lines[key] = (cols, speeds)
    return lines


def plot(report: dict[str, Any], output: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # No date and no random names in the file: drawing again changes nothing.
    matplotlib.rcParams["svg.hashsalt"] = "fused_layernorm"
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for axis, op in zip(axes, ("forward", "backward"), strict=True):
        lines = points(report, op)
        for key, label, style in LINES:
            cols, speeds = lines[key]
            if cols:
                axis.plot(cols, speeds, label=label, markersize=4.5, **style)
        axis.set_xscale("log", base=2)
        ticks = [64, 256, 1024, 4096, 16_384, 65_536, 262_144, 1_048_576, 4_194_304]
        axis.set_xticks(ticks, ["64", "256", "1K", "4K", "16K", "64K", "256K", "1M", "4M"])
        axis.minorticks_off()
        axis.set_title(op)
        axis.set_xlabel("columns (elements of a row)")
        axis.grid(True, color="0.92")
        axis.set_axisbelow(True)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[0].set_ylabel("achieved bandwidth, TB/s")
    axes[0].set_ylim(bottom=0)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=len(labels), frameon=False)
    figure.suptitle(
        f"LayerNorm on one {report['device']}: bfloat16 and float32 tensors of 16 MB to 1 GB",
        fontsize=11,
    )
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    output.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if output.suffix == ".svg" else None
    figure.savefig(output, dpi=130, metadata=metadata)
    plt.close(figure)


def newest() -> Path:
    """The results file of a GPU, where there is one; the latest of several."""
    found = {path: results.read(path) for path in results.RESULTS.glob("*.json")}
    paths = [path for path, report in found.items() if "rows" in report]
    if not paths:
        raise SystemExit(f"no results in {results.RESULTS}: run python -m benchmarks.run first")
    return max(paths, key=lambda path: str(found[path].get("date", "")))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("results", nargs="?", type=Path)
    parser.add_argument("--output", type=Path, default=PICTURE)
    arguments = parser.parse_args(argv)
    plot(results.read(arguments.results or newest()), arguments.output)
    print(f"written: {arguments.output}")


if __name__ == "__main__":
    main()
