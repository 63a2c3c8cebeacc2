# SPDX-License-Identifier: Apache-2.0
"""The classes of other libraries that swap_layer_norm knows: swapped ones give the same results,
and other classes are left alone.

Every computation of the table is compared with the class's own forward: dtypes, autocast, memory
formats, gradients. The tests of a library that is not installed are skipped. Classes of versions
that cannot be installed beside today's are copied at the end of this file.
"""

import ast
import functools
import importlib
import sys
from pathlib import Path
from typing import Any

import libraries
import pytest
import torch
import torch.nn.functional as F
from libraries import class_of
from swaps import check_compiler, check_swap_and_unswap, digest, results
from swaps import swapped as swapped_by
from torch import nn

from fused_layernorm import is_fused, swap_layer_norm, unswap_layer_norm
from fused_layernorm.swap import source as swap_source
from fused_layernorm.swap import table as swap_table

HALF = (torch.float16, torch.bfloat16)
SEQUENCE, HEADS, CHANNELS_FIRST, SEQUENCE_LAST = (3, 5, 8), (3, 5, 2, 8), (2, 8, 3, 5), (2, 8, 5)
T = "transformers.models."

# id: (module, class, arguments, shape of x). Each computation of the table has one line or more.
CLASSES = {
    "timm": ("timm.layers.norm", "LayerNorm", {}, SEQUENCE),
    "timm_plain": ("timm.layers.norm", "LayerNorm", {"affine": False}, SEQUENCE),
    "timm_eps": ("timm.layers.norm", "LayerNorm", {"eps": 0.1, "bias": False}, SEQUENCE),
    "timm_fp32": ("timm.layers.norm", "LayerNormFp32", {}, SEQUENCE),
    "timm_fp32_plain": ("timm.layers.norm", "LayerNormFp32", {"affine": False}, SEQUENCE),
    "timm_2d": ("timm.layers.norm", "LayerNorm2d", {}, CHANNELS_FIRST),
    "timm_2d_plain": ("timm.layers.norm", "LayerNorm2d", {"affine": False}, CHANNELS_FIRST),
    "timm_2d_fp32": ("timm.layers.norm", "LayerNorm2dFp32", {"eps": 0.1}, CHANNELS_FIRST),
    "timm_exp_2d": ("timm.layers.norm", "LayerNormExp2d", {"eps": 0.1}, CHANNELS_FIRST),
    "timm_act": ("timm.layers.norm_act", "LayerNormAct", {}, SEQUENCE),
    "timm_act_fp32": ("timm.layers.norm_act", "LayerNormActFp32", {}, SEQUENCE),
    "timm_act_2d": ("timm.layers.norm_act", "LayerNormAct2d", {"act_layer": nn.GELU},
        CHANNELS_FIRST),
    "timm_act_2d_fp32": ("timm.layers.norm_act", "LayerNormAct2dFp32", {}, CHANNELS_FIRST),
    "timm_no_bias": ("timm.models.metaformer", "LayerNormNoBias", {}, SEQUENCE),
    "timm_2d_no_bias": ("timm.models.metaformer", "LayerNorm2dNoBias", {}, CHANNELS_FIRST),
    "torchvision_2d": ("torchvision.models.convnext", "LayerNorm2d", {"eps": 1e-6}, CHANNELS_FIRST),
    "diffusers_fp32": ("diffusers.models.normalization", "FP32LayerNorm", {}, SEQUENCE),
    "diffusers_fp32_plain": ("diffusers.models.normalization", "FP32LayerNorm",
        {"elementwise_affine": False}, SEQUENCE),
    "diffusers_2d": ("diffusers.models.unets.unet_stable_cascade", "SDCascadeLayerNorm",
        {"elementwise_affine": False}, CHANNELS_FIRST),
    "convnext": (T + "convnext.modeling_convnext", "ConvNextLayerNorm", {}, SEQUENCE),
    "convnext_2d": (T + "convnext.modeling_convnext", "ConvNextLayerNorm",
        {"data_format": "channels_first"}, CHANNELS_FIRST),
    "sam_2d": (T + "sam.modeling_sam", "SamLayerNorm",
        {"data_format": "channels_first", "eps": 0.1}, CHANNELS_FIRST),
    "eomt": (T + "eomt.modeling_eomt", "EomtLayerNorm2d", {}, CHANNELS_FIRST),
    "chameleon": (T + "chameleon.modeling_chameleon", "ChameleonLayerNorm", (2, 8), HEADS),
    "cohere": (T + "cohere.modeling_cohere", "CohereLayerNorm", {"eps": 0.1}, SEQUENCE),
    "cohere_heads": (T + "cohere.modeling_cohere", "CohereLayerNorm", (2, 8), HEADS),
    "deberta": (T + "deberta.modeling_deberta", "DebertaLayerNorm", {"eps": 0.1}, SEQUENCE),
    "esmc": (T + "esmc.modeling_esmc", "EsmcLayerNorm", {}, SEQUENCE),
    "esmfold": (T + "esm.modeling_esmfold", "EsmFoldLayerNorm", {}, SEQUENCE),
    "esmfold2": (T + "esmfold2.modeling_esmfold2", "EsmFold2LayerNorm", {}, SEQUENCE),
    "nemotron": (T + "nemotron.modeling_nemotron", "NemotronLayerNorm1P", {}, SEQUENCE),
    "olmo": (T + "olmo.modeling_olmo", "OlmoLayerNorm", {}, SEQUENCE),
    "squeezebert": (T + "squeezebert.modeling_squeezebert", "SqueezeBertLayerNorm", {"eps": 0.1},
        SEQUENCE_LAST),
    "videoprism": (T + "videoprism.modeling_videoprism", "VideoPrismLayerNorm", {}, SEQUENCE),
    "vitdet": (T + "vitdet.modeling_vitdet", "VitDetLayerNorm", {"eps": 0.1}, CHANNELS_FIRST),
    # Classes of older versions, copied below.
    "bark": (__name__, "BarkLayerNorm", {}, SEQUENCE),
    "convnext_by_hand": (__name__, "ConvNextLayerNorm", {}, SEQUENCE),
    "convnext_by_hand_2d": (__name__, "ConvNextLayerNorm", {"data_format": "channels_first"},
        CHANNELS_FIRST),
}  # fmt: skip


@pytest.fixture(params=CLASSES)
def case(request, device):
    """(the module, the shape of its input), with parameters that show whether they are used."""
    module, name, arguments, shape = CLASSES[request.param]
    cls = class_of(module, name)
    size, options = (8, arguments) if isinstance(arguments, dict) else (arguments, {})
    norm = cls(size, **options).to(device)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 1.0, 0.3)
    return norm, shape


def swapped(norm):
    return swapped_by(norm, swap_layer_norm)


def inputs(shape, dtype, device):
    """Yields an x of each memory format that the shape allows."""
    x = (torch.randn(shape, device=device) * 2 + 1).to(dtype)
    yield x
    if len(shape) == 4:
        yield x.to(memory_format=torch.channels_last)
        yield torch.cat([x, x], 3)[..., 1 : 1 + shape[3]]  # neither
    if len(shape) == 3:
        yield x.transpose(1, 2).contiguous().transpose(1, 2)


def tolerance(dtype):
    # Some classes round between their steps. The fused result, rounded once, is more exact then.
    if dtype in HALF:
        unit = torch.finfo(dtype).eps
        return {"rtol": 4 * unit, "atol": 8 * unit}
    # Some classes compute float64 in float32. The fused results may be more exact there too.
    return {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-5, "atol": 2e-6}


def compare(norm, x):
    try:
        expected, expected_grads = results(norm, x)
    except RuntimeError:  # the class refuses dtypes that differ; the swapped one need not
        return None
    y, grads = results(swapped(norm), x)
    torch.testing.assert_close(y, expected, **tolerance(x.dtype))
    assert y.stride() == expected.stride()  # for the following modules
    for found, grad in zip(grads, expected_grads, strict=True):
        coarser = min((x.dtype, found.dtype), key=lambda dtype: -torch.finfo(dtype).eps)
        scale = float(grad.abs().max()) + 1
        torch.testing.assert_close(found / scale, grad / scale, **tolerance(coarser))
    return True


ALIKE = [(dtype, dtype) for dtype in (torch.float32, torch.float64, *HALF)]


@pytest.mark.parametrize(("dtype", "weights"), [*ALIKE, *((half, torch.float32) for half in HALF)])
def test_same_results(case, dtype, weights, device):
    norm, shape = case
    done = [compare(norm.to(weights), x) for x in inputs(shape, dtype, device)]
    assert all(done) or dtype != torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_autocast(case, dtype, weights, device):
    norm, shape = case
    for x in inputs(shape, dtype, device):
        with torch.autocast(device, torch.bfloat16):
            try:
                expected = norm.to(weights)(x)
            except RuntimeError:
                continue
            torch.testing.assert_close(swapped(norm)(x), expected, **tolerance(torch.bfloat16))


def test_swap_and_unswap(case):
    check_swap_and_unswap(case[0], swap_layer_norm, unswap_layer_norm, "FusedLayerNorm")


# One class each whose computation depends on dtypes, strides or a switch, because a compilation
# takes a second.
@pytest.mark.parametrize("case", ["timm_2d", "timm_exp_2d", "deberta", "cohere"], indirect=True)
def test_compiled(case, device):
    norm, shape = case
    x = torch.randn(shape, device=device)
    torch._dynamo.reset()
    compiled = torch.compile(swapped(norm), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), norm(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compiler", [torch.fx.symbolic_trace, torch.jit.script])
def test_traced_and_scripted(case, compiler, device):
    check_compiler(case[0], compiler, torch.randn(case[1], device=device))


@pytest.mark.parametrize("package", ["timm", "torchvision", "diffusers", "transformers"])
def test_the_installed_version_is_known(package):
    """The table knows the source of every class that it names. The test imports none of them."""
    folder = Path(libraries.get(package).__file__).parent.parent
    checked = 0
    for (module, name), sources in swap_table.CLASSES.items():
        path = folder / (module.replace(".", "/") + ".py")
        if not module.startswith(package + ".") or not path.exists():
            continue
        body = ast.parse(path.read_text()).body
        functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
        classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
        if name not in classes:
            continue
        forwards = [
            n for n in classes[name].body if isinstance(n, ast.FunctionDef) and n.name == "forward"
        ]
        for forward in forwards:
            called = [functions[n] for n in swap_source.called_names(forward) if n in functions]
            found = swap_source.digest_of_trees(forward, called)
            assert found in sources, (
                f"{module}.{name}.forward has a source that the table does not know: see what it "
                f"computes and enter {found} into swap/table.py"
            )
            checked += 1
    assert checked > 0


def test_nothing_is_imported():
    cls = class_of("timm.layers.norm", "LayerNorm2d")
    before = set(sys.modules)
    swap_layer_norm(nn.Sequential(nn.LayerNorm(8), cls(8)))
    assert set(sys.modules) == before


# ---- timm's switch.


@pytest.mark.parametrize("name", ["LayerNorm", "LayerNorm2d"])
def test_fast_norm_is_timms_own(name, device):
    cls = class_of("timm.layers.norm", name)
    x = torch.randn(2, 8, 8, 8, device=device)
    try:
        importlib.import_module("timm.layers.fast_norm").set_fast_norm(True)
        norm = cls(8).to(device)
    finally:
        importlib.import_module("timm.layers.fast_norm").set_fast_norm(False)
    fast = swapped(norm)
    with torch.autocast(device, torch.bfloat16):
        assert fast(x).dtype == norm(x).dtype == torch.bfloat16
        assert torch.equal(fast(x), norm(x))
        # Each module has its own switch, which may be turned back.
        norm._fast_norm = fast._fast_norm = False
        assert fast(x).dtype == norm(x).dtype
        torch.testing.assert_close(fast(x), norm(x))


# ---- Sources.


def other_version(cls, forward):
    """The class as another version of its library would have it."""
    members = {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), members)


class TheSame:
    def forward(self: Any, x) -> "torch.Tensor":
        """With a docstring."""
        # And a comment.
        x = x.permute(
            0,
            2, 3, 1,
        )  # fmt: skip
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

        x = x.permute(0, 3, 1, 2)
        return x


class Another:
    def forward(self: Any, x):
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, 2 * self.eps)
        x = x.permute(0, 3, 1, 2)
        return x


def test_another_source_is_left_alone_and_named(caplog):
    cls = class_of("torchvision.models.convnext", "LayerNorm2d")
    x = torch.randn(2, 8, 3, 5)
    known = nn.Sequential(other_version(cls, TheSame.forward)(8))
    unknown = nn.Sequential(other_version(cls, Another.forward)(8), nn.LayerNorm(5))
    expected = unknown(x)
    with caplog.at_level("INFO", logger="fused_layernorm.swap"):
        assert is_fused(swap_layer_norm(known)[0])
        assert not caplog.records
        swap_layer_norm(unknown)
        swap_layer_norm(unknown, predicate=lambda name, module: True)
    assert not is_fused(unknown[0])
    torch.testing.assert_close(unknown(x), expected)
    assert len(caplog.records) == 2
    for record in caplog.records:
        assert "1 torchvision.models.convnext.LayerNorm2d" in record.getMessage()
        assert "source of its forward" in record.getMessage()


@pytest.mark.parametrize("how", ["no source", "wrapped"])
def test_a_forward_without_a_source_of_its_own_is_left_alone(how):
    """Libraries may patch a class with functools.wraps. inspect then finds the wrapped source."""
    cls = class_of("torchvision.models.convnext", "LayerNorm2d")
    names: dict[str, Any] = {}
    exec("def forward(self, x):\n    return x", names)

    @functools.wraps(cls.forward)
    def patched(self, x):
        return 2 * cls.forward(self, x)

    forward = patched if how == "wrapped" else names["forward"]
    model = nn.Sequential(other_version(cls, forward)(8), nn.LayerNorm(8))
    swap_layer_norm(model)
    assert [is_fused(module) for module in model] == [False, True]


def test_a_function_that_is_called_counts(monkeypatch):
    cls = class_of("timm.layers.norm", "LayerNormExp2d")
    module = sys.modules[cls.__module__]

    def _layer_norm_cf(x, weight, bias, eps):
        return x

    _layer_norm_cf.__module__ = module.__name__
    before = digest(cls)
    monkeypatch.setattr(module, "_layer_norm_cf", _layer_norm_cf)
    assert digest(cls) != before


class Scaled(nn.LayerNorm):
    def forward(self, x):
        return 2 * super().forward(x)


def test_super_is_nn_layer_norm():
    """A forward that calls super's is known to the table only if super is nn.LayerNorm."""
    cls = class_of("diffusers.models.unets.unet_stable_cascade", "SDCascadeLayerNorm")
    assert digest(cls) in swap_table.CLASSES[cls.__module__, cls.__name__]
    over_another = type(cls.__name__, (cls, Scaled), {"__module__": cls.__module__})
    assert digest(over_another) is None


# ---- Classes of versions that are not installed, copied unchanged.


class BarkLayerNorm(nn.Module):
    __module__ = T + "bark.modeling_bark"

    def __init__(self, hidden_size, bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if bias else None

    def forward(self, input):
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, eps=1e-5)


class ConvNextLayerNorm(nn.Module):
    __module__ = T + "convnext.modeling_convnext"

    def __init__(self, normalized_shape, eps=1e-6, data_format="channels_last"):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(normalized_shape))
        self.bias = nn.Parameter(torch.zeros(normalized_shape))
        self.eps = eps
        self.data_format = data_format
        self.normalized_shape = (normalized_shape,)

    def forward(self, x):
        if self.data_format == "channels_last":
            x = torch.nn.functional.layer_norm(
                x, self.normalized_shape, self.weight, self.bias, self.eps
            )
        elif self.data_format == "channels_first":
            input_dtype = x.dtype
            x = x.float()
            u = x.mean(1, keepdim=True)
            s = (x - u).pow(2).mean(1, keepdim=True)
            x = (x - u) / torch.sqrt(s + self.eps)
            x = x.to(dtype=input_dtype)
            x = self.weight[:, None, None] * x + self.bias[:, None, None]
        return x
