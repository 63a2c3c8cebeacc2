# SPDX-License-Identifier: Apache-2.0
"""Problems, and the contract by which their results are judged.

The contract: the error against float64 is at most 1.25 times PyTorch's own error on the same input,
plus one rounding of the result's dtype. PyTorch's error is that of eager PyTorch in float32;
half-precision tensors are converted to float32 for that call.

The error of a result is the root mean square over its elements. The greatest error of an element is
bounded too, by a wider factor, because summing in another order easily changes it by a half.
"""

import itertools
import math
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any

import forms
import reference
import torch
import torch.nn.functional as F

FACTOR = 1.25  # of PyTorch's error
GREATEST_FACTOR = 2.0  # of PyTorch's greatest error
# The reference rounds a float64 result as much as the operator does. The two may differ by this
# many roundings, times the square root of the number of rows or columns, whichever is greater.
FLOAT64_ROUNDINGS = 16
# A half-precision result may exceed its rounding by this part of it, because its float32 value may
# be less exact (an activation's approximation). The excess is too small to matter.
HALF_SLACK = 1 / 64

# What torch.library.opcheck looks at; tracing with dynamic shapes takes long.
QUICK = ("test_schema", "test_faketensor")
EVERY = (*QUICK, "test_autograd_registration", "test_aot_dispatch_dynamic")

ACTIVATIONS = (None, "gelu", "gelu_tanh", "silu", "relu")
EPS = 1e-5
# Lengths of rows for which the tests force each strategy, in both directions.
FORCED_COLS = [1, 3, 8, 37, 63, 64, 256, 257, 1024, 1027, 2048, 4096, 8192, 8195, 16384,
               65536, 262144]  # fmt: skip


def ids(value):
    """The name of a dtype, of several or of another parameter in a test's name."""
    if isinstance(value, tuple):
        return "-".join(map(ids, value))
    return str(value).removeprefix("torch.")


def covering(*dimensions, strength=2):
    """So many elements of a product that all values of each `strength` dimensions meet in one.

    A fault that needs a certain value of one dimension, or a certain pair (with strength 3, three)
    is met as by the whole product, with a fraction of its elements. The choice is always the same.
    """
    sizes = [range(len(dimension)) for dimension in dimensions]
    left = [*itertools.product(*sizes)]
    met_by = {
        one: {*itertools.combinations(enumerate(one), min(strength, len(sizes)))} for one in left
    }
    missing = set().union(*met_by.values())
    found = []
    while missing:
        best = max(left, key=lambda one: len(met_by[one] & missing))
        missing -= met_by[best]
        left.remove(best)
        found.append(best)
    return [tuple(d[i] for d, i in zip(dimensions, one, strict=True)) for one in sorted(found)]


def made(arguments, device):
    """Arguments by name, with ones in the place of each (shape, dtype)."""
    return {
        name: torch.ones(given[0], device=device).to(given[1])
        if isinstance(given, tuple) and isinstance(given[-1:][0] if given else None, torch.dtype)
        else given
        for name, given in arguments.items()
    }


def rows_for(cols):
    return max(3, min(512, 16384 // cols))


@dataclass(frozen=True)
class Problem:
    """One call: shapes, dtypes and options."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype | None = None  # by default dtype
    _: KW_ONLY
    normalized_ndim: int = 1
    affine: str = "both"  # or "weight", "bias", "none"
    affine_scale: float = 1.0  # weight and bias are of this order
    activation: str | None = None
    scale: float = 1.0
    out_dtype: torch.dtype | None = None
    residual_dtype: torch.dtype | None = None  # None: no residual
    shift: tuple[int, ...] | None = None  # the modulations' shapes; None: no such modulation
    scale_by: tuple[int, ...] | None = None
    gate: tuple[int, ...] | None = None
    modulation_dtype: torch.dtype | None = None  # by default dtype
    modulation_layout: str = "contiguous"  # or any other of LAYOUTS
    mean: float = 0.0
    eps: float = EPS
    statistic: str = "layer"
    weight_offset: float = 0.0

    @property
    def normalized_shape(self):
        return self.shape[len(self.shape) - self.normalized_ndim :]

    @property
    def is_ada(self):
        return not (self.shift is None and self.scale_by is None and self.gate is None)

    @property
    def cols(self):
        return math.prod(self.normalized_shape)

    @property
    def rows(self):
        return math.prod(self.shape[: len(self.shape) - self.normalized_ndim])

    def __str__(self):
        """The shape, and what is not as by default."""
        values = [(f, getattr(self, f.name)) for f in fields(self)[1:]]
        named = [f"{f.name}={value}" for f, value in values if value != f.default]
        return "-".join(["x".join(map(str, self.shape)), *named]).replace("torch.", "")


# The shapes of modulations of an input of shape (B, S, D).
MODULATIONS = {
    "all": lambda b, s, d: (d,),
    "sample": lambda b, s, d: (b, 1, d),
    "token": lambda b, s, d: (b, s, d),
    "position": lambda b, s, d: (1, s, d),
    "position without a batch": lambda b, s, d: (s, d),
    "number": lambda b, s, d: (),
    "number of a sample": lambda b, s, d: (b, 1, 1),
    "number of a token": lambda b, s, d: (b, s, 1),
}


def modulated(shape, kind="sample", *, gated=False, dtypes=(torch.float32,) * 4, **others):
    """A problem whose modulations are all of one kind, except those whose shapes `others` gives.

    dtypes: of input, residual, modulations, and weight (None: there is none).
    """
    input_dtype, residual_dtype, modulation_dtype, weight_dtype = dtypes
    modulation = MODULATIONS[kind](*shape)
    problem: dict[str, Any] = {
        "dtype": input_dtype,
        "modulation_dtype": modulation_dtype,
        "weight_dtype": weight_dtype,
        "affine": "none" if weight_dtype is None else "both",
        "shift": modulation,
        "scale_by": modulation,
    }
    if gated:
        problem |= {"residual_dtype": residual_dtype, "gate": modulation}
    return Problem(shape, **{**problem, **others})


@dataclass
class Tensors:
    """The tensors of a problem."""

    problem: Problem
    x: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    dy: torch.Tensor
    residual: torch.Tensor | None = None
    dresidual: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    gate: torch.Tensor | None = None

    def of_rows(self, part):
        """The same with a copy of some rows: of the tensors that have all rows or samples."""
        names = ("x", "dy", "residual", "dresidual", "shift", "scale", "gate")
        tensors = {name: getattr(self, name) for name in names}
        return replace(self, **{n: u[part].clone() for n, u in tensors.items() if u is not None})


def _chunk(tensor):
    """One of six chunks of a larger tensor, as diffusion transformers cut their modulations."""
    return torch.cat([tensor] * 6, -1).chunk(6, -1)[2]


def _every_second(tensor):
    return tensor.repeat_interleave(2, -1)[..., ::2]


def _transposed(tensor):
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor


def misaligned(tensor, by=1):
    """A contiguous copy that begins at the second element of its allocation, or by some others."""
    flat = torch.cat([tensor.new_zeros(by), tensor.flatten()])
    return flat[by:].view(tensor.shape)


# Of modulations.
LAYOUTS = {
    "contiguous": lambda tensor: tensor,
    "chunk": _chunk,
    "every second": _every_second,
    "transposed": _transposed,
    "misaligned": misaligned,
}


def within(tensor, dim, before, after):
    """A slice of a larger tensor that has so many NaN before and after it in this dimension."""
    shape = list(tensor.shape)
    shape[dim] += before + after
    larger = tensor.new_full(shape, math.nan)
    return larger.narrow(dim, before, tensor.shape[dim]).copy_(tensor)


# Of rows in two dimensions or three: none is contiguous.
ROW_LAYOUTS = {
    "transposed leading": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "sliced leading": lambda x: within(x, 1, 2, 1),
    "every other row": lambda x: x.repeat_interleave(2, -2)[..., ::2, :],
    "column slice": lambda x: within(x, -1, 8, 16),
    "odd column slice": lambda x: within(x, -1, 3, 2),
    "every other column": _every_second,
    "transposed": _transposed,
    "expanded": lambda x: x[:1, :1].expand(x.shape),
    "expanded column": lambda x: x[..., :1].expand(x.shape),
    "permuted": lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
}


def make(problem, device, seed=0):
    generator = torch.Generator(device).manual_seed(seed)

    def randn(shape, dtype):
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    p = problem
    weight_dtype = p.weight_dtype or p.dtype
    x = (randn(p.shape, torch.float32) + p.mean).to(p.dtype)
    weight = bias = None
    if p.affine in ("both", "weight"):
        weight = p.affine_scale * (1 + 0.5 * randn(p.normalized_shape, weight_dtype))
    if p.affine in ("both", "bias"):
        bias = p.affine_scale * randn(p.normalized_shape, weight_dtype)
    tensors = Tensors(p, x, weight, bias, dy=randn(p.shape, p.out_dtype or p.dtype))
    if p.residual_dtype is not None:
        tensors.residual = randn(p.shape, p.residual_dtype)
        tensors.dresidual = randn(p.shape, p.residual_dtype)
    layout = LAYOUTS[p.modulation_layout]
    for name, shape in (("shift", p.shift), ("scale", p.scale_by), ("gate", p.gate)):
        if shape is not None:
            setattr(tensors, name, layout(randn(shape, p.modulation_dtype or p.dtype)))
    return tensors


def kind_of(t):
    """The kind in forms.NAMES, which says what tensors the function takes, and in which order."""
    if t.problem.is_ada:
        return "modulated" if t.residual is None else "gated"
    return "plain" if t.residual is None else "residual"


def forward(t):
    """Our results: (y,), or (y, residual_out)."""
    p, kind = t.problem, kind_of(t)
    function = forms.ours(
        kind, statistic=p.statistic, activation=p.activation, factor=p.scale,
        offset=p.weight_offset, eps=p.eps, normalized_shape=p.normalized_shape,
        out_dtype=p.out_dtype,
    )  # fmt: skip
    return function(*(getattr(t, name) for name in forms.NAMES[kind]))


def ours(t, *, backward=True):
    """Our results and gradients, through autograd, by name."""
    if not backward:
        with torch.no_grad():
            return dict(zip(("y", "residual_out"), forward(t), strict=False))
    given = {name: getattr(t, name) for name in forms.NAMES[kind_of(t)]}
    leaves = {n: u.detach().requires_grad_() for n, u in given.items() if u is not None}
    out = forward(replace(t, **leaves))
    torch.autograd.backward(out, (t.dy, t.dresidual)[: len(out)])
    results = dict(zip(("y", "residual_out"), (o.detach() for o in out), strict=False))
    return results | {f"d{name}": leaf.grad for name, leaf in leaves.items()}


def activate(z, activation):
    """PyTorch's own activation."""
    if activation is None:
        return z
    if activation == "gelu_tanh":
        return F.gelu(z, approximate="tanh")
    return getattr(F, activation)(z)


def _normalized(t, found):
    """The tensor that the norm normalizes: x, or its sum with the residual.

    A gated sum is a result with an error of its own. The results computed from it are judged for
    the sum that was found, which is rounded to residual's dtype.
    """
    if t.residual is None:
        return t.x
    return reference.add(t.x, t.residual) if t.gate is None else found["residual_out"]


def _past_the_gate(gate_backward, found, *candidates):
    """(dinput, dgate), computed from the candidate for dx whose dinput is nearest to the one found.

    A single kernel for norm and gate multiplies dx before it is rounded. With two kernels, the
    second reads dx rounded to residual's dtype, and is judged for that dx.
    """
    results = [gate_backward(dx) for dx in candidates]

    # The distances are relative, so that all elements count alike. Otherwise one large element
    # would decide in rows of two columns.
    def distance(result):
        dinput, own = result[0].double(), found["dx"].double()
        sizes = dinput.abs() + own.abs() + torch.finfo(torch.float32).tiny
        return ((dinput - own).abs() / sizes).mean().item()

    return min(results, key=distance)


def stock(t, found, *, backward=True):
    """PyTorch's y and gradients in float32 (float64 for a float64 x), by name."""
    p = t.problem
    x = _normalized(t, found)
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    leaves: list[Any] = [
        None if tensor is None else tensor.detach().to(acc, copy=True).requires_grad_()
        for tensor in (x, t.weight, t.bias, t.shift, t.scale)
    ]
    x, weight, bias, shift, scale = leaves
    # The normalized dimensions are flattened: with several of them and many rows, PyTorch's own
    # backward fails on CUDA.
    flat_x = x.flatten(x.dim() - p.normalized_ndim)
    flat_weight, flat_bias = (None if u is None else u.flatten() for u in (weight, bias))
    if p.statistic == "rms":
        factor = None if flat_weight is None else flat_weight + p.weight_offset
        y = F.rms_norm(flat_x, flat_x.shape[-1:], factor, p.eps)
        y = (y if flat_bias is None else y + flat_bias).reshape(x.shape)
    else:
        y = F.layer_norm(flat_x, flat_x.shape[-1:], flat_weight, flat_bias, p.eps).reshape(x.shape)
    y = activate(y, p.activation) * p.scale
    y = y if scale is None else y * (1 + scale)
    y = y if shift is None else y + shift
    results = {"y": y.detach()}
    if t.gate is not None:
        wide = torch.float64 in (t.x.dtype, t.residual.dtype, t.gate.dtype)
        gate_acc = torch.float64 if wide else torch.float32
        input, residual, gate = (u.to(gate_acc) for u in (t.x, t.residual, t.gate))
        results["residual_out"] = residual + gate * input
    if not backward:
        return results
    y.backward(t.dy.to(acc))
    dx = x.grad if t.dresidual is None else x.grad + t.dresidual.to(acc)
    results["dx"] = dx
    if t.residual is not None:
        results["dresidual"] = dx
    if t.gate is not None:

        def gate_backward(dx):
            d = dx.to(gate_acc)
            return d * gate, (d * input).sum_to_size(gate.shape)

        past = _past_the_gate(gate_backward, found, found["dresidual"], dx)
        results["dx"], results["dgate"] = past
    for name, leaf in zip(("weight", "bias", "shift", "scale"), leaves[1:], strict=True):
        if leaf is not None:
            results[f"d{name}"] = leaf.grad
    return results


def exact(t, found=None, *, backward=True):
    """The results in float64, by name. With a gate, those after it are computed from the rounded
    tensors in `found`."""
    p = t.problem
    x = _normalized(t, found)
    results = {}
    if t.gate is not None:
        results["residual_out"] = reference.gated_add(t.x, t.residual, t.gate)
    args = (p.normalized_ndim, t.weight, t.bias, p.eps, p.activation, p.scale)
    kind: dict[str, Any] = {"shift": t.shift, "scale": t.scale, "statistic": p.statistic}
    kind["weight_offset"] = p.weight_offset
    results["y"] = reference.layer_norm(x, *args, **kind).y
    if not backward:
        return results
    gradients = reference.layer_norm_backward(t.dy, x, *args, t.dresidual, **kind)
    results |= gradients._asdict()
    if t.residual is not None:
        results["dresidual"] = gradients.dx
    if t.gate is not None:

        def gate_backward(dx):
            return reference.gate_backward(dx, t.x, t.gate)

        past = _past_the_gate(gate_backward, found, found["dresidual"], gradients.dx)
        results["dx"], results["dgate"] = past
    return results


def dtype_of(problem, name):
    """The dtype that a result must have."""
    if name == "y":
        return problem.out_dtype or problem.dtype
    if name in ("residual_out", "dresidual"):
        return problem.residual_dtype
    if name in ("dweight", "dbias"):
        return problem.weight_dtype or problem.dtype
    if name in ("dshift", "dscale", "dgate"):
        return problem.modulation_dtype or problem.dtype
    return problem.dtype


def rounding(value, dtype):
    """A bound on the error of rounding value to dtype: half a unit in the last place or more."""
    info = torch.finfo(dtype)
    return value.abs().clamp(min=info.tiny) * (info.eps / 2)


def double_rounding(problem, name):
    """Whether a result is rounded twice: to the residual's dtype, then to the input's.

    With a gate, dx is judged for the tensor that the gate multiplied, rounded or not.
    """
    is_cast = name == "dx" and problem.residual_dtype not in (None, problem.dtype)
    return is_cast and problem.gate is None


def beyond_rounding(actual, expected, problem, name):
    """The error of each element beyond the roundings that it may have."""
    error = (actual.double() - expected).abs()
    if actual.dtype != torch.float64:
        slack = 1 + HALF_SLACK if actual.dtype.itemsize == 2 else 1
        error = error - slack * rounding(expected, actual.dtype)
    if double_rounding(problem, name):
        error = error - rounding(expected, problem.residual_dtype)
    return error.clamp(min=0)


def assert_close(found, expected, tolerance):
    """Asserts that named results are those in float64, relatively or absolutely.

    tolerance: one for all, or of each dtype.
    """
    for name, result in found.items():
        allowed = tolerance if isinstance(tolerance, float) else tolerance[result.dtype]
        one, other = {name: result.double()}, {name: expected[name]}
        torch.testing.assert_close(one, other, rtol=allowed, atol=allowed)


def by_layouts(plans, *, forward=None, backward=None):
    """A `run` for check: the norm by the operators, each direction by its forced layout."""
    ops = torch.ops.fused_layernorm

    def run(t, **_):
        p = t.problem
        try:
            plans.force(forward and f"strategy={forward}")
            y, *statistics = ops.layer_norm_forward(
                t.x, p.normalized_ndim, t.weight, t.bias, p.eps, p.activation, p.scale,
                statistic=p.statistic,
            )  # fmt: skip
            plans.force(backward and f"strategy={backward}")
            gradients = ops.layer_norm_backward(
                t.dy, t.x, p.normalized_ndim, *statistics, t.weight, t.bias, None, p.activation,
                p.scale, True, True, True, p.statistic,
            )  # fmt: skip
        finally:
            plans.force(None)
        return dict(zip(("y", "dx", "dweight", "dbias"), (y, *gradients), strict=True))

    return run


def check_masks(operator, args, masks):
    """Asserts that an operator of backward gives the gradients that a mask asks for, and no others.

    The order of a gradient's sums does not depend on the other gradients, unless the plan does. So
    the gradients agree with those of all only to rounding.
    """
    everything = operator(*args, *[True] * len(masks[0]))
    for mask in masks:
        gradients = operator(*args, *mask)
        for gradient, whole, needed in zip(gradients, everything, mask, strict=True):
            assert gradient.dtype == whole.dtype
            assert gradient.is_contiguous()
            if needed:
                tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[gradient.dtype]
                torch.testing.assert_close(gradient, whole, rtol=tolerance, atol=tolerance)
            else:
                assert gradient.shape == (0,)
    return everything


@dataclass
class Errors:
    """The errors of one result, over all draws."""

    squares: float = 0.0
    greatest: float = 0.0
    count: int = 0
    nan: bool = False

    def add(self, error):
        self.squares += error.square().sum().item()
        self.greatest = max(self.greatest, error.max().item())
        self.count += error.numel()
        self.nan |= bool(error.isnan().any())

    @property
    def rms(self):
        return math.sqrt(self.squares / self.count)


class Judgement:
    """The errors of results by name, ours and PyTorch's, over all draws, and what of them breaks
    the contract."""

    def __init__(self):
        self._found: dict[str, Errors] = {}
        self._stock: dict[str, Errors] = {}
        self._magnitude: dict[str, float] = {}

    def add(self, name, error, expected, stock):
        """error: beyond the roundings that our result may have."""
        self._found.setdefault(name, Errors()).add(error)
        self._stock.setdefault(name, Errors()).add((stock.double() - expected).abs())
        greatest = expected.abs().max().item()
        self._magnitude[name] = max(self._magnitude.get(name, 0.0), greatest)

    def broken(self, slack_of, factor=FACTOR, greatest_factor=GREATEST_FACTOR):
        """A sentence for each result that breaks the contract.

        slack_of: by how much a result may, from its name and its greatest element.
        greatest_factor: None, if the error of a single element does not count.
        """
        sentences = []
        for name, errors in self._found.items():
            slack, stock = slack_of(name, self._magnitude[name]), self._stock[name]
            rms, greatest = factor * stock.rms + slack, math.inf
            if greatest_factor is not None:
                greatest = greatest_factor * stock.greatest + slack
            if errors.nan or not errors.rms <= rms or not errors.greatest <= greatest:
                sentences.append(
                    f"{name}: rms error beyond rounding {errors.rms:.3g} (allowed {rms:.3g}), "
                    f"greatest {errors.greatest:.3g} (allowed {greatest:.3g})"
                )
        return sentences


def check(problem, device, *, backward=True, run=ours, sample=8192, factor=FACTOR):
    """Asserts the contract for every result of a problem.

    sample: the number of elements to judge; tensors are drawn until there are so many, at most 32
        times.
    factor: how many times PyTorch's error an error may be.
    """
    numel = problem.rows * problem.cols
    draws = max(512 // problem.cols, sample // numel)
    if numel <= 1 << 18:
        # All elements of a row share the errors of its mean and rstd, so a few rows would leave the
        # result to chance.
        draws = max(draws, 32 // problem.rows)
    draws = min(32, max(1, draws))
    judgement = Judgement()
    for seed in range(draws):
        t = make(problem, device, seed)
        actual = run(t, backward=backward)
        expected, yardstick = (f(t, actual, backward=backward) for f in (exact, stock))
        if "residual_out" in actual and t.gate is None:
            residual_out = actual.pop("residual_out")
            assert residual_out.dtype == problem.residual_dtype
            assert torch.equal(residual_out, reference.add(t.x, t.residual))
        for name, result in actual.items():
            assert result.dtype == dtype_of(problem, name), name
            assert result.shape == expected[name].shape, name
            assert result.device == t.x.device, name
            error = beyond_rounding(result, expected[name], problem, name)
            judgement.add(name, error, expected[name], yardstick[name])

    def slack_of(name, magnitude):
        if dtype_of(problem, name) == torch.float64 and problem.dtype == torch.float64:
            terms = math.sqrt(max(problem.cols, problem.rows))
            return FLOAT64_ROUNDINGS * terms * 2**-53 * magnitude
        # PyTorch's own sum over a few rows may be exact by chance.
        is_sum = name in ("dweight", "dbias", "dshift", "dscale", "dgate")
        return 2**-24 * magnitude if is_sum else 0.0

    broken = judgement.broken(slack_of, factor)
    assert not broken, f"{problem}: {'; '.join(broken)}"


def check_draws(draws, dtype):
    """Asserts the contract for the results of draws, each (ours, in float64, PyTorch's in float32),
    by name. dtype: input's."""
    judgement = Judgement()
    for actual, expected, stock in draws:
        assert actual.keys() == stock.keys()
        for name, result in actual.items():
            assert result.shape == stock[name].shape, name
            wanted = expected[name].reshape(result.shape)
            error = beyond_rounding(result, wanted, _NO_RESIDUAL, name)
            judgement.add(name, error, wanted, stock[name])
    # PyTorch's own sum over few numbers may be exact by chance.
    slack = 2.0 ** (-50 if dtype is torch.float64 else -23)
    broken = judgement.broken(lambda name, greatest: slack * greatest)
    assert not broken, "; ".join(broken)


_NO_RESIDUAL = Problem((1,))
