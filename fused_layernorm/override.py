# SPDX-License-Identifier: Apache-2.0
"""override_aten(): PyTorch's own layer_norm, rms_norm and group_norm, from anywhere, on this
package's kernels.

csrc/per_torch/override.h has the kernels. This file has the handle and the count of overrides in
force, and kernels in Python for a torch without a library of csrc/per_torch.
"""

import math
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, get_kernel

from .groups import KEEPS_CHANNELS_LAST, as_pytorch_reads
from .ops import arguments, autograd_library, groups, load

_lock = threading.RLock()
_in_force: Counter[str] = Counter()  # overrides in force, by dispatch key


class AtenOverride:
    """The handle of `override_aten`: `undo()` ends the override, and so does leaving a `with`."""

    def __init__(self, key: str, in_force: bool) -> None:
        self._key = key
        self._in_force = in_force

    def undo(self) -> None:
        """Ends this override; PyTorch's kernels are back when the last one ends. Idempotent."""
        with _lock:
            if self._in_force:
                self._in_force = False
                _in_force[self._key] -= 1
                if not _in_force[self._key]:
                    _switch(self._key, False)

    def __enter__(self) -> "AtenOverride":
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"<AtenOverride of {self._key}: {'in force' if self._in_force else 'not in force'}>"


def override_aten() -> AtenOverride:
    """Runs PyTorch's layer, RMS and group norms for CUDA tensors on these kernels, everywhere.

    It covers `F.layer_norm`, `F.rms_norm`, `F.group_norm`, their modules and every model that calls
    them, in every thread of the process, and the operators below them, `aten::native_layer_norm`,
    `aten::_fused_rms_norm`, `aten::native_group_norm` and their backwards. Dtypes, shapes, strides,
    gradients of every order, vmap, autocast and errors are PyTorch's: a call that the kernels do
    not take, such as an invalid one, goes on to PyTorch. Code that `torch.compile` compiles does
    not reach these operators: swap the modules there.

    Returns a handle, to be used in either way::

        with fused_layernorm.override_aten():
            model(x)

        handle = fused_layernorm.override_aten()
        model(x)
        handle.undo()

    Overrides may begin and end in any order and from any thread, also while other threads compute;
    when the last one ends, PyTorch's kernels run again. A call that has begun ends as it began. The
    first override of a process registers kernels with PyTorch, which stay and ask whether one is in
    force: while it does, no other thread should be inside a norm. Under a torch that this package
    has no autograd library for, the kernels are in Python: results are the same, the host takes
    longer, and only `native_layer_norm`, its like and their backwards are covered, inside PyTorch's
    autograd and autocast. In a build without CUDA kernels, of this package or of PyTorch,
    and under a driver too old for the kernels, `override_aten` warns and changes nothing.
    """
    reason = load.operators._driver_problem()
    if not reason and (lacking := _lacking_cuda()):
        reason = f"this build of {lacking} has no CUDA kernels"
    if reason:
        warnings.warn(f"override_aten() changes nothing: {reason}", stacklevel=2)
        return AtenOverride("CUDA", in_force=False)
    return _override("CUDA")


def _lacking_cuda() -> str | None:
    """The package that was built without CUDA kernels, if one was."""
    if load.operators._build_info() == "cpu only":
        return "fused_layernorm"
    return None if torch.backends.cuda.is_built() else "PyTorch"


def _override(key: str) -> AtenOverride:
    """Overrides the kernels of one dispatch key. "CPU", which runs composites, is for tests."""
    with _lock:
        if not _in_force[key]:
            _switch(key, True)
        _in_force[key] += 1
        return AtenOverride(key, in_force=True)


def _switch(key: str, on: bool) -> None:
    if autograd_library.active:
        load.operators._switch_override(key, on)
        return
    if key not in _in_python:
        _in_python[key] = _InPython(key)
    _in_python[key].is_on = on


def _calls(key: str) -> int:
    """How many calls the override has taken, for tests."""
    if autograd_library.active:
        count: int = load.operators._override_calls(key)
        return count
    return _in_python[key].taken if key in _in_python else 0


# ---- The kernels in Python, for a torch without a library of csrc/per_torch.


class _InPython:
    """The kernels of one dispatch key. They are registered once, and act while `is_on`."""

    def __init__(self, key: str) -> None:
        self.is_on = False
        self.taken = 0
        # Composite operators call these operators themselves.
        self._inside = threading.local()
        self._library = Library("aten", "IMPL")
        with warnings.catch_warnings():
            # PyTorch warns once in a process, of the first kernel that replaces another. The user
            # asked to replace aten's.
            warnings.simplefilter("ignore")
            for name, kernel in _KERNELS.items():
                # On the CPU _fused_rms_norm is a composite, and its backward has no kernel.
                if "rms" in name and key == "CPU":
                    continue
                self._library.impl(
                    name,
                    self._kernel(name, key, kernel),
                    key,
                    with_keyset=True,
                    allow_override=True,
                )

    def _kernel(self, name: str, key: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        replaced = get_kernel(f"aten::{name}", key)

        def call(keyset: Any, *args: Any) -> Any:
            if self.is_on and not getattr(self._inside, "now", False):
                self._inside.now = True
                try:
                    found = kernel(*args)
                except RuntimeError as error:
                    raise arguments.out_of_memory(error) from None
                finally:
                    self._inside.now = False
                if found is not None:
                    self.taken += 1
                    return found
            return replaced.call_boxed(keyset, *args)

        return call


_in_python: dict[str, _InPython] = {}


def _is_valid(x: Tensor, shape: Any, *parameters: Tensor | None) -> bool:
    """Whether these are valid by PyTorch's rules, and for the kernels."""
    leading = x.dim() - len(shape)
    return (
        x.dtype in arguments.DTYPES
        and len(shape) > 0
        and leading >= 0
        and tuple(x.shape[leading:]) == tuple(shape)
        and max(math.prod(x.shape[:leading]), math.prod(shape)) <= arguments.MAX_INDEX
        and all(
            p is None
            or (p.dtype is x.dtype and p.device == x.device and tuple(p.shape) == tuple(shape))
            for p in parameters
        )
    )


def _is_valid_backward(dy: Tensor, x: Tensor, ndim: int, *statistics: Tensor) -> bool:
    shape = (*x.shape[: x.dim() - ndim], *[1] * ndim)
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    return (dy.dtype, dy.device, dy.shape) == (x.dtype, x.device, x.shape) and all(
        (t.dtype, t.device, tuple(t.shape)) == (dtype, x.device, shape) for t in statistics
    )


# Each gives the results of an operator, or None for a call that it does not take.


def _layer_norm(
    x: Tensor, shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Any:
    if not _is_valid(x, shape, weight, bias) or eps != eps:
        return None
    return load.layer_norm_forward(x, len(shape), weight, bias, eps)


def _rms_norm(x: Tensor, shape: Any, weight: Tensor | None, eps: float | None) -> Any:
    if not _is_valid(x, shape, weight) or eps != eps:
        return None
    options = (arguments.rms_eps(eps, x), None, 1.0, None, "rms")
    y, _, rstd = load.layer_norm_forward(x, len(shape), weight, None, *options)
    return y, rstd


def _layer_norm_backward(*args: Any) -> Any:
    dy, x, shape, mean, rstd, weight, bias, mask = args
    if not _is_valid_backward(dy, x, len(shape), mean, rstd):
        return None
    return _backward(dy, x, shape, mean, rstd, weight, bias, mask, "layer")


def _rms_norm_backward(*args: Any) -> Any:
    dy, x, shape, rstd, weight, mask = args
    if not _is_valid_backward(dy, x, len(shape), rstd):
        return None
    mean = rstd.new_empty(0)
    found = _backward(dy, x, shape, mean, rstd, weight, None, [*mask, False], "rms")
    return None if found is None else found[:2]


def _backward(
    dy: Tensor, x: Tensor, shape: Any, mean: Tensor, rstd: Tensor, *others: Any
) -> tuple[Tensor | None, ...] | None:
    weight, bias, mask, statistic = others
    if not _is_valid(x, shape, weight, bias):
        return None
    if (mask[1] and weight is None) or (mask[2] and bias is None):
        return None
    options = (None, None, 1.0, *mask, statistic)
    found = load.layer_norm_backward(dy, x, len(shape), mean, rstd, weight, bias, *options)
    return tuple(g if needed else None for g, needed in zip(found, mask, strict=True))


def _takes_groups(
    x: Tensor, sizes: tuple[int, int, int], num_groups: int, *parameters: Tensor | None
) -> bool:
    samples, channels, positions = sizes
    return (
        x.dtype in arguments.DTYPES
        and x.dim() >= 2
        and tuple(x.shape[:2]) == (samples, channels)
        and x.numel() == samples * channels * positions
        and num_groups > 0
        and channels > 0
        and channels % num_groups == 0
        # Older releases refuse other orders of memory, and newer ones copy.
        and (KEEPS_CHANNELS_LAST or as_pytorch_reads(x) is x)
        and all(
            p is None
            or (p.dtype is x.dtype and p.device == x.device and tuple(p.shape) == (channels,))
            for p in parameters
        )
    )


def _group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *others: Any) -> Any:
    *sizes, num_groups, eps = others
    if not _takes_groups(x, tuple(sizes), num_groups, weight, bias) or eps != eps:
        return None
    x = as_pytorch_reads(x)
    found = groups.FAMILY.forward(x, num_groups, None, None, weight, bias, eps)
    return found[0], *(t.to(x.dtype) for t in found[1:])


def _group_norm_backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, *others: Any
) -> Any:
    *sizes, num_groups, mask = others
    of_groups = [(t.dtype, t.device, tuple(t.shape)) for t in (mean, rstd)]
    if (
        not _takes_groups(x, tuple(sizes), num_groups, weight)
        or (dy.dtype, dy.device, dy.shape) != (x.dtype, x.device, x.shape)
        or of_groups != [(x.dtype, x.device, (sizes[0], num_groups))] * 2
        or (mask[1] and weight is None)
    ):
        return None
    x = as_pytorch_reads(x)
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    # A bias has a gradient, but is no argument, and without an activation nothing uses it.
    bias = x.new_empty(sizes[1]) if mask[2] else None
    dx, _, _, dweight, dbias = groups.FAMILY.backward(
        dy, x, num_groups, mean.to(wide), rstd.to(wide), None, None, weight, bias, None, 1.0,
        mask[0], False, False, mask[1], mask[2],
    )  # fmt: skip
    found = zip((dx, dweight, dbias), mask, strict=True)
    return tuple(gradient if needed else None for gradient, needed in found)


_KERNELS: dict[str, Callable[..., Any]] = {
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _rms_norm_backward,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
}
