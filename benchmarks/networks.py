# SPDX-License-Identifier: Apache-2.0
"""The models of benchmarks.models: transformers', timm's, torchvision's and diffusers', and blocks.

All have random weights, and are built on the default device. Decoders and diffusion transformers
have their real sizes, but few layers. MODELS at the end is the table: a model is a row, and a
function that builds it.
"""

from __future__ import annotations

import functools
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


# ---- transformers and timm.


def language_model(name: str, batch: int, length: int, **options: Any) -> Built:
    """A model of transformers that gives logits of tokens, without dropout."""
    import transformers

    config = getattr(transformers, name.partition("For")[0].removesuffix("LMHeadModel") + "Config")
    config = config(**options)
    tokens = torch.randint(config.vocab_size, (batch, length))
    model = getattr(transformers, name)(config)
    return model, {"input_ids": tokens}, lambda output: F.cross_entropy(
        output.logits.flatten(0, 1).float(), tokens.flatten())  # fmt: skip


def decoder(
    name: str, width: int, layers: int, heads: int, batch: int = 4, length: int = 4096
) -> Built:
    """A decoder of transformers at its real width, with few layers: "Qwen3", "Llama", "Gemma3"."""
    import transformers

    prefix = f"{name}Text" if name == "Gemma3" else name
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=32_768, hidden_size=width, intermediate_size=3 * width,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=max(1, heads // 4),
        head_dim=128, max_position_embeddings=4096, use_cache=False,
        attn_implementation="eager" if name == "Gemma2" else "sdpa",  # the only one it has
    )  # fmt: skip
    tokens = torch.randint(config.vocab_size, (batch, length))
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    # The model computes its loss, which Liger fuses with the last product.
    return model, {"input_ids": tokens, "labels": tokens}, lambda output: output.loss


def image_classifier(name: str, batch: int = 64, **options: Any) -> Built:
    """A model of transformers that gives logits of images, without dropout."""
    import transformers

    config = getattr(transformers, f"{name}Config")(num_labels=1000, **options)
    model = getattr(transformers, f"{name}ForImageClassification")(config)
    images = {"pixel_values": torch.randn(batch, 3, 224, 224)}
    return model, images, _class_loss(batch, lambda output: output.logits)


def timm_model(name: str, batch: int = 64) -> Built:
    import timm

    inputs = {"x": torch.randn(batch, 3, 224, 224)}
    model = timm.create_model(name, drop_path_rate=0.0)  # no random drops: losses can be compared
    return model, inputs, _class_loss(batch, lambda output: output)


def _class_loss(batch: int, logits: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    labels = torch.randint(1000, (batch,))
    return lambda output: F.cross_entropy(logits(output).float(), labels)


# ---- Diffusion transformers.


def noise(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def squared_error(*shape: int) -> Callable[[Any], torch.Tensor]:
    """The mean squared error of the model's first output against noise, as a training loss."""
    wanted = torch.randn(shape)
    return lambda output: F.mse_loss(
        (output if isinstance(output, torch.Tensor) else output[0]).float(), wanted)  # fmt: skip


def dit(layers: int = 8, heads: int = 16, batch: int = 32, side: int = 32) -> Built:
    """DiT-XL/2: side x side latents of 4 channels, so (side / 2)^2 tokens."""
    from diffusers import DiTTransformer2DModel

    model: Any = DiTTransformer2DModel(num_layers=layers, num_attention_heads=heads,
                                  out_channels=8, sample_size=side)  # fmt: skip
    for module in model.modules():  # otherwise training drops labels at random
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = 0.0
    inputs = noise(hidden_states=(batch, 4, side, side))
    inputs |= {name: torch.randint(1000, (batch,)) for name in ("timestep", "class_labels")}
    return model, inputs, squared_error(batch, 8, side, side)


def sd3(
    layers: int = 6, heads: int = 38, batch: int = 2, side: int = 128, words: int = 333,
    text: int = 4096,
) -> Built:  # fmt: skip
    """Stable Diffusion 3.5 large: (side / 2)^2 tokens of the image beside those of the text."""
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=side, num_layers=layers, num_attention_heads=heads,
        caption_projection_dim=64 * heads, joint_attention_dim=text,
        pos_embed_max_size=max(192, side), qk_norm="rms_norm",
    )  # fmt: skip
    inputs = noise(hidden_states=(batch, 16, side, side), pooled_projections=(batch, 2048),
                   encoder_hidden_states=(batch, words, text))  # fmt: skip
    inputs |= {"timestep": torch.randint(1000, (batch,))}
    return model, inputs, squared_error(batch, 16, side, side)


def flux(
    layers: int = 2, single_layers: int = 4, heads: int = 24, side: int = 64, words: int = 512,
    text: int = 4096,
) -> Built:  # fmt: skip
    """Flux: side^2 tokens of the image beside those of the text, one sample."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        num_layers=layers, num_single_layers=single_layers, num_attention_heads=heads,
        joint_attention_dim=text, guidance_embeds=True,
    )  # fmt: skip
    places = torch.arange(side, dtype=torch.float32)
    grid = torch.cartesian_prod(places, places)
    inputs = noise(hidden_states=(1, side * side, 64), pooled_projections=(1, 768),
                   encoder_hidden_states=(1, words, text))  # fmt: skip
    inputs |= {
        "timestep": torch.rand(1),
        "guidance": torch.full((1,), 3.5),
        "img_ids": F.pad(grid, (1, 0)),
        "txt_ids": torch.zeros(words, 3),
    }
    return model, inputs, squared_error(1, side * side, 64)


def wan(
    layers: int = 4, heads: int = 12, hidden: int = 8960, frames: int = 21, height: int = 60,
    width: int = 104, words: int = 512, text: int = 4096,
) -> Built:  # fmt: skip
    """Wan 2.1 1.3B: frames x height / 2 x width / 2 tokens (5 seconds of 480p), one sample."""
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(num_layers=layers, num_attention_heads=heads,
                                  ffn_dim=hidden, text_dim=text)  # fmt: skip
    latents = (1, 16, frames, height, width)
    inputs = noise(hidden_states=latents, encoder_hidden_states=(1, words, text))
    inputs |= {"timestep": torch.randint(1000, (1,))}
    return model, inputs, squared_error(*latents)


# ---- Group norms: the VAE of SD3 and Flux, SDXL's UNet, nnU-Net (Isensee et al., 2021).


class Vae(nn.Module):
    """The decoder of the VAE of SD3 and Flux, or its encoder."""

    def __init__(self, decodes: bool, widths: tuple[int, ...], groups: int) -> None:
        from diffusers import AutoencoderKL

        super().__init__()
        blocks = len(widths)
        self.decodes = decodes
        self.vae: Any = AutoencoderKL(
            block_out_channels=widths, layers_per_block=2, norm_num_groups=groups,
            latent_channels=16, use_quant_conv=False, use_post_quant_conv=False,
            down_block_types=blocks * ("DownEncoderBlock2D",),
            up_block_types=blocks * ("UpDecoderBlock2D",),
        )  # fmt: skip
        delattr(self.vae, "encoder" if decodes else "decoder")

    def forward(self, x: torch.Tensor) -> Any:
        return self.vae.decode(x).sample if self.decodes else self.vae.encode(x).latent_dist.mean


def vae(
    decodes: bool, side: int = 1024, widths: tuple[int, ...] = (128, 256, 512, 512),
    groups: int = 32,
) -> Built:  # fmt: skip
    image, small = (1, 3, side, side), side // 2 ** (len(widths) - 1)
    shape, result = ((1, 16, small, small), image) if decodes else (image, (1, 16, small, small))
    return Vae(decodes, widths, groups), {"x": torch.randn(shape)}, squared_error(*result)


class Sdxl(nn.Module):
    """SDXL's UNet; its further conditions are tensors by name, as the models are called."""

    def __init__(self, **options: Any) -> None:
        from diffusers import UNet2DConditionModel

        super().__init__()
        self.unet: Any = UNet2DConditionModel(
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            addition_embed_type="text_time", use_linear_projection=True, **options,
        )  # fmt: skip

    def forward(self, x: torch.Tensor, text: torch.Tensor, pooled: torch.Tensor,
                ids: torch.Tensor) -> Any:  # fmt: skip
        more = {"text_embeds": pooled, "time_ids": ids}
        step = torch.tensor(500, device=x.device)
        return self.unet(x, step, text, added_cond_kwargs=more).sample


def sdxl(
    batch: int = 2, side: int = 128, words: int = 77, text: int = 2048, pooled: int = 1280,
    ids: int = 256, widths: tuple[int, ...] = (320, 640, 1280),
    layers: tuple[int, ...] = (1, 2, 4), heads: tuple[int, ...] = (5, 10, 20), groups: int = 32,
) -> Built:  # fmt: skip
    model = Sdxl(
        block_out_channels=widths, transformer_layers_per_block=layers, norm_num_groups=groups,
        attention_head_dim=heads, cross_attention_dim=text, addition_time_embed_dim=ids,
        projection_class_embeddings_input_dim=6 * ids + pooled,
    ).to(torch.bfloat16)  # fmt: skip
    inputs = noise(x=(batch, 4, side, side), text=(batch, words, text), pooled=(batch, pooled))
    return model, inputs | {"ids": torch.rand(batch, 6)}, squared_error(batch, 4, side, side)


def _nnunet_block(before: int, after: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(*(
        module for first in (True, False) for module in (
            nn.Conv3d(before if first else after, after, 3, stride if first else 1, padding=1),
            nn.InstanceNorm3d(after, affine=True),
            nn.LeakyReLU(inplace=True),
        )
    ))  # fmt: skip


class NnUnet(nn.Module):
    """A 3-D UNet as nnU-Net plans it: InstanceNorm and LeakyReLU behind each convolution."""

    def __init__(self, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        pairs = [*itertools.pairwise(widths)]
        self.first = _nnunet_block(1, widths[0])
        self.down = nn.ModuleList(_nnunet_block(before, after, 2) for before, after in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose3d(b, a, 2, stride=2) for a, b in pairs[::-1])
        self.join = nn.ModuleList(_nnunet_block(2 * a, a) for a, _ in pairs[::-1])
        self.last = nn.Conv3d(widths[0], classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skips = self.first(x), []
        for down in self.down:
            skips.append(x)
            x = down(x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat((up(x), skips.pop()), dim=1))
        return self.last(x)


def nnunet(
    batch: int = 2, side: int = 128, widths: tuple[int, ...] = (32, 64, 128, 256, 320, 320),
) -> Built:  # fmt: skip
    inputs = {"x": torch.randn(batch, 1, side, side, side)}
    return NnUnet(widths, 3), inputs, squared_error(batch, 3, side, side, side)


# ---- Norms over the channels of NCHW: NAFNet (Chen et al., 2022), torchvision's ConvNeXt.


class NafBlock(nn.Module):
    """A block of NAFNet: two gated halves, each behind a norm over channels."""

    def __init__(self, width: int) -> None:
        from transformers.models.vitdet.modeling_vitdet import VitDetLayerNorm

        super().__init__()
        wide = 2 * width
        self.norm1, self.norm2 = VitDetLayerNorm(width), VitDetLayerNorm(width)
        self.expand1, self.expand2 = (nn.Conv2d(width, wide, 1) for _ in range(2))
        self.depthwise = nn.Conv2d(wide, wide, 3, padding=1, groups=wide)
        self.attention = nn.Conv2d(width, width, 1)
        self.reduce1, self.reduce2 = (nn.Conv2d(width, width, 1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.depthwise(self.expand1(self.norm1(x))).chunk(2, dim=1)
        gated = first * second
        x = x + self.reduce1(gated * self.attention(gated.mean((2, 3), keepdim=True)))
        first, second = self.expand2(self.norm2(x)).chunk(2, dim=1)
        return x + self.reduce2(first * second)


class NafBlocks(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # by name, as the models are called
        return super().forward(x)


def nafnet(layers: int = 4, size: tuple[int, int, int, int] = (8, 64, 256, 256)) -> Built:
    model = NafBlocks(*(NafBlock(size[1]) for _ in range(layers)))
    return model, {"x": torch.randn(size)}, squared_error(*size)


def torchvision_convnext(batch: int = 64) -> Built:
    from torchvision.models import convnext_tiny

    model = convnext_tiny(stochastic_depth_prob=0.0)  # losses can be compared
    return model, {"x": torch.randn(batch, 3, 224, 224)}, squared_error(batch, 1000)


# ---- The table.


@dataclass(frozen=True)
class Model:
    """How a model is built and measured: the Python package that it needs, what one of its steps
    works through, and whether it is trained with half-precision weights, not under autocast."""

    package: str
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
        "transformers", lambda: language_model("BertForMaskedLM", 16, 512, **NO_DROPOUT),
        (16 * 512, "tokens")),
    "transformers GPT-2 8x1024": Model(
        "transformers", lambda: language_model(
            "GPT2LMHeadModel", 8, 1024, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            use_cache=False),
        (8 * 1024, "tokens")),
    "transformers ViT-B/16 64x224": Model(
        "transformers", lambda: image_classifier("ViT", **NO_DROPOUT), IMAGES),
    **{f"transformers {name}, {width} wide, {layers} layers, 4x4096": Model(
           "transformers", functools.partial(decoder, name, width, layers, heads), TOKENS, True)
       for name, width, layers, heads in (("Qwen3", 2048, 6, 16), ("Llama", 4096, 4, 32),
                                          ("Gemma3", 2560, 6, 8))},
    # Models that Liger is often used for, at the widths of small releases.
    **{f"Liger's {name}, {width} wide, {layers} layers, {batch}x{length}": Model(
           "transformers", functools.partial(decoder, name, width, layers, heads, batch, length),
           TOKENS, True, modes=("training",))
       for name, width, layers, heads, batch, length in (
           ("Qwen3", 1024, 14, 16, 8, 2048), ("Llama", 2048, 8, 32, 4, 4096),
           ("Olmo2", 2048, 6, 16, 4, 4096), ("Gemma2", 2304, 6, 8, 4, 4096),
           ("Phi3", 3072, 5, 24, 4, 4096))},
    # Hybrids on the attention that transformers has in PyTorch's operators, with dense layers.
    "transformers hybrid Qwen3-Next, 2048 wide, 4 layers, 2x4096": Model(
        "transformers", lambda: language_model(
            "Qwen3NextForCausalLM", 2, 4096, vocab_size=32_768, hidden_size=2048,
            num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=2, head_dim=256,
            intermediate_size=6144, mlp_only_layers=[0, 1, 2, 3], use_cache=False,
            attn_implementation="sdpa"),
        (2 * 4096, "tokens"), True),
    "transformers Mamba 2, 2048 wide, 4 layers, 1x2048": Model(
        "transformers", lambda: language_model(
            "Mamba2ForCausalLM", 1, 2048, vocab_size=32_768, hidden_size=2048, num_hidden_layers=4,
            num_heads=64, head_dim=64, state_size=64, n_groups=8, chunk_size=64, use_cache=False),
        (2048, "tokens"), True),
    "transformers ConvNeXt-T 64x224": Model(
        "transformers", lambda: image_classifier("ConvNext"), IMAGES),
    "NAFNet blocks, 4 layers, 8x64x256x256": Model(
        "transformers", nafnet, (8, "images"), True),
    "torchvision ConvNeXt-T 64x224": Model("torchvision", torchvision_convnext, IMAGES),
    **{f"timm {name} 64x224": Model("timm", functools.partial(timm_model, known), IMAGES)
       for name, known in (("ViT-B/16", "vit_base_patch16_224"), ("ConvNeXt-T", "convnext_tiny"),
                           ("Swin-T", "swin_tiny_patch4_window7_224"))},
    "diffusers DiT-XL/2, 8 layers": Model("diffusers", dit, (32, "images"), True),
    # In torch 2.11 its backward pass ends in an illegal address, even stock and in eager mode.
    "diffusers Flux, 2+4 layers": Model(
        "diffusers", flux, (1, "images"), True, modes=("inference",)),
    "diffusers SD3.5-large, 6 layers": Model("diffusers", sd3, (2, "images"), True),
    "diffusers Wan 1.3B, 4 layers": Model("diffusers", wan, (1, "videos"), True),
    **{f"diffusers {order}VAE {what} 1024x1024": Model(
           "diffusers", functools.partial(vae, what == "decoding"), (1, "images"), True,
           modes=("inference",), channels_last=bool(order))
       for what in ("decoding", "encoding") for order in ("", "channels_last ")},
    **{f"diffusers {order}SDXL UNet of 2 and 4 layers, 2x128x128": Model(
           "diffusers", sdxl, (2, "images"), True, channels_last=bool(order))
       for order in ("", "channels_last ")},
    **{f"nnU-Net-like {order}3-D network 2x128x128x128": Model(
           "torch", nnunet, (2, "volumes"), dtype=torch.float16, channels_last=bool(order))
       for order in ("", "channels_last ")},
}  # fmt: skip


# What benchmarks.models does with each, by the names in a results file, in words.
TITLES = {
    "eager": "stock",
    "compiled": "compiled",
    "reduce_overhead": 'compiled, mode="reduce-overhead"',
    "layers": "layers compiled",
    "swap": "swapped",
    "swap_neighbours": "swapped with neighbours",
    "swap_compiled": "swapped and compiled",
    "swap_reduce_overhead": 'swapped and compiled, mode="reduce-overhead"',
    "swap_layers": "swapped, then layers compiled",
    "override": "override_aten()",
    "fused_compiled": 'backend="fused_layernorm", then Inductor',
    "fused_reduce_overhead": 'backend="fused_layernorm", with CUDA graphs',
    "liger": "Liger",
    "liger_swap": "Liger, then swapped",
    "liger_rest_swap": "Liger without norms and rotations, then swapped",
}


def units_of(name: str) -> tuple[int, str]:
    """What a step of this model works through; nothing for a model that is not known any more."""
    return MODELS[name].units if name in MODELS else (0, "")
