# SPDX-License-Identifier: Apache-2.0
"""What a call must satisfy, with the message that a user reads about each bad argument.

The composite and the fake implementations check before they compute. The CUDA operators check in
C++, with shorter messages: calls.py takes the full message from `explain`. Backward operators get
their arguments from autograd: only those on CUDA check them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu")
OF_GROUPS = (*ACTIVATIONS, "leaky_relu")
GATES = ("silu", "sigmoid")
STATISTICS = ("layer", "rms")
OF_HEADS = ("rms", "layer", None)  # None rotates alone
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
HALF = (torch.float16, torch.bfloat16)
MAX_INDEX = 2**31 - 1  # rows, and columns, that the CUDA kernels can count

FLOAT32_EPS = torch.finfo(torch.float32).eps
FLOAT64_EPS = torch.finfo(torch.float64).eps


def rms_eps(eps: float | None, x: Any) -> float:
    """The eps of an RMSNorm; that of torch.nn.functional.rms_norm if it is None."""
    if eps is not None:
        return eps
    return FLOAT64_EPS if getattr(x, "dtype", None) is torch.float64 else FLOAT32_EPS


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shown(value: Any) -> str:
    return name_of(value) if isinstance(value, torch.dtype) else repr(value)


def _either(values: Sequence[Any]) -> str:
    *others, last = [shown(value) for value in values]
    return f"{', '.join(others)} or {last}" if others else last


def check_choice(name: str, value: Any, known: Sequence[Any]) -> None:
    """Raises if a value is none of those that are known."""
    if value not in known:
        raise ValueError(f"expected {name} {_either(known)}, got {shown(value)}")


def check_tensor(name: str, tensor: Any) -> None:
    """Raises if this is no dense tensor of a dtype that the operators take."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"expected {name} to be a tensor, got {type(tensor).__name__}")
    if tensor.is_nested:
        raise NotImplementedError(f"expected {name} to be a dense tensor, got a nested tensor")
    if tensor.is_quantized:
        raise NotImplementedError(f"expected {name} to be a dense tensor, got a quantized tensor")
    if tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        raise NotImplementedError(f"expected {name} to be a dense tensor, got layout {layout}")
    if tensor.dtype not in DTYPES:
        raise NotImplementedError(
            f"expected {name} of dtype {_either(DTYPES)}, got {name_of(tensor.dtype)}"
        )


def check_device(name: str, tensor: Tensor, beside: str, other: Tensor) -> None:
    if tensor.device != other.device:
        raise RuntimeError(
            f"expected {name} on the device of {beside}, {other.device}, got {tensor.device}"
        )


def shape_error(name: str, expected: str, tensor: Tensor) -> RuntimeError:
    return RuntimeError(f"expected {name} {expected}, got shape {list(tensor.shape)}")


Misfit = Callable[[str, Tensor], str | None]  # the shape that is expected, of one of another


def check_parameter(
    name: str, tensor: Any, beside: str, x: Tensor, misfit: Misfit,
    residual: Tensor | None = None, others: Sequence[torch.dtype] = (),
) -> None:  # fmt: skip
    """Raises if a tensor is not dense, on the device of x, whose name is `beside`, of the right
    shape, and of a dtype that goes with x's (and residual's): one of them, float32 beside half
    precision, or one of others."""
    check_tensor(name, tensor)
    check_device(name, tensor, beside, x)
    if (expected := misfit(name, tensor)) is not None:
        raise shape_error(name, expected, tensor)
    if tensor.dtype is x.dtype:
        return
    dtypes = [x.dtype] if residual is None else [x.dtype, residual.dtype]
    with_half = [torch.float32] if any(dtype in HALF for dtype in dtypes) else []
    allowed = [*dict.fromkeys((*dtypes, *with_half, *others))]
    if tensor.dtype not in allowed:
        given = beside if residual is None else f"{beside} and residual"
        raise RuntimeError(
            f"expected {name} of dtype {_either(allowed)} beside {given} of "
            f"{' and '.join(map(name_of, dtypes))}, got {name_of(tensor.dtype)}"
        )


def check_parameters(call: Any, names: Iterable[str], misfit: Misfit) -> None:
    """`check_parameter` of those of a call beside input (and residual), and their eps."""
    for name in names:
        if (parameter := getattr(call, name)) is not None:
            check_parameter(name, parameter, "input", call.input, misfit, call.residual)
    weight, bias = call.weight, call.bias
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        got = f"{name_of(weight.dtype)} and {name_of(bias.dtype)}"
        raise RuntimeError(f"expected weight and bias of one dtype, got {got}")
    check_eps(call.eps)


def check_eps(eps: Any) -> None:
    check_number("eps", eps)
    if eps != eps:  # NaN, of a float that Dynamo may trace
        raise ValueError("expected eps to be a number, got nan")


def check_int(name: str, value: Any) -> int:
    """The value as an int; raises if it is none, such as a bool or a float."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"expected {name} to be an int, got {type(value).__name__}")
    return index(value)


def check_number(name: str, value: Any) -> None:
    """A tensor of one element counts as a number."""
    if not isinstance(value, (int, float)) and not hasattr(value, "__float__"):
        raise TypeError(f"expected {name} to be a number, got {type(value).__name__}")
    if isinstance(value, Tensor) and value.numel() != 1:
        shape = list(value.shape)
        raise TypeError(f"expected {name} to be a number, got a tensor of shape {shape}")


def check_finite(name: str, value: Any) -> None:
    check_number(name, value)
    # Dynamo traces no math.isfinite of a symbolic number.
    if isinstance(value, (int, float)) and not -math.inf < value < math.inf:
        raise ValueError(f"expected {name} to be a finite number, got {value}")


def check_types(family: Any, call: Any, prefix: str = "") -> None:
    """Raises where the error of an operator's schema would be worse. A user does not know the
    prefix of a tensor's name."""
    _, tensors, numbers = family.signature()
    for name, is_optional in tensors:
        tensor = getattr(call, name)
        if not (isinstance(tensor, Tensor) or (tensor is None and is_optional)):
            check_tensor(name.removeprefix(prefix), tensor)
    for name in numbers:
        check_number("scale" if name == "output_scale" else name, getattr(call, name))


def broadcasts(tensor: Tensor, input: Tensor) -> bool:
    """Whether the tensor broadcasts against input without enlarging it."""
    leading = input.dim() - tensor.dim()
    if leading < 0:
        return False
    for size, whole in zip(tensor.shape, input.shape[leading:], strict=True):
        if size != whole and size != 1:
            return False
    return True


_compiles = torch.compiler.is_dynamo_compiling
_INTS = {int}


def normalized_ndim(
    input: Any, weight: Any, bias: Any, normalized_shape: Any, default: int | None = None
) -> int:
    """How many dimensions a call normalizes over, by its normalized_shape or else a parameter."""
    if normalized_shape is None:
        name, parameter = ("bias", bias) if weight is None else ("weight", weight)
        if isinstance(parameter, Tensor) and (ndim := parameter.dim()):
            return ndim
        if parameter is None and default is not None:
            return default
        check_tensor("input", input)
        if parameter is None:
            raise ValueError("expected normalized_shape, weight or bias, got none of them")
        check_tensor(name, parameter)
        raise RuntimeError(f"expected {name} to have at least one dimension, got a scalar")
    if type(normalized_shape) is tuple and type(input) is Tensor and not _compiles():
        try:
            ndim = len(normalized_shape)
            if {*map(type, normalized_shape)} == _INTS and input.shape[-ndim:] == normalized_shape:
                return ndim
        except RuntimeError:  # a nested tensor has no shape
            pass
    check_tensor("input", input)
    if isinstance(normalized_shape, (int, torch.SymInt)):
        shape: tuple[int | torch.SymInt, ...] = (normalized_shape,)
    elif hasattr(normalized_shape, "__iter__"):
        shape = tuple(normalized_shape)
    else:
        raise TypeError(
            "expected normalized_shape to be a sequence of ints, got "
            f"{type(normalized_shape).__name__}"
        )
    if not shape:
        raise RuntimeError("expected normalized_shape to have at least one dimension, got ()")
    for size in shape:
        if not isinstance(size, int) and not hasattr(size, "__index__"):
            raise TypeError(
                f"expected normalized_shape to hold ints, got an element of {type(size).__name__}"
            )
    if input.dim() >= len(shape):  # `check` says what is wrong with an input of fewer
        last = tuple(input.shape[-len(shape) :])
        if last != shape:
            raise RuntimeError(
                f"expected input whose last dimensions are normalized_shape {list(shape)}, "
                f"got input of shape {list(input.shape)}"
            )
    return len(shape)


def check_dim(call: Any, dim: Any, normalized_shape: Any) -> int:
    """The dimension `dim` of input, counted from the front; raises if a call cannot have it."""
    input = call.input
    check_tensor("input", input)
    if normalized_shape is not None:
        raise ValueError("expected dim or normalized_shape, got both of them")
    dims = input.dim()
    dim = dim if type(dim) is int else check_int("dim", dim)
    if not -dims <= dim < dims:
        accepted = f"expected dim from {-dims} to {dims - 1}" if dims else "expected no dim"
        raise IndexError(f"{accepted} for input of {dims} dimensions, got {dim}")
    size = input.shape[dim]
    for name, parameter in (("weight", call.weight), ("bias", call.bias)):
        if parameter is None:
            continue
        if not isinstance(parameter, Tensor):
            check_tensor(name, parameter)
        if parameter.dim() != 1 or parameter.shape[0] != size:
            expected = f"of shape {[size]}, the size of dimension {dim} of input"
            raise shape_error(name, expected, parameter)
    return dim % dims


def check_options(
    activation: Any, scale: Any, out_dtype: Any, activations: Sequence[str] = ACTIVATIONS
) -> None:
    """Raises if one of these has a value that the operators do not take."""
    check_choice("activation", activation, (None, *activations))
    check_finite("scale", scale)
    if out_dtype is not None:
        check_choice("out_dtype", out_dtype, DTYPES)


def check_statistic(statistic: Any, weight_offset: Any, weight: Tensor | None) -> None:
    """Raises if one of the options that choose the norm has a value that operators do not take."""
    check_choice("statistic", statistic, STATISTICS)
    check_finite("weight_offset", weight_offset)
    if weight is None and isinstance(weight_offset, (int, float)) and weight_offset != 0:
        raise ValueError(f"expected a weight beside weight_offset {weight_offset}, got none")


def check_count(name: str, value: Any, error: type[Exception] = ValueError) -> int:
    count = check_int(name, value)
    if count < 1:
        raise error(f"expected {name} of at least 1, got {count}")
    return count


def check_group_size(group_size: Any, columns: Any) -> int:
    """The group size as an int; raises if columns are not so many groups. 0 is all of them."""
    if group_size is None:
        return 0
    size = check_count("group_size", group_size)
    if columns is not None and columns % size != 0:
        raise ValueError(f"expected group_size that divides the {columns} columns, got {size}")
    return size


def check_group_norm(a: Any) -> None:
    """Raises, with one sentence, if the operators of group_norm cannot take a call."""
    input = a.input
    check_tensor("input", input)
    check_count("num_groups", a.num_groups, RuntimeError)
    if input.dim() < 2:
        raise shape_error("input", "of at least two dimensions, (samples, channels, ...)", input)
    channels = input.shape[1]
    if channels % a.num_groups != 0:
        raise RuntimeError(
            f"expected num_groups that divides the {channels} channels of input, got {a.num_groups}"
        )

    def misfit(name: str, parameter: Tensor) -> str | None:
        if name in ("weight", "bias"):
            fits = parameter.shape == (channels,)
            return None if fits else f"of shape {[channels]}, a number for each channel of input"
        if parameter.shape[:2] == input.shape[:2] and all(n == 1 for n in parameter.shape[2:]):
            return None
        of_samples = f"of shape {list(input.shape[:2])}, a number for each channel of each sample"
        return f"{of_samples}, which sizes of 1 may follow"

    check_parameters(a, ("shift", "scale", "weight", "bias"), misfit)
    check_options(a.activation, a.output_scale, a.out_dtype, OF_GROUPS)


def check(a: Any) -> None:
    """The same for the operators of rows, and of gated rows, whose gate is as large as input."""
    input, residual = a.input, a.residual
    weight, bias, ndim = a.weight, a.bias, a.normalized_ndim
    is_gated = "gate_activation" in a._fields
    check_tensor("input", input)
    if is_gated or residual is not None or a.gate is not None:
        name, other = ("gate", a.gate) if is_gated else ("residual", residual)
        check_tensor(name, other)
        check_device(name, other, "input", input)
        if other.shape != input.shape:
            raise shape_error(name, f"of the shape of input, {list(input.shape)}", other)
    if ndim < 1:
        raise RuntimeError(f"expected at least one dimension to normalize over, got {ndim}")
    if ndim > input.dim():
        parameter = bias if weight is None else weight
        shown = "" if parameter is None else f", {list(parameter.shape)}"
        # F.rms_norm raises another type here than F.layer_norm.
        raise (ValueError if a.is_rms else RuntimeError)(
            f"expected input of at least the {ndim} dimensions of normalized_shape"
            f"{shown}, got input of shape {list(input.shape)}"
        )

    shape = input.shape[input.dim() - ndim :]

    def misfit(name: str, parameter: Tensor) -> str | None:
        if name in ("weight", "bias"):
            fits, expected = parameter.shape == shape, "of shape {}, the last dimensions of input"
            return None if fits else expected.format(list(shape))
        fits = broadcasts(parameter, input)
        return None if fits else f"that broadcasts to the shape of input, {list(input.shape)}"

    check_parameters(a, ("gate", "shift", "scale", "weight", "bias")[is_gated:], misfit)
    check_options(a.activation, a.output_scale, a.out_dtype)
    check_statistic(a.statistic, a.weight_offset, weight)
    if is_gated:
        check_choice("gate_activation", a.gate_activation, GATES)
        check_group_size(a.group_size or None, input.shape[-1])

    if input.device.type == "cuda":
        cols = math.prod(shape)
        rows = math.prod(input.shape[: input.dim() - ndim])
        for count, what in ((rows, "rows"), (cols, "columns")):
            # A symbolic size is left to the operator, which sees it as a number.
            if isinstance(count, int) and count > MAX_INDEX:
                raise RuntimeError(f"expected at most {MAX_INDEX} {what}, got {count}")


def explain(error: Exception, call: Any, check: Callable[[Any], object] = check) -> Exception:
    """The exception by which `check` says what is wrong with a call, else out_of_memory(error)."""
    try:
        check(call)
    except Exception as clear:
        return clear
    return out_of_memory(error)


# How csrc/bindings/cuda/tensors.cpp begins the message of a failed allocation, as PyTorch does.
_OUT_OF_MEMORY = "CUDA out of memory: fused_layernorm"


def out_of_memory(error: Exception) -> Exception:
    """torch.OutOfMemoryError if `error` reports a failed allocation, else `error`.

    C++ under the stable ABI cannot raise torch.OutOfMemoryError.
    """
    if str(error).startswith(_OUT_OF_MEMORY):
        return torch.OutOfMemoryError(str(error))
    return error
