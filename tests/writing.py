# SPDX-License-Identifier: Apache-2.0
"""The functions of torch.nn.functional that may write in place, found by their signatures."""

import inspect
from typing import Any

import torch.nn.functional as F


def with_inplace(module: Any, of: Any = lambda value: value) -> list[str]:
    """The names in a module of what has an argument `inplace`."""
    found = [(name, of(getattr(module, name))) for name in dir(module)]
    return [
        name
        for name, value in found
        if inspect.isfunction(value) and "inplace" in inspect.signature(value).parameters
    ]


FUNCTIONS = with_inplace(F)


def by_position(name: str, inplace: bool, training: bool = False) -> tuple[Any, ...]:
    """A function, and its arguments behind the first one, given by position as modules do."""
    function = getattr(F, name)
    given: list[Any] = []
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        value = 0.5 if parameter.default is inspect.Parameter.empty else parameter.default
        value = {"inplace": inplace, "training": training}.get(parameter.name, value)
        given.append(value)
        if parameter.name == "inplace":
            break
    return function, *given
