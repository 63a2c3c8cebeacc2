# SPDX-License-Identifier: Apache-2.0
"""override_aten(): PyTorch's own layer_norm, rms_norm and group_norm, anywhere, on our kernels.

csrc/per_torch/override.h has the kernels, this file the handle and the count of overrides in force.
"""

import threading
import warnings
from collections import Counter

import torch

from .ops import autograd_library, load

_lock = threading.RLock()
_in_force: Counter[str] = Counter()  # overrides in force, by dispatch key


class AtenOverride:
    """The handle of `override_aten`."""

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
                    load.operators._switch_override(self._key, False)

    def __enter__(self) -> "AtenOverride":
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"<AtenOverride of {self._key}: {'in force' if self._in_force else 'not in force'}>"


def override_aten() -> AtenOverride:
    """Runs PyTorch's layer, RMS and group norms for CUDA tensors on these kernels, everywhere.

    It covers `F.layer_norm`, `F.rms_norm` and `F.group_norm`, their modules and every model that
    calls them, in every thread of the process, also under autocast and `torch.inference_mode`.
    Dtypes, shapes, strides, gradients of every order and errors are PyTorch's: a call that the
    kernels do not take, such as an invalid one, goes on to PyTorch. What modes and transforms such
    as `vmap` see is PyTorch's, too, and so are the operators below, as
    `torch.ops.aten.native_layer_norm`. Code that `torch.compile` compiles does not reach these
    functions: swap the modules there.

    Returns a handle, whose ``undo()`` ends the override, as leaving a ``with`` of it does::

        with fused_layernorm.override_aten():
            model(x)

    Overrides may begin and end in any order and from any thread, also while other threads compute;
    when the last one ends, PyTorch's kernels run again. A call that has begun ends as it began.
    `override_aten` warns and changes nothing in a build without CUDA kernels, of this package or of
    PyTorch, under a driver too old for them, and under a torch without an autograd library of ours.
    """
    reason = load.operators._driver_problem()
    if not reason and (lacking := _lacking_cuda()):
        reason = f"this build of {lacking} has no CUDA kernels"
    if not reason and not autograd_library.active:
        reason = f"it needs autograd in C++, which is in Python here: {autograd_library.reason}"
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
            load.operators._switch_override(key, True)
        _in_force[key] += 1
        return AtenOverride(key, in_force=True)
