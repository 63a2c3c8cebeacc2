# SPDX-License-Identifier: Apache-2.0
"""What serves a call on CUDA that no kernel takes: the operator _formula_NAME, of NAME's schema.

csrc/bindings/cuda (formula.h) calls it. An error in it crosses the stable ABI without its message,
so `_formula_error` gives the last one's.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload

from . import load

PREFIX = "_formula_"

# How many calls of each operator were served, for tests.
served: Counter[str] = Counter()

_last = threading.local()


def implement(operator: OpOverload, implementation: Callable[..., Any]) -> OpOverload:
    """Registers an operator's implementation for every device, and as its formula, the result."""
    name = operator._opname

    def formula(*args: Any) -> Any:
        served[name] += 1
        try:
            return implementation(*args)
        except Exception as error:
            _last.error = str(error)
            raise

    load.library.impl(name, implementation, "CompositeExplicitAutograd")
    defined = load.define_like(name, PREFIX)
    load.library.impl(PREFIX + name, formula, "CompositeExplicitAutograd")
    return defined


# The message of this thread's last error in a formula.
load.library.define("_formula_error() -> str")
load.library.impl(
    "_formula_error", lambda: getattr(_last, "error", ""), "CompositeExplicitAutograd"
)
