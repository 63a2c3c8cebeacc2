# SPDX-License-Identifier: Apache-2.0
"""Inputs for a case, and this package's operators called on them."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from benchmarks import timing
from benchmarks.cases import Case
from benchmarks.families import EPS, HEADS, IMAGE, SAMPLES, Tensors, to_nchw
from benchmarks.timing import Call

# The values of the operators' arguments that are no tensors, where a family has no others.
OPTIONS = {
    "normalized_ndim": 1, "eps": EPS, "activation": None, "scale": 1.0, "out_dtype": None,
    "statistic": "layer", "weight_offset": 0.0, "round_before_weight": False,
    "output_scale": 1.0, "num_groups": 1, "keeps_order": False, "rotary_dim": 0, "seq_dim": 1,
    "interleaved": False, "inverse": False, "gate_first": False, "gate_activation": "silu",
    "group_size": 0, "by_head": False,
}  # fmt: skip


def make_inputs(case: Case, limit: int | None = None) -> list[Tensors]:
    """Distinct random inputs for a case, together larger than L2, or `limit` of them.

    Each is the tensors of its family's forward call, by name, and in backward the gradients of the
    outputs: dy, and dresidual of a sum, or dq_out, dk_out and dv. weight, bias, cos and sin are
    shared, as between the calls of a real model. shift, scale and gate are views of one tensor of
    six, as diffusion transformers cut them out of one layer's output.
    """
    shared = _shared(case)
    return [{**_own(case), **shared} for _ in range(limit or timing.input_count(case.bytes))]


def _randn(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=timing.DEVICE, dtype=dtype)


def _shared(case: Case) -> Tensors:
    found: Tensors = {}
    for name in case.family.inputs:
        if name.endswith("weight"):
            weight = torch.rand(case.param_shape, device=timing.DEVICE) + 0.5
            found[name] = weight.to(case.torch_weight_dtype)
        elif name == "bias":
            found[name] = _randn(case.param_shape, case.torch_weight_dtype)
    if "cos" in case.family.inputs:  # of x's dtype and of all columns, as transformers has them
        angle = _randn((case.shape[1], case.cols // 2), torch.float32).repeat(1, 2)
        found |= {"cos": angle.cos().to(case.torch_dtype), "sin": angle.sin().to(case.torch_dtype)}
    return found


def _own(case: Case) -> Tensors:
    family, shape, dtype = case.family, case.shape, case.torch_dtype
    found: Tensors = {}
    if "qkv" in family.inputs:
        found["qkv"] = _randn(shape, dtype).flatten(2, 3)
    elif family.layout == HEADS:
        found["q"], found["k"], _ = _randn(shape, dtype).unbind(2)
    elif family.layout == IMAGE and family.groups is None:
        found["x"] = _randn(case.sizes, dtype).permute(0, 2, 3, 1)
    else:
        found["x"] = _in_order(case, _randn(shape, dtype))
    if family.layout == SAMPLES:
        *groups, cols = case.modulation_shape
        six = _randn((*groups, 6 * cols), case.torch_modulation_dtype).chunk(6, dim=-1)
        found |= zip(("shift", "scale", "gate")[: 2 + family.residual], six, strict=False)
    found |= {name: _randn(shape, dtype) for name in ("residual", "gate")
              if name in family.inputs and name not in found}  # fmt: skip
    if case.backward:
        for name, dy in (("x", "dy"), ("q", "dq_out"), ("k", "dk_out")):
            if name in found:
                found[dy] = _in_order(case, _randn(found[name].shape, case.torch_out_dtype))
        if "qkv" in found:
            found |= {dy: _randn((*shape[:2], *shape[3:]), dtype)
                      for dy in ("dq_out", "dk_out", "dv")}  # fmt: skip
        if family.residual:
            found["dresidual"] = _randn(shape, dtype)
    return found


def _in_order(case: Case, y: Tensor) -> Tensor:
    """A tensor in the order of memory of y, and of the x of groups."""
    family = case.family
    if family.layout != IMAGE or family.nhwc == (family.groups is None):
        return y
    return to_nchw(y) if family.groups is None else y.contiguous(memory_format=torch.channels_last)


def package() -> Any:
    """fused_layernorm, which is imported where it is used alone: `compare` does without it."""
    return importlib.import_module("fused_layernorm")


def require_kernels() -> str:
    """Ends the program if the kernels cannot run here; returns what the binary was built for."""
    package()  # registers the operators
    built = str(torch.ops.fused_layernorm._build_info())
    if not torch.cuda.is_available() or built == "cpu only":
        found = f"cuda.is_available() {torch.cuda.is_available()}, {built!r}"
        raise SystemExit(f"the benchmarks need a CUDA device and the kernels, got {found}")
    return built


def missing_operator(
    case: Case, *, statistics: bool = False, namespace: str = "fused_layernorm"
) -> str | None:
    """The case's operator if the loaded library has no kernel for it here, else None."""
    name = case.family.operators[case.backward] + "_forward" * statistics
    has_kernel = hasattr(getattr(torch.ops, namespace), name) and (
        torch._C._dispatch_has_computed_kernel_for_dispatch_key(
            f"{namespace}::{name}", timing.DEVICE.upper()))  # fmt: skip
    return None if has_kernel else name


def _arguments(case: Case, overload: OpOverload, tensors: Tensors) -> dict[str, Any]:
    """An operator's arguments by name: its tensors, its options, and which gradients it gives. What
    an older build's operator lacks is left out."""
    family = case.family
    options = {
        **OPTIONS, "activation": family.activation, "scale": family.scale,
        "out_dtype": None if case.out_dtype is None else case.torch_out_dtype,
        "num_groups": case.groups or 1, "output_scale": family.scale,
        "rotary_dim": case.cols if "cos" in family.inputs else 0, "num_kv_heads": case.shape[-2],
        **dict(family.options),
    }  # fmt: skip
    gradients = {*family.gradients, *({"input"} if family.layout == SAMPLES else ())}
    if case.is_dshift_dy:
        gradients -= {"shift"}
    if "qkv" in tensors:
        options |= {"size": tensors["qkv"].shape, "stride": tensors["qkv"].stride()}
    found: dict[str, Any] = {}
    for argument in overload._schema.arguments:
        name = argument.name
        if "Tensor" in str(argument.type):
            found[name] = tensors.get(name)
        elif name.startswith("needs_d"):
            wanted = name.removeprefix("needs_d")
            found[name] = any(gradient.endswith(wanted) for gradient in gradients)
        elif name in options or not argument.has_default_value():
            found[name] = options[name]
    return found


def ours(
    case: Case, t: Tensors, *, statistics: bool = False, namespace: str = "fused_layernorm"
) -> Call:
    """A call of this package's operator on one input; forward with mean and rstd if `statistics`,
    backward with the gradients of its family. The operators must be registered, by importing the
    package or by loading the library alone."""
    ops, family = getattr(torch.ops, namespace), case.family
    forward, backward = family.operators
    tensors = {**t, "input": t["x"]} if "x" in t else t
    if not case.backward:
        overload = getattr(ops, forward + ("_forward" if statistics else "")).default
        arguments = _arguments(case, overload, tensors)
        return lambda: overload(**arguments)
    if "x" in t:  # what forward saves
        overload = getattr(ops, f"{forward}_forward").default
        _, *total, mean, rstd = overload(**_arguments(case, overload, tensors))
        tensors = {**tensors, "x": total[0] if total else t["x"], "mean": mean, "rstd": rstd}
    overload = getattr(ops, backward).default
    arguments = _arguments(case, overload, tensors)
    if family.groups is not None:  # it gives those of a modulation, too, which nobody asks for
        wanted = [value for name, value in arguments.items() if name.startswith("needs_d")]
        return lambda: tuple(itertools.compress(overload(**arguments), wanted))
    names = family.gradients
    if not case.is_dshift_dy:
        return lambda: overload(**arguments)[: len(names)]
    return lambda: tuple(t["dy"] if name == "shift" else gradient for name, gradient
                         in zip(names, overload(**arguments), strict=False))  # fmt: skip
