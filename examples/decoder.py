# SPDX-License-Identifier: Apache-2.0
"""A small decoder of transformers, before and after swap_norms.

    python examples/decoder.py

The model has Qwen3's configuration with few layers and random weights: RMSNorms around attention
and feed-forward, and one for each head of q and k. A training step runs before and after the swap;
losses and gradients differ by rounding, and the step takes less time on a GPU.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from _common import device, device_name, milliseconds, say

from fused_layernorm import is_fused, swap_norms


def build(width: int, layers: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=1024, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=max(1, width // 256), head_dim=64,
        use_cache=False,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def step(model: Any, tokens: torch.Tensor) -> tuple[float, torch.Tensor]:
    """The loss of predicting the tokens, and the gradient of the embedding."""
    model.zero_grad()
    logits = model(input_ids=tokens).logits
    loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
    loss.backward()
    return loss.item(), model.get_input_embeddings().weight.grad.float()


def run(where: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    on_gpu = where.type == "cuda"
    size = {"width": 1024, "layers": 4} if on_gpu else {"width": 128, "layers": 2}
    dtype = torch.bfloat16 if on_gpu else torch.float32
    stock = build(**size).to(where, dtype)
    tokens = torch.randint(1024, (4, 1024 if on_gpu else 32), device=where)
    swapped = swap_norms(copy.deepcopy(stock))
    fused = [module for module in swapped.modules() if is_fused(module)]
    (loss, grad), (new_loss, new_grad) = step(stock, tokens), step(swapped, tokens)
    difference = ((grad - new_grad).norm() / grad.norm()).item()
    if abs(loss - new_loss) > 1e-2 or difference > (0.05 if on_gpu else 1e-4):
        raise SystemExit(f"the swapped model differs: loss {loss} and {new_loss}, {difference}")
    times = [
        milliseconds(functools.partial(step, model, tokens), where, repeats=10)
        for model in (stock, swapped)
    ]
    return {"norms": len(fused), "losses": (loss, new_loss), "difference": difference,
            "milliseconds": times}  # fmt: skip


def main() -> None:
    where = device()
    say(f"A Qwen3 decoder before and after swap_norms, on {device_name(where)}")
    if importlib.util.find_spec("transformers") is None:
        say("  left out: transformers is not installed")
        return
    shown = run(where)
    say(f"  {shown['norms']} norms swapped")
    say("  loss {:.4f} before, {:.4f} after; gradients differ by {:.1e}".format(
        *shown["losses"], shown["difference"]))  # fmt: skip
    before, after = shown["milliseconds"]
    say(f"  a training step {before:.2f} ms before, {after:.2f} ms after")


if __name__ == "__main__":
    main()
