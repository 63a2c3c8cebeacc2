# SPDX-License-Identifier: Apache-2.0
"""Tiny diffusion transformers of diffusers with random weights: each gives (model, inputs)."""

import libraries
import torch


def _diffusers():
    return libraries.get("diffusers")


def dit():
    model = _diffusers().DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
    )
    return model, {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor([1, 7]),
        "class_labels": torch.tensor([2, 3]),
    }


def flux():
    model = _diffusers().FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    return model, {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 6, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([0.1, 0.7]),
        "img_ids": torch.randint(4, (16, 3)),
        "txt_ids": torch.zeros(6, 3, dtype=torch.int64),
    }


def sd3(num_layers=3, **options):
    model = _diffusers().SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=num_layers,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=32,
        pooled_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=8,
        **options,
    )
    return model, {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 6, 32),
        "pooled_projections": torch.randn(2, 16),
        "timestep": torch.tensor([1, 7]),
    }


def sd35():
    """An sd3 whose first blocks have two attentions, and one norm with two modulations."""
    return sd3(dual_attention_layers=(0, 1), qk_norm="rms_norm")


def wan():
    model = _diffusers().WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        rope_max_seq_len=16,
    )
    return model, {
        "hidden_states": torch.randn(2, 4, 2, 8, 8),
        "timestep": torch.tensor([1, 7]),
        "encoder_hidden_states": torch.randn(2, 6, 16),
    }


def pixart():
    model = _diffusers().PixArtTransformer2DModel(
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        in_channels=4,
        out_channels=8,
        cross_attention_dim=16,
        caption_channels=12,
        use_additional_conditions=False,
    )
    return model, {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor([1, 7]),
        "encoder_hidden_states": torch.randn(2, 6, 12),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def cogvideox():
    model = _diffusers().CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=12,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=5,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=6,
    )
    return model, {
        "hidden_states": torch.randn(2, 2, 4, 8, 8),
        "timestep": torch.tensor([1, 7]),
        "encoder_hidden_states": torch.randn(2, 6, 12),
    }
