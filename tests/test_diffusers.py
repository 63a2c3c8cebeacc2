# SPDX-License-Identifier: Apache-2.0
"""diffusers: its modules that modulate a norm's output, and whole transformers, before and after.

First come the modules one by one: their results, gradients and dtypes, and the cases in which a
swapped module still calls its norm. Tiny transformers with random weights follow.
"""

import copy
import statistics
from typing import Any

import libraries
import pytest
import swaps
import torch
from swaps import check_swap_and_unswap, copies, fused, is_floating, outcome, same
from tiny_diffusers import cogvideox, dit, flux, pixart, sd3, sd35, wan
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fused_layernorm
from fused_layernorm import functional, is_fused, swap_layer_norm, unswap_layer_norm
from fused_layernorm.swap import modulated as swap_modulated

libraries.get("diffusers")  # or all tests here are skipped

BATCH, LENGTH, WIDTH = 2, 5, 16
X, EMB = (BATCH, LENGTH, WIDTH), (BATCH, WIDTH)
CONTEXT = (BATCH, 3, WIDTH)
TWO = {"hidden_states": X, "encoder_hidden_states": CONTEXT, "temb": EMB}
NORMALIZATION = "normalization"
CHROMA, COGVIEW4, COSMOS, GLM = (
    f"transformers.transformer_{name}" for name in ("chroma", "cogview4", "cosmos", "glm_image")
)

EMBEDDING, INPUTS = {"embedding_dim": WIDTH}, {"x": X, "emb": EMB}
CONDITIONED = {"embedding_dim": WIDTH, "conditioning_embedding_dim": 8}
CONDITION = {"x": X, "conditioning_embedding": (BATCH, 8)}
DIM = {"embedding_dim": WIDTH, "dim": WIDTH}
OF_TWO = {"conditioning_dim": WIDTH, "embedding_dim": WIDTH}
ONE_FOR_ALL = {"embedding_dim": 8, "output_dim": 2 * WIDTH, "norm_elementwise_affine": True}
OF_COSMOS = {"in_features": WIDTH, "hidden_features": 8}
COSMOS_INPUTS = {"hidden_states": X, "embedded_timestep": EMB, "temb": (BATCH, 3 * WIDTH)}

# id: (module, class, arguments, inputs: a shape of random numbers, or a tensor as it is).
MODULES: dict[str, tuple[str, str, dict, dict]] = {
    "ada_embedding": (NORMALIZATION, "AdaLayerNorm", {**EMBEDDING, "num_embeddings": 10},
        {"x": X, "timestep": torch.tensor(3)}),
    "ada_one_for_all": (NORMALIZATION, "AdaLayerNorm", ONE_FOR_ALL, {"x": X, "temb": (8,)}),
    "ada_by_sample": (NORMALIZATION, "AdaLayerNorm", {**ONE_FOR_ALL, "chunk_dim": 1},
        {"x": X, "temb": (BATCH, 8)}),
    "zero": (NORMALIZATION, "AdaLayerNormZero", EMBEDDING, INPUTS),
    "zero_labels": (NORMALIZATION, "AdaLayerNormZero", {**EMBEDDING, "num_embeddings": 10},
        {"x": X, "timestep": torch.tensor([1, 7]), "class_labels": torch.tensor([2, 3])}),
    "zero_fp32": (NORMALIZATION, "AdaLayerNormZero",
        {**EMBEDDING, "norm_type": "fp32_layer_norm"}, INPUTS),
    "zero_single": (NORMALIZATION, "AdaLayerNormZeroSingle", EMBEDDING, INPUTS),
    "zero_x": (NORMALIZATION, "SD35AdaLayerNormZeroX", EMBEDDING,
        {"hidden_states": X, "emb": EMB}),
    "continuous": (NORMALIZATION, "AdaLayerNormContinuous", {**CONDITIONED, "eps": 0.1}, CONDITION),
    "continuous_plain": (NORMALIZATION, "AdaLayerNormContinuous",
        {**CONDITIONED, "elementwise_affine": False, "bias": False}, CONDITION),
    "lumina": (NORMALIZATION, "LuminaLayerNormContinuous",
        {**CONDITIONED, "elementwise_affine": False}, CONDITION),
    "lumina_out": (NORMALIZATION, "LuminaLayerNormContinuous", {**CONDITIONED, "out_dim": 4},
        CONDITION),
    "cogview3": (NORMALIZATION, "CogView3PlusAdaLayerNormZeroTextImage",
        {"embedding_dim": 8, "dim": WIDTH}, {"x": X, "context": CONTEXT, "emb": (BATCH, 8)}),
    "cogvideox": (NORMALIZATION, "CogVideoXLayerNormZero", OF_TWO, TWO),
    "hunyuan_shift": ("transformers.hunyuan_transformer_2d", "AdaLayerNormShift", EMBEDDING,
        INPUTS),
    "chroma": (CHROMA, "ChromaAdaLayerNormZeroPruned", EMBEDDING,
        {"x": X, "emb": (BATCH, 6, WIDTH)}),
    "chroma_single": (CHROMA, "ChromaAdaLayerNormZeroSinglePruned", EMBEDDING,
        {"x": X, "emb": (BATCH, 3, WIDTH)}),
    "chroma_continuous": (CHROMA, "ChromaAdaLayerNormContinuousPruned",
        {**CONDITIONED, "conditioning_embedding_dim": WIDTH}, {"x": X, "emb": (BATCH, 2, WIDTH)}),
    "cogview4": (COGVIEW4, "CogView4AdaLayerNormZero", DIM, TWO),
    "cogview4_continuous": (COGVIEW4, "CogView4AdaLayerNormContinuous", CONDITIONED, CONDITION),
    "cosmos": (COSMOS, "CosmosAdaLayerNorm", OF_COSMOS, COSMOS_INPUTS),
    "cosmos_by_token": (COSMOS, "CosmosAdaLayerNorm", OF_COSMOS,
        {"hidden_states": X, "embedded_timestep": X}),
    "cosmos_zero": (COSMOS, "CosmosAdaLayerNormZero", OF_COSMOS, COSMOS_INPUTS),
    "easyanimate": ("transformers.transformer_easyanimate", "EasyAnimateLayerNormZero", OF_TWO,
        TWO),
    "flux3": ("transformers.transformer_flux3", "Flux3AdaLayerNorm", {"dim": WIDTH},
        {"hidden_states": X, "temb": X}),
    "glm": (GLM, "GlmImageAdaLayerNormZero", DIM, TWO),
    "glm_continuous": (GLM, "GlmImageAdaLayerNormContinuous", CONDITIONED, CONDITION),
}  # fmt: skip
# Modules with two norms, or two modulations of one.
TWICE = ("zero_x", "cogview3", "cogvideox", "cogview4", "easyanimate", "glm")
HALF = (torch.float16, torch.bfloat16)
# The greatest ratio of two rounding errors. With equal roundings, either error may be the smaller.
LUCK = 1.02
DRAWS = 4


def make(name, device="cpu", dtype=torch.float32):
    """(the module, its inputs), with parameters that show whether they are used."""
    module, cls, arguments, shapes = MODULES[name]
    made = libraries.class_of(f"diffusers.models.{module}", cls)(**arguments)
    for parameter in made.parameters():
        nn.init.normal_(parameter, 0.3, 0.3)
    inputs = {
        key: (shape if isinstance(shape, torch.Tensor) else torch.randn(shape).to(dtype)).to(device)
        for key, shape in shapes.items()
    }
    if "class_labels" in inputs:
        inputs["hidden_dtype"] = dtype
    # In training mode some of the labels are dropped at random.
    return made.to(device, dtype).eval(), inputs


def swapped(module):
    return swaps.swapped(module, swap_layer_norm)


def error_of(found, exact):
    """The geometric mean over all tensors of their relative errors, each in the 2-norm.

    Gradients that are zero but for float64's roundings are left out. The bias of an attention's
    keys has such a gradient, because it has no effect.
    """
    assert found.keys() == exact.keys()
    errors = [
        (found[name].double() - want).norm() / want.norm()
        for name, want in exact.items()
        if want.norm() > 1e-9
    ]
    assert errors
    return float(torch.stack(errors).clamp(min=1e-9).log().mean().exp())


def assert_no_worse(make, run=None):
    ratios = []
    for _ in range(DRAWS):
        stock, inputs = make()
        exact = outcome(copy.deepcopy(stock).double(), in_float64(inputs), run)
        found = error_of(outcome(swap_layer_norm(copy.deepcopy(stock)), inputs, run), exact)
        ratios.append(found / error_of(outcome(stock, inputs, run), exact))
    assert statistics.geometric_mean(ratios) <= LUCK


def in_float64(inputs):
    def wide(value):
        if is_floating(value):
            return value.double()
        return torch.float64 if isinstance(value, torch.dtype) else value

    return {key: wide(value) for key, value in inputs.items()}


# ---- Module by module.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MODULES)
def test_same_results(name, dtype, device):
    module, inputs = make(name, device, dtype)
    # FP32LayerNorm takes float64 through float32.
    tolerance = 1e-6 if dtype == torch.float32 or "FP32" in repr(module) else 1e-14
    same(outcome(swapped(module), inputs), outcome(module, inputs), tolerance)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", MODULES)
def test_half_precision_is_no_worse(name, dtype, device):
    assert_no_worse(lambda: make(name, device, dtype))


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.float64, *HALF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF])
@pytest.mark.parametrize("name", ["zero", "zero_fp32", "zero_x", "cogview4", "hunyuan_shift"])
def test_dtypes_that_differ(name, dtype, x_dtype, device):
    """With modulations and parameters of one dtype and x of another, results are diffusers'."""
    module, inputs = make(name, device, dtype)
    x = "hidden_states" if name in ("cogview4", "zero_x") else "x"
    inputs[x] = inputs[x].to(x_dtype)
    try:
        expected = outcome(module, inputs)
    except RuntimeError:  # a swapped module need not fail where diffusers' does
        assert "FP32" not in repr(module)  # which takes any
        return
    coarsest = max(torch.finfo(d).eps for d in (dtype, x_dtype, torch.float32))
    same(outcome(swapped(module), inputs), expected, 8 * coarsest)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODULES)
def test_autocast(name, x_dtype, device):
    module, inputs = make(name, device)
    inputs = {key: x.to(x_dtype) if is_floating(x) else x for key, x in inputs.items()}
    with torch.autocast(device, torch.bfloat16):
        try:
            expected = outcome(module, inputs)
        except RuntimeError:
            pytest.skip("diffusers itself fails")
        same(outcome(swapped(module), inputs), expected, 8 * torch.finfo(torch.bfloat16).eps)


@pytest.fixture
def calls(monkeypatch):
    """The arguments of each call of ada_layer_norm by swapped modules."""
    found = []

    def counted(function):
        def call(*args, **kwargs):
            found.append(args)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(swap_modulated, "ada_layer_norm", counted(functional.ada_layer_norm))
    return found


@pytest.mark.parametrize("name", MODULES)
def test_one_call_for_a_norm_and_its_modulation(name, device, calls, monkeypatch):
    module, inputs = make(name, device)
    new = swapped(module)
    called = [n for n in new.modules() if isinstance(n, nn.LayerNorm)]
    for norm in called:
        monkeypatch.setattr(type(norm), "_call_impl", None)
    with torch.no_grad():
        new(**inputs)
    assert len(calls) == (2 if name in TWICE else 1)


@pytest.mark.parametrize("name", MODULES)
def test_swap_and_unswap(name):
    module, inputs = make(name)
    check_swap_and_unswap(module, swap_layer_norm, unswap_layer_norm, "FusedLayerNorm")
    new = swapped(module)
    for copied in copies(new):
        same(outcome(copied, inputs), outcome(new, inputs), 0)
    same(outcome(unswap_layer_norm(new), inputs), outcome(module, inputs), 0)


@pytest.mark.parametrize(
    "name", ["zero", "zero_fp32", "zero_x", "ada_by_sample", "cogview4", "lumina_out"]
)
def test_compiled(name, device):
    module, inputs = make(name, device)
    torch._dynamo.reset()

    def compiled(model, inputs):
        return torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs)

    same(outcome(swapped(module), inputs, compiled), outcome(module, inputs), 1e-6)


# Modules whose forwards torch.fx can trace, diffusers' and ours. It cannot trace embeddings of
# labels or the branches of Cosmos.
TRACEABLE = [name for name in MODULES if name != "zero_labels" and "cosmos" not in name]


@pytest.mark.parametrize("name", TRACEABLE)
def test_symbolic_trace(name, device):
    module, inputs = make(name, device)
    absent = dict.fromkeys({"timestep", "class_labels", "hidden_dtype", "temb", "emb"} - {*inputs})
    traced = torch.fx.symbolic_trace(swapped(module), absent)
    assert any(node.target is swap_modulated._modulated for node in traced.graph.nodes)
    with torch.no_grad():
        torch.testing.assert_close(traced(**inputs), module(**inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "x"), [("zero", "x"), ("zero_x", "hidden_states")])
def test_modulations_that_enlarge_the_input(name, x, device, calls):
    """Diffusers allows one image under two prompts, which the operators do not."""
    module, inputs = make(name, device)
    inputs[x] = inputs[x][:1]
    same(outcome(swapped(module), inputs), outcome(module, inputs), 1e-6)
    assert not calls


# ---- Cases in which a swapped module calls its norm.


def test_hooks_of_the_norm_run(device, calls):
    module, inputs = make("zero", device)
    new = swapped(module)
    handle = new.norm.register_forward_hook(lambda norm, args, y: 2 * y)
    reference = copy.deepcopy(module)
    reference.norm.register_forward_hook(lambda norm, args, y: 2 * y)
    same(outcome(new, inputs), outcome(reference, inputs), 1e-6)
    assert not calls
    handle.remove()
    same(outcome(new, inputs), outcome(module, inputs), 1e-6)
    assert calls
    for register in ("register_forward_pre_hook", "register_full_backward_hook"):
        seen: list[tuple] = []
        handle = getattr(new.norm, register)(lambda *args, seen=seen: seen.append(args))
        outcome(new, inputs)
        handle.remove()
        assert len(seen) == 1, register


def with_options(**options):
    def change(module):
        sizes: Any = {"eps": 1e-6, "elementwise_affine": False}
        module.norm = fused_layernorm.FusedLayerNorm(WIDTH, **sizes, **options).to(module.device)

    return change


def with_a_forward(module):
    """accelerate and diffusers' offloading set a forward on the module itself."""
    norm = module.norm
    forward = type(norm).forward
    norm.forward = lambda x: 2 * forward(norm, x)


CHANGES = {
    "forward": with_a_forward,
    "activation": with_options(activation="silu"),
    "scale": with_options(scale=2.0),
    "unswapped": lambda module: unswap_layer_norm(module.norm),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_norm_that_computes_something_else_is_called(how, device, calls):
    stock, inputs = make("zero", device)
    new = swapped(stock)
    for module in (stock, new):
        module.device = device
        CHANGES[how](module)
    same(outcome(new, inputs), outcome(stock, inputs), 1e-6 if how == "forward" else 0)
    assert not calls


# ---- What is not swapped.


def test_the_predicate_is_asked_of_the_norm(caplog):
    """The predicate is asked once, of the norm alone. The module around it follows the answer."""
    module, _ = make("zero")
    model = nn.ModuleDict({"left": module, "taken": copy.deepcopy(module)})
    asked = []

    def predicate(name, norm):
        asked.append(name)
        assert isinstance(norm, nn.LayerNorm)
        return "taken" in name

    with caplog.at_level("INFO", logger="fused_layernorm.swap"):
        swap_layer_norm(model, predicate=predicate)
    assert asked == ["left.norm", "taken.norm"]
    assert fused(model) == ["taken", "taken.norm"]
    (record,) = caplog.records
    assert "1 torch.nn.modules.normalization.LayerNorm (the predicate refused)" in record.message
    assert "AdaLayerNormZero (it has a norm that is not fused)" in record.message


def test_an_rms_norm_is_left(caplog):
    cls = libraries.class_of("diffusers.models.normalization", "AdaLayerNormContinuous")
    model = nn.ModuleList([cls(WIDTH, 8, norm_type="rms_norm"), nn.LayerNorm(8)])
    with caplog.at_level("INFO", logger="fused_layernorm.swap"):
        swap_layer_norm(model)
    assert [is_fused(module) for module in model] == [False, True]
    assert "AdaLayerNormContinuous (it has a norm that is not fused)" in caplog.text


# ---- Whole transformers.


# The number of norms that one pass of a model computes together with one modulation or two. Blocks
# of PixArt and Wan write out the modulation in their own forwards, so only their norms are fused.
TRANSFORMERS = {dit: 2, flux: 2 * 2 + 2 + 1, sd3: 7, sd35: 7 + 2, wan: 0, pixart: 0, cogvideox: 9}
names = pytest.mark.parametrize("build", TRANSFORMERS, ids=lambda build: build.__name__)


def transformer(build, device, dtype=torch.float32):
    model, inputs = build()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            for parameter in module.parameters():
                nn.init.normal_(parameter, 1.0, 0.2)
    for key, x in inputs.items():
        if isinstance(x, torch.Tensor):
            inputs[key] = x.to(device, dtype if is_floating(x) else x.dtype)
    # In training mode labels and activations are dropped at random.
    return model.to(device, dtype).eval(), inputs


def sample(model, inputs):
    return model(**inputs, return_dict=False)


@pytest.fixture
def exact(monkeypatch):
    """Makes attention and convolutions as exact as the models' dtype allows.

    Convolutions in TF32 differ by 2e-5 from call to call. On an H200, the attention that PyTorch
    2.11 chooses for heads of 8 bfloat16 columns gives a stock Flux gradients of arbitrary size.
    """
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    with sdpa_kernel(SDPBackend.MATH):
        yield


@names
def test_transformer(build, device, calls, exact):
    stock, inputs = transformer(build, device)
    model = swap_layer_norm(copy.deepcopy(stock))
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    assert norms
    assert all(map(is_fused, norms))
    assert model.state_dict().keys() == stock.state_dict().keys()
    found = outcome(model, inputs, sample)
    assert len(calls) == TRANSFORMERS[build]
    expected = outcome(stock, inputs, sample)
    same(found, expected, 1e-5)
    same(outcome(unswap_layer_norm(model), inputs, sample), expected, 0)


@names
def test_transformer_in_bfloat16(build, device, exact):
    assert_no_worse(lambda: transformer(build, device, torch.bfloat16), sample)


def test_transformer_exported(device):
    stock, inputs = transformer(flux, device)
    model = swap_layer_norm(copy.deepcopy(stock))
    inputs["return_dict"] = False
    with torch.no_grad():
        program = torch.export.export(model, (), inputs)
        (found,), (expected,) = (m(**inputs) for m in (program.module(), stock))
    operator = torch.ops.fused_layernorm.ada_layer_norm.default
    targets = [node.target for node in program.graph.nodes]
    assert targets.count(operator) == TRANSFORMERS[flux]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
