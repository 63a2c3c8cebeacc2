# SPDX-License-Identifier: Apache-2.0
"""Every class of a norm that swap_norms knows, of each library: a swapped one gives what its class
gives, in each mixture of dtypes and each order of memory, forward and backward.

Without the operators, swapped RMSNorms call their class's own forward on the CPU. The tests of a
library that is not installed are skipped; classes of versions that cannot be installed beside
today's are written at the end of this file.
"""

import copy
import inspect
import itertools
import re
from typing import Any

import captured
import pytest
import swaps
import torch
import torch.nn.functional as F
from compiling import afresh, everywhere  # noqa: F401
from libraries import class_of
from swaps import assert_same_roundings, digest, operators_of, results, swapped
from tiny_transformers import WrittenHere
from torch import nn

import fused_layernorm as fl
from fused_layernorm import is_fused
from fused_layernorm.swap import registry

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SEQUENCE, HEADS, CHANNELS_FIRST, SEQUENCE_LAST = (3, 5, 8), (3, 5, 2, 8), (2, 8, 3, 5), (2, 8, 5)
SIZE = 256  # of RMSNorms

# ---- Each line: its name; the class (T. of transformers' models, D. of diffusers', `here.` below,
# ---- of an older version); but for RMSNorms the shape of x; and what the class is made
# ---- with, which RMSNorms get behind their size. Each source that is known has one line or more.

LAYERS = """
timm timm.layers.norm.LayerNorm SEQUENCE 8
timm_plain timm.layers.norm.LayerNorm SEQUENCE 8, affine=False
timm_eps timm.layers.norm.LayerNorm SEQUENCE 8, eps=0.1, bias=False
timm_fp32 timm.layers.norm.LayerNormFp32 SEQUENCE 8
timm_fp32_plain timm.layers.norm.LayerNormFp32 SEQUENCE 8, affine=False
timm_2d timm.layers.norm.LayerNorm2d CHANNELS_FIRST 8
timm_2d_plain timm.layers.norm.LayerNorm2d CHANNELS_FIRST 8, affine=False
timm_2d_fp32 timm.layers.norm.LayerNorm2dFp32 CHANNELS_FIRST 8, eps=0.1
timm_exp_2d timm.layers.norm.LayerNormExp2d CHANNELS_FIRST 8, eps=0.1
timm_act timm.layers.norm_act.LayerNormAct SEQUENCE 8
timm_act_fp32 timm.layers.norm_act.LayerNormActFp32 SEQUENCE 8
timm_act_2d timm.layers.norm_act.LayerNormAct2d CHANNELS_FIRST 8, act_layer=nn.GELU
timm_act_2d_fp32 timm.layers.norm_act.LayerNormAct2dFp32 CHANNELS_FIRST 8
timm_no_bias timm.models.metaformer.LayerNormNoBias SEQUENCE 8
timm_2d_no_bias timm.models.metaformer.LayerNorm2dNoBias CHANNELS_FIRST 8
torchvision_2d torchvision.models.convnext.LayerNorm2d CHANNELS_FIRST 8, eps=1e-6
diffusers_fp32 D.normalization.FP32LayerNorm SEQUENCE 8
diffusers_fp32_plain D.normalization.FP32LayerNorm SEQUENCE 8, elementwise_affine=False
diffusers_2d D.unets.unet_stable_cascade.SDCascadeLayerNorm CHANNELS_FIRST 8, 1e-5, False
convnext T.convnext.ConvNextLayerNorm SEQUENCE 8
convnext_2d T.convnext.ConvNextLayerNorm CHANNELS_FIRST 8, data_format='channels_first'
sam_2d T.sam.SamLayerNorm CHANNELS_FIRST 8, data_format='channels_first', eps=0.1
eomt T.eomt.EomtLayerNorm2d CHANNELS_FIRST 8
chameleon T.chameleon.ChameleonLayerNorm HEADS (2, 8)
cohere T.cohere.CohereLayerNorm SEQUENCE 8, eps=0.1
cohere_heads T.cohere.CohereLayerNorm HEADS (2, 8)
deberta T.deberta.DebertaLayerNorm SEQUENCE 8, eps=0.1
esmc T.esmc.EsmcLayerNorm SEQUENCE 8
esmfold T.esm.modeling_esmfold.EsmFoldLayerNorm SEQUENCE 8
esmfold2 T.esmfold2.EsmFold2LayerNorm SEQUENCE 8
nemotron T.nemotron.NemotronLayerNorm1P SEQUENCE 8
olmo T.olmo.OlmoLayerNorm SEQUENCE 8
squeezebert T.squeezebert.SqueezeBertLayerNorm SEQUENCE_LAST 8, eps=0.1
videoprism T.videoprism.VideoPrismLayerNorm SEQUENCE 8
vitdet T.vitdet.VitDetLayerNorm CHANNELS_FIRST 8, eps=0.1
bark here.BarkLayerNorm SEQUENCE 8
convnext_by_hand here.ConvNextLayerNorm SEQUENCE 8
convnext_by_hand_2d here.ConvNextLayerNorm CHANNELS_FIRST 8, data_format='channels_first'
"""
RMS = """
llama T.llama.LlamaRMSNorm
gemma T.gemma.GemmaRMSNorm
flex_olmo T.flex_olmo.FlexOlmoRMSNorm eps=0.1
gemma3n T.gemma3n.Gemma3nRMSNorm
gemma3n_plain T.gemma3n.Gemma3nRMSNorm with_scale=False
qwen3_next_gated T.qwen3_next.Qwen3NextRMSNormGated
qwen4_gated T.qwen4_exp.Qwen4ExpTextRMSNormGated activation='sigmoid'
kimi_gated T.kimi_linear.KimiLinearRMSNormGated
mamba2_gated T.mamba2.MambaRMSNormGated group_size=32
mamba2_whole T.mamba2.MambaRMSNormGated group_size=256
falcon_h1 T.falcon_h1.FalconH1RMSNormGated n_groups=4
falcon_h1_gate_first T.falcon_h1.FalconH1RMSNormGated norm_before_gate=False
nanochat T.nanochat.NanoChatRMSNorm
llama4_l2 T.llama4.Llama4TextL2Norm
helium T.helium.HeliumRMSNorm
inkling2 T.inkling2.Inkling2UnweightedRMSNorm
moshi T.moshi.MoshiRMSNorm eps=0.1
t5 T.t5.T5LayerNorm
idefics T.idefics.IdeficsRMSNorm eps=0.1
llama4 T.llama4.Llama4TextRMSNorm
muse_spark T.muse_spark.MuseSparkTextCenteredRMSNorm
qwen4_exp T.qwen4_exp.Qwen4ExpTextRMSNorm
qwen4_groups T.qwen4_exp.Qwen4ExpTextRMSNorm group_size=32
cpmant T.cpmant.CpmAntLayerNorm
imagegpt T.imagegpt.ImageGPTLayerNorm
diffusers D.normalization.RMSNorm eps=1e-6
diffusers_bias D.normalization.RMSNorm eps=0.1, bias=True
diffusers_plain D.normalization.RMSNorm eps=1e-6, elementwise_affine=False
mochi D.normalization.MochiRMSNorm eps=1e-6
mochi_plain D.normalization.MochiRMSNorm eps=1e-6, elementwise_affine=False
cosmos3 D.transformers.transformer_cosmos3.Cosmos3NemotronRMSNorm eps=1e-6
krea2 D.transformers.transformer_krea2.Krea2RMSNorm
qwenimage21 D.transformers.transformer_qwenimage21.QwenImage21ZeroCenterRMSNorm
stable_audio3 D.transformers.transformer_stable_audio3.StableAudio3RMSNorm eps=0.1
stable_audio3_narrow D.transformers.transformer_stable_audio3.StableAudio3RMSNorm force_fp32=False
kolors diffusers.pipelines.kolors.text_encoder.RMSNorm
timm timm.layers.norm.RmsNorm eps=0.1
timm_plain timm.layers.norm.RmsNorm affine=False
timm_act timm.layers.norm_act.RmsNormAct act_layer=nn.GELU
timm_act_fp32 timm.layers.norm_act.RmsNormActFp32
timm_fp32 timm.layers.norm.RmsNormFp32
diffusers_030 here.RMSNorm030 eps=0.1
mamba2_gated_whole here.MambaRMSNormGated
falcon_h1_squeezed here.FalconH1RMSNormGated
torch torch.nn.RMSNorm eps=1e-6
torch_eps torch.nn.RMSNorm
torch_plain torch.nn.RMSNorm elementwise_affine=False
"""
GROUPS = """
torch torch.nn.GroupNorm (2,8,5,3) 4, 8
plain torch.nn.GroupNorm (3,8,7) 1, 8, 0.001, False
two_dims torch.nn.GroupNorm (3,8) 2, 8
five_dims torch.nn.GroupNorm (2,8,2,3,4) 2, 8
instance_1d torch.nn.InstanceNorm1d (2,8,9) 8
instance_2d torch.nn.InstanceNorm2d (2,8,5,3) 8, 0.001, 0.1, True
instance_3d torch.nn.InstanceNorm3d (2,8,2,3,4) 8, 1e-05, 0.1, True
timm timm.layers.norm.GroupNorm (2,8,5,3) 8, 4
timm_1 timm.layers.norm.GroupNorm1 (2,8,5,3) 8
timm_no_bias timm.models.metaformer.GroupNorm1NoBias (2,8,5,3) 8
timm_act timm.layers.norm_act.GroupNormAct (2,8,5,3) 8, 4
timm_1_act timm.layers.norm_act.GroupNorm1Act (2,8,5,3) 8
bit T.bit.BitGroupNormActivation (2,8,5,3) Config, 8
poolformer T.poolformer.PoolFormerGroupNorm (2,8,5,3) 8
pe_audio T.pe_audio.PeAudioMaskedGroupNorm (2,8,9) 2, 8
"""
CHANNELS = """
wan D.autoencoders.autoencoder_kl_wan.WanRMS_norm (2,24,3,4,6) dim=24, images=False
wan_bias D.autoencoders.autoencoder_kl_wan.WanRMS_norm (2,24,4,6) dim=24, bias=True
kandinsky6 D.autoencoders.autoencoder_kandinsky6_sr.Kandinsky6VAERMSNorm (2,24,3,4,6) 24
ltx2 D.autoencoders.autoencoder_kl_ltx2.PerChannelRMSNorm (2,24,3,4,6)
timm timm.layers.norm.RmsNorm2d (2,24,4,6) channels=24
timm_fp32 timm.layers.norm.RmsNorm2dFp32 (2,24,4,6) channels=24
timm_act timm.layers.norm_act.RmsNormAct2d (2,24,4,6) num_channels=24
timm_act_fp32 timm.layers.norm_act.RmsNormAct2dFp32 (2,24,4,6) num_channels=24
"""


class Config:
    num_groups, hidden_act, eps, hidden_size = 4, "relu", 1e-6, SIZE


def rows_of(text, has_shape=True):
    """By name: the module and the name of the class, its arguments, and the shape of x."""
    rows = {}
    for line in text.strip().splitlines():
        name, path, *rest = line.split(" ", 2 + has_shape)
        library, _, path = path.partition(".")
        module, _, cls = path.rpartition(".")
        if library == "T":
            folder, _, file = module.partition(".")
            module = f"transformers.models.{folder}.{file or f'modeling_{folder}'}"
        elif library == "here":
            module = __name__
        else:
            module = f"{'diffusers.models' if library == 'D' else library}.{module}"
        shape = eval(rest.pop(0)) if has_shape else (48, SIZE)
        rows[name] = (module, cls, rest[0] if rest else "", shape)
    return rows


def make(kind, module, name, arguments, shape):
    cls = class_of(module, name)
    first = next(iter(inspect.signature(cls).parameters))
    if kind == "rms" and first != "eps":
        arguments = "Config" if first == "config" else f"SIZE, {arguments}"
    try:
        return eval(f"cls({arguments})", globals(), {"cls": cls}), shape
    except TypeError as error:  # another release of the library, with other arguments
        return pytest.skip(str(error))


# By kind: its lines; mean and deviation of parameters, which show whether they are used; the
# mixtures of dtypes of x and of parameters, also under autocast.
HALF = (F16, BF16)
KINDS: dict[str, tuple[Any, ...]] = {
    "layer": (rows_of(LAYERS), (1.0, 0.3),
              [*((t, t) for t in (F32, F64, *HALF)), *((t, F32) for t in HALF)],
              [*itertools.product((F32, BF16), repeat=2)]),
    "rms": (rows_of(RMS, has_shape=False), (0.5, 1.0),
            [(BF16, BF16), (BF16, F32), (F16, F16), (F16, F32), (F32, F32), (F32, BF16)],
            [(BF16, BF16), (BF16, F32), (F32, F32)]),
    "groups": (rows_of(GROUPS), (0.0, 1.0),
               [*((t, t) for t in (F32, F64, BF16, F16)), (BF16, F32)],
               [(F32, F32), (BF16, F32)]),
    "channels": (rows_of(CHANNELS), (0.0, 1.0), [(F32, F32), (BF16, BF16)], []),
}  # fmt: skip
IDS = [f"{kind}-{name}" for kind, (rows, *_) in KINDS.items() for name in rows]


@pytest.fixture(params=IDS)
def case(request, device):
    """(the kind, the module, the shape of its input)."""
    kind, name = request.param.split("-")
    rows, (mean, deviation), *_ = KINDS[kind]
    norm, shape = make(kind, *rows[name])
    for parameter in norm.to(device).parameters():
        nn.init.normal_(parameter, mean, deviation)
    return kind, norm, shape


def formats(kind, shape, dtype, device):
    """An x of each order of memory that the shape allows."""
    x = torch.randn(shape, device=device)
    x = (x if kind == "channels" else 2 * x + 1).to(dtype)
    yield x
    if kind == "rms":
        return
    if len(shape) > 3:
        last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
        yield x.to(memory_format=last)
        yield torch.cat([x, x], -1)[..., 1 : 1 + shape[-1]]
    if len(shape) > 2:
        yield x.transpose(1, 2).contiguous().transpose(1, 2)
    yield x.transpose(0, 1).contiguous().transpose(0, 1)


def gate_of(norm):
    """The parameter of a class that takes a gate."""
    return inspect.signature(norm.forward).parameters.get("gate")


def arguments_of(norm, x):
    """x, and for a class that takes one a gate, cut out of a projection as models make it."""
    if gate_of(norm) is None:
        return (x,)
    wide = torch.randn(*x.shape[:-1], 3 * x.shape[-1], device=x.device).to(x.dtype)
    return x, wide[..., x.shape[-1] : 2 * x.shape[-1]].as_subclass(type(x))


def assert_close(kind, found, expected, dtype):
    """Equal to a rounding of dtype, but for classes that round between their steps."""
    assert found.dtype == expected.dtype
    if kind == "groups":
        unit = {BF16: 2e-2, F16: 3e-3, F32: 1e-5, F64: 1e-10}[dtype]
        rtol, atol = unit, unit * (float(expected.detach().abs().max()) + 1)
    elif kind == "channels":
        rtol = atol = 1e-4 if dtype is F32 else 0.05
    elif dtype in HALF:
        rtol, atol = 4 * torch.finfo(dtype).eps, 8 * torch.finfo(dtype).eps
    else:  # some classes compute float64 in float32
        rtol, atol = (1e-4, 1e-5) if dtype == F32 else (1e-5, 2e-6)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def may_refuse(kind, norm, x, autocast=False):
    """Whether the class itself may refuse x, as PyTorch's norms do with a mixture of dtypes."""
    parameter = next(norm.parameters(), x).dtype
    if type(norm).__name__ == "EsmFold2LayerNorm":  # it computes in float32, beside any weight
        return parameter is not F32
    if x.is_cuda:
        return x.dtype is not parameter
    return autocast and kind == "layer" and (x.dtype, parameter) == (F32, BF16)


def compare(kind, norm, x, *gate):
    """The swapped one need not refuse what the class refuses."""
    inputs = (x, *gate) if gate else arguments_of(norm, x)
    try:
        expected, gradients = results(norm, *inputs)
    except RuntimeError:
        if may_refuse(kind, norm, x):
            return
        raise
    y, found = results(swapped(norm), *inputs)
    if kind != "rms" or "rms_norm" not in type(norm).forward.__code__.co_names:
        assert y.stride() == expected.stride()  # F.rms_norm's is its own
        assert kind != "rms" or found[0].stride() == gradients[0].stride()
    parameter = next(norm.parameters(), x).dtype
    if kind == "rms":
        assert_same_roundings(y, expected, x.dtype)
        coarsest = max((x.dtype, parameter), key=lambda dtype: torch.finfo(dtype).eps)
        swaps.assert_same_gradients(found, gradients, coarsest)
        return
    assert_close(kind, y, expected, x.dtype)
    if kind == "channels" and x.dtype == BF16:
        # PyTorch's CPU kernel adds up the bfloat16 gradients of parameters in bfloat16.
        _, exact = results(copy.deepcopy(norm).double(), x.double())
        gradients, found = [gradients[0], *exact[1:]], [found[0], *(g.double() for g in found[1:])]
    for place, (one, other) in enumerate(zip(found, gradients, strict=True)):
        scale = float(other.detach().abs().max()) + 1 if kind == "layer" else 1.0
        if kind == "channels" and place > 0:  # a sum of so many terms, each of which may be rounded
            scale = max(1.0, (x.numel() / one.numel()) ** 0.5 / 4)
        # cuDNN's instance norm rounds the gradients of float32 weights to x's dtype on the way.
        coarser = min((x.dtype, one.dtype), key=lambda dtype: -torch.finfo(dtype).eps)
        assert_close(kind, one / scale, other / scale, coarser)


# With the forwards that CUDA gets, in which the operators compute on the CPU too, and without.
KERNELS = {"layer": (False,), "rms": (False, True), "groups": (False, True), "channels": (True,)}


def mixtures(of):
    """Each class with its mixtures of dtypes, at this place in KINDS."""
    cases = [pytest.param(f"{kind}-{name}", *mixture, kernels,
                          marks=[pytest.mark.cpu_operators] * kernels)
             for kind, columns in KINDS.items() for mixture in columns[of]
             for kernels in KERNELS[kind] for name in columns[0]]  # fmt: skip
    return pytest.mark.parametrize(
        ("case", "x_dtype", "dtype", "kernels"), cases, indirect=["case"])  # fmt: skip


@mixtures(2)
def test_same_results(case, x_dtype, dtype, kernels, device):
    kind, norm, shape = case
    norm.to(dtype)
    if not kernels and device == "cuda" and kind in ("groups", "rms"):
        pytest.skip("CUDA has kernels anyway")
    if kind == "rms" and not kernels:  # the class's own forward
        inputs = arguments_of(norm, torch.randn(8, SIZE).to(x_dtype))
        expected, y = norm(*inputs), swapped(norm)(*inputs)
        if type(norm) is nn.RMSNorm:
            assert_same_roundings(y, expected)
        else:
            torch.testing.assert_close(y, expected, rtol=0, atol=0)
        return
    for x in formats(kind, shape, x_dtype, device):
        compare(kind, norm, x)
    if (gate := gate_of(norm)) is not None:
        compare(kind, norm, x, torch.randn_like(x.float()))
        if gate.default is None and "Kimi" not in type(norm).__name__:
            for given in ((), (None,)):
                assert_same_roundings(swapped(norm)(x, *given), norm(x, *given), x.dtype)


@pytest.mark.cpu_operators
@pytest.mark.parametrize("case", [name for name in IDS if name.startswith("rms")], indirect=True)
def test_shapes_and_strides_of_rms_norms(case, device):
    _, norm, _ = case
    x = torch.randn(2, 3, 4, SIZE, device=device)
    image = torch.randn(2, SIZE, 3, 4, device=device)  # of which the norm is over the channels
    orders = (torch.contiguous_format, torch.channels_last)
    channels = [image.contiguous(memory_format=order).movedim(1, -1) for order in orders]
    for strided in (x, x.transpose(1, 2), x[:, ::2], x[0, 0, 0], x[:0], *channels):
        if hasattr(norm, "n_groups"):  # FalconH1 takes two or three dimensions
            if strided.dim() == 4 and strided.numel() > 0:
                compare("rms", norm, strided[0])
                compare("rms", norm, strided[0, :, :1])
        elif strided.numel() > 0 or getattr(norm, "group_size", None) is None:
            compare("rms", norm, strided)


@mixtures(3)
def test_autocast(case, x_dtype, dtype, kernels, device):
    kind, norm, shape = case
    norm.to(dtype)
    for x in formats(kind, shape, x_dtype, device):
        inputs = arguments_of(norm, x)
        with torch.autocast(device, BF16):
            try:
                expected = norm(*inputs)
            except RuntimeError:
                if may_refuse(kind, norm, x, autocast=True):
                    continue
                raise
            y = swapped(norm)(*inputs)
        assert y.dtype == expected.dtype
        if kind == "rms":
            if type(norm) is not nn.RMSNorm:  # F.rms_norm's dtype depends on the release
                assert_same_roundings(y, expected)
        else:
            assert kind == "layer" or y.stride() == expected.stride()
            assert_close(kind, y, expected, BF16 if kind == "layer" else expected.dtype)


@pytest.mark.cpu_operators
def test_the_operators_are_called(case, device):
    """Otherwise the comparisons would compare the class with itself."""
    kind, norm, shape = case
    if device == "cuda" and kind != "rms":
        pytest.skip("direct calls go past the dispatcher")
    rounds_everywhere = type(norm).__name__ == "ImageGPTLayerNorm"
    narrow = kind == "rms" and not rounds_everywhere and getattr(norm, "force_fp32", True)
    dtype = BF16 if narrow else F32
    inputs = arguments_of(norm.to(dtype), torch.randn(shape, device=device).to(dtype))
    new = swapped(norm)
    called = operators_of(lambda: new(*inputs))
    assert called
    if gate_of(norm) is not None:  # one operator, and one kernel, for a norm and its gate
        operators = {name for name in called if re.fullmatch(r"fused_layernorm::\w+", name)}
        assert operators <= {f"fused_layernorm::rms_norm_gated{end}" for end in ("", "_forward")}
        assert len(called - operators) <= (device != "cpu")


@pytest.mark.cpu_operators
@pytest.mark.parametrize("case", [name for name in IDS if name.startswith("rms")], indirect=True)
def test_what_the_kernels_do_not_take_goes_to_the_class(case, device):
    class Own(torch.Tensor):
        pass

    _, norm, _ = case
    new = swapped(norm)
    x = torch.randn(4, SIZE, device=device)
    for other in (x.double(), x.as_subclass(Own)):
        inputs = arguments_of(norm, other)
        expected, y = norm(*inputs), new(*inputs)
        assert type(y) is type(expected)
        torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    if any(True for _ in norm.parameters()):
        narrow = arguments_of(norm, torch.randn(4, 3, device=device))
        for module in (norm, new):
            with pytest.raises((RuntimeError, AssertionError)):
                module(*narrow)


@pytest.mark.cpu_operators
@pytest.mark.parametrize("case", ["rms-qwen3_next_gated", "rms-mamba2_gated"], indirect=True)
def test_gates_that_only_the_class_takes(case, device):
    pytest.importorskip("transformers", "5.20", reason="the classes have other sources")
    _, norm, _ = case
    new = swapped(norm)
    x = torch.randn(4, SIZE, device=device)
    for gate in (x[:1], x[0], torch.randint(9, x.shape, device=device), x.double()):
        assert torch.allclose(new(x, gate), norm(x, gate), rtol=1e-5, atol=1e-6)
    for bad in (x[:, :3], "gate"):
        for module in (norm, new):
            with pytest.raises((RuntimeError, AttributeError)):
                module(x, bad)


GATED = ("qwen3_next_gated", "qwen4_gated", "mamba2_gated", "falcon_h1_gate_first")


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("case", [f"rms-{name}" for name in GATED], indirect=True)
def test_the_graph_pass_leaves_the_gate(case, device):
    pytest.importorskip("transformers", "5.20", reason="the classes have other sources")
    _, norm, _ = case
    if hasattr(norm, "n_groups"):
        norm.n_groups = 4
    for weight_dtype in (BF16, F32):
        inputs = arguments_of(norm.to(weight_dtype), torch.randn(2, 16, SIZE).to(BF16))
        torch._dynamo.reset()
        y, rows, graphs = captured.run(norm, *inputs)
        assert captured.operators_of(graphs[0]) == ["layer_norm"] == [row.operator for row in rows]
        assert_same_roundings(y, norm(*inputs))


SHOWN = {"layer": "FusedLayerNorm", "groups": "FusedGroupNorm"}


def test_swap_and_unswap(case):
    kind, norm, _ = case
    is_elsewhere = isinstance(norm, BarkLayerNorm)  # which no pickle finds
    swaps.check_swap_and_unswap(norm, SHOWN.get(kind, "FusedRMSNorm"), copied=not is_elsewhere)
    if kind in ("layer", "rms"):
        own, other = ("layer_norm", "rms_norm")[:: 1 if kind == "layer" else -1]
        new = getattr(fl, f"swap_{own}")(swapped(norm, getattr(fl, f"swap_{own}")))
        assert is_fused(getattr(fl, f"unswap_{other}")(new))
        assert type(getattr(fl, f"unswap_{own}")(new)) is type(norm)


# One class each whose computation depends on dtypes, strides or a switch: a compilation is slow.
COMPILED = ("layer-timm_2d", "layer-timm_exp_2d", "layer-deberta", "layer-cohere", "rms-llama",
            "rms-gemma", "rms-t5", "rms-diffusers", "rms-timm", "rms-torch",
            "rms-qwen3_next_gated")  # fmt: skip


@pytest.mark.parametrize("case", COMPILED, indirect=True)
@pytest.mark.cpu_operators
def test_compiled(case, device):
    kind, norm, shape = case
    dtype = BF16 if kind == "rms" else F32
    inputs = arguments_of(norm, torch.randn(shape, device=device).to(dtype))
    torch._dynamo.reset()
    new = swapped(norm.to(dtype))
    compiled = torch.compile(new, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        if kind == "rms":
            assert_same_roundings(compiled(*inputs), new(*inputs))
        else:
            assert_close(kind, compiled(*inputs), norm(*inputs), dtype)


@pytest.mark.parametrize("compiler", [torch.fx.symbolic_trace, torch.jit.script])
def test_traced_and_scripted(case, compiler, device):
    """What torch.fx or TorchScript takes of a class, it takes of the swapped one."""
    _, norm, shape = case
    inputs = arguments_of(norm, torch.randn(shape, device=device))
    try:
        expected = compiler(norm)(*inputs)
    except Exception:
        return
    swaps.assert_same(compiler(swapped(norm))(*inputs), expected)


def test_every_known_source_is_tested():
    """Skipped where an installed version lacks one of the classes above."""
    lines = [row[:2] for kind in ("rms", "channels") for row in KINDS[kind][0].values()]
    assert {*registry.SOURCES} - {*OLD, SECOND} <= {digest(class_of(*line)) for line in lines}
    kinds = {name: {one.kind for one in known.values()} for name, known in registry.CLASSES.items()}
    names = {*map(".".join, lines)}
    assert {n for n in kinds if kinds[n] == {"rms"} and n.startswith("timm.")} <= names


# ---- Classes of versions that are not installed, in their names and numbers.


class BarkLayerNorm(nn.Module):
    __module__ = "transformers.models.bark.modeling_bark"

    def __init__(self, hidden_size, bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias: Any = nn.Parameter(torch.zeros(hidden_size)) if bias else None

    def forward(self, input):
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, eps=1e-5)


class ConvNextLayerNorm(BarkLayerNorm):
    __module__ = "transformers.models.convnext.modeling_convnext"

    def __init__(self, size, data_format="channels_last"):
        super().__init__(size)
        self.normalized_shape, self.eps, self.data_format = (size,), 1e-6, data_format

    def forward(self, x):
        if self.data_format == "channels_last":
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        wide = x.float()
        u = wide.mean(1, keepdim=True)
        s = (wide - u).pow(2).mean(1, keepdim=True)
        y = ((wide - u) / torch.sqrt(s + self.eps)).to(dtype=x.dtype)
        return self.weight[:, None, None] * y + self.bias[:, None, None]


class RMSNorm030(nn.Module):
    def __init__(self, dim, eps: float):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(dim))

    def forward(self, hidden_states):
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.eps)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden_states = hidden_states.to(self.weight.dtype)
        return hidden_states * self.weight


class MambaRMSNormGated(WrittenHere):
    def forward(self, hidden_states, gate=None):
        wide = hidden_states.float()
        wide = wide if gate is None else wide * F.silu(gate.float())
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden_states.dtype)


class FalconH1RMSNormGated(WrittenHere):
    """It also drops the sequence of a three-dimensional input whose length is one."""

    n_groups, norm_before_gate = 4, True

    def forward(self, hidden_states, gate=None):
        wide = hidden_states.float().unflatten(-1, (self.n_groups, -1))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        wide = self.weight * wide.flatten(-2)
        wide = wide.squeeze(1) if wide.dim() == 3 and wide.shape[1] == 1 else wide
        return (wide if gate is None else wide * F.silu(gate.float())).to(hidden_states.dtype)


# The sources above stand for those of the libraries, which have other digests.
OLD = {"bdcf2fe671f49cc9": RMSNorm030, "0f4f182eb64f10d5": MambaRMSNormGated,
       "b80440363034ddd1": FalconH1RMSNormGated}  # fmt: skip
SECOND = "2daaa7b4d1199477"  # of diffusers 0.33 to 0.36, whose forward is that of today's source
BY_HAND = registry.CLASSES["transformers.models.convnext.modeling_convnext.ConvNextLayerNorm"]


@pytest.fixture(autouse=True)
def _old_sources(monkeypatch):
    for old, cls in OLD.items():
        monkeypatch.setitem(registry.SOURCES, digest(cls), registry.SOURCES[old])
    monkeypatch.setitem(BY_HAND, digest(ConvNextLayerNorm), BY_HAND["ab6b0c69f427ea68"])
