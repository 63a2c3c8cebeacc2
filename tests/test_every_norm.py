# SPDX-License-Identifier: Apache-2.0
"""What every norm keeps in both directions: bits, strides, empty tensors, NaN, memory, streams,
graphs. The problems are those of families.py, of every family."""

import math
from dataclasses import replace

import families
import numerics
import pytest
import torch
from families import BF16, F16, F32, F64, SMALL, Gated, Heads, of_groups, over_channels
from numerics import Problem, covering, ids, make, modulated, ours

pytestmark = pytest.mark.cpu_operators  # the tests judge the operators, on the CPU too

NAN, INF = math.nan, math.inf


# ---- Bits, and whether every element is written.


def assert_same_bits(found, expected):
    for name, wanted in expected.items():
        assert torch.equal(found[name], wanted), name


def repeated(t, poison):
    """The results, which another call gives again, and one without gradients; before each, the
    memory of results and workspace holds NaN."""
    whole, columns = ours(t), min(t.problem.shape[-1], 300_000)
    partials = torch.empty(6 * 132 * columns, device=t.device)
    statistics = torch.empty(next(iter(t.inputs().values())).shape[:-1], device=t.device)
    workspace = (statistics, statistics, partials, partials[: len(partials) // 2])
    for backward in (True, False):
        poison(*whole.values(), *workspace)
        again = ours(t, backward=backward)
        assert_same_bits(again, {name: whole[name] for name in again})
    return whole


def check_bits(problem, device, poison, *, backward=True):
    """Results are the same in every call, and those of rows or samples in any batch.

    The sums over a sample's rows may be divided differently when the number of samples changes, so
    they agree only to rounding.
    """
    t = make(problem, device)
    whole = repeated(t, poison) if backward else ours(t, backward=False)
    count = len(next(iter(t.inputs().values())))
    near = {"dshift", "dscale", "dgate"} & {*whole}
    for start, stop in ((0, 1), (count // 3, count // 3 + 1), (count - 1, count), (0, 2), (3, 20)):
        if start >= (stop := min(stop, count)):
            continue
        part = slice(start, stop)
        for name, alone in ours(t.of_rows(part), backward=backward).items():
            if name in problem.of_rows:
                assert torch.equal(alone, whole[name][part]), name
            elif name in near and len(whole[name]) == count != len(alone):
                torch.testing.assert_close(alone, whole[name][part], rtol=1e-5, atol=1e-4)


@numerics.on_devices("problem", SMALL, [*SMALL, *families.KERNELS])
def test_bits(device, poison, problem):
    check_bits(problem, device, poison)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "problem",
    [
        *(Problem((9, cols), affine="none") for cols in (150528, 262144, 1_000_003, 4_194_304)),
        *(Problem((max(2, 2**26 // cols), cols), dtype=dtype, affine="none")
          for cols in (64, 768, 1025, 4095, 4096, 8191, 40000, 1_048_576) for dtype in (F32, BF16)),
        Problem((300, 131_072), BF16, statistic="rms", affine="weight"),
    ],
    ids=str,
)  # fmt: skip
def test_rows_of_large_tensors_do_not_depend_on_their_batch(poison, problem):
    check_bits(problem, "cuda", poison, backward=False)


@pytest.mark.parametrize(
    "problem",
    [
        *SMALL,
        *(Problem((50, cols), *dtypes, activation=activation)
          for cols in (5, 64, 1024, 9000) for dtypes in ((F32, None), (BF16, F32))
          for activation in (None, "silu")),
        *(modulated((5, 9, 200), kind, gated=gated, dtypes=families.MODULATED_DTYPES[i])
          for kind in ("all", "sample", "token", "position") for gated in (False, True)
          for i in (0, 3, 8)),
    ],
    ids=str,
)  # fmt: skip
def test_gradients_that_are_asked_for_alone(device, poison, problem):
    numerics.check_wanted(problem, device, poison)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("cols", [5, 768, 1001, 16_384])
def test_a_single_row_has_the_same_bits_whichever_gradients_are_asked_for(poison, cols, activation):
    problem = Problem((1, cols), BF16, activation=activation)
    numerics.check_wanted(problem, "cuda", poison, bits=True)


# ---- Strides.


@pytest.mark.parametrize(
    ("layout", "of", "problem"),
    covering(
        sorted({*numerics.ROW_LAYOUTS} - {"contiguous", "misaligned"}),
        ["x", "dy"],
        [
            *(Problem((33, 7, cols), dtype=dtype)
              for cols in (7, 64, 1000, 4096) for dtype in (F32, BF16)),
            *(modulated((3, 5, 64), gated=gated) for gated in (False, True)),
        ],
    ),
    ids=str,
)  # fmt: skip
def test_strided_rows(device, layout, of, problem):
    layouts = {"layout": layout, "dy_layout": "contiguous"} if of == "x" else {"dy_layout": layout}
    t = make(replace(problem, **layouts), device)
    assert not getattr(t, of).is_contiguous()
    found = ours(t)
    expected = numerics.exact(t, found)
    outputs = {name: found.pop(name) for name in ("y", "residual_out") if name in found}
    numerics.assert_close(outputs, expected, {F32: 1e-5, BF16: 2**-8})
    numerics.assert_close(ours(t, backward=False), expected, {F32: 1e-5, BF16: 2**-8})
    if "expanded " not in layout or of == "dy":  # in constant rows 1e-4 asks too much
        numerics.assert_close(found, expected, {F32: 1e-4, BF16: 2**-7})


@pytest.mark.parametrize(
    ("shape", "backward"),
    [
        *(((outer, inner, 8), False) for outer, inner in
          [(2, 2), (41, 3), (3, 7), (5, 31), (2, 64), (9, 1000), (3, 50_001), (50_001, 3)]),
        ((3, 3, 200_000), False),
        *(((outer, inner, cols), True) for cols in (64, 1000)
          for outer, inner in [(2, 1500), (1500, 2), (41, 97), (1031, 3), (60, 64)]),
    ],
    ids=str,
)  # fmt: skip
def test_rows_at_two_strides(device, shape, backward):
    """Row addresses are computed without a division. Results are those of dense rows to the bit;
    PyTorch's derivatives on the CPU sum the rows in another order."""
    t = make(Problem(shape), device)
    dense = ours(t, backward=backward)
    apart = {"layout": "transposed leading", "dy_layout": "sliced leading"}
    t = make(replace(t.problem, **apart), device)
    assert not t.x.is_contiguous()
    assert not t.dy.is_contiguous()
    found = ours(t, backward=backward)
    if device == "cpu" and backward:
        numerics.assert_close(found, {name: t.double() for name, t in dense.items()}, 1e-4)
    else:
        assert_same_bits(found, dense)


@pytest.mark.parametrize("dtype", [F32, F16, F64], ids=ids)
@pytest.mark.parametrize("cols", [8, 64, 1000, 4096, 70000])
@pytest.mark.parametrize("offset", [1, 3])
def test_misaligned_pointers(device, offset, cols, dtype):
    """And parameters that are not contiguous."""
    t, y = make(Problem((5, cols), dtype=dtype), device), {F32: 1e-5, F16: 2**-10, F64: 1e-12}
    apart = t.but(weight=numerics.LAYOUTS["every second"](t.weight), bias=t.bias[:1].expand(cols))
    numerics.assert_close(ours(apart, backward=False), numerics.exact(apart), y)
    for name in ("x", "dy", "weight", "bias"):
        setattr(t, name, numerics.misaligned(getattr(t, name), by=offset))
        assert getattr(t, name).data_ptr() % 16 != 0
    found, expected = ours(t), numerics.exact(t)
    numerics.assert_close({"y": found.pop("y")}, expected, y)
    numerics.assert_close(ours(t, backward=False), expected, y)
    numerics.assert_close(found, expected, {F32: 1e-4, F16: 2**-8, F64: 1e-10})


# ---- Values and sizes out of the ordinary.


@pytest.mark.parametrize("problem", families.EMPTY, ids=str)
def test_empty(device, problem):
    t = make(problem, device)
    for name, result in ours(t).items():
        like = getattr(t, problem.OUTPUTS.get(name, name.removeprefix("d")))
        assert (result.shape, result.dtype) == (like.shape, like.dtype), name
        assert result.eq(0).all(), name


@pytest.mark.parametrize("problem", SMALL, ids=str)
def test_nan_stays_where_pytorch_leaves_it(device, problem):
    """In the row, or the group of a sample: of x in the results and gradients, of dy in these."""
    for of_gradients in (False, True):
        t = make(problem, device)
        first = t.gradients()[0] if of_gradients else next(iter(t.inputs().values()))
        first[(1,) + (2,) * (first.dim() - 1)] = NAN
        found = ours(t)
        expected = numerics.stock(t, found)
        for name, result in found.items():
            if name != "residual_out":
                assert torch.equal(result.isnan(), expected[name].isnan()), name


def test_modulations_of_constant_rows_and_of_nan(device):
    """One column and constant rows give shift; NaN and Inf of modulations stay in their sample."""
    for cols, value in ((1, NAN), (8, INF)):
        t = make(modulated((3, 4, cols), affine="none"), device)
        t.x = t.x if cols == 1 else torch.ones_like(t.x)
        assert torch.equal(ours(t, backward=False)["y"], t.shift.expand(t.x.shape))
        t = make(modulated((3, 4, 16), affine="none"), device)
        t.scale[1, 0, 3] = t.shift[2, 0, 5] = value
        y, stock = (run(t, backward=False)["y"] for run in (ours, numerics.stock))
        assert torch.equal(y.isnan(), stock.isnan())
        assert torch.equal(y.isinf(), stock.isinf())


@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=ids)
@pytest.mark.parametrize("cols", [1, 5, 64, 1024, 3000, 5000, 70000])
def test_nan_and_inf_propagate_as_in_pytorch(device, cols, dtype):
    t = make(Problem((6, cols), dtype=dtype), device)
    t.x[0, cols // 2], t.x[1, -1], t.x[2, 0] = NAN, INF, -INF
    t.x[3] = t.weight[0] = NAN
    y, stock = (run(t, backward=False)["y"] for run in (ours, numerics.stock))
    assert torch.equal(y.isnan(), stock.isnan())
    assert torch.equal(y.isinf(), stock.isinf())


# ---- round_before_weight.

ROUNDED = [
    *(Problem((64, cols), dtype, statistic="rms", affine="weight")
      for cols in (64, 1000, 1021, 4096, 20_480) for dtype in (BF16, F16)),
    Problem((64, 512), BF16, F32, statistic="rms", affine="weight", out_dtype=F32),
    # Rounded to input's dtype beside a residual, a gate and an activation, too.
    *(Problem((2, 32, 512), dtype, statistic="rms", residual_dtype=residual, **options)
      for dtype, residual, options in (
          (BF16, F32, {}), (F16, BF16, {}), (BF16, BF16, {}), (BF16, BF16, {"activation": "silu"}),
          (BF16, BF16, {"activation": "silu", "gate": (2, 1, 512)}))),
    *(Problem((64, 256), BF16, weight, statistic="rms", group_size=16) for weight in (BF16, F32)),
    *(Gated((256, 1024), *dtypes, affine="weight", gate_first=first, group_size=size,
            gate_dtype=gate, out_dtype=torch.promote_types(*dtypes) if first else None)
      for dtypes in ((BF16, BF16), (BF16, F32), (F16, F16)) for first in (False, True)
      for size in (None, 128) for gate in (None, F32)),
    *(Heads((2, 50, 64), BF16, angles=angles) for angles in ("none", "positions")),
]  # fmt: skip


@pytest.mark.parametrize("problem", [replace(p, rounds=True) for p in ROUNDED], ids=str)
def test_rounding_before_the_weight(device, problem):
    """As the classes of transformers and FLA do it. Where the last bit of a statistic decides, xhat
    may be rounded to a neighbour, and so may what is computed from it."""
    t = make(problem, device)
    y, *others = problem.forward(t)
    out, step = problem.dtype_of("y"), torch.finfo(problem.dtype).eps
    given = t.but(**{name: u.double() for name, u in t.inputs().items()})
    if isinstance(problem, Problem) and others:
        given.x = others[0].double()  # residual_out
    rounded, once = (problem.formula(given, r)[0].to(out) for r in (problem.dtype, None))
    assert y.dtype == out
    torch.testing.assert_close(y, rounded, rtol=4 * step, atol=4 * step)
    for expected, least, most in ((rounded, 0.998, 1), (once, 0, 0.95)):
        same = (y.double() - expected.double()).abs() <= 1e-6 * expected.double().abs()
        assert least <= same.double().mean() <= most


# ---- CUDA: devices, streams, graphs, sizes.


@pytest.mark.multi_gpu
@pytest.mark.parametrize("problem", [*SMALL, Problem((33, 4096)), Problem((33, 200_000))], ids=str)
def test_second_device(problem):
    numerics.check(problem, "cuda:1")
    assert torch.cuda.current_device() == 0


ON_STREAMS = [
    *SMALL,
    *(Problem((64, cols)) for cols in (64, 4096, 40_000, 200_000)),
    Problem((2, 4_194_304)),
    *(modulated((3, 5, 4), kind, gated=True) for kind in ("position", "number of a sample")),
    # Groups that a cluster holds, that blocks share, and of tiles.
    *(of_groups((2, 64, side**2), 2, modulation="both") for side in (20, 28, 128, 512)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("problem", ON_STREAMS, ids=str)
def test_current_stream_and_cuda_graph(problem):
    """The input is written late on a side stream: a kernel on another stream would not see it. A
    captured forward and backward reads the values that the tensors have at the replay."""
    t = make(problem, "cuda")
    expected = ours(t)
    written = [*t.inputs().values(), *t.gradients()]
    values = [tensor.clone() for tensor in written]
    for tensor in written:
        tensor.zero_()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for tensor, value in zip(written, values, strict=True):
            tensor.copy_(value)
        found = ours(t)
    stream.synchronize()
    assert_same_bits(found, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = (ours(t, backward=False), ours(t))
    for _ in range(3):
        for tensor in written:
            tensor.normal_()
        graph.replay()
        for results in captured:
            again = ours(t)
            assert_same_bits(results, {name: again[name] for name in results})


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "problem",
    [
        *(Gated((2**31 // cols + 300, cols), BF16, group_size=size, affine="weight", rounds=True)
          for cols, size in ((128, None), (8192, 1024), (100, None))),
        *(of_groups((2, 32, 6000, 6000), 4, (BF16, None), activation="silu", layout=layout)
          for layout in ("contiguous", "channels_last")),
        over_channels((3, 70, 3200, 3200), BF16),
        *(Problem((2**31 // cols + 5, cols), BF16, F32) for cols in (64, 4096, 65_536)),
    ],
    ids=str,
)  # fmt: skip
def test_more_elements_than_32_bits_count(problem, needs_memory):
    """The last rows or the last sample alone have the same bits; a part of them is right, and so
    are the sums over all rows."""
    needs_memory(60)
    t = make(problem, "cuda")
    whole = ours(t)
    if type(problem) is Problem:
        rows, sums = problem.rows, dict.fromkeys(("dweight", "dbias"), 0.0)
        for start in range(0, rows, rows // 64):
            of_part = numerics.exact(t.of_rows(slice(start, start + rows // 64)))
            sums = {name: total + of_part[name] for name, total in sums.items()}
        # A sum of n numbers of deviation 1 is of order sqrt(n). Float32 sums taken in blocks err by
        # far less than 1e-4 of that.
        for name, total in sums.items():
            torch.testing.assert_close(whole[name].double(), total, rtol=0, atol=1e-4 * rows**0.5)
    part = slice(-min(500, problem.shape[0] // 2), None)
    alone = t.of_rows(part)
    del t
    found = ours(alone)
    for name in problem.of_rows:
        if name in whole:
            assert torch.equal(whole[name][part], found[name]), name
    del whole
    if math.prod(alone.x.shape) < 2**29:
        expected = numerics.exact(alone, found)
        numerics.assert_close({"y": found["y"]}, expected, 2**-6)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "problem",
    [
        Problem((1, 2**30 + 4104), affine="weight"),
        Problem((1, 2**31 - 5), BF16, affine="weight"),
        # Two rows share a modulation, one is a group of its own.
        *(Problem((rows, 2**30 + 4104), affine=affine, shift=(2**30 + 4104,),
                  scale_by=(2**30 + 4104,)) for rows, affine in ((1, "weight"), (2, "none"))),
        *(Gated((1, 2**31 - 8), BF16, affine="none", gate_first=first) for first in (False, True)),
    ],
    ids=str,
)  # fmt: skip
def test_columns_beyond_what_32_bits_count(problem, needs_memory):
    """The bytes of a float32 row, and the columns to the last chunk's end, overflow 32 bits. The
    statistics of so many random numbers are those of a part of them, but for what is allowed."""
    needs_memory(80)
    t = make(problem, "cuda")
    found = ours(t)
    for part in (slice(0, 2**27), slice(2**29, 2**29 + 2**27), slice(-(2**27), None)):
        names = (*problem.NAMES, *problem.OUTPUTS.values())
        of_part = t.but(**{name: u[..., part] for name, u in t.named(names).items()})
        results = {name: result[..., part] for name, result in found.items()}
        numerics.assert_close(results, numerics.exact(of_part, results), 2**-6)
