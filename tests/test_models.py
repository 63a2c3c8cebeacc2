"""Models of transformers and timm, tiny and with random weights, swapped and overridden.

The models are not changed for it: `swap_layer_norm` changes the class of their norms, and
`override_aten` nothing at all in them. Without a GPU the override is tried on the CPU's key.
"""

import copy

import mended_torchvision  # noqa: F401  (before transformers and timm import it)
import pytest
import torch
from torch import nn

import fused_layernorm
from fused_layernorm import FusedLayerNorm
from fused_layernorm.override import _override

HAS_KERNELS = (
    torch.ops.fused_layernorm._build_info() != "cpu only" and torch.backends.cuda.is_built()
)
STEPS = 3

# ---- The models: each gives (model, loss of the model).


def bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    tokens = torch.randint(50, (2, 12))
    return transformers.BertForMaskedLM(config), {"input_ids": tokens, "labels": tokens}


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=50,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    tokens = torch.randint(50, (2, 12))
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


def vit():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = transformers.ViTForImageClassification(config)
    return model, {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}


class Classifier(nn.Module):
    """An image model with transformers' way of returning a loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images, labels):
        loss = nn.functional.cross_entropy(self.model(images), labels)
        return type("Output", (), {"loss": loss})


def timm_model(name, size, **options):
    model = pytest.importorskip("timm").create_model(
        name, num_classes=5, drop_path_rate=0.0, **options
    )
    inputs = {"images": torch.randn(2, 3, size, size), "labels": torch.tensor([0, 3])}
    return Classifier(model), inputs


def timm_vit():
    return timm_model(
        "vit_tiny_patch16_224", 16, img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2
    )


def timm_convnext():
    return timm_model(
        "convnext_atto", 32, depths=(1, 1, 1, 1), dims=(8, 16, 24, 32), conv_mlp=False
    )


def timm_swin():
    return timm_model(
        "swin_tiny_patch4_window7_224",
        56,
        img_size=56,
        embed_dim=16,
        depths=(1, 1),
        num_heads=(2, 4),
    )


class TorchvisionStyle(nn.Module):
    """As torchvision writes them: norms made by a partial, one over channels by permutation."""

    class LayerNorm2d(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.norm = self.LayerNorm2d(16, eps=1e-6)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16, eps=1e-6))
        self.head = nn.Linear(16, 5)

    def forward(self, images):
        return self.head(self.encoder(self.norm(self.patches(images)).flatten(2).mT).mean(1))


def torchvision_style():
    inputs = {"images": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 3])}
    return Classifier(TorchvisionStyle()), inputs


MODELS = {
    f.__name__: f for f in (bert, gpt2, vit, timm_vit, timm_convnext, timm_swin, torchvision_style)
}


# timm has a LayerNorm of its own, which differs from nn.LayerNorm in nothing but the way it calls
# F.layer_norm. LayerNorm2d norms another dimension, and stays.
def by_name(name, module):
    return type(module).__name__ == "LayerNorm"


@pytest.fixture(params=MODELS)
def model_and_inputs(request, device):
    torch.manual_seed(0)
    model, inputs = MODELS[request.param]()
    # Random weights, so that a weight or bias that is not used shows.
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, 1.0, 0.2)
            nn.init.normal_(module.bias, 0.0, 0.2)
    model = model.to(device).train()
    return model, {name: tensor.to(device) for name, tensor in inputs.items()}


def gradients(model, inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def losses(model, inputs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


def same(found, expected):
    loss, grads = found
    expected_loss, expected_grads = expected
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(
            grad, expected_grads[name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_swapped(model_and_inputs):
    stock, inputs = model_and_inputs
    swapped = fused_layernorm.swap_layer_norm(copy.deepcopy(stock), predicate=by_name)
    norms = sum(isinstance(m, FusedLayerNorm) for m in swapped.modules())
    assert norms == sum(by_name("", m) for m in stock.modules())
    assert norms > 0
    assert swapped.state_dict().keys() == stock.state_dict().keys()
    same(gradients(swapped, inputs), gradients(stock, inputs))
    torch.testing.assert_close(losses(swapped, inputs), losses(stock, inputs), rtol=1e-4, atol=1e-5)


def test_swapped_inference(model_and_inputs):
    stock, inputs = model_and_inputs
    swapped = fused_layernorm.swap_layer_norm(copy.deepcopy(stock), predicate=by_name)
    with torch.inference_mode():
        found, expected = (m.eval()(**inputs).loss for m in (swapped, stock))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_overridden(model_and_inputs, device):
    model, inputs = model_and_inputs
    if device == "cuda" and not HAS_KERNELS:
        pytest.skip("this build has no CUDA kernels")
    key = device.upper()
    norms = sum(isinstance(m, nn.LayerNorm) for m in model.modules())
    expected = gradients(model, inputs)
    expected_losses = losses(copy.deepcopy(model), inputs)
    before = torch.ops.fused_layernorm._override_calls(key)
    with _override(key):
        found = gradients(model, inputs)
        calls = torch.ops.fused_layernorm._override_calls(key) - before
        found_losses = losses(copy.deepcopy(model), inputs)
    assert calls >= 2 * norms  # every norm, both ways
    same(found, expected)
    torch.testing.assert_close(found_losses, expected_losses, rtol=1e-4, atol=1e-5)
