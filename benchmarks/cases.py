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
from typing import Any

import torch

from benchmarks.families import FAMILIES, HEADS, IMAGE, ROWS, SAMPLES, Family, family_of, ops_of

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
SHORT_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
_SHORT = {name: short for short, name in SHORT_NAMES.items()}
OPS = ops_of(*FAMILIES.values())
PER_SAMPLE, PER_TOKEN = "sample", "token"  # whether a modulation is given per sample or per token
SIZES = {ROWS: "ROWSxCOLS", SAMPLES: "SAMPLESxTOKENSxCOLS", IMAGE: "NxCxHxW",
         HEADS: "SAMPLESxPOSITIONSxHEADSxCOLS"}  # fmt: skip


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
    def backward(self) -> bool:
        return self.op.endswith("backward")

    @property
    def is_rms(self) -> bool:
        """Whether the norm is RMSNorm, without a bias, and with a weight unless it is modulated."""
        return self.family.is_rms

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
        tensors, columns, modulations = (
            numbers[self.backward]
            for numbers in (self.family.tensors, self.family.columns, self.family.modulations)
        )
        size = self.rows * self.cols
        total = (tensors - 1) * size * self.torch_dtype.itemsize
        total += size * self.torch_out_dtype.itemsize
        total += columns * math.prod(self.param_shape) * self.torch_weight_dtype.itemsize
        if modulations:
            count = modulations - (self.backward and self.is_dshift_dy)
            total += count * math.prod(self.modulation_shape) * self.torch_modulation_dtype.itemsize
        return total

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
    def text(self) -> str:
        """The text from which `parse_case` makes this case."""
        per = " per-token" if self.modulation == PER_TOKEN else ""
        return f"{self.size} {self.types} {self.op}{per}"

    @property
    def name(self) -> str:
        per = " per-token" if self.modulation == PER_TOKEN else ""
        return f"{self.op} {self.size} {self.types}{per}"


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


# The cases of each family: the size, the dtypes, and the targets forward and backward, as ratios to
# copy speed; those of rows and modulations are of an H200, the others of an H100. Groups of
# channels have the same targets with an activation and without. A case without a target must still
# not be slower than eager, and benchmarks.compare compares it with the build before.
_TABLE = {
    "": """
        16x4194304 float32              0.8   0.66
        4194304x64 float32              0.981 0.935
        32768x256 bfloat16              1.03  0.773
        32768x768 bfloat16              0.956 0.819
        32768x1024 bfloat16             0.969 0.837
        32768x2048 bfloat16             0.958 0.864
        32768x4096 bfloat16             0.942 0.886
        16384x5120 bfloat16             0.932 0.848
        16384x8192 bfloat16             0.935 0.86
        8192x16384 bfloat16             0.97  0.848
        8192x32768 bfloat16             0.918 0.87
        4096x65536 bfloat16             0.93  0.87
        2048x262144 bfloat16            0.93  0.87
        128x1048576 float32             0.93  0.8
        64x150528 float32               0.85  0.75
        8192x4096 float32               0.985 0.884
        4096x2047 float32               0.91  0.82
        200704x96 bfloat16              0.932 0.769
        12608x768 bfloat16              1.056 0.713
        16384x1152 bfloat16             0.941 0.776
        512x4096 bfloat16               0.729 0.547
        128x1024 bfloat16               0.687 0.567
        1x768 bfloat16                  1.3   1.3
        # bfloat16 x beside float32 parameters; y in bfloat16, and in float32, as autocast makes it.
        32768x768 bf16+fp32             0.95  -
        32768x768 bf16+fp32>fp32        0.93  0.92
        32768x1024 bf16+fp32            0.95  -
        32768x1024 bf16+fp32>fp32       0.93  0.92
        32768x4096 bf16+fp32            0.95  -
        32768x4096 bf16+fp32>fp32       0.93  0.92
        16384x8192 bf16+fp32            0.95  -
        16384x8192 bf16+fp32>fp32       0.93  0.92
        12608x768 bf16+fp32             0.95  -
        12608x768 bf16+fp32>fp32        -     -
        32768x1024 fp16+fp32>fp32       -     -
        32768x768 float16               -     -
        32768x1024 float16              -     -
        32768x4096 float16              -     -
        16384x8192 float16              -     -
        4096x1024 float64               -     -
        1048576x64 float64              -     -
        # Shifted rows: few of them begin at a multiple of 16 bytes.
        32768x1021 bfloat16             -     -
        # Long rows, and a million short ones.
        300x99991 float32               0.85  -
        48x442368 float32               0.85  -
        32x2097152 bfloat16             -     0.6
        1000003x37 float32              -     -
        # Small tensors, and one of odd columns.
        8192x768 bfloat16               -     0.8
        4096x1024 bfloat16              -     0.8
        2048x2048 bfloat16              -     0.8
        5000x3073 bfloat16              -     0.88
    """,
    "gelu_scale_": """
        4194304x64 float32              0.93  0.85
    """,
    "add_": """
        32768x1024 bfloat16             0.9   0.83
        32768x4096 bfloat16             0.9   0.83
        16384x8192 bfloat16             0.9   0.83
        32768x1024 bf16+fp32            -     -
    """,
    "silu_": """
        32768x1024 bfloat16             0.9
        32768x4096 bfloat16             0.9
    """,
    "gelu_": """
        32768x1024 bfloat16             0.95
        32768x4096 bfloat16             0.95
    """,
    "ada_": """
        1x4608x3072 bfloat16            0.88  0.72  # Flux
        1x4608x3072 bfloat16 per-token  0.88  0.72
        64x256x1152 bfloat16            0.88  0.72  # DiT-XL/2
        4x4250x2432 bfloat16            0.93  0.85  # SD3.5-large
        8x4096x1152 bfloat16            0.93  0.85  # PixArt
        1x32760x5120 bfloat16           0.93  0.85  # Wan 14B
        1x32760x5120 bf16*fp32          0.93  0.85  # Wan 14B
        1x75600x1536 bf16*fp32          0.93  0.85  # Wan 1.3B
        2x17776x3072 bfloat16           0.93  0.85  # CogVideoX
        32x1024x1024 bfloat16           0.93  0.85
        32x1024x1024 float16            0.93  0.85
        32x1024x1024 float32            0.93  0.85
        64x256x1151 bfloat16            0.88  0.72
        8x4096x1021 bfloat16            0.93  0.85
    """,
    "add_ada_": """
        1x4608x3072 bfloat16            0.9   0.72
        1x4608x3072 bfloat16 per-token  0.9   0.72
        64x256x1152 bfloat16            0.9   0.72
        4x4250x2432 bfloat16            0.93  0.8
        8x4096x1152 bfloat16            0.93  0.8
        1x32760x5120 bfloat16           0.93  0.8
        1x32760x5120 bf16*fp32          0.93  0.8
        1x75600x1536 bf16*fp32          0.93  0.8
        2x17776x3072 bfloat16           0.93  0.8
        32x1024x1024 bfloat16           0.93  0.8
        32x1024x1024 float16            0.93  0.8
        32x1024x1024 float32            0.93  0.8
        64x256x1151 bfloat16            0.9   0.72
        8x4096x1021 bfloat16            0.93  0.8
    """,
    "rms_": """
        32768x768 bfloat16              0.97  0.88
        32768x2048 bfloat16             0.97  0.9
        32768x4096 bfloat16             0.98  0.92
        16384x8192 bfloat16             0.98  0.92
        8192x16384 bfloat16             0.98  0.88
        4096x2880 bfloat16              0.97  0.8
        32768x4096 bf16+fp32            -     -
    """,
    "add_rms_": """
        32768x4096 bfloat16             0.98  0.93
    """,
    "channels_": """
        64x96x56x56 bfloat16            0.88  0.75
        64x384x14x14 bfloat16           0.75  0.6
        4x256x256x256 bfloat16          0.9   0.8
        8x64x256x256 bfloat16           0.9   0.78
        8x256x64x64 float32             0.88  0.75
    """,
    "channels_nhwc_": """
        64x96x56x56 bfloat16            0.83  0.7
        64x384x14x14 bfloat16           0.7   0.55
        4x256x256x256 bfloat16          0.85  0.75
        8x64x256x256 bfloat16           0.85  0.73
        8x256x64x64 float32             0.83  0.7
    """,
    "ada_rms_": """
        1x4608x3072 bfloat16            0.88  0.72
    """,
    "qk_norm_": """
        1x4608x24x128 bfloat16          0.85  0.75
        2x4096x32x128 bfloat16          0.88  0.78
        8x4096x16x64 bfloat16           0.9   0.75
    """,
    "group_": """
        1x128x1024x1024 bfloat16        0.82  0.74
        1x256x512x512 bfloat16          0.84  0.75
        2x320x128x128 bfloat16          0.7   0.6
        1x512x128x128 bfloat16          0.78  0.66
        2x640x64x64 bfloat16            0.6   0.56
        2x1280x32x32 bfloat16           0.62  0.48
        64x256x56x56 bfloat16           0.84  0.7
    """,
    "group_nhwc_": """
        1x128x1024x1024 bfloat16        0.6   0.56
        1x256x512x512 bfloat16          0.6   0.56
        2x320x128x128 bfloat16          0.53  0.48
        1x512x128x128 bfloat16          0.45  0.44
        2x640x64x64 bfloat16            0.44  0.42
        2x1280x32x32 bfloat16           0.34  0.35
        64x256x56x56 bfloat16           0.6   0.42
    """,
    "group_silu_": """
        1x128x1024x1024 bfloat16        0.82  0.74
        1x256x512x512 bfloat16          0.84  0.75
        2x320x128x128 bfloat16          0.7   0.6
        1x512x128x128 bfloat16          0.78  0.66
        2x640x64x64 bfloat16            0.6   0.56
        2x1280x32x32 bfloat16           0.62  0.48
        64x256x56x56 bfloat16           0.84  0.7
        2x320x128x128 float32           -     -
        2x320x128x128 float16           -     -
        2x320x64x64 bf16+fp32>fp32      -     -
        16x256x64x64/256 bfloat16       -     -  # InstanceNorm
        64x768x14x14/1 bfloat16         -     -  # PoolFormer
    """,
    "group_silu_nhwc_": """
        1x128x1024x1024 bfloat16        0.6   0.56
        1x256x512x512 bfloat16          0.6   0.56
        2x320x128x128 bfloat16          0.53  0.48
        1x512x128x128 bfloat16          0.45  0.44
        2x640x64x64 bfloat16            0.44  0.42
        2x1280x32x32 bfloat16           0.34  0.35
        64x256x56x56 bfloat16           0.6   0.42
    """,
    # Qwen3-Next's heads, Mamba 2's rows, and the same in groups of 1,024; small batches.
    **dict.fromkeys(
        ("gated_", "gate_first_"),
        """
        524288x128 bfloat16             1     0.88
        16384x8192 bfloat16             1     0.88
        131072x1024 bfloat16            1     0.88
        32x128 bfloat16                 -     -
        4096x128 bfloat16               -     -
        128x8192 bfloat16               -     -
        524288x128 bf16+fp32            -     -
    """,
    ),
    "qk_norm_rope_": """
        1x4608x24x128 bfloat16          0.8   0.7
        2x4096x32x128 bfloat16          0.83  0.73
        8x4096x16x64 bfloat16           0.83  0.7
    """,
}


def _cases(family: Family, table: str) -> list[Case]:
    found = []
    for line in filter(None, (line.partition("#")[0].strip() for line in table.splitlines())):
        size, types, *words = line.split()
        per = [word for word in words if word == "per-token"]
        targets = words[len(per) :] or ["-" for way in family.ways]
        for way, target in zip(family.ways, targets, strict=True):
            case = parse_case(" ".join([size, types, f"{family.name}{way}", *per]))
            found.append(replace(case, target=None if target == "-" else float(target)))
    return sorted(found, key=lambda case: case.backward)


KNOWN: dict[str, Case] = {}  # the cases of the page by name, with their targets
CASES = tuple(case for name in _TABLE for case in _cases(FAMILIES[name], _TABLE[name]))
KNOWN |= {case.name: case for case in CASES}

# ---- The list by which a change of the kernels is judged: CASES, and what follows.

# What models and KernelBench's problems hold beside CASES (batches as large as 1 GB allows), and
# what is rare: long and odd rows, groups of odd sizes, rows of gates and of gated sums.
_MORE = {
    "": """
        16x4194304 float64                  # write-up 001
        8x1048576 float64
        4096x8192 float64
        16x4194303 float32
        32x2097151 bfloat16
        2048x262143 bfloat16
        4096x65535 bfloat16
        48x442369 float32
        64x150529 float32
        32768x4097 bfloat16
        32768x2047 bfloat16
        4096x12289 bfloat16
        8192x768 bf16+fp32                  # BERT-base
        8192x768 bf16+fp32>fp32
        50176x192 bf16+fp32>fp32            # Swin-T
        12544x384 bf16+fp32>fp32
        3136x768 bf16+fp32>fp32
        3136x1536 bf16+fp32>fp32
        8192x640 bfloat16                   # SDXL
        2048x1280 bfloat16
    """,
    "rms_": """
        16x4194304 float64
        16384x1024 bfloat16                 # Qwen3, Llama, Gemma 2 and 3, Phi-3
        16384x2048 bfloat16
        16384x2304 bfloat16
        16384x2560 bfloat16
        16384x3072 bfloat16
        16384x4096 bfloat16
        2048x2048 bfloat16
        32x2097152 bfloat16
        4096x65535 bfloat16
        32768x2047 bfloat16
        524288x128 bfloat16
    """,
    "add_rms_": """
        16384x2048 bfloat16
        16384x2560 bfloat16
        4096x2880 bfloat16
        128x4096 bfloat16
        32768x2047 bfloat16
    """,
    "add_": """
        8192x768 bf16+fp32>fp32
        12608x768 bfloat16
        2048x65536 bfloat16
        32768x2047 bfloat16
    """,
    "ada_": """
        32x256x1152 bfloat16                # DiT-XL/2
        2x4096x2432 bfloat16                # SD3.5-large, image and text
        2x333x2432 bfloat16
        1x32760x1536 bf16*fp32              # Wan 1.3B
        2x2048x12288 bfloat16
        4x1024x65536 bfloat16
        2x4096x3071 bfloat16
        2x4096x3072 bf16+fp32
    """,
    "add_ada_": """
        32x256x1152 bfloat16
        2x4096x2432 bfloat16
        2x333x2432 bfloat16
        1x32760x1536 bf16*fp32
        2x2048x12288 bfloat16
        2x4096x8193 bfloat16
        2x4096x3071 bfloat16
    """,
    "ada_rms_": """
        2x4096x3072 bfloat16
        2x4096x3071 bfloat16 per-token
    """,
    **dict.fromkeys(("channels_", "channels_nhwc_"), """
        64x192x28x28 bfloat16               # ConvNeXt-T
        64x768x7x7 bfloat16
        64x96x56x56 bf16+fp32>fp32
        8x64x256x256 bf16+fp32>fp32
        16x256x15x15 bfloat16
        4x100x33x31 float32
    """),
    **dict.fromkeys(("qk_norm_", "qk_norm_rope_"), """
        4x4096x16x128 bfloat16              # Qwen3
        8x2048x8x256 bfloat16               # Gemma 3
        1x4608x24x128 float16
        64x1x32x128 bfloat16
    """),
    **dict.fromkeys(("gated_", "gate_first_"), """
        262144x128 bfloat16                 # Qwen3-Next
        2048x4096 bfloat16                  # Mamba 2
        32768x1000 bfloat16
        16384x2049 bfloat16
        1024x12288 bfloat16
        16384x4096 float16
        16384x4096 float32
    """),
    **dict.fromkeys(("group_", "group_nhwc_"), """
        16x64x512x512/64 float32            # KernelBench, level 1
        16x64x512x512/8 float32
        512x128x17x17/8 float32             # level 2
        128x128x126x126/128 float32
        32x64x258x258/8 float32
        128x32x254x254/8 float32
        128x24x22x900/8 float32
        1024x16x13x841/4 float32
        1024x1x1x8192/1 float32
        1024x8192x1x1/16 float32
        1024x8192x1x1/256 float32
        1024x8192x1x1/512 float32
        32768x4096x1x1/64 float32
        16x128x34x1156/8 float32
        128x16x14x900/16 float32
        128x16x14x3844/8 float32
        128x64x126x126/16 float32
        2x320x128x128 float32
        8x512x1x16000/512 float32           # Wav2Vec2
    """),
    **dict.fromkeys(("group_silu_", "group_silu_nhwc_"), """
        2x960x128x128 bfloat16              # SDXL, VAE, HunyuanVideo, LTX-2
        2x1920x64x64 bfloat16
        2x2560x32x32 bfloat16
        1x512x256x256 bfloat16
        1x128x20x65536 bfloat16
        1x512x16x57600 bfloat16
        2x32x128x16384/32 float16           # nnU-Net
        2x64x64x4096/64 float16
        2x128x32x1024/128 float16
        2x320x8x64/320 float16
        128x16x31x3969/16 float32           # KernelBench
        5x30x37x41/5 bfloat16               # odd, small, one group, one position
        4x256x1x1/32 bfloat16
        64x768x14x14/1 bfloat16
        3x60x7x9/4 bfloat16
        1x96x13x17/3 float32
    """),
}  # fmt: skip

# Every usual width, at four heights: in every family of rows the types and families take turns.
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
    more = (case for name in _MORE for case in _cases(FAMILIES[name], _MORE[name]))
    return tuple({case.name: case for case in (*CASES, *more, *_grid())}.values())
