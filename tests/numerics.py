# SPDX-License-Identifier: Apache-2.0
"""The harness of all norms: problems, and the contract by which their results are judged.

The contract: the error against float64 is at most 1.25 times PyTorch's own error on the same input,
plus one rounding of the result's dtype. PyTorch's error is that of eager PyTorch in float32;
half-precision tensors are converted to float32 for that call. The error of a result is the root
mean square over its elements. The greatest error of an element is bounded too, by a wider factor,
because summing in another order easily changes it by a half.

A new family of norms is a subclass of Call, here or in families.py, with

    NAMES, OUTPUTS   what a call is given; its results, with the names of their gradients
    draw(randn)      the tensors of a problem, by name, from its fields
    forward(t)       our results, as a tuple
    formula(t)       the same by reference.py, of float64 tensors, perhaps with round_before_weight
    stock(t)         the same by PyTorch's own functions, of float32 tensors

and what is not as by default: dtype_of, OF_ROWS (results that do not depend on a row's batch),
check_strides, SLACK, rounding_of, draws. Its problems then stand in the lists of families.py, which
test_every_norm.py runs, in those of test_accuracy.py, which have both sides of each limit, and in
test_beside.py and test_sanitizers.py, with one for every strategy.
"""

import contextlib
import itertools
import json
import math
from dataclasses import KW_ONLY, dataclass, fields, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import reference
import torch
import torch.nn.functional as F

import fused_layernorm as fl

FACTOR = 1.25  # of PyTorch's error
GREATEST_FACTOR = 2.0  # of PyTorch's greatest error
# A float64 result may differ from the reference, which is rounded as much, by so many roundings,
# times the square root of the number of rows or columns, whichever is greater.
FLOAT64_ROUNDINGS = 16
# A half-precision result may exceed its rounding by this part of it, because its float32 value may
# be less exact (an activation's approximation). The excess is too small to matter.
HALF_SLACK = 1 / 64

# What torch.library.opcheck looks at; tracing with dynamic shapes takes long.
QUICK = ("test_schema", "test_faketensor")
EVERY = (*QUICK, "test_autograd_registration", "test_aot_dispatch_dynamic")

ACTIVATIONS = (None, "gelu", "gelu_tanh", "silu", "relu")
EPS = 1e-5


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
    left = [*itertools.product(*(range(len(dimension)) for dimension in dimensions))]
    strength = min(strength, len(dimensions))
    met_by = {one: {*itertools.combinations(enumerate(one), strength)} for one in left}
    missing, found = set().union(*met_by.values()), []
    while missing:
        best = max(left, key=lambda one: len(met_by[one] & missing))
        missing -= met_by[best]
        left.remove(best)
        found.append(best)
    return [tuple(d[i] for d, i in zip(dimensions, one, strict=True)) for one in sorted(found)]


def on_devices(name, on_cpu, on_cuda):
    """Parametrizes a test by its device and by an argument, whose values may be others on CUDA."""
    cases = [("cpu", pytest.mark.on_cpu, value) for value in on_cpu]
    cases += [("cuda", pytest.mark.gpu, value) for value in on_cuda]
    given = [pytest.param(d, value, id=f"{d}-{value}", marks=mark) for d, mark, value in cases]
    return pytest.mark.parametrize(("device", name), given)


def made(arguments, device):
    """Arguments by name, with ones in the place of each (shape, dtype)."""

    def one(given):
        if isinstance(given, tuple) and given and isinstance(given[-1], torch.dtype):
            return torch.ones(given[0], device=device).to(given[1])
        return given

    return {name: one(given) for name, given in arguments.items()}


def rows_for(cols):
    return max(3, min(512, 16384 // cols))


class Tensors(SimpleNamespace):
    """The tensors of a problem by name; None for one of its NAMES that it lacks."""

    problem: Any

    def __init__(self, problem, **tensors):
        super().__init__(problem=problem, **dict.fromkeys(problem.NAMES) | tensors)

    def but(self, **others):
        return Tensors(**{**vars(self), **others})  # Dynamo of 2.15 knows no | of vars()

    @property
    def device(self):
        return next(iter(self.inputs().values())).device

    def named(self, names):
        """Those of these names that are there."""
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    def inputs(self):
        return self.named(self.problem.NAMES)

    def gradients(self):
        """Those of the results."""
        return [*self.named(self.problem.OUTPUTS.values()).values()]

    def of_rows(self, part):
        """The same with a copy of some rows or samples, of the tensors that have all of them."""
        have = self.named(self.problem.HAVE_ROWS)
        count = next(iter(have.values())).shape[:1]
        return self.but(**{n: u[part].clone() for n, u in have.items() if u.shape[:1] == count})


@dataclass(frozen=True)
class Call:
    """One call of any norm: what the families have in common."""

    NAMES: ClassVar[tuple[str, ...]] = ("x", "weight", "bias")
    OUTPUTS: ClassVar[dict[str, str]] = {"y": "dy"}
    HAVE_ROWS: ClassVar[tuple[str, ...]] = ("x", "dy")
    OF_ROWS: ClassVar[tuple[str, ...]] = ("y", "dx")
    LAYOUTS: ClassVar[dict[str, Any]] = {}
    # Beside the contract, relative to a result's greatest element, because PyTorch's own sum over
    # few numbers may be exact by chance: of float32 and narrower types, and of float64.
    SLACK: ClassVar[tuple[float, float]] = (2.0**-23, 2.0**-50)
    BITS_OF_ANY_GRADIENTS: ClassVar[bool] = True  # a gradient's do not depend on the others wanted
    GREATEST_FACTOR: ClassVar[float | None] = GREATEST_FACTOR  # None: one element does not count

    draw: ClassVar[Any]
    forward: ClassVar[Any]
    formula: ClassVar[Any]
    stock: ClassVar[Any]

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype | None = None  # by default dtype
    _: KW_ONLY
    affine: str = "both"  # or "weight", "bias", "none"
    activation: str | None = None
    scale: float = 1.0
    out_dtype: torch.dtype | None = None
    mean: float = 0.0
    eps: float = EPS
    weight_offset: float = 0.0
    rounds: bool = False  # round_before_weight (test_every_norm.py), which check() judges of heads
    layout: str = "contiguous"  # of x and dy, or any other of LAYOUTS
    dy_layout: str | None = None  # by default layout
    forced: tuple[str | None, str | None] = (None, None)  # the strategies of the two directions

    @property
    def of_rows(self):
        """The results of a row or sample that do not depend on the others, to the bit."""
        return self.OF_ROWS

    def draws(self, sample):
        return max(1, min(24, sample // math.prod(self.shape)))

    def dtype_of(self, name):
        """The dtype that a result must have."""
        if name in self.OUTPUTS:
            return self.out_dtype or self.dtype
        is_parameter = name.endswith(("weight", "bias"))
        return (self.weight_dtype or self.dtype) if is_parameter else self.dtype

    def rounding_of(self, name, expected):
        """The roundings that each element of a result may have."""
        dtype = self.dtype_of(name)
        if dtype is torch.float64:
            return 0
        return (1 + HALF_SLACK * (dtype.itemsize == 2)) * rounding(expected, dtype)

    def slack_of(self, name, magnitude):
        return self.SLACK[self.dtype is torch.float64] * magnitude

    def check_strides(self, t, results):
        for name in self.OUTPUTS:
            assert name not in results or results[name].is_contiguous(), name

    def of_all(self, t, found, function, *, is_exact, backward):
        """The results of the formula or of PyTorch's functions, by name."""
        acc = torch.float64 if is_exact or self.dtype is torch.float64 else torch.float32
        return differentiated(t, function, acc, backward=backward)

    def __str__(self):
        """The shape, and what is not as by default."""
        values = [(f, getattr(self, f.name)) for f in fields(self)[1:]]
        named = [f"{f.name}={value}" for f, value in values if value != f.default]
        family = [type(self).__name__] * (type(self) is not Problem)
        return "-".join([*family, "x".join(map(str, self.shape)), *named]).replace("torch.", "")


def differentiated(t, function, acc, *, backward=True):
    """A function's results for tensors of the type acc, and all gradients, by name."""
    leaves = {
        name: tensor.detach().to(acc, copy=True, memory_format=torch.contiguous_format)
        for name, tensor in t.inputs().items()
    }
    with torch.set_grad_enabled(backward):
        out = function(t.but(**{n: leaf.requires_grad_(backward) for n, leaf in leaves.items()}))
    results = {name: y.detach() for name, y in zip(t.problem.OUTPUTS, out, strict=False)}
    if backward:
        dy = [gradient.to(acc) for gradient in t.gradients()[: len(out)]]
        gradients = torch.autograd.grad(out, list(leaves.values()), dy)
        results |= {f"d{n}": g for n, g in zip(leaves, gradients, strict=True)}
    return results


def misaligned(tensor, by=1):
    """A contiguous copy that begins at the second element of its allocation, or by some others."""
    flat = torch.cat([tensor.new_zeros(by), tensor.flatten()])
    return flat[by:].view(tensor.shape)


# Of modulations. A chunk is one of six of a larger tensor, as diffusion transformers cut theirs.
LAYOUTS: dict[str, Any] = {
    "contiguous": lambda x: x, "chunk": lambda x: torch.cat([x] * 6, -1).chunk(6, -1)[2],
    "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "transposed": lambda x: swapped(x, -1, -2) if x.dim() > 1 else x, "misaligned": misaligned,
    "expanded": lambda x: x[:1].expand(x.shape) if x.dim() else x,
}  # fmt: skip


def swapped(x, *dims):
    """The same values, with these two dimensions exchanged in memory."""
    return x.transpose(*dims).contiguous().transpose(*dims)


def within(tensor, dim, before, after):
    """A slice of a larger tensor that has so many NaN before and after it in this dimension."""
    shape = list(tensor.shape)
    shape[dim] += before + after
    larger = tensor.new_full(shape, math.nan)
    return larger.narrow(dim, before, tensor.shape[dim]).copy_(tensor)


# Of rows in two dimensions or three.
ROW_LAYOUTS: dict[str, Any] = {
    "contiguous": lambda x: x,
    "misaligned": misaligned,
    "transposed leading": lambda x: swapped(x, 0, 1),
    "sliced leading": lambda x: within(x, 1, 2, 1),
    "every other row": lambda x: x.repeat_interleave(2, -2)[..., ::2, :],
    "column slice": lambda x: within(x, -1, 8, 16),
    "odd column slice": lambda x: within(x, -1, 3, 2),
    "every other column": LAYOUTS["every second"],
    "transposed": LAYOUTS["transposed"],
    "expanded": lambda x: x[:1, :1].expand(x.shape),
    "expanded column": lambda x: x[..., :1].expand(x.shape),
    # sum().backward() gives a dy that is one number in memory.
    "expanded number": lambda x: x[:1, :1, :1].expand(x.shape),
    "permuted": lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
}


@dataclass(frozen=True)
class Problem(Call):
    """One call of a norm of rows: plain, beside a residual, modulated or gated."""

    NAMES = ("x", "residual", "gate", "shift", "scale", "weight", "bias")
    OUTPUTS = {"y": "dy", "residual_out": "dresidual"}  # noqa: RUF012
    HAVE_ROWS = ("x", "dy", "residual", "dresidual", "shift", "scale", "gate")
    OF_ROWS = ("y", "residual_out", "dx", "dresidual")
    LAYOUTS = ROW_LAYOUTS
    BITS_OF_ANY_GRADIENTS = False

    _: KW_ONLY
    normalized_ndim: int = 1
    affine_scale: float = 1.0  # weight and bias are of this order
    residual_dtype: torch.dtype | None = None  # None: no residual
    shift: tuple[int, ...] | None = None  # the modulations' shapes; None: no such modulation
    scale_by: tuple[int, ...] | None = None
    gate: tuple[int, ...] | None = None
    modulation_dtype: torch.dtype | None = None  # by default dtype
    modulation_layout: str = "contiguous"  # or any other of LAYOUTS
    statistic: str = "layer"
    group_size: int | None = None  # RMSNorm over groups of so many columns

    @property
    def normalized_shape(self):
        return self.shape[len(self.shape) - self.normalized_ndim :]

    @property
    def cols(self):
        return math.prod(self.normalized_shape)

    @property
    def rows(self):
        return math.prod(self.shape[: len(self.shape) - self.normalized_ndim])

    @property
    def of_rows(self):
        """A modulation of one row alone has such a gradient, too."""
        shapes = {"dshift": self.shift, "dscale": self.scale_by, "dgate": self.gate}
        alone = [n for n, shape in shapes.items() if shape and shape[:-1] == self.shape[:-1]]
        return (*self.OF_ROWS, *alone)

    def draws(self, sample):
        numel = self.rows * self.cols
        draws = max(512 // self.cols, sample // numel)
        if numel <= 1 << 18:
            # All elements of a row share the errors of its mean and rstd, so a few rows would leave
            # the result to chance.
            draws = max(draws, 32 // self.rows)
        return min(32, max(1, draws))

    def dtype_of(self, name):
        if name in ("residual_out", "dresidual"):
            return self.residual_dtype
        if name in ("dshift", "dscale", "dgate"):
            return self.modulation_dtype or self.dtype
        return super().dtype_of(name)

    def rounding_of(self, name, expected):
        """dx is rounded twice where the residual has another dtype: to that, then to the input's.
        With a gate, it is judged for the tensor that the gate multiplied, rounded or not."""
        roundings = super().rounding_of(name, expected)
        if name == "dx" and self.residual_dtype not in (None, self.dtype) and self.gate is None:
            roundings = roundings + rounding(expected, self.residual_dtype)
        return roundings

    def slack_of(self, name, magnitude):
        if self.dtype_of(name) == self.dtype == torch.float64:
            terms = math.sqrt(max(self.cols, self.rows))
            return FLOAT64_ROUNDINGS * terms * 2**-53 * magnitude
        is_sum = name in ("dweight", "dbias", "dshift", "dscale", "dgate")
        return 2**-24 * magnitude if is_sum else 0.0

    def draw(self, randn):
        weight_dtype, columns = self.weight_dtype or self.dtype, self.normalized_shape
        t: dict[str, Any] = {"x": (randn(self.shape) + self.mean).to(self.dtype)}
        if self.affine in ("both", "weight"):
            t["weight"] = self.affine_scale * (1 + 0.5 * randn(columns, weight_dtype))
        if self.affine in ("both", "bias"):
            t["bias"] = self.affine_scale * randn(columns, weight_dtype)
        t["dy"] = randn(self.shape, self.out_dtype or self.dtype)
        for name in ("residual", "dresidual"):
            of = self.residual_dtype
            t[name] = None if of is None else randn(self.shape, of)
        for name, shape in (("shift", self.shift), ("scale", self.scale_by), ("gate", self.gate)):
            if shape is not None:
                modulation = randn(shape, self.modulation_dtype or self.dtype)
                t[name] = LAYOUTS[self.modulation_layout](modulation)
        for name in ("x", "residual", "dy", "dresidual"):
            layout = (self.dy_layout if name[0] == "d" else None) or self.layout
            t[name] = None if t[name] is None else self.LAYOUTS[layout](t[name])
        return t

    def forward(self, t, **options):
        rows = [u for u in (t.x, t.residual) if u is not None]
        add = "add_" * (t.residual is not None)
        how: Any = {"normalized_shape": self.normalized_shape, "out_dtype": self.out_dtype}
        is_ada = not (self.shift is None and self.scale_by is None and self.gate is None)
        if is_ada and self.activation is None and self.scale == 1.0:
            given = (*rows, *[t.gate] * bool(add), t.shift, t.scale, t.weight, t.bias, self.eps)
            how |= {"statistic": self.statistic, **options}
            out = getattr(fl, f"{add}ada_layer_norm")(*given, **how)
        else:
            how |= {"activation": self.activation, "scale": self.scale, **options}
            how |= {"gate": t.gate} if self.gate is not None else {}  # of a sum alone
            if self.statistic == "layer":
                out = getattr(fl, f"{add}layer_norm")(*rows, t.weight, t.bias, self.eps, **how)
            else:
                how |= {"weight_offset": self.weight_offset, "round_before_weight": self.rounds}
                how |= {"group_size": self.group_size} if self.group_size else {}
                norm = getattr(fl, f"{add}rms_norm")
                out = norm(*rows, t.weight, self.eps, bias=t.bias, **how)
        return out if isinstance(out, tuple) else (out,)

    def formula(self, t, rounding=None):
        x, *parameters = (self.in_groups(u) for u in (t.x, t.weight, t.bias))
        ndim = self.normalized_ndim if self.group_size is None else 1
        options = (ndim, *parameters, self.eps, self.activation, self.scale)
        kind: Any = {"statistic": self.statistic, "weight_offset": self.weight_offset}
        kind |= {"shift": t.shift, "scale": t.scale, "rounding": rounding}
        y = reference.layer_norm(x, *options, **kind).y
        return (y.reshape(t.x.shape),)

    def in_groups(self, tensor):
        is_whole = tensor is None or self.group_size is None
        return tensor if is_whole else tensor.unflatten(-1, (-1, self.group_size))

    def stock(self, t):
        # The normalized dimensions are flattened: with several of them and many rows, PyTorch's own
        # backward fails on CUDA.
        x = t.x.flatten(t.x.dim() - self.normalized_ndim)
        weight, bias = (None if u is None else u.flatten() for u in (t.weight, t.bias))
        if self.statistic == "rms":
            factor = None if weight is None else weight + self.weight_offset
            if self.group_size is None:
                y = F.rms_norm(x, x.shape[-1:], factor, self.eps)
            else:
                y = F.rms_norm(self.in_groups(x), (self.group_size,), None, self.eps).flatten(-2)
                y = y if factor is None else y * factor
            y = y if bias is None else y + bias
        else:
            y = F.layer_norm(x, x.shape[-1:], weight, bias, self.eps)
        y = activate(y.reshape(t.x.shape), self.activation) * self.scale
        y = y if t.scale is None else y * (1 + t.scale)
        return (y if t.shift is None else y + t.shift,)

    def of_all(self, t, found, function, *, is_exact, backward):
        """A gated sum is a result with an error of its own. What is computed from it is judged for
        the sum that was found, which is rounded to residual's dtype."""
        if t.residual is None:
            total = t.x
        else:
            total = reference.add(t.x, t.residual) if t.gate is None else found["residual_out"]
        acc = torch.float64 if is_exact or total.dtype is torch.float64 else torch.float32
        inner = t.but(x=total, residual=None, gate=None)
        results = differentiated(inner, function, acc, backward=backward)
        if backward and t.residual is not None:
            results["dx"] = results["dx"] + t.dresidual.to(acc)
            results["dresidual"] = results["dx"]
        if t.gate is None:
            return results
        given = (t.x, t.residual, t.gate)
        is_wide = is_exact or torch.float64 in (u.dtype for u in given)
        input, residual, gate = (u.to(torch.float64 if is_wide else torch.float32) for u in given)
        results["residual_out"] = residual + gate * input
        if backward:
            # A single kernel for norm and gate multiplies dx before it is rounded. With two
            # kernels, the second reads dx rounded to residual's dtype, and is judged for that dx.
            candidates = [
                (d * gate, (d * input).sum_to_size(gate.shape))
                for d in (u.to(gate.dtype) for u in (found["dresidual"], results["dx"]))
            ]

            def distance(candidate):
                """Relative, so that all elements count alike. Otherwise one large element would
                decide in rows of two columns."""
                dx, own = candidate[0].double(), found["dx"].double()
                sizes = dx.abs() + own.abs() + torch.finfo(torch.float32).tiny
                return ((dx - own).abs() / sizes).mean().item()

            results["dx"], results["dgate"] = min(candidates, key=distance)
        return results


# The shapes of modulations of an input of shape (B, S, D).
MODULATIONS = {
    "all": lambda b, s, d: (d,), "sample": lambda b, s, d: (b, 1, d),
    "token": lambda b, s, d: (b, s, d), "position": lambda b, s, d: (1, s, d),
    "position without a batch": lambda b, s, d: (s, d), "number": lambda b, s, d: (),
    "number of a sample": lambda b, s, d: (b, 1, 1), "number of a token": lambda b, s, d: (b, s, 1),
}  # fmt: skip


def modulated(shape, kind="sample", *, gated=False, dtypes=(torch.float32,) * 4, **others):
    """A problem whose modulations are all of one kind, except those whose shapes `others` gives.

    dtypes: of input, residual, modulations, and weight (None: there is none).
    """
    input_dtype, residual_dtype, modulation_dtype, weight_dtype = dtypes
    modulation = MODULATIONS[kind](*shape)
    problem: dict[str, Any] = {
        "dtype": input_dtype, "modulation_dtype": modulation_dtype, "weight_dtype": weight_dtype,
        "affine": "none" if weight_dtype is None else "both",
        "shift": modulation, "scale_by": modulation,
        **({"residual_dtype": residual_dtype, "gate": modulation} if gated else {}),
    }  # fmt: skip
    return Problem(shape, **problem | others)


def make(problem, device, seed=0):
    """The tensors of a problem, the same for each seed."""
    generator = torch.Generator(device).manual_seed(seed)

    def randn(shape, dtype=torch.float32, of=torch.float32):
        return torch.randn(shape, generator=generator, device=device, dtype=of).to(dtype)

    return Tensors(problem, **problem.draw(randn))


@contextlib.contextmanager
def forced(strategy):
    """Plans take this strategy, if it is not None."""
    if strategy is not None:
        torch.ops.fused_layernorm._force(f"strategy={strategy}")
    try:
        yield
    finally:
        if strategy is not None:
            torch.ops.fused_layernorm._force(None)


def plan_here(rows, cols, dtype, **problem: Any):
    """The plan of a problem on the CUDA device, or None if the forced plan cannot run it. `problem`
    has the other arguments of the operator `_plan`."""
    properties: Any = torch.cuda.get_device_properties("cuda")
    problem |= {
        "capability": 10 * properties.major + properties.minor,
        "sms": properties.multi_processor_count,
        "shared_memory": properties.shared_memory_per_block_optin,
        "l2_bytes": properties.L2_cache_size,
    }
    try:
        return json.loads(torch.ops.fused_layernorm._plan(rows, cols, dtype, **problem))
    except (RuntimeError, ValueError) as error:
        if "cannot run" not in str(error):
            raise
        return None


def ours(t, *, backward=True, wanted=None):
    """Our results and gradients, through autograd, by name; wanted: of these tensors alone."""
    p = t.problem
    leaves = t.inputs() if wanted is None else {name: getattr(t, name) for name in wanted}
    if backward:
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in leaves.items()}
    with forced(p.forced[0]), torch.set_grad_enabled(backward):
        out = p.forward(t.but(**leaves))
    results = {name: y.detach() for name, y in zip(p.OUTPUTS, out, strict=False)}
    if backward:
        with forced(p.forced[1]):
            # Not backward(dy), which gives x.grad the strides of x.
            # (A view of a tensor whose gradient is not wanted has none.)
            pairs = zip(out, t.gradients(), strict=False)
            ys, dys = zip(*(pair for pair in pairs if pair[0].requires_grad), strict=True)
            gradients = torch.autograd.grad(ys, list(leaves.values()), dys)
        results |= {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}
    p.check_strides(t, results)
    return results


def activate(z, activation):
    """PyTorch's own activation."""
    if activation is None:
        return z
    if activation == "gelu_tanh":
        return F.gelu(z, approximate="tanh")
    return getattr(F, activation)(z)


def exact(t, found=None, *, backward=True):
    """The results in float64, by name; those after a gate from the rounded tensors in `found`."""
    p = t.problem
    return p.of_all(t, found, p.formula, is_exact=True, backward=backward)


def stock(t, found=None, *, backward=True):
    """PyTorch's results and gradients in float32 (float64 for a float64 x), by name."""
    p = t.problem
    return p.of_all(t, found, p.stock, is_exact=False, backward=backward)


def rounding(value, dtype):
    """A bound on the error of rounding value to dtype: half a unit in the last place or more."""
    info = torch.finfo(dtype)
    return value.abs().clamp(min=info.tiny) * (info.eps / 2)


def assert_close(found, expected, tolerance):
    """Asserts that named results are those in float64, relatively or absolutely.

    tolerance: one for all, or of each dtype.
    """
    for name, result in found.items():
        allowed = tolerance if isinstance(tolerance, float) else tolerance[result.dtype]
        one, other = {name: result.double()}, {name: expected[name]}
        torch.testing.assert_close(one, other, rtol=allowed, atol=allowed)


def check_wanted(problem, device, poison=lambda *like: None, *, bits=False):
    """Asserts that backward gives the gradients that are asked for, whichever these are.

    The order of a gradient's sums does not depend on the other gradients, unless the plan does, as
    that of rows and heads may.
    """
    t = make(problem, device)
    whole, names = ours(t), [*t.inputs()]
    for count in range(1, len(names)):
        for wanted in itertools.combinations(names, count):
            poison(*whole.values())
            found = ours(t, wanted=wanted)
            for name, result in found.items():
                if name in problem.OUTPUTS or bits or problem.BITS_OF_ANY_GRADIENTS:
                    assert torch.equal(result, whole[name]), (name, wanted)
                    continue
                slack = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[result.dtype]
                torch.testing.assert_close(result, whole[name], rtol=slack, atol=slack)


def check(problem, device, *, backward=True, sample=8192, factor=FACTOR):
    """Asserts the contract for every result of a problem.

    sample: the number of elements to judge; tensors are drawn until there are so many, at most 32
        times.
    factor: how many times PyTorch's error an error may be.
    """
    p, broken = problem, []
    seen: dict[str, list[Any]] = {}  # the errors' sizes over all draws, by result
    for seed in range(p.draws(sample)):
        t = make(p, device, seed)
        actual = ours(t, backward=backward)
        expected, yardstick = (f(t, actual, backward=backward) for f in (exact, stock))
        for name, result in actual.items():
            assert result.dtype == p.dtype_of(name), name
            assert result.device == t.device, name
            if name == "residual_out" and t.gate is None:
                assert torch.equal(result, reference.add(t.x, t.residual))
                continue
            assert result.shape == expected[name].shape, name
            error = (result.double() - expected[name]).abs() - p.rounding_of(name, expected[name])
            theirs = (yardstick[name].double() - expected[name]).abs()
            error = error.clamp(min=0)
            sizes = (error.square().sum(), theirs.square().sum(), error.max(), theirs.max(),
                     expected[name].abs().max())  # fmt: skip
            seen.setdefault(name, []).append((error.numel(), *(size.item() for size in sizes)))
    for name, all_sizes in seen.items():
        counts, squares, of_stock, most, most_of_stock, elements = zip(*all_sizes, strict=True)
        found, theirs = (math.sqrt(sum(s) / sum(counts)) for s in (squares, of_stock))
        slack = p.slack_of(name, max(elements))
        rms, greatest = factor * theirs + slack, math.inf
        if p.GREATEST_FACTOR is not None:
            greatest = p.GREATEST_FACTOR * max(most_of_stock) + slack
        if not found <= rms or not max(most) <= greatest:  # a NaN in the sums breaks it, too
            broken.append(f"{name}: rms error beyond rounding {found:.3g} (allowed {rms:.3g}), "
                          f"greatest {max(most):.3g} (allowed {greatest:.3g})")  # fmt: skip
    assert not broken, f"{problem}: {'; '.join(broken)}"


def check_strategy(problem, lengths, *, leading=None, backward=True, **how):
    """check() for rows of these lengths that the problem's forced strategy can run."""
    (strategy,) = (s for s in problem.forced if s)
    is_scaled = problem.scale != 1 and not backward
    fused = bool(problem.activation or problem.weight_offset or is_scaled)
    ran = False
    for cols in lengths:
        p = replace(problem, shape=(*(leading or (rows_for(cols),)), cols))
        aligned = False if "odd" in p.layout else None  # None: by the row's length
        with forced(strategy):
            plan = plan_here(
                p.rows, cols, p.dtype, weight_dtype=p.weight_dtype, backward=backward,
                residual=p.residual_dtype is not None, has_epilogue=fused, aligned=aligned,
            )  # fmt: skip
        if plan is None:
            continue
        assert plan["strategy"] == strategy.split()[0]
        try:
            check(p, "cuda", backward=backward, **how)
        except (RuntimeError, ValueError) as error:
            # With a residual of another type the operator's problem is not the one that is planned.
            if "cannot run" not in str(error) or p.residual_dtype in (None, p.dtype):
                raise
            continue
        ran = True
    if not ran:
        pytest.skip(f"{strategy} takes none of these rows on this device")
