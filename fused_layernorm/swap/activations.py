# SPDX-License-Identifier: Apache-2.0
"""Which activations of PyTorch the kernels apply, as functions and as modules of its classes."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .classes import must_be_called

# By function, the name that our functions know.
_FUNCTIONS: dict[Any, str] = {
    F.silu: "silu",
    F.relu: "relu",
    torch.relu: "relu",
    F.gelu: "gelu",
    F.leaky_relu: "leaky_relu",
}
# By class: its forward, and the name and the function that this calls.
_CLASSES: dict[type[nn.Module], tuple[Any, str, Any]] = {
    nn.SiLU: (nn.SiLU.forward, "silu", F.silu),
    nn.ReLU: (nn.ReLU.forward, "relu", F.relu),
    nn.GELU: (nn.GELU.forward, "gelu", F.gelu),
    nn.LeakyReLU: (nn.LeakyReLU.forward, "leaky_relu", F.leaky_relu),
}

# By name, for what no kernel serves.
FUNCTIONS: dict[str, Any] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "leaky_relu": F.leaky_relu,
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
