# SPDX-License-Identifier: Apache-2.0
"""Loads the binary, which registers the operators, and names them.

csrc/call/schemas.h and, of heads, csrc/bindings/schemas.cpp hold the schemas and say what each
operator gives. csrc/bindings/cuda registers the CUDA kernels; the other files of this folder
register the rest.
"""

from __future__ import annotations

import functools
import platform
from collections import namedtuple
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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

layer_norm = operators.layer_norm.default
layer_norm_backward = operators.layer_norm_backward.default
ada_layer_norm_backward = operators.ada_layer_norm_backward.default
add_ada_layer_norm_backward = operators.add_ada_layer_norm_backward.default
gate_backward = operators.gate_backward.default

# What the other files define and register lives as long as this object.
library = torch.library.Library(NAMESPACE, "FRAGMENT")


def define_like(name: str, prefix: str) -> torch._ops.OpOverload:
    """Defines an operator of another's schema, whose name is `prefix` before the other's."""
    schema = str(getattr(operators, name).default._schema).removeprefix(f"{NAMESPACE}::")
    library.define(prefix + schema, tags=(torch.Tag.pt2_compliant_tag,))
    return getattr(operators, prefix + name).default


class Record:
    """What a call has of fields that its operator does not take, and what follows from its fields.

    y = activation(norm(x) (weight + weight_offset) + bias, modulated) output_scale.
    """

    residual: Tensor | None = None
    gate: Tensor | None = None
    shift: Tensor | None = None
    scale: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    dresidual: Tensor | None = None
    activation: str | None = None
    output_scale: float = 1.0
    out_dtype: torch.dtype | None = None
    statistic: Any = "layer"
    weight_offset: float = 0.0
    round_before_weight: bool = False
    keeps_order: bool = False
    input: Any
    normalized_ndim: Any
    eps: Any

    @property
    def is_rms(self) -> bool:
        """Whether the norm is RMSNorm, which has no mean."""
        return self.statistic == "rms"

    @property
    def is_modulated(self) -> bool:
        """Whether only the ada operators take this call."""
        return self.gate is not None or self.shift is not None or self.scale is not None

    @property
    def is_plain(self) -> bool:
        """Whether it is a norm alone, which PyTorch's function computes of tensors of one dtype."""
        return (
            self.residual is None
            and not self.is_modulated
            and self.activation is None
            and self.output_scale == 1.0
            and self.out_dtype is None
            and self.weight_offset == 0.0
            and not self.rounds_xhat
        )

    @property
    def rounds_xhat(self) -> bool:
        """Whether xhat is rounded to input's dtype, for the sake of a weight."""
        return self.round_before_weight and self.weight is not None

    @property
    def x_dtype(self) -> torch.dtype:
        """The dtype of what is normalized: the residual stream's, where there is one."""
        return self.input.dtype if self.residual is None else self.residual.dtype

    @property
    def y_dtype(self) -> torch.dtype:
        return self.out_dtype or self.input.dtype

    @property
    def normalized_shape(self) -> torch.Size:
        return self.input.shape[self.input.dim() - self.normalized_ndim :]


def fields_of(operator: torch._ops.OpOverload) -> list[str]:
    """The arguments of an operator by the names that a record has: layer_norm's number `scale` is
    output_scale there, because `scale` is that of a modulation."""
    return [
        "output_scale" if a.name == "scale" and isinstance(a.type, torch.FloatType) else a.name
        for a in operator._schema.arguments
    ]


@functools.cache
def call_of(operator: torch._ops.OpOverload) -> Any:
    """The class of an operator's calls: a named tuple of the arguments of its schema, and a Record.

    `differentiated` names the tensors whose gradients a backward operator gives, in the order of
    its results, and `wanted` those that a call asks for by its flags needs_d....
    """
    fields, arguments = fields_of(operator), operator._schema.arguments
    defaults = [a.default_value for a in arguments if a.has_default_value()]
    call: Any = namedtuple(operator._opname, fields, defaults=defaults)  # type: ignore[misc]
    members = {name: value for name, value in vars(Record).items() if name[:2] != "__"}
    names = tuple(name.removeprefix("needs_d") for name in fields if name.startswith("needs_d"))
    members["differentiated"] = names
    members["wanted"] = property(lambda self: [n for n in names if getattr(self, f"needs_d{n}")])
    # Not as a base class: Dynamo knows a named tuple by its bases.
    for name in members.keys() - {*fields}:
        setattr(call, name, members[name])
    return call
