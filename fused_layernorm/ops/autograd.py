# SPDX-License-Identifier: Apache-2.0
"""Derivatives and autocast, in Python: what implementations for their dispatch keys are made of.

The first order runs on the operators: a forward pass that needs gradients on the operator that
gives statistics, its backward pass on a backward operator (family.py, heads.py). A backward
operator without a kernel, its own derivatives, and forward mode are PyTorch's derivatives of the
formula. This is written for correctness; where there is a C++ library of csrc/per_torch for the
running torch, that has the first order, and calls the implementations here for the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from . import arguments, formulas, load
from .arguments import HALF

_below_autograd = torch._C._AutoDispatchBelowAutograd
_after_autograd = torch._C._after_autograd_keyset


class Function(_SingleLevelFunction):
    """A torch.autograd.Function that does not handle torch.func's transforms by itself."""

    # The key under which compiled autograd caches its form of backward.
    _compiled_autograd_key = staticmethod(torch.autograd.Function._compiled_autograd_key)


def needs_grad(*args: Any) -> bool:
    """Whether one of these is a tensor that asks for a gradient."""
    if torch.is_grad_enabled():
        for arg in args:
            if isinstance(arg, Tensor) and arg.requires_grad:
                return True
    return False


def in_forward_mode() -> bool:
    if forward_ad._current_level >= 0:
        return True
    if not torch._C._are_functorch_transforms_active():
        return False
    interpreter = torch._C._functorch.peek_interpreter_stack()
    return interpreter.key() == torch._C._functorch.TransformType.Jvp


def apply(function: Any, *args: Any) -> Any:
    """function.apply of a Function, also while torch.func's transforms are active.

    The dispatcher has handled them before it calls the implementations below, as it does for
    PyTorch's own operators, so the function sees the tensors of one level.
    """
    if not torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    from torch._functorch import autograd_function

    with autograd_function.enable_single_level_autograd_function():  # type: ignore[attr-defined]
        return function.apply(*args)


@contextlib.contextmanager
def lower_levels() -> Iterator[None]:
    """The context in which an autograd function's forward calls an operator: PyTorch switches
    differentiation off there, also for lower levels of torch.func, which may need a graph."""
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), _below_autograd():
        yield


def redispatch(operator: OpOverload, keyset: Any, *args: Any) -> Any:
    """Calls an operator's implementation for the keys below autograd."""
    with _below_autograd():
        return operator.redispatch(keyset & _after_autograd, *args)


def call_operator(operator: OpOverload, *args: Any) -> tuple[Tensor, ...]:
    """Calls a backward operator; a failed allocation raises torch.OutOfMemoryError."""
    try:
        return operator(*args)
    except RuntimeError as error:
        raise arguments.out_of_memory(error) from None


_FRONT = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
_AUTOGRAD = (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView)


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """The context in which autograd sees what a kernel calls, which may run below autograd."""
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD:
        exclude = exclude.remove(key)
    allowed = torch._C._functorch.get_inplace_requires_grad_allowed()
    torch._C._functorch.set_inplace_requires_grad_allowed(True)
    try:
        with (
            torch._C._ForceDispatchKeyGuard(include, exclude),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            yield
    finally:
        torch._C._functorch.set_inplace_requires_grad_allowed(allowed)


def derivatives(
    function: Callable[..., Any], tensors: Sequence[Tensor], grads: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """The gradients of the tensors for those at the results of function(*tensors), by PyTorch.

    They can be differentiated where gradients are switched on. One that does not depend on a tensor
    may be None. Those at the results are cast to the results' dtypes.
    """
    # torch.func.vjp takes no hooks on saved tensors. In a kernel a transform of torch.func is being
    # applied, and no other can begin: there autograd works on the tensors of its level.
    in_kernel = torch._C._dispatch_tls_local_exclude_set().has(_FRONT)
    if torch._C._are_functorch_transforms_active() and not in_kernel:
        found, pull, *_ = torch.func.vjp(function, *tensors)
        return pull(tuple(g.to(y.dtype) for y, g in zip(found, grads, strict=True)))
    creates_graph = torch.is_grad_enabled()
    with _recording():
        # Views, so that the gradients end here and not further up.
        leaves = [(t.clone() if t.is_inference() else t).view_as(t) for t in tensors]
        leaves = [t if t.requires_grad else t.requires_grad_() for t in leaves]
        pairs = zip(function(*leaves), grads, strict=True)
        used = [(y, g.to(y.dtype)) for y, g in pairs if y.requires_grad]
        if not used:
            return [None] * len(leaves)
        ys, gs = zip(*used, strict=True)
        how: Any = {"create_graph": creates_graph, "allow_unused": True}
        return torch.autograd.grad(ys, leaves, gs, **how)


def complete(b: Any) -> Any:
    """A backward call with a stand-in for each tensor whose gradient is asked for, and whose values
    are not, so forward has not kept it: parameters of norms over rows, qkv of a rotation alone."""
    if "qkv" in b._fields and b.qkv is None:
        some: Tensor = next(dy for dy in b.grads if dy is not None)
        return b._replace(qkv=some.new_empty_strided(b.size, b.stride).zero_())
    if "normalized_ndim" not in b._fields:
        return b
    shape = b.x.shape[b.x.dim() - b.normalized_ndim :]
    dtype = missing_dtype(b)
    if b.weight is None and b.needs_dweight:
        b = b._replace(weight=b.x.new_ones(shape, dtype=dtype))
    if b.bias is None and b.needs_dbias:
        b = b._replace(bias=b.x.new_zeros(shape, dtype=dtype))
    return b


def missing_dtype(b: Any) -> torch.dtype:
    """The dtype of the gradient of a weight or bias that is not there."""
    given = [p.dtype for p in (b.weight, b.bias) if p is not None]
    return given[0] if given and "normalized_ndim" in b._fields else b.x.dtype


def results(b: Any, found: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """What a backward operator gives: the gradients that are needed, and else empty tensors."""
    x = b.x if "x" in b._fields else next(dy for dy in b.grads if dy is not None)

    def dtype_of(name: str) -> torch.dtype:
        tensor = getattr(b, name)
        missing = missing_dtype(b) if name in ("weight", "bias") else x.dtype
        return missing if tensor is None else tensor.dtype

    return tuple(
        found[name].to(dtype_of(name)) if name in found else x.new_empty(0, dtype=dtype_of(name))
        for name in b.differentiated
    )


def keep(ctx: Any, values: dict[str, Any]) -> None:
    """Saves values, tensors or others, for the backward pass."""
    ctx.names = [name for name, value in values.items() if isinstance(value, Tensor)]
    ctx.save_for_backward(*(values[name] for name in ctx.names))
    ctx.others = {name: value for name, value in values.items() if name not in ctx.names}


def kept(ctx: Any) -> dict[str, Any]:
    """What was saved, by name."""
    return {**ctx.others, **dict(zip(ctx.names, ctx.saved_tensors, strict=True))}


class Backward(Function):
    """A backward operator, whose derivatives are those of `gradients`, of the same arguments."""

    @staticmethod
    def forward(
        ctx: Any, keyset: Any, operator: OpOverload, Call: Any, gradients: Any, *args: Any
    ) -> Any:
        with lower_levels():
            found = redispatch(operator, keyset, *args)
        ctx.set_materialize_grads(False)
        ctx.Call, ctx.gradients = Call, gradients
        keep(ctx, Call(*args)._asdict())
        ctx.mark_non_differentiable(*(g for g in found if g.shape == (0,)))
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        call, gradients = ctx.Call(**kept(ctx)), ctx.gradients
        used = [i for i, grad in enumerate(grads) if grad is not None]
        needs: Any = ctx.Call(*ctx.needs_input_grad[4:])
        # The statistics are functions of x in the formula.
        names = [n for n in ctx.names if getattr(needs, n) and n not in ("mean", "rstd")]

        def of(*leaves: Tensor) -> tuple[Tensor, ...]:
            found = gradients(*call._replace(**dict(zip(names, leaves, strict=True))))
            return tuple(found[i] for i in used)

        found: dict[str, Any] = {}
        if used:
            given = [grad for grad in grads if grad is not None]
            leaves = [getattr(call, name) for name in names]
            found = dict(zip(names, derivatives(of, leaves, given), strict=True))
        return (None, None, None, None, *(found.get(name) for name in call._fields))


def backward_autograd(operator: OpOverload, gradients: Any) -> Callable[..., Any]:
    """Autograd of a backward operator; `gradients` gives its results by PyTorch's operators."""
    Call = formulas.call_of(operator)

    def implementation(keyset: Any, *args: Any) -> Any:
        if in_forward_mode():
            return gradients(*args)
        if needs_grad(*args):
            return apply(Backward, keyset, operator, Call, gradients, *Call(*args))
        return redispatch(operator, keyset, *args)

    return implementation


# ---- Autocast. PyTorch's runs layer_norm in float32 on every device but the CPU, where it does not
# ---- affect it. The kernels compute in float32 anyway, so only the output becomes float32.

# PyTorch's autocast runs rms_norm in float32 from this release on; before, it does not change it.
RMS_NORM_IN_FLOAT32 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)

_KEYS = [name for name in torch._C.DispatchKey.__members__ if name.startswith("Autocast")]
AUTOCAST_KEYS = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEYS[0]))
for _name in _KEYS[1:]:
    AUTOCAST_KEYS = AUTOCAST_KEYS | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _name))


def under_autocast(a: Any) -> Any:
    """A call of any family as autocast makes it."""
    dtype, changes = a.input.dtype, {}
    in_float32 = not a.is_rms or RMS_NORM_IN_FLOAT32
    if in_float32 and a.out_dtype is None and not a.input.is_cpu and dtype in HALF:
        changes["out_dtype"] = torch.float32
    names = ("shift", "scale") if "gate_first" in a._fields else ("gate", "shift", "scale")
    cast = {n: t for n in names if (t := getattr(a, n)) is not None and t.dtype != dtype}
    parameters = {n: p for n in ("weight", "bias") if (p := getattr(a, n)) is not None}
    dtypes = {parameter.dtype for parameter in parameters.values()}
    if len(dtypes) == 2 or any(one in HALF and one != dtype for one in dtypes):
        cast |= parameters
    halves = {name: tensor.float() for name, tensor in cast.items() if tensor.dtype in HALF}
    return a._replace(**changes, **halves)


def register_autocast(operator: OpOverload, Call: Any) -> None:
    """Registers for the Autocast keys that the operator is called again, as autocast makes it."""

    def implementation(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST_KEYS):
            return operator(*under_autocast(Call(*args)))

    for key in _KEYS:
        load.library.impl(operator._opname, implementation, key)
