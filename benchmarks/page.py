"""The documentation's benchmark page and its plots, from a results file.

python -m benchmarks.page [RESULTS.json]    writes docs/benchmarks.md and docs/plots/
python -m benchmarks.page --check           fails if they are not made from the results file

The README's picture and block are those of benchmarks.plot and benchmarks.report.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import plot as picture
from benchmarks import results
from benchmarks.cases import PER_TOKEN
from benchmarks.plot import (
    LINES,
    SMALLEST,
    Curve,
    Row,
    curve,
    curves,
    draw,
    largest_by_cols,
    newest,
)

PAGE = results.ROOT / "docs" / "benchmarks.md"
PLOTS = results.ROOT / "docs" / "plots"
SHORT_OF_COPY = 0.9  # below this share of copy speed a case is listed as falling short
FEWEST_POINTS = 3  # rows that a curve needs
LISTED = 10  # points of a sweep

TITLES = {
    "forward": "Forward",
    "backward": "Backward",
    "add_forward": "Residual addition and LayerNorm, forward",
    "add_backward": "Residual addition and LayerNorm, backward",
    "gelu_forward": "LayerNorm and GELU, forward",
    "silu_forward": "LayerNorm and SiLU, forward",
    "gelu_scale_forward": "LayerNorm, GELU and a scale, forward",
    "gelu_scale_backward": "LayerNorm, GELU and a scale, backward",
    "ada_forward": "Modulated LayerNorm, forward",
    "ada_backward": "Modulated LayerNorm, backward",
    "add_ada_forward": "Gated sum and modulated LayerNorm, forward",
    "add_ada_backward": "Gated sum and modulated LayerNorm, backward",
}
OWN_KEYS = ("copy_us", "ours_us", "eager_us", "compile_us")  # of a row; other times are peers'


def types_of(row: Row) -> str:
    """The dtypes of a row in words: "bfloat16", "bfloat16, weights float32, y float32"."""
    words = [row["dtype"]]
    if row.get("weight_dtype"):
        words.append(f"weights {row['weight_dtype']}")
    if row.get("out_dtype"):
        words.append(f"y {row['out_dtype']}")
    if row.get("modulation_dtype"):
        words.append(f"modulation {row['modulation_dtype']}")
    if row.get("modulation") == PER_TOKEN:
        words.append("per token")
    return ", ".join(words)


def share(row: Row) -> float | None:
    """Achieved bandwidth over copy speed."""
    if "ours_us" not in row or "copy_us" not in row:
        return None
    return results.case_of(row).ratio(row["ours_us"], row["copy_us"])


# --- plots ----------------------------------------------------------------------------------------


def points(rows: Iterable[Row], op: str, types: str) -> list[Row]:
    """The rows of one operator and of one combination of dtypes, as they are plotted."""
    return largest_by_cols(rows, lambda row: row["op"] == op and types_of(row) == types)


def plotted_types(rows: Iterable[Row]) -> list[str]:
    """The combinations of dtypes that have enough rows for a curve, in the file's order."""
    rows = list(rows)
    return [
        types
        for types in dict.fromkeys(map(types_of, rows))
        if len(points(rows, "forward", types)) >= FEWEST_POINTS
    ]


def plot_path(types: str) -> Path:
    return PLOTS / f"bandwidth-{types.replace(', ', '-').replace(' ', '-')}.svg"


def roofline_path() -> Path:
    return PLOTS / "roofline.svg"


def relative(path: Path) -> str:
    """A picture's path as the page links to it."""
    return path.relative_to(PAGE.parent).as_posix()


def stamp(report: dict[str, Any]) -> str:
    """The text in a plot's file that says from which results the plot was made."""
    return f"{report['device']} {report['date']} {report['csrc_sha256']}"


def plot(report: dict[str, Any], types: str) -> None:
    """Achieved bandwidth against columns, of one combination of dtypes."""
    draw(
        f"LayerNorm on one {report['device']}, {types}",
        lambda op: curves(points(report["rows"], op, types)),
        plot_path(types),
        {"Date": None, "Description": stamp(report)},
        **{"svg.fonttype": "none"},  # text stays text, not outlines
    )


def roofline_curves(rows: list[Row], op: str) -> list[Curve]:
    """Our curve for each combination of dtypes, and copy speed as the roof over them."""
    key, label, style = LINES[0]
    drawn = [points(rows, op, types) for types in plotted_types(rows)]
    roof = largest_by_cols([row for part in drawn for row in part], lambda row: True)
    made: list[Curve] = [(label, style, *curve(roof, key))]
    for types, part in zip(plotted_types(rows), drawn, strict=True):
        cols, speeds = curve(part, "ours_us")
        if cols:
            made.append((types, {"marker": "o", "linewidth": 1.8}, cols, speeds))
    return made


def plot_roofline(report: dict[str, Any]) -> None:
    draw(
        f"fused_layernorm on one {report['device']}, by dtype",
        lambda op: roofline_curves(report["rows"], op),
        roofline_path(),
        {"Date": None, "Description": stamp(report)},
        **{"svg.fonttype": "none"},
    )


# --- the page -------------------------------------------------------------------------------------


def table(header: list[str], rows: Iterable[list[str]], left: int) -> list[str]:
    """A Markdown table whose first `left` columns are text and the others numbers."""
    rule = "|".join("-" if i < left else "-:" for i in range(len(header)))
    lines = [f"| {' | '.join(header)} |", f"|{rule}|"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]


def title(op: str) -> str:
    return TITLES.get(op, op)


def us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def times(other: float | None, ours: float | None) -> str:
    return "-" if other is None or ours is None else f"{other / ours:.2f}x"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def size(row: Row) -> str:
    """Rows x columns, or samples x tokens x columns of a modulated norm."""
    return " x ".join(f"{extent:,}" for extent in results.case_of(row).shape)


def measured(report: dict[str, Any]) -> list[str]:
    return [
        "# Benchmarks",
        "",
        f"One {report['device']}, driver {report['driver']}, torch {report['torch']}, Python "
        f"{report['python']}, {report['date'][:10]}. The sources measured have the "
        f"`csrc_sha256` {report['csrc_sha256'][:16]}...; `python -m benchmarks.report` says "
        "whether they are those you have. This page is made from the results file by "
        "`python -m benchmarks.page`.",
        "",
        "Times are times on the device, in microseconds: the median over replays of a CUDA graph "
        "that works through distinct random inputs which together are larger than the L2 cache. "
        "*Of copy speed* is the least number of bytes that the operator must move, over its time, "
        "as a share of what an elementwise copy of the same tensor reaches in the same run: at "
        "100% nothing can be faster, except for a tensor so small that the launch is most of its "
        "time. *x eager* and *x compile* say how many times the time of "
        "PyTorch's own operators, and of `torch.compile`, ours is.",
        "",
        *left_out(report.get("skipped", [])),
    ]


def left_out(skipped: list[str]) -> list[str]:
    """What the run did not measure, and why."""
    if not skipped:
        return []
    return ["Not measured in this run:", "", *(f"- {line}" for line in skipped), ""]


def plots(report: dict[str, Any]) -> list[str]:
    lines = [
        "## Bandwidth",
        "",
        f"Tensors of {SMALLEST >> 20} MB and more; of several with the same columns the largest. "
        "A curve is of one dtype.",
        "",
        f"![Bandwidth of each dtype under copy speed]({relative(roofline_path())})",
        "",
    ]
    for types in plotted_types(report["rows"]):
        path = relative(plot_path(types))
        lines += [f"![Bandwidth against columns, {types}]({path})", ""]
    return lines


def cases(report: dict[str, Any]) -> list[str]:
    lines = ["## Every case", ""]
    for op in dict.fromkeys(row["op"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["op"] == op and "ours_us" in row]
        peers = {key for row in rows for key in row if key.endswith("_us")} - set(OWN_KEYS)
        others = ["eager_us", "compile_us", *sorted(peers)]
        modulated = results.case_of(rows[0]).modulated if rows else False
        sizes = "samples x tokens x columns" if modulated else "rows x columns"
        header = [sizes, "dtype", "copy", "ours", "of copy speed"]
        header += [f"x {key.removesuffix('_us')}" for key in others]
        body = [
            [
                size(row),
                types_of(row),
                us(row.get("copy_us")),
                us(row["ours_us"]),
                percent(share(row)),
                *(times(row.get(key), row["ours_us"]) for key in others),
            ]
            for row in rows
        ]
        lines += [f"### {title(op)}", "", *table(header, body, left=2), ""]
    return lines


def falls_short(report: dict[str, Any]) -> list[str]:
    """The cases below `SHORT_OF_COPY`, those in which something else is faster, and the sweeps."""

    def name(row: Row) -> list[str]:
        return [title(row["op"]), size(row), types_of(row)]

    large = [row for row in report["rows"] if results.case_of(row).tensor_bytes >= SMALLEST]
    slow = [
        (part, row)
        for row in large
        if (part := share(row)) is not None and round(part, 2) < SHORT_OF_COPY
    ]
    body = [[*name(row), percent(part)] for part, row in sorted(slow, key=lambda pair: pair[0])]
    header = ["operator", "rows x columns", "dtype"]
    lines = [
        "## What falls short",
        "",
        f"Tensors of {SMALLEST >> 20} MB and more below {SHORT_OF_COPY:.0%} of copy speed, the "
        "furthest first. The [tuning log](tuning-log.md) says what bounds each.",
        "",
        *(table([*header, "of copy speed"], body, left=3) if body else ["None."]),
        "",
    ]
    beaten = [
        (row[key] / row["ours_us"], key, row)
        for row in report["rows"]
        for key in row
        if key.endswith("_us") and key not in ("copy_us", "ours_us") and "ours_us" in row
        if row[key] is not None and row[key] < row["ours_us"]
    ]
    body = [
        [*name(row), key.removesuffix("_us"), us(row["ours_us"]), us(row[key]), f"{ratio:.2f}x"]
        for ratio, key, row in sorted(beaten, key=lambda entry: entry[0])
    ]
    lines += [
        "Cases in which something else is faster:",
        "",
        *(
            table([*header, "what", "ours", "its time", "its part of ours"], body, left=4)
            if body
            else ["None."]
        ),
        "",
    ]
    for found, other, what in (
        ("sweep", "eager", "eager PyTorch"),
        ("sweep_compile", "compile", "torch.compile"),
    ):
        if sweep := report.get(found):
            lines += swept(report, sweep, other, what)
    return lines


def of_day(part: dict[str, Any], report: dict[str, Any]) -> str:
    """When a part was measured, and whether of other kernels than the page's other times."""
    same = part["csrc_sha256"] == report["csrc_sha256"]
    return f"measured on {part['date'][:10]}" + ("" if same else ", of another state of csrc")


def swept(report: dict[str, Any], sweep: dict[str, Any], other: str, what: str) -> list[str]:
    """How many points of a sweep are slower than `what`, and the points with the least gain."""
    body = [
        [
            title(row["op"]),
            size(row),
            types_of(row),
            us(row["ours_us"]),
            us(row[f"{other}_us"]),
            times(row[f"{other}_us"], row["ours_us"]),
        ]
        for row in sweep["worst"][:LISTED]
    ]
    header = ["operator", "rows x columns", "dtype", "ours", other, f"x {other}"]
    return [
        f"Of {sweep['points']:,} shapes timed against {what}, forward and backward, "
        f"{sweep['slower'] or 'none'} {'are' if sweep['slower'] > 1 else 'is'} slower "
        f"({of_day(sweep, report)}). The least gain:",
        "",
        *table(header, body, left=3),
        "",
    ]


WAYS = {
    "no_grad": "forward without gradients",
    "grad": "forward with gradients",
    "autocast": "forward with gradients under autocast",
}


def compared(entry: dict[str, Any], name: str, base: str) -> str:
    """The value `name` of an entry, and in brackets its ratio to the value `base`."""
    if entry.get(name) is None:
        return "-"
    said = us(entry[name])
    other = entry.get(base)
    return f"{said} ({entry[name] / other:.2f})" if other and name != base else said


def host(report: dict[str, Any]) -> list[str]:
    """What a call costs the host, and the wall time of a module's training step."""
    lines = []
    names = ("eager_us", "ours_us", "override_us")
    header = ["nn.LayerNorm", "FusedLayerNorm", "override_aten()"]
    if calls := report.get("call_overhead"):
        body = [
            [
                WAYS.get(way, way.replace("_", " ")),
                *(compared(entry, name, "eager_us") for name in names),
            ]
            for way, entry in calls.items()
        ]
        lines += [
            "## Host time",
            "",
            "What a call on a tiny tensor costs the host: microseconds a layer, in brackets as a "
            f"ratio to nn.LayerNorm ({of_day(report['overhead_stamp'], report)}, as the next "
            "table).",
            "",
            *table(["a layer", *header], body, left=1),
            "",
        ]
    if steps := report.get("training_step"):
        body = [
            [entry["name"], *(compared(entry, name, "eager_us") for name in names[:2])]
            for entry in steps
        ]
        lines += [
            "## Forward and backward of the module",
            "",
            "Wall time in microseconds, in brackets as a ratio to nn.LayerNorm.",
            "",
            *table(["a step", *header[:2]], body, left=1),
            "",
        ]
    return lines


VARIANTS = {
    "eager": "stock",
    "swap": "swapped",
    "override": "override_aten()",
    "compiled": "compiled",
    "swap_compiled": "swapped and compiled",
    "fused_eager": 'backend="fused_layernorm", then eager',
    "fused_compiled": 'backend="fused_layernorm", then Inductor',
    "operators": "written with this package's operators",
    "operators_compiled": "the same, compiled",
}


def models(report: dict[str, Any]) -> list[str]:
    """One line for each variant of a model."""
    rows = [row for row in report.get("models", {}).get("rows", []) if "variant" in row]
    if not rows:
        return []
    stock = {(row["model"], row["mode"]): row for row in rows if row["variant"] == "eager"}
    body = []
    for row in rows:
        base = stock.get((row["model"], row["mode"]), {}) if row["variant"] != "eager" else {}
        cells = [
            compared({"this": row.get(key), "stock": base.get(key)}, "this", "stock")
            for key in ("wall_ms", "device_ms", "layer_norm_ms")
        ]
        variant = VARIANTS.get(row["variant"], row["variant"])
        kernels = str(row.get("kernels", "-"))
        body.append([row["model"], row["mode"], variant, *cells, kernels])
    header = ["model", "mode", "variant", "wall", "device", "of it LayerNorm", "kernels"]
    drawn = []
    if picture.has_block(report):
        drawn = [f"![Device time of a block of DiT]({relative(picture.BLOCK_PICTURE)})", ""]
    return [
        "## Whole models",
        "",
        "Milliseconds a step, in brackets as a ratio to the stock model in eager mode: the wall "
        "time, which on a shared host says little, and the time of all kernels on the device.",
        "",
        *drawn,
        *table(header, body, left=3),
        "",
    ]


def page(report: dict[str, Any]) -> str:
    parts: tuple[Callable[[dict[str, Any]], list[str]], ...]
    parts = (measured, plots, falls_short, cases, host, models)
    lines = [line for part in parts for line in part(report)]
    return "\n".join(lines).rstrip() + "\n"


def outdated(report: dict[str, Any]) -> list[str]:
    """The files of the page and its plots that were not made from the report, a line for each."""
    found = []
    if not PAGE.exists() or PAGE.read_text() != page(report):
        found.append(f"{PAGE.name} is not what the results file gives")
    wanted = {plot_path(types) for types in plotted_types(report["rows"])} | {roofline_path()}
    for path in sorted(wanted | set(PLOTS.glob("*.svg"))):
        if path not in wanted:
            found.append(f"{path.name} is no plot of the results file")
        elif not path.exists() or stamp(report) not in path.read_text():
            found.append(f"{path.name} is not of the results file")
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("results", nargs="?", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args(argv)
    report = results.read(arguments.results or newest())
    if arguments.check:
        if found := outdated(report):
            raise SystemExit("\n".join([*found, "run python -m benchmarks.page"]))
        return
    for path in PLOTS.glob("*.svg"):
        path.unlink()
    for types in plotted_types(report["rows"]):
        plot(report, types)
    plot_roofline(report)
    PAGE.write_text(page(report))
    print(f"written: {PAGE} and {PLOTS}")


if __name__ == "__main__":
    main()
