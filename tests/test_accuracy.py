# SPDX-License-Identifier: Apache-2.0
"""The numerics contract (numerics.py) for problems of every family: small ones on every device, and
on CUDA those at both sides of every limit of the kernels."""

import functools
import itertools
from dataclasses import replace
from typing import Any

import families
import numerics
import pytest
import torch
from families import BF16, F16, F32, F64, MODULATED_DTYPES, Gated, of_groups, over_channels
from numerics import ACTIVATIONS, MODULATIONS, Problem, check, covering, modulated, rows_for

import fused_layernorm

pytestmark = pytest.mark.cpu_operators  # the tests judge the operators, on the CPU too

DTYPES: list[Any] = [(F32, None), (F16, None), (BF16, None), (F16, F32), (BF16, F32), (F64, None)]
MIXED = [(F32, None), (BF16, F32)]
WIDE = [(F32, None), (F16, None), (BF16, F32), (F64, None)]
AFFINE = ("both", "weight", "bias", "none")
rms: Any = {"statistic": "rms"}
rms_row: Any = functools.partial(Problem, statistic="rms")

# ---- Rows.

# Of x, weight and residual.
RESIDUALS = [
    (F32, None, F32), (BF16, None, BF16), (F16, None, F16), (BF16, None, F32), (BF16, F32, F32),
    (F16, None, F32), (F32, None, BF16), (F16, F32, BF16), (BF16, F32, BF16), (F64, None, F64),
    (F32, None, F64), (F64, F32, F32),
]  # fmt: skip
ROWS = [
    *(Problem((rows_for(cols), cols), *dtypes, statistic=statistic)
      for cols, dtypes, statistic in covering(
          [1, 2, 3, 31, 33, 64, 100, 127, 255, 257, 768, 1023, 1024, 1025, 2047], DTYPES,
          ("layer", "rms"))),
    *(Problem((rows, 1), dtype) for rows in (37, 300) for dtype in (F32, F16, BF16, F64)),
    *(Problem((5, cols), *dtypes)
      for cols in (4095, 4096, 5120, 8191, 8192, 16384, 20001, 32768) for dtypes in MIXED),
    *(Problem((37, cols), *dtypes, affine=affine)
      for cols, dtypes, affine in covering((3, 64, 1000, 5000), MIXED, AFFINE)),
    *(Problem(shape, normalized_ndim=ndim)
      for shape, ndim in [((4, 3, 5, 7), 3), ((40, 5, 6), 2), ((300,), 1), ((9, 1, 4, 1), 2),
                          ((2, 3, 1, 64), 1), ((2, 4, 16, 16), 3), ((5, 6), 2), ((1, 1), 1)]),
    *(Problem((32, cols), dtype, mean=1e4)
      for cols in (64, 1024, 4096, 65536) for dtype in (F32, F64)),
    # Activations, scales, other results, residuals.
    *(Problem((40, cols), *dtypes, activation=activation, scale=-1.75)
      for cols, activation, dtypes in covering((33, 64, 1024, 5000), ACTIVATIONS, WIDE)),
    Problem((4, 8), activation="gelu", scale=0),
    # A weight of zero has a gradient. y could not give it, because y lacks x there.
    Problem((50, 64), affine_scale=0.0), Problem((50, 64), affine_scale=0.0, activation="silu"),
    *(Problem((40, 96), activation=activation, affine=affine, scale=0.5)
      for activation in ACTIVATIONS[1:] for affine in AFFINE),
    # Small weights make small pre-activations, whose errors are judged by their own size.
    *(Problem((40, 512), dtype, activation=activation, affine_scale=affine_scale)
      for activation, affine_scale, dtype in covering(
          ACTIVATIONS[1:], (0.3, 0.1, 0.02), (F32, F16, BF16))),
    *(Problem((40, cols), *dtypes, out_dtype=out_dtype)
      for cols, dtypes, out_dtype in covering(
          (50, 1024), [*WIDE, (BF16, None)], (F32, F16, BF16, F64))),
    *(Problem((40, cols), x, weight, residual_dtype=residual)
      for cols in (3, 64, 1000, 4096) for x, weight, residual in RESIDUALS),
    *(Problem((6, 9, cols), residual_dtype=F32, layout=layout, dy_layout="contiguous")
      for cols in (7, 64, 4096)
      for layout in ("transposed leading", "odd column slice", "misaligned")),
    *(Problem((40, 257), BF16, F32, residual_dtype=F32, activation=activation, scale=0.25,
              out_dtype=out_dtype)
      for activation in ACTIVATIONS for out_dtype in (None, F32)),
    # RMSNorm: what is fused, an offset of the weight, groups of columns.
    rms_row((40, 256), BF16, residual_dtype=BF16), rms_row((40, 257), BF16, residual_dtype=F32),
    rms_row((40, 4096), F32, residual_dtype=F32, activation="silu"),
    rms_row((40, 256), BF16, F32, activation="gelu", scale=2.0, out_dtype=F32),
    rms_row((40, 264), F16, affine="weight", weight_offset=1.0),
    rms_row((40, 1021), BF16, weight_offset=1.0),
    rms_row((40, 4096), BF16, F32, weight_offset=1.0, residual_dtype=BF16),
    rms_row((300, 768), F32, weight_offset=-0.5, activation="gelu_tanh"),
    rms_row((9, 20_000), BF16, weight_offset=1.0), rms_row((3, 70_001), F32, weight_offset=1.0),
    rms_row((40, 256), F64, weight_offset=1.0, activation="gelu"),
    rms_row((40, 256), affine="none"), rms_row((40, 256), affine="bias"),
    rms_row((2, 6, 384), BF16, affine="none", shift=(2, 1, 384), scale_by=(2, 1, 384)),
    rms_row((2, 6, 384), BF16, shift=(2, 6, 384), scale_by=(2, 6, 384)),
    rms_row((2, 40, 1152), BF16, affine="none", residual_dtype=BF16,
            gate=(2, 1, 1152), shift=(2, 1, 1152), scale_by=(2, 1, 1152)),
    rms_row((2, 40, 257), F32, affine="none", residual_dtype=F32, gate=(2, 1, 257)),
    rms_row((4, 3, 5, 7), normalized_ndim=3), rms_row((64, 512), BF16, mean=100.0),
    rms_row((64, 1000), F32, mean=1000.0),
    *(rms_row((5, 3, 64), *dtypes, affine=affine, group_size=16,
              weight_offset=float(affine in ("both", "weight")), **options)
      for affine in AFFINE for dtypes in ((F32, F32), (BF16, BF16), (BF16, F32), (F64, F64))
      for options in ({}, {"out_dtype": F32}, {"activation": "gelu", "scale": 0.5})),
]  # fmt: skip
LONG = [(3, 65537), (64, 150528), (6, 262144), (3, 1_000_003), (4, 1_048_576), (2, 4_194_304)]
ROWS_ON_CUDA = [
    *(Problem(shape, *dtypes) for shape in LONG for dtypes in DTYPES),
    # So many rows that every team works on several of them, one after another.
    *(Problem((3000, cols), *dtypes)
      for cols in (33, 96, 250, 257, 768, 1000, 2047, 2060, 4097, 5120, 9000, 16384)
      for dtypes in (*MIXED, (BF16, None))),
    Problem((16, 64, 256, 256), normalized_ndim=3), Problem((70_000, 2, 33), normalized_ndim=2),
    *map(Problem, [(2, 64, 32, 64, 64), (300_000, 64), (70_001, 3), (1_000_000, 1)]),
    Problem((20_000, 1024), BF16, F32),
    Problem((17_001, 1024), BF16), Problem((4_400, 2049)),  # x and dy stay in L2 as other data does
    *(Problem((400_001, cols), *dtypes) for dtypes in (*MIXED, (BF16, None))
      for cols in (1, 3, 8, 17, 37, 48, 49, 63, 64)),
    # Forward's persistent blocks, too, have several rows.
    *(Problem(shape, *dtypes) for dtypes in DTYPES
      for shape in [(400, 20_480), (300, 40_000), (70, 65_536)]),
    *(Problem((1, cols), *dtypes, activation=activation)
      for cols, dtypes, activation in covering(
          (1, 2, 5, 64, 285, 768, 1492, 4096, 8191, 8192, 12_288, 16_384), DTYPES,
          (None, "gelu"))),
    *(Problem(shape, activation=activation, scale=0.5)
      for shape in [(6, 65536), (3, 1_000_003), (2, 4_194_304)] for activation in ACTIVATIONS),
    *(Problem(shape, *dtypes, residual_dtype=F32, activation="silu")
      for shape in [(64, 16384), (6, 65536), (3, 1_000_003), (2, 4_194_304)] for dtypes in MIXED),
    # LayerNorm(64) + GELU + scale on a result of KernelBench's transposed convolution.
    Problem((4, 64, 32, 64, 64), activation="gelu", scale=1.0 / 3),
]  # fmt: skip
# Both sides of the kernels' own boundaries: one element, and one vector.
BOUNDARIES = [
    Problem((max(3, 4096 // cols), cols), dtype)
    for row_bytes in (*(2**n for n in range(6, 18)), 10_240, 23_552, 28_672, 81_920, 114_688)
    for dtype in (F32, BF16, F64)
    for cols in (n + row_bytes // dtype.itemsize
                 for n in (-16 // dtype.itemsize, -1, 0, 1, 16 // dtype.itemsize))
]  # fmt: skip

# Forward alone. On the CPU without statistics half precision has another path.
FORWARD = [
    Problem((rows_for(cols), cols), *dtypes)
    for cols in (1, 2, 3, 64, 257, 2047, 8191) for dtypes in DTYPES
]  # fmt: skip
# By the ring: rows of one block and of many, with a last span that is whole, short, or that not all
# blocks and lanes have. With parameters in shared memory, and in registers (test_plan.py).
RING_TYPES = [
    (F32, F32, F32), (F32, F32, BF16), (F32, F32, F16), (BF16, BF16, BF16), (BF16, F32, BF16),
    (BF16, F32, F32), (F16, F16, F16), (F16, F32, F16), (F16, F32, F32),
]  # fmt: skip
RING_COLS = [40_960, 40_968, 65_536, 65_544, 131_072, 131_064, 150_528, 262_144, 1_000_008]
LONG_RING_COLS = [40_968, 150_528, 1_000_008, 3_000_008, 4_194_304, 4_325_376]
FORWARD_ON_CUDA = [
    *(Problem((3, cols), *types, out_dtype=y, forced=("ring long=0", None), **options)
      for cols, (*types, y), options in covering(
          RING_COLS, RING_TYPES, [{}, {"activation": "gelu", "scale": 0.5}])),
    *(Problem((2, cols * F32.itemsize // dtype.itemsize), dtype, statistic=statistic,
              forced=("ring long=1", None))
      for cols in LONG_RING_COLS for dtype in (F32, BF16) for statistic in ("layer", "rms")),
    *(Problem((5, 150_528), dtype, forced=("ring", None), **options)
      for dtype in (F32, BF16)
      for options in ({"activation": "silu"}, {"weight_offset": 1.0}, {"affine": "none"},
                      {"affine": "weight"}, {"mean": 1000.0},
                      {**rms, "weight_offset": 1.0, "affine": "weight"})),
    # Any number of blocks a row, also where most blocks and measurers have no columns.
    *(Problem((70, cols), forced=(f"ring blocks_per_row={blocks} long={long}", None))
      for cols, blocks, long in covering(
          [8, 2048, 4104, 16_392], [1, 2, 3, 7, 33, 132], [0, 1])),
    *(Problem((36, cols), dtype, statistic=statistic)
      for cols in (4, 60, 356, 512, 924, 1492, 3196) for dtype in (BF16, F16)
      for statistic in ("layer", "rms")),
]  # fmt: skip

# ---- Modulated rows.

BOTH = (MODULATED_DTYPES[0], MODULATED_DTYPES[3])
# (samples, rows of each): one group; groups of one row, of three rows, of many rows; more groups
# than an H200 has multiprocessors.
GROUPS = [(1, 1), (1, 40), (37, 1), (11, 3), (3, 257), (150, 2), (150, 5)]


def of_modulations(gated):
    given: dict[str, Any] = {"gated": gated}
    for cols, kind, dtypes in covering((48, 100), [*MODULATIONS], BOTH):
        yield modulated((4, 6, cols), kind, dtypes=dtypes, **given)
    for shape, ndim, modulations in [
        ((2, 3, 5, 64), 1, [(2, 3, 1, 64), (2, 1, 5, 64), (1, 3, 1, 64), (3, 1, 64)]),
        ((2, 5, 3, 20), 2, [(2, 1, 3, 20), (2, 5, 3, 20), (3, 20), (20,), (2, 1, 1, 20),
                            (2, 1, 3, 1), (3, 1)]),
    ]:  # fmt: skip
        for modulation in modulations:
            of_all: Any = {"residual_dtype": F32, "gate": modulation} if gated else {}
            of_all |= {"shift": modulation, "scale_by": modulation}
            yield Problem(shape, normalized_ndim=ndim, **of_all)
    for cols, dtypes in itertools.product((33, 256), MODULATED_DTYPES):
        yield modulated((3, 20, cols), dtypes=dtypes, **given)
    for cols, kind, dtypes, out_dtype in covering(
        (64, 1152), ("sample", "token"), BOTH, (F32, BF16, F64)
    ):
        yield modulated((3, 20, cols), kind, dtypes=dtypes, out_dtype=out_dtype, **given)
    for affine in ("weight", "bias"):
        yield modulated((3, 7, 40), affine=affine, **given)
    yield modulated((3, 9, 256), mean=1e4, **given)
    for groups, cols, kind in covering(GROUPS, (8, 64, 257, 1152), ("sample", "all")):
        yield modulated((*groups, cols), kind, **given)


def of_gates():
    for kinds in itertools.permutations(["all", "sample", "token", "position"], 3):
        names = ("shift", "scale_by", "gate")
        of = {n: MODULATIONS[kind](4, 6, 64) for n, kind in zip(names, kinds, strict=True)}
        yield modulated((4, 6, 64), gated=True, **of)
    for layout, kind, dtypes, cols in itertools.product(
        sorted({*numerics.LAYOUTS} - {"contiguous"}),
        ["all", "sample", "token", "position", "number of a token"], BOTH, (64, 75),
    ):  # fmt: skip
        how: Any = {"dtypes": dtypes, "modulation_layout": layout}
        yield modulated((3, 7, cols), kind, gated=True, **how)
    # Arguments that are absent.
    both = ((3, 1, 40), None)
    for gate, shift, scale, affine in itertools.product(both, both, both, ("both", "none")):
        some_of: Any = {"gate": gate, "shift": shift, "scale_by": scale, "affine": affine}
        yield Problem((3, 7, 40), residual_dtype=F32, **some_of)
        if not gate and (shift or scale):
            yield Problem((3, 7, 40), **some_of)


MODULATED_ON_CUDA = [
    modulated(shape, kind, gated=has_gate, dtypes=dtypes)
    for shape, kind, dtypes, has_gate in [
        *(((*groups, cols), kind, MODULATED_DTYPES[3], has_gate)
          for groups, cols, kind, has_gate in covering(
              [*GROUPS, (1, 5000), (5000, 1), (700, 7)], (1, 64, 1024, 1152, 3072, 8193),
              ("all", "sample", "token", "position"), (False, True), strength=3)),
        *((shape, "sample", MODULATED_DTYPES[0], has_gate)
          for shape in [(1, 3, 262_144), (2, 2, 1_000_003), (1, 1, 4_194_304)]
          for has_gate in (False, True)),
        *((shape, kind, MODULATED_DTYPES[3], has_gate)
          for shape, kind, has_gate in covering(
              [(2, 100_000, 64), (1, 16_384, 1152), (300, 257, 256)],
              ("all", "sample", "position"), (False, True))),
    ]
]  # fmt: skip
# Each width of models and boundary of the strategies, and its two neighbours.
WIDTHS = [
    modulated((3, 1 + 4096 // (3 * d), d), kind, gated=has_gate, dtypes=dtypes)
    for cols, dtypes, has_gate in covering(
        [1, 7, 8, 63, 64, 65, 256, 257, 512, 1023, 1024, 1152, 2432, 3072, 4095, 4096, 5120, 6144,
         8192, 8193, 16384, 16385, 32768, 40960, 50001],
        [MODULATED_DTYPES[i] for i in (0, 1, 3, 8)], [False, True])
    for d in (cols - 1, cols, cols + 1) if d > 0 for kind in ("sample", "token")
]  # fmt: skip

# ---- Over one dimension.

FUSED_CHANNELS = [
    over_channels((2, 24, 8, 8), BF16, activation="gelu", scale=2.0),
    over_channels((2, 24, 7, 7), BF16, F32, activation="silu", out_dtype=F32),
    over_channels((2, 24, 14, 14), F32, out_dtype=BF16, activation="gelu_tanh"),
    over_channels((2, 136, 9, 24), F16, out_dtype=F32, affine="bias", activation="relu"),
    over_channels((2, 24, 8, 8), BF16, out_dtype=F64), over_channels((2, 24, 8, 8), affine="none"),
    over_channels((2, 24, 8, 8), F32, affine="weight", statistic="rms", weight_offset=1.0),
    over_channels((2, 24, 8, 8), BF16, statistic="rms", activation="silu"),
    over_channels((2, 96, 16, 16), mean=1000.0), over_channels((2, 96, 16, 16), BF16, mean=100.0),
    over_channels((2, 96, 7, 7), F32, mean=1000.0, eps=0.0),
]  # fmt: skip
CHANNEL_DTYPES = [(F32, None), (BF16, None), (F16, F32), (F64, None)]
CHANNELS = [
    *(over_channels(shape, *dtypes, statistic=statistic)
      for shape, dtypes, statistic in covering(
          [(3, 5), (2, 1, 9), (2, 2, 8), (2, 7, 64), (2, 8, 5, 7), (3, 9, 4, 4), (2, 16, 7, 7),
           (2, 24, 14, 14), (2, 64, 3, 11), (1, 65, 8, 16), (2, 33, 2, 3, 4), (1, 96, 1, 1),
           (4, 127, 2, 2), (1, 256, 57, 3)], CHANNEL_DTYPES, ("layer", "rms"))),
    *(over_channels(shape, dtype, layout=layout, dy_layout=dy_layout, by_view=by_view)
      for layout, dy_layout, by_view, shape, dtype in covering(
          [*families.Channels.LAYOUTS], ["contiguous", "channels_last", "every second pixel"],
          [False, True], [(2, 24, 8, 8), (2, 16, 7, 7), (3, 40, 14, 14)], [F32, BF16],
          strength=3)),
    *(replace(p, by_view=by_view) for p in FUSED_CHANNELS for by_view in (False, True)),
]  # fmt: skip
CHANNELS_ON_CUDA = [
    # Both sides of what one thread, one group of threads and one block hold.
    *(over_channels((3, channels, *pixels), dtype, by_view=by_view)
      for channels, pixels, dtype in covering(
          [1, 2, 8, 9, 63, 64, 65, 127, 128, 129, 511, 513, 768, 1024, 1025, 2047, 2048, 2049,
           4095, 4096, 4097, 9000],
          [(7, 7), (8, 16), (7, 15), (14, 10), (1, 130)], [F32, BF16, F64])
      for by_view in (False, True)),
    # So many images that a block has several tiles, of which the last of a plane has fewer pixels.
    *(over_channels(shape, *dtypes, dy_layout=dy_layout, **options)
      for dy_layout, shape, dtypes, options in covering(
          ["contiguous", "channels_last"],
          [(600, 96, 8, 19), (1500, 24, 4, 19), (1500, 16, 7, 7), (900, 40, 14, 14)],
          CHANNEL_DTYPES, [{}, rms, {"activation": "gelu"}], strength=3)),
]  # fmt: skip

# ---- Groups of channels.

OF_GROUPS = [
    *(of_groups((2, 12, 5, 7), 3, dtypes, activation="silu") for dtypes in DTYPES),
    *(of_groups((2, 12, 4, 8), 3, (dtype, F32 if dtype in (F16, BF16) else None), out_dtype=out)
      for dtype in (F32, F16, BF16, F64) for out in (F32, F16, BF16, F64)),
    *(of_groups((3, 8, 6), 4, dtypes, activation=activation, scale=0.5)
      for activation in (*ACTIVATIONS, "leaky_relu")
      for dtypes in ((F32, None), (BF16, None), (F64, None))),
    *(of_groups((3, 24, 9), 4, dtypes, affine=affine, modulation=modulation, activation="silu")
      for affine in AFFINE for modulation in ("none", "both", "shift", "scale")
      for dtypes in MIXED),
    # Any dimensions and groups: one, as many as channels, of one, two, three and odd channels.
    *(of_groups(shape, groups, dtypes, activation="gelu_tanh")
      for shape, groups in (((3, 6), 2), ((2, 4), 1), ((2, 1, 5), 1), ((1, 7, 1, 1), 1),
                            ((4, 6, 8), 6), ((2, 15, 3, 5), 5), ((2, 3, 2, 3, 4), 1),
                            ((1, 64, 2, 4, 2, 2), 32), ((2, 96, 31), 32), ((5, 33, 8), 11))
      for dtypes in ((F32, None), (BF16, None))),
    # A group of one element has no variance.
    of_groups((2, 6, 1), 6), of_groups((3, 4), 4, (BF16, None)),
    *(of_groups((2, 8, 64), 4, dtypes, mean=1000.0) for dtypes in MIXED),
    *(of_groups((3, 16, 4, 6), 4, dtypes, layout=layout, dy_layout=dy_layout, activation="silu")
      for dtypes in ((F32, None), (BF16, None))
      for layout in families.Groups.LAYOUTS for dy_layout in (None, "contiguous", "channels_last")),
    of_groups((2, 16, 3, 4, 6), 4, (BF16, None), layout="channels_last"),
    of_groups((2, 40, 9), 8, (BF16, None), layout="channels_last", modulation="both"),
]  # fmt: skip
GROUPS_ON_CUDA = [
    *(call for call, _ in families.GROUP_KERNELS),
    *(replace(call, modulation="both") for call, strategies in families.GROUP_KERNELS
      if "one_position" in strategies),
    of_groups((2, 64, 64, 64), 4, (F64, None), activation="gelu"),
    of_groups((2, 6, 30, 33), 3, (F64, None)),
    of_groups((1, 1280, 32, 32), 32, (F64, None), layout="channels_last", modulation="both"),
]  # fmt: skip


def limits_of_groups():
    """Both sides of every limit in csrc/groups/tuning.h."""
    silu: Any = {"activation": "silu"}
    # Groups of so many bytes of bfloat16 (kHeldBackwardBytes, kHeldBytes or kClusterBackwardBytes,
    # twice that, kClusterBytes, kSplitBackwardBytes), of one channel or of three.
    for limit, vectors, channels in itertools.product(
        (28 << 10, 56 << 10, 112 << 10, 192 << 10, 400 << 10), (-1, 0, 1), (1, 3)
    ):
        positions = (limit // 16 // channels + vectors) * 8
        for layout in ("contiguous", "misaligned"):
            yield of_groups((3, 4 * channels, positions), 4, (BF16, None), layout=layout, **silu)
        yield of_groups((3, 4 * channels, positions + 3), 4, (BF16, F32), modulation="both")
    # Channels of so many vectors that a tile has a piece of one, or several channels; groups of so
    # many segments that a warp of blocks that share a group has the last, or none.
    for vectors, channels, dtype in itertools.product(
        (1, 2, 15, 16, 17, 511, 512, 513, 1023, 1024, 1025, 2049), (1, 2, 7, 64), (BF16, F32)
    ):
        width = 16 // dtype.itemsize
        yield of_groups((2, 3 * channels, vectors * width), 3, (dtype, None), **silu)
    # Channels that begin within vectors, or in the middle of them: of groups that a block or a
    # cluster holds, or that are cut into tiles.
    for positions, channels in itertools.product(
        (7, 8, 9, 12, 15, 33, 49, 196), (1, 2, 3, 8, 24, 600)
    ):
        shape = (2, 3 * channels, positions)
        for dtypes in ((BF16, None), (BF16, F32), (F16, None)):
            for out_dtype in (None, F32):
                yield of_groups(shape, 3, dtypes, out_dtype=out_dtype, **silu)
        yield of_groups(shape, 3, (F16, None), modulation="both", layout="misaligned", **silu)
    # Columns, slices and rows of tiles of channels_last; samples around kLargeSample.
    for channels, positions in itertools.product(
        (1, 8, 31, 32, 256, 2040, 2048, 2056, 4104), (1, 2, 63, 257, 1025)
    ):
        for g in (g for g in (1, 2, 8, 3, channels) if channels % g == 0):
            c = of_groups((2, channels, positions, 2), g, (BF16, None), layout="channels_last")
            yield replace(c, modulation="both", **silu)
        yield replace(c, layout="misaligned channels_last")
    # One position: lanes and blocks of a group, rows of samples side by side, single elements.
    for of_group, dtype, groups in itertools.product(
        (1, 8, 12, 31, 32, 33, 248, 256, 257, 264, 512, 513, 4096, 4097, 4104, 8192, 8200, 32_768,
         32_769), (F32, BF16), (1, 3)
    ):  # fmt: skip
        for samples, lies in ((2, {"weight_layout": "every second"}), (7, {"layout": "misaligned"}),
                              (3, {"weight_layout": "misaligned"}), (300, {})):  # fmt: skip
            yield of_groups((samples, groups * of_group), groups, (dtype, None), **lies)
        for y, weight in {F32: "contiguous", dtype: "every second"}.items():
            c = of_groups((40, groups * of_group, 1), groups, (dtype, F32), out_dtype=y, **silu)
            yield replace(c, weight_layout=weight)
    for beyond in (-1, 0, 1):
        shape = (1, 128, (8 << 20) // (128 * 2) + beyond)
        yield of_groups(shape, 32, (BF16, None), layout="channels_last")


# ---- Gates.

# Of x, gate and weight.
GATED_DTYPES = [
    (F32, F32, F32), (BF16, BF16, BF16), (BF16, BF16, F32), (F16, F32, F16), (F32, BF16, F32),
    (BF16, F64, BF16), (F64, F64, F64), (F64, F32, F64),
]  # fmt: skip
GATED_SHAPES: Any = [
    *(((4, 6, 40), {"out_dtype": out}) for out in (F32, F16, BF16, F64)),
    *(((4, 6, 40), {"affine": affine}) for affine in ("weight", "bias", "none")),
    *(((4, 6, 40), {"layout": layout, "gate_layout": of_gate})
      for layout, of_gate in itertools.product(Gated.LAYOUTS, repeat=2)),
    *((shape, {}) for shape in [(40,), (1, 8), (2, 3, 4, 8), (9, 1032), (2, 8200)]),
]  # fmt: skip
GATED = [
    Gated((8, 64), BF16, weight_offset=1.0, out_dtype=F32),  # added in float32
    *(Gated((5, 7, 64), x, weight, gate_dtype=gate, **form)
      for form in (*families.GATED_FORMS, {**families.GATED_FORMS[3], "weight_offset": 1.0})
      for x, gate, weight in GATED_DTYPES),
    *(Gated(shape, x, F32, gate_dtype=x, **form, **options)
      for form in (families.GATED_FORMS[0], families.GATED_FORMS[7]) for x in (BF16, F32)
      for shape, options in GATED_SHAPES),
]  # fmt: skip
# Weight's dtype (None: no weight), whether there is a bias, the activation, layouts of x and gate.
OF_KERNELS: Any = (
    ("same", False, "silu", "contiguous", "sliced"),
    (F32, False, "sigmoid", "sliced", "contiguous"),
    (None, False, "silu", "transposed", "sliced"),
    ("same", True, "silu", "contiguous", "misaligned"),
    (None, True, "sigmoid", "misaligned", "contiguous"),
)


def gated_kernels(dtype, gate_first):
    """Of rows that blocks hold and of others. One block has up to 16 rows of 128 float32, and up to
    32 of half precision."""
    others = [F32 if dtype != F32 else BF16, F16 if dtype != F16 else BF16]
    for shape, (of_weight, bias, activation, *layouts) in itertools.product(
        ((37, 64), (131, 128), (16, 128), (17, 128), (32, 128), (33, 128), (2, 5, 256), (9, 512),
         (33, 1024), (5, 1536), (3, 8192), (3, 16_384), (2, 40_000), (7, 100), (4, 24), (3, 5)),
        OF_KERNELS,
    ):  # fmt: skip
        if dtype == F64 and of_weight == F32:
            continue
        kinds: list[Any] = [(dtype, None)]
        if of_weight == "same" and not bias:
            kinds += [(other, None) for other in others]
            kinds += [(dtype, out) for out in (F32, BF16, F16, F64) if out != dtype]
        affine = ("both" if bias else "weight") if of_weight else ("bias" if bias else "none")
        cols = shape[-1]
        for size in (None, *(cols // n for n in (3, 4) if cols % n == 0 and cols > n)):
            for of_gate, out in kinds:
                yield Gated(
                    shape, dtype, F32 if of_weight == F32 else dtype, gate_dtype=of_gate,
                    out_dtype=out, affine=affine, gate_first=gate_first, group_size=size,
                    gate_activation=activation, weight_offset=0.5 if bias and of_weight else 0.0,
                    layout=layouts[0], gate_layout=layouts[1],
                )  # fmt: skip


# ---- Heads.


of = families.of_heads
HEADS = [
    of(), of(interleaved=True),
    of(dtype=F32), of(dtype=F32, interleaved=True), of(dtype=F16),
    of(dtype=F64), of(dtype=F64, interleaved=True, statistic="layer", affine="both"),
    *(of(cols=cols, interleaved=cols % 3 == 0) for cols in (2, 6, 8, 16, 30, 80, 96, 128, 192)),
    *(of(cols=cols, dtype=dtype) for cols in (254, 256, 258) for dtype in (BF16, F32)),
    *(of(cols=80, rotary=rotary, interleaved=flag)
      for rotary in (2, 16, 20, 32, 64, 78) for flag in (False, True)),
    of(cols=128, rotary=64, dtype=F32, interleaved=True), of(cols=256, rotary=64),
    of(statistic="layer", affine="both"), of(statistic="layer", affine="none", dtype=F32),
    of(statistic="layer", mean=1000.0, dtype=F32, cols=128), of(statistic=None, affine="none"),
    of(statistic=None, affine="none", dtype=F32, interleaved=True, cols=128, rotary=96),
    of(affine="both", weight_dtype=F32), of(affine="none"), of(weight_offset=1.0, dtype=F32),
    of(weight_offset=1.0, rounds=True, weight_dtype=F32), of(rounds=True, dtype=F16, affine="both"),
    of(rounds=True, cols=80, rotary=32), of(rounds=True, cols=30, interleaved=True),
    of(angles="none"), of(angles="none", statistic="layer", affine="both"),
    *(of(angles=angles, interleaved=flag, angle_dtype=dtype)
      for angles in ("samples", "doubled", "strided") for flag in (False, True)
      for dtype in (F32, BF16)),
    *(of(angles="doubled", interleaved=True, cols=12, rotary=rotary) for rotary in (4, 12)),
    *(of(layout=layout, seq_dim=seq_dim, cols=128)
      for layout in families.HEAD_LAYOUTS for seq_dim in (1, 2)),
    of(heads=(1, 1), positions=33, batch=1), of(heads=(40, 5), cols=256),
    of(heads=(3, 17), cols=64, positions=7), of(positions=1, batch=1),
    of(positions=700, batch=3, heads=(16, 4)), of(positions=129, cols=30, dtype=F32),
]  # fmt: skip


# ---- The contract.


EVERYWHERE = [
    *ROWS, *of_modulations(False), *of_modulations(True), *of_gates(), *CHANNELS, *OF_GROUPS,
    *GATED, *HEADS, *families.PACKED,
]  # fmt: skip
ON_CUDA = [*ROWS_ON_CUDA, *MODULATED_ON_CUDA, *CHANNELS_ON_CUDA, *GROUPS_ON_CUDA]


@numerics.on_devices("problem", EVERYWHERE, [*EVERYWHERE, *ON_CUDA])
def test_accuracy(device, problem):
    check(problem, device)


@numerics.on_devices("problem", FORWARD, [*FORWARD, *FORWARD_ON_CUDA])
def test_accuracy_without_gradients(device, problem):
    check(problem, device, backward=False)


def batches(name, problems, size=20):
    problems = [*problems]
    return [
        pytest.param(problems[first : first + size], id=f"{name}-{first}")
        for first in range(0, len(problems), size)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "problems",
    [
        *batches("boundaries", BOUNDARIES), *batches("widths", WIDTHS),
        *batches("groups", limits_of_groups()),
        *(batch for dtype in (F32, F16, BF16, F64) for first in (False, True)
          for batch in batches(f"{dtype}-{first}", gated_kernels(dtype, first), 60)),
    ],
)  # fmt: skip
def test_accuracy_at_limits_on_cuda(problems):
    for problem in problems:
        check(problem, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("problem", "backward"),
    [
        # Rows of several strategies. Rows of odd length are not aligned.
        *((Problem((max(2, 4_194_304 // cols), cols)), False)
          for cols in (37, 64, 768, 1023, 1024, 4096, 16384, 65536, 150_528, 1_048_576)),
        # dweight and dbias over so many rows are sums of chains of rows.
        *((Problem(shape), True) for shape in [(1_000_003, 37), (4_194_304, 64), (200_704, 96)]),
        (Problem((1_000_003, 37), **rms), True),
        (Problem((1_000_003, 64), BF16, **rms, weight_offset=1.0), True),
        *((modulated((groups, 300_000, 64)), True) for groups in (1, 3)),
    ],
    ids=str,
)  # fmt: skip
def test_float32_is_as_accurate_as_pytorchs(problem, backward):
    check(problem, "cuda", backward=backward, factor=1.02)


@pytest.mark.gpu
def test_elements_of_a_group_that_stand_out_or_are_not_there():
    x = torch.randn(64, 4096, device="cuda")
    x[:, ::1024] = 1e4  # the first ones, which cost the others no digits
    error = fused_layernorm.group_norm(x, 4) - torch.nn.functional.group_norm(x.double(), 4)
    assert error[x < 1e3].abs().max() < 3e-8  # where values are 0.03
    x = torch.full((67, 1010), 1e12, dtype=BF16, device="cuda").requires_grad_()
    y = fused_layernorm.group_norm(x, 10, activation="gelu_tanh").sum()  # 3 or 4 of 8 a thread
    assert torch.autograd.grad(y, x)[0].isfinite().all()


# ---- Every strategy that the rows have, in both directions.

COLS = [1, 3, 8, 37, 63, 64, 256, 257, 1024, 1027, 2048, 4096, 8192, 8195, 16384, 65536, 262144]
# "ring blocks_per_row=3": few columns of a block, and rows whose blocks meet.
STRATEGIES = ["warp", "block", "ring", "ring blocks_per_row=3", "stream"]
# Chips before Hopper have no bulk copies: bulk=0 tests their kernels.
BACKWARD = ["warp", "few_rows", "few_rows vecs=4", "block", "block bulk=0", "split", "split bulk=0",
            "stream"]  # fmt: skip
PLAIN: list[dict[str, Any]] = [{}, {"scale": 0.5}, {"scale": 0.5, "activation": "gelu"}]
MORE: list[dict[str, Any]] = [
    rms, {**rms, "weight_offset": 1.0}, {"residual_dtype": F32}, {"residual_dtype": BF16},
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(
    "problem",
    [
        Problem((1,), *dtypes, forced=(strategy, None), **epilogue)
        for epilogues, types in ((PLAIN, [*MIXED, (BF16, None), (F64, None)]),
                                 (MORE, [(F32, None), (BF16, None)]))
        for dtypes in types for strategy in STRATEGIES for epilogue in epilogues
    ],
    ids=str,
)  # fmt: skip
def test_every_strategy_of_forward(problem):
    numerics.check_strategy(problem, [*COLS, 17, 32768], backward=False)


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["odd column slice", "sliced leading"])
def test_every_strategy_with_odd_rows_of_memory(strategy, kind):
    problem = Problem((1,), layout=kind, forced=(strategy, None))
    cols = (37, 64, 300, 1000, 8192, 65536)
    numerics.check_strategy(problem, cols, backward=False, leading=(5, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"activation": "gelu", "scale": 0.5}, rms], ids=str)
@pytest.mark.parametrize("dtypes", [*MIXED, (F64, None)], ids=numerics.ids)
@pytest.mark.parametrize("strategy", BACKWARD)
def test_every_strategy_of_backward(strategy, dtypes, options):
    problem = Problem((1,), *dtypes, forced=(None, strategy), **options)
    # A large sample, because the greatest error, PyTorch's too, is that of a single element.
    numerics.check_strategy(problem, COLS, sample=1 << 17)
