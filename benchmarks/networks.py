# SPDX-License-Identifier: Apache-2.0
"""The models of benchmarks.models: transformers', timm's and diffusers', and an nnU-Net.

All have random weights, and are built on the default device. Decoders and diffusion transformers
have their real sizes, but few layers. MODELS at the end is the table.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

MODES = ("training", "inference")
# A model, its inputs as keyword arguments, and the loss of its output.
Built = tuple[Any, dict[str, torch.Tensor], Callable[[Any], torch.Tensor]]


def of(module: str, name: str) -> Any:
    """A class or function of a package, which is imported only here."""
    return getattr(importlib.import_module(module), name)


def transformer(name: str, **options: Any) -> Any:
    model = of("transformers", name)
    return model(model.config_class(**options))


def language_model(name: str, batch: int, length: int, **options: Any) -> Built:
    """A model of transformers that gives logits of tokens, without dropout."""
    model = transformer(name, **options)
    tokens = torch.randint(model.config.vocab_size, (batch, length))
    return model, {"input_ids": tokens}, lambda output: F.cross_entropy(
        output.logits.flatten(0, 1).float(), tokens.flatten())  # fmt: skip


def decoder(name: str, width: int, layers: int, heads: int, batch: int, length: int) -> Built:
    """A decoder at its real width, with few layers: "Qwen3", "Llama", "Gemma3"."""
    model, inputs, _ = language_model(
        f"{name}ForCausalLM", batch, length, vocab_size=32_768, hidden_size=width,
        intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4), head_dim=128, max_position_embeddings=4096,
        use_cache=False,
        attn_implementation="eager" if name == "Gemma2" else "sdpa",  # the only one it has
    )  # fmt: skip
    # The model computes its loss, which Liger fuses with the last product.
    return model, {**inputs, "labels": inputs["input_ids"]}, lambda output: output.loss


def classifier(model: Any) -> Built:
    """A model that gives logits of images."""
    images = noise(**{getattr(model, "main_input_name", "x"): (64, 3, 224, 224)})
    labels = torch.randint(1000, (64,))

    def loss(output: Any) -> torch.Tensor:
        logits: Any = getattr(output, "logits", output)
        return F.cross_entropy(logits.float(), labels)

    return model, images, loss


def noise(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def squared_error(*shape: int) -> Callable[[Any], torch.Tensor]:
    """The mean squared error of the model's first output against noise, as a training loss."""
    wanted = torch.randn(shape)
    return lambda output: F.mse_loss(
        (output if isinstance(output, torch.Tensor) else output[0]).float(), wanted)  # fmt: skip


class Called(nn.Module):
    """A module that is called as `call` says, with its inputs by name."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, **inputs: torch.Tensor) -> Any:
        return self.call(self.module, **inputs)


def dit() -> Built:
    """DiT-XL/2: 32 samples of 32 x 32 latents, so 256 tokens each."""
    model = of("diffusers", "DiTTransformer2DModel")(num_layers=8, out_channels=8)
    for module in model.modules():  # otherwise training drops labels at random
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = 0.0
    numbers = {name: torch.randint(1000, (32,)) for name in ("timestep", "class_labels")}
    return model, noise(hidden_states=(32, 4, 32, 32)) | numbers, squared_error(32, 8, 32, 32)


def sd3() -> Built:
    """Stable Diffusion 3.5 large: 64 x 64 tokens of the image beside those of the text."""
    model = of("diffusers", "SD3Transformer2DModel")(
        num_layers=6, num_attention_heads=38, caption_projection_dim=64 * 38,
        pos_embed_max_size=192, qk_norm="rms_norm")  # fmt: skip
    inputs = noise(hidden_states=(2, 16, 128, 128), pooled_projections=(2, 2048),
                   encoder_hidden_states=(2, 333, 4096))  # fmt: skip
    inputs["timestep"] = torch.randint(1000, (2,))
    return model, inputs, squared_error(2, 16, 128, 128)


def flux() -> Built:
    """Flux: 64 x 64 tokens of the image beside those of the text, one sample."""
    model = of("diffusers", "FluxTransformer2DModel")(
        num_layers=2, num_single_layers=4, guidance_embeds=True)  # fmt: skip
    places = torch.arange(64, dtype=torch.float32)
    inputs = noise(hidden_states=(1, 4096, 64), pooled_projections=(1, 768),
                   encoder_hidden_states=(1, 512, 4096))  # fmt: skip
    inputs |= {"timestep": torch.rand(1), "guidance": torch.full((1,), 3.5),
               "img_ids": F.pad(torch.cartesian_prod(places, places), (1, 0)),
               "txt_ids": torch.zeros(512, 3)}  # fmt: skip
    return model, inputs, squared_error(1, 4096, 64)


def wan() -> Built:
    """Wan 2.1 1.3B: 21 x 30 x 52 tokens (5 seconds of 480p), one sample."""
    model = of("diffusers", "WanTransformer3DModel")(
        num_layers=4, num_attention_heads=12, ffn_dim=8960)  # fmt: skip
    latents = (1, 16, 21, 60, 104)
    inputs = noise(hidden_states=latents, encoder_hidden_states=(1, 512, 4096))
    return model, inputs | {"timestep": torch.randint(1000, (1,))}, squared_error(*latents)


def vae(decodes: bool) -> Built:
    """The decoder of the VAE of SD3 and Flux, or its encoder."""
    model = of("diffusers", "AutoencoderKL")(
        block_out_channels=(128, 256, 512, 512), layers_per_block=2, latent_channels=16,
        use_quant_conv=False, use_post_quant_conv=False,
        down_block_types=4 * ("DownEncoderBlock2D",), up_block_types=4 * ("UpDecoderBlock2D",),
    )  # fmt: skip
    image, latents = (1, 3, 1024, 1024), (1, 16, 128, 128)
    if decodes:
        del model.encoder
        decoder = Called(model, lambda vae, x: vae.decode(x).sample)
        return decoder, noise(x=latents), squared_error(*image)
    del model.decoder
    encoder = Called(model, lambda vae, x: vae.encode(x).latent_dist.mean)
    return encoder, noise(x=image), squared_error(*latents)


def sdxl() -> Built:
    model = of("diffusers", "UNet2DConditionModel")(
        block_out_channels=(320, 640, 1280),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2, 4), attention_head_dim=(5, 10, 20),
        cross_attention_dim=2048, use_linear_projection=True, addition_embed_type="text_time",
        addition_time_embed_dim=256, projection_class_embeddings_input_dim=6 * 256 + 1280,
    )  # fmt: skip
    unet = Called(model.to(torch.bfloat16), lambda unet, x, step, text, **more: unet(
        x, step, text, added_cond_kwargs=more).sample)  # fmt: skip
    inputs = noise(x=(2, 4, 128, 128), text=(2, 77, 2048), text_embeds=(2, 1280))
    inputs |= {"step": torch.tensor(500), "time_ids": torch.rand(2, 6)}
    return unet, inputs, squared_error(2, 4, 128, 128)


def _nnunet_block(before: int, after: int, stride: int = 1) -> nn.Sequential:
    def part(before: int, stride: int) -> list[nn.Module]:
        return [nn.Conv3d(before, after, 3, stride, padding=1),
                nn.InstanceNorm3d(after, affine=True), nn.LeakyReLU(inplace=True)]  # fmt: skip

    return nn.Sequential(*part(before, stride), *part(after, 1))


class NnUnet(nn.Module):
    """A 3-D UNet as nnU-Net (Isensee et al., 2021) plans it: InstanceNorm and LeakyReLU behind each
    convolution."""

    def __init__(self) -> None:
        super().__init__()
        pairs = [*itertools.pairwise((32, 64, 128, 256, 320, 320))]
        self.first = _nnunet_block(1, 32)
        self.down = nn.ModuleList(_nnunet_block(before, after, 2) for before, after in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose3d(b, a, 2, stride=2) for a, b in pairs[::-1])
        self.join = nn.ModuleList(_nnunet_block(2 * a, a) for a, _ in pairs[::-1])
        self.last = nn.Conv3d(32, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skips = self.first(x), []
        for down in self.down:
            skips.append(x)
            x = down(x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat((up(x), skips.pop()), dim=1))
        return self.last(x)


def nnunet() -> Built:
    return NnUnet(), noise(x=(2, 1, 128, 128, 128)), squared_error(2, 3, 128, 128, 128)


# ---- The table.


@dataclass(frozen=True)
class Model:
    """How a model is built and measured: what one of its steps works through, and whether it is
    trained with half-precision weights, not under autocast."""

    build: Callable[[], Built]
    units: tuple[int, str]
    half: bool = False
    modes: tuple[str, ...] = MODES
    dtype: torch.dtype = torch.bfloat16
    channels_last: bool = False


TOKENS = (4 * 4096, "tokens")
IMAGES = (64, "images")
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: dict[str, Model] = {
    "transformers BERT-base 16x512": Model(
        lambda: language_model("BertForMaskedLM", 16, 512, **NO_DROPOUT), (16 * 512, "tokens")),
    "transformers GPT-2 8x1024": Model(
        lambda: language_model("GPT2LMHeadModel", 8, 1024, resid_pdrop=0.0, embd_pdrop=0.0,
                               attn_pdrop=0.0, use_cache=False),
        (8 * 1024, "tokens")),
    "transformers ViT-B/16 64x224": Model(lambda: classifier(
        transformer("ViTForImageClassification", num_labels=1000, **NO_DROPOUT)), IMAGES),
    # Liger's are models that it is often used for, at the widths of small releases.
    **{f"{whose} {name}, {width} wide, {layers} layers, {batch}x{length}": Model(
           functools.partial(decoder, name, width, layers, heads, batch, length), TOKENS, True,
           modes=("training",) if whose == "Liger's" else MODES)
       for whose, name, width, layers, heads, batch, length in (
           ("transformers", "Qwen3", 2048, 6, 16, 4, 4096),
           ("transformers", "Llama", 4096, 4, 32, 4, 4096),
           ("transformers", "Gemma3", 2560, 6, 8, 4, 4096),
           ("Liger's", "Qwen3", 1024, 14, 16, 8, 2048), ("Liger's", "Llama", 2048, 8, 32, 4, 4096),
           ("Liger's", "Olmo2", 2048, 6, 16, 4, 4096), ("Liger's", "Gemma2", 2304, 6, 8, 4, 4096),
           ("Liger's", "Phi3", 3072, 5, 24, 4, 4096))},
    # A hybrid on the attention that transformers has in PyTorch's operators, with dense layers.
    "transformers hybrid Qwen3-Next, 2048 wide, 4 layers, 2x4096": Model(
        lambda: language_model(
            "Qwen3NextForCausalLM", 2, 4096, vocab_size=32_768, hidden_size=2048,
            num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=2, head_dim=256,
            intermediate_size=6144, mlp_only_layers=[0, 1, 2, 3], use_cache=False,
            attn_implementation="sdpa"),
        (2 * 4096, "tokens"), True),
    "transformers ConvNeXt-T 64x224": Model(lambda: classifier(
        transformer("ConvNextForImageClassification", num_labels=1000)), IMAGES),
    # No random drops: losses can be compared.
    **{f"timm {name} 64x224": Model(
           functools.partial(lambda known: classifier(
               of("timm", "create_model")(known, drop_path_rate=0.0)), known), IMAGES)
       for name, known in (("ViT-B/16", "vit_base_patch16_224"), ("ConvNeXt-T", "convnext_tiny"),
                           ("Swin-T", "swin_tiny_patch4_window7_224"))},
    "diffusers DiT-XL/2, 8 layers": Model(dit, (32, "images"), True),
    # In torch 2.11 its backward pass ends in an illegal address, even stock and in eager mode.
    "diffusers Flux, 2+4 layers": Model(flux, (1, "images"), True, modes=("inference",)),
    "diffusers SD3.5-large, 6 layers": Model(sd3, (2, "images"), True),
    "diffusers Wan 1.3B, 4 layers": Model(wan, (1, "videos"), True),
    **{f"diffusers {order}VAE {what} 1024x1024": Model(
           functools.partial(vae, what == "decoding"), (1, "images"), True, modes=("inference",),
           channels_last=bool(order))
       for what in ("decoding", "encoding") for order in ("", "channels_last ")},
    **{f"diffusers {order}SDXL UNet of 2 and 4 layers, 2x128x128": Model(
           sdxl, (2, "images"), True, channels_last=bool(order))
       for order in ("", "channels_last ")},
    **{f"nnU-Net-like {order}3-D network 2x128x128x128": Model(
           nnunet, (2, "volumes"), dtype=torch.float16, channels_last=bool(order))
       for order in ("", "channels_last ")},
}  # fmt: skip
