"""Derivatives, in Python: the operators' implementations for the Autograd dispatch keys.

The first order runs on the operators: a forward that needs gradients on the operator that gives
statistics, its backward on layer_norm_backward. Beyond that, and in forward mode, PyTorch
differentiates formulas.py. It is written for correctness; the C++ library of csrc/autograd takes
its place where there is one for the running torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from . import arguments, formulas, load
from .operators import (
    FORWARD,
    Arguments,
    BackwardArguments,
    Gradients,
    Operator,
    Results,
    select,
    with_statistics,
)

_below_autograd = torch._C._AutoDispatchBelowAutograd
_after_autograd = torch._C._after_autograd_keyset


def _needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _in_forward_mode() -> bool:
    if forward_ad._current_level >= 0:
        return True
    if not torch._C._are_functorch_transforms_active():
        return False
    interpreter = torch._C._functorch.peek_interpreter_stack()
    return interpreter.key() == torch._C._functorch.TransformType.Jvp


def _apply(function: type[Function], *args: Any) -> Any:
    """function.apply, without its own way through torch.func's transforms.

    The dispatcher has taken the transforms apart before it comes here, as it does for PyTorch's own
    operators: the function sees the tensors of one level.
    """
    apply = super(Function, function).apply  # type: ignore[misc]
    if not torch._C._are_functorch_transforms_active():
        return apply(*args)
    from torch._functorch import autograd_function

    with autograd_function.enable_single_level_autograd_function():  # type: ignore[attr-defined]
        return apply(*args)


@contextlib.contextmanager
def _lower_levels() -> Iterator[None]:
    """What an operator is called in from within an autograd function's forward.

    That has switched differentiation off for itself, and so for the levels of torch.func's
    transforms below its own, which may want a graph.
    """
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), _below_autograd():
        yield


class _Forward(Function):
    """(y, residual_out, mean, rstd) of any forward operator."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
        a = Arguments(*args)
        operator = with_statistics(a)
        with _lower_levels():
            found = operator.overload.redispatch(keyset & _after_autograd, *operator.lay_out(a))
        y, residual_out, mean, rstd = operator.results(found)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        x = a.input if residual_out is None else residual_out
        ctx.save_for_backward(x, mean, rstd, a.weight, a.bias)
        ctx.options = a.options
        ctx.input_dtype = a.input.dtype
        return y, residual_out, mean, rstd

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dresidual: Tensor | None, *_: None) -> Any:
        needs_dinput, needs_dresidual, needs_dweight, needs_dbias = ctx.needs_input_grad[1:5]
        x, mean, rstd, weight, bias = ctx.saved_tensors
        dx, dweight, dbias = dresidual, None, None  # where only residual_out was used
        if dy is not None:
            needs = (needs_dinput or needs_dresidual, needs_dweight, needs_dbias)
            ndim, _, activation, scale, _ = ctx.options
            try:
                found = load.layer_norm_backward(
                    dy, x, ndim, mean, rstd, weight, bias, dresidual, activation, scale, *needs
                )
            except RuntimeError as error:
                raise arguments.out_of_memory(error) from None
            dx, dweight, dbias = (
                gradient if needed else None for gradient, needed in zip(found, needs, strict=True)
            )
        dinput = dx if needs_dinput else None
        if dinput is not None:
            dinput = dinput.to(ctx.input_dtype)
        return None, dinput, dx if needs_dresidual else None, dweight, dbias, None


class _Backward(Function):
    """layer_norm_backward, whose own derivatives are those of formulas.py."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
        with _lower_levels():
            found = load.layer_norm_backward.redispatch(keyset & _after_autograd, *args)
        b = BackwardArguments(*args)
        ctx.mark_non_differentiable(
            *(gradient for gradient, needed in zip(found, b.needs, strict=True) if not needed)
        )
        ctx.set_materialize_grads(False)
        is_tensor = [isinstance(arg, Tensor) for arg in args]
        ctx.save_for_backward(*(arg for arg in args if isinstance(arg, Tensor)))
        ctx.args = [None if tensor else arg for tensor, arg in zip(is_tensor, args, strict=True)]
        ctx.is_tensor = is_tensor
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        used = [i for i, grad in enumerate(grads) if grad is not None]
        if not used:
            return (None,) * (1 + len(BackwardArguments._fields))
        saved = iter(ctx.saved_tensors)
        b = BackwardArguments(
            *(
                next(saved) if tensor else arg
                for tensor, arg in zip(ctx.is_tensor, ctx.args, strict=True)
            )
        )
        # mean and rstd are functions of x.
        names = [
            name
            for name in ("dy", "x", "weight", "bias", "dresidual")
            if getattr(b, name) is not None
        ]

        def gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
            fields: dict[str, Any] = dict(zip(names, tensors, strict=True))
            found = formulas.backward(b._replace(**fields))
            return tuple(found[i] for i in used)

        vjp = torch.func.vjp(gradients, *(getattr(b, name) for name in names))[1]
        found = dict(zip(names, vjp(tuple(grads[i] for i in used)), strict=True))
        return None, *(found.get(name) for name in BackwardArguments._fields)


def _forward_implementation(operator: Operator) -> Callable[..., Any]:
    def implementation(keyset: Any, *args: Any) -> Any:
        a = operator.arguments(*args)
        if _in_forward_mode():
            arguments.check(a)
            return operator.outputs(formulas.forward(a))
        if _needs_grad(a.input, a.residual, a.weight, a.bias):
            return operator.outputs(Results(*_apply(_Forward, keyset, *a)))
        with _below_autograd():
            return operator.overload.redispatch(keyset & _after_autograd, *args)

    return implementation


def _backward_implementation(keyset: Any, *args: Any) -> Gradients:
    b = BackwardArguments(*args)
    if _in_forward_mode():
        return select(b, formulas.backward(b))
    if _needs_grad(b.dy, b.x, b.weight, b.bias, b.dresidual):
        return _apply(_Backward, keyset, *args)
    with _below_autograd():
        return load.layer_norm_backward.redispatch(keyset & _after_autograd, *args)


def register() -> None:
    """Makes these the operators' autograd. A process has this one or that of csrc/autograd."""
    for operator in FORWARD:
        load.library.impl(
            operator.name, _forward_implementation(operator), "Autograd", with_keyset=True
        )
    load.library.impl("layer_norm_backward", _backward_implementation, "Autograd", with_keyset=True)
