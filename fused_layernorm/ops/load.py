"""Loads the binary, which registers the operators, and names them.

csrc/bindings/schemas.cpp holds the schemas and says what each operator gives. The CUDA kernels are
registered beside them; the other files of this folder register the rest.
"""

from __future__ import annotations

import importlib
import platform

import torch

try:
    importlib.import_module("fused_layernorm._C")
except ImportError as error:
    raise ImportError(
        f"fused_layernorm's binary does not load under Python {platform.python_version()} and "
        f"torch {torch.__version__}: {error}. Install the package (pip install fused_layernorm) "
        "or build it in place (make build)."
    ) from error

_operators = torch.ops.fused_layernorm

layer_norm = _operators.layer_norm.default
layer_norm_forward = _operators.layer_norm_forward.default
add_layer_norm = _operators.add_layer_norm.default
add_layer_norm_forward = _operators.add_layer_norm_forward.default
layer_norm_backward = _operators.layer_norm_backward.default

# What the other files register lives as long as this object. A fragment can define no operator.
library = torch.library.Library("fused_layernorm", "IMPL")
