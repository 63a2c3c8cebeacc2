# SPDX-License-Identifier: Apache-2.0
"""The one renderer of the results files: the terminal, the README's tables and the benchmark page.

python -m benchmarks.report [FILE]    prints the page, by default of the results that are newest
python -m benchmarks.report --write   writes the README's tables, docs/benchmarks.md, the pictures
python -m benchmarks.report --check   fails if these are not made from the results files

Shown are the results that were measured last, without those of other code; but whole models, which
take a machine the longest, are shown with the code that they are of. page.md is the page with
names for its parts; each part is a list of blocks of Markdown, which blank lines separate.
"""

from __future__ import annotations

import functools
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import plot, results
from benchmarks.cases import PER_TOKEN, parse_case
from benchmarks.families import SAMPLES, family_of
from benchmarks.networks import MODELS
from benchmarks.overhead import overhead_text, steps_text
from benchmarks.plot import SMALLEST, Report, Row, Step, large, share
from benchmarks.providers import PEERS
from benchmarks.variants import VARIANTS

README = results.ROOT / "README.md"
PAGE = results.ROOT / "docs" / "benchmarks.md"
FORM = Path(__file__).with_name("page.md")
FRAMEWORKS = results.ROOT / "docs" / "integrations.md"
# The lines of a document that a block of this name stands between.
BEGIN = "<!-- {}: made by python -m benchmarks.report --write -->"
END = "<!-- {}: end -->"
NO_RESULTS = "No results yet: `make bench` writes them, on a CUDA machine."
SHORT_OF_COPY = 0.9  # below this share of copy speed a case is listed as falling short
LISTED = 9  # rows of each table of what falls short
SWEPT = 7  # points of the sweeps, of all together
SWEEPS = (("sweep", "eager"), ("sweep_compile", "compile"))  # with what each compares
PARTS = ("sweep", "sweep_compile", "overhead_stamp")  # each with a stamp of its own
WAYS = ("forward", "backward")
# The README's rows: what it is, the tensor, and the operator without "forward".
README_ROWS = (
    ("LayerNorm of BERT-base and ViT-B", "32768x768", ""),
    ("RMSNorm of Llama", "32768x4096", "rms_"),
    ("residual addition and RMSNorm", "32768x4096", "add_rms_"),
    ("norms and rotation of q and k", "2x4096x32x128", "qk_norm_rope_"),
    ("LayerNorm over channels, NCHW", "4x256x256x256", "channels_"),
    ("GroupNorm and SiLU of a VAE", "1x128x1024x1024", "group_silu_"),
    ("GroupNorm and SiLU of SDXL, NHWC", "2x320x128x128", "group_silu_nhwc_"),
    ("modulated LayerNorm of DiT-XL/2", "64x256x1152", "ada_"),
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
# Whom ours is compared with, in this order: by the keys of their times without "_us".
OTHERS = {"eager": "eager PyTorch", "compile": "torch.compile", "cudnn": "cuDNN", "fla": "FLA",
          "flashinfer": "FlashInfer", "liger": "Liger", "quack": "QuACK",
          "llama": "transformers' Llama class"}  # fmt: skip
TITLES = {name: variant.title for name, variant in VARIANTS.items()}


def table(rows: list[dict[str, str]], left: int) -> str:
    """A Markdown table of cells by heading, the same in all rows: the first `left` columns are
    text, the others numbers."""
    if not rows:
        return "None."
    header = [*rows[0]]
    rule = "|".join("-" if i < left else "-:" for i in range(len(header)))
    first, *lines = [f"| {' | '.join(cells)} |" for cells in (header, *(r.values() for r in rows))]
    return "\n".join([first, f"|{rule}|", *lines])


def bullets(head: str, lines: list[str]) -> list[str]:
    return [f"{head}:", "\n".join(f"- {line}" for line in lines)] if lines else []


def code(*texts: str) -> str:
    return "```\n{}\n```".format("\n\n".join(texts))


def title(op: str) -> str:
    return f"{family_of(op).title}, {'backward' if op.endswith('backward') else 'forward'}"


def us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def times(row: Row, other: str, digits: int = 2) -> str:
    """How many times as long as ours another takes."""
    time = row.get(f"{other}_us")
    return "-" if time is None else f"{time / row['ours_us']:.{digits}f}x"


def cell(row: Row | None, others: Iterable[str], form: Callable[[float], str], digits: int) -> str:
    """A time, its share of copy speed, and how many times as long others take."""
    if row is None or "ours_us" not in row:
        return "-"
    ratios = (times(row, other, digits) for other in others)
    return ", ".join([form(row["ours_us"]), percent(share(row)), *ratios])


def named(row: Row) -> dict[str, str]:
    """A row's shape (rows x columns, or samples x tokens x columns of a modulated norm), and its
    dtypes in words: "bfloat16", "bfloat16, weights float32, y float32"."""
    case = results.case_of(row)
    others = (("weights", case.weight_dtype), ("y", case.out_dtype),
              ("modulation", case.modulation_dtype))  # fmt: skip
    words = [f"{name} {dtype}" for name, dtype in others if dtype]
    per = ["per token"] if case.modulation == PER_TOKEN else []
    head = "samples x tokens x columns" if case.family.layout == SAMPLES else "rows x columns"
    shape = " x ".join(f"{extent:,}" for extent in case.shape)
    return {head: shape, "dtype": ", ".join([case.dtype, *words, *per])}


def day_of(report: Report, part: dict[str, Any]) -> str:
    newest, code = (one.get("csrc_sha256", "") for one in (report, part))
    return part.get("date", "-")[:10] + f", csrc {code[:8]}" * (code not in ("", newest))


def of_card(report: Report, part: dict[str, Any]) -> str:
    driver, torch = report["driver"], report["torch"]
    return f"{report['device']}, driver {driver}, torch {torch}, {day_of(report, part)}."


def others_of(rows: list[Row]) -> list[str]:
    """Eager PyTorch, torch.compile, and the peers that were timed in one of the rows."""
    return [name for place, name in enumerate(OTHERS)
            if place < 2 or any(f"{name}_us" in row for row in rows)]  # fmt: skip


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


def variants_of(report: Report) -> dict[tuple[str, str], dict[str, Row]]:
    """The rows of a model in a mode, by variant."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in report.get("models", {}).get("rows", []):
        found.setdefault((row["model"], row["mode"]), {})[row["variant"]] = row
    return found


def blocks_of(report: Report) -> dict[Path, dict[str, str]]:
    """The blocks of each document by name: of the README steps of models, and their picture with a
    few norms; of docs/integrations.md training steps by Liger's kernels and by ours."""
    if not report:
        return {README: dict.fromkeys(("models", "norms"), NO_RESULTS),
                FRAMEWORKS: {"liger": NO_RESULTS}}  # fmt: skip
    steps = steps_of(report)
    picture = f"![Steps of models]({plot.STEPS.relative_to(results.ROOT)})\n\n" if steps else ""
    return {README: {"models": steps_table(report, steps),
                     "norms": picture + norms_table(report)},
            FRAMEWORKS: {"liger": frameworks_table(report)}}  # fmt: skip


def norms_table(report: Report) -> str:
    """A few norms, forward and backward, against copy speed, eager PyTorch and torch.compile."""
    found = {results.case_of(row).name: row for row in report["rows"]}
    body = []
    for what, tensor, op in README_ROWS:
        rows = [found.get(parse_case(f"{tensor} bf16 {op}{way}").name) for way in WAYS]
        cells = [cell(row, ("eager", "compile"), "{:.0f} us".format, 1) for row in rows]
        if known := next(filter(None, rows), None):
            tensor = f"{next(iter(named(known).values()))} bf16"
            body.append({"": what, "tensor": tensor, **dict(zip(WAYS, cells, strict=True))})
    said = "Each cell: the time on the GPU, its share of the speed of copying such a tensor, and "
    said += "how many times faster that is than eager PyTorch and than `torch.compile`."
    return f"{said}\n\n{table(body, left=2)}\n\n{of_card(report, report)}"


def steps_of(report: Report) -> list[Step]:
    """The README's steps that were measured in another variant, too; of swaps, that which does most
    is shown."""
    found = []
    for part, wanted, words in README_STEPS:
        for (model, mode), rows in variants_of(report).items():
            if part in model and mode == wanted and "eager" in rows and len(rows) > 1:
                norms = {"swap_neighbours": rows.pop("swap")} if "swap" in rows else {}
                found.append((f"{model}, {mode}", words, {**norms, **rows}))
    return found


def steps_table(report: Report, steps: list[Step]) -> str:
    """Each variant's speed and peak memory, side by side; the fastest of a step is set in bold."""
    shown = [variant for variant, *_ in plot.BARS if any(variant in rows for *_, rows in steps)]
    body, said = [], []
    for name, words, rows in steps:
        stock, cells = rows["eager"], dict.fromkeys(shown, "-")
        count, unit = MODELS[stock["model"]].units
        fastest = min(row["wall_ms"] for key, row in rows.items() if key in shown)
        for key in (key for key in shown if key in rows):
            speed = f"{stock['wall_ms'] / rows[key]['wall_ms']:.2f}x"
            speed = f"{count / stock['wall_ms'] * 1e3:,.0f} {unit}/s" if key == "eager" else speed
            cells[key] = f"{speed} ({rows[key]['peak_gib']:.1f} GiB)"
            if rows[key]["wall_ms"] == fastest:
                cells[key] = f"**{cells[key]}**"
        if words and (swapped := rows.get("swap_neighbours")):
            said.append(f"{words} {stock['wall_ms'] / swapped['wall_ms']:.1f}x")
        body.append({"": name, **{TITLES[key]: cell for key, cell in cells.items()}})
    return "\n\n".join([
        "Times as fast as stock PyTorch in eager mode, by one line with `neighbours=True`: "
        f"**{', '.join(said)}**.",
        "Stock: the speed of a step. The other cells: how many times that speed. In brackets: the "
        "step's peak memory. All variants of a model were measured in one run.",
        table(body, left=1), of_card(report, report["models"]),
    ]) if steps else ""  # fmt: skip


def frameworks_table(report: Report) -> str:
    shown = ("eager", "swap_neighbours", "liger", "liger_rest_swap")
    form, body = "{wall_ms:.1f} ({device_ms:.1f}; {peak_gib:.1f})", []
    for (name, mode), rows in variants_of(report).items():
        if mode == "training" and "liger" in rows:
            cells = {TITLES[key]: form.format(**rows[key]) if key in rows else "-" for key in shown}
            body.append({"": name.removeprefix("Liger's ").removeprefix("transformers "), **cells})
    return f"{table(body, left=1)}\n\n{of_card(report, report['models'])}" if body else NO_RESULTS


def filled(text: str, blocks: dict[str, str]) -> str:
    """A document with the text between the lines of each block replaced."""
    for name, block in blocks.items():
        begin, end = BEGIN.format(name), END.format(name)
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"expected one {begin} and one {end}")
        head, rest = text.split(begin)
        text = f"{head}{begin}\n{block}\n{end}{rest.split(end)[1]}"
    return text


def measured(report: Report, left_out: list[str]) -> list[str]:
    """Which card, and what was measured on it."""
    said = alike(line.rstrip(":") for line in report.get("skipped", [])
                 if "is not installed" not in line)  # fmt: skip
    known = {key.removesuffix("_us") for row in report["rows"] for key in row}
    missing = PEERS.keys() - known - {line.split(":")[0] for line in said} - {"llama"}
    host_times, whole_models = (day_of(report, report.get(part, {}))
                                for part in ("overhead_stamp", "models"))  # fmt: skip
    lines = {
        "clocks": report["clocks"], "driver": report["driver"], "torch": report["torch"],
        "Python": report["python"], "kernels of eager RMSNorm": report["rms_norm"],
        "peers not installed": ", ".join(sorted(OTHERS[name] for name in missing)) or "-",
        "measured on": report["date"][:10], "host times": host_times,
        "whole models": whole_models, "`csrc_sha256`": report["csrc_sha256"][:16],
    }  # fmt: skip
    body = [{"": what, report["device"]: value} for what, value in lines.items()]
    return [table(body, left=2), *bullets("Not measured", said), *bullets("Left out", left_out)]


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
        ratios = {name: [row[f"{name}_us"] / row["ours_us"] for row in rows
                         if row.get(f"{name}_us") and "ours_us" in row]
                  for name in others_of(rows)}  # fmt: skip
        faster = [f"{OTHERS[name]} {statistics.median(found):.1f}x ({min(found):.1f}x)"
                  for name, found in ratios.items() if found]  # fmt: skip
        if shares:
            speed = f"{percent(statistics.median(shares))} ({percent(min(shares))})"
            body.append({"operator": title(op), "cases": str(len(shares)), "of copy speed": speed,
                         "times faster than": ", ".join(faster)})  # fmt: skip
    return [table(body, left=1)]


def of_operator(row: Row, **more: str) -> dict[str, str]:
    """The cells of a row in a table of rows of all operators."""
    shape, dtype = named(row).values()
    return {"operator": title(row["op"]), "rows x columns": shape, "dtype": dtype, **more}


def falls_short(report: Report) -> list[list[str]]:
    """The cases below `SHORT_OF_COPY`, and those in which something else is faster: of each the
    `LISTED` that most people meet, those with a target and aligned first, then the furthest."""
    slow, beaten = [], []
    for row in (row for row in report["rows"] if "ours_us" in row):
        rare = results.case_of(row).target is None or row["cols"] % 8 != 0
        part, own = share(row), row["ours_us"]
        if part is not None and large(row) and round(part, 2) < SHORT_OF_COPY:
            cells = of_operator(row, **{"of copy speed": percent(part)})
            slow.append((rare, part, [*cells.values()], cells))
        for name in others_of([row]):
            if (time := row.get(f"{name}_us") or own) < own:
                more = {"its time": us(time), "its part of ours": times(row, name)}
                cells = of_operator(row, what=name, ours=us(own), **more)
                beaten.append((rare, time / own, [*cells.values()], cells))

    def listed(found: list[Any]) -> list[str]:
        rest = len(found) - LISTED
        lines = table([cells for *_, cells in sorted(found)[:LISTED]], left=3)
        return [lines, *([f"And {rest} more, in the tables below."] if rest > 0 else [])]

    return [listed(slow), listed(beaten)]


def swept(sweep: dict[str, Any], other: str, sweeps: int = 1) -> list[str]:
    """How many points of a sweep, one of `sweeps`, are slower than `other`, and the least gains."""
    body = [of_operator(row, ours=us(row["ours_us"]), **{other: us(row[f"{other}_us"]),
                                                         f"x {other}": times(row, other)})
            for row in sweep["worst"][: SWEPT // sweeps]]  # fmt: skip
    return [
        f"Of {sweep['points']:,} shapes timed against {OTHERS[other]}, forward and backward, "
        f"{sweep['slower'] or 'none'} {'are' if sweep['slower'] > 1 else 'is'} slower "
        f"(measured on {sweep['date'][:10]}). The least gain:",
        table(body, left=3),
    ]


def cases(report: Report) -> list[str]:
    """A table for each family of operators, with forward and backward of a case side by side."""
    families: dict[str, dict[str, dict[str, Row]]] = {}
    for row in report["rows"]:
        if "ours_us" in row:
            way = WAYS[row["op"].endswith(WAYS[1])]
            of_family = families.setdefault(title(row["op"]).removesuffix(f", {way}"), {})
            of_family.setdefault(str(named(row)), {})[way] = row
    blocks = ["## Every case", "Each cell: microseconds, of copy speed, times faster than."]
    for family, found in families.items():
        others = others_of([row for rows in found.values() for row in rows.values()])
        what = ", ".join(["us", "of copy", *(f"x {name}" for name in others)])
        body = [{**named(first := next(iter(rows.values()))), "copy": us(first.get("copy_us")),
                 **{f"{way}: {what}": cell(rows.get(way), others, us, 2) for way in WAYS}}
                for rows in found.values()]  # fmt: skip
        blocks += [f"### {family}", table(body, left=2)]
    return blocks


def host(report: Report) -> list[str]:
    """What a call costs the host, and the wall time of a module's training step."""
    if "call_overhead" not in report:
        return []
    texts = [overhead_text(report["call_overhead"])]
    texts += [steps_text(report["training_step"])] if "training_step" in report else []
    said = "The median, in brackets the best, and the ratio to PyTorch's module; measured on "
    return ["## Host time", f"{said}{report['overhead_stamp']['date'][:10]}:", code(*texts)]


def on_cpu(report: Report) -> list[str]:
    """Host times on a machine without a GPU, where there are some of this code."""
    found = results.read(results.RESULTS / "cpu.json")
    part = found.get("cpu", {})
    if part.get("csrc_sha256") != report["csrc_sha256"]:
        return []
    said = f"Host times without a GPU (measured on {part['date'][:10]}):"
    head = f"## {found['device']}, torch {found['torch']}"
    return [head, said, code(overhead_text(part["call_overhead"]))]


def models(report: Report) -> list[str]:
    """One line for each variant of a model."""
    part = report.get("models", {})
    if not part.get("rows"):
        return []
    by_variant, body = variants_of(report), []
    columns = {"wall": "wall_ms", "device": "device_ms", "of it norms": "layer_norm_ms",
               "GiB": "peak_gib"}  # fmt: skip
    for row in part["rows"]:
        cells = {key: row[key] for key in ("model", "mode")}
        cells["variant"] = TITLES.get(row["variant"], row["variant"])
        stock = by_variant[row["model"], row["mode"]].get("eager", {})
        for head, key in columns.items():
            has_ratio = row["variant"] != "eager" and stock.get(key)
            cells[head] = us(row[key]) + (f" ({row[key] / stock[key]:.2f})" if has_ratio else "")
        body.append({**cells, "kernels": str(row["kernels"])})
    return [
        "## Whole models",
        "Milliseconds a step, in brackets as a ratio to the stock model in eager mode: the wall "
        "time, which on a shared host says little, the time of all kernels on the device, and the "
        f"most memory that a step took (measured on {day_of(report, part)}).",
        table(body, left=3),
        *bullets("Left out", part.get("skipped", [])),
    ]


def page(report: Report, left_out: list[str]) -> str:
    """The benchmark page in Markdown; the terminal shows it too."""
    if not report:
        return f"# Benchmarks\n\n{NO_RESULTS}\n"
    slow, beaten = falls_short(report)
    sweeps = [(report[name], other) for name, other in SWEEPS if name in report]
    parts = {
        "card": measured(report, left_out), "operators": at_a_glance(report), "slow": slow,
        "beaten": beaten, "cases": cases(report), "host": host(report), "models": models(report),
        "sweeps": [block for part, other in sweeps for block in swept(part, other, len(sweeps))],
        "cpu": on_cpu(report),
    }  # fmt: skip
    text = FORM.read_text().format(
        smallest=SMALLEST >> 20, short=f"{SHORT_OF_COPY:.0%}",
        picture=plot.path_of(report).relative_to(plot.STEPS.parent).as_posix(),
        **{name: "\n\n".join(blocks) for name, blocks in parts.items()},
    )  # fmt: skip
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def pictures(report: Report) -> dict[Path, tuple[str, Callable[[], None]]]:
    """The pictures of a report, the stamp of each, and what draws it."""
    made: dict[Path, tuple[str, Callable[[], None]]] = {}
    if report:
        draw = functools.partial(plot.plot_cases, report)
        made[plot.path_of(report)] = (plot.stamp(report, report), draw)
    if steps := steps_of(report):
        draw = functools.partial(plot.plot_steps, steps, report)
        made[plot.STEPS] = (plot.stamp(report["models"], report), draw)
    return made


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
    texts = {path: filled(path.read_text(), made) for path, made in blocks_of(report).items()}
    texts[PAGE] = page(report, left_out)
    drawn = pictures(report)
    old = {*plot.PLOTS.glob("*.svg")} - {*drawn}
    if arguments.write:
        for path, text in texts.items():
            path.write_text(text)
        for path in old:
            path.unlink()
        for _, draw in drawn.values():
            draw()
        return
    now = {path: path.read_text() if path.exists() else "" for path in (*texts, *drawn)}
    old |= {path for path, text in texts.items() if now[path] != text}
    old |= {path for path, (stamp, _) in drawn.items() if stamp not in now[path]}
    if old:
        names = ", ".join(sorted(path.name for path in old))
        raise SystemExit(f"not of the results files: {names}; "
                         "run python -m benchmarks.report --write")  # fmt: skip


if __name__ == "__main__":
    main()
