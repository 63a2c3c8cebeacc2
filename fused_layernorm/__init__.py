"""Fused LayerNorm for PyTorch: CUDA kernels compiled ahead of time, behind PyTorch's own API."""

import re as _re
import sys as _sys

if _sys.version_info < (3, 10):  # noqa: UP036  (a copied folder knows no requires-python)
    raise ImportError(f"fused_layernorm needs Python >= 3.10; this is {_sys.version.split()[0]}")

from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version

import torch as _torch

_torch_release = tuple(int(n) for n in _re.findall(r"\d+", _torch.__version__)[:2])
if _torch_release < (2, 10):
    raise ImportError(f"fused_layernorm needs torch >= 2.10; this is {_torch.__version__}")

from . import distributed, ops  # noqa: E402, F401  (register DTensor's rules, the operators)
from .decompositions import decompositions  # noqa: E402
from .functional import add_layer_norm, layer_norm  # noqa: E402
from .modules import FusedAddLayerNorm, FusedLayerNorm  # noqa: E402
from .override import override_aten  # noqa: E402
from .swap import swap_layer_norm  # noqa: E402

try:
    __version__ = _version("fused_layernorm")
except _PackageNotFoundError:  # imported from a folder that was built but not installed
    __version__ = "0+unknown"

__all__ = [
    "FusedAddLayerNorm",
    "FusedLayerNorm",
    "__version__",
    "add_layer_norm",
    "decompositions",
    "layer_norm",
    "override_aten",
    "swap_layer_norm",
]
