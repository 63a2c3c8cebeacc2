# SPDX-License-Identifier: Apache-2.0
"""swap_norms and swap_rms_norm: a swapped RMSNorm rounds where its class rounds.

Every source that swap/rms.py knows is compared with the class's own forward, in each mixture of
dtypes. On the CPU the marker cpu_operators makes the swapped modules call the operators; without it
they call their class's own forward there.
"""

import copy
import functools
import importlib
import inspect
from pathlib import Path
from typing import Any

import libraries
import pytest
import torch
import torch.nn.functional as F
from libraries import class_of
from swaps import (
    check_compiler,
    check_swap_and_unswap,
    copies,
    digest,
    fused,
    operators_of,
    results,
    swapped,
)
from tiny_transformers import GemmaHere, WrittenHere
from torch import nn

from fused_layernorm import (
    FusedLayerNorm,
    FusedRMSNorm,
    is_fused,
    register_swap,
    rms_norm,
    swap_layer_norm,
    swap_norms,
    swap_rms_norm,
    unswap_layer_norm,
    unswap_norms,
    unswap_rms_norm,
)
from fused_layernorm.swap import registry
from fused_layernorm.swap import rms as swap_rms

T, D = "transformers.models.", "diffusers.models."
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SIZE = 256

# id: (module, class, arguments). Each source that is known has one line or more.
CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": (T + "llama.modeling_llama", "LlamaRMSNorm", {}),
    "gemma": (T + "gemma.modeling_gemma", "GemmaRMSNorm", {}),
    "flex_olmo": (T + "flex_olmo.modeling_flex_olmo", "FlexOlmoRMSNorm", {"eps": 0.1}),
    "gemma3n": (T + "gemma3n.modeling_gemma3n", "Gemma3nRMSNorm", {}),
    "gemma3n_plain": (T + "gemma3n.modeling_gemma3n", "Gemma3nRMSNorm", {"with_scale": False}),
    "qwen3_next_gated": (T + "qwen3_next.modeling_qwen3_next", "Qwen3NextRMSNormGated", {}),
    "kimi_gated": (T + "kimi_linear.modeling_kimi_linear", "KimiLinearRMSNormGated", {}),
    "mamba2_gated": (T + "mamba2.modeling_mamba2", "MambaRMSNormGated", {"group_size": 32}),
    "mamba2_whole": (T + "mamba2.modeling_mamba2", "MambaRMSNormGated", {"group_size": SIZE}),
    "falcon_h1": (T + "falcon_h1.modeling_falcon_h1", "FalconH1RMSNormGated", {"n_groups": 4}),
    "falcon_h1_gate_first": (T + "falcon_h1.modeling_falcon_h1", "FalconH1RMSNormGated",
        {"norm_before_gate": False}),
    "nanochat": (T + "nanochat.modeling_nanochat", "NanoChatRMSNorm", {}),
    "llama4_l2": (T + "llama4.modeling_llama4", "Llama4TextL2Norm", {}),
    "helium": (T + "helium.modeling_helium", "HeliumRMSNorm", {}),
    "inkling2": (T + "inkling2.modeling_inkling2", "Inkling2UnweightedRMSNorm", {}),
    "moshi": (T + "moshi.modeling_moshi", "MoshiRMSNorm", {"eps": 0.1}),
    "t5": (T + "t5.modeling_t5", "T5LayerNorm", {}),
    "idefics": (T + "idefics.modeling_idefics", "IdeficsRMSNorm", {"eps": 0.1}),
    "llama4": (T + "llama4.modeling_llama4", "Llama4TextRMSNorm", {}),
    "muse_spark": (T + "muse_spark.modeling_muse_spark", "MuseSparkTextCenteredRMSNorm", {}),
    "qwen4_exp": (T + "qwen4_exp.modeling_qwen4_exp", "Qwen4ExpTextRMSNorm", {}),
    "qwen4_groups": (T + "qwen4_exp.modeling_qwen4_exp", "Qwen4ExpTextRMSNorm", {"group_size": 32}),
    "cpmant": (T + "cpmant.modeling_cpmant", "CpmAntLayerNorm", {}),
    "imagegpt": (T + "imagegpt.modeling_imagegpt", "ImageGPTLayerNorm", {}),
    "diffusers": (D + "normalization", "RMSNorm", {"eps": 1e-6}),
    "diffusers_bias": (D + "normalization", "RMSNorm", {"eps": 0.1, "bias": True}),
    "diffusers_plain": (D + "normalization", "RMSNorm", {"eps": 1e-6, "elementwise_affine": False}),
    "mochi": (D + "normalization", "MochiRMSNorm", {"eps": 1e-6}),
    "mochi_plain": (D + "normalization", "MochiRMSNorm",
        {"eps": 1e-6, "elementwise_affine": False}),
    "cosmos3": (D + "transformers.transformer_cosmos3", "Cosmos3NemotronRMSNorm", {"eps": 1e-6}),
    "krea2": (D + "transformers.transformer_krea2", "Krea2RMSNorm", {}),
    "qwenimage21": (D + "transformers.transformer_qwenimage21", "QwenImage21ZeroCenterRMSNorm", {}),
    "stable_audio3": (D + "transformers.transformer_stable_audio3", "StableAudio3RMSNorm",
        {"eps": 0.1}),
    "stable_audio3_narrow": (D + "transformers.transformer_stable_audio3", "StableAudio3RMSNorm",
        {"force_fp32": False}),
    "kolors": ("diffusers.pipelines.kolors.text_encoder", "RMSNorm", {}),
    "timm": ("timm.layers.norm", "RmsNorm", {"eps": 0.1}),
    "timm_plain": ("timm.layers.norm", "RmsNorm", {"affine": False}),
    "timm_act": ("timm.layers.norm_act", "RmsNormAct", {"act_layer": nn.GELU}),
    "timm_act_fp32": ("timm.layers.norm_act", "RmsNormActFp32", {}),
    "timm_fp32": ("timm.layers.norm", "RmsNormFp32", {}),
    # Classes of older versions, copied below.
    "diffusers_033": (__name__, "RMSNorm033", {"eps": 0.1}),
    "diffusers_030": (__name__, "RMSNorm030", {"eps": 0.1}),
    "mamba2_gated_whole": (__name__, "MambaRMSNormGated", {}),
    "torch": ("torch.nn", "RMSNorm", {"eps": 1e-6}),
    "torch_eps": ("torch.nn", "RMSNorm", {}),
    "torch_plain": ("torch.nn", "RMSNorm", {"elementwise_affine": False}),
}  # fmt: skip

ORDERS = [torch.contiguous_format, torch.channels_last]
MIXTURES = [(BF16, BF16), (BF16, F32), (F16, F16), (F16, F32), (F32, F32), (F32, BF16)]
COMPILED = ["llama", "gemma", "t5", "diffusers", "timm", "torch"]


def make(cls, **options):
    """A module of the class, of SIZE if it has a size."""
    first = next(iter(inspect.signature(cls).parameters))
    if first == "config":
        config = type("Config", (), {"eps": 1e-6, "hidden_size": SIZE})
        return cls(config)
    return cls(**options) if first == "eps" else cls(SIZE, **options)


@pytest.fixture(params=CLASSES)
def norm(request, device):
    """A module whose parameters show whether they are used."""
    module, name, options = CLASSES[request.param]
    try:
        made = make(class_of(module, name), **options).to(device)
    except TypeError as error:  # another release of the library, with other arguments
        pytest.skip(str(error))
    for parameter in made.parameters():
        nn.init.normal_(parameter, 0.5, 1.0)
    return made


def arguments_of(norm, x):
    """x, and a gate for a class that takes one."""
    takes_gate = "gate" in inspect.signature(norm.forward).parameters
    return (x, torch.randn_like(x)) if takes_gate else (x,)


def ulps(one, other):
    """By how many numbers of their dtype, of half precision, the elements are apart."""
    places = []
    for tensor in (one, other):
        bits = tensor.contiguous().view(torch.int16).int()
        places.append(torch.where(bits < 0, -(bits & 0x7FFF), bits))
    return (places[0] - places[1]).abs()


def assert_same(y, expected, x_dtype=F32):
    """At most one number apart in half precision, and equal in 99.9% of the elements.

    Where xhat lies between two numbers of half precision, the last bit of rstd decides to which one
    it is rounded. What is multiplied with it may double the distance.
    """
    assert y.dtype == expected.dtype
    assert y.shape == expected.shape
    if y.dtype in (BF16, F16):
        apart = ulps(y, expected)
        assert apart.max() <= 2
        assert (apart <= 1).float().mean() >= 0.9998
        assert (apart == 0).float().mean() >= 0.999
    elif x_dtype == F32:
        torch.testing.assert_close(y, expected, rtol=3e-6, atol=3e-6)
    else:
        alike = torch.isclose(y, expected, rtol=3e-6, atol=3e-6)
        assert alike.float().mean() >= 0.999
        torch.testing.assert_close(y, expected, rtol=2**-7, atol=3e-6)


def assert_same_gradients(grads, expected, coarsest):
    """The class rounds between the steps of its backward, too, and the fused one only once."""
    # A float32 sum over rows or columns depends on its order, too.
    tolerance = (16 if coarsest == F32 else 4) * torch.finfo(coarsest).eps
    for found, grad in zip(grads, expected, strict=True):
        assert found.dtype == grad.dtype
        scale = float(grad.abs().sum() and grad.abs().max()) + 1
        torch.testing.assert_close(found / scale, grad / scale, rtol=tolerance, atol=tolerance)


def compare(norm, x):
    inputs = arguments_of(norm, x)
    expected, expected_grads = results(norm, *inputs)
    y, grads = results(swapped(norm), *inputs)
    assert_same(y, expected, x.dtype)
    if "rms_norm" not in type(norm).forward.__code__.co_names:  # else y's order is F.rms_norm's
        assert (y.stride(), grads[0].stride()) == (expected.stride(), expected_grads[0].stride())
    parameter = next(norm.parameters(), x).dtype
    coarsest = max((x.dtype, parameter), key=lambda dtype: torch.finfo(dtype).eps)
    assert_same_gradients(grads, expected_grads, coarsest)


@pytest.mark.cpu_operators
@pytest.mark.parametrize(("x_dtype", "weight_dtype"), MIXTURES)
def test_same_results(norm, x_dtype, weight_dtype, device):
    x = (torch.randn(48, SIZE, device=device) * 2 + 1).to(x_dtype)
    compare(norm.to(weight_dtype), x)


@pytest.mark.cpu_operators
def test_shapes_and_strides(norm, device):
    x = torch.randn(2, 3, 4, SIZE, device=device)
    image = torch.randn(2, SIZE, 3, 4, device=device)  # of which the norm is over the channels
    channels = [image.contiguous(memory_format=order).movedim(1, -1) for order in ORDERS]
    for strided in (x, x.transpose(1, 2), x[:, ::2], x[0, 0, 0], x[:0], *channels):
        if hasattr(norm, "n_groups"):  # FalconH1 takes two or three dimensions
            if strided.dim() == 4 and strided.numel() > 0:
                compare(norm, strided[0])
        elif strided.numel() > 0 or getattr(norm, "group_size", None) is None:
            compare(norm, strided)


@pytest.mark.parametrize(("x_dtype", "weight_dtype"), MIXTURES)
def test_the_cpu_keeps_the_classes_own_forward(norm, x_dtype, weight_dtype):
    norm = norm.cpu().to(weight_dtype)
    inputs = arguments_of(norm, torch.randn(8, SIZE).to(x_dtype))
    expected, y = norm(*inputs), swapped(norm)(*inputs)
    if type(norm) is nn.RMSNorm:
        assert_same(y, expected)
    else:
        assert torch.equal(y, expected)
        assert y.dtype == expected.dtype


@pytest.mark.cpu_operators
@pytest.mark.parametrize(("x_dtype", "weight_dtype"), [(BF16, BF16), (BF16, F32), (F32, F32)])
def test_autocast(norm, x_dtype, weight_dtype, device):
    norm = norm.to(weight_dtype)
    inputs = arguments_of(norm, torch.randn(48, SIZE, device=device).to(x_dtype))
    with torch.autocast(device, BF16):
        expected, y = norm(*inputs), swapped(norm)(*inputs)
    if type(norm) is nn.RMSNorm:
        # FusedRMSNorm has the dtype of F.rms_norm under autocast, which depends on the release.
        assert y.dtype == expected.dtype
    else:
        assert_same(y, expected)


@pytest.mark.cpu_operators
def test_the_operators_are_called(norm, device):
    """Otherwise the comparisons would compare the class with itself."""
    rounds_everywhere = type(norm).__name__ == "ImageGPTLayerNorm"
    x_dtype = F32 if rounds_everywhere or not getattr(norm, "force_fp32", True) else BF16
    inputs = arguments_of(norm.to(x_dtype), torch.randn(8, SIZE, device=device).to(x_dtype))
    new = swapped(norm)
    assert operators_of(lambda: new(*inputs))


@pytest.mark.cpu_operators
def test_what_the_kernels_do_not_take_goes_to_the_class(norm, device):
    class Own(torch.Tensor):
        pass

    new = swapped(norm)
    x = torch.randn(4, SIZE, device=device)
    for other in (x.double(), x.as_subclass(Own)):
        inputs = arguments_of(norm, other)
        expected, y = norm(*inputs), new(*inputs)
        assert type(y) is type(expected)
        assert y.dtype == expected.dtype
        torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    if any(True for _ in norm.parameters()):
        narrow = arguments_of(norm, torch.randn(4, 3, device=device))
        for module in (norm, new):
            with pytest.raises((RuntimeError, AssertionError)):
                module(*narrow)


def test_swap_and_unswap(norm):
    check_swap_and_unswap(norm, swap_norms, unswap_norms, "FusedRMSNorm")
    new = swapped(norm)
    assert is_fused(unswap_layer_norm(new))
    assert type(unswap_rms_norm(new)) is type(norm)


@pytest.mark.cpu_operators
def test_copies(norm, device):
    new = swapped(norm)
    inputs = arguments_of(norm, torch.randn(4, SIZE, device=device))
    expected = new(*inputs)
    for other in copies(new):
        assert torch.equal(other(*inputs), expected)
        assert type(unswap_norms(other)) is type(norm)


@pytest.mark.parametrize("norm", COMPILED, indirect=True)
@pytest.mark.cpu_operators
def test_compiled(norm, device):
    x = torch.randn(4, SIZE, device=device).to(BF16)
    torch._dynamo.reset()
    new = swapped(norm.to(BF16))
    compiled = torch.compile(new, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_same(compiled(x), new(x))


@pytest.mark.parametrize("compiler", [torch.fx.symbolic_trace, torch.jit.script])
def test_traced_and_scripted(norm, compiler, device):
    check_compiler(norm, compiler, *arguments_of(norm, torch.randn(4, SIZE, device=device)))


def test_every_known_source_is_tested():
    """Skipped where an installed version lacks one of the classes above."""
    of_any_module = [case for case in CLASSES.values() if not case[0].startswith("timm.")]
    found = {digest(class_of(module, name)) for module, name, _ in of_any_module}
    assert set(swap_rms.SOURCES) <= found


# ---- The RMSNorm classes of transformers, as they were listed for one release.

LIST = Path(__file__).parent / "data" / "transformers_rms_norms.txt"


def test_the_classes_of_transformers():
    """At least 90% of those that a size makes are swapped, and compute what they did."""
    libraries.get("transformers")
    made, left = 0, []
    x = torch.randn(4, SIZE)
    for line in LIST.read_text().splitlines():
        module, name = line.split()
        try:
            cls = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
        first = next(iter(inspect.signature(cls).parameters), "")
        try:
            norm = cls() if first in ("", "eps") else cls(SIZE)
        except (AttributeError, TypeError):  # it is made of a configuration, or of more
            continue
        made += 1
        for parameter in norm.parameters():
            nn.init.normal_(parameter)
        model = nn.Sequential(copy.deepcopy(norm), nn.RMSNorm(SIZE))
        swap_rms_norm(model)
        if not is_fused(model[0]):
            left.append(name)
            continue
        inputs = arguments_of(norm, x)
        assert torch.equal(model[0](*inputs), norm(*inputs))
    assert made >= 150
    assert len(left) <= 0.1 * made, left


# ---- Which modules are swapped.


class OwnName(nn.RMSNorm):
    """A subclass that adds nothing but a name."""


class OwnForward(nn.RMSNorm):
    def forward(self, x):
        return 2 * super().forward(x)


class Inherits(WrittenHere):
    pass


class OverridesNorm(GemmaHere):
    """Its forward is GemmaHere's, and what that calls is not."""

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2 * self.eps)


class OtherRMSNorm(nn.Module):
    def forward(self, x):
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LayerNorm(8)
        self.rms = nn.RMSNorm(8)
        self.own_name = OwnName(8)
        self.own_forward = OwnForward(8)
        self.written_here = WrittenHere(8)
        self.inherits = Inherits(8)
        self.gemma = GemmaHere(8)
        self.overrides = OverridesNorm(8)
        self.other = OtherRMSNorm()


KNOWN = ["rms", "written_here", "inherits", "gemma"]


def test_the_kinds():
    model = Model()
    assert fused(swap_rms_norm(model)) == KNOWN
    assert type(model.rms) is FusedRMSNorm
    assert fused(swap_layer_norm(model)) == ["layer", *KNOWN]
    assert fused(unswap_rms_norm(model)) == ["layer"]
    assert fused(swap_norms(model)) == ["layer", *KNOWN]
    assert type(model.layer) is FusedLayerNorm
    assert fused(unswap_layer_norm(model)) == KNOWN
    assert fused(unswap_norms(swap_norms(model))) == []
    assert [*map(type, model.children())] == [*map(type, Model().children())]


def test_predicate():
    asked = []

    def predicate(name, module):
        asked.append(name)
        return name != "gemma"

    model = Model()
    swap_norms(model, predicate=predicate)
    assert sorted(asked) == sorted(["layer", "own_name", "own_forward", *KNOWN])
    assert fused(model) == ["layer", "rms", "own_name", "own_forward", "written_here", "inherits"]
    x = torch.randn(3, 8)
    for norm in (model.own_name, torch.fx.symbolic_trace(model.own_name)):
        torch.testing.assert_close(norm(x), F.rms_norm(x, (8,), model.own_name.weight))
    assert repr(model.own_name).startswith("FusedRMSNorm[OwnName](")
    unswap_norms(model)
    assert type(model.own_name) is OwnName


def test_a_norm_that_was_given_a_bias_is_left():
    norm: Any = nn.RMSNorm(8)
    norm.bias = nn.Parameter(torch.ones(8))
    model = nn.Sequential(norm, nn.RMSNorm(8))
    assert fused(swap_norms(model)) == ["1"]


def test_warnings():
    model = nn.Sequential(nn.LayerNorm(8))
    with pytest.warns(UserWarning, match="swap_rms_norm: nothing in .* it has no RMSNorm"):
        swap_rms_norm(model)
    with pytest.warns(UserWarning, match="swap_norms: nothing in .* it has no norm"):
        swap_norms(nn.Sequential(nn.Linear(2, 2)))
    swap_layer_norm(model)
    with pytest.warns(UserWarning, match="swap_rms_norm"):
        swap_rms_norm(model)


@pytest.mark.cpu_operators
def test_an_eps_that_the_operators_refuse(device):
    x = torch.randn(3, 8, device=device)
    for eps in (float("nan"), -0.1, 1, torch.tensor(0.1)):
        norm = WrittenHere(8, eps=eps).to(device)
        torch.testing.assert_close(swapped(norm)(x), norm(x), equal_nan=True)


@pytest.mark.cpu_operators
def test_traced_exported_and_transformed(device):
    norm = WrittenHere(8).to(device)
    new = swapped(norm)
    x = torch.randn(3, 4, 8, device=device)
    expected = norm(x)
    with torch.no_grad():
        torch.testing.assert_close(torch.jit.trace(new, x)(x), expected)
    program = torch.export.export(new, (x,), dynamic_shapes=({0: torch.export.Dim("n")},))
    assert "fused_layernorm" in str(program.graph)
    two = torch.cat([x, x])
    torch.testing.assert_close(program.module()(two), norm(two))
    torch.testing.assert_close(torch.func.vmap(new)(x), expected)
    gradient = torch.func.grad(lambda x: new(x).square().sum())(x)
    torch.testing.assert_close(gradient, torch.func.grad(lambda x: norm(x).square().sum())(x))


def own(self, hidden_states):
    return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def test_a_registered_class_comes_first(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    register_swap(WrittenHere, lambda module: own)
    for swap_it in (swap_layer_norm, swap_rms_norm, swap_norms):
        model: Any = nn.Sequential(WrittenHere(8))
        swap_it(model)
        assert type(model[0])._known.forward is own
        x = torch.randn(3, 8)
        torch.testing.assert_close(torch.jit.script(model)(x), model(x))
        assert type(unswap_norms(model)[0]) is WrittenHere


# ---- Classes of versions that are not installed, copied unchanged but for their names.

is_torch_npu_available = functools.partial(bool)


class RMSNorm030(nn.Module):
    def __init__(self, dim, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.eps)

        if self.weight is not None:
            # convert into half-precision if necessary
            if self.weight.dtype in [torch.float16, torch.bfloat16]:
                hidden_states = hidden_states.to(self.weight.dtype)
            hidden_states = hidden_states * self.weight
        else:
            hidden_states = hidden_states.to(input_dtype)

        return hidden_states


class RMSNorm033(RMSNorm030):
    def __init__(self, dim, eps: float):
        super().__init__(dim, eps)
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, hidden_states):
        if is_torch_npu_available():
            import torch_npu

            if self.weight is not None:  # noqa: SIM102
                # convert into half-precision if necessary
                if self.weight.dtype in [torch.float16, torch.bfloat16]:
                    hidden_states = hidden_states.to(self.weight.dtype)
            hidden_states = torch_npu.npu_rms_norm(hidden_states, self.weight, epsilon=self.eps)[0]
            if self.bias is not None:
                hidden_states = hidden_states + self.bias
        else:
            input_dtype = hidden_states.dtype
            variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
            hidden_states = hidden_states * torch.rsqrt(variance + self.eps)

            if self.weight is not None:
                # convert into half-precision if necessary
                if self.weight.dtype in [torch.float16, torch.bfloat16]:
                    hidden_states = hidden_states.to(self.weight.dtype)
                hidden_states = hidden_states * self.weight
                if self.bias is not None:
                    hidden_states = hidden_states + self.bias
            else:
                hidden_states = hidden_states.to(input_dtype)

        return hidden_states


class MambaRMSNormGated(WrittenHere):
    def forward(self, hidden_states, gate=None):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)

        if gate is not None:
            hidden_states = hidden_states * nn.functional.silu(gate.to(torch.float32))
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)

        return self.weight * hidden_states.to(input_dtype)
