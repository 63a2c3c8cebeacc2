# SPDX-License-Identifier: Apache-2.0
"""The benchmark cases: their shapes, the least number of bytes they move, and their targets.

A speed is judged by its ratio to copy speed: (bytes that must move / time) over (bytes of 2 tensors
/ time of a copy), both times from one run. A target is such a ratio too, so it holds on another day
or another device. Some targets are computed from a table of microseconds on an H200, which has the
copy time of the same run.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import torch

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
SHORT_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
_SHORT = {name: short for short, name in SHORT_NAMES.items()}

EPS = 1e-5
SCALE = 2.0  # the factor in the gelu_scale operators
ACTIVATIONS = {"gelu_scale": ("gelu", SCALE), "gelu": ("gelu", 1.0), "silu": ("silu", 1.0)}
OPS = (
    "forward",
    "backward",
    "gelu_scale_forward",
    "gelu_scale_backward",
    "add_forward",
    "add_backward",
    "silu_forward",
    "gelu_forward",
    "ada_forward",
    "ada_backward",
    "add_ada_forward",
    "add_ada_backward",
    "rms_forward",
    "rms_backward",
    "add_rms_forward",
    "add_rms_backward",
    "ada_rms_forward",
    "ada_rms_backward",
)
PER_SAMPLE, PER_TOKEN = "sample", "token"  # whether a modulation is given per sample or per token


@dataclass(frozen=True)
class Case:
    """One operator at one size. `target` is the ratio to copy speed that it should reach, if any.

    `dtype` is the dtype of x, `weight_dtype` that of weight and bias, and `out_dtype` that of y and
    its gradient dy. `weight_dtype` and `out_dtype` are None where they equal `dtype`.

    A modulated norm has neither weight nor bias. Its rows are the tokens of `samples` samples.
    Shift and scale, and with a residual also gate, are given per sample or per token
    (`modulation`), in `modulation_dtype`, which is None where it equals `dtype`.
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

    def __post_init__(self) -> None:
        if not self.modulated == (self.samples is not None) == (self.modulation is not None):
            raise ValueError(f"samples and modulation belong to the ada operators, got {self.op}")
        if self.modulation not in (None, PER_SAMPLE, PER_TOKEN):
            raise ValueError(
                f"modulation is {PER_SAMPLE!r} or {PER_TOKEN!r}, got {self.modulation!r}"
            )
        if self.samples is not None and (self.samples < 1 or self.rows % self.samples):
            raise ValueError(f"{self.rows} rows are not those of {self.samples} equal samples")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def torch_weight_dtype(self) -> torch.dtype:
        return DTYPES[self.weight_dtype or self.dtype]

    @property
    def torch_out_dtype(self) -> torch.dtype:
        return DTYPES[self.out_dtype or self.dtype]

    @property
    def torch_modulation_dtype(self) -> torch.dtype:
        return DTYPES[self.modulation_dtype or self.dtype]

    @property
    def modulated(self) -> bool:
        return self.op.removeprefix("add_").startswith("ada_")

    @property
    def is_rms(self) -> bool:
        """Whether the norm is RMSNorm, without a bias, and with a weight unless it is modulated."""
        return "rms_" in self.op

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of x: (samples, tokens, cols) where there are samples, else (rows, cols)."""
        if self.samples is None:
            return (self.rows, self.cols)
        return (self.samples, self.rows // self.samples, self.cols)

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
        if not self.mixed and self.modulation_dtype is None:
            return self.dtype
        word = _SHORT[self.dtype]
        if self.weight_dtype is not None:
            word += f"+{_SHORT[self.weight_dtype]}"
        if self.modulation_dtype is not None:
            word += f"*{_SHORT[self.modulation_dtype]}"
        if self.out_dtype is not None:
            word += f">{_SHORT[self.out_dtype]}"
        return word

    @property
    def backward(self) -> bool:
        return self.op.endswith("backward")

    @property
    def residual(self) -> bool:
        return self.op.startswith("add_")

    @property
    def activation(self) -> tuple[str | None, float]:
        """The activation's name and the scale."""
        return ACTIVATIONS.get(self.op.rsplit("_", 1)[0], (None, 1.0))

    @property
    def tensor_bytes(self) -> int:
        return self.rows * self.cols * self.torch_dtype.itemsize

    @property
    def bytes(self) -> int:
        """The least number of bytes that the operator must move.

        Forward reads x, weight, bias and writes y; a residual adds one read and one write.
        Backward reads x, dy, weight and writes dx, dweight, dbias; an activation reads bias too;
        a residual adds the read of its gradient (input and residual share the one dx). RMSNorm
        has no bias.
        A modulated forward reads x, shift, scale and writes y; a modulated backward reads x, dy,
        scale and writes dx, dshift, dscale, without dshift where that is dy (`is_dshift_dy`). With
        a gate, forward also reads residual and gate and writes the sum; backward also reads the
        sum's gradient, input and gate and writes dinput and dgate.
        """
        size = self.rows * self.cols
        x, y = size * self.torch_dtype.itemsize, size * self.torch_out_dtype.itemsize
        if self.modulated:
            modulation = math.prod(self.modulation_shape) * self.torch_modulation_dtype.itemsize
            gated = self.residual
            if self.backward:
                modulations = 3 + 2 * gated - self.is_dshift_dy
                return (2 + 3 * gated) * x + y + modulations * modulation
            return (1 + 2 * gated) * x + y + (2 + gated) * modulation
        column = self.cols * self.torch_weight_dtype.itemsize
        if self.backward:
            columns = 3 + (self.activation[0] is not None) - self.is_rms
            return (2 + self.residual) * x + y + columns * column
        return (1 + 2 * self.residual) * x + y + (2 - self.is_rms) * column

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
    def floor(self) -> float | None:
        """The ratio to copy speed that a large case should reach whatever its target, or None.

        It is for tensors above 64 MiB in one dtype other than float64. In forward it is for rows
        that the blocks which share them can hold. In backward it depends on whether a row and its
        gradient fit on one multiprocessor, fit on several, or need a second read.
        """
        if self.op not in ("forward", "backward") or self.tensor_bytes <= 64 << 20:
            return None
        if self.mixed or self.dtype == "float64":
            return None
        if not self.backward:
            return 0.93 if self.cols <= 262_144 else None
        if self.cols <= 32_768:
            return 0.85
        return 0.72 if self.cols <= 262_144 else 0.57

    @property
    def size(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def text(self) -> str:
        """The text from which `parse_case` makes this case."""
        per = " per-token" if self.modulation == PER_TOKEN else ""
        return f"{self.size} {self.types} {self.op}{per}"

    @property
    def name(self) -> str:
        per = " per-token" if self.modulation == PER_TOKEN else ""
        return f"{self.op} {self.size} {self.types}{per}"


def parse_case(text: str) -> Case:
    """A case from "ROWSxCOLS DTYPE OP", e.g. "32768x1024 bf16 backward".

    DTYPE may name the dtypes of the weights and of y too, as `Case.types` does: "bf16+fp32>fp32".
    A modulated norm is "SAMPLESxTOKENSxCOLS DTYPE OP", followed by "per-token" where shift, scale
    and gate are per token; DTYPE may name their dtype: "1x4608x3072 bf16*fp32 ada_forward".
    """
    words = text.split()
    per = [word for word in words[3:4] if word == "per-token"]
    try:
        shape, types, op = words[:3] if per else words
        sizes = [int(size) for size in shape.split("x")]
    except ValueError:
        raise ValueError(
            f'expected "ROWSxCOLS DTYPE OP" or "SAMPLESxTOKENSxCOLS DTYPE OP", got {text!r}'
        ) from None
    match = re.fullmatch(r"(\w+)(?:\+(\w+))?(?:\*(\w+))?(?:>(\w+))?", types)
    if match is None:
        raise ValueError(f'expected a dtype, or "X+WEIGHTS*MODULATIONS>Y", got {types!r}')
    names = [None if name is None else SHORT_NAMES.get(name, name) for name in match.groups()]
    for name in names:
        if name is not None and name not in DTYPES:
            raise ValueError(f"unknown dtype {name!r}: known are {', '.join(DTYPES)}")
    if op not in OPS:
        raise ValueError(f"unknown op {op!r}: known are {', '.join(OPS)}")
    modulated = op.removeprefix("add_").startswith("ada_")
    if len(sizes) != 2 + modulated or (per and not modulated):
        raise ValueError(f"expected {2 + modulated} sizes for {op}, got {text!r}")
    dtype = names[0]
    assert dtype is not None
    weight_dtype, modulation_dtype, out_dtype = (
        None if name == dtype else name for name in names[1:]
    )
    case = Case(
        op, math.prod(sizes[:-1]), sizes[-1], dtype,
        weight_dtype=weight_dtype, out_dtype=out_dtype, modulation_dtype=modulation_dtype,
        samples=sizes[0] if modulated else None,
        modulation=(PER_TOKEN if per else PER_SAMPLE) if modulated else None,
    )  # fmt: skip
    return next((known for known in CASES if known.name == case.name), case)


# (rows, cols, dtype, copy, forward target, backward target), microseconds on an H200.
_TABLE = (
    (16, 4_194_304, "float32", 130, 200, 330),
    (4_194_304, 64, "float32", 505, 515, 810),
    (32_768, 256, "bfloat16", 10.3, 10, 20),
    (32_768, 768, "bfloat16", 26.2, 27.4, 48),
    (32_768, 1024, "bfloat16", 34.6, 35.7, 62),
    (32_768, 2048, "bfloat16", 68, 71, 118),
    (32_768, 4096, "bfloat16", 130, 138, 220),
    (16_384, 5120, "bfloat16", 82, 88, 145),
    (16_384, 8192, "bfloat16", 129, 138, 225),
    (8192, 16_384, "bfloat16", 130, 134, 230),
    (8192, 32_768, "bfloat16", 257, 280, 470),
    (4096, 65_536, "bfloat16", 257, 285, 480),
    (2048, 262_144, "bfloat16", 505, 570, 960),
    (128, 1_048_576, "float32", 257, 300, 660),
    (64, 150_528, "float32", 20.5, 25, 45),
    (8192, 4096, "float32", 66, 67, 112),
    (4096, 2047, "float32", 18.2, 20, 34),
    (200_704, 96, "bfloat16", 20.5, 22, 40),
    (12_608, 768, "bfloat16", 11.4, 10.8, 24),
    (16_384, 1152, "bfloat16", 20.7, 22, 40),
    (512, 4096, "bfloat16", 4.0, 5.5, 11),
    (128, 1024, "bfloat16", 1.5, 2.2, 4.0),
    (1, 768, "bfloat16", 1.3, 2.0, 3.0),
)

# The fused operators, with their targets as ratios.
_FUSED = (
    *(Case(f"gelu_scale_{way}", 4_194_304, 64, "float32", target)
      for way, target in (("forward", 0.93), ("backward", 0.85))),
    *(Case(f"add_{way}", rows, cols, "bfloat16", target)
      for rows, cols in ((32_768, 1024), (32_768, 4096), (16_384, 8192))
      for way, target in (("forward", 0.90), ("backward", 0.83))),
    *(Case(f"{activation}_forward", 32_768, cols, "bfloat16", 0.90)
      for activation in ("silu", "gelu") for cols in (1024, 4096)),
)  # fmt: skip


# Further cases: mixed and other dtypes, shifted rows, very long rows, small tensors. A case without
# a target must still not be slower than eager, and benchmarks.compare compares it with the build
# before.
_GUARDED = (
    # bfloat16 x beside float32 parameters; y in bfloat16, and in float32, as autocast makes it.
    *(Case(op, rows, cols, "bfloat16", weight_dtype="float32", out_dtype=out_dtype)
      for op in ("forward", "backward")
      for rows, cols in ((32_768, 768), (32_768, 1024), (32_768, 4096), (16_384, 8192),
                         (12_608, 768))
      for out_dtype in (None, "float32")),
    *(Case(op, 32_768, 1024, "bfloat16", weight_dtype="float32")
      for op in ("add_forward", "add_backward")),
    *(Case(op, 32_768, 1024, "float16", weight_dtype="float32", out_dtype="float32")
      for op in ("forward", "backward")),
    *(Case(op, rows, cols, "float16")
      for op in ("forward", "backward")
      for rows, cols in ((32_768, 768), (32_768, 1024), (32_768, 4096), (16_384, 8192))),
    *(Case(op, rows, cols, "float64")
      for op in ("forward", "backward") for rows, cols in ((4096, 1024), (1_048_576, 64))),
    # Shifted rows: few of them begin at a multiple of 16 bytes.
    *(Case(op, 32_768, 1021, "bfloat16") for op in ("forward", "backward")),
    # Long rows, and a million short ones.
    *(Case(op, rows, cols, dtype)
      for op in ("forward", "backward")
      for rows, cols, dtype in ((300, 99_991, "float32"), (48, 442_368, "float32"),
                                (32, 2_097_152, "bfloat16"), (1_000_003, 37, "float32"))),
    # Small tensors, and one of odd columns.
    *(Case(op, rows, cols, "bfloat16")
      for op in ("forward", "backward")
      for rows, cols in ((8192, 768), (4096, 1024), (2048, 2048), (5000, 3073))),
)  # fmt: skip

# Targets as ratios, which replace the target that a case has already, if any.
_RATIOS: dict[tuple[str, str], float] = {
    **{(f"{size} bf16+fp32>fp32", op): ratio
       for size in ("32768x768", "32768x1024", "32768x4096", "16384x8192")
       for op, ratio in (("forward", 0.93), ("backward", 0.92))},
    **{(f"{size} bf16+fp32", "forward"): 0.95
       for size in ("32768x768", "32768x1024", "32768x4096", "16384x8192", "12608x768")},
    ("4096x65536 bfloat16", "forward"): 0.93,
    ("2048x262144 bfloat16", "forward"): 0.93,
    ("128x1048576 float32", "forward"): 0.93,
    ("64x150528 float32", "forward"): 0.85,
    ("300x99991 float32", "forward"): 0.85,
    ("48x442368 float32", "forward"): 0.85,
    ("16x4194304 float32", "forward"): 0.80,
    ("16x4194304 float32", "backward"): 0.66,
    ("128x1048576 float32", "backward"): 0.80,
    ("32x2097152 bfloat16", "backward"): 0.60,
    ("8192x32768 bfloat16", "backward"): 0.87,
    ("4096x65536 bfloat16", "backward"): 0.87,
    ("2048x262144 bfloat16", "backward"): 0.87,
    ("4096x2047 float32", "backward"): 0.82,
    ("64x150528 float32", "backward"): 0.75,
    ("5000x3073 bfloat16", "backward"): 0.88,
    ("8192x768 bfloat16", "backward"): 0.80,
    ("4096x1024 bfloat16", "backward"): 0.80,
    ("2048x2048 bfloat16", "backward"): 0.80,
    ("32768x1024 bfloat16", "gelu_forward"): 0.95,
    ("32768x4096 bfloat16", "gelu_forward"): 0.95,
}  # fmt: skip


# Modulated norms: samples x tokens x cols of the diffusion transformers named beside them.
_MODULATED = (
    (1, 4608, 3072, "bfloat16", PER_SAMPLE, None),  # Flux
    (1, 4608, 3072, "bfloat16", PER_TOKEN, None),
    (64, 256, 1152, "bfloat16", PER_SAMPLE, None),  # DiT-XL/2
    (4, 4250, 2432, "bfloat16", PER_SAMPLE, None),  # SD3.5-large
    (8, 4096, 1152, "bfloat16", PER_SAMPLE, None),  # PixArt
    (1, 32_760, 5120, "bfloat16", PER_SAMPLE, None),  # Wan 14B
    (1, 32_760, 5120, "bfloat16", PER_SAMPLE, "float32"),  # Wan 14B's own dtype of modulations
    (1, 75_600, 1536, "bfloat16", PER_SAMPLE, "float32"),  # Wan 1.3B
    (2, 17_776, 3072, "bfloat16", PER_SAMPLE, None),  # CogVideoX
    (32, 1024, 1024, "bfloat16", PER_SAMPLE, None),
    (32, 1024, 1024, "float16", PER_SAMPLE, None),
    (32, 1024, 1024, "float32", PER_SAMPLE, None),
    # Shifted rows: few of them begin at a multiple of 16 bytes.
    (64, 256, 1151, "bfloat16", PER_SAMPLE, None),
    (8, 4096, 1021, "bfloat16", PER_SAMPLE, None),
)

# Targets as ratios to copy speed: for tensors of 64 MB and more, and for smaller ones.
_MODULATED_TARGETS = {
    "ada_forward": (0.93, 0.88),
    "add_ada_forward": (0.93, 0.90),
    "ada_backward": (0.85, 0.72),
    "add_ada_backward": (0.80, 0.72),
}


# RMSNorm: rows x cols in bfloat16, and the targets forward and backward on an H100.
_RMS = (
    (32_768, 768, 0.97, 0.88),
    (32_768, 2048, 0.97, 0.90),
    (32_768, 4096, 0.98, 0.92),
    (16_384, 8192, 0.98, 0.92),
    (8192, 16_384, 0.98, 0.88),
    (4096, 2880, 0.97, 0.80),
)
_RMS_CASES = (
    *(Case(f"rms_{way}", rows, cols, "bfloat16", target)
      for rows, cols, *targets in _RMS
      for way, target in zip(("forward", "backward"), targets, strict=True)),
    *(Case(f"add_rms_{way}", 32_768, 4096, "bfloat16", target)
      for way, target in (("forward", 0.98), ("backward", 0.93))),
    *(Case(f"rms_{way}", 32_768, 4096, "bfloat16", weight_dtype="float32")
      for way in ("forward", "backward")),
)  # fmt: skip


def _modulated_case(op: str, size: tuple[int, int, int, str, str, str | None]) -> Case:
    samples, tokens, cols, dtype, modulation, modulation_dtype = size
    case = Case(op, samples * tokens, cols, dtype, samples=samples, modulation=modulation,
                modulation_dtype=modulation_dtype)  # fmt: skip
    large, small = _MODULATED_TARGETS[op.replace("rms_", "")]
    return replace(case, target=large if case.tensor_bytes >= 64e6 else small)


def _table_case(op: str, row: tuple[int, int, str, float, float, float]) -> Case:
    rows, cols, dtype, copy, forward, backward = row
    case = Case(op, rows, cols, dtype)
    ratio = case.ratio(backward if case.backward else forward, copy)
    return Case(op, rows, cols, dtype, round(ratio, 3))


def _with_ratio(case: Case) -> Case:
    return replace(case, target=_RATIOS.get((f"{case.size} {case.types}", case.op), case.target))


CASES: tuple[Case, ...] = (
    *(_with_ratio(case) for case in (
        *(_table_case(op, row) for op in ("forward", "backward") for row in _TABLE),
        *_FUSED,
        *_GUARDED,
        *_RMS_CASES,
    )),
    *(_modulated_case(op, size) for op in _MODULATED_TARGETS for size in _MODULATED),
    # One modulated RMSNorm each way: the kernels are those of the modulated LayerNorm.
    *(_modulated_case(op, _MODULATED[0]) for op in ("ada_rms_forward", "ada_rms_backward")),
)  # fmt: skip
