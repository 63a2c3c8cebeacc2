# SPDX-License-Identifier: Apache-2.0
"""Which activations of PyTorch the kernels apply, as functions and as modules of its classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..stock import own_forward, unless_replaced
from .classes import must_be_called

# By name, PyTorch's function and class. What a tool has replaced before this import is None, and no
# function or forward is that.
_OWN: dict[str, tuple[Any, type[nn.Module]]] = {
    "silu": (unless_replaced(F.silu), nn.SiLU),
    "relu": (unless_replaced(F.relu), nn.ReLU),
    "gelu": (unless_replaced(F.gelu), nn.GELU),
    "leaky_relu": (unless_replaced(F.leaky_relu), nn.LeakyReLU),
}
_FUNCTIONS: dict[Any, str] = {function: name for name, (function, _) in _OWN.items() if function}
_FUNCTIONS[torch.relu] = "relu"
# By class: its forward, and the name and the function that this calls.
_CLASSES: dict[type[nn.Module], tuple[Any, str, Any]] = {
    cls: (own_forward(cls), name, function) for name, (function, cls) in _OWN.items()
}


def activation_of(act: Any) -> str | None:
    """The name of the activation that a module or a function computes; None if it is no such.

    A module that has hooks, or whose forward or function somebody has replaced, must be called.
    """
    if not isinstance(act, nn.Module):
        return _FUNCTIONS.get(act) if callable(act) else None
    forward, name, function = _CLASSES.get(type(act), (None, "", None))
    if forward is None or type(act).forward is not forward or must_be_called(act):
        return None
    if getattr(F, name) is not function:
        return None
    if name == "gelu":
        approximate: Any = act.approximate
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(approximate)
    if name == "leaky_relu" and act.negative_slope != 0.01:
        return None
    return name
