# SPDX-License-Identifier: Apache-2.0
"""Autocast, in Python: what it makes of a call.

PyTorch's autocast runs layer_norm in float32 on every device but the CPU, where autocast does not
affect it. The kernels compute in float32 anyway, so only the output becomes float32, and the input
is not converted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from . import load
from .arguments import HALF

# PyTorch's autocast runs rms_norm in float32 from this release on; before, it does not change it.
RMS_NORM_IN_FLOAT32 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)

KEYS = [name for name in torch._C.DispatchKey.__members__ if name.startswith("Autocast")]
KEYSET = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, KEYS[0]))
for _name in KEYS[1:]:
    KEYSET = KEYSET | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _name))


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


def register(operator: OpOverload, Call: Any) -> None:
    """Registers for the Autocast keys that the operator is called again, as autocast makes it."""

    def implementation(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(KEYSET):
            return operator(*under_autocast(Call(*args)))

    for key in KEYS:
        load.library.impl(operator._opname, implementation, key)
