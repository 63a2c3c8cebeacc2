# SPDX-License-Identifier: Apache-2.0
"""The one renderer of the results files: the terminal, the README's tables and the benchmark page.

python -m benchmarks.report [FILE]    prints the page, by default of the results that are newest
python -m benchmarks.report --write   writes the README's tables, docs/benchmarks.md, the pictures
python -m benchmarks.report --check   fails if these are not made from the results files

README and page show the results that were measured last; those of other code are left out. A part
of the page is a list of blocks of Markdown, which blank lines separate.
"""

from __future__ import annotations

import functools
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import plot, results
from benchmarks.cases import PER_TOKEN, SHORT_NAMES
from benchmarks.families import SAMPLES, family_of
from benchmarks.networks import TITLES, units_of
from benchmarks.overhead import overhead_text, steps_text
from benchmarks.plot import SMALLEST, Report, Row, large, share
from benchmarks.providers import PEERS

README = results.ROOT / "README.md"
PAGE = results.ROOT / "docs" / "benchmarks.md"
FRAMEWORKS = results.ROOT / "docs" / "integrations.md"
# The lines of a document that a block of this name stands between.
BEGIN = "<!-- {}: made by python -m benchmarks.report --write -->"
END = "<!-- {}: end -->"
NO_RESULTS = (
    "No results yet: the numbers come from a run of `make bench` on a CUDA machine, which writes "
    "`benchmarks/results/`."
)
SHORT_OF_COPY = 0.9  # below this share of copy speed a case is listed as falling short
LISTED = 9  # rows of each table of what falls short
SWEPT = 7  # points of the sweeps, of all together
SWEEPS = (("sweep", "eager"), ("sweep_compile", "compile"))  # with what each compares
PARTS = ("sweep", "sweep_compile", "models", "overhead_stamp")  # each with a stamp of its own
WAYS = ("forward", "backward")
# The README's rows: what it is, the shape of x, its dtype, and the operator without "forward".
README_ROWS = (
    ("LayerNorm of BERT-base and ViT-B", (32_768, 768), "bf16", ""),
    ("RMSNorm of Llama", (32_768, 4096), "bf16", "rms_"),
    ("residual addition and RMSNorm", (32_768, 4096), "bf16", "add_rms_"),
    ("norms and rotation of q and k", (2, 4096, 3, 32, 128), "bf16", "qk_norm_rope_"),
    ("LayerNorm over channels, NCHW", (4, 256, 256, 256), "bf16", "channels_"),
    ("GroupNorm and SiLU of a VAE", (1, 128, 1024, 1024), "bf16", "group_silu_"),
    ("GroupNorm and SiLU of SDXL, NHWC", (2, 320, 128, 128), "bf16", "group_silu_nhwc_"),
    ("modulated LayerNorm of DiT-XL/2", (64, 256, 1152), "bf16", "ada_"),
)
# Around the table of all operators: a heading, what its numbers are, and how they were taken.
GLANCE = (
    "## At a glance",
    f"Tensors of {SMALLEST >> 20} MB and more: the median of the cases, and in brackets the "
    "least. *Of copy speed* is the least number of bytes that the operator must move, over "
    "its time, as a share of what an elementwise copy of the same tensor reaches in the same "
    "run. A peer stands where it was timed; FlashInfer's times are of the CUDA kernels in "
    "its `norm.cuh`, called without its Python package.",
    "All times are device times in microseconds unless a table says otherwise: the median over "
    "replays of a CUDA graph that works through distinct random inputs, which together are "
    "larger than the L2 cache. This page is made by `python -m benchmarks.report --write`; "
    "without `--write` it says whether the results are of the checkout's csrc/. "
    "[CONTRIBUTING](contributing.md) says how to measure.",
)
# The models whose steps the README shows: part of a name, the mode, and what the sentence above the
# table calls it, if it is there.
README_STEPS = (
    ("transformers Qwen3,", "training", "training Qwen3"),
    ("transformers Llama", "training", ""),
    ("Gemma3", "training", ""),
    ("timm ViT", "training", ""),
    ("diffusers DiT", "training", ""),
    ("diffusers VAE decoding", "inference", "decoding by a VAE"),
    ("diffusers channels_last VAE decoding", "inference", "the same in channels_last"),
    ("nnU-Net-like 3-D", "training", "training an nnU-Net"),
)
OWN_KEYS = ("copy_us", "ours_us", "eager_us", "compile_us")  # of a row; other times are peers'
OTHERS = {"eager": "eager PyTorch", "compile": "torch.compile", "cudnn": "cuDNN", "fla": "FLA",
          "flashinfer": "FlashInfer", "liger": "Liger", "quack": "QuACK",
          "llama": "transformers' Llama class"}  # fmt: skip


# --- words and numbers ----------------------------------------------------------------------------


def table(header: list[str], rows: Iterable[list[str]], left: int) -> str:
    """A Markdown table whose first `left` columns are text and the others numbers."""
    rule = "|".join("-" if i < left else "-:" for i in range(len(header)))
    first, *lines = [f"| {' | '.join(row)} |" for row in (header, *rows)]
    return "\n".join([first, f"|{rule}|", *lines])


def bullets(head: str, lines: list[str] | None) -> list[str]:
    return [f"{head}:", "\n".join(f"- {line}" for line in lines)] if lines else []


def title(op: str) -> str:
    return f"{family_of(op).title}, {'backward' if op.endswith('backward') else 'forward'}"


def us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def times(row: Row, key: str, digits: int = 2) -> str:
    """How many times as long as ours another takes."""
    return "-" if row.get(key) is None else f"{row[key] / row['ours_us']:.{digits}f}x"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def cell(row: Row | None, keys: Iterable[str], form: Callable[[float], str], digits: int) -> str:
    """A time, its share of copy speed, and how many times as long others take."""
    if row is None or "ours_us" not in row:
        return "-"
    others = (times(row, key, digits) for key in keys)
    return ", ".join([form(row["ours_us"]), percent(share(row)), *others])


def code(*texts: str) -> str:
    return "```\n{}\n```".format("\n\n".join(texts))


def extents(shape: Iterable[int]) -> str:
    return " x ".join(f"{extent:,}" for extent in shape)


def named(row: Row) -> list[str]:
    """A row's shape (rows x columns, or samples x tokens x columns of a modulated norm), and its
    dtypes in words: "bfloat16", "bfloat16, weights float32, y float32"."""
    others = (("weight", "weights"), ("out", "y"), ("modulation", "modulation"))
    words = [f"{name} {row[f'{key}_dtype']}" for key, name in others if row.get(f"{key}_dtype")]
    per = ["per token"] if row.get("modulation") == PER_TOKEN else []
    return [extents(results.case_of(row).shape), ", ".join([row["dtype"], *words, *per])]


def on_day(part: dict[str, Any]) -> str:
    return f"measured on {part['date'][:10]}"


def of_card(report: Report, part: dict[str, Any]) -> str:
    driver, torch = report["driver"], report["torch"]
    return f"{report['device']}, driver {driver}, torch {torch}, {part['date'][:10]}."


def other_keys(rows: Iterable[Row]) -> list[str]:
    found = {key for row in rows for key in row if key.endswith("_us")}
    return ["eager_us", "compile_us", *sorted(found - set(OWN_KEYS))]


def newest(reports: list[Report]) -> tuple[Report, list[str]]:
    """The report that was measured last without its parts of other code, and what is left out."""
    if not reports:
        return {}, []
    report, *others = sorted(reports, key=lambda report: report["date"], reverse=True)
    of_code = report["csrc_sha256"]
    gone = [part for part in PARTS if report.get(part, {}).get("csrc_sha256", of_code) != of_code]
    left_out = [f"the results of the {other['device']}" for other in others]
    left_out += [f"{part}, which was measured on other code" for part in gone]
    gone += ["call_overhead", "training_step"] if "overhead_stamp" in gone else []
    return {key: value for key, value in report.items() if key not in gone}, left_out


def variants_of(report: Report, mode: str | None = None) -> dict[tuple[str, str], dict[str, Row]]:
    """The rows of a model in a mode, by variant."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in report.get("models", {}).get("rows", []):
        if mode in (None, row["mode"]):
            found.setdefault((row["model"], row["mode"]), {})[row["variant"]] = row
    return found


# --- the blocks of other documents ----------------------------------------------------------------


def readme_blocks(report: Report) -> dict[str, str]:
    """The README's blocks by name: steps of models; their picture and a few norms."""
    if not report:
        return dict.fromkeys(("models", "norms"), NO_RESULTS)
    steps = steps_of(report)
    models = [*steps_table(steps), of_card(report, report["models"])] if steps else []
    picture = [f"![Steps of models]({plot.STEPS.relative_to(results.ROOT)})"]
    norms = [*(picture if plot.bars(steps) else []), *norms_table(report)]
    return {"models": "\n\n".join(models), "norms": "\n\n".join(norms)}


def norms_table(report: Report) -> list[str]:
    """A few norms, forward and backward, against copy speed, eager PyTorch and torch.compile."""
    found = {(row["op"], *named(row)): row for row in report["rows"]}
    body: list[list[str]] = []
    for what, shape, dtype, op in README_ROWS:
        size = extents(shape)
        rows = [found.get((f"{op}{way}", size, SHORT_NAMES[dtype])) for way in WAYS]
        cells = [cell(row, ("eager_us", "compile_us"), "{:.0f} us".format, 1) for row in rows]
        if any(one != "-" for one in cells):
            body.append([what, f"{size} {dtype}", *cells])
    return [
        "Each cell: the time on the GPU, its share of the speed of copying such a tensor, and how "
        "many times faster that is than eager PyTorch and than `torch.compile`.",
        table(["", "tensor", *WAYS], body, left=2),
        of_card(report, report),
    ]


def steps_of(report: Report) -> list[tuple[str, dict[str, Row]]]:
    """The README's steps: a name, and the row of each variant; of swaps, that which does most."""
    found = []
    for part, wanted, _ in README_STEPS:
        for (model, mode), rows in variants_of(report).items():
            if part.lower() in model.lower() and mode == wanted and "eager" in rows:
                stock, most = rows["eager"], rows.get("swap_neighbours", rows.get("swap"))
                rows = {**rows, **({"swap_neighbours": most} if most else {})}
                rows = {variant: {**row, "times": stock["wall_ms"] / row["wall_ms"]}
                        for variant, row in rows.items() if variant != "swap"}  # fmt: skip
                found.append((f"{model}, {mode}", rows))
    return found


def steps_table(steps: list[tuple[str, dict[str, Row]]]) -> list[str]:
    """Each variant's speed and peak memory, side by side; the fastest of a step is set in bold."""
    said = [f"{words} {rows['swap_neighbours']['times']:.1f}x"
            for part, mode, words in README_STEPS if words for name, rows in steps
            if part.lower() in name.lower() and name.endswith(mode) and "swap_neighbours" in rows
            ]  # fmt: skip
    shown = [variant for variant, *_ in plot.BARS if any(variant in rows for _, rows in steps)]
    body = []
    for name, rows in steps:
        fastest = min(rows[variant]["wall_ms"] for variant in shown if variant in rows)
        cells = {variant: step_cell(row, fastest) for variant, row in rows.items()}
        body.append([name, *(cells.get(variant, "-") for variant in shown)])
    memory = any("peak_gib" in row for _, rows in steps for row in rows.values())
    return [
        *(["Times as fast as stock PyTorch in eager mode, by one line with `neighbours=True`: "
           f"**{', '.join(said)}**."] if said else []),
        "Stock: the speed of a step. The other cells: how many times that speed"
        + (". In brackets: the step's peak memory" if memory else "")
        + ". All variants of a model were measured in one run.",
        table(["", *(TITLES[variant] for variant in shown)], body, left=1),
    ]  # fmt: skip


def step_cell(row: Row, fastest: float) -> str:
    count, unit = units_of(row["model"])
    said = f"{count / row['wall_ms'] * 1e3:,.0f} {unit}/s" if unit else f"{row['wall_ms']:.1f} ms"
    said = said if row["variant"] == "eager" else f"{row['times']:.2f}x"
    said = f"{said} ({row['peak_gib']:.1f} GiB)" if "peak_gib" in row else said
    return f"**{said}**" if row["wall_ms"] == fastest else said


def frameworks_blocks(report: Report) -> dict[str, str]:
    """The block of docs/integrations.md: training steps by Liger's kernels and by ours."""
    shown = ("eager", "swap_neighbours", "liger", "liger_swap", "liger_rest_swap")
    body = []
    for (name, _), rows in variants_of(report, "training").items():
        cells = [f"{row['wall_ms']:.1f} ({row['device_ms']:.1f}; {row.get('peak_gib', 0):.1f})"
                 if (row := rows.get(variant)) else "-" for variant in shown]  # fmt: skip
        if "liger" in rows:
            body.append([name.removeprefix("Liger's ").removeprefix("transformers "), *cells])
    if not body:
        return {"liger": NO_RESULTS}
    lines = table(["", *(TITLES[variant] for variant in shown)], body, left=1)
    return {"liger": f"{lines}\n\n{of_card(report, report['models'])}"}


def filled(text: str, blocks: dict[str, str]) -> str:
    """A document with the text between the lines of each block replaced."""
    for name, block in blocks.items():
        begin, end = BEGIN.format(name), END.format(name)
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"expected one {begin} and one {end}")
        head, rest = text.split(begin)
        text = f"{head}{begin}\n{block}\n{end}{rest.split(end)[1]}"
    return text


# --- the page -------------------------------------------------------------------------------------


def measured(report: Report, left_out: list[str]) -> list[str]:
    """Which card, and what was measured on it."""
    said = alike(line.rstrip(":") for line in report.get("skipped", [])
                 if "is not installed" not in line)  # fmt: skip
    known = {key.removesuffix("_us") for row in report["rows"] for key in row}
    missing = PEERS.keys() - known - {line.split(":")[0] for line in said} - {"llama"}
    days = {part: report.get(part, {}).get("date", "-")[:10] for part in PARTS}
    body = [
        ["clocks", report.get("clocks", "-")],
        ["driver", report["driver"]],
        ["torch", report["torch"]],
        ["Python", report.get("python", "-")],
        ["kernels of eager RMSNorm", report.get("rms_norm", "-")],
        ["peers not installed", ", ".join(sorted(OTHERS[name] for name in missing)) or "-"],
        ["measured on", report["date"][:10]],
        ["host times", days["overhead_stamp"]],
        ["whole models", days["models"]],
        ["`csrc_sha256`", report["csrc_sha256"][:16]],
    ]
    blocks = ["# Benchmarks", table(["", report["device"]], body, left=2)]
    blocks += bullets("Not measured", said) + bullets("Left out", left_out)
    return blocks


def alike(lines: Iterable[str]) -> list[str]:
    """The lines; of those that differ in numbers alone the first, and how many more there are."""
    found: dict[str, list[str]] = {}
    for line in lines:
        found.setdefault(re.sub(r"[\d.x]+", "", line), []).append(line)
    return [one[0] + (f" (and {len(one) - 1} more)" if one[1:] else "") for one in found.values()]


def at_a_glance(report: Report) -> list[str]:
    """How far from copy speed, and faster than what: a line for each operator."""
    body = []
    for op in dict.fromkeys(row["op"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["op"] == op and large(row)]
        shares = [part for row in rows if (part := share(row)) is not None]
        faster = []
        for key in other_keys(rows):
            timed = [row for row in rows if row.get(key) and "ours_us" in row]
            if ratios := [row[key] / row["ours_us"] for row in timed]:
                name = OTHERS[key.removesuffix("_us")]
                faster.append(f"{name} {statistics.median(ratios):.1f}x ({min(ratios):.1f}x)")
        if shares:
            said = f"{percent(statistics.median(shares))} ({percent(min(shares))})"
            body.append([title(op), str(len(shares)), said, ", ".join(faster)])
    picture = plot.path_of(report).relative_to(plot.STEPS.parent).as_posix()
    shown = table(["operator", "cases", "of copy speed", "times faster than"], body, left=1)
    return [*GLANCE[:2], shown, f"![Every case]({picture})", GLANCE[2]]


def falls_short(report: Report) -> list[str]:
    """The cases below `SHORT_OF_COPY`, those in which something else is faster, and the sweeps.

    Of each the `LISTED` that most people meet: with a target and aligned first, then the furthest.
    """
    slow, beaten = [], []
    for row in (row for row in report["rows"] if "ours_us" in row):
        name = [title(row["op"]), *named(row)]
        rare = results.case_of(row).target is None or row["cols"] % 8 != 0
        part = share(row)
        if part is not None and large(row) and round(part, 2) < SHORT_OF_COPY:
            slow.append(((rare, part), [*name, percent(part)]))
        for key in other_keys([row]):
            if row.get(key) is not None and row[key] < row["ours_us"]:
                line = [*name, key.removesuffix("_us"), us(row["ours_us"]), us(row[key])]
                beaten.append(((rare, row[key] / row["ours_us"]), [*line, times(row, key)]))

    def listed(more: list[str], found: list[Any]) -> list[str]:
        if not found:
            return ["None."]
        rest = len(found) - LISTED
        shown = [line for _, line in sorted(found)[:LISTED]]
        lines = table(["operator", "rows x columns", "dtype", *more], shown, left=3)
        return [lines, *([f"And {rest} more, in the tables below."] if rest > 0 else [])]

    sweeps = [(name, other) for name, other in SWEEPS if name in report]
    return [
        "## What falls short",
        f"Tensors of {SMALLEST >> 20} MB and more below {SHORT_OF_COPY:.0%} of copy speed, those "
        "of known models first. The [tuning log](tuning-log.md) says what bounds each.",
        *listed(["of copy speed"], slow),
        "Cases in which something else is faster:",
        *listed(["what", "ours", "its time", "its part of ours"], beaten),
        *(block for name, other in sweeps for block in swept(report[name], other, len(sweeps))),
    ]


def swept(sweep: dict[str, Any], other: str, sweeps: int = 1) -> list[str]:
    """How many points of a sweep, one of `sweeps`, are slower than `other`, and the least gains."""
    its = f"{other}_us"
    body = [[title(row["op"]), *named(row), us(row["ours_us"]), us(row[its]), times(row, its)]
            for row in sweep["worst"][: SWEPT // sweeps]]  # fmt: skip
    return [
        f"Of {sweep['points']:,} shapes timed against {OTHERS[other]}, forward and backward, "
        f"{sweep['slower'] or 'none'} {'are' if sweep['slower'] > 1 else 'is'} slower "
        f"({on_day(sweep)}). The least gain:",
        table(["operator", "rows x columns", "dtype", "ours", other, f"x {other}"], body, left=3),
    ]


def cases(report: Report) -> list[str]:
    """A table for each family of operators, with forward and backward of a case side by side."""
    families: dict[str, dict[tuple[str, ...], dict[str, Row]]] = {}
    for row in report["rows"]:
        if "ours_us" in row:
            family = row["op"].removesuffix(WAYS[1]).removesuffix(WAYS[0])
            of_case = families.setdefault(family, {}).setdefault(tuple(named(row)), {})
            of_case[row["op"].removeprefix(family)] = row
    blocks = ["## Every case", "Each cell: microseconds, of copy speed, times faster than."]
    for family, found in families.items():
        keys = other_keys(row for rows in found.values() for row in rows.values())
        body = [[*name, us(next(iter(rows.values())).get("copy_us")),
                 *(cell(rows.get(way), keys, us, 2) for way in WAYS)]
                for name, rows in found.items()]  # fmt: skip
        modulated = family_of(f"{family}forward").layout == SAMPLES
        what = ", ".join(["us", "of copy", *(f"x {key[:-3]}" for key in keys)])
        header = ["samples x tokens x columns" if modulated else "rows x columns", "dtype", "copy"]
        header += [f"{way}: {what}" for way in WAYS]
        heading = title(f"{family}forward").removesuffix(", forward")
        blocks += [f"### {heading}", table(header, body, left=2)]
    return blocks


def host(report: Report) -> list[str]:
    """What a call costs the host, and the wall time of a module's training step."""
    if "call_overhead" not in report:
        return []
    said = "The median, in brackets the best, and the ratio to PyTorch's module"
    steps = report.get("training_step")
    texts = [overhead_text(report["call_overhead"]), *([steps_text(steps)] if steps else [])]
    day = on_day(report["overhead_stamp"])
    return ["## Host time", f"{said} ({day}):", code(*texts)]


def models(report: Report) -> list[str]:
    """One line for each variant of a model."""
    part = report.get("models", {})
    if not part.get("rows"):
        return []
    stock = {key: rows["eager"] for key, rows in variants_of(report).items() if "eager" in rows}
    body = []
    for row in part["rows"]:
        base = stock.get((row["model"], row["mode"]), {}) if row["variant"] != "eager" else {}
        line = [row["model"], row["mode"], TITLES.get(row["variant"], row["variant"])]
        for key in ("wall_ms", "device_ms", "layer_norm_ms", "peak_gib"):
            value, of = row.get(key), base.get(key)
            line.append(us(value) + (f" ({value / of:.2f})" if value is not None and of else ""))
        body.append([*line, str(row.get("kernels", "-"))])
    header = ["model", "mode", "variant", "wall", "device", "of it norms", "GiB", "kernels"]
    return [
        "## Whole models",
        "Milliseconds a step, in brackets as a ratio to the stock model in eager mode: the wall "
        "time, which on a shared host says little, the time of all kernels on the device, and the "
        f"most memory that a step took ({on_day(part)}).",
        table(header, body, left=3),
        *bullets("Left out", part.get("skipped")),
    ]


def on_cpu(report: Report) -> list[str]:
    """Host times on a machine without a GPU, where there are some of this code."""
    found = results.read(results.RESULTS / "cpu.json")
    if not found or found["cpu"]["csrc_sha256"] != report["csrc_sha256"]:
        return []
    part = found["cpu"]
    head = f"## {found['device']}, torch {found['torch']}"
    said = f"Host times without a GPU ({on_day(part)}):"
    return [head, said, code(overhead_text(part["call_overhead"]))]


def page(report: Report, left_out: list[str]) -> str:
    """The benchmark page in Markdown; the terminal shows it too."""
    if not report:
        return f"# Benchmarks\n\n{NO_RESULTS}\n"
    parts = (at_a_glance, falls_short, cases, host, models, on_cpu)
    blocks = [*measured(report, left_out), *(block for part in parts for block in part(report))]
    return "\n\n".join(blocks) + "\n"


# --- the files ------------------------------------------------------------------------------------


def pictures(report: Report) -> dict[Path, tuple[str, Callable[[], None]]]:
    """The pictures of a report, the stamp of each, and what draws it."""
    if not report:
        return {}
    draw: Callable[[], None] = functools.partial(plot.plot_cases, report)
    made = {plot.path_of(report): (plot.stamp(report, report), draw)}
    if plot.bars(steps := steps_of(report)):
        draw = functools.partial(plot.plot_steps, steps, report)
        made[plot.STEPS] = (plot.stamp(report["models"], report), draw)
    return made


def outdated(texts: dict[Path, str], wanted: dict[Path, tuple[str, Any]]) -> list[str]:
    """The files that were not made from the report, a line for each."""
    found = [f"{path.name} is not what the results files give" for path, text in texts.items()
             if not path.exists() or path.read_text() != text]  # fmt: skip
    for path in sorted({*wanted, *plot.PLOTS.glob("*.svg")}):
        if path not in wanted:
            found.append(f"{path.name} is no picture of the results files")
        elif not path.exists() or wanted[path][0] not in path.read_text():
            found.append(f"{path.name} is not of the results files")
    return found


def main(argv: list[str] | None = None) -> None:
    parser = results.parser("report", __doc__)
    parser.add_argument("results", nargs="?", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args(argv)
    files = [arguments.results] if arguments.results else results.by_card()
    report, left_out = newest([results.read(path) for path in files])
    if not (arguments.check or arguments.write):
        same = report.get("csrc_sha256") == results.csrc_sha256()
        print(f"{report.get('device')}: of {'this' if same else 'ANOTHER'} state of csrc")
        print(page(report, left_out), end="")
        return
    blocks = {README: readme_blocks(report), FRAMEWORKS: frameworks_blocks(report)}
    texts = {path: filled(path.read_text(), made) for path, made in blocks.items()}
    texts[PAGE] = page(report, left_out)
    drawn = pictures(report)
    if arguments.check:
        if found := outdated(texts, drawn):
            raise SystemExit("\n".join([*found, "run python -m benchmarks.report --write"]))
        return
    for path, text in texts.items():
        path.write_text(text)
    for path in set(plot.PLOTS.glob("*.svg")) - set(drawn):
        path.unlink()
    for _, draw in drawn.values():
        draw()


if __name__ == "__main__":
    main()
