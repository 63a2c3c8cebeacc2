# SPDX-License-Identifier: Apache-2.0
"""The benchmark cases: their shapes, the least number of bytes they move, and their targets.

A speed is judged by its ratio to copy speed: (bytes that must move / time) over (bytes of 2 tensors
/ time of a copy), both times from one run. A target is such a ratio too, so it holds on another day
or another device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.families import FAMILIES, HEADS, IMAGE, ROWS, SAMPLES, Family, family_of, ops_of

SHORT_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in SHORT_NAMES.values()}
_SHORT = {name: short for short, name in SHORT_NAMES.items()}
OPS = ops_of(*FAMILIES.values())
PER_SAMPLE, PER_TOKEN = "sample", "token"  # whether a modulation is given per sample or per token
SIZES = {ROWS: "ROWSxCOLS", SAMPLES: "SAMPLESxTOKENSxCOLS", IMAGE: "NxCxHxW",
         HEADS: "SAMPLESxPOSITIONSxHEADSxCOLS"}  # fmt: skip


def _dtype(field: str) -> Any:
    """A property of a case: the dtype that a field of it names, or x's."""
    return property(lambda case: DTYPES[getattr(case, field) or case.dtype])


@dataclass(frozen=True)
class Case:
    """One operator at one size. `target` is the ratio to copy speed that it should reach, if any.

    `dtype` is the dtype of x, `weight_dtype` that of weight and bias, and `out_dtype` that of y and
    its gradient dy. `weight_dtype` and `out_dtype` are None where they equal `dtype`.

    A modulated norm has neither weight nor bias. Its rows are the tokens of `samples` samples.
    Shift and scale, and with a residual also gate, are given per sample or per token
    (`modulation`), in `modulation_dtype`, which is None where it equals `dtype`.

    An `image` is (N, C, H, W). A norm over channels has its pixels as rows; x, dy, y and dx are
    contiguous NCHW; in the nhwc operators, which models call on a permuted view, dy, y and dx are
    contiguous NHWC. A norm of groups has a sample's group of channels as a row.

    The rows of a head operator are q's and k's, each of `heads` heads, at all positions of the
    samples; q and k lie in a packed qkv tensor.
    """

    op: str
    rows: int
    cols: int
    dtype: str
    target: float | None = None
    weight_dtype: str | None = None
    out_dtype: str | None = None
    samples: int | None = None
    modulation: str | None = None
    modulation_dtype: str | None = None
    image: tuple[int, ...] | None = None
    heads: int | None = None

    def __post_init__(self) -> None:
        layout = self.family.layout
        given = (self.image is not None, self.heads is not None, self.modulation is not None)
        if given != (layout == IMAGE, layout == HEADS, layout == SAMPLES):
            raise ValueError(f"image, heads or modulation are not those of {self.op}")
        parts = (self.samples or 1) * (2 * self.heads if self.heads else 1)
        if parts < 1 or self.rows % parts:
            raise ValueError(f"{self.rows} rows are not those of {parts} equal parts")

    @property
    def family(self) -> Family:
        return family_of(self.op)

    torch_dtype, torch_weight_dtype = _dtype("dtype"), _dtype("weight_dtype")
    torch_out_dtype, torch_modulation_dtype = _dtype("out_dtype"), _dtype("modulation_dtype")

    @property
    def backward(self) -> bool:
        return self.op.endswith("backward")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of x: (samples, tokens, cols) where there are samples, else (rows, cols).

        That of an image is (N, H, W, C) for a norm over channels, whatever its order in memory, and
        (N, C, H, W) for one of groups; that of a head operator (samples, positions, 3, heads,
        cols).
        """
        if self.image is not None:
            n, c, *pixels = self.image
            return self.image if self.family.groups else (n, *pixels, c)
        if self.samples is None:
            return (self.rows, self.cols)
        if self.heads is not None:
            positions = self.rows // (2 * self.samples * self.heads)
            return (self.samples, positions, 3, self.heads, self.cols)
        return (self.samples, self.rows // self.samples, self.cols)

    @property
    def groups(self) -> int:
        """The groups of a sample's channels."""
        assert self.image is not None
        return self.rows // self.image[0]

    @property
    def param_shape(self) -> tuple[int, ...]:
        """The shape of weight and bias."""
        return self.image[1:2] if self.image is not None else (self.cols,)

    @property
    def modulation_shape(self) -> tuple[int, ...]:
        """The shape of shift, scale and gate."""
        samples, tokens, cols = self.shape
        return (samples, tokens if self.modulation == PER_TOKEN else 1, cols)

    @property
    def mixed(self) -> bool:
        """Whether PyTorch's own LayerNorm takes such tensors only under autocast."""
        return self.weight_dtype is not None or self.out_dtype is not None

    @property
    def types(self) -> str:
        """The dtypes in one word, e.g. "bf16+fp32>fp32": x's, then those that differ from it.

        "+" precedes the dtype of the weights, "*" that of the modulations, ">" that of y.
        """
        marks = (("+", self.weight_dtype), ("*", self.modulation_dtype), (">", self.out_dtype))
        others = "".join(f"{mark}{_SHORT[dtype]}" for mark, dtype in marks if dtype is not None)
        return f"{_SHORT[self.dtype]}{others}" if others else self.dtype

    @property
    def tensor_bytes(self) -> int:
        return self.rows * self.cols * self.torch_dtype.itemsize

    @property
    def bytes(self) -> int:
        """The least number of bytes that the operator must move, by the numbers of its family.

        Forward reads its inputs and writes y, and the sum if there is a residual. Backward reads
        x (or the sum), dy (and the sum's gradient), weight and scale, gate and what it multiplied,
        with an activation also bias, and writes the gradients; input and residual of an addition
        share one dx, and the gradient of a shift may be dy itself (`is_dshift_dy`). The few bytes
        of mean, rstd, and of the weights, cos and sin of heads are left out.
        """
        family, way, size = self.family, self.backward, self.rows * self.cols
        total = (family.tensors[way] - 1) * size * self.torch_dtype.itemsize
        total += size * self.torch_out_dtype.itemsize
        total += (
            family.columns[way] * math.prod(self.param_shape) * self.torch_weight_dtype.itemsize
        )
        if modulations := family.modulations[way]:
            count = modulations - (way and self.is_dshift_dy)
            total += count * math.prod(self.modulation_shape) * self.torch_modulation_dtype.itemsize
        return int(total)

    @property
    def is_dshift_dy(self) -> bool:
        """Whether each element of y has a shift of its own, of y's dtype.

        The gradient of such a shift is dy itself, so autograd calls no operator to compute it.
        """
        return self.modulation == PER_TOKEN and self.torch_modulation_dtype == self.torch_out_dtype

    def ratio(self, us: float, copy_us: float) -> float:
        """Achieved bandwidth over copy speed."""
        return (self.bytes / us) / (2 * self.tensor_bytes / copy_us)

    @property
    def size(self) -> str:
        shape = self.image or self.shape
        if self.heads:
            shape = shape[:2] + shape[3:]
        size = "x".join(map(str, shape))
        usual = self.image is None or self.family.groups in (None, self.groups)
        return size if usual else f"{size}/{self.groups}"

    @property
    def _per(self) -> str:
        return " per-token" if self.modulation == PER_TOKEN else ""

    @property
    def text(self) -> str:
        """The text from which `parse_case` makes this case."""
        return f"{self.size} {self.types} {self.op}{self._per}"

    @property
    def name(self) -> str:
        return f"{self.op} {self.size} {self.types}{self._per}"


def make_case(op: str, sizes: tuple[int, ...], dtype: str, target: float | None = None,
              *, groups: int | None = None, **more: Any) -> Case:  # fmt: skip
    """A case from the sizes that name it (`SIZES`); groups are those of an image's channels."""
    family = family_of(op)
    if len(sizes) != SIZES[family.layout].count("x") + 1:
        raise ValueError(f"expected {SIZES[family.layout]} for {op}, got {len(sizes)} sizes")
    cols, rows = sizes[-1], math.prod(sizes[:-1])
    if family.layout == HEADS:
        return Case(op, 2 * rows, cols, dtype, target, samples=sizes[0], heads=sizes[2], **more)
    if family.layout == SAMPLES:
        more["modulation"] = more.get("modulation") or PER_SAMPLE
        return Case(op, rows, cols, dtype, target, samples=sizes[0], **more)
    if family.layout == IMAGE:
        rows = sizes[0] * (groups or family.groups or math.prod(sizes[2:]))
        cols = math.prod(sizes) // max(rows, 1)
        return Case(op, rows, cols, dtype, target, image=sizes, **more)
    return Case(op, rows, cols, dtype, target, **more)


def parse_case(text: str) -> Case:
    """A case from "SIZE DTYPE OP", e.g. "32768x1024 bf16 backward"; SIZE is that of `SIZES`.

    DTYPE may name the dtypes of weights, modulations and y too, as `Case.types` does:
    "bf16+fp32>fp32". Behind a modulated operator may stand "per-token", where shift, scale and gate
    are per token: "1x4608x3072 bf16*fp32 ada_forward per-token". "/G" behind an image's size is the
    number of its groups.
    """
    words = re.fullmatch(r"(\d+(?:x\d+)*)(?:/(\d+))? (\S+) (\w+)( per-token)?", text.strip())
    if words is None:
        raise ValueError(f'expected "SIZE DTYPE OP", e.g. "32768x1024 bf16 backward", got {text!r}')
    size, groups, types, op, per = words.groups()
    match = re.fullmatch(r"(\w+)(?:\+(\w+))?(?:\*(\w+))?(?:>(\w+))?", types)
    if match is None:
        raise ValueError(f'expected a dtype, or "X+WEIGHTS*MODULATIONS>Y", got {types!r}')
    names = [None if name is None else SHORT_NAMES.get(name, name) for name in match.groups()]
    for name in names:
        if name is not None and name not in DTYPES:
            raise ValueError(f"unknown dtype {name!r}: known are {', '.join(DTYPES)}")
    dtype = str(names[0])
    others = (None if name == dtype else name for name in names[1:])
    more: dict[str, Any] = dict(
        zip(("weight_dtype", "modulation_dtype", "out_dtype"), others, strict=True)
    )
    sizes = tuple(map(int, size.split("x")))
    if per:
        more["modulation"] = PER_TOKEN
    case = make_case(op, sizes, dtype, groups=int(groups) if groups else None, **more)
    return KNOWN.get(case.name, case)


def _read(text: str) -> list[Case]:
    """The cases of a part of cases.txt: of each section forward, then backward, as it has them."""
    found: list[Case] = []
    families: list[Family] = []
    for line in filter(None, (line.partition("#")[0].strip() for line in text.splitlines())):
        if line.startswith("["):
            families = [FAMILIES[name.removeprefix("-")] for name in line.strip("[]").split()]
            continue
        size, types, *words = line.split()
        per = [word for word in words if word == "per-token"]
        for family in families:
            targets = words[len(per) :] or ["-" for way in family.ways]
            for way, target in zip(family.ways, targets, strict=True):
                case = parse_case(" ".join([size, types, f"{family.name}{way}", *per]))
                found.append(replace(case, target=None if target == "-" else float(target)))
    order = {name: place for place, name in enumerate(dict.fromkeys(case.op for case in found))}
    return sorted(found, key=lambda case: order[case.op])


KNOWN: dict[str, Case] = {}  # the cases of the page by name, with their targets
_ON_PAGE, _JUDGED = (Path(__file__).with_name("cases.txt")).read_text().split("=== judged alone")
CASES = tuple(_read(_ON_PAGE))
KNOWN |= {case.name: case for case in CASES}

# The list by which a change of the kernels is judged has, beside cases.txt, every usual width at
# four heights, in which the families of rows and the types take turns.
WIDTHS = (64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1152, 1280, 1536, 1792, 2048, 2304,
          2432, 2560, 2880, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 12288, 16384)  # fmt: skip
HEIGHTS = (1, 64, 4096, 262_144)
LARGEST = 1 << 27  # elements
_TYPES = ("bf16+fp32", "float16", "float32", "bf16+fp32>fp32", "bfloat16")
_GRID = ("rms_", "add_", "silu_", "add_rms_", "gelu_", "ada_", "add_ada_")


def _grid() -> Iterator[Case]:
    for i, cols in enumerate(WIDTHS):
        for j, rows in enumerate(min(height, LARGEST // cols) for height in HEIGHTS):
            other, types = FAMILIES[_GRID[(i + 2 * j) % len(_GRID)]], _TYPES[(i + j) % len(_TYPES)]
            for family, kind in ((FAMILIES[""], "bfloat16"), (FAMILIES[""], types), (other, types)):
                if family.layout == SAMPLES:
                    tokens = math.gcd(rows, 8)
                    size = f"{tokens}x{rows // tokens}x{cols}"
                    kind = "bf16*fp32" if "+" in kind else kind
                else:
                    size = f"{rows}x{cols}"
                yield from (parse_case(f"{size} {kind} {family.name}{way}") for way in family.ways)


def the_list() -> tuple[Case, ...]:
    """The cases by which a change of the kernels is judged, each once."""
    return tuple({case.name: case for case in (*CASES, *_read(_JUDGED), *_grid())}.values())
