# SPDX-License-Identifier: Apache-2.0
"""Bad input raises one clear sentence, the same on every device, for fakes and when compiled."""

import gc
import math
import shutil
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fused_layernorm
from fused_layernorm import (
    FusedLayerNorm,
    ada_layer_norm,
    add_ada_layer_norm,
    add_layer_norm,
    layer_norm,
)
from fused_layernorm.ops import arguments
from fused_layernorm.ops.operators import Arguments, Options

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64


@dataclass
class Bad:
    """A call and what it must raise. Tensors are given as (shape, dtype)."""

    name: str
    error: type[Exception]
    sentence: str
    input: Any = ((4, 8), F32)
    weight: Any = ((8,), F32)
    bias: Any = None
    residual: Any = None
    gate: Any = None
    shift: Any = None
    modulation_scale: Any = None
    options: dict = field(default_factory=dict)

    def __str__(self):
        return self.name


LAYER_NORM = [
    Bad(
        "integer input",
        NotImplementedError,
        "expected input of dtype float32, float16, bfloat16 or float64, got int32",
        input=((4, 8), torch.int32),
    ),
    Bad(
        "complex input",
        NotImplementedError,
        "expected input of dtype float32, float16, bfloat16 or float64, got complex64",
        input=((4, 8), torch.complex64),
    ),
    Bad(
        "float8 input",
        NotImplementedError,
        "expected input of dtype float32, float16, bfloat16 or float64, got float8_e4m3fn",
        input=((4, 8), torch.float8_e4m3fn),
    ),
    Bad(
        "integer weight",
        NotImplementedError,
        "expected weight of dtype float32, float16, bfloat16 or float64, got int64",
        weight=((8,), torch.int64),
    ),
    Bad(
        "weight of another shape",
        RuntimeError,
        "expected weight of shape [8], the last dimensions of input, got shape [3]",
        weight=((3,), F32),
    ),
    Bad(
        "weight of another rank",
        RuntimeError,
        "expected weight of shape [4, 8], the last dimensions of input, got shape [1, 8]",
        weight=((1, 8), F32),
    ),
    Bad(
        "bias of another shape",
        RuntimeError,
        "expected bias of shape [8], the last dimensions of input, got shape [4]",
        bias=((4,), F32),
    ),
    Bad(
        "bias of another shape, without weight",
        RuntimeError,
        "expected bias of shape [8], the last dimensions of input, got shape [4]",
        weight=None,
        bias=((4,), F32),
    ),
    Bad(
        "weight of more dimensions than input",
        RuntimeError,
        "expected input of at least the 3 dimensions of normalized_shape, [2, 4, 8], "
        "got input of shape [4, 8]",
        weight=((2, 4, 8), F32),
    ),
    Bad(
        "scalar weight",
        RuntimeError,
        "expected weight to have at least one dimension, got a scalar",
        weight=((), F32),
    ),
    Bad(
        "scalar input",
        RuntimeError,
        "expected input of at least the 1 dimensions of normalized_shape, [8], "
        "got input of shape []",
        input=((), F32),
    ),
    Bad(
        "normalized_shape longer than input",
        RuntimeError,
        "expected input whose last dimensions are normalized_shape [2, 4, 8], "
        "got input of shape [4, 8]",
        weight=None,
        options={"normalized_shape": (2, 4, 8)},
    ),
    Bad(
        "normalized_shape that is not input's",
        RuntimeError,
        "expected input whose last dimensions are normalized_shape [4], got input of shape [4, 8]",
        weight=None,
        options={"normalized_shape": (4,)},
    ),
    Bad(
        "no normalized_shape",
        ValueError,
        "expected normalized_shape, weight or bias, got none of them",
        weight=None,
    ),
    Bad(
        "normalized_shape that is not weight's",
        RuntimeError,
        "expected weight of shape normalized_shape [4, 8], got shape [8]",
        options={"normalized_shape": (4, 8)},
    ),
    Bad(
        "normalized_shape that is not bias's",
        RuntimeError,
        "expected bias of shape normalized_shape [8], got shape [4, 8]",
        bias=((4, 8), F32),
        options={"normalized_shape": (8,)},
    ),
    Bad(
        "empty normalized_shape",
        RuntimeError,
        "expected normalized_shape to have at least one dimension, got ()",
        weight=None,
        options={"normalized_shape": ()},
    ),
    Bad(
        "normalized_shape of floats",
        TypeError,
        "expected normalized_shape to hold ints, got an element of float",
        weight=None,
        options={"normalized_shape": (8.0,)},
    ),
    Bad(
        "normalized_shape that is no sequence",
        TypeError,
        "expected normalized_shape to be a sequence of ints, got float",
        weight=None,
        options={"normalized_shape": 8.0},
    ),
    Bad(
        "half weight beside a float32 input",
        RuntimeError,
        "expected weight of dtype float32 beside input of float32, got float16",
        weight=((8,), F16),
    ),
    Bad(
        "bfloat16 weight beside a float16 input",
        RuntimeError,
        "expected weight of dtype float16 or float32 beside input of float16, got bfloat16",
        input=((4, 8), F16),
        weight=((8,), BF16),
    ),
    Bad(
        "float64 weight beside a half input",
        RuntimeError,
        "expected weight of dtype bfloat16 or float32 beside input of bfloat16, got float64",
        input=((4, 8), BF16),
        weight=((8,), F64),
    ),
    Bad(
        "float64 weight beside a float32 input",
        RuntimeError,
        "expected weight of dtype float32 beside input of float32, got float64",
        weight=((8,), F64),
    ),
    Bad(
        "float32 bias beside a float64 input",
        RuntimeError,
        "expected bias of dtype float64 beside input of float64, got float32",
        input=((4, 8), F64),
        weight=None,
        bias=((8,), F32),
    ),
    Bad(
        "weight and bias of two dtypes",
        RuntimeError,
        "expected weight and bias of one dtype, got float32 and float16",
        input=((4, 8), F16),
        bias=((8,), F16),
    ),
    Bad(
        "eps that is NaN",
        ValueError,
        "expected eps to be a number, got nan",
        options={"eps": math.nan},
    ),
    Bad(
        "eps that is a string",
        TypeError,
        "expected eps to be a number, got str",
        options={"eps": "1e-5"},
    ),
    Bad(
        "eps that is None",
        TypeError,
        "expected eps to be a number, got NoneType",
        options={"eps": None},
    ),
    Bad(
        "unknown activation",
        ValueError,
        "expected activation None, 'gelu', 'gelu_tanh', 'silu' or 'relu', got 'tanh'",
        options={"activation": "tanh"},
    ),
    Bad(
        "infinite scale",
        ValueError,
        "expected scale to be a finite number, got inf",
        options={"scale": math.inf},
    ),
    Bad(
        "scale that is NaN",
        ValueError,
        "expected scale to be a finite number, got nan",
        options={"scale": math.nan},
    ),
    Bad(
        "scale that is a string",
        TypeError,
        "expected scale to be a number, got str",
        options={"scale": "2"},
    ),
    Bad(
        "integer out_dtype",
        ValueError,
        "expected out_dtype float32, float16, bfloat16 or float64, got int32",
        options={"out_dtype": torch.int32},
    ),
]

ADD = [
    Bad(
        "residual of another shape",
        RuntimeError,
        "expected residual of the shape of input, [4, 8], got shape [1, 8]",
        residual=((1, 8), F32),
    ),
    Bad(
        "integer residual",
        NotImplementedError,
        "expected residual of dtype float32, float16, bfloat16 or float64, got int32",
        residual=((4, 8), torch.int32),
    ),
    Bad(
        "float64 weight beside a float32 residual",
        RuntimeError,
        "expected weight of dtype bfloat16 or float32 beside input and residual of bfloat16 and "
        "float32, got float64",
        input=((4, 8), BF16),
        residual=((4, 8), F32),
        weight=((8,), F64),
    ),
    Bad(
        "weight of another half dtype",
        RuntimeError,
        "expected weight of dtype bfloat16 or float32 beside input and residual of bfloat16 and "
        "bfloat16, got float16",
        input=((4, 8), BF16),
        residual=((4, 8), BF16),
        weight=((8,), F16),
    ),
    Bad(
        "unknown activation with residual",
        ValueError,
        "expected activation None, 'gelu', 'gelu_tanh', 'silu' or 'relu', got 'GELU'",
        residual=((4, 8), F32),
        options={"activation": "GELU"},
    ),
    Bad(
        "infinite scale with residual",
        ValueError,
        "expected scale to be a finite number, got -inf",
        residual=((4, 8), F32),
        options={"scale": -math.inf},
    ),
]

ADA = [
    Bad(
        "shift that does not broadcast",
        RuntimeError,
        "expected shift that broadcasts to the shape of input, [4, 8], got shape [3, 8]",
        shift=((3, 8), F32),
    ),
    Bad(
        "scale that would enlarge a size of one",
        RuntimeError,
        "expected scale that broadcasts to the shape of input, [1, 8], got shape [4, 8]",
        input=((1, 8), F32),
        modulation_scale=((4, 8), F32),
    ),
    Bad(
        "scale of more dimensions than input",
        RuntimeError,
        "expected scale that broadcasts to the shape of input, [4, 8], got shape [1, 4, 8]",
        modulation_scale=((1, 4, 8), F32),
    ),
    Bad(
        "shift with an empty dimension",
        RuntimeError,
        "expected shift that broadcasts to the shape of input, [4, 8], got shape [4, 0]",
        shift=((4, 0), F32),
    ),
    Bad(
        "integer scale",
        NotImplementedError,
        "expected scale of dtype float32, float16, bfloat16 or float64, got int64",
        modulation_scale=((8,), torch.int64),
    ),
    Bad(
        "half shift beside a float32 input",
        RuntimeError,
        "expected shift of dtype float32 beside input of float32, got bfloat16",
        shift=((8,), BF16),
    ),
    Bad(
        "scale of the other half dtype",
        RuntimeError,
        "expected scale of dtype float16 or float32 beside input of float16, got bfloat16",
        input=((4, 8), F16),
        modulation_scale=((8,), BF16),
    ),
    Bad(
        "float64 shift beside a half input",
        RuntimeError,
        "expected shift of dtype bfloat16 or float32 beside input of bfloat16, got float64",
        input=((4, 8), BF16),
        shift=((8,), F64),
    ),
    Bad(
        "weight of another shape beside a modulation",
        RuntimeError,
        "expected weight of shape [8], the last dimensions of input, got shape [3]",
        weight=((3,), F32),
        shift=((8,), F32),
    ),
    Bad(
        "weight and bias of two dtypes beside a modulation",
        RuntimeError,
        "expected weight and bias of one dtype, got float32 and float16",
        input=((4, 8), F16),
        bias=((8,), F16),
        shift=((8,), F16),
    ),
    Bad(
        "scalar input beside a modulation",
        RuntimeError,
        "expected input of at least the 1 dimensions of normalized_shape, got input of shape []",
        input=((), F32),
        weight=None,
        shift=((), F32),
    ),
    Bad(
        "normalized_shape that is not input's beside a modulation",
        RuntimeError,
        "expected input whose last dimensions are normalized_shape [4], got input of shape [4, 8]",
        weight=None,
        shift=((8,), F32),
        options={"normalized_shape": (4,)},
    ),
    Bad(
        "eps that is NaN beside a modulation",
        ValueError,
        "expected eps to be a number, got nan",
        shift=((8,), F32),
        options={"eps": math.nan},
    ),
    Bad(
        "eps that is a string beside a modulation",
        TypeError,
        "expected eps to be a number, got str",
        shift=((8,), F32),
        options={"eps": "1e-5"},
    ),
    Bad(
        "integer out_dtype beside a modulation",
        ValueError,
        "expected out_dtype float32, float16, bfloat16 or float64, got int32",
        shift=((8,), F32),
        options={"out_dtype": torch.int32},
    ),
    Bad(
        "gate that does not broadcast",
        RuntimeError,
        "expected gate that broadcasts to the shape of input, [4, 8], got shape [2, 8]",
        residual=((4, 8), F32),
        gate=((2, 8), F32),
    ),
    Bad(
        "gate of another dtype",
        RuntimeError,
        "expected gate of dtype bfloat16 or float32 beside input and residual of bfloat16 and "
        "float32, got float16",
        input=((4, 8), BF16),
        residual=((4, 8), F32),
        gate=((8,), F16),
    ),
    Bad(
        "residual of another shape beside a gate",
        RuntimeError,
        "expected residual of the shape of input, [4, 8], got shape [1, 8]",
        residual=((1, 8), F32),
        gate=((8,), F32),
    ),
    Bad(
        "gate without a residual",
        TypeError,
        "expected residual to be a tensor, got NoneType",
        gate=((8,), F32),
    ),
]

CASES = LAYER_NORM + ADD + ADA


def make(spec, device, requires_grad=False):
    if spec is None:
        return None
    shape, dtype = spec
    tensor = torch.ones(shape, device=device).to(dtype)
    return tensor.requires_grad_(requires_grad and dtype.is_floating_point)


def call(bad, input, weight, bias, residual, gate, shift, scale):
    options = dict(bad.options)
    if gate is not None:
        return add_ada_layer_norm(input, residual, gate, shift, scale, weight, bias, **options)
    if shift is not None or scale is not None:
        return ada_layer_norm(input, shift, scale, weight, bias, **options)
    if residual is None:
        return layer_norm(input, weight, bias, **options)
    return add_layer_norm(input, residual, weight, bias, **options)


def tensors(bad, device, requires_grad=False):
    return [
        make(spec, device, requires_grad)
        for spec in (
            bad.input,
            bad.weight,
            bad.bias,
            bad.residual,
            bad.gate,
            bad.shift,
            bad.modulation_scale,
        )
    ]


@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("bad", CASES, ids=str)
def test_sentence(device, bad, requires_grad):
    with pytest.raises(bad.error) as caught:
        call(bad, *tensors(bad, device, requires_grad))
    assert str(caught.value) == bad.sentence
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize("bad", CASES, ids=str)
def test_sentence_for_meta_tensors(bad):
    with pytest.raises(bad.error) as caught:
        call(bad, *tensors(bad, "meta"))
    assert str(caught.value) == bad.sentence


@pytest.mark.parametrize("bad", CASES, ids=str)
def test_sentence_under_compile(bad):
    torch._dynamo.reset()
    args = tensors(bad, "cpu")

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(*args):
        return call(bad, *args)

    with pytest.raises((bad.error, RuntimeError)) as caught:
        compiled(*args)
    assert bad.sentence in str(caught.value) or bad.sentence.replace("'", "\\'") in str(
        caught.value
    )


@pytest.mark.parametrize("bad", LAYER_NORM, ids=str)
def test_types_are_those_of_pytorch(bad):
    """One except clause catches our error and, if F.layer_norm refuses the input too, its error."""
    input, weight, bias, *_ = tensors(bad, "cpu")
    shape = bad.options.get("normalized_shape")
    if shape is None:
        parameter = bias if weight is None else weight
        if parameter is None or set(bad.options) & {"activation", "scale", "out_dtype"}:
            pytest.skip("F.layer_norm has no such argument")
        shape = parameter.shape
    stock = None
    try:
        F.layer_norm(input, shape, weight, bias, bad.options.get("eps", 1e-5))
    except Exception as error:
        stock = error
    if stock is not None:
        assert issubclass(bad.error, (type(stock), RuntimeError))
        assert issubclass(bad.error, TypeError) == isinstance(stock, TypeError)


@pytest.mark.parametrize("what", ["input", "weight", "bias", "residual"])
@pytest.mark.parametrize("value", [[1.0, 2.0], 3.0, "x"], ids=repr)
def test_what_is_no_tensor(device, what, value):
    args: dict[str, Any] = {
        "input": torch.ones(4, 2, device=device),
        "weight": torch.ones(2, device=device),
        "bias": torch.ones(2, device=device),
    }
    function: Callable[..., Any] = layer_norm
    if what == "residual":
        function = add_layer_norm
    args[what] = value
    with pytest.raises(TypeError) as caught:
        function(**args)
    assert str(caught.value) == f"expected {what} to be a tensor, got {type(value).__name__}"


@pytest.mark.parametrize("what", ["input", "residual", "gate", "shift", "scale", "weight", "bias"])
@pytest.mark.parametrize("value", [[1.0, 2.0], 3.0, "x"], ids=repr)
def test_what_is_no_tensor_beside_a_modulation(device, what, value):
    args: dict[str, Any] = {
        **{name: torch.ones(4, 2, device=device) for name in ("input", "residual")},
        **{name: torch.ones(2, device=device) for name in ("gate", "shift", "scale", "weight")},
        "bias": torch.ones(2, device=device),
    }
    args[what] = value
    with pytest.raises(TypeError) as caught:
        add_ada_layer_norm(**args)
    assert str(caught.value) == f"expected {what} to be a tensor, got {type(value).__name__}"


@pytest.mark.parametrize("name", ["residual", "gate", "shift", "scale", "weight", "bias"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_another_device_beside_a_modulation(device, name, requires_grad):
    args: dict[str, Any] = {
        other: torch.ones(4, 8, device=device, requires_grad=requires_grad)
        for other in ("input", "residual", "gate", "shift")
    }
    args[name] = torch.ones((4, 8) if name == "residual" else (8,), device="meta")
    with pytest.raises(RuntimeError) as caught:
        add_ada_layer_norm(**args)
    assert str(caught.value) == (
        f"expected {name} on the device of input, {args['input'].device}, got meta"
    )


@pytest.mark.parametrize("options", [{}, {"activation": "gelu"}], ids=str)
@pytest.mark.parametrize(
    ("wrong", "error", "sentence"),
    [
        ({"residual": None}, TypeError, "expected residual to be a tensor, got NoneType"),
        ({"gate": 1.0}, TypeError, "expected gate to be a tensor, got float"),
        (
            {"gate": torch.ones(3, 8)},
            RuntimeError,
            "expected gate that broadcasts to the shape of input, [4, 8], got shape [3, 8]",
        ),
        (
            {"gate": torch.ones(8).half()},
            RuntimeError,
            "expected gate of dtype float32 beside input and residual of float32 and float32, "
            "got float16",
        ),
        (
            {"weight": None},
            ValueError,
            "expected normalized_shape, weight or bias, got none of them",
        ),
        (
            {"weight": torch.ones(3)},
            RuntimeError,
            "expected weight of shape [8], the last dimensions of input, got shape [3]",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_gate_of_add_layer_norm(device, wrong, error, sentence, options):
    args: dict[str, Any] = {
        "input": torch.ones(4, 8),
        "residual": torch.ones(4, 8),
        "weight": torch.ones(8),
        "gate": torch.ones(8),
        **wrong,
    }
    args = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    with pytest.raises(error) as caught:
        add_layer_norm(**args, **options)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("name", ["weight", "bias", "residual"])
def test_another_device(device, name):
    args: dict[str, Any] = {
        "input": torch.ones(4, 8, device=device),
        name: torch.ones(8, device="meta"),
    }
    function: Callable[..., Any] = layer_norm
    if name == "residual":
        args["residual"] = torch.ones(4, 8, device="meta")
        args["weight"] = torch.ones(8, device=device)
        function = add_layer_norm
    with pytest.raises(RuntimeError) as caught:
        function(**args)
    assert str(caught.value) == (
        f"expected {name} on the device of input, {args['input'].device}, got meta"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cpu", "cuda")], ids="-".join)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_weight_on_the_other_device(devices, requires_grad):
    x = torch.ones(4, 8, device=devices[0])
    weight = torch.ones(8, device=devices[1], requires_grad=requires_grad)
    with pytest.raises(RuntimeError) as caught:
        layer_norm(x, weight)
    assert str(caught.value) == (
        f"expected weight on the device of input, {x.device}, got {weight.device}"
    )


def _sparse(device):
    return torch.eye(8, device=device).to_sparse(), "layout sparse_coo"


def _csr(device):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.eye(8, device=device).to_sparse_csr(), "layout sparse_csr"


def _nested(device):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor(
            [torch.ones(2, 8, device=device), torch.ones(3, 8, device=device)]
        ), "a nested tensor"


def _jagged(device):
    return torch.nested.nested_tensor(
        [torch.ones(2, 8, device=device), torch.ones(3, 8, device=device)], layout=torch.jagged
    ), "a nested tensor"


def _quantized(device):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.ones(8, 8, device=device)
        return torch.quantize_per_tensor(x, 0.1, 0, torch.quint8), "a quantized tensor"


LAYOUTS = [_sparse, _csr, _nested, _jagged, _quantized]


@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("kind", LAYOUTS, ids=lambda f: f.__name__[1:])
def test_layouts(device, kind, requires_grad):
    x, got = kind(device)
    weight = torch.ones(8, device=device, requires_grad=requires_grad)
    for function in (layer_norm, lambda x, w: add_layer_norm(x, x, w)):
        with pytest.raises(NotImplementedError) as caught:
            function(x, weight)
        assert str(caught.value) == f"expected input to be a dense tensor, got {got}"


def test_sparse_weight(device):
    x = torch.ones(4, 8, device=device)
    with pytest.raises(NotImplementedError) as caught:
        layer_norm(x, torch.ones(8, device=device).to_sparse())
    assert str(caught.value) == "expected weight to be a dense tensor, got layout sparse_coo"


@pytest.mark.parametrize("name", ["gate", "shift", "scale"])
@pytest.mark.parametrize("kind", LAYOUTS, ids=lambda f: f.__name__[1:])
def test_layouts_of_modulations(device, kind, name):
    modulation, got = kind(device)
    x = torch.ones(8, 8, device=device)
    modulations = {name: modulation}
    with pytest.raises(NotImplementedError) as caught:
        add_ada_layer_norm(x, x, **modulations)
    assert str(caught.value) == f"expected {name} to be a dense tensor, got {got}"


@pytest.mark.parametrize(
    ("shape", "ndim", "sentence"),
    [
        ((2**31, 1), 1, "expected at most 2147483647 rows, got 2147483648"),
        ((2**16, 2**16, 4), 1, "expected at most 2147483647 rows, got 4294967296"),
        ((1, 2**31), 1, "expected at most 2147483647 columns, got 2147483648"),
        ((2, 2**16, 2**16), 2, "expected at most 2147483647 columns, got 4294967296"),
    ],
)
def test_more_rows_or_columns_than_the_kernels_index(shape, ndim, sentence):
    x = torch.empty(shape, device="meta")
    a = Arguments(x, None, None, None, Options(ndim, 1e-5))
    arguments.check(a)  # the limit is that of our kernels, which do not run here
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(shape, device="cuda")
        with pytest.raises(RuntimeError) as caught:
            layer_norm(x, normalized_shape=shape[-ndim:])
    assert str(caught.value) == sentence


@pytest.mark.gpu
@pytest.mark.slow
def test_more_rows_or_columns_than_the_kernels_index_on_cuda():
    free, _ = torch.cuda.mem_get_info()
    if free < 8 * 2**30:
        pytest.skip("needs 8 GiB of GPU memory")
    x = torch.empty(2**31, 1, device="cuda", dtype=F16)
    with pytest.raises(RuntimeError, match="expected at most 2147483647 rows, got 2147483648"):
        layer_norm(x, normalized_shape=(1,))
    with pytest.raises(RuntimeError, match="expected at most 2147483647 columns, got 2147483648"):
        layer_norm(x.T, normalized_shape=(2**31,))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"activation": "tanh"}, ValueError),
        ({"scale": math.nan}, ValueError),
        ({"scale": None}, TypeError),
        ({"out_dtype": torch.int8}, ValueError),
    ],
)
def test_modules_refuse_when_they_are_made(options, error):
    with pytest.raises(error, match="expected"):
        FusedLayerNorm(8, **options)


def test_operators_refuse_with_the_same_sentences():
    op = torch.ops.fused_layernorm.layer_norm
    x = torch.ones(4, 8)
    with pytest.raises(RuntimeError, match="expected at least one dimension to normalize over"):
        op(x, 0, None, None, 1e-5)
    with pytest.raises(RuntimeError, match="expected input of at least the 3 dimensions"):
        op(x, 3, None, None, 1e-5)


@pytest.mark.cpu_operators
def test_an_error_that_is_not_the_arguments_stays(device, monkeypatch):
    """An operator's own failure, such as a lack of memory, is raised unchanged."""
    failure = torch.OutOfMemoryError("no memory")

    def fail(*args):
        raise failure

    monkeypatch.setattr(fused_layernorm.functional, "_layer_norm", fail)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        layer_norm(torch.ones(4, 8, device=device), normalized_shape=(8,))
    assert caught.value is failure


NO_MEMORY = (
    "CUDA out of memory: fused_layernorm could not allocate 1.0 MiB on cuda:0, "
    "where 0.5 MiB are free"
)


@pytest.mark.cpu_operators
@pytest.mark.parametrize("add", [False, True])
def test_a_failed_allocation_is_out_of_memory(device, monkeypatch, add):
    """C++ under the stable ABI can only raise a RuntimeError, which becomes an OutOfMemoryError."""

    def fail(*args):
        raise RuntimeError(NO_MEMORY)

    for name in ("_layer_norm", "_add_layer_norm"):
        monkeypatch.setattr(fused_layernorm.functional, name, fail)
    x = torch.ones(4, 8, device=device)
    function, rows = (add_layer_norm, (x, x)) if add else (layer_norm, (x,))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        function(*rows, normalized_shape=(8,))
    assert str(caught.value) == NO_MEMORY


@pytest.fixture
def failing_backward():
    """A function of an exception and a device, which makes layer_norm_backward raise it there."""
    library = torch.library.Library("fused_layernorm", "IMPL")

    def install(failure, device):
        def fail(*args):
            raise failure

        library.impl("layer_norm_backward", fail, device.upper())

    yield install
    library._destroy()


@pytest.mark.cpu_operators
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_failed_allocation_in_backward_is_out_of_memory(
    device, failing_backward, add, create_graph
):
    failing_backward(RuntimeError(NO_MEMORY), device)
    x = torch.ones(4, 8, device=device, requires_grad=True)
    out = add_layer_norm(x, x, normalized_shape=8)[0] if add else layer_norm(x, normalized_shape=8)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.autograd.grad(out.sum(), x, create_graph=create_graph)
    assert str(caught.value) == NO_MEMORY


@pytest.mark.cpu_operators
def test_an_error_in_backward_that_is_no_allocation_stays(device, failing_backward):
    failure = RuntimeError("another failure")
    failing_backward(failure, device)
    x = torch.ones(4, 8, device=device, requires_grad=True)
    y = layer_norm(x, normalized_shape=8).sum()
    with pytest.raises(RuntimeError) as caught:
        y.backward()
    assert caught.value is failure


@pytest.fixture
def one_gibibyte_left():
    """A function that limits further allocations to 1 GiB, called when a test has its tensors."""

    def limit():
        gc.collect()  # tensors of earlier tests must not be freed after the limit is set
        torch.cuda.empty_cache()
        in_use, total = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction((in_use + (1 << 30)) / total)

    torch.cuda.empty_cache()  # the rest of a large cached block could be used beyond the limit
    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("grad", [False, True])
def test_out_of_memory_on_cuda(one_gibibyte_left, grad):
    x = torch.empty(1 << 28, 8, device="cuda", requires_grad=grad)  # 8 GiB
    one_gibibyte_left()
    with pytest.raises(torch.OutOfMemoryError, match="could not allocate"):
        layer_norm(x, normalized_shape=(8,))


@pytest.mark.gpu
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("function", [layer_norm, add_layer_norm])
def test_out_of_memory_in_backward_on_cuda(one_gibibyte_left, function, create_graph):
    x = torch.empty(1 << 26, 8, device="cuda", requires_grad=True)  # 2 GiB
    rows = (x,) if function is layer_norm else (x, x.detach())
    y = function(*rows, normalized_shape=(8,))
    y = y if function is layer_norm else y[0]
    one_gibibyte_left()
    with pytest.raises(torch.OutOfMemoryError, match="could not allocate"):
        torch.autograd.grad(y, x, y.detach(), create_graph=create_graph)


def run_python(source):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, check=False
    )


def test_old_torch_is_named():
    result = run_python(
        f"""
        import sys
        sys.path[:0] = {sys.path!r}
        import torch
        torch.__version__ = "2.9.1+cpu"
        import fused_layernorm
        """
    )
    assert "ImportError: fused_layernorm needs torch >= 2.10; this is 2.9.1+cpu" in result.stderr


def test_old_python_is_named():
    result = run_python(
        f"""
        import sys
        sys.path[:0] = {sys.path!r}
        sys.version_info, sys.version = (3, 9, 1), "3.9.1 (default)"
        import fused_layernorm
        """
    )
    assert "ImportError: fused_layernorm needs Python >= 3.10; this is 3.9.1" in result.stderr


def test_missing_binary_is_named(tmp_path):
    package = Path(fused_layernorm.__file__).parent
    without = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(package, tmp_path / package.name, ignore=without)
    result = run_python(
        f"""
        import sys
        sys.path[:0] = {[str(tmp_path), *sys.path]!r}
        import fused_layernorm
        """
    )
    assert "ImportError: fused_layernorm's binary does not load" in result.stderr
    assert "Install the package" in result.stderr
