# SPDX-License-Identifier: Apache-2.0
"""Tiny diffusion transformers of diffusers with random weights: each gives (model, inputs)."""

import libraries
import torch

SMALL = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4,
         "num_layers": 2}  # fmt: skip
IMAGE = {"sample_size": 8, "patch_size": 2}


def make(cls, **options):
    return getattr(libraries.get("diffusers"), cls)(**{**SMALL, **options})


def latents(*shape):
    return {"hidden_states": torch.randn(shape), "timestep": torch.tensor([1, 7])}


def text_of(width, **others):
    return {"encoder_hidden_states": torch.randn(2, 6, width), **others}


def dit():
    model = make("DiTTransformer2DModel", **IMAGE, num_embeds_ada_norm=10)
    return model, {**latents(2, 4, 8, 8), "class_labels": torch.tensor([2, 3])}


def flux():
    sizes = {"patch_size": 1, "attention_head_dim": 16, "num_single_layers": 2}
    text = {"joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)}
    ids = {"img_ids": torch.randint(4, (16, 3)), "txt_ids": torch.zeros(6, 3, dtype=torch.int64)}
    inputs = latents(2, 16, 4) | text_of(32, pooled_projections=torch.randn(2, 32), **ids)
    model = make("FluxTransformer2DModel", **sizes, **text)
    return model, {**inputs, "timestep": torch.tensor([0.1, 0.7])}


def sd3(num_layers=3, **options):
    sizes = {**IMAGE, "num_layers": num_layers, "num_attention_heads": 4, "pos_embed_max_size": 8}
    text = {"caption_projection_dim": 32, "joint_attention_dim": 32, "pooled_projection_dim": 16}
    model = make("SD3Transformer2DModel", **sizes, **text, **options)
    return model, latents(2, 4, 8, 8) | text_of(32, pooled_projections=torch.randn(2, 16))


def sd35():
    """An sd3 whose first blocks have two attentions, and one norm with two modulations."""
    return sd3(dual_attention_layers=(0, 1), qk_norm="rms_norm")


def wan():
    sizes = {"patch_size": (1, 2, 2), "attention_head_dim": 12, "ffn_dim": 32, "text_dim": 16}
    options = {"freq_dim": 16, "cross_attn_norm": True, "rope_max_seq_len": 16}
    model = make("WanTransformer3DModel", **sizes, **options)
    return model, latents(2, 4, 2, 8, 8) | text_of(16)


def pixart():
    sizes = {"out_channels": 8, "cross_attention_dim": 16, "caption_channels": 12}
    model = make("PixArtTransformer2DModel", **IMAGE, **sizes, use_additional_conditions=False)
    added = {"resolution": None, "aspect_ratio": None}
    return model, latents(2, 4, 8, 8) | text_of(12, added_cond_kwargs=added)


def cogvideox():
    sizes = {"sample_width": 8, "sample_height": 8, "sample_frames": 5, "patch_size": 2}
    text = {"time_embed_dim": 8, "text_embed_dim": 12, "max_text_seq_length": 6}
    model = make("CogVideoXTransformer3DModel", **sizes, **text, temporal_compression_ratio=4)
    return model, latents(2, 2, 4, 8, 8) | text_of(12)


def unet():
    model = libraries.get("diffusers").UNet2DModel(
        sample_size=8, block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=2,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), attention_head_dim=4,
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return model, {"sample": torch.randn(2, 3, 8, 8), "timestep": torch.tensor([1, 7])}
