# SPDX-License-Identifier: Apache-2.0
"""Autocast, in Python: what it makes of a call.

PyTorch's autocast runs layer_norm in float32 on every device but the CPU, where autocast does not
affect it. The kernels compute in float32 anyway, so only the output becomes float32, and the input
is not converted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .arguments import HALF
from .operators import Arguments

# PyTorch's autocast runs rms_norm in float32 from this release on; before, it does not change it.
RMS_NORM_IN_FLOAT32 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)

KEYS = [name for name in torch._C.DispatchKey.__members__ if name.startswith("Autocast")]
KEYSET = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, KEYS[0]))
for _name in KEYS[1:]:
    KEYSET = KEYSET | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _name))


def _float(parameter: Tensor | None) -> Tensor | None:
    return parameter if parameter is None or parameter.dtype not in HALF else parameter.float()


def under_autocast(a: Arguments) -> Arguments:
    """The arguments as autocast makes them."""
    out_dtype = a.out_dtype
    to_float = not a.is_rms or RMS_NORM_IN_FLOAT32
    if out_dtype is None and to_float and not a.input.is_cpu and a.input.dtype in HALF:
        out_dtype = torch.float32
    dtypes = [parameter.dtype for parameter in (a.weight, a.bias) if parameter is not None]
    weight, bias = a.weight, a.bias
    if any(dtype in HALF and dtype != a.input.dtype for dtype in dtypes) or len(set(dtypes)) == 2:
        weight, bias = _float(weight), _float(bias)
    gate, shift, scale = (
        tensor if tensor is None or tensor.dtype == a.input.dtype else _float(tensor)
        for tensor in (a.gate, a.shift, a.scale)
    )
    modulation: Any = {"gate": gate, "shift": shift, "scale": scale}
    return a._replace(weight=weight, bias=bias, out_dtype=out_dtype, **modulation)
