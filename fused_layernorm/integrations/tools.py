# SPDX-License-Identifier: Apache-2.0
"""What tools are told of the operators and modules, once a program imports them.

torch.onnx.export(..., dynamo=False) gets a translation of each forward operator. fvcore, ptflops
and thop count what they count of nn.LayerNorm, and eager static quantization makes of LayerNorm and
GroupNorm what it makes of PyTorch's.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from ..groups import FusedGroupNorm
from ..modules import FusedLayerNorm, is_bare
from ..ops import formulas
from ..ops.load import NAMESPACE
from ..ops.operators import FORWARD, LAYER_NORM
from .after_import import after_import

# ---- The TorchScript exporter.


class _Traced:
    """A value of an ONNX graph with what formulas.forward does to a tensor."""

    def __init__(self, g: Any, value: Any, dtype: torch.dtype) -> None:
        self.g, self.value, self.dtype = g, value, dtype

    def _op(self, name: str, *others: Any) -> _Traced:
        """An elementwise operator; a number beside a tensor is one of its dtype."""
        dtypes = [other.dtype for other in others if isinstance(other, _Traced)]
        dtype = functools.reduce(torch.promote_types, dtypes, self.dtype)
        wide = [
            other.to(dtype).value
            if isinstance(other, _Traced)
            else self.g.op("Constant", value_t=torch.tensor(other, dtype=dtype))
            for other in (self, *others)
        ]
        return _Traced(self.g, self.g.op(name, *wide), dtype)

    def __add__(self, other: Any) -> _Traced:
        return self._op("Add", other)

    def __sub__(self, other: Any) -> _Traced:
        return self._op("Sub", other)

    def __mul__(self, other: Any) -> _Traced:
        return self._op("Mul", other)

    __radd__, __rmul__ = __add__, __mul__

    def square(self) -> _Traced:
        return self * self

    def rsqrt(self) -> _Traced:
        return self._op("Sqrt")._op("Reciprocal")

    def to(self, dtype: torch.dtype) -> _Traced:
        if dtype == self.dtype:
            return self
        code = getattr(torch.onnx.TensorProtoDataType, _ONNX_NAMES[dtype])
        return _Traced(self.g, self.g.op("Cast", self.value, to_i=int(code)), dtype)

    def mean(self, dim: Sequence[int], keepdim: bool) -> _Traced:
        if self.g.opset < 18:
            value = self.g.op("ReduceMean", self.value, axes_i=dim, keepdims_i=int(keepdim))
        else:
            axes = self.g.op("Constant", value_t=torch.tensor(dim))
            value = self.g.op("ReduceMean", self.value, axes, keepdims_i=int(keepdim))
        return _Traced(self.g, value, self.dtype)

    def contiguous(self) -> _Traced:
        return self

    def new_empty(self, shape: Sequence[int]) -> None:
        """RMSNorm's mean, which no operator that is translated gives."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _FUNCTIONS[func.__name__](*args, **(kwargs or {}))


def _gelu(z: _Traced, approximate: str = "none") -> _Traced:
    if approximate == "tanh":
        inner = (z + z * z * z * 0.044715) * (2 / torch.pi) ** 0.5
        return z * 0.5 * (inner._op("Tanh") + 1)
    return z * 0.5 * ((z * 2**-0.5)._op("Erf") + 1)


_FUNCTIONS: dict[str, Callable[..., _Traced]] = {
    "addcmul": lambda x, y, z: x + y * z,
    "gelu": _gelu,
    "silu": lambda z: z * z._op("Sigmoid"),
    "relu": lambda z: z._op("Relu"),
}
_ONNX_NAMES = {
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
}


def _register_symbolics() -> None:
    module = importlib.import_module("torch.onnx._internal.torchscript_exporter")
    helper, types = module.symbolic_helper, module._type_utils

    def argument(g: Any, value: Any, kind: str) -> Any:
        if value.node().mustBeNone():
            return None
        if "Tensor" in kind:
            return _Traced(g, value, types.JitScalarType.from_value(value).dtype())
        if "ScalarType" in kind:
            return types.JitScalarType(helper._parse_arg(value, "i")).dtype()
        return helper._parse_arg(value, kind.removeprefix("Optional[")[0])

    def symbolic(overload: OpOverload, forward: Callable[..., Any]) -> Callable[..., Any]:
        kinds = [str(a.real_type) for a in overload._schema.arguments]

        def translate(g: Any, *values: Any) -> Any:
            y = forward(*(argument(g, *each) for each in zip(values, kinds, strict=True)))
            return tuple(each.value for each in y) if isinstance(y, tuple) else y.value

        return translate

    onnx: Any = torch.onnx
    for operator in FORWARD:
        if not operator.gives_statistics:
            translate = symbolic(operator.overload, operator.implemented_by(formulas.forward))
            onnx.register_custom_op_symbolic(f"{NAMESPACE}::{operator.name}", translate, 9)


# ---- Counters.


def _register_with_fvcore() -> None:
    module: Any = importlib.import_module("fvcore.nn.flop_count")
    of_layer_norm = module._DEFAULT_SUPPORTED_OPS["aten::layer_norm"]

    def count(inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        is_rms = len(inputs) > 8 and inputs[8].toIValue() == "rms"
        return 0 if is_rms else of_layer_norm(inputs, outputs)  # fvcore does not count F.rms_norm

    module._DEFAULT_SUPPORTED_OPS[f"{NAMESPACE}::{LAYER_NORM.name}"] = count


def _register_by_type(module: str, name: str) -> None:
    """With a tool that looks modules up by their exact class, in a table of this name."""
    table: Any = getattr(importlib.import_module(module), name)
    table[FusedLayerNorm] = table[torch.nn.LayerNorm]


# ---- Eager static quantization.


class _Quantized:
    """What torch.ao.quantization finds for a class: from_float makes the quantized module."""

    def __init__(self, of_pytorch: Any) -> None:
        self.of_pytorch = of_pytorch

    def from_float(self, module: Any) -> Any:
        return self.of_pytorch.from_float(module) if is_bare(module) else module


_QUANTIZATION = "torch.ao.quantization.quantization_mappings"


def _register_with_quantization() -> None:
    table = importlib.import_module(_QUANTIZATION).DEFAULT_STATIC_QUANT_MODULE_MAPPINGS
    for fused, of_pytorch in (
        (FusedLayerNorm, torch.nn.LayerNorm),
        (FusedGroupNorm, torch.nn.GroupNorm),
    ):
        table[fused] = _Quantized(table[of_pytorch])


def _tell(module: str, register: Callable[[], None]) -> None:
    after_import(module, register, f"{module} is not told of fused_layernorm")


_tell("torch.onnx", _register_symbolics)
_tell("fvcore.nn.flop_count", _register_with_fvcore)
_tell(_QUANTIZATION, _register_with_quantization)
for _tool, _table in (
    ("ptflops.pytorch_ops", "MODULES_MAPPING"),
    ("thop.profile", "register_hooks"),
):
    _tell(_tool, functools.partial(_register_by_type, _tool, _table))
