# SPDX-License-Identifier: Apache-2.0
"""The pictures of the results files: steps of models as bars, and every case against copy speed.

`python -m benchmarks.report --write` draws them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import results

Row = dict[str, Any]
Report = dict[str, Any]

STEPS = results.ROOT / "docs" / "steps.svg"
PLOTS = results.ROOT / "docs" / "plots"
SMALLEST = 16 << 20  # smaller tensors are bound by the launch, not by memory
# Marks: key of a row, label, style.
MARKS = (
    ("ours_us", "fused_layernorm", {"color": "#0b6e4f", "marker": "o"}),
    ("compile_us", "torch.compile", {"color": "#e08e0b", "marker": "s"}),
    ("eager_us", "PyTorch eager", {"color": "#b3392f", "marker": "^"}),
)
NORMS = {"": "LayerNorm", "rms_": "RMSNorm"}  # by what their operators' names begin with
TICKS = {64: "64", 256: "256", 1024: "1K", 4096: "4K", 16_384: "16K", 65_536: "64K",
         262_144: "256K", 1_048_576: "1M", 4_194_304: "4M"}  # fmt: skip
# The bars of a model's step: variant, label, colour.
BARS = (
    ("eager", "PyTorch", "#b3392f"),
    ("compiled", "torch.compile", "#e08e0b"),
    ("liger", "Liger", "#7a6fb0"),
    ("swap", "fused_layernorm", "#0b6e4f"),
    ("swap_neighbours", "fused_layernorm, neighbours too", "#06402d"),
    ("liger_rest_swap", "fused_layernorm and Liger's MLP and loss", "#5aa88a"),
    ("fused_compiled", 'torch.compile(backend="fused_layernorm")', "#1f9ac0"),
)


def share(row: Row, key: str = "ours_us") -> float | None:
    """Achieved bandwidth over copy speed."""
    if row.get(key) is None or "copy_us" not in row:
        return None
    return results.case_of(row).ratio(row[key], row["copy_us"])


def large(row: Row) -> bool:
    return results.case_of(row).tensor_bytes >= SMALLEST


def marks(rows: Sequence[Row], op: str, key: str) -> tuple[list[int], list[float]]:
    """Columns and shares of copy speed of an operator's cases: one mark a case."""
    found = [
        (row["cols"], part)
        for row in rows
        if row["op"] == op and large(row) and (part := share(row, key)) is not None
    ]
    return [cols for cols, _ in found], [part for _, part in found]


def path_of(report: Report) -> Path:
    """The picture of a card's cases."""
    return PLOTS / f"{results.default_path(report['device']).stem}.svg"


def relative(path: Path) -> str:
    """A picture's path as the pages of docs/ link to it."""
    return path.relative_to(STEPS.parent).as_posix()


def stamp(part: dict[str, Any], report: Report) -> str:
    """The text in a picture's file that says from which results it was made."""
    return f"{report['device']} {part['date']} {part['csrc_sha256']}"


def _figure(rows: int, cols: int, size: tuple[float, float]) -> tuple[Any, Any, Any]:
    """pyplot, a figure and its axes, drawn alike every time: no date, no random names."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "fused_layernorm", "svg.fonttype": "none",
                         "axes.spines.top": False, "axes.spines.right": False})  # fmt: skip
    figure, axes = plt.subplots(rows, cols, figsize=size, squeeze=False)
    return plt, figure, axes


def _save(plt: Any, figure: Any, output: Path, said: str) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, metadata={"Date": None, "Description": said})
    plt.close(figure)


def plot_cases(report: Report) -> None:
    """Each case's share of copy speed against its columns, forward beside backward."""
    norms = [norm for norm in NORMS if any(row["op"] == f"{norm}forward" for row in report["rows"])]
    height = 1.2 + 2.8 * max(len(norms), 1)
    plt, figure, grid = _figure(max(len(norms), 1), 2, (11, height))
    for norm, axes in zip(norms, grid, strict=True):
        for way, axis in zip(("forward", "backward"), axes, strict=True):
            axis.axhline(1.0, color="0.6", linestyle="--", label="copy speed")
            for key, label, style in MARKS:
                cols, shares = marks(report["rows"], f"{norm}{way}", key)
                axis.plot(cols, shares, label=label, linestyle="", markersize=4.5, alpha=0.8,
                          **style)  # fmt: skip
            axis.set_xscale("log", base=2)
            least, most = axis.get_xlim()
            ticks = {at: said for at, said in TICKS.items() if least <= at <= most}
            axis.set_xticks([*ticks], [*ticks.values()])
            axis.minorticks_off()
            axis.set_ylim(0, 1.1)
            axis.set_title(f"{NORMS[norm]}, {way}")
            axis.grid(True, color="0.92")
            axis.set_axisbelow(True)
        axes[0].set_ylabel("of copy speed")
    for axis in grid[-1]:
        axis.set_xlabel("columns (elements of a row)")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=len(labels), frameon=False)
    figure.suptitle(f"Norms on one {report['device']}: tensors of 16 MB and more, one mark a case",
                    fontsize=11)  # fmt: skip
    figure.tight_layout(rect=(0, 0.3 / height, 1, 1))
    _save(plt, figure, path_of(report), stamp(report, report))


def bars(steps: list[tuple[str, dict[str, Row]]]) -> list[tuple[str, list[tuple[str, str, float]]]]:
    """For each step its bars: label, colour, and its wall time over the stock model's."""
    found = []
    for name, rows in steps:
        stock = rows["eager"]["wall_ms"]
        shown = [(label, color, rows[variant]["wall_ms"] / stock)
                 for variant, label, color in BARS if variant in rows]  # fmt: skip
        if len(shown) > 1:
            found.append((name, shown))
    return found


def plot_steps(steps: list[tuple[str, dict[str, Row]]], report: Report) -> None:
    """Wall times of steps, the stock model's as one."""
    groups = bars(steps)
    count = sum(len(shown) + 1 for _, shown in groups)
    plt, figure, [[axis]] = _figure(1, 1, (9, 0.9 + 0.24 * count))
    place, ticks = 0, {}
    for name, shown in groups:
        ticks[place + (len(shown) - 1) / 2] = name
        for label, color, ratio in shown:
            axis.barh(place, ratio, color=color, height=0.85, label=label)
            axis.text(ratio, place, f" {ratio:.2f}", va="center", fontsize=8)
            place += 1
        place += 1
    axis.set_yticks([*ticks], [*ticks.values()])
    axis.invert_yaxis()
    axis.set_xlabel("wall time of a step, the stock model's as 1")
    handles = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend([*handles.values()], [*handles], loc="lower center", frameon=False, fontsize=8,
                  ncol=2)  # fmt: skip
    figure.suptitle(f"Steps of models on one {report['device']}", fontsize=11)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    _save(plt, figure, STEPS, stamp(report["models"], report))
