# SPDX-License-Identifier: Apache-2.0
"""The pictures of the results files: steps of models as bars, and every case against copy speed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import results

Row = dict[str, Any]
Report = dict[str, Any]
Step = tuple[str, str, dict[str, Row]]  # its name, what a sentence calls it, a row by variant

STEPS = results.ROOT / "docs" / "steps.svg"
PLOTS = results.ROOT / "docs" / "plots"
SMALLEST = 16 << 20  # smaller tensors are bound by the launch, not by memory
MARKS = (("ours_us", "fused_layernorm", "#0b6e4f", "o"),
         ("compile_us", "torch.compile", "#e08e0b", "s"),
         ("eager_us", "PyTorch eager", "#b3392f", "^"))  # fmt: skip
NORMS = {"": "LayerNorm", "rms_": "RMSNorm"}  # by what their operators' names begin with
# The bars of a model's step: variant, label, colour.
BARS = (
    ("eager", "PyTorch", "#b3392f"),
    ("compiled", "torch.compile", "#e08e0b"),
    ("liger", "Liger", "#7a6fb0"),
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


def path_of(report: Report) -> Path:
    """The picture of a card's cases."""
    return PLOTS / f"{results.default_path(report['device']).stem}.svg"


def stamp(part: dict[str, Any], report: Report) -> str:
    """The text in a picture's file that says from which results it was made."""
    return f"{report['device']} {part['date']} {part['csrc_sha256']}"


def _figure(rows: int, cols: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """A figure and its axes, drawn alike every time: no date, no random names."""
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")
    plt.rcParams.update({"svg.hashsalt": "fused_layernorm", "svg.fonttype": "none",
                         "axes.spines.top": False, "axes.spines.right": False})  # fmt: skip
    return plt.subplots(rows, cols, figsize=size, squeeze=False, layout="constrained")


def _save(figure: Any, title: str, handles: dict[str, Any], output: Path, said: str) -> None:
    figure.suptitle(title, fontsize=11)
    figure.legend([*handles.values()], [*handles], loc="outside lower center", frameon=False,
                  fontsize=8, ncol=3)  # fmt: skip
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, metadata={"Date": None, "Description": said})


def plot_cases(report: Report) -> None:
    """Each case's share of copy speed against its columns, forward beside backward."""
    rows = [row for row in report["rows"] if large(row)]
    norms = [norm for norm in NORMS if any(row["op"] == f"{norm}forward" for row in rows)] or [""]
    figure, grid = _figure(len(norms), 2, (11, 1.2 + 2.8 * len(norms)))
    handles: dict[str, Any] = {}
    for norm, axes in zip(norms, grid, strict=True):
        for way, axis in zip(("forward", "backward"), axes, strict=True):
            handles["copy speed"] = axis.axhline(1.0, color="0.6", linestyle="--")
            for key, label, color, marker in MARKS:
                found = [(row["cols"], share(row, key)) for row in rows
                         if row["op"] == f"{norm}{way}" and share(row, key)]  # fmt: skip
                handles[label] = axis.plot([cols for cols, _ in found], [part for _, part in found],
                                           linestyle="", markersize=4.5, alpha=0.8, color=color,
                                           marker=marker)[0]  # fmt: skip
            axis.set_xscale("log", base=2)
            axis.set_ylim(0, 1.1)
            axis.set_title(f"{NORMS[norm]}, {way}")
            axis.grid(True, color="0.92")
            axis.set_xlabel("columns (elements of a row)")
        axes[0].set_ylabel("of copy speed")
    title = f"Norms on one {report['device']}: tensors of 16 MB and more, one mark a case"
    _save(figure, title, handles, path_of(report), stamp(report, report))


def plot_steps(steps: list[Step], report: Report) -> None:
    """Wall times of steps, the stock model's as one."""
    bars = [(name, [(label, color, rows[variant]["wall_ms"] / rows["eager"]["wall_ms"])
                    for variant, label, color in BARS if variant in rows])
            for name, _, rows in steps]  # fmt: skip
    figure, [[axis]] = _figure(1, 1, (9, 0.9 + 0.24 * sum(len(shown) + 1 for _, shown in bars)))
    place, ticks, handles = 0, {}, {}
    for name, shown in bars:
        ticks[place + (len(shown) - 1) / 2] = name
        for label, color, ratio in shown:
            handles[label] = axis.barh(place, ratio, color=color, height=0.85)
            axis.text(ratio, place, f" {ratio:.2f}", va="center", fontsize=8)
            place += 1
        place += 1
    axis.set_yticks([*ticks], [*ticks.values()])
    axis.invert_yaxis()
    axis.set_xlabel("wall time of a step, the stock model's as 1")
    title = f"Steps of models on one {report['device']}"
    _save(figure, title, handles, STEPS, stamp(report["models"], report))
