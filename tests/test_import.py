# SPDX-License-Identifier: Apache-2.0
"""`import fused_layernorm` changes no result and no error of PyTorch's own norms."""

import functools
import json

import pytest
from processes import run

from fused_layernorm.ops import autograd_library

# Calls of PyTorch's norms, most of them invalid, in every state in which our kernels at its keys
# could meet them. It prints what each gives: the sum of the result, or the error.
PROGRAM = """
import contextlib, json, warnings
import torch
from torch import nn
from torch.nn import functional as F
device, imports = DEVICE, IMPORTS
warnings.simplefilter("ignore")
if imports != "without":
    import fused_layernorm.override
if imports == "registered":  # what an override leaves behind, which the import does on CUDA
    with fused_layernorm.override._override(device.upper()):
        pass
torch.manual_seed(0)
ten = torch.ops.aten
x = torch.randn(2, 8, 4).to(device)
w, b = torch.rand(8).to(device), torch.rand(8).to(device)
v = torch.rand(4).to(device)
COUNTS = [4, 1, 0, -1, -4, -8, 3, 16, 2**31, -2**31, 2**62, 2**62 + 4, -2**62, -2**63, 2.0, "4"]
SHAPES = [(4,), (8, 4), (), (3,), (-4,), (0,), (4, -1), (4, -19534), (-19534,), (4, 2**62), -4, 2.0]
FLAWS = {"none": lambda t: t, "short": lambda t: t[1:], "float64": torch.Tensor.double,
         "integers": torch.Tensor.long, "complex": lambda t: t.to(torch.complex64),
         "nothing": lambda t: None, "number": lambda t: 1.0, "half": torch.Tensor.half,
         "meta": lambda t: t.to("meta"), "sparse": torch.Tensor.to_sparse}

def of_groups(x, n, w=None, b=None):
    N, C = (*getattr(x, "shape", ()), 1, 1)[:2]
    return [
        lambda: F.group_norm(x, n, w, b), lambda: torch.group_norm(x, n, w, b),
        lambda: nn.GroupNorm(n, 8, device=device)(x),
        lambda: ten.group_norm(x, n, w, b),
        lambda: torch.native_group_norm(x, w, b, N, C, 4, n, 1e-5)[0],
        lambda: ten.native_group_norm(x, w, b, N, C, 4, n, 1e-5)[0],
    ]

def of_rows(x, shape, w=None, b=None):
    return [
        lambda: F.layer_norm(x, shape, w, b), lambda: torch.layer_norm(x, shape, w, b),
        lambda: nn.LayerNorm(shape, device=device)(x),
        lambda: torch.native_layer_norm(x, shape, w, b, 1e-5)[0],
        lambda: ten.native_layer_norm(x, shape, w, b, 1e-5)[0],
        lambda: F.rms_norm(x, shape, w), lambda: torch.rms_norm(x, shape, w),
        lambda: nn.RMSNorm(shape, device=device)(x),
        lambda: torch._fused_rms_norm(x, shape, w, 1e-5)[0],
    ]

calls = {}
def note(name, found):
    calls.update({f"{name} {i}": call for i, call in enumerate(found)})
for n in COUNTS:
    note(f"groups {n}", of_groups(x, n, w, b))
for shape in SHAPES:
    note(f"shape {shape}", of_rows(x, shape, *((v, v) if shape == (4,) else ())))
for flaw, change in FLAWS.items():
    note(f"x {flaw}", [*of_groups(change(x), 4, w, b), *of_rows(change(x), (4,), v, v)])
    note(f"w {flaw}", [*of_groups(x, 4, change(w), b), *of_rows(x, (4,), change(v), v)])
    note(f"b {flaw}", [*of_groups(x, 4, w, change(b)), *of_rows(x, (4,), v, change(v))])
note("one value", [*of_groups(x[:1, :, :1], 8), *of_rows(x[:1, :1, :1], (1,))])
note("eps", [lambda: F.group_norm(x, 4, eps=float("nan")),
             lambda: F.layer_norm(x, (4,), eps=float("nan")),
             lambda: F.layer_norm(x, (4,), eps="1")])

STATES = {
    "plain": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast(device, torch.bfloat16),
}
seen = {}
for state, enter in STATES.items():
    for name, call in calls.items():
        with enter():
            try:
                y = call()
                found = [str(y.dtype), [*y.shape], y.double().nansum().item() if y.numel() else 0]
            except Exception as error:
                found = [type(error).__name__, str(error)]
        seen[f"{state}: {name}"] = found
print(json.dumps(seen))
"""


@functools.cache
def seen(device, imports):
    return json.loads(run(PROGRAM, DEVICE=device, IMPORTS=imports)[0])


@pytest.mark.parametrize("imports", ["with", "registered"])
def test_changes_nothing_of_pytorchs_norms(device, imports):
    if imports == "registered" and not autograd_library.active:
        pytest.skip("autograd is in Python")
    expected = seen(device, "without")
    assert seen(device, imports) == expected
    refused = [name for name, found in expected.items() if len(found) == 2]
    assert {"plain: groups -4 0", "inference: shape (4, -19534) 0"} < {*refused}
    assert 300 < len(refused) < len(expected) - 100
