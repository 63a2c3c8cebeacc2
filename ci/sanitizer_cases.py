# SPDX-License-Identifier: Apache-2.0
"""Small cases of every kernel family for compute-sanitizer; ci/on_gpu runs them.

    compute-sanitizer --tool memcheck python ci/sanitizer_cases.py
    compute-sanitizer --tool racecheck python ci/sanitizer_cases.py --teams-alike

The results are not checked, because the tests do that. With --teams-alike all teams of a block have
the same number of rows of a group: racecheck can follow no others (ci/racecheck_limits.cu).
"""

import argparse
import json
import math

import torch

import fused_layernorm

BF16, F32 = torch.bfloat16, torch.float32
_ops = torch.ops.fused_layernorm


def run(rows, cols, dtype, strategy=None, *, forward=None, weight_dtype=None, y_dtype=None,
        activation=None, residual=False, strided=False):  # fmt: skip
    """Forward by the strategy `forward`, backward by `strategy`; None leaves it to the plan.

    Strided rows of x and dy have columns between them that no kernel may touch.
    """
    between = 3 if strided else 0
    x = torch.randn(rows, cols + between, device="cuda").to(dtype)[:, :cols]
    dy = torch.randn(rows, cols + between, device="cuda").to(y_dtype or dtype)[:, :cols]
    weight = torch.randn(cols, device="cuda").to(weight_dtype or dtype)
    bias = torch.randn_like(weight)
    _ops._force(forward and f"strategy={forward}")
    _, mean, rstd = _ops.layer_norm_forward(
        x, 1, weight, bias, 1e-5, activation, out_dtype=y_dtype
    )  # fmt: skip
    _ops._force(None)
    if residual:
        fused_layernorm.add_layer_norm(x, dy, weight, bias, activation=activation)
    _ops._force(strategy and f"strategy={strategy}")
    _ops.layer_norm_backward(
        dy, x, 1, mean, rstd, weight, bias, dy if residual else None, activation, 1.0,
        True, True, True,
    )  # fmt: skip
    _ops._force(None)


def run_modulated(samples, tokens, cols, dtype, *, per_token=False, weight=False, strategy=None):
    """A modulated norm of a gated sum, forward and backward, and the gate's backward alone."""
    x = torch.randn(samples, tokens, cols, device="cuda").to(dtype)
    residual, dy = torch.randn_like(x), torch.randn_like(x)
    groups = (samples, tokens if per_token else 1, 3 * cols)
    shift, scale, gate = torch.randn(groups, device="cuda").to(dtype).chunk(3, dim=-1)
    columns = torch.randn(cols, device="cuda").to(dtype) if weight else None
    parameters = (shift, scale, columns, columns)
    _ops.ada_layer_norm(x, 1, *parameters, 1e-6)
    _, h, mean, rstd = _ops.add_ada_layer_norm_forward(x, residual, gate, 1, *parameters, 1e-6)
    needs = (True, True, True, weight, weight)
    _ops._force(strategy and f"strategy={strategy}")
    _ops.ada_layer_norm_backward(dy, h, 1, mean, rstd, *parameters, dy, *needs)
    _ops.ada_layer_norm_backward(dy, h, 1, mean, rstd, *parameters, None, *needs)
    _ops._force(None)
    _ops.add_ada_layer_norm_backward(
        dy, h, x, gate, 1, mean, rstd, *parameters, dy, True, True, *needs
    )
    _ops.gate_backward(dy, x, gate, True, True)


def run_rms(rows, cols, dtype, *, offset=0.0, rounds=False, residual=False):
    """RMSNorm forward and backward by the plan."""
    x, dy = (torch.randn(rows, cols, device="cuda").to(dtype) for _ in range(2))
    weight = torch.randn(cols, device="cuda").to(dtype)
    kind = {"statistic": "rms", "weight_offset": offset}
    _, mean, rstd = _ops.layer_norm_forward(
        x, 1, weight, None, 1e-5, round_before_weight=rounds, **kind
    )
    if residual:
        _ops.add_layer_norm_forward(
            x, dy, 1, weight, None, 1e-5, round_before_weight=rounds, **kind
        )
    _ops.layer_norm_backward(
        dy, x, 1, mean, rstd, weight, None, dy if residual else None, None, 1.0,
        True, True, True, **kind,
    )  # fmt: skip


def teams_of(cols, dtype, gated):
    """The number of teams in a block that works on groups of rows, one if it is a single team."""
    many = 1 << 14
    plan = json.loads(
        _ops._plan(many, cols, dtype, backward=True, group_rows=64, gated=gated) or "null"
    )
    return (plan or {}).get("teams", 1)


def run_many(cols, dtype, teams_alike, *, weight_dtype=None, residual=False, activation=None):
    """Forward, and backward by the strategy that the plan chooses for many rows."""
    options = {"weight_dtype": weight_dtype, "residual": residual, "has_epilogue": bool(activation)}
    plan = json.loads(_ops._plan(1 << 20, cols, dtype, backward=True, **options))
    rows = 300
    if teams_alike and plan["strategy"] == "block":
        rows = 2 * plan["blocks"] * plan["teams"]
    run(rows, cols, dtype, plan["strategy"], weight_dtype=weight_dtype, residual=residual,
        activation=activation)  # fmt: skip


def groups(cols, dtype, teams_alike):
    """Samples and tokens; `teams_alike`: several groups a block, and as many rows for each team."""
    if not teams_alike:
        return 3, 150
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    return 2 * multiprocessors, math.lcm(*(teams_of(cols, dtype, gated) for gated in (0, 1)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--teams-alike", action="store_true")
    parser.add_argument("--rms", action="store_true", help="only the cases of RMSNorm")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rms_cases()
    if not arguments.rms:
        channel_cases()
        group_cases()
        layer_cases(arguments.teams_alike)
        head_cases()
        gated_cases()
    torch.cuda.synchronize()


def rms_cases():
    """RMSNorm: every strategy without a mean, and weights that are not plain."""
    for dtype in (BF16, F32):
        for rows, cols in ((37, 64), (300, 64), (300, 1000), (300, 37), (300, 4096), (300, 16_384),
                           (30, 65_537), (8, 131_072), (1, 1_000_000)):  # fmt: skip
            run_rms(rows, cols, dtype)
            run_rms(rows, cols, dtype, offset=1.0, residual=True)
            run_rms(rows, cols, dtype, rounds=True)


def channel_cases():
    """Planes moved by 16 bytes, by 8, one by one and as whole samples; y is NCHW and NHWC."""
    for dtype in (BF16, F32):
        for shape in ((3, 96, 28, 28), (2, 384, 14, 14), (3, 30, 5, 9), (600, 32, 7, 7)):
            x = torch.randn(shape, device="cuda").to(dtype).requires_grad_()
            weight, bias = (torch.ones(shape[1], device="cuda", requires_grad=True) for _ in "wb")
            for activation in (None, "silu"):
                y = fused_layernorm.layer_norm(x, weight, bias, dim=1, activation=activation)
                y.backward(torch.randn_like(y))
                y = fused_layernorm.layer_norm(
                    x.permute(0, 2, 3, 1), weight, bias, activation=activation
                )
                y.backward(torch.randn_like(y))


def group_cases():
    """Groups of channels: held by a block or a cluster, shared, and by tiles, in both layouts."""
    planes = (
        (3, 6, 50), (2, 24, 1600), (2, 8, 13_000), (2, 12, 6000), (1, 4, 110_000), (3, 4, 220_000),
        (9, 4, 220_000), (1, 2, 3_000_000), (2, 6, 10_403), (2, 6, 60_001),
        # Channels that begin within vectors, or in the middle of them.
        (2, 32, 49), (2, 1200, 49), (2, 6, 196), (1, 1024, 196),
    )  # fmt: skip
    last = ((2, 12, 50), (3, 320, 700), (1, 1280, 100), (2, 33, 1000), (1, 4160, 9))
    for dtype in (BF16, F32):
        for channels_last, shapes in ((False, planes), (True, last)):
            for samples, channels, positions in shapes:
                shape = (samples, positions, channels) if channels_last else (
                    samples, channels, positions)  # fmt: skip
                x = torch.randn(shape, device="cuda").to(dtype)
                x = (x.mT if channels_last else x).requires_grad_()
                weight, bias = (
                    torch.ones(channels, device="cuda", requires_grad=True) for _ in "wb"
                )
                shift, scale = torch.randn(
                    samples, 2 * channels, device="cuda", requires_grad=True
                ).chunk(2, 1)
                groups = 2 if channels % 2 == 0 else 3
                if dtype == F32:
                    y = fused_layernorm.group_norm(x, groups, weight, bias, activation="silu")
                else:
                    y = fused_layernorm.ada_group_norm(
                        x, groups, shift, scale, weight, bias, activation="leaky_relu"
                    )
                y.backward(torch.randn_like(y))
    # Channels that begin within vectors, beside a float32 result.
    for channels in (32, 1200):
        x = torch.randn(2, channels, 49, device="cuda").to(BF16).requires_grad_()
        y = fused_layernorm.group_norm(x, 2, out_dtype=F32)
        y.backward(torch.randn_like(y))


def layer_cases(teams_alike):
    """LayerNorm, plain, fused and modulated."""
    for dtype in (BF16, F32):
        for cols in (7, 64, 96, 768, 1023, 2047, 4096, 5003, 16384):
            # few_rows has no kernels for float32 rows that are worked on in slices.
            if cols <= 8192 or dtype == BF16:
                run(37, cols, dtype, "few_rows")
            run_many(cols, dtype, teams_alike)
        for cols in (1000, 1027):
            options = {"residual": True, "weight_dtype": F32}
            run(37, cols, dtype, "few_rows", activation="silu", **options)
            run_many(cols, dtype, teams_alike, activation="gelu", **options)
        # Shifted rows, a few and many.
        for rows in (37, 5000):
            run(rows, 231, dtype)
            run(rows, 231, dtype, strided=True)
        # Whole vectors of a lane, and a last one that is missing. In backward a single row.
        for vectors in (8, 16, 24, 32, 64, 96, 128) if dtype == BF16 else (16, 32, 64, 96):
            cols = vectors * 16 // dtype.itemsize
            for rows in (1, 9, 37):
                run(rows, cols, dtype, forward="warp")
            run(37, cols - 3, dtype)
    # Rows by halves of vectors.
    for cols in (4, 356, 1492, 3908):
        run(37, cols, BF16)
    run(37, 9216, F32, "few_rows")  # longer than a team keeps
    # Several blocks a row, and rows longer than the chip holds.
    run(8, 65536, BF16)
    run(4, 65537, BF16)
    run(30, 65537, F32)
    run(6, 40000, BF16, residual=True)
    # All threads of a block work on rows, and one of their warps collects the sums. All blocks
    # share each row, so that seven rows are enough for every place of the ring to be used again.
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    if torch.cuda.get_device_capability() >= (9, 0) and multiprocessors > 16:
        run(7, 15_936 * multiprocessors, BF16)
        run(7, 15_936 * multiprocessors, BF16, residual=True)
        run(7, 7968 * multiprocessors, F32)
    run(10, 300_000, F32)
    # Rings: blocks with and without columns, and rows enough for each slot to be used again.
    if torch.cuda.get_device_capability() >= (9, 0):
        for cols, blocks in ((4096, 1), (16_392, 3), (5000, 16)):
            run(70, cols, F32, forward=f"ring blocks_per_row={blocks}")
            run(70, cols, BF16, forward=f"ring blocks_per_row={blocks}", activation="gelu")
            run(70, cols, BF16, forward=f"ring blocks_per_row={blocks}", weight_dtype=F32)
    # A row in the registers of one block: a block for each row, and persistent blocks.
    for cols, dtype in ((32_768, BF16), (16_384, F32), (40_960, BF16), (20_480, F32)):
        run(300, cols, dtype)
        run(300, cols, dtype, activation="silu")
    run(2, 4_194_304, F32)
    # Modulations per group and per row, with rings and without, in stream, with odd columns.
    for dtype in (BF16, F32):
        for cols in (7, 64, 1023, 1152, 3072, 6000, 12_288):
            samples, tokens = groups(cols, dtype, teams_alike)
            run_modulated(samples, tokens, cols, dtype)
            run_modulated(2, 20, cols, dtype, per_token=True, weight=True)
        run_modulated(140, 3, 96, dtype, weight=True)
        run_modulated(2, 9, 24_576, dtype)
        for cols in (96, 9000, 16_384):
            run_modulated(2, 20, cols, dtype, per_token=True)
        run_modulated(2, 90, 1152, dtype, strategy="stream", weight=True)
        run_modulated(2, 9, 1155, dtype, strategy="stream", per_token=True)


def head_cases():
    """Heads: whole vectors and single elements, rotated in part."""
    for dtype in (BF16, F32):
        for cols, rotary in ((64, None), (80, 32), (128, 64), (256, None), (30, 6), (256, 20)):
            for interleaved in (False, True):
                run_heads(cols, dtype, rotary, interleaved=interleaved)
        run_heads(128, dtype, positions=2000)
        run_heads(128, dtype, packed=False)


def gated_cases():
    """Logical warps, blocks, groups of columns, and rows that are read twice."""
    for dtype in (BF16, F32):
        for cols, group in ((64, 0), (128, 0), (512, 0), (1024, 256), (6144, 0), (8192, 1024)):
            run_gated(cols, group, dtype)
        for cols in (100, 40_000):
            run_gated(cols, 0, dtype, bias=True)
        for cols, group in ((64, 0), (128, 0), (512, 128)):
            run_gated(cols, group, dtype, rows=13)  # one block has all rows of a group


def run_gated(cols, group, dtype, *, rows=None, bias=False):
    """More rows than all blocks have at once, some of them without a row; the gate is a slice."""
    ops = torch.ops.fused_layernorm
    rows = rows or (9000 if cols <= 1024 else 1100 if cols <= 8192 else 3)
    x, dy = (torch.randn(rows, cols, device="cuda").to(dtype) for _ in "xd")
    gate = torch.randn(rows, cols + 8, device="cuda").to(dtype)[:, 8:]
    weight = torch.ones(cols, device="cuda")
    b = weight if bias else None
    for first, activation in ((False, "silu"), (True, "sigmoid")):
        options = (first, activation, group)
        _, _, rstd = ops.rms_norm_gated_forward(x, gate, weight, b, 1e-6, *options)
        ops.rms_norm_gated_backward(
            dy, x, gate, rstd, weight, b, *options, 0.0, True, True, True, bias
        )
        # As most models have it. Of half precision and short rows, products are rounded in pairs.
        ops.rms_norm_gated(x, gate, weight.to(dtype), None, 1e-6, *options, None, 0.0, True)


def run_heads(cols, dtype, rotary=None, *, interleaved=False, positions=37, packed=True):
    """q and k of 6 and 2 heads: LayerNorm and rotation, and the rotation alone."""
    qkv = torch.randn(2, positions, 10, cols + 2 * (not packed), device="cuda").to(dtype)
    q, k = (t[..., :cols].requires_grad_() for t in (qkv[:, :, :6], qkv[:, :, 6:8]))
    weight = torch.ones(cols, device="cuda", requires_grad=True)
    angle = torch.randn(positions, (rotary or cols) // 2, device="cuda")
    options = {"rotary_dim": rotary, "interleaved": interleaved, "statistic": "layer"}
    for one in (weight, None):
        y, z = fused_layernorm.qk_norm_rope(
            q, k, one, one, angle.cos(), angle.sin(), q_bias=one, k_bias=one, **options
        )
        (y.sum() + z.sum()).backward()
        options["statistic"] = None


if __name__ == "__main__":
    main()
