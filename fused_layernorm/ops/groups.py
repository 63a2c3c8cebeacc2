# SPDX-License-Identifier: Apache-2.0
"""The operators group_norm, group_norm_forward and group_norm_backward: all of their Python half.

input is (samples, channels, ...), and the channels of a sample form groups, each with a mean and a
variance of its own. csrc/bindings/schemas.cpp says what the operators give,
csrc/bindings/cuda/groups.cpp has them on CUDA, csrc/per_torch autograd and autocast in C++.

Where gradients are to be differentiated, and in forward mode, PyTorch differentiates `formula` and
`gradients`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import arguments, autocast, composite, fakes, load
from .arguments import HALF, refuse
from .autograd import (
    Function,
    apply,
    call_operator,
    in_forward_mode,
    lower_levels,
    needs_grad,
    redispatch,
)
from .formulas import acc_dtype, activate, affine, laid_out, modulate, slope
from .operators import describe
from .vmap import one_by_one, to_front

_aten = torch.ops.aten

group_norm = load.operators.group_norm.default
group_norm_forward = load.operators.group_norm_forward.default
group_norm_backward = load.operators.group_norm_backward.default

ACTIVATIONS = (*arguments.ACTIVATIONS, "leaky_relu")
MOST_GROUPS, MOST_POSITIONS = 2**30 - 1, 2**30  # that the kernels count (csrc/groups/plan.h)


class GroupArguments(NamedTuple):
    """One call of group_norm, in the order of its schema."""

    input: Tensor
    num_groups: int
    shift: Tensor | None
    scale: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    activation: str | None = None
    output_scale: float = 1.0
    out_dtype: torch.dtype | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return (self.input, *self[2:6])

    @property
    def y_dtype(self) -> torch.dtype:
        return self.out_dtype or self.input.dtype

    @property
    def is_plain(self) -> bool:
        """Whether nothing is fused to the norm."""
        return (
            self.activation is None
            and self.output_scale == 1.0
            and self.out_dtype is None
            and self.shift is None
            and self.scale is None
        )

    @property
    def has_kernel(self) -> bool:
        """Whether the kernels can count the groups."""
        shape = self.input.shape
        return shape[0] * self.num_groups <= MOST_GROUPS and math.prod(shape[2:]) <= MOST_POSITIONS


# ---- The computation in PyTorch's operators.


def _grouped(x: Tensor, groups: int) -> Tensor:
    """A view of x, (samples, groups, channels of a group, ...)."""
    return x.unflatten(1, (groups, x.shape[1] // groups))


def _over_groups(x: Tensor) -> tuple[int, ...]:
    """The dimensions of such a view over which a statistic is taken."""
    return tuple(range(2, x.dim()))


def _of_channels(parameter: Tensor | None, x: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A parameter of channels, or of channels of samples, that broadcasts to x."""
    if parameter is None:
        return None
    shape = parameter.shape[:2] if parameter.dim() > 1 else (1, *parameter.shape)
    return parameter.to(dtype).reshape(*shape, *[1] * (x.dim() - 2))


def modulated(a: Any, z: Tensor) -> Tensor:
    """z (1 + scale) + shift, in z's dtype."""
    return modulate(z, _of_channels(a.shift, z, z.dtype), _of_channels(a.scale, z, z.dtype))


def _map(a: Any, xhat: Tensor) -> Tensor:
    """xhat, of input's shape, behind the affine map and the modulation."""
    weight, bias = (_of_channels(each, xhat, xhat.dtype) for each in (a.weight, a.bias))
    return modulated(a, affine(xhat, weight, bias))


def epilogue(a: GroupArguments, z: Tensor) -> Tensor:
    """What follows the modulation, in y's dtype."""
    y = activate(z, a.activation)
    return (y if a.output_scale == 1.0 else y * a.output_scale).to(a.y_dtype)


def formula(a: GroupArguments) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd) in PyTorch's operators, which differentiate them any number of times."""
    x = _grouped(a.input.to(acc_dtype(a.input.dtype)), a.num_groups)
    dims = _over_groups(x)
    mean = x.mean(dims, keepdim=True)
    mean = mean + (x - mean).mean(dims, keepdim=True)  # a large mean takes its digits from the sum
    centered = x - mean
    rstd = (centered.square().mean(dims, keepdim=True) + a.eps).rsqrt()
    z = _map(a, (centered * rstd).flatten(1, 2))
    return epilogue(a, z), mean.flatten(1), rstd.flatten(1)


def by_formula(a: GroupArguments) -> Tensor:
    """y in input's order of memory, of arguments that were checked."""
    return laid_out(formula(a)[0], a.input, True)


def _forward(a: GroupArguments) -> tuple[Tensor, Tensor, Tensor]:
    """What group_norm_forward gives."""
    input, groups = a.input, a.num_groups
    count = input.numel() // max(1, input.shape[0] * groups)
    if input.numel() == 0:
        y = torch.empty_like(input, dtype=a.y_dtype)
        mean = input.new_zeros(input.shape[0], groups, dtype=acc_dtype(input.dtype))
        rstd = torch.full_like(mean, torch.nan)  # as PyTorch has it
    elif input.is_cpu and input.is_contiguous() and count > 2:
        # PyTorch's own. In other orders of memory it takes E[x^2] - E[x]^2 for the variance, and
        # x rstd - mean rstd for xhat, which loses digits where x is the mean.
        acc = acc_dtype(input.dtype)
        sizes = (*input.shape[:2], math.prod(input.shape[2:]))
        x = input.to(acc).contiguous()
        # The native operator reads parameters as if they were contiguous.
        parameters = (None if p is None else p.to(acc).contiguous() for p in (a.weight, a.bias))
        z, mean, rstd = _aten.native_group_norm(x, *parameters, *sizes, groups, a.eps)
        y = epilogue(a, modulated(a, z))
    else:
        y, mean, rstd = formula(a)
    return laid_out(y, input, True), mean.contiguous(), rstd.contiguous()


def _checked_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    a = GroupArguments(*args)
    check(a)
    composite._warn_of_cuda(a.input)
    return _forward(a)


class BackwardArguments(NamedTuple):
    """One call of group_norm_backward, in the order of its schema."""

    dy: Tensor
    x: Tensor
    num_groups: int
    mean: Tensor
    rstd: Tensor
    shift: Tensor | None
    scale: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    activation: str | None
    output_scale: float
    needs_dx: bool
    needs_dshift: bool
    needs_dscale: bool
    needs_dweight: bool
    needs_dbias: bool

    @property
    def needs(self) -> tuple[bool, ...]:
        return self[11:]

    @property
    def parameters(self) -> tuple[Tensor | None, ...]:
        """Those whose gradients follow dx, in their order."""
        return self[5:9]

    def results(self, found: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
        """The operator's results from the gradients; None becomes an empty tensor."""
        dtypes = [self.x.dtype if p is None else p.dtype for p in (self.x, *self.parameters)]
        return tuple(
            self.x.new_empty(0, dtype=dtype) if gradient is None else gradient
            for gradient, dtype in zip(found, dtypes, strict=True)
        )


def _sum_to(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The sum of a tensor of x's shape for each number of a parameter, in its shape and dtype."""
    if parameter.dim() == 1:
        found = tensor.sum([d for d in range(tensor.dim()) if d != 1])
    else:
        found = tensor.sum(tuple(range(2, tensor.dim()))) if tensor.dim() > 2 else tensor.clone()
    return found.to(parameter.dtype).reshape(parameter.shape)


def gradients(*args: Any) -> tuple[Tensor, ...]:
    """What group_norm_backward gives, but for the order of memory.

    As functions of the tensors; mean and rstd depend on x. eps is no argument: it follows from the
    forward pass's rstd, as 1 / rstd^2 - variance.
    """
    b = BackwardArguments(*args)
    acc = acc_dtype(b.x.dtype)
    x = _grouped(b.x.to(acc), b.num_groups)
    dims = _over_groups(x)
    ones = [1] * len(dims)
    centered = x - x.mean(dims, keepdim=True)
    variance = centered.square().mean(dims, keepdim=True)
    eps = (b.rstd.reshape(*x.shape[:2], *ones).pow(-2) - variance).detach()
    rstd = (variance + eps).rsqrt()
    xhat = centered * rstd
    flat = xhat.flatten(1, 2)
    weight, bias, scale = (
        _of_channels(parameter, flat, acc) for parameter in (b.weight, b.bias, b.scale)
    )
    dz = b.dy.to(acc) * b.output_scale
    if b.activation is not None:
        dz = dz * slope(_map(b, flat), b.activation)
    dshift = dscale = dweight = dbias = dx = None
    if b.needs_dshift and b.shift is not None:
        dshift = _sum_to(dz, b.shift)
    if b.needs_dscale and b.scale is not None:
        dscale = _sum_to(dz * affine(flat, weight, bias), b.scale)
    if scale is not None:
        dz = dz * (1 + scale)
    if b.needs_dweight and b.weight is not None:
        dweight = _sum_to(dz * flat, b.weight)
    if b.needs_dbias and b.bias is not None:
        dbias = _sum_to(dz, b.bias)
    if b.needs_dx:
        g = _grouped(dz if weight is None else dz * weight, b.num_groups)
        along = (g * xhat).mean(dims, keepdim=True)
        dx = (g - g.mean(dims, keepdim=True) - xhat * along) * rstd
        dx = dx.flatten(1, 2).to(b.x.dtype)
    return b.results((dx, dshift, dscale, dweight, dbias))


def _backward(*args: Any) -> tuple[Tensor, ...]:
    b = BackwardArguments(*args)
    _check_backward(b)
    if b.x.numel() == 0:
        found = [
            None if not needed or like is None else torch.zeros_like(like)
            for needed, like in zip(b.needs, (b.x, *b.parameters), strict=True)
        ]
        return b.results(tuple(found))
    dx, *others = gradients(*args)
    return (laid_out(dx, b.x, True) if b.needs_dx else dx, *others)


# ---- What a call must satisfy.


def check_groups(num_groups: Any) -> int:
    groups = arguments.check_int("num_groups", num_groups)
    if groups < 1:
        raise RuntimeError(f"expected num_groups of at least 1, got {groups}")
    return groups


def check(a: GroupArguments) -> None:
    """Raises, with one sentence, if the operators cannot take these arguments."""
    input = a.input
    arguments.check_tensor("input", input)
    check_groups(a.num_groups)
    if input.dim() < 2:
        raise RuntimeError(
            "expected input of at least two dimensions, (samples, channels, ...), got shape "
            f"{list(input.shape)}"
        )
    channels = input.shape[1]
    if channels % a.num_groups != 0:
        raise RuntimeError(
            f"expected num_groups that divides the {channels} channels of input, got {a.num_groups}"
        )
    allowed = (input.dtype, torch.float32) if input.dtype in HALF else (input.dtype,)
    for name, parameter in zip(a._fields[2:6], a[2:6], strict=True):
        if parameter is None:
            continue
        arguments.check_tensor(name, parameter)
        arguments.check_device(name, parameter, "input", input)
        if name in ("weight", "bias"):
            if parameter.shape != (channels,):
                raise RuntimeError(
                    f"expected {name} of shape {[channels]}, a number for each channel of input, "
                    f"got shape {list(parameter.shape)}"
                )
        elif parameter.shape[:2] != input.shape[:2] or any(n != 1 for n in parameter.shape[2:]):
            raise RuntimeError(
                f"expected {name} of shape {list(input.shape[:2])}, a number for each channel of "
                "each sample, which sizes of 1 may follow, got shape "
                f"{list(parameter.shape)}"
            )
        if parameter.dtype not in allowed:
            raise arguments.dtype_error(name, parameter, allowed, "input", [input.dtype])
    if a.weight is not None and a.bias is not None and a.weight.dtype != a.bias.dtype:
        raise RuntimeError(
            "expected weight and bias of one dtype, got "
            f"{arguments.name_of(a.weight.dtype)} and {arguments.name_of(a.bias.dtype)}"
        )
    arguments.check_number("eps", a.eps)
    if a.eps != a.eps:  # NaN, of a float that Dynamo may trace
        raise ValueError("expected eps to be a number, got nan")
    arguments.check_options(a.activation, a.output_scale, a.out_dtype, ACTIVATIONS)


def _check_backward(b: BackwardArguments) -> None:
    """Raises if group_norm_backward cannot take these arguments, as csrc/bindings/cuda does."""
    arguments._check_given(x=b.x, dy=b.dy, mean=b.mean, rstd=b.rstd)
    names = b._fields[5:9]
    arguments._check_given(**dict(zip(names, b.parameters, strict=True)))
    if b.x.dim() < 2:
        refuse("the input must have at least two dimensions")
    channels = b.x.shape[1]
    if b.num_groups < 1 or channels % b.num_groups != 0:
        refuse("num_groups must be at least one and divide the channels")
    for name, parameter in zip(names, b.parameters, strict=True):
        if parameter is None:
            continue
        if name in ("weight", "bias"):
            if parameter.shape != (channels,):
                refuse(f"{name} must have a number for each channel")
        elif parameter.shape[:2] != b.x.shape[:2] or any(n != 1 for n in parameter.shape[2:]):
            refuse(f"{name} must have a number for each channel of each sample")
        if parameter.device != b.x.device:
            refuse(f"{name} must be on the input's device")
    if b.weight is not None and b.bias is not None and b.weight.dtype is not b.bias.dtype:
        refuse("weight and bias must be of one dtype")
    arguments._check_beside(b.x, dy=b.dy)
    if any(
        needed and parameter is None
        for needed, parameter in zip(b.needs[1:], b.parameters, strict=True)
    ):
        refuse("a gradient is asked for of a parameter that is not there")
    groups, wide = b.x.shape[0] * b.num_groups, acc_dtype(b.x.dtype)
    for each in (b.mean, b.rstd):
        if each.numel() != groups or each.dtype is not wide or each.device != b.x.device:
            refuse("mean and rstd must be those of the forward pass")
    if b.activation is not None and b.activation not in ACTIVATIONS:
        known = arguments._either([repr(known) for known in ACTIVATIONS])
        refuse(f"activation must be None, {known}, got '{b.activation}'")


# ---- Fakes. As with norms, backward's arguments are not checked here.


def _fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    a = GroupArguments(*args)
    check(a)
    of_groups = (a.input.shape[0], a.num_groups)
    acc = acc_dtype(a.input.dtype)
    mean, rstd = (a.input.new_empty(of_groups, dtype=acc) for _ in range(2))
    return fakes._like(a.input, a.y_dtype, True), mean, rstd


def _fake_backward(*args: Any) -> tuple[Tensor, ...]:
    b = BackwardArguments(*args)
    found = [
        parameter.new_empty(parameter.shape) if needed and parameter is not None else None
        for needed, parameter in zip(b.needs[1:], b.parameters, strict=True)
    ]
    dx = fakes._like(b.x, b.x.dtype, True) if b.needs_dx else None
    return b.results((dx, *found))


# ---- Derivatives, where csrc/per_torch has none.


class _Forward(Function):
    """(y, mean, rstd)."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
        a = GroupArguments(*args)
        with lower_levels():
            y, mean, rstd = redispatch(group_norm_forward, keyset, *a)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(a.input, mean, rstd, *a[2:6])
        ctx.options = (a.num_groups, a.activation, a.output_scale)
        return y, mean, rstd

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: None) -> Any:
        needs: Any = GroupArguments(*ctx.needs_input_grad[1:])
        if dy is None:
            return (None,) * (1 + len(needs))
        x, mean, rstd, *parameters = ctx.saved_tensors
        groups, *options = ctx.options
        flags = (needs.input, *needs[2:6])
        found = call_operator(
            group_norm_backward, dy, x, groups, mean, rstd, *parameters, *options, *flags
        )
        dx, *others = (g if needed else None for g, needed in zip(found, flags, strict=True))
        return (None, dx, None, *others, None, None, None, None)


class _Backward(Function):
    """group_norm_backward, whose own derivatives are those of `gradients`."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
        with lower_levels():
            found = redispatch(group_norm_backward, keyset, *args)
        b = BackwardArguments(*args)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(b.dy, b.x, b.mean, b.rstd, *b.parameters)
        ctx.options = (b.num_groups, b[9:])
        unneeded = (g for g, needed in zip(found, b.needs, strict=True) if not needed)
        ctx.mark_non_differentiable(*unneeded)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        dy, x, mean, rstd, *parameters = ctx.saved_tensors
        groups, options = ctx.options
        b = BackwardArguments(dy, x, groups, mean, rstd, *parameters, *options)
        used = [i for i, grad in enumerate(grads) if grad is not None]
        if not used:
            return (None,) * (1 + len(b))
        names = [n for n in ("dy", "x", *b._fields[5:9]) if getattr(b, n) is not None]

        def of(*tensors: Tensor) -> tuple[Tensor, ...]:
            fields: dict[str, Any] = dict(zip(names, tensors, strict=True))
            found = gradients(*b._replace(**fields))
            return tuple(found[i] for i in used)

        vjp = torch.func.vjp(of, *(getattr(b, name) for name in names))[1]
        found = dict(zip(names, vjp(tuple(grads[i] for i in used)), strict=True))
        return (None, *(found.get(name) for name in b._fields))


def _autograd(outputs: Callable[[Any], Any], operator: Any) -> Callable[..., Any]:
    def implementation(keyset: Any, *args: Any) -> Any:
        a = GroupArguments(*args)
        if in_forward_mode():
            check(a)
            y, mean, rstd = formula(a)
            return outputs((y, mean.detach(), rstd.detach()))
        if needs_grad(*a.tensors):
            return outputs(apply(_Forward, keyset, *a))
        return redispatch(operator, keyset, *args)

    return implementation


def _autograd_backward(keyset: Any, *args: Any) -> Any:
    b = BackwardArguments(*args)
    if in_forward_mode():
        return gradients(*args)
    if needs_grad(b.dy, b.x, *b.parameters):
        return apply(_Backward, keyset, *args)
    return redispatch(group_norm_backward, keyset, *args)


# ---- Autocast: as of layer_norm.


def _autocast(operator: Any) -> Callable[..., Any]:
    def implementation(*args: Any) -> Any:
        a = GroupArguments(*args)
        modulation: Any = {"shift": a.shift, "scale": a.scale}
        norm = describe(a.input, weight=a.weight, bias=a.bias, out_dtype=a.out_dtype, **modulation)
        with torch._C._ExcludeDispatchKeyGuard(autocast._KEYSET):
            of = autocast.under_autocast(norm)
            parameters = (of.shift, of.scale, of.weight, of.bias)
            return operator(*a[:2], *parameters, *a[6:9], of.out_dtype)

    return implementation


# ---- vmap: the batch is part of the samples. Where each sample of vmap has parameters of channels,
# ---- or a gradient of them, the operator is called for each.


def _folded(tensor: Any, dim: int | None, size: int) -> Any:
    """The tensor with the mapped dimension folded into its first one."""
    return None if tensor is None else to_front(tensor, dim, size).flatten(0, 1)


def _dims(call: Any, in_dims: Any) -> Any:
    """The mapped dimensions by the names of the arguments of a call."""
    return call(*in_dims)


def _vmap(operator: Any) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        a, dims = GroupArguments(*args), _dims(GroupArguments, in_dims)
        if dims.weight is not None or dims.bias is not None or a.input.dim() < 3:
            return one_by_one(operator, info, in_dims, *args)
        size = info.batch_size
        input, shift, scale = (
            _folded(t, dim, size)
            for t, dim in ((a.input, dims.input), (a.shift, dims.shift), (a.scale, dims.scale))
        )
        found = operator(*a._replace(input=input, shift=shift, scale=scale))
        if isinstance(found, Tensor):
            return found.unflatten(0, (size, -1)), 0
        return tuple(t.unflatten(0, (size, -1)) for t in found), (0,) * len(found)

    return rule


def _vmap_backward(info: Any, in_dims: Any, *args: Any) -> Any:
    b, dims = BackwardArguments(*args), _dims(BackwardArguments, in_dims)
    batched = dims.weight is not None or dims.bias is not None
    if batched or b.needs_dweight or b.needs_dbias:
        return one_by_one(group_norm_backward, info, in_dims, *args)
    size = info.batch_size
    folded = {
        name: _folded(getattr(b, name), getattr(dims, name), size)
        for name in ("dy", "x", "mean", "rstd", "shift", "scale")
    }
    found = group_norm_backward(*b._replace(**folded))
    outputs = tuple(
        t.unflatten(0, (size, -1)) if needed else t.expand(size, 0)
        for t, needed in zip(found, b.needs, strict=True)
    )
    return outputs, (0,) * len(outputs)


# ---- Registration.

torch.library.register_fake(group_norm, lambda *args: _fake(*args)[0])
torch.library.register_fake(group_norm_forward, _fake)
torch.library.register_fake(group_norm_backward, _fake_backward)
torch.library.register_vmap(group_norm, _vmap(group_norm))
torch.library.register_vmap(group_norm_forward, _vmap(group_norm_forward))
torch.library.register_vmap(group_norm_backward, _vmap_backward)
load.library.impl(
    "group_norm", lambda *args: _checked_forward(*args)[0], "CompositeExplicitAutograd"
)
load.library.impl("group_norm_forward", _checked_forward, "CompositeExplicitAutograd")
load.library.impl("group_norm_backward", _backward, "CompositeExplicitAutograd")


def register(beside_library: bool) -> None:
    """Autograd and autocast: of the operators, or of the names that csrc/per_torch's calls."""
    implementations: dict[str, Callable[..., Any]] = {
        "group_norm": _autograd(lambda found: found[0], group_norm),
        "group_norm_forward": _autograd(lambda found: found, group_norm_forward),
        "group_norm_backward": _autograd_backward,
    }
    prefix = "_differentiable_" if beside_library else ""
    for name, implementation in implementations.items():
        if prefix:
            load.define_like(name, prefix)
        load.library.impl(prefix + name, implementation, "Autograd", with_keyset=True)
    if not beside_library:
        for operator in (group_norm, group_norm_forward):
            for key in autocast.KEYS:
                load.library.impl(operator._opname, _autocast(operator), key)
