# SPDX-License-Identifier: Apache-2.0
"""The decoder of a latent diffusion model's VAE, before and after swap_norms.

    python examples/image_decoder.py

diffusers' AutoencoderKL has a GroupNorm and a SiLU in front of each of its convolutions; in eager
PyTorch they take more than half of the time. swap_norms(model, neighbours=True) makes the two one
kernel. The weights are random: a latent becomes an image before and after; they differ by rounding.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
from typing import Any

import torch
from _common import device, device_name, milliseconds, say

from fused_layernorm import is_fused, swap_norms


def build(widths: tuple[int, ...]) -> Any:
    from diffusers import AutoencoderKL

    blocks = len(widths)
    return AutoencoderKL(
        block_out_channels=widths, layers_per_block=2, norm_num_groups=min(32, widths[0] // 4),
        down_block_types=blocks * ("DownEncoderBlock2D",),
        up_block_types=blocks * ("UpDecoderBlock2D",),
    )  # fmt: skip


@torch.no_grad()
def decode(model: Any, latents: torch.Tensor) -> torch.Tensor:
    """The image of a latent, its colours from 0 to 1."""
    image: torch.Tensor = model.decode(latents).sample
    return (image / 2 + 0.5).clamp(0, 1).float()


def run(where: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    on_gpu = where.type == "cuda"
    widths, side = ((128, 256, 512, 512), 128) if on_gpu else ((16, 32), 16)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    stock = build(widths).to(where, dtype).eval()
    latents = torch.randn(1, 4, side, side, device=where, dtype=dtype)
    swapped = swap_norms(copy.deepcopy(stock), neighbours=True)
    before, after = decode(stock, latents), decode(swapped, latents)
    difference = (before - after).abs().max().item()
    if difference > (0.05 if on_gpu else 1e-4):
        raise SystemExit(f"the swapped model differs: by {difference}")
    fused = [type(module).__name__ for module in swapped.decoder.modules() if is_fused(module)]
    norms = fused.count("FusedGroupNorm")
    times = [
        milliseconds(functools.partial(decode, model, latents), where, repeats=10)
        for model in (stock, swapped)
    ]
    return {"image": tuple(after.shape[2:]), "norms": norms, "blocks": len(fused) - norms,
            "difference": difference, "milliseconds": times}  # fmt: skip


def main() -> None:
    where = device()
    say(f"A VAE's decoder before and after swap_norms(neighbours=True), on {device_name(where)}")
    if importlib.util.find_spec("diffusers") is None:
        say("  left out: diffusers is not installed")
        return
    shown = run(where)
    say("  {} norms swapped, {} modules with the activations behind them".format(
        shown["norms"], shown["blocks"]))  # fmt: skip
    say("  an image of {} x {}; its colours differ by {:.1e} at most".format(
        *shown["image"], shown["difference"]))  # fmt: skip
    before, after = shown["milliseconds"]
    say(f"  decoded in {before:.2f} ms before, {after:.2f} ms after")


if __name__ == "__main__":
    main()
