# SPDX-License-Identifier: Apache-2.0
"""What is PyTorch's own: the calls that its operators compute, and what only they understand.

On the CPU a plain call goes to PyTorch's layer_norm or rms_norm, and a modulated call whose tensors
all have one dtype to PyTorch's operators.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import has_torch_function
from torch.utils._device import DeviceContext

from .ops import arguments, formulas
from .ops.operators import Arguments

_is_compiling = torch.compiler.is_dynamo_compiling
_get_dispatch_mode = torch._C._get_dispatch_mode
_PROXY = torch._C._TorchDispatchModeKey.PROXY
_in_transform = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_function_mode_at = torch._C._get_function_stack_at
_is_tracing = torch._C._is_tracing

# For tests without a GPU: calls on the CPU then go to the operators instead of PyTorch's.
_cpu_operators = os.environ.get("FUSED_LAYERNORM_CPU_OPERATORS") == "1"


def has_kernels(x: Any) -> bool:
    """Whether x is a tensor on a device that has kernels."""
    return isinstance(x, Tensor) and (x.is_cuda or _cpu_operators)


# ---- What swapped modules leave to the stock forward.


def unless_replaced(function: Any) -> Any:
    """The function, if it is PyTorch's own; None if a tool has replaced it before this import.

    None is no function, so that every call is then left to the tool.
    """
    is_own = type(function) is types.BuiltinFunctionType
    return function if is_own or getattr(function, "__globals__", None) is vars(F) else None


def own_forward(cls: type[nn.Module]) -> Any:
    """The forward of a class of PyTorch, if it is PyTorch's own."""
    forward: Any = cls.forward
    return forward if getattr(forward, "__module__", None) == cls.__module__ else None


layer_norm = unless_replaced(F.layer_norm)
rms_norm = unless_replaced(F.rms_norm)
group_norm = unless_replaced(F.group_norm)
instance_norm = unless_replaced(F.instance_norm)
# The classes and their forwards as they are at this import: a tool may put others in their place.
LayerNorm, RMSNorm, GroupNorm = nn.LayerNorm, nn.RMSNorm, nn.GroupNorm
InstanceNorms = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
FORWARDS: dict[Any, Any] = {
    cls: own_forward(cls) for cls in (LayerNorm, RMSNorm, GroupNorm, *InstanceNorms)
}


def are_supported(x: Any, *others: Any) -> bool:
    """Whether the operators know all that a module's own forward would show to PyTorch's functions.

    The rule is that a swapped module accepts what the stock module accepts, with the stock result:
    swapped modules ask here about the tensors of a call, x first, and leave to the stock forward
    what is not known. That is a nested tensor, a tensor subclass of another library (it may hold
    its values in a way that only the operators of the stock forward can read), a TorchFunctionMode
    of another library, and every call while a tool has replaced F.layer_norm or F.rms_norm.
    """
    is_plain = type(x) in _PLAIN and not has_torch_function((x, *others))
    if not (is_plain and (x is None or not x.is_nested)) and not _are_known((x, *others)):
        return False
    return F.layer_norm is layer_norm and F.rms_norm is rms_norm


_PLAIN = (Tensor, nn.Parameter, type(None))

# No TorchFunctionMode sees what is called inside.
without_function_modes = torch._C.DisableTorchFunction


def has_foreign_mode(count: int) -> bool:
    """Whether one of the TorchFunctionModes in force, of which there are so many, is not PyTorch's
    own, as those of torch.set_default_device and torch.export are."""
    while count:
        count -= 1
        mode: Any = type(_function_mode_at(count))
        if _is_foreign(mode):
            return True
    return False


@functools.lru_cache(maxsize=64)  # to ask the class takes twice as long
def _is_foreign(mode: type) -> bool:
    return not mode.__module__.startswith("torch.")


def has_device_mode_alone() -> bool:
    """Whether the only TorchFunctionMode is that of torch.set_default_device or torch.device, which
    makes new tensors on a device, and so has nothing to do in a norm. Under it each access to a
    tensor costs the host microseconds."""
    return _function_modes() == 1 and type(_function_mode_at(0)) is DeviceContext


def _are_known(values: Sequence[Any]) -> bool:
    if not all(_is_known(type(value)) for value in values):
        return False
    # Dynamo traces through the modes that it knows.
    if not _is_compiling() and has_foreign_mode(_function_modes()):
        return False
    return not any(isinstance(value, Tensor) and value.is_nested for value in values)


def _is_known(cls: type) -> bool:
    if cls is Tensor or cls is torch.nn.Parameter or not hasattr(cls, "__torch_function__"):
        return True
    return cls.__module__.startswith(("torch._subclasses.", "torch.distributed.", "torch.fx."))


def norm_is_supported(x: Any, weight: Any, bias: Any, eps: float | None) -> bool:
    """Whether the norms accept a call as PyTorch's do; swapped modules leave others to those."""
    if eps != eps or not are_supported(x, weight, bias):
        return False
    return isinstance(x, torch.fx.Proxy) or dtypes_are_supported(x, weight, bias)


def dtypes_are_supported(x: Any, weight: Any, bias: Any) -> bool:
    """Whether the norms accept a tensor x and parameters of these dtypes."""
    if not isinstance(x, Tensor) or x.dtype not in arguments.DTYPES:
        return False
    dtypes = {p.dtype for p in (weight, bias) if p is not None}
    is_mixed = x.dtype in arguments.HALF and dtypes == {torch.float32}
    return is_mixed or dtypes <= {x.dtype}


# ---- Calls on the CPU.


def has_own_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, is_rms: bool) -> bool:
    """Whether a norm of these tensors, with nothing fused to it, is PyTorch's here.

    PyTorch may still refuse the call. The operators serve what PyTorch does not: other devices,
    parameters of other dtypes, and tracing, where a compiler knows them by their name.
    """
    if not input.is_cpu or _cpu_operators or _get_dispatch_mode(_PROXY) is not None:
        return False
    dtype = input.dtype
    if is_rms:
        has_dtypes = bias is None and (weight is None or weight.dtype is dtype)
    elif weight is not None and bias is not None and weight.dtype is torch.float32 is bias.dtype:
        has_dtypes = dtype in _BESIDE_FLOAT32
    else:
        has_dtypes = (weight is None or weight.dtype is dtype) and (
            bias is None or bias.dtype is dtype
        )
    return has_dtypes and not input.is_nested


_BESIDE_FLOAT32 = (torch.float32, *arguments.HALF)


def differentiates(input: Any) -> bool:
    """Whether a call is computed, and differentiated, by PyTorch's operators: on the CPU, where no
    mode, transform, tracer or autocast is to see an operator of ours."""
    return (
        type(input) is Tensor
        and input.is_cpu
        and not (_cpu_operators or _dispatch_modes() or _in_transform() or _is_tracing())
        and not torch.is_autocast_enabled("cpu")
    )


def run(a: Arguments) -> Any:
    """A call on the CPU in PyTorch's operators, or None if it is not PyTorch's.

    Nested tensors and an eps of NaN are left to the operators, which refuse them, and so are
    transforms of torch.func, in which the operators have derivatives of every order.
    """
    input, is_rms = a.input, a.statistic == "rms"
    if (
        a.activation is not None
        or a.output_scale != 1.0
        or a.out_dtype is not None
        or not (is_rms or a.statistic == "layer")
        or a.weight_offset != 0.0
        or (a.round_before_weight and a.weight is not None)
        or a.keeps_order
        or a.eps != a.eps
        or type(input) is not Tensor
        or input.dim() < a.normalized_ndim
        or _in_transform()
        or not has_own_norm(input, a.weight, a.bias, is_rms)
    ):
        return None
    if a.is_modulated:
        return _modulated(a)
    return None if a.residual is not None else norm_of(input, a)


def norm_of(x: Tensor, a: Arguments) -> Tensor:
    """PyTorch's own norm of x, with what the call has of it."""
    shape = x.shape[x.dim() - a.normalized_ndim :]
    if a.is_rms:
        return torch.rms_norm(x, shape, a.weight, a.eps)
    return torch.layer_norm(x, shape, a.weight, a.bias, a.eps)


def _modulated(a: Arguments) -> Any:
    """A modulated norm in PyTorch's operators, as a model would write it.

    None for mixed dtypes, and for shapes that the operators refuse. The operators' composite
    would compute in float32 throughout, and take longer.
    """
    input, residual, gate, weight = a.input, a.residual, a.gate, a.weight
    if weight is not None and weight.dtype is not input.dtype:
        return None
    for tensor in (residual, gate, a.shift, a.scale):
        if tensor is None:
            continue
        is_plain = tensor.is_cpu and tensor.dtype is input.dtype and not tensor.is_nested
        if not is_plain or tensor.layout is not torch.strided:
            return None
    x = input
    if residual is not None:
        if residual.shape != input.shape:
            return None
        x = residual + input if gate is None else torch.addcmul(residual, gate, input)
    y = formulas.modulate(norm_of(x, a), a.shift, a.scale)
    if y.shape != input.shape:  # A modulation, or residual, would enlarge input.
        return None
    return y if residual is None else (y, x)
