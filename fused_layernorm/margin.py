# SPDX-License-Identifier: Apache-2.0
"""A margin of multiprocessors that the kernels leave free."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from .ops import arguments, load

VARIABLE = "FUSED_LAYERNORM_SM_MARGIN"

_lock = threading.Lock()
# The margin of each context that was entered, in their order. The last one counts.
_entered: dict[object, int] = {}


def sm_margin(n: int) -> AbstractContextManager[None]:
    """A context manager: within it, kernels leave ``n`` of the device's multiprocessors free.

    So a kernel of another stream that holds up to ``n`` multiprocessors until work behind the norm
    has run (symmetric memory, collectives that stay on the device) does not keep the norm from
    running. It concerns norms of rows or groups that several blocks share, which wait for each
    other: rows of more than some 64 KB, and groups of channels of more than some 32 KB. All other
    kernels end on whatever multiprocessors they get.

    The margin holds for the whole process, because autograd launches backward on threads of its
    own. It is read when a kernel is launched, or captured in a CUDA graph: forward and backward
    both belong within it. Of contexts within each other the inner one counts, of several threads'
    the one that was entered last. The environment variable ``FUSED_LAYERNORM_SM_MARGIN``, which is
    read at import, sets the margin outside of all contexts.

    Results are the same to the bit in every run with one ``n``. Between two values they may differ,
    as between devices with other numbers of multiprocessors: where blocks share a row or a group,
    and in gradients that are summed over rows.

    Args:
        n: how many multiprocessors stay free.

    Raises:
        ValueError: if ``n`` is negative, or leaves no multiprocessor on a device.
    """
    n = arguments.check_int("n", n)
    if n < 0:
        raise ValueError(f"expected n of at least 0 multiprocessors, got {n}")
    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    sms = [torch.cuda.get_device_properties(one).multi_processor_count for one in devices]
    least = min(sms, default=1 << 16)
    if n >= least:
        raise ValueError(f"expected n of fewer than {least} multiprocessors, got {n}")
    return _margin(n)


@contextmanager
def _margin(n: int) -> Iterator[None]:
    entry = object()
    with _lock:
        _entered[entry] = n
        _set()
    try:
        yield
    finally:
        with _lock:
            del _entered[entry]
            _set()


def _set() -> None:
    load.operators._set_sm_margin([_of_environment, *_entered.values()][-1])


def _read(given: str | None) -> int:
    """The margin of the environment. Devices are not counted at import."""
    if given is None:
        return 0
    if not given.isdecimal() or int(given) >= 1 << 16:
        raise ValueError(f"expected {VARIABLE} to be a number of multiprocessors, got '{given}'")
    return int(given)


_of_environment = _read(os.environ.get(VARIABLE))
_set()
