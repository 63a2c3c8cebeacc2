# SPDX-License-Identifier: Apache-2.0
"""Bad input raises one clear sentence, the same on every device, for fakes and when compiled."""

import contextlib
import functools
import math
import re
import shutil
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numerics
import pytest
import torch
from families import Gated, Heads, Packed, of_groups
from forms import arguments_of, calls_of
from numerics import Problem, covering
from processes import run

import fused_layernorm as fl
from fused_layernorm import ada_layer_norm, add_layer_norm, calls, layer_norm, stock
from fused_layernorm.compile import rules
from fused_layernorm.ops import arguments
from fused_layernorm.ops.operators import FORWARD, describe

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64


FLOATS = "float32, float16, bfloat16 or float64"
X, W, INT = ((4, 8), F32), ((8,), F32), torch.int64  # tensors are given as (shape, dtype)
NONE, R, T = NotImplementedError, RuntimeError, TypeError
V, NAN, INF = ValueError, math.nan, math.inf
OF_INPUT = "the last dimensions of input, got shape"
OF_WEIGHT = f"weight of shape [8], {OF_INPUT}"
BESIDE_A_STREAM = "of dtype bfloat16 or float32 beside input and residual of bfloat16 and float32"
IMAGE: Any = {"input": ((2, 6, 4, 4), F32), "weight": None}
OF_CHANNELS = "weight of shape [6], the size of dimension 1 of input, got shape"
ACTIVATIONS = "activation None, 'gelu', 'gelu_tanh', 'silu'"
OF_GATE = "gate of the shape of input, [4, 8], got shape"
OF_ALL_CHANNELS = "of shape [6], a number for each channel of input, got shape"
OF_SAMPLES = ("of shape [4, 6], a number for each channel of each sample, which sizes of 1 may "
              "follow, got shape")  # fmt: skip
UNLIKE = "q and k that differ only in dimension 2, their heads, got shapes [2, 3, 4, 8] and"
OF_ANGLES = ("of shape (positions, n) or (batch, positions, n), with 3 positions, batch 2 or 1, "
             "and n 4 or 8, got shape")  # fmt: skip
BROADCASTS = "that broadcasts to the shape of input, [4, 8], got shape"
NO_NORM: Any = {"statistic": None, "q_weight": None, "k_weight": None}
IN_ROWS: Any = {"qkv": ((2, 3, 64), F32), "head_dim": 8, "num_kv_heads": 2}

# Functions, the error, how its sentence goes on after "expected", and what is wrong.
PLAIN, BOTH, ADDS = "layer_norm", "layer_norm rms_norm", "add_layer_norm add_ada_layer_norm"
Row = tuple[type[Exception], str, dict[str, Any]]


def of(names, rows: list[Row], **given) -> list[Any]:
    return [(names, error, sentence, given | wrong) for error, sentence, wrong in rows]


ROWS: list[tuple[str, type[Exception], str, dict[str, Any]]] = [
    # ---- Of several functions.
    ("layer_norm rms_norm ada_layer_norm rms_norm_gated group_norm qk_norm_rope qkv_norm_rope", V,
     "eps to be a number, got nan", {"eps": NAN}),
    ("layer_norm rms_norm ada_layer_norm rms_norm_gated group_norm qk_norm_rope qkv_norm_rope", T,
     "eps to be a number, got str", {"eps": "1e-5"}),
    ("layer_norm group_norm", T, "scale to be a number, got str", {"scale": "2"}),
    ("layer_norm group_norm", V, "scale to be a finite number, got inf", {"scale": INF}),
    ("layer_norm ada_layer_norm rms_norm_gated group_norm", V, f"out_dtype {FLOATS}, got int32",
     {"out_dtype": torch.int32}),
    ("rms_norm rms_norm_gated qk_norm_rope qkv_norm_rope", V,
     "weight_offset to be a finite number, got inf", {"weight_offset": INF}),
    ("rms_norm rms_norm_gated", T, "weight_offset to be a number, got str", {"weight_offset": "1"}),
    *((name, V, "a weight beside weight_offset 1.0, got none",
       {"weight": None, "weight_offset": 1.0, **shape})
      for name, shape in (("rms_norm", {"normalized_shape": 8}), ("rms_norm_gated", {}))),
    ("layer_norm rms_norm add_layer_norm ada_layer_norm", R, f"{OF_WEIGHT} [3]",
     {"weight": ((3,), F32)}),
    (BOTH + " add_layer_norm", V, "normalized_shape, weight or bias, got none of them",
     {"weight": None}),
    ("rms_norm rms_norm_gated", V, "group_size that divides the 8 columns, got 3",
     {"group_size": 3}),
    ("rms_norm rms_norm_gated", V, "group_size of at least 1, got 0", {"group_size": 0}),
    ("layer_norm ada_layer_norm", R, "weight and bias of one dtype, got float32 and float16",
     {"input": ((4, 8), F16), "bias": ((8,), F16)}),
    (ADDS, R, "residual of the shape of input, [4, 8], got shape [1, 8]",
     {"residual": ((1, 8), F32)}),
    ("add_ada_layer_norm", T, "residual to be a tensor, got NoneType", {"residual": None}),
    # ---- Of plain norms, over one dimension, over groups of columns.
    (PLAIN, NONE, f"input of dtype {FLOATS}, got int32", {"input": ((4, 8), torch.int32)}),
    (PLAIN, NONE, f"weight of dtype {FLOATS}, got int64", {"weight": ((8,), INT)}),
    (PLAIN, R, f"bias of shape [8], {OF_INPUT} [4]", {"bias": ((4,), F32)}),
    (PLAIN, R, "input of at least the 3 dimensions of normalized_shape, [2, 4, 8], got input of "
     "shape [4, 8]", {"weight": ((2, 4, 8), F32)}),
    (PLAIN, R, "weight to have at least one dimension, got a scalar", {"weight": ((), F32)}),
    (PLAIN, R, "input of at least the 3 dimensions of normalized_shape, got input of shape [4, 8]",
     {"weight": None, "normalized_shape": (2, 4, 8)}),
    ("layer_norm ada_layer_norm", R,
     "input whose last dimensions are normalized_shape [4], got input of shape [4, 8]",
     {"weight": None, "normalized_shape": (4,)}),
    (PLAIN, R, f"weight of shape [4, 8], {OF_INPUT} [8]", {"normalized_shape": (4, 8)}),
    (PLAIN, R, "normalized_shape to have at least one dimension, got ()",
     {"weight": None, "normalized_shape": ()}),
    (PLAIN, T, "normalized_shape to hold ints, got an element of float",
     {"weight": None, "normalized_shape": (8.0,)}),
    (PLAIN, T, "normalized_shape to be a sequence of ints, got float",
     {"weight": None, "normalized_shape": 8.0}),
    (PLAIN, R, "weight of dtype bfloat16 or float32 beside input of bfloat16, got float64",
     {"input": ((4, 8), BF16), "weight": ((8,), F64)}),
    (PLAIN, R, "bias of dtype float64 beside input of float64, got float32",
     {"input": ((4, 8), F64), "weight": None, "bias": W}),
    (PLAIN, R, "weight of dtype float32 beside input of float32, got float16",
     {"weight": ((8,), F16)}),
    (PLAIN, R, "weight of dtype float16 or float32 beside input of float16, got bfloat16",
     {"input": ((4, 8), F16), "weight": ((8,), BF16)}),
    *((PLAIN, V, f"{ACTIVATIONS} or 'relu', got '{wrong}'", {"activation": wrong})
      for wrong in ("tanh", "leaky_relu")),
    *of(BOTH, [
        (T, "dim to be an int, got list", {"dim": [1]}),
        (IndexError, "dim from -4 to 3 for input of 4 dimensions, got 4", {"dim": 4}),
        (V, "dim or normalized_shape, got both of them", {"dim": 1, "normalized_shape": (6,)}),
        (R, f"{OF_CHANNELS} [5]", {"dim": 1, "weight": ((5,), F32)}),
        (R, f"{OF_CHANNELS} [6, 4]", {"dim": 1, "weight": ((6, 4), F32)}),
    ], **IMAGE),
    *(("rms_norm", V, "group_size beside the last dimension alone to normalize over",
       {"weight": None, "group_size": 4, **other})
      for other in ({"normalized_shape": (4, 8)}, {"dim": 0})),
    ("rms_norm", R, f"{OF_WEIGHT} [4]", {"input": W, "weight": ((4,), F32), "group_size": 4}),
    # ---- With a residual, and a gate, also beside an activation.
    ("add_layer_norm", R, f"weight {BESIDE_A_STREAM}, got float64",
     {"input": ((4, 8), BF16), "weight": ((8,), F64)}),
    *(row for options in ({}, {"activation": "gelu"}) for row in of("add_layer_norm", [
        (T, "residual to be a tensor, got NoneType", {"residual": None}),
        (T, "gate to be a tensor, got float", {"gate": 1.0}),
        (R, f"gate {BROADCASTS} [3, 8]", {"gate": ((3, 8), F32)}),
        (R, "gate of dtype float32 beside input and residual of float32 and float32, got float16",
         {"gate": ((8,), F16)}),
    ], gate=W, **options)),
    # ---- With modulations.
    ("ada_layer_norm", R, f"shift {BROADCASTS} [3, 8]", {"shift": ((3, 8), F32)}),
    ("ada_layer_norm", R, f"scale {BROADCASTS.replace('4', '1')} [4, 8]",
     {"input": ((1, 8), F32), "shift": None, "scale": X}),
    ("ada_layer_norm", R, f"scale {BROADCASTS} [1, 4, 8]", {"scale": ((1, 4, 8), F32)}),
    ("ada_layer_norm", R, "shift of dtype float32 beside input of float32, got bfloat16",
     {"shift": ((8,), BF16)}),
    ("ada_layer_norm", V, "statistic 'layer' or 'rms', got 'batch'", {"statistic": "batch"}),
    ("add_ada_layer_norm", R, f"gate {BROADCASTS} [2, 8]", {"gate": ((2, 8), F32)}),
    ("add_ada_layer_norm", R, f"gate {BESIDE_A_STREAM}, got float16",
     {"input": ((4, 8), BF16), "gate": ((8,), F16)}),
    # ---- Gated.
    *of("rms_norm_gated", [
        (R, f"{OF_GATE} [4, 1]", {"gate": ((4, 1), F32)}), (R, f"{OF_GATE} [8]", {"gate": W}),
        (T, "gate to be a tensor, got NoneType", {"gate": None}),
        (R, f"{OF_WEIGHT} [4]", {"weight": ((4,), F32), "group_size": 4}),
        (V, "gate_activation 'silu' or 'sigmoid', got 'tanh'", {"gate_activation": "tanh"}),
        (T, "group_size to be an int, got bool", {"group_size": True}),
        (V, "input of at least the 1 dimensions of normalized_shape, got input of shape []",
         {"input": ((), F32), "gate": ((), F32), "weight": None}),
    ]),
    # ---- Of groups of channels.
    *of("group_norm", [
        (R, "num_groups that divides the 6 channels of input, got 4", {"num_groups": 4}),
        (R, "num_groups of at least 1, got 0", {"num_groups": 0}),
        (T, "num_groups to be an int, got bool", {"num_groups": True}),
        (T, "num_groups to be an int, got NoneType", {"num_groups": None}),
        (R, "input of at least two dimensions, (samples, channels, ...), got shape [6]",
         {"input": ((6,), F32)}),
        (R, f"weight {OF_ALL_CHANNELS} [3]", {"weight": ((3,), F32)}),
        (V, f"{ACTIVATIONS}, 'relu' or 'leaky_relu', got 'tanh'", {"activation": "tanh"}),
    ]),
    ("ada_group_norm", R, f"shift {OF_SAMPLES} [6]", {"shift": ((6,), F32)}),
    ("ada_group_norm", R, f"shift {OF_SAMPLES} [4, 6, 5]", {"shift": ((4, 6, 5), F32)}),
    ("ada_group_norm", R, "shift of dtype float32 beside input of float32, got float64",
     {"shift": ((4, 6), F64)}),
    # ---- Of heads.
    *of("qk_norm_rope qkv_norm_rope", [
        (R, "q_weight of shape [8], the size of a head, got shape [4]", {"q_weight": ((4,), F32)}),
        (R, "k_weight of dtype float32 beside q of float32, got float16",
         {"k_weight": ((8,), F16)}),
        (R, f"cos {OF_ANGLES} [3, 3]", {"cos": ((3, 3), F32)}),
        (V, "sin beside cos, got None", {"sin": None}),
        (V, "seq_dim 1 or 2 of four dimensions, got 0", {"seq_dim": 0}),
        (V, "cos and sin beside statistic None, got neither",
         {**NO_NORM, "cos": None, "sin": None}),
        *((V, f"rotary_dim to be an even number from 2 to 8, the size of a head, got {wrong}",
           {"rotary_dim": wrong}) for wrong in (3, 10)),
    ]),
    *of("qk_norm_rope", [
        (R, "q of shape (batch, positions, heads, columns), got shape [3, 4, 8]",
         {"q": ((3, 4, 8), F32)}),
        (R, "k of q's dtype, float32, got float16", {"k": ((2, 3, 2, 8), F16)}),
        (R, f"{UNLIKE} [2, 3, 2, 6]", {"k": ((2, 3, 2, 6), F32)}),
        (T, "k to be a tensor, got NoneType", {"k": None}),
        (R, f"sin {OF_ANGLES} [4, 4]", {"sin": ((4, 4), F32)}),
        (R, f"sin {OF_ANGLES} [3, 3, 4]", {"sin": ((3, 3, 4), F32)}),
        (R, "cos and sin of one dtype and one last size, got float32 [3, 4] and float32 [3, 8]",
         {"sin": ((3, 8), F32)}),
        (R, "cos of dtype float32 beside q of float32, got float64", {"cos": ((3, 4), F64)}),
        (T, "rotary_dim to be an int, got float", {"rotary_dim": 2.0}),
        (V, "cos and sin beside rotary_dim 4, got neither",
         {"rotary_dim": 4, "cos": None, "sin": None}),
        (IndexError, "seq_dim from -4 to 3, got 4", {"seq_dim": 4}),
        (T, "seq_dim to be an int, got float", {"seq_dim": 1.0}),
        (V, "statistic 'rms', 'layer' or None, got 'max'", {"statistic": "max"}),
        (V, "no q_weight beside statistic None, got one", {"statistic": None}),
        (V, "no weight_offset beside statistic None, got 1.0", {**NO_NORM, "weight_offset": 1.0}),
        (V, "a k_weight beside weight_offset 1.0, got none",
         {"k_weight": None, "weight_offset": 1.0}),
    ]),
    # ---- Of packed heads.
    *of("qkv_norm_rope", [
        (V, "layout '3hd' or 'h3d', got 'hd3'", {"layout": "hd3"}),
        (R, "qkv of shape (batch, positions, 3, heads, columns) or (batch, positions, columns), "
         "got shape [2, 3, 4, 3, 8]", {"qkv": ((2, 3, 4, 3, 8), F32)}),
        (R, "qkv of shape (batch, positions, heads, 3, columns) or (batch, positions, columns), "
         "got shape [2, 3, 3, 4, 8]", {"layout": "h3d"}),
        (V, "num_kv_heads 4 beside qkv of [2, 3, 3, 4, 8], got 2", {"num_kv_heads": 2}),
        (V, "head_dim 8 beside qkv of [2, 3, 3, 4, 8], got 4", {"head_dim": 4}),
        (T, "num_kv_heads to be an int, got float", {"num_kv_heads": 2.0}),
        (T, "head_dim to be an int, got str", {"head_dim": "8"}),
        *((V, f"head_dim to divide 64, the columns of qkv, got {wrong}",
           {**IN_ROWS, "head_dim": wrong}) for wrong in (None, 0, 7)),
        (V, "num_kv_heads beside 8 heads in all, got None", {**IN_ROWS, "num_kv_heads": None}),
        *((V, f"num_kv_heads above 0 and below half of 8 heads, got {wrong}",
           {**IN_ROWS, "num_kv_heads": wrong}) for wrong in (-1, 0, 4)),
        (V, "num_kv_heads to divide 8 heads in all, got 3",
         {**IN_ROWS, "num_kv_heads": 3, "layout": "h3d"}),
        (V, "no k_weight beside statistic None, got one", {"statistic": None, "q_weight": None}),
    ]),
]  # fmt: skip

# Of each function: arguments that are right.
STREAM, ANGLES = {"input": X, "residual": X}, ((3, 4), F32)
OF_GROUPS: dict[str, Any] = {"input": ((4, 6, 5), F32), "num_groups": 2}
FUNCTIONS: dict[str, dict[str, Any]] = {
    "layer_norm": {"input": X, "weight": W},
    "rms_norm": {"input": X, "weight": W},
    "add_layer_norm": {**STREAM, "weight": W},
    "ada_layer_norm": {"input": X, "shift": W, "weight": W},
    "add_ada_layer_norm": {**STREAM, "gate": W, "weight": W},
    "rms_norm_gated": {"input": X, "gate": X, "weight": W},
    "group_norm": OF_GROUPS,
    "ada_group_norm": OF_GROUPS,
    "qk_norm_rope": {"q": ((2, 3, 4, 8), F32), "k": ((2, 3, 2, 8), F32), "q_weight": W,
                     "k_weight": W, "cos": ANGLES, "sin": ANGLES},
    "qkv_norm_rope": {"qkv": ((2, 3, 3, 4, 8), F32), "q_weight": W, "k_weight": W, "cos": ANGLES,
                      "sin": ANGLES},
}  # fmt: skip
EVERY_ROW = pytest.mark.parametrize(
    ("name", "error", "sentence", "wrong"),
    [(name, *row) for names, *row in ROWS for name in names.split()],
    ids=lambda value: value if isinstance(value, str) else "",
)


def says(error, sentence):
    """Expects this error, with this sentence and no more."""
    return pytest.raises(error, match=f"^{re.escape(sentence)}$")


def call_of(name, wrong, device, requires_grad=False):
    given = numerics.made({**FUNCTIONS[name], **wrong}, device)
    for value in given.values():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value.requires_grad_(requires_grad and value.dtype.itemsize > 1)
    return lambda: getattr(fl, name)(**given)


@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "grad"])
@EVERY_ROW
def test_sentence(device, name, error, sentence, wrong, requires_grad):
    """The same for meta tensors and for fakes."""
    fakes = torch._subclasses.FakeTensorMode()
    for where, mode in ((device, None), ("meta", None), (device, fakes)):
        with mode or contextlib.nullcontext(), pytest.raises(error) as caught:
            call_of(name, wrong, where, requires_grad)()
        assert str(caught.value) == f"expected {sentence}"
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__ or caught.value.__context__ is None


@EVERY_ROW
def test_sentence_under_compile(name, error, sentence, wrong):
    torch._dynamo.reset()
    with pytest.raises((error, RuntimeError)) as caught:
        torch.compile(call_of(name, wrong, "cpu"), backend="eager", fullgraph=True)()
    assert sentence in str(caught.value).replace("\\'", "'")


def test_sentence_where_the_rules_choose_pytorchs_norm(monkeypatch):
    monkeypatch.setattr(rules, "DEVICES", {"cpu"})
    torch._dynamo.reset()
    compiled = torch.compile(fl.rms_norm, backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="expected input of at least the 3 dimensions"):
        compiled(torch.ones(4, 8), normalized_shape=(2, 4, 8))


def every_argument(wanted=lambda what: True, **others):
    """Each function with each of its tensors, and with the elements of other dimensions."""
    found = [(name, what) for name, tensors in TENSORS.items() for what in tensors if wanted(what)]
    every = [(*one, *rest) for one, *rest in covering(found, *others.values())]
    return pytest.mark.parametrize(("name", "what", *others), every)


AFFINE = {"weight": W, "bias": W}
GATED = {**STREAM, "gate": W, "shift": W, "scale": W, **AFFINE}
OF_CHANNEL, OF_SAMPLE = ((6,), F32), ((4, 6), F32)
TENSORS: dict[str, dict[str, Any]] = {
    "layer_norm": {"input": X, **AFFINE},
    "add_layer_norm": {**STREAM, **AFFINE},
    "add_ada_layer_norm": GATED,
    "rms_norm_gated": {"input": X, "gate": X, **AFFINE},
    "ada_group_norm": {"input": OF_GROUPS["input"], "shift": OF_SAMPLE, "scale": OF_SAMPLE,
                       "weight": OF_CHANNEL, "bias": OF_CHANNEL},
    "qk_norm_rope": {**FUNCTIONS["qk_norm_rope"], "q_bias": W, "k_bias": W},
    "qkv_norm_rope": {**FUNCTIONS["qkv_norm_rope"], "q_bias": W, "k_bias": W},
}  # fmt: skip


def ones(name, device, requires_grad=False):
    """Tensors that are right, and a number."""
    made = numerics.made(TENSORS[name], device)
    given: dict[str, Any] = {n: t.requires_grad_(requires_grad) for n, t in made.items()}
    return given | ({"num_groups": 2} if "group" in name else {})


@every_argument()
def test_what_is_no_tensor(device, name, what):
    for value in ([1.0, 2.0], 3.0, "x"):
        with says(TypeError, f"expected {what} to be a tensor, got {type(value).__name__}"):
            getattr(fl, name)(**{**ones(name, device), what: value})


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("call", "name"), [
    (lambda x, t: layer_norm(x, t, scale=t), "scale"),
    (lambda x, t: fl.rms_norm(x, t, t), "eps"),  # the third is no bias
    (lambda x, t: fl.rms_norm(x, t, weight_offset=t), "weight_offset"),
    (lambda x, t: ada_layer_norm(x, t, t, eps=t), "eps"),
    (lambda x, t: fl.group_norm(x, 2, t, t, t), "eps"),
])  # fmt: skip
def test_tensors_in_the_place_of_numbers(device, call, name, compiled):
    x, t = torch.ones(4, 8, device=device), torch.ones(8, device=device)
    if compiled:
        call = torch.compile(call, backend="eager")
    sentence = re.escape(f"expected {name} to be a number, got a tensor of shape [8]")
    with pytest.raises(TypeError, match=sentence):
        call(x, t)


@every_argument(lambda what: what not in ("input", "q", "qkv"), requires_grad=[False, True])
def test_another_device(device, name, what, requires_grad):
    given = ones(name, device, requires_grad)
    there = ["cpu"] if device == "cuda" else ["cuda:0"] * torch.cuda.is_available()
    tensor, first = given[what].detach(), next(iter(given))
    for other in ("meta", *there):
        given[what] = tensor.to(other).requires_grad_(requires_grad)
        named = "q" if first == "qkv" else first  # a part of it
        of = f"the device of {named}, {given[first].device}"
        with says(RuntimeError, f"expected {what} on {of}, got {other}"):
            getattr(fl, name)(**given)


def of_two_lengths(layout):
    return torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=layout)


DENSE = "to be a dense tensor, got"
NOT_TAKEN: dict[str, Callable[[], torch.Tensor]] = {
    f"{DENSE} layout sparse_coo": lambda: torch.eye(8).to_sparse(),
    f"{DENSE} layout sparse_csr": lambda: torch.eye(8).to_sparse_csr(),
    f"{DENSE} a nested tensor": lambda: of_two_lengths(torch.strided),
    f"{DENSE} a nested tensor, jagged": lambda: of_two_lengths(torch.jagged),
    f"{DENSE} a quantized tensor": lambda: torch.quantize_per_tensor(
        torch.ones(8, 8), 0.1, 0, torch.quint8
    ),
    f"of dtype {FLOATS}, got int64": lambda: torch.ones(8, 8, dtype=INT),
    f"of dtype {FLOATS}, got complex64": lambda: torch.ones(8, 8, dtype=torch.complex64),
    f"of dtype {FLOATS}, got float8_e4m3fn": lambda: torch.ones(8, 8).to(torch.float8_e4m3fn),
}


@pytest.mark.filterwarnings("ignore")  # PyTorch's, of prototypes
@every_argument(lambda what: what != "weight", kind=[*NOT_TAKEN], requires_grad=[False, True])
def test_layouts_and_dtypes(device, name, what, kind, requires_grad):
    with torch.device(device):
        given = {**ones(name, device, requires_grad), what: NOT_TAKEN[kind]()}
    with says(NotImplementedError, f"expected {what} {kind.removesuffix(', jagged')}"):
        getattr(fl, name)(**given)
    given = ones("layer_norm", device, requires_grad)
    given["weight"] = given["weight"].detach().to_sparse()
    with says(NotImplementedError, "expected weight to be a dense tensor, got layout sparse_coo"):
        layer_norm(**given)


@pytest.mark.parametrize(("shape", "ndim", "sentence"), [
    ((2**16, 2**16, 4), 1, "expected at most 2147483647 rows, got 4294967296"),
    ((1, 2**31), 1, "expected at most 2147483647 columns, got 2147483648"),
    ((2, 2**16, 2**16), 2, "expected at most 2147483647 columns, got 4294967296"),
])  # fmt: skip
def test_more_rows_or_columns_than_the_kernels_index(shape, ndim, sentence):
    of_meta = describe(torch.empty(shape, device="meta"), normalized_ndim=ndim)
    arguments.check(of_meta)  # the limit is that of our kernels, which do not run here
    with torch._subclasses.FakeTensorMode(), says(RuntimeError, sentence):
        layer_norm(torch.empty(shape, device="cuda"), normalized_shape=shape[-ndim:])


@pytest.mark.gpu
@pytest.mark.slow
def test_more_rows_or_columns_than_the_kernels_index_on_cuda(needs_memory):
    needs_memory(8)
    x = torch.empty(2**31, 1, device="cuda", dtype=F16)
    for tensor, shape, what in ((x, (1,), "rows"), (x.T, (2**31,), "columns")):
        with pytest.raises(RuntimeError, match=f"at most 2147483647 {what}, got 2147483648"):
            layer_norm(tensor, normalized_shape=shape)


@pytest.mark.on_cpu
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "group_norm"])
def test_what_pytorchs_function_refuses_is_not_tried_again(name, monkeypatch):
    monkeypatch.setattr(stock, "_cpu_operators", False)
    for function in ("run", "call"):
        monkeypatch.setattr(calls, function, None)
    with pytest.raises(RuntimeError, match="expected weight of shape"):
        call_of(name, {"weight": ((3,), F32)}, "cpu")()


@pytest.mark.parametrize(("cls", "options", "error"), [
    *((fl.FusedLayerNorm, wrong, V)
      for wrong in ({"activation": "tanh"}, {"scale": NAN}, {"out_dtype": torch.int8})),
    (fl.FusedLayerNorm, {"scale": None}, T),
    *((fl.FusedRMSNormGated, wrong, V)
      for wrong in ({"group_size": 3}, {"gate_activation": "relu"}, {"weight_offset": NAN})),
    (functools.partial(fl.FusedGroupNorm, 2), {"activation": "tanh"}, V),
    *((functools.partial(fl.FusedGroupNorm, bad), {}, V) for bad in (0, -1, 3)),
])  # fmt: skip
def test_modules_refuse_when_they_are_made(cls, options, error):
    with pytest.raises(error, match=r"expected|must be divisible"):
        cls(8, **options)


def test_operators_refuse_with_the_same_sentences(device):
    x = torch.ones(4, 8)
    for given, sentence in (
        ((x.to(device), 1, None, None, 1e-5, "leaky_relu"), r"activation .*, got 'leaky_relu'"),
        ((x, 0, None, None, 1e-5), "expected at least one dimension to normalize over"),
        ((x, 3, None, None, 1e-5), "expected input of at least the 3 dimensions"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=sentence):
            torch.ops.fused_layernorm.layer_norm(*given)


# What operators refuse on CUDA: an argument, what takes its place, and the sentence.
Refused = list[tuple[str, Any, str]]
OF_STATISTICS = "mean and rstd must be those of the forward pass"
AS_INPUT, TO_INPUT = "must have the shape of the input", "must broadcast to the shape of the input"
AS_DIMENSIONS, MISSING = "must have the shape of the normalized dimensions", "that is not there"
OF_SIZES = "group_size must be at least one and divide the last dimension"
OF_NORMS: Refused = [
    *(("rstd", wrong, OF_STATISTICS) for wrong in (((3, 1), F32), ((4, 1), F64))),
    *(("mean", (shape, F32), OF_STATISTICS) for shape in ((1,), (0,))),
    *(("dy", (shape, F32), f"dy {AS_INPUT}") for shape in ((4, 7), (8,))),
    ("dy", ((4, 8), torch.int32), "float32, float16, bfloat16 or float64, got Int"),
    ("dresidual", ((2, 8), F32), f"dresidual {AS_INPUT}"),
    ("dresidual", ((4, 8), F16), "dresidual must be of x's dtype"),
    *(("normalized_ndim", n, f"cannot normalize the last {n} of 2 dimensions") for n in (0, 3)),
    ("weight", ((1,), F32), f"weight {AS_DIMENSIONS}"),
    ("bias", ((4, 8), F32), f"bias {AS_DIMENSIONS}"),
    ("bias", ((8,), BF16), "weight and bias must be of one dtype"),
    ("statistic", "batch", "statistic must be 'layer' or 'rms', got 'batch'"),
    ("statistic", "rms", "RMSNorm has no mean"),
    ("weight_offset", INF, "weight_offset must be a finite number"),
]  # fmt: skip
OF_MODULATIONS: Refused = [
    ("shift", ((3, 8), F32), f"shift {TO_INPUT}"), ("scale", ((1, 4, 8), F32), f"scale {TO_INPUT}"),
    ("scale", None, f"a gradient is asked for of a shift or scale {MISSING}"),
]  # fmt: skip
OF_GATES: Refused = [
    ("gate", ((2, 8), F32), f"gate {TO_INPUT}"), ("input", ((4, 9), F32), AS_INPUT),
]  # fmt: skip
OF_GROUPS_OF_COLUMNS: Refused = [
    ("gate", ((8,), F32), f"gate {AS_INPUT}"), ("weight", ((4,), F32), f"weight {AS_DIMENSIONS}"),
    ("gate_activation", "tanh", "gate_activation must be 'silu' or 'sigmoid', got 'tanh'"),
    ("group_size", 3, OF_SIZES), ("group_size", -1, OF_SIZES),
    ("weight_offset", INF, "weight_offset must be a finite number"),
]  # fmt: skip
REFUSED: dict[str, Refused] = {
    "layer_norm_backward": [
        *OF_NORMS, ("activation", "tanh", "activation must be None, 'gelu', 'gelu_tanh', 'silu' or "
                    "'relu', got 'tanh'"),
    ],
    "ada_layer_norm_backward": OF_NORMS + OF_MODULATIONS,
    "add_ada_layer_norm_backward": OF_NORMS + OF_MODULATIONS + OF_GATES,
    "gate_backward": [*OF_GATES, ("dresidual_out", ((5, 8), F32), f"dresidual_out {AS_INPUT}")],
    "qk_norm_rope_backward": [
        ("k", ((1, 4, 2, 6), F32), "q and k"), ("q_weight", ((7,), F32), "size"),
        ("weight_offset", NAN, "weight_offset"), ("dk_out", None, "dk_out belongs to k"),
        ("dk_out", ((1, 4, 2, 6), F32), "gradients must be as the results are"),
        ("dq_out", ((1, 4, 3, 8), F16), "gradients must be as the results are"),
    ],
    "qkv_norm_rope_backward": [
        ("qkv", ((1, 4, 9, 6), F32), "rotary_dim must be at most the size of a head"),
        ("qkv", ((1, 4, 8, 8), F32), "gradients must be as the results are"),
        ("qkv", None, "qkv belongs to a statistic"), ("q_weight", ((7,), F32), "size"),
        ("dk_out", ((1, 4, 2, 6), F32), "gradients must be as the results are"),
        ("dv", ((1, 4, 3, 8), F16), "gradients must be as the results are"),
        ("dq_out", ((1, 4, 8), F32), "gradients must be as the results are"),
        ("num_kv_heads", 5, "and the heads of q, k and v"),
        ("num_kv_heads", -1, "and the heads of q, k and v"),
        ("stride", [288, 72, 1, 9], "dqkv must have contiguous rows"),
        ("size", [4, 9, 8], "dqkv must have four dimensions"),
    ],
    "group_norm_backward": [
        ("dy", ((4, 6), F32), f"dy {AS_INPUT}"),
        *(("num_groups", n, "num_groups must be at least one and divide the channels")
          for n in (3, 0)),
        ("mean", ((4, 1), F32), OF_STATISTICS), ("rstd", ((4, 2), F64), OF_STATISTICS),
        *((name, (shape, F32), f"{name} must have a number for each channel of each sample")
          for name, shape in (("shift", (8,)), ("scale", (4, 8, 5)))),
        ("weight", ((5,), F32), "weight must have a number for each channel"),
        ("bias", None, f"a gradient is asked for of a parameter {MISSING}"),
        ("activation", "tanh", "activation must be None, 'gelu', 'gelu_tanh', 'silu', 'relu' or "
         "'leaky_relu', got 'tanh'"),
    ],
    "rms_norm_gated": [
        *OF_GROUPS_OF_COLUMNS, ("eps", NAN, "eps must be a number"),
        ("gate", torch.ones(4, 8), "gate must be on the input's device"),
    ],
    "rms_norm_gated_backward": [
        *OF_GROUPS_OF_COLUMNS, ("dy", ((4, 1), F32), f"dy {AS_INPUT}"),
        ("rstd", ((4, 1), F32), "rstd must be that of the forward pass"),
        ("bias", None, f"a gradient is asked for of a parameter {MISSING}"),
    ],
}  # fmt: skip
OF_SUM: dict[str, Any] = {"residual_dtype": F32}
OF_GATED_SUM: dict[str, Any] = OF_SUM | dict.fromkeys(("gate", "shift", "scale_by"), (8,))
# Problems that call the operators with right arguments of these shapes.
RIGHT: dict[str, Any] = {
    "layer_norm_backward": Problem((4, 8), activation="silu", **OF_SUM),
    "ada_layer_norm_backward": Problem((4, 8), **{**OF_GATED_SUM, "gate": None}),
    "add_ada_layer_norm_backward": Problem((4, 8), **OF_GATED_SUM),
    "gate_backward": Problem((4, 8), **OF_GATED_SUM),
    "qk_norm_rope_backward": Heads((1, 4, 8), heads=(3, 2), affine="both"),
    "qkv_norm_rope_backward": Packed((1, 4, 8), heads=(3, 3), affine="both"),
    "group_norm_backward": of_groups((4, 8), 2, modulation="both"),
    **dict.fromkeys(("rms_norm_gated", "rms_norm_gated_backward"), Gated((4, 8), group_size=4)),
}


def right_arguments(overload, device):
    """Right arguments of an operator, by the names of its schema."""
    name = overload._opname
    given = arguments_of(overload, calls_of(RIGHT[name], device)[name])
    detached = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, given)
    return {argument: value for argument, _, value in detached}


@pytest.mark.gpu
@pytest.mark.parametrize(("operator", "what", "value", "sentence"), [
    (operator, *case) for operator, cases in REFUSED.items() for case in cases
])  # fmt: skip
def test_operators_refuse_on_cuda(operator, what, value, sentence):
    """What the kernels would otherwise read out of bounds, or as something else, also where no
    gradient is asked for. Autograd never calls them so; on the CPU PyTorch's operators compute."""
    overload = getattr(torch.ops.fused_layernorm, operator).default
    given = right_arguments(overload, "cuda")
    overload(*given.values())
    given |= numerics.made({what: value}, "cuda")
    for needs in (True, False) if value is not None else (True,):
        asked = dict.fromkeys((name for name in given if name.startswith("needs_")), needs)
        with pytest.raises((RuntimeError, ValueError), match=re.escape(sentence)):
            overload(*{**given, **asked}.values())


@pytest.mark.cpu_operators
@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool])
@pytest.mark.parametrize(("operator", "what"), [
    *(("layer_norm_backward", what) for what in ("dy", "x", "rstd", "weight")),
    *(("add_ada_layer_norm_backward", what) for what in ("scale", "gate", "input")),
    ("gate_backward", "gate"), ("qk_norm_rope_backward", "dq_out"),
    *(("qkv_norm_rope_backward", what) for what in ("dv", "qkv")),
])  # fmt: skip
def test_backward_operators_refuse_other_dtypes(operator, what, dtype):
    overload = getattr(torch.ops.fused_layernorm, operator).default
    given = right_arguments(overload, "cpu")
    given[what] = given[what].to(dtype)
    sentence = f"expected {what} of dtype {FLOATS}, got {str(dtype).removeprefix('torch.')}"
    with says(NotImplementedError, sentence):
        overload(*given.values())


NO_MEMORY = ("CUDA out of memory: fused_layernorm could not allocate 1.0 MiB on cuda:0, where 0.5 "
             "MiB are free")  # fmt: skip


@pytest.mark.cpu_operators
@pytest.mark.parametrize("message", [NO_MEMORY, "another failure"], ids=["", "another"])
@pytest.mark.parametrize("add", [False, True])
def test_a_failed_allocation_is_out_of_memory(device, monkeypatch, add, message):
    """C++ under the stable ABI can only raise a RuntimeError, which becomes an OutOfMemoryError.
    An operator's other failures are raised unchanged."""
    function: Any = add_layer_norm if add else layer_norm
    failing = unittest.mock.Mock(side_effect=RuntimeError(message))
    monkeypatch.setattr(FORWARD[add], "call", failing)
    x = torch.ones(4, 8, device=device)
    with pytest.raises(RuntimeError) as caught:
        function(*(x, x)[: 1 + add], normalized_shape=(8,), activation="relu")
    assert type(caught.value) is (torch.OutOfMemoryError if message == NO_MEMORY else RuntimeError)
    assert str(caught.value) == message


@pytest.mark.cpu_operators
@pytest.mark.parametrize("message", [NO_MEMORY, "another failure"], ids=["", "another"])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_failed_allocation_in_backward(device, add, create_graph, message):
    x = torch.ones(4, 8, device=device, requires_grad=True)
    out = add_layer_norm(x, x, normalized_shape=8)[0] if add else layer_norm(x, normalized_shape=8)
    failing = unittest.mock.Mock(side_effect=RuntimeError(message))
    with torch.library._scoped_library("fused_layernorm", "IMPL") as library:
        library.impl("layer_norm_backward", failing, device.upper())
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
@pytest.mark.parametrize("add", [False, True])
def test_out_of_memory_in_backward_on_cuda(one_gibibyte_left, add, create_graph):
    x = torch.empty(1 << 26, 8, device="cuda", requires_grad=True)  # 2 GiB
    shape: Any = {"normalized_shape": (8,)}
    y = add_layer_norm(x, x.detach(), **shape)[0] if add else layer_norm(x, **shape)
    one_gibibyte_left()
    with pytest.raises(torch.OutOfMemoryError, match=OUT_OF_MEMORY):
        torch.autograd.grad(y, x, y.detach(), create_graph=create_graph)


def test_what_it_cannot_run_with_is_named(tmp_path):
    """An old torch, an old Python, and a package without its binary, in one process."""
    package = Path(fl.__file__).parent
    without = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(package, tmp_path / package.name, ignore=without)
    source = """
        import sys
        sys.path.insert(0, FOLDER)
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
    binary, torch_, python = run(source, FOLDER=str(tmp_path))[0].splitlines()
    assert binary.startswith("fused_layernorm's binary does not load")
    assert "Install the package" in binary
    assert torch_.startswith("fused_layernorm needs torch >= 2.10; this is 2.9.1+cpu")
    assert python.startswith("fused_layernorm needs Python >= 3.10; this is 3.9.1")
