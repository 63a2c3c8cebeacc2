# SPDX-License-Identifier: Apache-2.0
"""The one renderer of the results files: the terminal, the README's table and the benchmark page.

python -m benchmarks.report [FILES]   prints the page, by default of every card's results file
python -m benchmarks.report --write   writes the README's table, docs/benchmarks.md, the pictures
python -m benchmarks.report --check   fails if these are not made from the results files
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import plot, results
from benchmarks.cases import SHORT_NAMES
from benchmarks.plot import SMALLEST, Row, relative, types_of

Report = dict[str, Any]

README = results.ROOT / "README.md"
PAGE = results.ROOT / "docs" / "benchmarks.md"
BEGIN = "<!-- benchmarks: made by python -m benchmarks.report --write -->"
END = "<!-- benchmarks: end -->"
NO_RESULTS = (
    "No results yet: the numbers come from a run of `make bench` on a CUDA machine, which writes "
    "`benchmarks/results/`."
)
SHORT_OF_COPY = 0.9  # below this share of copy speed a case is listed as falling short
LISTED = 10  # points of a sweep
# The README's rows: what it is, the shape of x, its dtype, and the operator without "forward". It
# shows the first of them that a results file has.
README_LINES = 6
README_ROWS = (
    ("LayerNorm of BERT-base and ViT-B", (32_768, 768), "bf16", ""),
    ("RMSNorm of Llama", (32_768, 4096), "bf16", "rms_"),
    ("residual addition and RMSNorm", (32_768, 4096), "bf16", "add_rms_"),
    ("norms and rotation of q and k", (2, 4096, 3, 32, 128), "bf16", "qk_norm_rope_"),
    ("LayerNorm over channels, NCHW", (4, 256, 256, 256), "bf16", "channels_"),
    ("modulated LayerNorm of DiT-XL/2", (64, 256, 1152), "bf16", "ada_"),
    ("residual addition and LayerNorm", (32_768, 1024), "bf16", "add_"),
    ("LayerNorm, GELU and scale (KernelBench)", (4_194_304, 64), "fp32", "gelu_scale_"),
    ("LayerNorm, 4,096 wide", (32_768, 4096), "bf16", ""),
    ("gated sum and modulated LayerNorm of Flux", (1, 4608, 3072), "bf16", "add_ada_"),
)

NORMS = {
    "": "LayerNorm",
    "rms_": "RMSNorm",
    "add_": "Residual addition and LayerNorm",
    "add_rms_": "Residual addition and RMSNorm",
    "gelu_": "LayerNorm and GELU",
    "silu_": "LayerNorm and SiLU",
    "gelu_scale_": "LayerNorm, GELU and a scale",
    "channels_": "LayerNorm over channels",
    "channels_nhwc_": "LayerNorm over channels, x NCHW and y NHWC",
    "ada_": "Modulated LayerNorm",
    "ada_rms_": "Modulated RMSNorm",
    "add_ada_": "Gated sum and modulated LayerNorm",
    "qk_norm_": "RMSNorm of the heads of q and k",
    "qk_norm_rope_": "RMSNorm and rotation of the heads of q and k",
}
OWN_KEYS = ("copy_us", "ours_us", "eager_us", "compile_us")  # of a row; other times are peers'
PEERS = {"eager": "eager PyTorch", "compile": "torch.compile", "cudnn": "cuDNN", "quack": "QuACK",
         "liger": "Liger", "apex": "Apex", "llama": "transformers' Llama class"}  # fmt: skip
INSTALLED = ("liger", "apex", "quack", "cudnn")  # peers of packages that a machine may lack
VARIANTS = {
    "eager": "stock",
    "swap": "swapped",
    "swap_rotations": "swapped with rotations",
    "override": "override_aten()",
    "compiled": "compiled",
    "swap_compiled": "swapped and compiled",
    "fused_eager": 'backend="fused_layernorm", then eager',
    "fused_compiled": 'backend="fused_layernorm", then Inductor',
    "operators": "written with this package's operators",
    "operators_compiled": "the same, compiled",
}
WAYS = {
    "no_grad": "forward without gradients",
    "grad": "forward with gradients",
    "autocast": "forward with gradients under autocast",
}
HOST = {
    "": ("nn.LayerNorm", "FusedLayerNorm", "override_aten()"),
    "rms_": ("nn.RMSNorm", "FusedRMSNorm", "override_aten() of RMSNorm"),
}


# --- words and numbers ----------------------------------------------------------------------------


def table(header: list[str], rows: Iterable[list[str]], left: int) -> list[str]:
    """A Markdown table whose first `left` columns are text and the others numbers."""
    rule = "|".join("-" if i < left else "-:" for i in range(len(header)))
    lines = [f"| {' | '.join(header)} |", f"|{rule}|"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]


def title(op: str) -> str:
    for way in ("forward", "backward"):
        if (norm := NORMS.get(op.removesuffix(way))) and op.endswith(way):
            return f"{norm}, {way}"
    return op


def us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def times(other: float | None, ours: float | None, digits: int = 2) -> str:
    return "-" if other is None or ours is None else f"{other / ours:.{digits}f}x"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def size(row: Row) -> str:
    """Rows x columns, or samples x tokens x columns of a modulated norm."""
    return " x ".join(f"{extent:,}" for extent in results.case_of(row).shape)


def share(row: Row) -> float | None:
    """Achieved bandwidth over copy speed."""
    if "ours_us" not in row or "copy_us" not in row:
        return None
    copied = 2 * results.case_of(row).tensor_bytes
    return float(row["bytes"] / row["ours_us"] / (copied / row["copy_us"]))


def compared(entry: dict[str, Any], name: str, base: str) -> str:
    """The value `name` of an entry, and in brackets its ratio to the value `base`."""
    if entry.get(name) is None:
        return "-"
    said = us(entry[name])
    other = entry.get(base)
    return f"{said} ({entry[name] / other:.2f})" if other and name != base else said


def cards(reports: list[Report]) -> list[str]:
    """A short name for each report's card: "H200"."""
    full = [report["device"].removeprefix("NVIDIA ") for report in reports]
    short = [name.split()[0] for name in full]
    return short if len(set(short)) == len(short) else full


def of_day(part: dict[str, Any], report: Report) -> str:
    """When a part was measured, and whether of other kernels than the report's other times."""
    same = part["csrc_sha256"] == report["csrc_sha256"]
    return f"measured on {part['date'][:10]}" + ("" if same else ", of another state of csrc")


def newest_code(reports: list[Report]) -> str:
    """The csrc_sha256 of the code that was measured last."""
    newest: str = max(reports, key=lambda report: report["date"])["csrc_sha256"]
    return newest


# --- the README -----------------------------------------------------------------------------------


def readme_block(reports: list[Report]) -> str:
    """One picture, a few rows for each card side by side, and what they were measured on.

    Cards that were measured on older code than another one stand on the page alone.
    """
    if not reports:
        return NO_RESULTS
    newest = newest_code(reports)
    reports = [report for report in reports if report["csrc_sha256"] == newest]
    found = [{row_key(row): row for row in report["rows"]} for report in reports]
    body: list[list[str]] = []
    for what, shape, dtype, op in README_ROWS:
        keys = [(f"{op}{way}", shape, SHORT_NAMES[dtype]) for way in ("forward", "backward")]
        cells = [readme_cell(rows.get(key)) for rows in found for key in keys]
        if any(cell != "-" for cell in cells) and len(body) < README_LINES:
            extents = " x ".join(f"{extent:,}" for extent in shape)
            body.append([what, f"{extents} {dtype}", *cells])
    ways = [f"{card} {way}" for card in cards(reports) for way in ("forward", "backward")]
    machines = [
        f"{report['device']}, driver {report['driver']}, torch {report['torch']}, "
        f"{report['date'][:10]}"
        for report in reports
    ]
    return "\n".join([
        f"![Bandwidth of a norm against its columns]({plot.PICTURE.relative_to(results.ROOT)})",
        "",
        "Each cell: the time on the GPU, its share of the speed of copying such a tensor, and how "
        "many times faster that is than eager PyTorch and than `torch.compile`.",
        "",
        *table(["", "tensor", *ways], body, left=2),
        "",
        f"{'; '.join(machines)}.",
    ])  # fmt: skip


def row_key(row: Row) -> tuple[str, tuple[int, ...], str]:
    return row["op"], results.case_of(row).shape, types_of(row)


def readme_cell(row: Row | None) -> str:
    if row is None or "ours_us" not in row:
        return "-"
    others = (times(row.get(key), row["ours_us"], 1) for key in ("eager_us", "compile_us"))
    return ", ".join((f"{row['ours_us']:.0f} us", percent(share(row)), *others))


def replace_block(text: str, block: str) -> str:
    """A README with the text between the markers replaced."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"expected one {BEGIN} and one {END}")
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n{block}\n{END}{tail}"


# --- the page -------------------------------------------------------------------------------------


def measured(reports: list[Report]) -> list[str]:
    """Which cards, and what was measured on them."""

    def day(report: Report, part: str) -> str:
        return report[part]["date"][:10] if "date" in report.get(part, {}) else "-"

    newest = newest_code(reports)
    fields: tuple[tuple[str, Callable[[Report], str]], ...] = (
        ("clocks", lambda report: report.get("clocks", "-")),
        ("driver", lambda report: report["driver"]),
        ("torch", lambda report: report["torch"]),
        ("Python", lambda report: report.get("python", "-")),
        ("kernels of eager RMSNorm", lambda report: report.get("rms_norm", "-")),
        ("peers not installed", not_installed),
        ("measured on", lambda report: report["date"][:10]),
        ("host times", lambda report: day(report, "overhead_stamp")),
        ("whole models", lambda report: day(report, "models")),
        ("`csrc_sha256`", lambda report: report["csrc_sha256"][:16]),
        ("code measured last", lambda report: "yes" if report["csrc_sha256"] == newest else "no"),
    )
    body = [[name, *(of(report) for report in reports)] for name, of in fields]
    lines = [
        "# Benchmarks",
        "",
        *table(["", *(report["device"] for report in reports)], body, left=1 + len(reports)),
        "",
    ]
    for card, report in zip(cards(reports), reports, strict=True):
        if skipped := report.get("skipped"):
            said = (f"- {line.rstrip(':')}" for line in skipped)
            lines += [f"Not measured in the run on the {card}:", "", *said, ""]
    return lines


def not_installed(report: Report) -> str:
    """The peers that the run did not find: they have no time, and nothing says that one failed."""
    known = {key.removesuffix("_us") for row in report["rows"] for key in row}
    known |= {line.split(":")[0] for line in report.get("skipped", [])}
    return ", ".join(PEERS[name] for name in INSTALLED if name not in known) or "-"


def at_a_glance(reports: list[Report]) -> list[str]:
    """How far from copy speed, and faster than what: a line for each operator and card."""
    body = []
    for op in ops_of(reports):
        for card, report in zip(cards(reports), reports, strict=True):
            rows = [
                row for row in report["rows"] if row["op"] == op and large(row) and "ours_us" in row
            ]
            shares = [part for row in rows if (part := share(row)) is not None]
            if not shares:
                continue
            peers = {
                key: [
                    row[key] / row["ours_us"] for row in rows if row.get(key) and "ours_us" in row
                ]
                for key in other_keys(rows)
            }
            faster = [
                f"{PEERS.get(name, name)} {statistics.median(found):.1f}x ({min(found):.1f}x)"
                for key, found in peers.items()
                if found and (name := key.removesuffix("_us"))
            ]
            said = f"{percent(statistics.median(shares))} ({percent(min(shares))})"
            body.append([title(op), card, str(len(shares)), said, ", ".join(faster)])
    header = ["operator", "card", "cases", "of copy speed", "times faster than"]
    return [
        "## At a glance",
        "",
        f"Tensors of {SMALLEST >> 20} MB and more: the median of the cases, and in brackets the "
        "least. *Of copy speed* is the least number of bytes that the operator must move, over "
        "its time, as a share of what an elementwise copy of the same tensor reaches in the same "
        "run. A peer stands where it was timed.",
        "",
        *table(header, body, left=2),
        "",
        "All times are device times in microseconds unless a table says otherwise: the median over "
        "replays of a CUDA graph that works through distinct random inputs, which together are "
        "larger than the L2 cache. This page is made by `python -m benchmarks.report --write`; "
        "without `--write` it says which results are of the checkout's csrc/. "
        "[CONTRIBUTING](contributing.md) says how to measure.",
        "",
    ]


def pictures(reports: list[Report]) -> list[str]:
    lines = [
        "## Bandwidth",
        "",
        f"![Against torch.compile and eager]({relative(plot.PICTURE)})",
        "",
    ]
    for card, report in zip(cards(reports), reports, strict=True):
        lines += [f"![Each dtype, {card}]({relative(plot.roofline_path(report))})", ""]
    return lines


def ops_of(reports: list[Report]) -> list[str]:
    return list(dict.fromkeys(row["op"] for report in reports for row in report["rows"]))


def other_keys(rows: Iterable[Row]) -> list[str]:
    found = {key for row in rows for key in row if key.endswith("_us")}
    return ["eager_us", "compile_us", *sorted(found - set(OWN_KEYS))]


def large(row: Row) -> bool:
    return results.case_of(row).tensor_bytes >= SMALLEST


def cases(reports: list[Report]) -> list[str]:
    """A table for each operator, with the cards side by side."""
    lines = ["## Every case", ""]
    for op in ops_of(reports):
        sides = [
            {row_key(row): row for row in report["rows"] if row["op"] == op and "ours_us" in row}
            for report in reports
        ]
        found = {key: row for side in reversed(sides) for key, row in side.items()}
        keys = dict.fromkeys(key for side in sides for key in side)
        if not keys:
            continue
        modulated = any(len(shape) == 3 for _, shape, _ in keys)
        header = ["samples x tokens x columns" if modulated else "rows x columns", "dtype"]
        others = [other_keys(side.values()) for side in sides]
        for card, names in zip(cards(reports), others, strict=True):
            of = f"{card} " if len(reports) > 1 else ""
            header += [f"{of}copy", f"{of}ours", f"{of}of copy speed"]
            header += [f"{of}x {name.removesuffix('_us')}" for name in names]
        body = []
        for key in keys:
            line = [size(found[key]), types_of(found[key])]
            for side, names in zip(sides, others, strict=True):
                row = side.get(key, {})
                line += [us(row.get("copy_us")), us(row.get("ours_us")), percent(share(row))]
                line += [times(row.get(name), row.get("ours_us")) for name in names]
            body.append(line)
        lines += [f"### {title(op)}", "", *table(header, body, left=2), ""]
    return lines


def falls_short(reports: list[Report]) -> list[str]:
    """The cases below `SHORT_OF_COPY`, those in which something else is faster, and the sweeps."""
    slow, beaten = [], []
    for card, report in zip(cards(reports), reports, strict=True):
        for row in report["rows"]:
            if "ours_us" not in row:
                continue
            name = [card, title(row["op"]), size(row), types_of(row)]
            part = share(row)
            if part is not None and large(row) and round(part, 2) < SHORT_OF_COPY:
                slow.append((part, [*name, percent(part)]))
            for key in other_keys([row]):
                if row.get(key) is not None and row[key] < row["ours_us"]:
                    ratio = row[key] / row["ours_us"]
                    line = [*name, key.removesuffix("_us"), us(row["ours_us"]), us(row[key])]
                    beaten.append((ratio, [*line, f"{ratio:.2f}x"]))
    header = ["card", "operator", "rows x columns", "dtype"]

    def sorted_table(more: list[str], found: list[tuple[float, list[str]]]) -> list[str]:
        if not found:
            return ["None."]
        return table([*header, *more], [line for _, line in sorted(found)], left=4)

    lines = [
        "## What falls short",
        "",
        f"Tensors of {SMALLEST >> 20} MB and more below {SHORT_OF_COPY:.0%} of copy speed, the "
        "furthest first. The [tuning log](tuning-log.md) says what bounds each.",
        "",
        *sorted_table(["of copy speed"], slow),
        "",
        "Cases in which something else is faster:",
        "",
        *sorted_table(["what", "ours", "its time", "its part of ours"], beaten),
        "",
    ]
    for card, report in zip(cards(reports), reports, strict=True):
        for found, other in (("sweep", "eager"), ("sweep_compile", "compile")):
            if found in report:
                lines += swept(report, found, other, card)
    return lines


def swept(report: Report, found: str, other: str, card: str) -> list[str]:
    """How many points of a sweep are slower than `other`, and the points with the least gain."""
    sweep = report[found]
    body = [
        [title(row["op"]), size(row), types_of(row), us(row["ours_us"]), us(row[f"{other}_us"]),
         times(row[f"{other}_us"], row["ours_us"])]
        for row in sweep["worst"][:LISTED]
    ]  # fmt: skip
    header = ["operator", "rows x columns", "dtype", "ours", other, f"x {other}"]
    return [
        f"Of {sweep['points']:,} shapes timed against {PEERS[other]} on the {card}, forward and "
        f"backward, {sweep['slower'] or 'none'} {'are' if sweep['slower'] > 1 else 'is'} slower "
        f"({of_day(sweep, report)}). The least gain:",
        "",
        *table(header, body, left=3),
        "",
    ]


def host(reports: list[Report]) -> list[str]:
    """What a call costs the host, and the wall time of a module's training step."""
    lines: list[str] = []
    names = ("eager_us", "ours_us", "override_us")
    for card, report in zip(cards(reports), reports, strict=True):
        if calls := report.get("call_overhead"):
            columns = [
                (f"{norm}{name}", f"{norm}{names[0]}", label)
                for norm, labels in HOST.items()
                for name, label in zip(names, labels, strict=True)
                if any(f"{norm}{name}" in entry for entry in calls.values())
            ]
            body = [
                [WAYS.get(way, way.replace("_", " ")),
                 *(compared(entry, name, base) for name, base, _ in columns)]
                for way, entry in calls.items()
            ]  # fmt: skip
            lines += [
                *([] if lines else ["## Host time", ""]),
                f"What a call on a tiny tensor costs the host beside the {card}: microseconds a "
                "layer, in brackets as a ratio to PyTorch's module "
                f"({of_day(report['overhead_stamp'], report)}, as the next "
                "table).",
                "",
                *table(["a layer", *(label for *_, label in columns)], body, left=1),
                "",
            ]
        if steps := report.get("training_step"):
            body = [
                [entry["name"], *(compared(entry, name, "eager_us") for name in names[:2])]
                for entry in steps
            ]
            lines += [
                "Forward and backward of the module: wall time in microseconds, in brackets as a "
                "ratio to nn.LayerNorm.",
                "",
                *table(["a step", *HOST[""][:2]], body, left=1),
                "",
            ]
    return lines


def models(reports: list[Report]) -> list[str]:
    """One line for each variant of a model."""
    lines: list[str] = []
    for card, report in zip(cards(reports), reports, strict=True):
        part = report.get("models", {})
        rows = [row for row in part.get("rows", []) if "variant" in row]
        if not rows:
            continue
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
        header = ["model", "mode", "variant", "wall", "device", "of it norms", "kernels"]
        said = f" ({of_day(part, report)})" if "date" in part else ""
        lines += [
            *([] if lines else ["## Whole models", ""]),
            f"On the {card}, milliseconds a step, in brackets as a ratio to the stock model in "
            "eager mode: the wall time, which on a shared host says little, and the time of all "
            f"kernels on the device{said}.",
            "",
        ]
        if report is reports[0] and plot.has_block(report):
            lines += [f"![Device time of a block of DiT]({relative(plot.BLOCK_PICTURE)})", ""]
        lines += [*table(header, body, left=3), ""]
    return lines


def on_cpu(reports: list[Report]) -> list[str]:
    """Host times on a machine without a GPU, where there are some."""
    report = results.read(results.RESULTS / "cpu.json")
    if not report:
        return []
    from benchmarks.overhead import cpu_text

    part = report["cpu"]
    head = f"## {report['device']}, torch {report['torch']}"
    said = f"Host times without a GPU ({of_day(part, reports[0])}):"
    return [head, "", said, "", "```", *cpu_text(part).splitlines(), "```", ""]


def page(reports: list[Report]) -> str:
    """The benchmark page in Markdown; the terminal shows it too."""
    parts: tuple[Callable[[list[Report]], list[str]], ...]
    parts = (measured, at_a_glance, pictures, falls_short, cases, host, models)
    lines = [line for part in parts for line in part(reports)]
    return "\n".join([*lines, *on_cpu(reports)]).rstrip() + "\n"


# --- the files ------------------------------------------------------------------------------------


def outdated(reports: list[Report]) -> list[str]:
    """The files that were not made from the reports, a line for each."""
    found = []
    text = README.read_text()
    if text != replace_block(text, readme_block(reports)):
        found.append("README.md is not what the results files give")
    if not PAGE.exists() or PAGE.read_text() != page(reports):
        found.append(f"{PAGE.name} is not what the results files give")
    wanted = plot.pictures(reports)
    for path in sorted({*wanted, *plot.PLOTS.glob("*.svg")}):
        if path not in wanted:
            found.append(f"{path.name} is no picture of the results files")
        elif not path.exists() or wanted[path] not in path.read_text():
            found.append(f"{path.name} is not of the results files")
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("results", nargs="*", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args(argv)
    reports = [results.read(path) for path in arguments.results] or results.by_card()
    if arguments.check:
        if found := outdated(reports):
            raise SystemExit("\n".join([*found, "run python -m benchmarks.report --write"]))
        return
    here = results.csrc_sha256()
    for report in reports:
        same = report["csrc_sha256"] == here
        print(f"{report['device']}: of {'this' if same else 'ANOTHER'} state of csrc")
    if arguments.write:
        README.write_text(replace_block(README.read_text(), readme_block(reports)))
        PAGE.write_text(page(reports))
        plot.draw_all(reports)
    else:
        print(page(reports), end="")


if __name__ == "__main__":
    main()
