# SPDX-License-Identifier: Apache-2.0
"""Fused LayerNorm, RMSNorm and GroupNorm for PyTorch: CUDA kernels compiled ahead of time."""

import re as _re
import sys as _sys

if _sys.version_info < (3, 10):  # noqa: UP036  (requires-python does not guard a copied folder)
    raise ImportError(f"fused_layernorm needs Python >= 3.10; this is {_sys.version.split()[0]}")

import torch as _torch

_torch_release = tuple(int(n) for n in _re.findall(r"\d+", _torch.__version__)[:2])
if _torch_release < (2, 10):
    raise ImportError(f"fused_layernorm needs torch >= 2.10; this is {_torch.__version__}")

from . import distributed, ops  # noqa: F401  (DTensor's rules, operators)
from .compile.backend import VERSION as __version__
from .compile.backend import explain, fuse
from .functional import (
    ada_layer_norm,
    add_ada_layer_norm,
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    rms_norm,
    rms_norm_gated,
)
from .gated_modules import FusedAdaLayerNorm, FusedAddAdaLayerNorm, FusedRMSNormGated
from .groups import FusedGroupNorm, ada_group_norm, group_norm
from .heads import norm_rope, qk_norm_rope, qkv_norm_rope
from .integrations import tools  # noqa: F401
from .margin import sm_margin
from .modules import (
    FusedAddLayerNorm,
    FusedAddRMSNorm,
    FusedLayerNorm,
    FusedLayerNorm2d,
    FusedRMSNorm,
    FusedRMSNorm2d,
)
from .modules import checked as _checked
from .ops.family import decompositions
from .override import override_aten
from .swap.registry import is_fused
from .swap.swapping import (
    register_swap,
    swap_layer_norm,
    swap_norms,
    swap_rms_norm,
    unswap_layer_norm,
    unswap_norms,
    unswap_rms_norm,
)

__all__ = [
    "FusedAdaLayerNorm", "FusedAddAdaLayerNorm", "FusedAddLayerNorm", "FusedAddRMSNorm",
    "FusedGroupNorm", "FusedLayerNorm", "FusedLayerNorm2d", "FusedRMSNorm", "FusedRMSNorm2d",
    "FusedRMSNormGated", "__version__", "ada_group_norm", "ada_layer_norm", "add_ada_layer_norm",
    "add_layer_norm", "add_rms_norm", "decompositions", "explain", "fuse", "group_norm", "is_fused",
    "layer_norm", "norm_rope", "override_aten", "qk_norm_rope", "qkv_norm_rope", "register_swap",
    "rms_norm", "rms_norm_gated", "sm_margin", "swap_layer_norm", "swap_norms", "swap_rms_norm",
    "unswap_layer_norm", "unswap_norms", "unswap_rms_norm",
]  # fmt: skip

_classes = (globals()[name] for name in __all__ if name.startswith("Fused"))
_torch.serialization.add_safe_globals([*map(_checked, _classes)])
