# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own functions and classes, and which calls swapped modules leave to stock forwards."""

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

from .ops import arguments

_is_compiling = torch.compiler.is_dynamo_compiling
function_modes = torch._C._len_torch_function_stack
_function_mode_at = torch._C._get_function_stack_at

# For tests without a GPU: calls on the CPU then go to the operators instead of PyTorch's.
_cpu_operators = os.environ.get("FUSED_LAYERNORM_CPU_OPERATORS") == "1"


def has_kernels(x: Any) -> bool:
    """Whether x is a tensor on a device that has kernels."""
    return isinstance(x, Tensor) and (x.is_cuda or _cpu_operators)


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

    A swapped module accepts what the stock module accepts, with the stock result: it asks here of
    a call's tensors, x first, and leaves to the stock forward a nested tensor, a tensor subclass of
    another library (it may hold its values in a way that only the operators of the stock forward
    can read), a TorchFunctionMode of another library, and every call while a tool has replaced
    F.layer_norm or F.rms_norm.
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
    return function_modes() == 1 and type(_function_mode_at(0)) is DeviceContext


def _are_known(values: Sequence[Any]) -> bool:
    if not all(_is_known(type(value)) for value in values):
        return False
    # Dynamo traces through the modes that it knows.
    if not _is_compiling() and has_foreign_mode(function_modes()):
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
