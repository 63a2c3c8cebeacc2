# SPDX-License-Identifier: Apache-2.0
"""The pictures of the results files: bandwidth against columns, by dtype, and a block of DiT.

`python -m benchmarks.report --write` draws them. The block's picture is drawn where the results
file has its rows, which benchmarks.models measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import diffusion, results
from benchmarks.cases import PER_TOKEN

# A curve: (key of a row, label, style).
LINES = (
    ("copy_us", "copy speed", {"color": "0.6", "linestyle": "--", "linewidth": 1.5}),
    ("ours_us", "fused_layernorm", {"color": "#0b6e4f", "marker": "o", "linewidth": 2.2}),
    ("compile_us", "torch.compile", {"color": "#e08e0b", "marker": "s", "linewidth": 1.4}),
    ("eager_us", "PyTorch eager", {"color": "#b3392f", "marker": "^", "linewidth": 1.4}),
)
PICTURE = results.ROOT / "docs" / "bandwidth.svg"
BLOCK_PICTURE = results.ROOT / "docs" / "dit-block.svg"
PLOTS = results.ROOT / "docs" / "plots"
FEWEST_POINTS = 3  # rows that a curve needs
NORMS = {"": "LayerNorm", "rms_": "RMSNorm"}  # by what their operators' names begin with
TICKS = {64: "64", 256: "256", 1024: "1K", 4096: "4K", 16_384: "16K", 65_536: "64K",
         262_144: "256K", 1_048_576: "1M", 4_194_304: "4M"}  # fmt: skip
# The bars of the block's picture: (variant, label, colour of what is not a matrix product).
BARS = (
    ("eager", "PyTorch eager", "#b3392f"),
    ("compiled", "torch.compile", "#e08e0b"),
    ("operators", "fused_layernorm", "#0b6e4f"),
    ("operators_compiled", "fused_layernorm\nand torch.compile", "#0b6e4f"),
    ("fused_compiled", 'torch.compile(\nbackend="fused_layernorm")', "#0b6e4f"),
)
SMALLEST = 16 << 20  # smaller tensors are bound by the launch, not by memory


Row = dict[str, Any]


def largest_by_cols(rows: Iterable[Row], wanted: Callable[[Row], bool]) -> list[Row]:
    """The wanted rows of large tensors by columns; of equal columns only the largest tensor."""
    largest: dict[int, Row] = {}
    for row in rows:
        size = results.case_of(row).tensor_bytes
        if size < SMALLEST or not wanted(row):
            continue
        known = largest.get(row["cols"])
        if known is None or results.case_of(known).tensor_bytes < size:
            largest[row["cols"]] = row
    return [row for _, row in sorted(largest.items())]


def curve(rows: Iterable[Row], key: str) -> tuple[list[int], list[float]]:
    """Columns and TB/s of the rows that have a time under `key`."""
    cols, speeds = [], []
    for row in rows:
        if row.get(key) is None:
            continue
        moved = 2 * results.case_of(row).tensor_bytes if key == "copy_us" else row["bytes"]
        cols.append(row["cols"])
        speeds.append(moved / row[key] / 1e6)
    return cols, speeds


Curve = tuple[str, dict[str, Any], list[int], list[float]]  # label, style, columns, TB/s


def curves(rows: list[Row]) -> list[Curve]:
    """The curves of copy speed, ours, torch.compile and eager for which the rows have times."""
    made = [(label, style, *curve(rows, key)) for key, label, style in LINES]
    return [one for one in made if one[2]]


def draw(
    title: str,
    curves_of: Callable[[str], list[Curve]],
    output: Path,
    metadata: dict[str, str | None] | None,
    norms: Sequence[str] = ("",),
    **style: Any,
) -> None:
    """Draws achieved bandwidth against columns: curves_of("forward") beside curves_of("backward").

    Each of `norms`, keys of NORMS, has a line of its own: of curves_of("rms_forward") and so on.
    `style` holds rcParams of matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # No date and no random names in the file: drawing again changes nothing.
    style["svg.hashsalt"] = "fused_layernorm"
    with matplotlib.rc_context(style):  # type: ignore[arg-type,unused-ignore]
        height = 1.4 + 2.8 * len(norms)
        figure, grid = plt.subplots(
            len(norms), 2, figsize=(11, height), sharex="row", sharey=True, squeeze=False
        )
        for norm, axes in zip(norms, grid, strict=True):
            for way, axis in zip(("forward", "backward"), axes, strict=True):
                for label, line, cols, speeds in curves_of(norm + way):
                    axis.plot(cols, speeds, label=label, markersize=4.5, **line)
                axis.set_xscale("log", base=2)
                least, most = axis.get_xlim()
                ticks = {at: said for at, said in TICKS.items() if least <= at <= most}
                axis.set_xticks([*ticks], [*ticks.values()])
                axis.minorticks_off()
                axis.set_title(f"{NORMS[norm]}, {way}")
                axis.grid(True, color="0.92")
                axis.set_axisbelow(True)
            axes[0].set_ylabel("achieved bandwidth, TB/s")
            axes[0].set_ylim(bottom=0)
        for axis in grid[-1]:
            axis.set_xlabel("columns (elements of a row)")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncol=len(labels), frameon=False)
        figure.suptitle(title, fontsize=11)
        figure.tight_layout(rect=(0, 0.3 / height, 1, 1))
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=130, metadata=metadata)
        plt.close(figure)


def points(report: dict[str, Any], op: str) -> list[Row]:
    """The rows of the picture: cases of one dtype with a target."""

    def wanted(row: Row) -> bool:
        case = results.case_of(row)
        return case.op == op and case.target is not None and not case.mixed

    return largest_by_cols(report["rows"], wanted)


def types_of(row: Row) -> str:
    """The dtypes of a row in words: "bfloat16", "bfloat16, weights float32, y float32"."""
    words = [row["dtype"]]
    for key, name in (("weight", "weights"), ("out", "y"), ("modulation", "modulation")):
        if row.get(f"{key}_dtype"):
            words.append(f"{name} {row[f'{key}_dtype']}")
    if row.get("modulation") == PER_TOKEN:
        words.append("per token")
    return ", ".join(words)


def points_of(rows: Iterable[Row], op: str, types: str) -> list[Row]:
    """The rows of one operator and of one combination of dtypes, as they are plotted."""
    return largest_by_cols(rows, lambda row: row["op"] == op and types_of(row) == types)


def plotted_types(rows: list[Row]) -> list[str]:
    """The combinations of dtypes that have enough rows for a curve, in the file's order."""
    return [
        types
        for types in dict.fromkeys(map(types_of, rows))
        if len(points_of(rows, "forward", types)) >= FEWEST_POINTS
    ]


def roofline_path(report: dict[str, Any]) -> Path:
    return PLOTS / f"{results.default_path(report['device']).stem}.svg"


def relative(path: Path) -> str:
    """A picture's path as the pages of docs/ link to it."""
    return path.relative_to(PICTURE.parent).as_posix()


def stamp(report: dict[str, Any]) -> str:
    """The text in a picture's file that says from which results it was made."""
    return f"{report['device']} {report['date']} {report['csrc_sha256']}"


def roofline_curves(rows: list[Row], op: str) -> list[Curve]:
    """Our curve for each combination of dtypes, and copy speed as the roof over them."""
    key, label, style = LINES[0]
    drawn = {types: points_of(rows, op, types) for types in plotted_types(rows)}
    roof = largest_by_cols([row for part in drawn.values() for row in part], lambda row: True)
    made: list[Curve] = [(label, style, *curve(roof, key))]
    for types, part in drawn.items():
        cols, speeds = curve(part, "ours_us")
        if cols:
            made.append((types, {"marker": "o", "linewidth": 1.8}, cols, speeds))
    return made


def plot_roofline(report: dict[str, Any]) -> None:
    draw(
        f"fused_layernorm on one {report['device']}, by dtype",
        lambda op: roofline_curves(report["rows"], op),
        roofline_path(report),
        {"Date": None, "Description": stamp(report)},
        **{"svg.fonttype": "none"},  # text stays text, not outlines
    )


def plot(report: dict[str, Any], output: Path) -> None:
    draw(
        f"Norms on one {report['device']}: bfloat16 and float32 tensors of 16 MB to 1 GB",
        lambda op: curves(points(report, op)),
        output,
        {"Date": None, "Description": stamp(report)},
        [norm for norm in NORMS if not norm or points(report, norm + "forward")],
        **{"axes.spines.top": False, "axes.spines.right": False},
    )


def block_bars(report: dict[str, Any], mode: str) -> list[tuple[str, str, float, float]]:
    """The bars of one block: label, colour, microseconds of matrix products and of the rest."""
    rows = {
        row["variant"]: row
        for row in report.get("models", {}).get("rows", [])
        if row["model"] == diffusion.BLOCKS and row["mode"] == mode and "products_ms" in row
    }
    bars = []
    for variant, label, color in BARS:
        if variant in rows:
            products = rows[variant]["products_ms"] * 1e3 / diffusion.BLOCK_LAYERS
            all_of_it = rows[variant]["device_ms"] * 1e3 / diffusion.BLOCK_LAYERS
            bars.append((label, color, products, all_of_it - products))
    return bars


def has_block(report: dict[str, Any]) -> bool:
    """Whether the block's picture can be drawn: the report has eager and ours in both modes."""
    modes = ("inference", "training")
    return all(
        {"PyTorch eager", "fused_layernorm"} <= {bar[0] for bar in block_bars(report, mode)}
        for mode in modes
    )


def block_stamp(report: dict[str, Any]) -> str:
    """The text in the block's picture that says from which results it was made."""
    part = report["models"]
    return f"{report['device']} {part['date']} {part['csrc_sha256']}"


def plot_block(report: dict[str, Any], output: Path) -> None:
    """Device time of one block of DiT, inference beside training."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style = {"svg.hashsalt": "fused_layernorm", "axes.spines.top": False,
             "axes.spines.right": False}  # fmt: skip
    with matplotlib.rc_context(style):  # type: ignore[arg-type,unused-ignore]
        figure, axes = plt.subplots(1, 2, figsize=(11, 3.4))
        for axis, mode in zip(axes, ("inference", "training"), strict=True):
            bars = block_bars(report, mode)
            for place, (_, color, products, rest) in enumerate(bars):
                axis.barh(place, products, color="0.8", height=0.62)
                axis.barh(place, rest, left=products, color=color, height=0.62)
                axis.text(products + rest, place, f" {products + rest:.0f} us", va="center")
            axis.set_yticks(range(len(bars)), [label for label, *_ in bars])
            axis.invert_yaxis()
            axis.set_xlim(right=1.15 * max(products + rest for _, _, products, rest in bars))
            axis.set_title(mode if mode == "inference" else "training step")
            axis.set_xlabel("device time of a block, us")
        batch, tokens, cols = diffusion.BLOCK_SIZE
        figure.suptitle(
            f"A block of DiT-XL/2, {batch} x {tokens} x {cols} bfloat16, on one "
            f"{report['device']}: matrix products and attention grey, everything else coloured",
            fontsize=11,
        )
        figure.tight_layout()
        output.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None, "Description": block_stamp(report)}
        figure.savefig(output, dpi=130, metadata=metadata if output.suffix == ".svg" else None)
        plt.close(figure)


def pictures(reports: list[dict[str, Any]]) -> dict[Path, str]:
    """The pictures of the reports, and the stamp of each."""
    made = {roofline_path(report): stamp(report) for report in reports}
    for report in reports[:1]:
        made[PICTURE] = stamp(report)
        if has_block(report):
            made[BLOCK_PICTURE] = block_stamp(report)
    return made


def draw_all(reports: list[dict[str, Any]]) -> None:
    """Draws every picture of the reports, and removes those of others."""
    for path in set(PLOTS.glob("*.svg")) - set(pictures(reports)):
        path.unlink()
    for report in reports:
        plot_roofline(report)
    for report in reports[:1]:
        plot(report, PICTURE)
        if has_block(report):
            plot_block(report, BLOCK_PICTURE)
