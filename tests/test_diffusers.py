# SPDX-License-Identifier: Apache-2.0
"""diffusers: its modules that modulate a norm's output, one by one, and whole tiny transformers
with random weights, before and after a swap.
"""

import copy
import itertools

import libraries
import pytest
import swaps
import torch
from swaps import check_swap_and_unswap, fused, outcome, same
from tiny_diffusers import cogvideox, dit, flux, pixart, sd3, sd35, unet, wan
from torch import nn

import fused_layernorm
from fused_layernorm import is_fused, swap_layer_norm, unswap_layer_norm
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


def make(name, device="cpu", dtype=torch.float32):
    """(the module, its inputs), with parameters that show whether they are used."""
    module, cls, arguments, shapes = MODULES[name]
    made = libraries.class_of(f"diffusers.models.{module}", cls)(**arguments)
    for parameter in made.parameters():
        nn.init.normal_(parameter, 0.3, 0.3)
    inputs = {key: (of if isinstance(of, torch.Tensor) else torch.randn(of).to(dtype)).to(device)
              for key, of in shapes.items()}  # fmt: skip
    if "class_labels" in inputs:
        inputs["hidden_dtype"] = dtype
    # In training mode some of the labels are dropped at random.
    return made.to(device, dtype).eval(), inputs


def swapped(module):
    return swaps.swapped(module, swap_layer_norm)


# ---- Module by module.


F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
MIXED = ("zero", "zero_fp32", "zero_x", "cogview4", "hunyuan_shift")
# The dtypes of modulations and parameters, and of x; under autocast parameters are float32.
MIXTURES = [
    *((name, dtype, dtype, False) for dtype in (F32, F64, F16, BF16) for name in MODULES),
    *((name, *pair, False) for pair in itertools.permutations((F32, F64, F16, BF16), 2)
      for name in MIXED),
    *((name, F32, dtype, True) for dtype in (F32, BF16) for name in MODULES),
]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype", "x_dtype", "autocast"), MIXTURES)
def test_same_results(name, dtype, x_dtype, autocast, device, calls):
    """By one call for a norm and its modulation. It need not fail where diffusers' module does."""
    module, inputs = make(name, device, x_dtype if autocast else dtype)
    module.to(dtype)
    x = next(iter(inputs))
    inputs[x] = inputs[x].to(x_dtype)
    with torch.autocast(device, BF16, enabled=autocast):
        try:
            expected = outcome(module, inputs)
        except RuntimeError:
            assert autocast or dtype is not x_dtype
            assert "FP32" not in repr(module) or autocast  # which takes any
            return
        found = outcome(swapped(module), inputs)
    if not autocast and dtype is x_dtype:
        assert len(calls) == (2 if name in TWICE else 1)
    # FP32LayerNorm takes float64 through float32.
    coarsest = max((dtype, x_dtype), key=lambda dtype: torch.finfo(dtype).eps)
    coarsest = BF16 if autocast else F32 if "FP32" in repr(module) and coarsest is F64 else coarsest
    same(found, expected, max(8 * torch.finfo(coarsest).eps, 1e-14))


@pytest.fixture
def calls(monkeypatch):
    """The arguments of each modulated call of swapped modules that the kernels take."""
    found = []

    def recorded(function):
        def call(*args, **kwargs):
            y = function(*args, **kwargs)
            found.extend([args] * (y is not None))
            return y

        return call

    for name in ("ada_layer_norm", "plain_modulated"):
        monkeypatch.setattr(swap_modulated, name, recorded(getattr(swap_modulated, name)))
    return found


@pytest.mark.parametrize("name", MODULES)
def test_swap_and_unswap(name):
    module, inputs = make(name)
    check_swap_and_unswap(module, "FusedLayerNorm", swap_layer_norm, unswap_layer_norm)
    same(outcome(unswap_layer_norm(swapped(module)), inputs), outcome(module, inputs), 0)


@pytest.mark.parametrize(
    "name", ["zero", "zero_fp32", "zero_x", "ada_by_sample", "cogview4", "lumina_out"]
)
def test_compiled_and_traced(name, device):
    module, inputs = make(name, device)
    torch._dynamo.reset()

    def compiled(model, inputs):
        return torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs)

    same(outcome(swapped(module), inputs, compiled), outcome(module, inputs), 1e-6)
    absent = dict.fromkeys({"timestep", "class_labels", "hidden_dtype", "temb", "emb"} - {*inputs})
    traced = torch.fx.symbolic_trace(swapped(module), absent)
    assert any(node.target is swap_modulated._modulated for node in traced.graph.nodes)
    same(outcome(traced, inputs), outcome(module, inputs), 1e-6)


@pytest.mark.parametrize(("name", "x"), [("zero", "x"), ("zero_x", "hidden_states")])
def test_modulations_that_enlarge_the_input(name, x, device, calls):
    """Diffusers allows one image under two prompts, which the operators do not."""
    module, inputs = make(name, device)
    inputs[x] = inputs[x][:1]
    same(outcome(swapped(module), inputs), outcome(module, inputs), 1e-6)
    assert not calls


# ---- Cases in which a swapped module calls its norm.


def with_an_activation(module):
    module.norm = fused_layernorm.FusedLayerNorm(WIDTH, 1e-6, False, activation="silu")


def with_a_forward(module):
    """accelerate and diffusers' offloading set a forward on the module itself."""
    norm = module.norm
    forward = type(norm).forward
    norm.forward = lambda x: 2 * forward(norm, x)


CHANGES = {
    "forward": with_a_forward, "class": lambda module: swaps.give_own_class(module.norm),
    "activation": with_an_activation,
    "unswapped": lambda module: unswap_layer_norm(module.norm),
    "hook": lambda module: module.norm.register_forward_hook(lambda *args: 2 * args[-1]),
    "pre-hook": lambda module: module.norm.register_forward_pre_hook(lambda _, x: x[0].exp()),
    "backward hook": lambda module: module.norm.register_full_backward_hook(
        lambda _, dx, dy: (2 * dx[0],)),
}  # fmt: skip


@pytest.mark.parametrize("name", ["zero", "zero_fp32"])
@pytest.mark.parametrize("how", CHANGES)
def test_a_norm_that_computes_something_else_is_called(how, name, device, calls):
    stock, inputs = make(name, device)
    new = swapped(stock)
    for module in (stock, new):
        CHANGES[how](module)
    same(outcome(new, inputs), outcome(stock, inputs), 1e-6)
    assert not calls


@pytest.mark.parametrize("how", ["activation", "forward"])
@torch.no_grad()
def test_a_change_of_the_norm_after_compilation_counts(how, device):
    module, inputs = make("zero", device)
    new = swapped(module)
    torch._dynamo.reset()
    compiled = torch.compile(new, backend="eager")
    compiled(**inputs)
    CHANGES[how](new)
    torch.testing.assert_close(compiled(**inputs)[0], new(**inputs)[0])


def test_an_error_of_a_hook_on_saved_tensors_is_raised(device):
    module, inputs = make("zero", device)

    def pack(tensor):
        if tensor.shape == X:  # what the norm saves
            raise ValueError("of the hook")
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, pytest.raises(ValueError, match="of the hook"):
        swapped(module)(**inputs)


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


# ---- Whole transformers.


# The number of norms that one pass of a model computes together with one modulation or two. Blocks
# of PixArt and Wan write out the modulation in their own forwards, so only their norms are fused.
TRANSFORMERS = {dit: 2, flux: 2 * 2 + 2 + 1, sd3: 7, sd35: 7 + 2, wan: 0, pixart: 0, cogvideox: 9}


def transformer(build, device):
    model, inputs = build()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            for parameter in module.parameters():
                nn.init.normal_(parameter, 1.0, 0.2)
    inputs = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in inputs.items()}
    # In training mode labels and activations are dropped at random.
    return model.to(device).eval(), inputs


def sample(model, inputs):
    return model(**inputs, return_dict=False)


@pytest.mark.parametrize("build", TRANSFORMERS, ids=lambda build: build.__name__)
def test_transformer(build, device, calls, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
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


@pytest.mark.gpu
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("kind", ["leaf_level", "block_level"])
@pytest.mark.parametrize("make", [unet, sd3])
def test_group_offloading(make, kind, streams):
    """Before and after a swap; the weights come to the GPU as each module runs, and leave it."""
    model, inputs = make()
    model = model.double()  # convolutions in float32 are TF32's
    inputs = {name: (x.double() if x.is_floating_point() else x).cuda()
              for name, x in inputs.items()}  # fmt: skip
    with torch.no_grad():
        expected = copy.deepcopy(model).cuda()(**inputs).sample
    options = {"onload_device": torch.device("cuda"), "offload_type": kind, "use_stream": streams}
    if kind == "block_level":
        options["num_blocks_per_group"] = 1
    for swap_first in (True, False):
        new = copy.deepcopy(model)
        if swap_first:
            fused_layernorm.swap_norms(new, neighbours=True)
        new.enable_group_offload(**options)
        if not swap_first:
            fused_layernorm.swap_norms(new, neighbours=True)
        assert fused(new) or not swap_first
        with torch.no_grad():
            for _ in range(3):  # the order of the modules is learnt in the first call
                found = new(**inputs).sample
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
