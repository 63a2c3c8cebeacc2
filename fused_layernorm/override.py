# SPDX-License-Identifier: Apache-2.0
"""override_aten(): PyTorch's own layer_norm and rms_norm, from anywhere, on this package's kernels.

csrc/bindings/override.cpp has the kernels and switches them. This file has the handle, the count of
overrides in force, and the operators that call the replaced kernels.
"""

import re
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch.library import Library, get_kernel

from .ops import load

__all__ = ["AtenOverride", "override_aten"]

# The operators, each with the name of the operator here that calls the replaced kernel, the number
# of tensors that the kernel returns, and the length of its last argument where that is a mask.
_OPERATORS = {
    "native_layer_norm": ("_aten_native_layer_norm", 3, 0),
    "native_layer_norm_backward": ("_aten_native_layer_norm_backward", 3, 3),
    "_fused_rms_norm": ("_aten_fused_rms_norm", 2, 0),
    "_fused_rms_norm_backward": ("_aten_fused_rms_norm_backward", 2, 2),
}
_PAUSE_US = 200  # two such pauses let other threads leave PyTorch before its table is written

# Whether errors of the replaced kernels keep their types. Under a later torch, whose C++ exceptions
# may be laid out otherwise, each becomes a RuntimeError.
_TYPES_ARE_KEPT = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) <= (2, 15)

_lock = threading.RLock()
_in_force: dict[str, int] = {}  # overrides in force, by dispatch key
_replaced: dict[str, dict[str, Any]] = {}  # the kernels replaced, by dispatch key and operator
_libraries: dict[str, Library] = {}  # the operators that call the replaced kernels
_raised: set[type[Exception]] = set()  # by replaced kernels; kept, for C++ holds no reference
_retired: deque[Any] = deque(maxlen=256)  # kernels taken out, in case calls are still inside them


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
                _end(self._key)

    def __enter__(self) -> "AtenOverride":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"<AtenOverride of {self._key}: {'in force' if self._in_force else 'not in force'}>"


def override_aten() -> AtenOverride:
    """Runs PyTorch's layer and RMS norms for CUDA tensors on these kernels, in the whole process.

    It covers all calls of `aten::native_layer_norm`, `aten::_fused_rms_norm` and their backwards on
    CUDA: `F.layer_norm`, `F.rms_norm`, `nn.LayerNorm`, `nn.RMSNorm` and every model that calls
    them, in every thread. PyTorch's own autograd stays around the kernels, so results, gradients,
    higher derivatives, vmap, autocast and errors are PyTorch's; a call that the kernels do not take
    (a weight of another dtype, for example) goes to PyTorch's kernel. `F.rms_norm` computes a call
    with a weight of another dtype by elementwise operators, which stay as they are. Code that
    `torch.compile` compiles does not reach these operators: swap the modules there.

    Returns a handle, to be used in either way::

        with fused_layernorm.override_aten():
            model(x)

        handle = fused_layernorm.override_aten()
        model(x)
        handle.undo()

    Overrides may begin and end in any order and from any thread; when the last one ends, PyTorch
    has its kernels back. In free-threaded Python no other thread may run PyTorch's operators while
    the first override begins or the last one ends, for no lock keeps it out. In a build without
    CUDA kernels, of this package or of PyTorch, and under a driver too old for the kernels,
    `override_aten` warns and changes nothing.
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
        _begin(key)
        return AtenOverride(key, in_force=True)


def _pause_us() -> int:
    return _PAUSE_US if len(sys._current_frames()) > 1 else 0


def _begin(key: str) -> None:
    if not _in_force.get(key):
        _replaced[key] = {name: _kernel(name, key) for name in _OPERATORS}
        if key not in _libraries:
            _libraries[key] = _register_replaced(key)
        load.operators._begin_override(key, _pause_us())
    _in_force[key] = _in_force.get(key, 0) + 1


def _end(key: str) -> None:
    _in_force[key] -= 1
    if not _in_force[key]:
        _retired.extend(_kernel(name, key) for name in _OPERATORS)
        load.operators._end_override(key, _pause_us())


class _NoKernel:
    """What is replaced where PyTorch has no kernel, as of `_fused_rms_norm_backward` on the CPU."""

    def __init__(self, name: str, key: str) -> None:
        self._problem = f"aten::{name} has no kernel for {key}"

    def call_boxed(self, *args: Any) -> Any:
        raise NotImplementedError(self._problem)


def _kernel(name: str, key: str) -> Any:
    try:
        return get_kernel(f"aten::{name}", key)
    except RuntimeError:
        return _NoKernel(name, key)


def _register_replaced(key: str) -> Library:
    """The operators `_aten_*`, by which override.cpp calls the kernels it has replaced."""
    keyset = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def caller(name: str) -> Callable[..., tuple[Any, ...]]:
        _, count, mask = _OPERATORS[name]

        def call(*args: Any) -> tuple[Any, ...]:
            none = torch.empty(0, dtype=torch.uint8)
            if mask:
                args = (*args[:-mask], list(args[-mask:]))
            try:
                return (*_replaced[key][name].call_boxed(keyset, *args), none, none.clone())
            except Exception as error:
                text = bytearray(str(error) or type(error).__name__, "utf-8")
                _raised.add(type(error))
                address = torch.tensor(
                    [id(type(error))] if _TYPES_ARE_KEPT else [], dtype=torch.int64
                )
                return *[none] * count, torch.frombuffer(text, dtype=torch.uint8), address

        return call

    library = Library(load.NAMESPACE, "FRAGMENT")
    with warnings.catch_warnings():
        # PyTorch warns once in a process, of the first kernel that replaces another. The user asked
        # to replace aten's, so the warning is used up here, where it is suppressed.
        warnings.simplefilter("ignore")
        for _ in range(2):
            for name, (operator, *_) in _OPERATORS.items():
                library.impl(operator, caller(name), key, allow_override=True)
    return library
