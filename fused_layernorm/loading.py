# SPDX-License-Identifier: Apache-2.0
"""What torch.load(weights_only=True) makes of the package's modules: their data, nothing that runs.

PyTorch sets on a module of a known class whatever attributes the file has for it. So the name of
each class of the package leads to a subclass, for this loader alone, that looks at the attributes
first.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import nn


def register(*classes: type[nn.Module]) -> None:
    """Makes modules of these classes known to torch.load(weights_only=True)."""
    torch.serialization.add_safe_globals([_checked(cls) for cls in classes])


def _checked(cls: Any) -> tuple[type[nn.Module], str]:
    def __setstate__(self: Any, state: dict[str, Any]) -> None:
        for name, value in state.items():
            runs = callable(value) or callable(getattr(cls, name, None))
            if runs or ("_hooks" in name and value):
                raise pickle.UnpicklingError(
                    f"expected the data of a {cls.__name__}, got a {name} that calls of it would "
                    "run: torch.load(weights_only=False) loads it, if you trust the file"
                )
        self.__class__ = cls
        self.__setstate__(state)

    name = f"{cls.__module__}.{cls.__qualname__}"
    return type(cls.__name__, (cls,), {"__setstate__": __setstate__}), name
