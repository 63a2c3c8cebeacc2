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

from benchmarks.families import FAMILIES, HEADS, IMAGE, ROWS, SAMPLES, Family, family_of

SHORT_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in SHORT_NAMES.values()}
_SHORT = {name: short for short, name in SHORT_NAMES.items()}
PER_SAMPLE, PER_TOKEN = "sample", "token"  # whether a modulation is given per sample or per token
SIZES = {ROWS: "ROWSxCOLS", SAMPLES: "SAMPLESxTOKENSxCOLS", IMAGE: "NxCxHxW",
         HEADS: "SAMPLESxPOSITIONSxHEADSxCOLS"}  # fmt: skip


def _dtype(field: str) -> Any:
    """A property of a case: the dtype that a field of it names, or x's."""
    return property(lambda case: DTYPES[getattr(case, field) or case.dtype])


@dataclass(frozen=True)
class Case:
    """One operator at one size. `target` is the ratio to copy speed that it should reach, if any.

    `sizes` are those that name it (`SIZES`). A norm's rows are the tokens of samples; the pixels of
    an image, or in a norm of groups a sample's group of channels (`of_groups`, if their number is
    not the family's); q's and k's heads at all positions, in a packed tensor.

    `dtype` is that of x, `weight_dtype` of weight and bias, `out_dtype` of y and its gradient dy,
    `modulation_dtype` of shift, scale and gate, which are given per sample or per token
    (`modulation`); those dtypes that equal `dtype` are None.
    """

    op: str
    sizes: tuple[int, ...]
    dtype: str
    target: float | None = None
    weight_dtype: str | None = None
    out_dtype: str | None = None
    modulation_dtype: str | None = None
    modulation: str | None = None
    of_groups: int | None = None

    def __post_init__(self) -> None:
        known, modulated = SIZES[self.family.layout], self.family.layout == SAMPLES
        if len(self.sizes) != known.count("x") + 1:
            raise ValueError(f"expected {known} for {self.op}, got {len(self.sizes)} sizes")
        wrong = self.of_groups and (not self.family.groups or self.sizes[1] % self.of_groups)
        if wrong or (self.modulation is not None) != modulated:
            raise ValueError(f"the modulation or the groups are not those of {self.op}")

    @property
    def family(self) -> Family:
        return family_of(self.op)

    torch_dtype, torch_weight_dtype = _dtype("dtype"), _dtype("weight_dtype")
    torch_out_dtype, torch_modulation_dtype = _dtype("out_dtype"), _dtype("modulation_dtype")

    @property
    def backward(self) -> bool:
        return self.op.endswith("backward")

    @property
    def groups(self) -> int | None:
        """The groups of a sample's channels, in a norm of groups."""
        return self.of_groups or self.family.groups

    @property
    def rows(self) -> int:
        if self.family.layout == IMAGE:
            return self.sizes[0] * (self.groups or math.prod(self.sizes[2:]))
        return math.prod(self.sizes[:-1]) * (2 if self.family.layout == HEADS else 1)

    @property
    def cols(self) -> int:
        is_image = self.family.layout == IMAGE
        return math.prod(self.sizes) // max(self.rows, 1) if is_image else self.sizes[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of x, of a norm over channels (N, H, W, C), whatever its order in memory; of a
        head operator that of qkv, (samples, positions, 3, heads, cols)."""
        first, second, *others = self.sizes
        if self.family.layout == HEADS:
            return (first, second, 3, *others)
        over_channels = self.family.layout == IMAGE and self.groups is None
        return (first, *others, second) if over_channels else self.sizes

    @property
    def param_shape(self) -> tuple[int, ...]:
        """The shape of weight and bias."""
        return self.sizes[1:2] if self.family.layout == IMAGE else (self.cols,)

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
        """The dtypes in one word: x's, then behind "+" that of the weights, behind "*" that of the
        modulations and behind ">" that of y, if it differs: "bf16+fp32>fp32"."""
        marks = (("+", self.weight_dtype), ("*", self.modulation_dtype), (">", self.out_dtype))
        others = "".join(f"{mark}{_SHORT[dtype]}" for mark, dtype in marks if dtype is not None)
        return f"{_SHORT[self.dtype]}{others}" if others else self.dtype

    @property
    def tensor_bytes(self) -> int:
        return self.rows * self.cols * self.torch_dtype.itemsize

    @property
    def bytes(self) -> int:
        """The least number of bytes that the operator must move.

        Forward reads its inputs and writes y, and the sum if there is a residual. Backward reads
        x (or the sum), dy (and the sum's gradient), weight and scale, gate and what it multiplied,
        with an activation also bias, and writes the gradients; input and residual of an addition
        share one dx. The few bytes of mean, rstd, and of heads' weights, cos and sin are left out.
        """
        family, inputs = self.family, {*self.family.inputs}
        x, y, weight, modulation = (dtype.itemsize for dtype in (
            self.torch_dtype, self.torch_out_dtype, self.torch_weight_dtype,
            self.torch_modulation_dtype))  # fmt: skip
        params = len(inputs & {"weight", "bias"})
        modulations = len(inputs & {"shift", "scale", "gate"}) if "shift" in inputs else 0
        if self.backward:
            params += params and 1 + (family.activation is not None)
            modulations += modulations and modulations - 1 - self.is_dshift_dy
        total = self.rows * self.cols * ((family.tensors[self.backward] - 1) * x + y)
        total += params * math.prod(self.param_shape) * weight
        total += modulations and modulations * math.prod(self.modulation_shape) * modulation
        return int(total)

    @property
    def is_dshift_dy(self) -> bool:
        """Whether each element of y has a shift of its own, of y's dtype. Its gradient is then
        dy itself, so autograd calls no operator to compute it."""
        return self.modulation == PER_TOKEN and self.torch_modulation_dtype == self.torch_out_dtype

    def ratio(self, us: float, copy_us: float) -> float:
        """Achieved bandwidth over copy speed."""
        return (self.bytes / us) / (2 * self.tensor_bytes / copy_us)

    @property
    def name(self) -> str:
        """The text from which `parse_case` makes this case."""
        size = "x".join(map(str, self.sizes)) + (f"/{self.of_groups}" if self.of_groups else "")
        per = " per-token" if self.modulation == PER_TOKEN else ""
        return f"{size} {self.types} {self.op}{per}"


def parse_case(text: str) -> Case:
    """A case from "SIZE DTYPE OP", e.g. "32768x1024 bf16 backward"; SIZE is that of `SIZES`, and of
    an image may end in "/G", the number of its groups.

    DTYPE may name the dtypes of weights, modulations and y too, as `Case.types` does:
    "bf16+fp32>fp32". Behind a modulated operator may stand "per-token", where shift, scale and gate
    are per token: "1x4608x3072 bf16*fp32 ada_forward per-token".
    """
    words = re.fullmatch(r"(\d+(?:x\d+)*)(?:/(\d+))? (\w+)(?:\+(\w+))?(?:\*(\w+))?(?:>(\w+))? "
                         r"(\w+)( per-token)?", text.strip())  # fmt: skip
    if words is None:
        raise ValueError('expected "SIZE DTYPE OP", e.g. "32768x1024 bf16 backward", of DTYPE '
                         f'"X+WEIGHTS*MODULATIONS>Y", got {text!r}')  # fmt: skip
    size, groups, *types, op, per = words.groups()
    dtype, *others = [name and SHORT_NAMES.get(name, name) for name in types]
    for name in (dtype, *others):
        if name and name not in DTYPES:
            raise ValueError(f"unknown dtype {name!r}: known are {', '.join(DTYPES)}")
    fields = ("weight_dtype", "modulation_dtype", "out_dtype")
    more: dict[str, Any] = {field: None if name == dtype else name
                            for field, name in zip(fields, others, strict=True)}  # fmt: skip
    family = family_of(op)
    if per or family.layout == SAMPLES:
        more["modulation"] = PER_TOKEN if per else PER_SAMPLE
    if groups and int(groups) != family.groups:
        more["of_groups"] = int(groups)
    case = Case(op, tuple(map(int, size.split("x"))), str(dtype), **more)
    return KNOWN.get(case.name, case)


def _read(text: str) -> list[Case]:
    """The cases of a part of cases.txt: of each section forward, then backward, as it has them."""
    found: dict[str, list[Case]] = {}
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
                case = replace(case, target=None if target == "-" else float(target))
                found.setdefault(case.op, []).append(case)
    return [case for of_op in found.values() for case in of_op]


KNOWN: dict[str, Case] = {}  # the cases of the page by name, with their targets
_ON_PAGE, _JUDGED = (Path(__file__).with_name("cases.txt")).read_text().split("=== judged alone")
CASES = tuple(_read(_ON_PAGE))
KNOWN |= {case.name: case for case in CASES}

WIDTHS = (64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1152, 1280, 1536, 1792, 2048, 2304,
          2432, 2560, 2880, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 12288, 16384)  # fmt: skip
HEIGHTS = (1, 64, 4096, 262_144)
LARGEST = 1 << 27  # elements
_TYPES = ("bf16+fp32", "float16", "float32", "bf16+fp32>fp32", "bfloat16")
_GRID = ("rms_", "add_", "silu_", "add_rms_", "gelu_", "ada_", "add_ada_")


def _grid() -> Iterator[Case]:
    """Every usual width at four heights; the families of rows and the types take turns."""
    for i, cols in enumerate(WIDTHS):
        for j, rows in enumerate(min(height, LARGEST // cols) for height in HEIGHTS):
            other, types = FAMILIES[_GRID[(i + 2 * j) % len(_GRID)]], _TYPES[(i + j) % len(_TYPES)]
            for family, kind in ((FAMILIES[""], "bfloat16"), (FAMILIES[""], types), (other, types)):
                size, samples = f"{rows}x{cols}", math.gcd(rows, 8)
                if family.layout == SAMPLES:
                    size = f"{samples}x{rows // samples}x{cols}"
                    kind = "bf16*fp32" if "+" in kind else kind
                yield from (parse_case(f"{size} {kind} {family.name}{way}") for way in family.ways)


def the_list() -> tuple[Case, ...]:
    """The cases by which a change of the kernels is judged, each once: the page's and more."""
    return tuple({case.name: case for case in (*CASES, *_read(_JUDGED), *_grid())}.values())
