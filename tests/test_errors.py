# SPDX-License-Identifier: Apache-2.0
"""Bad input raises one clear sentence, the same on every device, for fakes and when compiled."""

import math
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
    calls,
    layer_norm,
)
from fused_layernorm.compile import rules
from fused_layernorm.ops import arguments
from fused_layernorm.ops.operators import describe

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64


FLOATS = "float32, float16, bfloat16 or float64"


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
    Bad("integer input", NotImplementedError, input=((4, 8), torch.int32),
        sentence=f"expected input of dtype {FLOATS}, got int32"),
    Bad("float8 input", NotImplementedError, input=((4, 8), torch.float8_e4m3fn),
        sentence=f"expected input of dtype {FLOATS}, got float8_e4m3fn"),
    Bad("integer weight", NotImplementedError, weight=((8,), torch.int64),
        sentence=f"expected weight of dtype {FLOATS}, got int64"),
    Bad("weight of another shape", RuntimeError, weight=((3,), F32),
        sentence="expected weight of shape [8], the last dimensions of input, got shape [3]"),
    Bad("weight of another rank", RuntimeError, weight=((1, 8), F32),
        sentence="expected weight of shape [4, 8], the last dimensions of input, got shape [1, 8]"),
    Bad("bias of another shape", RuntimeError, bias=((4,), F32),
        sentence="expected bias of shape [8], the last dimensions of input, got shape [4]"),
    Bad("weight of more dimensions than input", RuntimeError, weight=((2, 4, 8), F32),
        sentence="expected input of at least the 3 dimensions of normalized_shape, [2, 4, 8], "
        "got input of shape [4, 8]"),
    Bad("scalar weight", RuntimeError, weight=((), F32),
        sentence="expected weight to have at least one dimension, got a scalar"),
    Bad("scalar input", RuntimeError, input=((), F32),
        sentence="expected input of at least the 1 dimensions of normalized_shape, [8], got "
        "input of shape []"),
    Bad("normalized_shape longer than input", RuntimeError,
        weight=None, options={"normalized_shape": (2, 4, 8)},
        sentence="expected input of at least the 3 dimensions of normalized_shape, got input of "
        "shape [4, 8]"),
    Bad("normalized_shape that is not input's", RuntimeError,
        weight=None, options={"normalized_shape": (4,)},
        sentence="expected input whose last dimensions are normalized_shape [4], got input of "
        "shape [4, 8]"),
    Bad("no normalized_shape", ValueError, weight=None,
        sentence="expected normalized_shape, weight or bias, got none of them"),
    Bad("normalized_shape that is not weight's", RuntimeError, options={"normalized_shape": (4, 8)},
        sentence="expected weight of shape [4, 8], the last dimensions of input, got shape [8]"),
    Bad("normalized_shape that is not bias's", RuntimeError,
        bias=((4, 8), F32), options={"normalized_shape": (8,)},
        sentence="expected bias of shape [8], the last dimensions of input, got shape [4, 8]"),
    Bad("empty normalized_shape", RuntimeError, weight=None, options={"normalized_shape": ()},
        sentence="expected normalized_shape to have at least one dimension, got ()"),
    Bad("normalized_shape of floats", TypeError, weight=None, options={"normalized_shape": (8.0,)},
        sentence="expected normalized_shape to hold ints, got an element of float"),
    Bad("normalized_shape that is no sequence", TypeError,
        weight=None, options={"normalized_shape": 8.0},
        sentence="expected normalized_shape to be a sequence of ints, got float"),
    Bad("half weight beside a float32 input", RuntimeError, weight=((8,), F16),
        sentence="expected weight of dtype float32 beside input of float32, got float16"),
    Bad("bfloat16 weight beside a float16 input", RuntimeError,
        input=((4, 8), F16), weight=((8,), BF16),
        sentence="expected weight of dtype float16 or float32 beside input of float16, got "
        "bfloat16"),
    Bad("float64 weight beside a half input", RuntimeError,
        input=((4, 8), BF16), weight=((8,), F64),
        sentence="expected weight of dtype bfloat16 or float32 beside input of bfloat16, got "
        "float64"),
    Bad("float32 bias beside a float64 input", RuntimeError,
        input=((4, 8), F64), weight=None, bias=((8,), F32),
        sentence="expected bias of dtype float64 beside input of float64, got float32"),
    Bad("weight and bias of two dtypes", RuntimeError, input=((4, 8), F16), bias=((8,), F16),
        sentence="expected weight and bias of one dtype, got float32 and float16"),
    Bad("eps that is NaN", ValueError, options={"eps": math.nan},
        sentence="expected eps to be a number, got nan"),
    Bad("eps that is a string", TypeError, options={"eps": "1e-5"},
        sentence="expected eps to be a number, got str"),
    Bad("eps that is None", TypeError, options={"eps": None},
        sentence="expected eps to be a number, got NoneType"),
    Bad("unknown activation", ValueError, options={"activation": "tanh"},
        sentence="expected activation None, 'gelu', 'gelu_tanh', 'silu' or 'relu', got 'tanh'"),
    Bad("scale that is NaN", ValueError, options={"scale": math.nan},
        sentence="expected scale to be a finite number, got nan"),
    Bad("scale that is a string", TypeError, options={"scale": "2"},
        sentence="expected scale to be a number, got str"),
    Bad("integer out_dtype", ValueError, options={"out_dtype": torch.int32},
        sentence=f"expected out_dtype {FLOATS}, got int32"),
]  # fmt: skip

ADD = [
    Bad("residual of another shape", RuntimeError, residual=((1, 8), F32),
        sentence="expected residual of the shape of input, [4, 8], got shape [1, 8]"),
    Bad("integer residual", NotImplementedError, residual=((4, 8), torch.int32),
        sentence=f"expected residual of dtype {FLOATS}, got int32"),
    Bad("float64 weight beside a float32 residual", RuntimeError,
        input=((4, 8), BF16), residual=((4, 8), F32), weight=((8,), F64),
        sentence="expected weight of dtype bfloat16 or float32 beside input and residual of "
        "bfloat16 and float32, got float64"),
]  # fmt: skip

ADA = [
    Bad("shift that does not broadcast", RuntimeError, shift=((3, 8), F32),
        sentence="expected shift that broadcasts to the shape of input, [4, 8], got shape [3, 8]"),
    Bad("scale that would enlarge a size of one", RuntimeError,
        input=((1, 8), F32), modulation_scale=((4, 8), F32),
        sentence="expected scale that broadcasts to the shape of input, [1, 8], got shape [4, 8]"),
    Bad("scale of more dimensions than input", RuntimeError, modulation_scale=((1, 4, 8), F32),
        sentence="expected scale that broadcasts to the shape of input, [4, 8], got shape [1, "
        "4, 8]"),
    Bad("shift with an empty dimension", RuntimeError, shift=((4, 0), F32),
        sentence="expected shift that broadcasts to the shape of input, [4, 8], got shape [4, 0]"),
    Bad("integer scale", NotImplementedError, modulation_scale=((8,), torch.int64),
        sentence=f"expected scale of dtype {FLOATS}, got int64"),
    Bad("half shift beside a float32 input", RuntimeError, shift=((8,), BF16),
        sentence="expected shift of dtype float32 beside input of float32, got bfloat16"),
    Bad("scale of the other half dtype", RuntimeError,
        input=((4, 8), F16), modulation_scale=((8,), BF16),
        sentence="expected scale of dtype float16 or float32 beside input of float16, got "
        "bfloat16"),
    Bad("scalar input beside a modulation", RuntimeError,
        input=((), F32), weight=None, shift=((), F32),
        sentence="expected input of at least the 1 dimensions of normalized_shape, got input of "
        "shape []"),
    Bad("gate that does not broadcast", RuntimeError, residual=((4, 8), F32), gate=((2, 8), F32),
        sentence="expected gate that broadcasts to the shape of input, [4, 8], got shape [2, 8]"),
    Bad("gate of another dtype", RuntimeError,
        input=((4, 8), BF16), residual=((4, 8), F32), gate=((8,), F16),
        sentence="expected gate of dtype bfloat16 or float32 beside input and residual of "
        "bfloat16 and float32, got float16"),
    Bad("residual of another shape beside a gate", RuntimeError,
        residual=((1, 8), F32), gate=((8,), F32),
        sentence="expected residual of the shape of input, [4, 8], got shape [1, 8]"),
    Bad("gate without a residual", TypeError, gate=((8,), F32),
        sentence="expected residual to be a tensor, got NoneType"),
]  # fmt: skip

# Cases that ada_layer_norm refuses as layer_norm does.
MODULATED = (
    "weight of another shape", "weight and bias of two dtypes", "eps that is NaN",
    "normalized_shape that is not input's", "eps that is a string", "integer out_dtype",
)  # fmt: skip
ADA += [
    replace(bad, name=f"{bad.name} beside a modulation", shift=((8,), F32))
    for bad in LAYER_NORM if bad.name in MODULATED
]  # fmt: skip
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
    specs = (bad.input, bad.weight, bad.bias, bad.residual, bad.gate, bad.shift,
             bad.modulation_scale)  # fmt: skip
    return [make(spec, device, requires_grad) for spec in specs]


@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("bad", CASES, ids=str)
def test_sentence(device, bad, requires_grad):
    """The same for meta tensors."""
    for where in (device, "meta"):
        with pytest.raises(bad.error) as caught:
            call(bad, *tensors(bad, where, requires_grad))
        assert str(caught.value) == bad.sentence
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize("bad", CASES, ids=str)
def test_sentence_under_compile(bad):
    torch._dynamo.reset()
    args = tensors(bad, "cpu")

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(*args):
        return call(bad, *args)

    with pytest.raises((bad.error, RuntimeError)) as caught:
        compiled(*args)
    assert bad.sentence in str(caught.value).replace("\\'", "'")


def test_sentence_where_the_rules_choose_pytorchs_norm(monkeypatch):
    monkeypatch.setattr(rules, "DEVICES", {"cpu"})
    torch._dynamo.reset()
    compiled = torch.compile(fused_layernorm.rms_norm, backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="expected input of at least the 3 dimensions"):
        compiled(torch.ones(4, 8), normalized_shape=(2, 4, 8))


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


PLAIN = ("input", "weight", "bias")
RESIDUAL = ("input", "residual", "weight", "bias")
GATED = ("input", "residual", "gate", "shift", "scale", "weight", "bias")
FUNCTIONS: list[tuple[Callable[..., Any], tuple[str, ...]]] = [
    (layer_norm, PLAIN), (add_layer_norm, RESIDUAL), (add_ada_layer_norm, GATED)
]  # fmt: skip


def every_argument(wanted=lambda what: True):
    """Each function with each of its arguments."""
    return pytest.mark.parametrize(
        ("function", "names", "what"),
        [(f, names, what) for f, names in FUNCTIONS for what in names if wanted(what)],
        ids=lambda value: getattr(value, "__name__", value if isinstance(value, str) else ""),
    )


def ones(names, device, **options):
    """Arguments that are right."""
    rows = ("input", "residual")
    return {name: torch.ones((8, 8) if name in rows else (8,), device=device, **options)
            for name in names}  # fmt: skip


@every_argument()
def test_what_is_no_tensor(device, function, names, what):
    for value in ([1.0, 2.0], 3.0, "x"):
        with pytest.raises(TypeError) as caught:
            function(**{**ones(names, device), what: value})
        assert str(caught.value) == f"expected {what} to be a tensor, got {type(value).__name__}"


NOT_FLOAT16 = "expected gate of dtype float32 beside input and residual of float32 and float32, "


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x, t: layer_norm(x, t, scale=t), "scale"),
        (lambda x, t: layer_norm(x, t, t, t), "eps"),
        (lambda x, t: fused_layernorm.rms_norm(x, t, t), "eps"),  # the third is no bias
        (lambda x, t: fused_layernorm.rms_norm(x, t, weight_offset=t), "weight_offset"),
        (lambda x, t: add_layer_norm(x, x, t, scale=t), "scale"),
        (lambda x, t: ada_layer_norm(x, t, t, eps=t), "eps"),
        (lambda x, t: fused_layernorm.group_norm(x, 2, scale=t), "scale"),
        (lambda x, t: fused_layernorm.group_norm(x, 2, t, t, t), "eps"),
    ],
)
def test_tensors_in_the_place_of_numbers(device, call, name, compiled):
    x, t = torch.ones(4, 8, device=device), torch.ones(8, device=device)
    if compiled:
        call = torch.compile(call, backend="eager")
    sentence = re.escape(f"expected {name} to be a number, got a tensor of shape [8]")
    with pytest.raises(TypeError, match=sentence):
        call(x, t)


@pytest.mark.parametrize("options", [{}, {"activation": "gelu"}], ids=str)
@pytest.mark.parametrize(
    ("wrong", "error", "sentence"),
    [
        ({"residual": None}, TypeError, "expected residual to be a tensor, got NoneType"),
        ({"gate": 1.0}, TypeError, "expected gate to be a tensor, got float"),
        ({"gate": torch.ones(3, 8)}, RuntimeError,
         "expected gate that broadcasts to the shape of input, [8, 8], got shape [3, 8]"),
        ({"gate": torch.ones(8).half()}, RuntimeError, NOT_FLOAT16 + "got float16"),
        ({"weight": None, "bias": None}, ValueError,
         "expected normalized_shape, weight or bias, got none of them"),
        ({"weight": torch.ones(3)}, RuntimeError,
         "expected weight of shape [8], the last dimensions of input, got shape [3]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_gate_of_add_layer_norm(device, wrong, error, sentence, options):
    args: dict[str, Any] = {**ones((*RESIDUAL, "gate"), device), **wrong}
    args = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    with pytest.raises(error) as caught:
        add_layer_norm(**args, **options)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("requires_grad", [False, True])
@every_argument(lambda what: what != "input")
def test_another_device(device, function, names, what, requires_grad):
    args: dict[str, Any] = ones(names, device, requires_grad=requires_grad)
    there = ["cpu"] if device == "cuda" else ["cuda:0"] * torch.cuda.is_available()
    tensor = args[what].detach()
    for other in ("meta", *there):
        args[what] = tensor.to(other).requires_grad_(requires_grad)
        with pytest.raises(RuntimeError) as caught:
            function(**args)
        assert str(caught.value) == (
            f"expected {what} on the device of input, {args['input'].device}, got {other}"
        )


def jagged(device, layout):
    rows = [torch.ones(2, 8, device=device), torch.ones(3, 8, device=device)]
    return torch.nested.nested_tensor(rows, layout=layout)


LAYOUTS: dict[str, Callable[[str], torch.Tensor]] = {
    "layout sparse_coo": lambda device: torch.eye(8, device=device).to_sparse(),
    "layout sparse_csr": lambda device: torch.eye(8, device=device).to_sparse_csr(),
    "a nested tensor": lambda device: jagged(device, torch.strided),
    "a nested tensor, jagged": lambda device: jagged(device, torch.jagged),
    "a quantized tensor": lambda device: torch.quantize_per_tensor(
        torch.ones(8, 8, device=device), 0.1, 0, torch.quint8
    ),
}


def test_sparse_weight(device):
    with pytest.raises(NotImplementedError) as caught:
        layer_norm(torch.ones(4, 8, device=device), torch.ones(8, device=device).to_sparse())
    assert str(caught.value) == "expected weight to be a dense tensor, got layout sparse_coo"


@pytest.mark.filterwarnings("ignore")  # PyTorch's, of prototypes
@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("kind", LAYOUTS)
@every_argument(lambda what: what != "weight")
def test_layouts(device, function, names, what, kind, requires_grad):
    args: dict[str, Any] = {**ones(names, device, requires_grad=requires_grad)}
    args[what] = LAYOUTS[kind](device)
    with pytest.raises(NotImplementedError) as caught:
        function(**args)
    assert str(caught.value) == f"expected {what} to be a dense tensor, got {kind.split(',')[0]}"


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
    a = describe(x, normalized_ndim=ndim)
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


# What backward operators refuse: an argument, what takes its place, and the sentence.
OF_STATISTICS = "mean and rstd must be those of the forward pass"
OF_NORMS: list[tuple[str, Any, str]] = [
    ("rstd", ((3, 1), F32), OF_STATISTICS),
    ("rstd", ((4, 1), F64), OF_STATISTICS),
    ("mean", ((1,), F32), OF_STATISTICS),
    ("mean", ((0,), F32), OF_STATISTICS),
    ("dy", ((4, 7), F32), "dy must have the shape of the input"),
    ("dy", ((8,), F32), "dy must have the shape of the input"),
    ("dresidual", ((2, 8), F32), "dresidual must have the shape of the input"),
    ("dresidual", ((4, 8), F16), "dresidual must be of x's dtype"),
    ("normalized_ndim", 0, "cannot normalize the last 0 of 2 dimensions"),
    ("normalized_ndim", 3, "cannot normalize the last 3 of 2 dimensions"),
    ("weight", ((1,), F32), "weight must have the shape of the normalized dimensions"),
    ("bias", ((4, 8), F32), "bias must have the shape of the normalized dimensions"),
    ("bias", ((8,), BF16), "weight and bias must be of one dtype"),
    ("statistic", "batch", "statistic must be 'layer' or 'rms', got 'batch'"),
    ("statistic", "rms", "RMSNorm has no mean"),
    ("weight_offset", math.inf, "weight_offset must be a finite number"),
]  # fmt: skip
OF_MODULATIONS: list[tuple[str, Any, str]] = [
    ("shift", ((3, 8), F32), "shift must broadcast to the shape of the input"),
    ("scale", ((1, 4, 8), F32), "scale must broadcast to the shape of the input"),
    ("scale", None, "a gradient is asked for of a shift or scale that is not there"),
]
OF_GATES: list[tuple[str, Any, str]] = [
    ("gate", ((2, 8), F32), "gate must broadcast to the shape of the input"),
    ("input", ((4, 9), F32), "must have the shape of the input"),
]
REFUSED: dict[str, list[tuple[str, Any, str]]] = {
    "layer_norm_backward": [
        *OF_NORMS,
        ("activation", "tanh",
         "activation must be None, 'gelu', 'gelu_tanh', 'silu' or 'relu', got 'tanh'"),
    ],
    "ada_layer_norm_backward": OF_NORMS + OF_MODULATIONS,
    "add_ada_layer_norm_backward": OF_NORMS + OF_MODULATIONS + OF_GATES,
    "gate_backward": [
        *OF_GATES,
        ("dresidual_out", ((5, 8), F32), "dresidual_out must have the shape of the input"),
    ],
    "qk_norm_rope_backward": [
        ("k", ((1, 4, 2, 6), F32), "q and k"),
        ("q_weight", ((7,), F32), "size"),
        ("weight_offset", math.nan, "weight_offset"),
        ("dk_out", None, "dk_out belongs to k"),
        ("dk_out", ((1, 4, 2, 6), F32), "gradients must be as the results are"),
        ("dq_out", ((1, 4, 3, 8), F16), "gradients must be as the results are"),
    ],
}  # fmt: skip


def backward_arguments(overload, device):
    """Right arguments of a backward operator, by the names of its schema."""
    shapes = {
        **dict.fromkeys(("dy", "x", "input", "dresidual", "dresidual_out"), (4, 8)),
        "mean": (4, 1), "rstd": (4, 1), "cos": (4, 4), "sin": (4, 4),
        "dq_out": (1, 4, 3, 8), "q": (1, 4, 3, 8), "dk_out": (1, 4, 2, 8), "k": (1, 4, 2, 8),
    }  # fmt: skip
    values = {
        "normalized_ndim": 1, "rotary_dim": 8, "seq_dim": 1, "eps": 1e-5, "scale": 1.0,
        "statistic": "rms" if "qk" in overload._opname else "layer", "weight_offset": 0.0,
    }  # fmt: skip
    found = {}
    for argument in overload._schema.arguments:
        name, kind = argument.name, str(argument.type)
        if "Tensor" in kind:
            found[name] = make((shapes.get(name, (8,)), F32), device)
        elif kind == "bool":
            found[name] = name.startswith("needs_")
        else:
            found[name] = values.get(name)
    return found


@pytest.mark.parametrize(
    ("operator", "what", "value", "sentence"),
    [(operator, *case) for operator, cases in REFUSED.items() for case in cases],
)
def test_backward_operators_refuse(device, operator, what, value, sentence):
    """What would otherwise be read out of bounds, or as something else, on every device, also
    where no gradient is asked for. Autograd never calls them so."""
    overload = getattr(torch.ops.fused_layernorm, operator).default
    given = backward_arguments(overload, device)
    overload(*given.values())
    given[what] = make(value, device) if isinstance(value, tuple) else value
    for needs in (True, False) if value is not None else (True,):
        asked = dict.fromkeys((name for name in given if name.startswith("needs_")), needs)
        with pytest.raises((RuntimeError, ValueError), match=sentence):
            overload(*{**given, **asked}.values())


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool])
@pytest.mark.parametrize(
    ("operator", "what"),
    [("layer_norm_backward", what) for what in ("dy", "x", "rstd", "weight")]
    + [("add_ada_layer_norm_backward", what) for what in ("scale", "gate", "input")]
    + [("gate_backward", "gate"), ("qk_norm_rope_backward", "dq_out")],
)
def test_backward_operators_refuse_other_dtypes(operator, what, dtype):
    overload = getattr(torch.ops.fused_layernorm, operator).default
    given = backward_arguments(overload, "cpu")
    given[what] = given[what].to(dtype)
    named = "the gradient of a result" if what == "dq_out" else what
    sentence = f"expected {named} of dtype {FLOATS}, got {str(dtype).removeprefix('torch.')}"
    with pytest.raises(NotImplementedError) as caught:
        overload(*given.values())
    assert str(caught.value) == sentence


def test_dy_of_another_dtype_on_every_device(device):
    """CUDA's sentence names no tensor."""
    overload = torch.ops.fused_layernorm.layer_norm_backward.default
    given = backward_arguments(overload, device)
    given["dy"] = given["dy"].int()
    with pytest.raises(RuntimeError, match=r"(?i)float32, float16, bfloat16 or float64, got int"):
        overload(*given.values())


def test_backward_takes_statistics_of_any_shape(device):
    """As the kernels do, which count rows; shapes that broadcast otherwise give other gradients."""
    x, dy = torch.randn(2, 8, 8, device=device), torch.randn(2, 8, 8, device=device)
    ops = torch.ops.fused_layernorm
    _, mean, rstd = ops.layer_norm_forward(x, 1, None, None, 1e-5)
    args = (None, None, None, None, 1.0, True, False, False)
    expected = ops.layer_norm_backward(dy, x, 1, mean, rstd, *args)[0]
    flat = ops.layer_norm_backward(dy, x, 1, mean.view(16), rstd.view(2, 8), *args)[0]
    assert torch.equal(flat, expected)


NO_MEMORY = (
    "CUDA out of memory: fused_layernorm could not allocate 1.0 MiB on cuda:0, "
    "where 0.5 MiB are free"
)


@pytest.mark.cpu_operators
@pytest.mark.parametrize("add", [False, True])
def test_a_failed_allocation_is_out_of_memory(device, monkeypatch, add):
    """C++ under the stable ABI can only raise a RuntimeError, which becomes an OutOfMemoryError.
    An operator's other failures are raised unchanged."""
    function: Any = add_layer_norm if add else layer_norm
    name = "_add_layer_norm" if add else "_layer_norm"
    x = torch.ones(4, 8, device=device)

    def raised(failure):
        def fail(*args):
            raise failure

        monkeypatch.setattr(calls, name, fail)
        with pytest.raises(type(failure)) as caught:
            function(*(x, x)[: 1 + add], normalized_shape=(8,), activation="relu")
        return caught.value

    found = raised(RuntimeError(NO_MEMORY))
    assert type(found) is torch.OutOfMemoryError
    assert str(found) == NO_MEMORY
    for failure in (torch.OutOfMemoryError("no memory"), RuntimeError("another failure")):
        assert raised(failure) is failure


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
@pytest.mark.parametrize("message", [NO_MEMORY, "another failure"], ids=["", "another"])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_failed_allocation_in_backward(device, failing_backward, add, create_graph, message):
    failing_backward(RuntimeError(message), device)
    x = torch.ones(4, 8, device=device, requires_grad=True)
    out = add_layer_norm(x, x, normalized_shape=8)[0] if add else layer_norm(x, normalized_shape=8)
    with pytest.raises(RuntimeError) as caught:
        torch.autograd.grad(out.sum(), x, create_graph=create_graph)
    assert type(caught.value) is (torch.OutOfMemoryError if message == NO_MEMORY else RuntimeError)
    assert str(caught.value) == message


# Our own sentence where an operator allocates, PyTorch's where autograd calls a kernel directly.
OUT_OF_MEMORY = "could not allocate|CUDA out of memory"


@pytest.mark.gpu
@pytest.mark.parametrize("grad", [False, True])
def test_out_of_memory_on_cuda(one_gibibyte_left, grad):
    x = torch.empty(1 << 28, 8, device="cuda", requires_grad=grad)  # 8 GiB
    one_gibibyte_left()
    with pytest.raises(torch.OutOfMemoryError, match=OUT_OF_MEMORY):
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
    with pytest.raises(torch.OutOfMemoryError, match=OUT_OF_MEMORY):
        torch.autograd.grad(y, x, y.detach(), create_graph=create_graph)


def test_what_it_cannot_run_with_is_named(tmp_path):
    """An old torch, an old Python, and a package without its binary, in one process."""
    package = Path(fused_layernorm.__file__).parent
    without = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(package, tmp_path / package.name, ignore=without)
    source = f"""
        import sys
        sys.path[:0] = {[str(tmp_path), *sys.path]!r}
        import torch

        def told():
            try:
                import fused_layernorm
            except ImportError as error:
                for name in [n for n in sys.modules if n.startswith("fused_layernorm")]:
                    del sys.modules[name]
                print(str(error).replace(chr(10), " "))

        told()
        torch.__version__, version = "2.9.1+cpu", torch.__version__
        told()
        torch.__version__ = version
        sys.version_info, sys.version = (3, 9, 1), "3.9.1 (default)"
        told()
        """
    command = [sys.executable, "-c", textwrap.dedent(source)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    binary, torch_, python = result.stdout.splitlines()
    assert binary.startswith("fused_layernorm's binary does not load")
    assert "Install the package" in binary
    assert torch_.startswith("fused_layernorm needs torch >= 2.10; this is 2.9.1+cpu")
    assert python.startswith("fused_layernorm needs Python >= 3.10; this is 3.9.1")
