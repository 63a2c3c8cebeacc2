"""The operators' Python half: loading them, the composite implementations, fakes and autograd.

csrc/bindings/schemas.cpp holds the schemas and says what each operator gives; the CUDA kernels are registered
beside them. Here stand
  - the composite: the same results through PyTorch's operators, for every other device;
  - the fake implementations: shapes and dtypes without data, for torch.compile and meta tensors;
  - the vmap rules;
  - autograd: `EagerLayerNorm` and `EagerAddLayerNorm` (plain tensors, lowest overhead), `LayerNorm`
    and `AddLayerNorm` (torch.func transforms) and the formula registered with the operators
    (torch.compile, tensor subclasses, dispatch modes), all of them over one `_backward`;
  - the same functions as differentiable expressions, which PyTorch's operators differentiate any
    number of times: `expression` (forward-mode AD), `backward_expression` (double backward).
"""

from __future__ import annotations

import importlib
import math
import platform
import warnings
from typing import Any

import torch
from torch import Tensor

from . import _checks

try:
    importlib.import_module("fused_layernorm._C")  # loading it registers the operators
except ImportError as error:
    raise ImportError(
        f"fused_layernorm's binary does not load under Python {platform.python_version()} and "
        f"torch {torch.__version__}: {error}. Install the package (pip install fused_layernorm) "
        "or build it in place (make build)."
    ) from error

_aten = torch.ops.aten
_ops = torch.ops.fused_layernorm

layer_norm = _ops.layer_norm.default
layer_norm_forward = _ops.layer_norm_forward.default
add_layer_norm = _ops.add_layer_norm.default
add_layer_norm_forward = _ops.add_layer_norm_forward.default
layer_norm_backward = _ops.layer_norm_backward.default


# --- the composite: PyTorch's operators -----------------------------------------------------------


def _acc_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _activate(z: Tensor, activation: str | None) -> Tensor:
    match activation:
        case "gelu":
            return _aten.gelu(z)
        case "gelu_tanh":
            return _aten.gelu(z, approximate="tanh")
        case "silu":
            return _aten.silu(z)
        case "relu":
            return _aten.relu(z)
    return z


def _epilogue(
    xhat: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str | None,
    scale: float,
    out_dtype: torch.dtype,
) -> Tensor:
    z = xhat if weight is None else xhat * weight
    z = z if bias is None else z + bias
    return (_activate(z, activation) * scale).to(out_dtype)


def _activate_backward(da: Tensor, z: Tensor, activation: str | None) -> Tensor:
    match activation:
        case "gelu":
            return _aten.gelu_backward(da, z)
        case "gelu_tanh":
            return _aten.gelu_backward(da, z, approximate="tanh")
        case "silu":
            return _aten.silu_backward(da, z)
        case "relu":
            return _aten.threshold_backward(da, z, 0)
    return da


def _norm(
    x: Tensor,
    normalized_ndim: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str | None,
    scale: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    acc = _acc_dtype(x)
    shape = x.shape[x.dim() - normalized_ndim :]
    z, mean, rstd = _aten.native_layer_norm(
        x.to(acc).contiguous(), shape, _to(weight, acc), _to(bias, acc), eps
    )
    y = _activate(z, activation)
    if scale != 1.0:
        y = y * scale
    return y.to(out_dtype), mean, rstd


def _add(input: Tensor, residual: Tensor) -> Tensor:
    wide = torch.float64 in (input.dtype, residual.dtype)
    acc = torch.float64 if wide else torch.float32
    return (input.to(acc) + residual.to(acc)).to(residual.dtype).contiguous()


_warned_of_composite = False


def _warn_of_composite(x: Tensor) -> None:
    global _warned_of_composite
    if x.is_cuda and not _warned_of_composite:
        _warned_of_composite = True
        warnings.warn(
            "this build of fused_layernorm has no CUDA kernels: CUDA tensors take PyTorch's own "
            "operators, which are slower (python -m fused_layernorm says what is installed)",
            stacklevel=2,
        )


def _layer_norm_forward_composite(
    input, normalized_ndim, weight, bias, eps, activation=None, scale=1.0, out_dtype=None
):
    _checks.check_layer_norm(
        input, normalized_ndim, weight, bias, eps, activation, scale, out_dtype
    )
    _warn_of_composite(input)
    dtype = out_dtype or input.dtype
    return _norm(input, normalized_ndim, weight, bias, eps, activation, scale, dtype)


def _layer_norm_composite(*args):
    return _layer_norm_forward_composite(*args)[0]


def _add_layer_norm_forward_composite(
    input, residual, normalized_ndim, weight, bias, eps, activation=None, scale=1.0, out_dtype=None
):
    _checks.check_add_layer_norm(
        input, residual, normalized_ndim, weight, bias, eps, activation, scale, out_dtype
    )
    _warn_of_composite(input)
    dtype = out_dtype or input.dtype
    residual_out = _add(input, residual)
    y, mean, rstd = _norm(
        residual_out, normalized_ndim, weight, bias, eps, activation, scale, dtype
    )
    return y, residual_out, mean, rstd


def _add_layer_norm_composite(*args):
    return _add_layer_norm_forward_composite(*args)[:2]


def _layer_norm_backward_composite(
    dy,
    x,
    normalized_ndim,
    mean,
    rstd,
    weight,
    bias,
    dresidual,
    activation,
    scale,
    needs_dx,
    needs_dweight,
    needs_dbias,
):
    acc = _acc_dtype(x)
    shape = x.shape[x.dim() - normalized_ndim :]
    wide_weight, wide_bias = _to(weight, acc), _to(bias, acc)
    # PyTorch's backward takes x * rstd - mean * rstd for the normalised x, which cancels where the
    # mean is large. It is given x - mean, and a mean of zero.
    centered = x.to(acc) - mean
    g = dy.to(acc)
    if scale != 1.0:
        g = g * scale
    if activation is not None:
        z = centered * rstd
        if wide_weight is not None:
            z = z * wide_weight
        if wide_bias is not None:
            z = z + wide_bias
        g = _activate_backward(g, z, activation)

    parameter_dtype = _parameter_dtype(x, weight, bias)
    dx = torch.empty(0, dtype=x.dtype, device=x.device)
    dweight = torch.empty(0, dtype=parameter_dtype, device=x.device)
    dbias = torch.empty(0, dtype=parameter_dtype, device=x.device)
    if needs_dx or needs_dweight or needs_dbias:
        # A parameter that is not there has no gradient in PyTorch's operator: ones stand for it.
        if needs_dweight and wide_weight is None:
            wide_weight = torch.ones(shape, dtype=acc, device=x.device)
        if needs_dbias and wide_bias is None:
            wide_bias = torch.ones(shape, dtype=acc, device=x.device)
        wide_dx, wide_dweight, wide_dbias = _aten.native_layer_norm_backward(
            g.contiguous(),
            centered.contiguous(),
            shape,
            torch.zeros_like(mean, memory_format=torch.contiguous_format),
            rstd.contiguous(),
            wide_weight,
            wide_bias,
            [needs_dx, needs_dweight, needs_dbias],
        )
    if needs_dx:
        dx = (wide_dx if dresidual is None else wide_dx + dresidual.to(acc)).to(x.dtype)
    if needs_dweight:
        dweight = wide_dweight.to(parameter_dtype)
    if needs_dbias:
        dbias = wide_dbias.to(parameter_dtype)
    return dx, dweight, dbias


def _parameter_dtype(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> torch.dtype:
    if weight is not None:
        return weight.dtype
    return x.dtype if bias is None else bias.dtype


_library = torch.library.Library("fused_layernorm", "IMPL")
_library.impl("layer_norm", _layer_norm_composite, "CompositeExplicitAutograd")
_library.impl("layer_norm_forward", _layer_norm_forward_composite, "CompositeExplicitAutograd")
_library.impl("add_layer_norm", _add_layer_norm_composite, "CompositeExplicitAutograd")
_library.impl(
    "add_layer_norm_forward", _add_layer_norm_forward_composite, "CompositeExplicitAutograd"
)
_library.impl("layer_norm_backward", _layer_norm_backward_composite, "CompositeExplicitAutograd")


# --- fakes: shapes without data -------------------------------------------------------------------


def _new(x: Tensor, shape: Any, dtype: torch.dtype) -> Tensor:
    return x.new_empty(shape, dtype=dtype)


def _statistics(x: Tensor, normalized_ndim: int) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[: x.dim() - normalized_ndim], *([1] * normalized_ndim))
    acc = _acc_dtype(x)
    return _new(x, shape, acc), _new(x, shape, acc)


@torch.library.register_fake("fused_layernorm::layer_norm")
def _(input, normalized_ndim, weight, bias, eps, activation=None, scale=1.0, out_dtype=None):
    _checks.check_layer_norm(
        input, normalized_ndim, weight, bias, eps, activation, scale, out_dtype
    )
    return _new(input, input.shape, out_dtype or input.dtype)


@torch.library.register_fake("fused_layernorm::layer_norm_forward")
def _(input, normalized_ndim, weight, bias, eps, activation=None, scale=1.0, out_dtype=None):
    _checks.check_layer_norm(
        input, normalized_ndim, weight, bias, eps, activation, scale, out_dtype
    )
    y = _new(input, input.shape, out_dtype or input.dtype)
    return y, *_statistics(input, normalized_ndim)


@torch.library.register_fake("fused_layernorm::add_layer_norm")
def _(
    input, residual, normalized_ndim, weight, bias, eps, activation=None, scale=1.0, out_dtype=None
):
    _checks.check_add_layer_norm(
        input, residual, normalized_ndim, weight, bias, eps, activation, scale, out_dtype
    )
    y = _new(input, input.shape, out_dtype or input.dtype)
    return y, _new(residual, residual.shape, residual.dtype)


@torch.library.register_fake("fused_layernorm::add_layer_norm_forward")
def _(
    input, residual, normalized_ndim, weight, bias, eps, activation=None, scale=1.0, out_dtype=None
):
    _checks.check_add_layer_norm(
        input, residual, normalized_ndim, weight, bias, eps, activation, scale, out_dtype
    )
    y = _new(input, input.shape, out_dtype or input.dtype)
    residual_out = _new(residual, residual.shape, residual.dtype)
    return y, residual_out, *_statistics(residual, normalized_ndim)


@torch.library.register_fake("fused_layernorm::layer_norm_backward")
def _(
    dy,
    x,
    normalized_ndim,
    mean,
    rstd,
    weight,
    bias,
    dresidual,
    activation,
    scale,
    needs_dx,
    needs_dweight,
    needs_dbias,
):
    shape = x.shape[x.dim() - normalized_ndim :]
    dtype = _parameter_dtype(x, weight, bias)
    return (
        _new(x, x.shape if needs_dx else (0,), x.dtype),
        _new(x, shape if needs_dweight else (0,), dtype),
        _new(x, shape if needs_dbias else (0,), dtype),
    )


# --- differentiable expressions -------------------------------------------------------------------


# Derivatives of every order: PyTorch's layer_norm, whose double backward takes mean and rstd for
# constants, has a wrong third one, and silu_backward has none.


def _mean(x: Tensor, normalized_ndim: int) -> Tensor:
    return x.mean(dim=tuple(range(-normalized_ndim, 0)), keepdim=True)


def _statistics_expression(x: Tensor, normalized_ndim: int, eps: float) -> tuple[Tensor, Tensor]:
    mean = _mean(x, normalized_ndim)
    return mean, (_mean((x - mean).square(), normalized_ndim) + eps).rsqrt()


def _slope(z: Tensor, activation: str | None) -> Tensor:
    """d activation(z) / dz."""
    match activation:
        case "gelu":
            density = torch.exp(-0.5 * z * z) * (2 * math.pi) ** -0.5
            return 0.5 * torch.erfc(z * -(2**-0.5)) + z * density
        case "gelu_tanh":
            root = (2 / math.pi) ** 0.5
            t = torch.tanh(root * (z + 0.044715 * z * z * z))
            return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * root * (1 + 3 * 0.044715 * z * z)
        case "silu":
            sigmoid = torch.sigmoid(z)
            return sigmoid * (1 + z * (1 - sigmoid))
        case "relu":
            return (z > 0).to(z.dtype)
    return torch.ones_like(z)


def expression(
    input: Tensor,
    normalized_ndim: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str | None = None,
    scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """layer_norm in PyTorch's differentiable operators."""
    acc = _acc_dtype(input)
    x = input.to(acc)
    mean, rstd = _statistics_expression(x, normalized_ndim, eps)
    return _epilogue(
        (x - mean) * rstd,
        _to(weight, acc),
        _to(bias, acc),
        activation,
        scale,
        out_dtype or input.dtype,
    )


def add_expression(
    input: Tensor,
    residual: Tensor,
    normalized_ndim: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str | None = None,
    scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """add_layer_norm in PyTorch's differentiable operators."""
    x = _add(input, residual)
    dtype = out_dtype or input.dtype
    return expression(x, normalized_ndim, weight, bias, eps, activation, scale, dtype), x


def _backward_formula(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dresidual: Tensor | None,
    normalized_ndim: int,
    activation: str | None,
    scale: float,
    *,
    sum_from: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias), the parameters' gradients summed over dimensions from sum_from on."""
    acc = _acc_dtype(x)
    w, b = _to(weight, acc), _to(bias, acc)
    xhat = (x.to(acc) - mean) * rstd
    g = dy.to(acc) * scale
    if activation is not None:
        z = xhat if w is None else xhat * w
        z = z if b is None else z + b
        g = g * _slope(z, activation)

    dweight, dbias = g * xhat, g
    leading = tuple(range(sum_from, x.dim() - normalized_ndim))
    if leading:
        dweight, dbias = dweight.sum(leading), dbias.sum(leading)
    dxhat = g if w is None else g * w
    dx = rstd * (
        dxhat - _mean(dxhat, normalized_ndim) - xhat * _mean(dxhat * xhat, normalized_ndim)
    )
    if dresidual is not None:
        dx = dx + dresidual.to(acc)
    dtype = _parameter_dtype(x, weight, bias)
    return dx.to(x.dtype), dweight.to(dtype), dbias.to(dtype)


def backward_expression(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dresidual: Tensor | None,
    normalized_ndim: int,
    eps: float,
    activation: str | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias) as differentiable functions of the tensors, with mean and rstd of x."""
    mean, rstd = _statistics_expression(x.to(_acc_dtype(x)), normalized_ndim, eps)
    return _backward_formula(
        dy, x, mean, rstd, weight, bias, dresidual, normalized_ndim, activation, scale
    )


# --- vmap -----------------------------------------------------------------------------------------

# A batch dimension is one more leading dimension. Parameters that are batched themselves, and the
# gradients of shared ones, of which every sample has its own, are beyond the kernels: PyTorch's
# operators do what follows the normalization.


def _to_front(tensor: Any, dim: int | None, batch_size: int) -> Any:
    """The tensor with its batch dimension first; one that has none, expanded; None stays."""
    if tensor is None:
        return None
    return tensor.expand(batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _parameter_to_front(
    parameter: Tensor | None, dim: int | None, batch_size: int, ndim: int
) -> Tensor | None:
    """A parameter of shape (batch, 1, ..., 1, *normalized_shape), of ndim dimensions."""
    parameter = _to_front(parameter, dim, batch_size)
    if parameter is None:
        return None
    ones = [1] * (ndim - parameter.dim())
    return parameter.reshape(batch_size, *ones, *parameter.shape[1:])


def _layer_norm_forward_vmap(
    info, in_dims, input, ndim, weight, bias, eps, activation=None, scale=1.0, out_dtype=None
):
    size = info.batch_size
    x = _to_front(input, in_dims[0], size)
    if in_dims[2] is None and in_dims[3] is None:
        out = layer_norm_forward(x, ndim, weight, bias, eps, activation, scale, out_dtype)
    else:
        xhat, mean, rstd = layer_norm_forward(x, ndim, None, None, eps, out_dtype=_acc_dtype(x))
        weight = _parameter_to_front(weight, in_dims[2], size, x.dim())
        bias = _parameter_to_front(bias, in_dims[3], size, x.dim())
        y = _epilogue(xhat, weight, bias, activation, scale, out_dtype or x.dtype)
        out = (y, mean, rstd)
    return out, (0, 0, 0)


@torch.library.register_vmap("fused_layernorm::layer_norm")
def _(info, in_dims, input, ndim, weight, bias, *args):
    if in_dims[2] is None and in_dims[3] is None:
        input = _to_front(input, in_dims[0], info.batch_size)
        return layer_norm(input, ndim, weight, bias, *args), 0
    out, _ = _layer_norm_forward_vmap(info, in_dims, input, ndim, weight, bias, *args)
    return out[0], 0


def _add_layer_norm_forward_vmap(
    info,
    in_dims,
    input,
    residual,
    ndim,
    weight,
    bias,
    eps,
    activation=None,
    scale=1.0,
    out_dtype=None,
):
    size = info.batch_size
    x = _to_front(input, in_dims[0], size)
    residual = _to_front(residual, in_dims[1], size)
    if in_dims[3] is None and in_dims[4] is None:
        out = add_layer_norm_forward(
            x, residual, ndim, weight, bias, eps, activation, scale, out_dtype
        )
    else:
        xhat, residual_out, mean, rstd = add_layer_norm_forward(
            x, residual, ndim, None, None, eps, out_dtype=_acc_dtype(residual)
        )
        weight = _parameter_to_front(weight, in_dims[3], size, x.dim())
        bias = _parameter_to_front(bias, in_dims[4], size, x.dim())
        y = _epilogue(xhat, weight, bias, activation, scale, out_dtype or x.dtype)
        out = (y, residual_out, mean, rstd)
    return out, (0, 0, 0, 0)


@torch.library.register_vmap("fused_layernorm::add_layer_norm")
def _(info, in_dims, input, residual, ndim, weight, bias, *args):
    if in_dims[3] is None and in_dims[4] is None:
        input = _to_front(input, in_dims[0], info.batch_size)
        residual = _to_front(residual, in_dims[1], info.batch_size)
        return add_layer_norm(input, residual, ndim, weight, bias, *args), (0, 0)
    out, _ = _add_layer_norm_forward_vmap(info, in_dims, input, residual, ndim, weight, bias, *args)
    return out[:2], (0, 0)


torch.library.register_vmap("fused_layernorm::layer_norm_forward", _layer_norm_forward_vmap)
torch.library.register_vmap("fused_layernorm::add_layer_norm_forward", _add_layer_norm_forward_vmap)


@torch.library.register_vmap("fused_layernorm::layer_norm_backward")
def _(
    info,
    in_dims,
    dy,
    x,
    ndim,
    mean,
    rstd,
    weight,
    bias,
    dresidual,
    activation,
    scale,
    needs_dx,
    needs_dweight,
    needs_dbias,
):
    size = info.batch_size
    dy = _to_front(dy, in_dims[0], size)
    x = _to_front(x, in_dims[1], size)
    mean = _to_front(mean, in_dims[3], size).contiguous()
    rstd = _to_front(rstd, in_dims[4], size).contiguous()
    dresidual = _to_front(dresidual, in_dims[7], size)
    by_kernel = needs_dx and in_dims[5] is None and in_dims[6] is None
    empty = x.new_empty((size, 0), dtype=_parameter_dtype(x, weight, bias))
    dx, dweight, dbias = x.new_empty((size, 0)), empty, empty.clone()
    if by_kernel:
        dx, _, _ = layer_norm_backward(
            dy, x, ndim, mean, rstd, weight, bias, dresidual, activation, scale, True, False, False
        )
    if needs_dweight or needs_dbias or (needs_dx and not by_kernel):
        found = _backward_formula(
            dy,
            x,
            mean,
            rstd,
            _parameter_to_front(weight, in_dims[5], size, x.dim()),
            _parameter_to_front(bias, in_dims[6], size, x.dim()),
            dresidual,
            ndim,
            activation,
            scale,
            sum_from=1,
        )
        dx = found[0] if needs_dx and not by_kernel else dx
        dweight = found[1] if needs_dweight else dweight
        dbias = found[2] if needs_dbias else dbias
    return (dx, dweight, dbias), (0, 0, 0)


# --- autograd -------------------------------------------------------------------------------------


class LayerNormBackward(torch.autograd.Function):
    """layer_norm_backward, to be differentiated once more (and then any number of times)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(dy, x, weight, bias, dresidual, mean, rstd, ndim, eps, activation, scale, needs):
        return layer_norm_backward(
            dy, x, ndim, mean, rstd, weight, bias, dresidual, activation, scale, *needs
        )

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:5])
        ctx.args = inputs[7:]

    @staticmethod
    def backward(ctx, *grads):
        ndim, eps, activation, scale, needs = ctx.args
        tensors = ctx.saved_tensors
        present = [i for i, tensor in enumerate(tensors) if tensor is not None]

        def needed(*args):
            full: list[Any] = [None] * 5
            for i, tensor in zip(present, args, strict=True):
                full[i] = tensor
            dy, x, weight, bias, dresidual = full
            outputs = backward_expression(
                dy, x, weight, bias, dresidual, ndim, eps, activation, scale
            )
            return tuple(out for out, need in zip(outputs, needs, strict=True) if need)

        vjp = torch.func.vjp(needed, *(tensors[i] for i in present))[1]
        found = vjp(tuple(grad for grad, need in zip(grads, needs, strict=True) if need))
        result: list = [None] * 12
        for i, grad in zip(present, found, strict=True):
            result[i] = grad
        return tuple(result)


def _backward(ctx, dy, dresidual, needs_dx, needs_dweight, needs_dbias):
    """(dx, dweight, dbias) from what a forward saved, None where not asked for."""
    x, mean, rstd, weight, bias = ctx.saved_tensors
    ndim, eps, activation, scale, _ = ctx.args
    needs = (needs_dx, needs_dweight, needs_dbias)
    try:
        if torch.is_grad_enabled():
            dx, dweight, dbias = LayerNormBackward.apply(
                dy, x, weight, bias, dresidual, mean, rstd, ndim, eps, activation, scale, needs
            )
        else:
            dx, dweight, dbias = layer_norm_backward(
                dy, x, ndim, mean, rstd, weight, bias, dresidual, activation, scale, *needs
            )
    except RuntimeError as error:
        raise _checks.explain_allocation(error, x, "layer_norm_backward") from None
    return (
        dx if needs_dx else None,
        dweight if needs_dweight else None,
        dbias if needs_dbias else None,
    )


def _add_backward(ctx, dy, dresidual, needs_dinput, needs_dresidual, needs_dweight, needs_dbias):
    """(dinput, dresidual, dweight, dbias), None where not asked for."""
    if dy is None:  # only residual_out was used, if anything
        dx, dweight, dbias = dresidual, None, None
    else:
        needs_dx = needs_dinput or needs_dresidual
        dx, dweight, dbias = _backward(ctx, dy, dresidual, needs_dx, needs_dweight, needs_dbias)
    dinput = dx if needs_dinput else None
    if dinput is not None and dinput.dtype != ctx.input_dtype:
        dinput = dinput.to(ctx.input_dtype)
    return dinput, dx if needs_dresidual else None, dweight, dbias


def _layer_norm_grads(ctx, dy):
    """The gradients of layer_norm_forward's arguments."""
    needs = ctx.needs_input_grad
    dx, dweight, dbias = _backward(ctx, dy, None, needs[0], needs[2], needs[3])
    return dx, None, dweight, dbias, None, None, None, None


def _add_layer_norm_grads(ctx, dy, dresidual):
    """The gradients of add_layer_norm_forward's arguments."""
    needs = ctx.needs_input_grad
    dinput, dresidual, dweight, dbias = _add_backward(
        ctx, dy, dresidual, needs[0], needs[1], needs[3], needs[4]
    )
    return dinput, dresidual, None, dweight, dbias, None, None, None, None


def _save_layer_norm(ctx, inputs, output):
    input, ndim, weight, bias, *options = inputs
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(input, mean, rstd, weight, bias)
    ctx.args = (ndim, *options)


def _save_add_layer_norm(ctx, inputs, output):
    input, _, ndim, weight, bias, *options = inputs
    _, residual_out, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(residual_out, mean, rstd, weight, bias)
    ctx.args = (ndim, *options)
    ctx.input_dtype = input.dtype


torch.library.register_autograd(
    "fused_layernorm::layer_norm_forward",
    lambda ctx, dy, dmean, drstd: _layer_norm_grads(ctx, dy),
    setup_context=_save_layer_norm,
)
torch.library.register_autograd(
    "fused_layernorm::add_layer_norm_forward",
    lambda ctx, dy, dresidual, dmean, drstd: _add_layer_norm_grads(ctx, dy, dresidual),
    setup_context=_save_add_layer_norm,
)


class LayerNorm(torch.autograd.Function):
    """layer_norm_forward for torch.func transforms; takes all of the operator's arguments."""

    generate_vmap_rule = True
    setup_context = staticmethod(_save_layer_norm)

    @staticmethod
    def forward(*args):
        return layer_norm_forward(*args)

    @staticmethod
    def backward(ctx, dy, dmean, drstd):
        return _layer_norm_grads(ctx, dy)


class AddLayerNorm(torch.autograd.Function):
    """add_layer_norm_forward for torch.func transforms; takes all of the operator's arguments."""

    generate_vmap_rule = True
    setup_context = staticmethod(_save_add_layer_norm)

    @staticmethod
    def forward(*args):
        return add_layer_norm_forward(*args)

    @staticmethod
    def backward(ctx, dy, dresidual, dmean, drstd):
        return _add_layer_norm_grads(ctx, dy, dresidual)


# The eager functions step over the operators' own autograd kernel, which is Python called from C++:
# the half of a small call's time. What is no tensor comes as one tuple: each argument costs.
_redispatch_layer_norm_forward = layer_norm_forward._handle.redispatch_boxed
_redispatch_add_layer_norm_forward = add_layer_norm_forward._handle.redispatch_boxed
_CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class EagerLayerNorm(torch.autograd.Function):
    """layer_norm for plain CUDA and CPU tensors, under no mode or transform; gives y alone."""

    @staticmethod
    def forward(ctx, input, weight, bias, args):
        ndim, eps, activation, scale, out_dtype = args
        y, mean, rstd = _redispatch_layer_norm_forward(
            _CUDA if input.is_cuda else _CPU,
            input,
            ndim,
            weight,
            bias,
            eps,
            activation,
            scale,
            out_dtype,
        )
        ctx.save_for_backward(input, mean, rstd, weight, bias)
        ctx.args = args
        return y

    @staticmethod
    def backward(ctx, dy):
        needs_dx, needs_dweight, needs_dbias, _ = ctx.needs_input_grad
        dx, dweight, dbias = _backward(ctx, dy, None, needs_dx, needs_dweight, needs_dbias)
        return dx, dweight, dbias, None


class EagerAddLayerNorm(torch.autograd.Function):
    """add_layer_norm for plain CUDA and CPU tensors, under no mode or transform."""

    @staticmethod
    def forward(ctx, input, residual, weight, bias, args):
        ndim, eps, activation, scale, out_dtype = args
        y, residual_out, mean, rstd = _redispatch_add_layer_norm_forward(
            _CUDA if input.is_cuda else _CPU,
            input,
            residual,
            ndim,
            weight,
            bias,
            eps,
            activation,
            scale,
            out_dtype,
        )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(residual_out, mean, rstd, weight, bias)
        ctx.args = args
        ctx.input_dtype = input.dtype
        return y, residual_out

    @staticmethod
    def backward(ctx, dy, dresidual):
        return *_add_backward(ctx, dy, dresidual, *ctx.needs_input_grad[:4]), None


# Function.apply without its tests for torch.func, which functional.py has made before.
eager_layer_norm = super(torch.autograd.Function, EagerLayerNorm).apply
eager_add_layer_norm = super(torch.autograd.Function, EagerAddLayerNorm).apply
