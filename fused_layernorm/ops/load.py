# SPDX-License-Identifier: Apache-2.0
"""Loads the binary, which registers the operators, and names them.

csrc/call/schemas.h and, of heads, csrc/bindings/schemas.cpp hold the schemas and say what each
operator gives. csrc/bindings/cuda registers the CUDA kernels, the files beside this one the rest.
"""

from __future__ import annotations

import platform
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload

# The operators are torch.ops.<namespace>; csrc/bindings/namespace.h has the same name.
NAMESPACE = "fused_layernorm"

try:
    torch.ops.load_library(Path(__file__).parents[1] / "libfused_layernorm.so")
except OSError as error:
    reason = error.__cause__ or error  # PyTorch wraps the dynamic linker's error
    raise ImportError(
        f"fused_layernorm's binary does not load under Python {platform.python_version()} and "
        f"torch {torch.__version__}: {reason}. Install the package (pip install fused_layernorm) "
        "or build it in place (make build)."
    ) from error

operators = getattr(torch.ops, NAMESPACE)


def operator(name: str) -> Any:
    """The operator of this name, or None."""
    return getattr(getattr(operators, name, None), "default", None)


layer_norm, gate_backward = operator("layer_norm"), operator("gate_backward")

# What the other files define and register lives as long as this object.
library = torch.library.Library(NAMESPACE, "FRAGMENT")

# Inductor may change an operand's strides, but not their order. To keep them, its default, it would
# name every option of a call, which takes a microsecond longer.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


def define_like(name: str, prefix: str) -> OpOverload:
    """Defines an operator of another's schema, whose name is `prefix` before the other's."""
    schema = str(operator(name)._schema).removeprefix(f"{NAMESPACE}::")
    library.define(prefix + schema, tags=_TAGS)
    return operator(prefix + name)


# ---- What serves a call on CUDA that no kernel takes: the operator _formula_NAME, of its schema.
# ---- csrc/bindings/cuda (formula.h) calls it. An error in it crosses the stable ABI without its
# ---- message, so `_formula_error` gives the last one's.

PREFIX = "_formula_"

# How many calls of each operator were served, for tests.
served: Counter[str] = Counter()

_last = threading.local()


def implement(operator: OpOverload, implementation: Callable[..., Any]) -> OpOverload:
    """Registers an operator's implementation for every device, and as its formula, the result."""
    name = operator._opname
    operator._tags = [*operator.tags, *_TAGS]  # which csrc cannot give under the stable ABI

    def formula(*args: Any) -> Any:
        served[name] += 1
        try:
            return implementation(*args)
        except Exception as error:
            _last.error = str(error)
            raise

    library.impl(name, implementation, "CompositeExplicitAutograd")
    defined = define_like(name, PREFIX)
    library.impl(PREFIX + name, formula, "CompositeExplicitAutograd")
    return defined


# The message of this thread's last error in a formula.
library.define("_formula_error() -> str")
library.impl("_formula_error", lambda: getattr(_last, "error", ""), "CompositeExplicitAutograd")
