"""Problems, and the contract by which their results are judged.

The contract: the error against float64 is at most 1.25 times PyTorch's own error on the same input,
plus one rounding of the result's dtype. PyTorch's error is that of float32 arithmetic, as eager
PyTorch does it: with half-precision tensors, of the same call on the tensors converted to float32.

The error of a result is its root mean square over the elements. The greatest error among them is
held too, to a wider factor: the same sums taken in another order easily move it by a half.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

import fused_layernorm
from fused_layernorm import reference

FACTOR = 1.25  # of PyTorch's error
GREATEST_FACTOR = 2.0  # of PyTorch's greatest error
# In float64 the reference rounds as much as what it judges: both stay within some roundings, of
# which a row's or a column's sum does as many as the root of its length.
FLOAT64_ROUNDINGS = 16
# A result of half precision may come from a coarser float32 (an activation's approximation): by
# this part of the half-precision rounding, which no one can see.
HALF_SLACK = 1 / 64

ACTIVATIONS = (None, "gelu", "gelu_tanh", "silu", "relu")
EPS = 1e-5


@dataclass(frozen=True)
class Problem:
    """One call: shapes, dtypes and options."""

    shape: tuple[int, ...]
    normalized_ndim: int = 1
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype | None = None  # by default dtype
    affine: str = "both"  # or "weight", "bias", "none"
    affine_scale: float = 1.0  # weight and bias are of this order
    activation: str | None = None
    scale: float = 1.0
    out_dtype: torch.dtype | None = None
    residual_dtype: torch.dtype | None = None  # None: no residual
    mean: float = 0.0
    eps: float = EPS

    @property
    def normalized_shape(self):
        return self.shape[len(self.shape) - self.normalized_ndim :]

    @property
    def cols(self):
        return math.prod(self.normalized_shape)

    @property
    def rows(self):
        return math.prod(self.shape[: len(self.shape) - self.normalized_ndim])

    def __str__(self):
        parts = ["x".join(map(str, self.shape)), str(self.dtype).removeprefix("torch.")]
        if self.normalized_ndim != 1:
            parts.append(f"last{self.normalized_ndim}")
        for name in ("weight_dtype", "out_dtype", "residual_dtype"):
            if getattr(self, name) is not None:
                parts.append(f"{name}={getattr(self, name)}".replace("torch.", ""))
        for name, default in (
            ("affine", "both"),
            ("affine_scale", 1.0),
            ("activation", None),
            ("scale", 1.0),
            ("mean", 0),
        ):
            if getattr(self, name) != default:
                parts.append(f"{name}={getattr(self, name)}")
        return "-".join(parts)


@dataclass
class Tensors:
    """The tensors of a problem, and what is given to layer_norm beside them."""

    problem: Problem
    x: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    dy: torch.Tensor
    residual: torch.Tensor | None = None
    dresidual: torch.Tensor | None = None
    options: dict = field(default_factory=dict)


def make(problem, device, seed=0):
    generator = torch.Generator(device).manual_seed(seed)

    def randn(shape, dtype):
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    p = problem
    weight_dtype = p.weight_dtype or p.dtype
    y_dtype = p.out_dtype or p.dtype
    x = (
        randn(p.shape, p.dtype)
        if not p.mean
        else (randn(p.shape, torch.float32) + p.mean).to(p.dtype)
    )
    tensors = Tensors(
        problem=p,
        x=x,
        weight=p.affine_scale * (1 + 0.5 * randn(p.normalized_shape, weight_dtype))
        if p.affine in ("both", "weight")
        else None,
        bias=p.affine_scale * randn(p.normalized_shape, weight_dtype)
        if p.affine in ("both", "bias")
        else None,
        dy=randn(p.shape, y_dtype),
    )
    if p.residual_dtype is not None:
        tensors.residual = randn(p.shape, p.residual_dtype)
        tensors.dresidual = randn(p.shape, p.residual_dtype)
    tensors.options = {
        "normalized_shape": p.normalized_shape,
        "activation": p.activation,
        "scale": p.scale,
        "out_dtype": p.out_dtype,
    }
    return tensors


def forward(t):
    """Our result: y, or (y, residual_out)."""
    if t.residual is None:
        return fused_layernorm.layer_norm(t.x, t.weight, t.bias, t.problem.eps, **t.options)
    return fused_layernorm.add_layer_norm(
        t.x, t.residual, t.weight, t.bias, t.problem.eps, **t.options
    )


def _leaf(tensor):
    return None if tensor is None else tensor.detach().clone().requires_grad_()


def ours(t, *, backward=True):
    """Our y and gradients, through autograd, by name."""
    if not backward:
        with torch.no_grad():
            out = forward(t)
        names = ("y",) if t.residual is None else ("y", "residual_out")
        return dict(zip(names, (out,) if t.residual is None else out, strict=True))
    leaves = replace(
        t, x=_leaf(t.x), weight=_leaf(t.weight), bias=_leaf(t.bias), residual=_leaf(t.residual)
    )
    out = forward(leaves)
    results = {}
    if t.residual is None:
        out.backward(t.dy)
        results["y"] = out.detach()
    else:
        torch.autograd.backward(out, (t.dy, t.dresidual))
        results["y"], results["residual_out"] = (o.detach() for o in out)
        results["dresidual"] = leaves.residual.grad
    results["dx"] = leaves.x.grad
    if t.weight is not None:
        results["dweight"] = leaves.weight.grad
    if t.bias is not None:
        results["dbias"] = leaves.bias.grad
    return results


def _activate(z, activation):
    match activation:
        case "gelu":
            return F.gelu(z)
        case "gelu_tanh":
            return F.gelu(z, approximate="tanh")
        case "silu":
            return F.silu(z)
        case "relu":
            return F.relu(z)
    return z


def stock(t, *, backward=True):
    """PyTorch's y and gradients in float32 (float64 for a float64 x), by name."""
    p = t.problem
    x = t.x if t.residual is None else reference.add(t.x, t.residual)
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    leaves: list[Any] = [
        None if tensor is None else tensor.to(acc).requires_grad_()
        for tensor in (
            x.detach().clone(),
            *(None if u is None else u.detach().clone() for u in (t.weight, t.bias)),
        )
    ]
    x, weight, bias = leaves
    # In one normalized dimension: with more and many rows, PyTorch's own backward fails on CUDA.
    flat_x = x.flatten(x.dim() - p.normalized_ndim)
    flat_weight, flat_bias = (None if u is None else u.flatten() for u in (weight, bias))
    y = F.layer_norm(flat_x, flat_x.shape[-1:], flat_weight, flat_bias, p.eps).reshape(x.shape)
    y = _activate(y, p.activation) * p.scale
    if not backward:
        return {"y": y.detach()}
    y.backward(t.dy.to(acc))
    dx = x.grad if t.dresidual is None else x.grad + t.dresidual.to(acc)
    results = {"y": y.detach(), "dx": dx}
    if t.residual is not None:
        results["dresidual"] = dx
    if weight is not None:
        results["dweight"] = weight.grad
    if bias is not None:
        results["dbias"] = bias.grad
    return results


def exact(t, *, backward=True):
    """The results in float64, by name."""
    p = t.problem
    x = t.x if t.residual is None else reference.add(t.x, t.residual)
    args = (p.normalized_ndim, t.weight, t.bias, p.eps, p.activation, p.scale)
    y = reference.layer_norm(x, *args).y
    if not backward:
        return {"y": y}
    dx, dweight, dbias = reference.layer_norm_backward(t.dy, x, *args, t.dresidual)
    results = {"y": y, "dx": dx, "dweight": dweight, "dbias": dbias}
    if t.residual is not None:
        results["dresidual"] = dx
    return results


def dtype_of(problem, name):
    """The dtype that a result must have."""
    if name == "y":
        return problem.out_dtype or problem.dtype
    if name in ("residual_out", "dresidual"):
        return problem.residual_dtype
    if name in ("dweight", "dbias"):
        return problem.weight_dtype or problem.dtype
    return problem.dtype


def rounding(value, dtype):
    """Half a unit in the last place of value's magnitude, or more."""
    info = torch.finfo(dtype)
    return value.abs().clamp(min=info.tiny) * (info.eps / 2)


def double_rounding(problem, name):
    """Whether a result is rounded twice: to the residual's dtype, then to the input's."""
    return name == "dx" and problem.residual_dtype not in (None, problem.dtype)


def beyond_rounding(actual, expected, problem, name):
    """A result's errors beyond the one rounding that each element may have."""
    error = (actual.double() - expected).abs()
    if actual.dtype != torch.float64:
        slack = 1 + HALF_SLACK if actual.dtype.itemsize == 2 else 1
        error = error - slack * rounding(expected, actual.dtype)
    if double_rounding(problem, name):
        error = error - rounding(expected, problem.residual_dtype)
    return error.clamp(min=0)


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


def check(problem, device, *, backward=True, run=ours, sample=8192):
    """Asserts the contract for every result of a problem, over as many draws as make a sample."""
    numel = problem.rows * problem.cols
    draws = max(512 // problem.cols, sample // numel)
    if numel <= 1 << 18:
        # A row's mean and rstd err alike for all its elements: a few rows would show luck.
        draws = max(draws, 32 // problem.rows)
    draws = min(32, max(1, draws))
    found: dict[str, Errors] = {}
    yardsticks: dict[str, Errors] = {}
    magnitude: dict[str, float] = {}
    for seed in range(draws):
        t = make(problem, device, seed)
        actual, expected, yardstick = (f(t, backward=backward) for f in (run, exact, stock))
        if "residual_out" in actual:
            residual_out = actual.pop("residual_out")
            assert residual_out.dtype == problem.residual_dtype
            assert torch.equal(residual_out, reference.add(t.x, t.residual))
        for name, result in actual.items():
            assert result.dtype == dtype_of(problem, name), name
            assert result.shape == expected[name].shape, name
            assert result.device == t.x.device, name
            error = beyond_rounding(result, expected[name], problem, name)
            found.setdefault(name, Errors()).add(error)
            error = (yardstick[name].double() - expected[name]).abs()
            yardsticks.setdefault(name, Errors()).add(error)
            magnitude[name] = max(magnitude.get(name, 0.0), expected[name].abs().max().item())

    broken = []
    for name, errors in found.items():
        slack = 0.0
        if dtype_of(problem, name) == torch.float64 and problem.dtype == torch.float64:
            terms = math.sqrt(max(problem.cols, problem.rows))
            slack = FLOAT64_ROUNDINGS * terms * 2**-53 * magnitude[name]
        elif name in ("dweight", "dbias"):
            # PyTorch's own sum over a few rows may be exact by the luck of its order.
            slack = 2**-24 * magnitude[name]
        rms = FACTOR * yardsticks[name].rms + slack
        greatest = GREATEST_FACTOR * yardsticks[name].greatest + slack
        if errors.nan or not errors.rms <= rms or not errors.greatest <= greatest:
            broken.append(
                f"{name}: rms error beyond rounding {errors.rms:.3g} (allowed {rms:.3g}), "
                f"greatest {errors.greatest:.3g} (allowed {greatest:.3g})"
            )
    assert not broken, f"{problem}: {'; '.join(broken)}"
