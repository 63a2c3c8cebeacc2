# SPDX-License-Identifier: Apache-2.0
"""group_norm and ada_group_norm: every form, layout and strategy, forward and backward, against
float64."""

import math
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any

import numerics
import pytest
import reference
import torch
import torch.nn.functional as F
from golden_plans import group_plan

import fused_layernorm as fl

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
OPS = torch.ops.fused_layernorm
ACTIVATIONS = (*numerics.ACTIVATIONS, "leaky_relu")

pytestmark = pytest.mark.cpu_operators


def _within(x):
    """A slice of the channels of a larger tensor."""
    return torch.cat([x.new_full(x[:, :1].shape, math.nan), x, x[:, :1]], 1)[:, 1:-1]


# Orders of memory of (N, C, *).
LAYOUTS: dict[str, Any] = {
    "contiguous": lambda x: x.clone(memory_format=torch.contiguous_format),
    "channels_last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "positions turned": lambda x: x.movedim(2, -1).contiguous().movedim(-1, 2),
    "channels outside": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "misaligned": numerics.misaligned,
    "misaligned channels_last": lambda x: numerics.misaligned(x.movedim(1, -1)).movedim(-1, 1),
    "slice of channels": _within,
    "slice of channels_last": lambda x: LAYOUTS["channels_last"](_whole(x))[:, 1:-1],
    "expanded": lambda x: x[:1].expand(x.shape),
}


def _whole(x):
    return F.pad(x, [0, 0] * (x.dim() - 2) + [1, 1], value=math.nan)


@dataclass(frozen=True)
class Call:
    """One call; what is not as by default gives it its name."""

    shape: tuple[int, ...]
    groups: int
    dtype: torch.dtype = F32
    _: KW_ONLY
    weight_dtype: torch.dtype | None = None  # by default dtype
    out_dtype: torch.dtype | None = None
    activation: str | None = None
    scale: float = 1.0
    affine: str = "both"  # or "weight", "bias", "none"
    modulation: str = "none"  # or "both", "shift", "scale"
    layout: str = "contiguous"
    dy_layout: str | None = None  # by default layout
    mean: float = 0.0
    eps: float = 1e-5

    def __str__(self):
        named = [
            f"{f.name}={getattr(self, f.name)}"
            for f in fields(self)[2:]
            if getattr(self, f.name) != f.default
        ]
        sizes = "x".join(map(str, self.shape))
        return "-".join([f"{sizes}/{self.groups}", *named]).replace("torch.", "")


def make(c, device, seed=0) -> dict[str, Any]:
    """The tensors of a call, by name; None for one that is not there."""
    g = torch.Generator(device).manual_seed(seed)

    def randn(*shape, dtype=F32):
        return torch.randn(shape, generator=g, device=device).to(dtype)

    n, channels, *rest = c.shape
    weight_dtype = c.weight_dtype or c.dtype
    x = LAYOUTS[c.layout]((randn(*c.shape) + c.mean).to(c.dtype))
    dy = randn(*c.shape, dtype=c.out_dtype or c.dtype)
    t: dict[str, Any] = {"x": x, "dy": LAYOUTS[c.dy_layout or c.layout](dy)}
    has = {"weight": c.affine in ("both", "weight"), "bias": c.affine in ("both", "bias")}
    t["weight"] = 1 + randn(channels, dtype=weight_dtype) / 2 if has["weight"] else None
    t["bias"] = randn(channels, dtype=weight_dtype) if has["bias"] else None
    # Halves of one tensor, as models make them; shift has trailing dimensions.
    halves = randn(n, 2 * channels, dtype=weight_dtype).chunk(2, 1)
    for name, half in zip(("shift", "scale"), halves, strict=True):
        t[name] = half if c.modulation in ("both", name) else None
    if t["shift"] is not None:
        t["shift"] = t["shift"].reshape(n, channels, *[1] * len(rest))
    return t


INPUTS = ("x", "shift", "scale", "weight", "bias")


def forward(c, t):
    """Our y."""
    x, shift, scale, weight, bias = (t[name] for name in INPUTS)
    options: Any = {"activation": c.activation, "out_dtype": c.out_dtype}
    if shift is None and scale is None:
        return fl.group_norm(x, c.groups, weight, bias, c.eps, scale=c.scale, **options)
    assert c.scale == 1.0
    return fl.ada_group_norm(x, c.groups, shift, scale, weight, bias, c.eps, **options)


def ours(c, t):
    """Our results and gradients, through autograd, by name."""
    leaves = {n: t[n].detach().requires_grad_() for n in INPUTS if t[n] is not None}
    y = forward(c, {**t, **leaves})
    assert y.stride() == torch.empty_like(leaves["x"]).stride()
    # Not y.backward(dy), which gives x.grad the strides of x.
    gradients = torch.autograd.grad(y, list(leaves.values()), t["dy"])
    assert gradients[0].stride() == torch.empty_like(leaves["x"]).stride()
    return {"y": y.detach(), **{f"d{n}": g for n, g in zip(leaves, gradients, strict=True)}}


def exact(c, t):
    """The results in float64, by name."""
    given = {name: t[name] for name in INPUTS[1:]}
    options = {"eps": c.eps, "activation": c.activation, "output_scale": c.scale}
    found = reference.group_norm(t["x"], c.groups, t["dy"], **given, **options)
    return found._asdict()


def in_float32(c, t):
    """PyTorch's results in float32 (float64 for float64), by name."""
    acc = F64 if c.dtype is F64 else F32
    leaves = {
        name: t[name].detach().to(acc).contiguous().clone().requires_grad_()
        for name in INPUTS
        if t[name] is not None
    }
    x, shift, scale, weight, bias = (leaves.get(name) for name in INPUTS)
    assert x is not None
    if bias is not None and weight is None:  # PyTorch's backward wants both
        weight = torch.ones_like(bias)
    y = torch.group_norm(x, c.groups, weight, bias, c.eps)
    ones = [1] * (x.dim() - 2)
    if scale is not None:
        y = y * (1 + scale.reshape(*scale.shape[:2], *ones))
    if shift is not None:
        y = y + shift
    y = numerics.activate(y, c.activation) * c.scale
    gradients = torch.autograd.grad(y, list(leaves.values()), t["dy"].to(acc))
    return {"y": y.detach(), **{f"d{n}": g for n, g in zip(leaves, gradients, strict=True)}}


def dtype_of(c, name):
    """The dtype that a result must have."""
    if name == "y":
        return c.out_dtype or c.dtype
    return c.dtype if name == "dx" else c.weight_dtype or c.dtype


def check(c, device, *, run=ours):
    """The contract of numerics.py for all results: 1.25 times PyTorch's error, and one rounding."""
    numel = math.prod(c.shape)
    # An error's mean over few numbers is left to chance: it is taken over some fifty at least.
    few = 64 // min(c.shape[1], 64)

    def draw(seed):
        t = make(c, device, seed)
        found = run(c, t)
        for name, result in found.items():
            assert result.dtype == dtype_of(c, name), name
        return found, exact(c, t), in_float32(c, t)

    numerics.check_draws(map(draw, range(max(few, min(16, 8192 // numel)))), c.dtype)


DTYPES = [(F32, None), (BF16, None), (BF16, F32), (F16, None), (F16, F32), (F64, None)]


def of(shape, groups, dtypes=(F32, None), **others):
    return Call(shape, groups, dtypes[0], weight_dtype=dtypes[1], **others)


FORMS = [
    *(of((2, 12, 5, 7), 3, dtypes, activation="silu") for dtypes in DTYPES),
    *(of((2, 12, 4, 8), 3, (dtype, F32 if dtype in (F16, BF16) else None), out_dtype=out)
      for dtype in (F32, F16, BF16, F64) for out in (F32, F16, BF16, F64)),
    *(of((3, 8, 6), 4, dtypes, activation=activation, scale=0.5)
      for activation in ACTIVATIONS for dtypes in ((F32, None), (BF16, None), (F64, None))),
    *(of((3, 24, 9), 4, dtypes, affine=affine, modulation=modulation, activation="silu")
      for affine in ("both", "weight", "bias", "none")
      for modulation in ("none", "both", "shift", "scale")
      for dtypes in ((F32, None), (BF16, F32))),
    # Any dimensions and groups: one, as many as channels, of one, two, three and odd channels.
    *(of(shape, groups, dtypes, activation="gelu_tanh")
      for shape, groups in (((3, 6), 2), ((2, 4), 1), ((2, 1, 5), 1), ((1, 7, 1, 1), 1),
                            ((4, 6, 8), 6), ((2, 15, 3, 5), 5), ((2, 3, 2, 3, 4), 1),
                            ((1, 64, 2, 4, 2, 2), 32), ((2, 96, 31), 32), ((5, 33, 8), 11))
      for dtypes in ((F32, None), (BF16, None))),
    of((2, 6, 1), 6), of((3, 4), 4, (BF16, None)),  # a group of one element has no variance
    *(of((2, 8, 64), 4, dtypes, mean=1000.0) for dtypes in ((F32, None), (BF16, F32))),
    *(of((3, 16, 4, 6), 4, dtypes, layout=layout, dy_layout=dy_layout, activation="silu")
      for dtypes in ((F32, None), (BF16, None))
      for layout in LAYOUTS for dy_layout in (None, "contiguous", "channels_last")),
    of((2, 16, 3, 4, 6), 4, (BF16, None), layout="channels_last"),
    of((2, 40, 9), 8, (BF16, None), layout="channels_last", modulation="both"),
]  # fmt: skip


@pytest.mark.parametrize("call", FORMS, ids=str)
def test_forms(call, device):
    check(call, device)


# ---- The kernels: every strategy, and both sides of every limit in csrc/groups/tuning.h. `per`
# ---- counts the elements of a group.


def _strategy(c, *, backward):
    positions = math.prod(c.shape[2:])
    last = "channels_last" in c.layout
    return group_plan(
        c.shape[0], c.shape[1], positions, c.groups, c.dtype, backward=backward,
        channels_last=last, y_dtype=None if c.dtype is F32 else c.out_dtype,
        aligned="misaligned" not in c.layout,
    )  # fmt: skip


# The strategies of forward and backward on an H100.
KERNELS = [
    (of((3, 64, 40, 40), 8, (BF16, None), activation="silu"), "held", "held"),
    (of((3, 64, 56, 56), 8, (BF16, None), activation="silu"), "held", "held"),  # of two blocks
    (of((2, 160, 64, 64), 8, (BF16, None), activation="silu"), "held", "split"),  # of eight
    (of((2, 144, 64, 64), 8, (BF16, None), activation="silu"), "held", "tiles"),
    (of((2, 320, 32, 32), 8, (BF16, F32), activation="silu", modulation="both"), "held", "tiles"),
    (of((2, 80, 128, 128), 8, (BF16, None), activation="silu"), "split", "split"),
    (of((1, 128, 128, 128), 8, (BF16, None), activation="silu"), "split", "split"),
    (of((2, 128, 128, 128), 8, (F32, None), activation="gelu"), "split", "split"),
    (of((1, 32, 512, 512), 8, (F16, F32), activation="silu"), "split", "split"),
    (of((1, 16, 512, 512), 1, (BF16, None), activation="silu"), "split", "split"),
    (of((1, 24, 262, 260), 2, (BF16, F32), modulation="both"), "split", "split"),
    # So many groups that their places in the blocks' shared memory are used again.
    (of((6, 320, 160, 136), 32, (BF16, None), activation="silu"), "split", "split"),
    (of((1, 64, 512, 512), 1, (BF16, None), activation="silu"), "tiles", "tiles"),
    (of((3, 64, 101, 103), 8, (BF16, None), activation="silu"), "held", "tiles"),
    (of((3, 64, 131, 133), 8, (BF16, None), activation="silu"), "tiles", "tiles"),
    (of((1, 8, 16, 64, 64), 8, (F32, None), activation="leaky_relu"), "split", "tiles"),
    (of((2, 32, 64, 64), 32, (F16, F32), out_dtype=F32, activation="leaky_relu"), "held", "held"),
    (of((2, 33, 57, 59), 11, (F32, None), out_dtype=BF16, activation="relu"), "held", "held"),
    *((of((n, channels, side, side), 32, dtypes, layout="channels_last", activation="silu",
          modulation=modulation), "tiles", "tiles")
      for n, channels, side, modulation in ((2, 320, 64, "none"), (1, 1280, 32, "both"),
                                            (3, 128, 100, "none"), (2, 2560, 16, "scale"),
                                            (1, 4160, 9, "none"))
      for dtypes in ((BF16, None), (F32, None), (F16, F32))),
    (of((3, 75, 33, 31), 5, (BF16, None), layout="channels_last"), "tiles", "tiles"),
    (of((3, 64, 33, 31), 8, (BF16, None), layout="misaligned channels_last"), "tiles", "tiles"),
    (of((3, 64, 56, 56), 8, (BF16, None), layout="misaligned"), "held", "held"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "forwards", "backwards"), KERNELS, ids=str)
def test_the_strategies_of_the_kernels(call, forwards, backwards):
    plans = [_strategy(call, backward=backward)["strategy"] for backward in (False, True)]
    assert plans == [forwards, backwards]


@pytest.mark.gpu
@pytest.mark.parametrize("call", [call for call, *_ in KERNELS], ids=str)
def test_kernels(call):
    check(call, "cuda")


# Groups of so many bytes of bfloat16 (kHeldBackwardBytes, kHeldBytes or kClusterBackwardBytes,
# twice that, kClusterBytes, kSplitBackwardBytes), of one channel or of three.
LIMITS = (28 << 10, 56 << 10, 112 << 10, 192 << 10, 400 << 10)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("vectors", [-1, 0, 1])
@pytest.mark.parametrize("limit", LIMITS)
def test_kernels_at_the_limits_of_groups(limit, vectors, channels):
    positions = (limit // 16 // channels + vectors) * 8
    shape = (3, 4 * channels, positions)
    check(of(shape, 4, (BF16, None), activation="silu"), "cuda")
    check(of(shape, 4, (BF16, None), activation="silu", layout="misaligned"), "cuda")
    check(of((3, 4 * channels, positions + 3), 4, (BF16, F32), modulation="both"), "cuda")


# Channels of so many vectors that a tile has a piece of one, or several channels; groups of so many
# segments that a warp of blocks that share a group has the last, or none.
@pytest.mark.gpu
@pytest.mark.parametrize("vectors", [1, 2, 15, 16, 17, 511, 512, 513, 1023, 1024, 1025, 2049])
@pytest.mark.parametrize("channels", [1, 2, 7, 64])
def test_kernels_at_the_limits_of_channels(channels, vectors):
    for dtypes in ((BF16, None), (F32, None)):
        width = 16 // dtypes[0].itemsize
        check(of((2, 3 * channels, vectors * width), 3, dtypes, activation="silu"), "cuda")


# Channels that begin within vectors, or in the middle of them: of groups that a block or a cluster
# holds, or that are cut into tiles.
@pytest.mark.gpu
@pytest.mark.parametrize("positions", [7, 8, 9, 12, 15, 33, 49, 196])
@pytest.mark.parametrize("channels", [1, 2, 3, 8, 24, 600])
def test_kernels_of_channels_that_begin_within_vectors(channels, positions):
    for dtypes in ((BF16, None), (BF16, F32), (F16, None)):
        c = of((2, 3 * channels, positions), 3, dtypes, activation="silu")
        for out_dtype in (None, F32):
            check(replace(c, out_dtype=out_dtype), "cuda")
    check(replace(c, modulation="both", layout="misaligned"), "cuda")


# Columns, slices and rows of tiles of channels_last; samples around kLargeSample.
@pytest.mark.gpu
@pytest.mark.parametrize("channels", [1, 8, 31, 32, 256, 2040, 2048, 2056, 4104])
@pytest.mark.parametrize("positions", [1, 2, 63, 257, 1025])
def test_kernels_at_the_limits_of_channels_last(channels, positions):
    groups = [g for g in (1, 2, 8, 3, channels) if channels % g == 0]
    for g in groups:
        c = of((2, channels, positions, 2), g, (BF16, None), layout="channels_last")
        check(replace(c, activation="silu", modulation="both"), "cuda")
    check(replace(c, layout="misaligned channels_last"), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_kernels_at_the_limit_of_large_samples(beyond):
    positions = (8 << 20) // (128 * 2) + beyond
    check(of((1, 128, positions), 32, (BF16, None), layout="channels_last"), "cuda")


# ---- Bits.

BITS = [
    *(call for call, *_ in KERNELS[:9]),
    KERNELS[13][0],
    KERNELS[19][0],
    of((4, 12, 5, 7), 3, (BF16, F32), modulation="both", layout="channels_last"),
]


def _part(t, samples):
    """The tensors of some samples."""
    parts = {name: t[name] for name in ("weight", "bias")}
    for name in ("x", "dy", "shift", "scale"):
        parts[name] = None if t[name] is None else t[name][samples]
    return parts


@pytest.mark.gpu
@pytest.mark.parametrize("call", BITS, ids=str)
def test_bits_are_those_of_any_batch_and_of_a_second_call(call, poison):
    call = replace(call, shape=(5, *call.shape[1:]))
    t = make(call, "cuda")
    whole = ours(call, t)
    poison(*whole.values(), torch.empty(1 << 20, device="cuda"))
    again = ours(call, t)
    assert all(torch.equal(again[name], value) for name, value in whole.items())
    for samples in (slice(0, 1), slice(3, 5)):
        part = ours(call, _part(t, samples))
        for name in ("y", "dx", "dshift", "dscale"):
            if name in part:
                assert torch.equal(part[name], whole[name][samples]), name
    with torch.no_grad():
        assert torch.equal(forward(call, t), whole["y"])


@pytest.mark.gpu
def test_two_launches_whose_blocks_wait_for_each_other_end_on_two_streams():
    calls = [KERNELS[i][0] for i in (5, 8)]
    made = [make(call, "cuda") for call in calls]
    expected = [ours(call, t) for call, t in zip(calls, made, strict=True)]
    torch.cuda.synchronize()
    found: list[list[Any]] = [[], []]
    streams = [torch.cuda.Stream() for _ in calls]
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[i].append(ours(calls[i], made[i]))
    torch.cuda.synchronize()
    for results, wanted in zip(found, expected, strict=True):
        assert all(torch.equal(one[name], wanted[name]) for one in results for name in wanted)


# ---- Special numbers and sizes.


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_nan_stays_in_its_group(device, layout):
    x = torch.randn(2, 12, 50, device=device)
    x[1, 5, 7] = math.nan
    y = fl.group_norm(LAYOUTS[layout](x), 4, activation="relu")
    expected = torch.zeros(2, 12, 1, dtype=torch.bool, device=device)
    expected[1, 3:6] = True
    assert torch.equal(y.isnan(), expected.expand(y.shape))


def test_a_group_of_one_number_gives_bias(device):
    x, bias = torch.randn(2, 6, 1, device=device), torch.randn(6, device=device)
    y = fl.group_norm(x, 6, torch.ones(6, device=device), bias)
    torch.testing.assert_close(y, bias[None, :, None].expand(y.shape))


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 4, 0), (0, 4), (2, 4, 3, 0)])
def test_empty(device, shape):
    c = of(shape, 2, (BF16, F32), modulation="both", activation="silu")
    found = ours(c, make(c, device))
    assert found["y"].shape == shape
    for name in ("dweight", "dbias", "dshift", "dscale"):
        assert torch.equal(found[name], torch.zeros_like(found[name]))
    x = torch.empty(shape, device=device)
    _, mean, rstd = OPS.group_norm_forward(x, 2, None, None, None, None, 1e-5)
    assert mean.shape == rstd.shape == (shape[0], 2)
    assert torch.equal(mean, torch.zeros_like(mean))
    assert rstd.isnan().all()


def test_statistics(device):
    for dtype in (F32, BF16, F64):
        c = of((3, 12, 40), 4, (dtype, None))
        t = make(c, device)
        _, mean, rstd = OPS.group_norm_forward(t["x"], 4, None, None, None, None, c.eps)
        assert mean.dtype is rstd.dtype is (F64 if dtype is F64 else F32)
        expected = exact(c, t)
        for found, name in ((mean, "mean"), (rstd, "rstd")):
            torch.testing.assert_close(found.double(), expected[name], rtol=1e-6, atol=1e-6)


def test_backward_gives_the_gradients_that_are_asked_for(device, poison):
    c = of((2, 12, 30), 4, modulation="both", activation="silu")
    t = make(c, device)
    parameters = tuple(t[name] for name in INPUTS[1:])
    _, mean, rstd = OPS.group_norm_forward(t["x"], 4, *parameters, c.eps, c.activation)
    args = (t["dy"], t["x"], 4, mean, rstd, *parameters, c.activation, 1.0)
    every = OPS.group_norm_backward(*args, *[True] * 5)
    for wanted in range(5):
        mask = [i == wanted for i in range(5)]
        poison(*every)
        found = OPS.group_norm_backward(*args, *mask)
        for i, (one, whole) in enumerate(zip(found, every, strict=True)):
            if mask[i]:
                assert torch.equal(one, whole)
            else:
                assert one.shape == (0,)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_more_elements_than_32_bits_count(layout, needs_memory):
    needs_memory(40)
    shape = (2, 32, 6000, 6000)  # 2.3e9
    x = torch.randn(shape, device="cuda", dtype=BF16)
    if layout == "channels_last":
        x = x.to(memory_format=torch.channels_last)
    x.requires_grad_()
    y = fl.group_norm(x, 4, activation="silu")
    (dx,) = torch.autograd.grad(y, x, y.detach())
    # The last group alone has the same bits: as a tensor of one sample and the same groups.
    one = x.detach()[1:].requires_grad_()
    z = fl.group_norm(one, 4, activation="silu")
    assert torch.equal(z, y[1:])
    (dz,) = torch.autograd.grad(z, one, z.detach())
    assert torch.equal(dz, dx[1:])
    part = x.detach()[1, 24:, -40:].double()
    mean = x.detach()[1, 24:].float().mean(dtype=F64)
    assert abs(mean.item()) < 1e-3
    expected = F.silu((part - mean) / part.std())
    assert (y[1, 24:, -40:].double() - expected).abs().max() < 0.05
