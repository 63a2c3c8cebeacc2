# SPDX-License-Identifier: Apache-2.0
"""Tiny models of transformers with random weights, (a model that returns a loss, its inputs), and a
norm that is written as transformers writes it.
"""

import libraries
import torch
from torch import nn

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 64}  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def make(config, model, **options):
    transformers = libraries.get("transformers")
    return getattr(transformers, model)(getattr(transformers, config)(**options))


def tokens():
    ids = torch.randint(50, (2, 12))
    return {"input_ids": ids, "labels": ids}


def bert():
    options = {"vocab_size": 50, **SMALL, **NO_DROPOUT}
    return make("BertConfig", "BertForMaskedLM", **options), tokens()


def gpt2():
    sizes = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return make("GPT2Config", "GPT2LMHeadModel", **sizes, **rates), tokens()


def vit():
    options = {"image_size": 16, "patch_size": 4, **SMALL, **NO_DROPOUT}
    model = make("ViTConfig", "ViTForImageClassification", **options)
    return model, {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}


def decoder(name, config=None, **options):
    """A decoder whose norms are RMSNorms, with weights that show whether they are used."""
    sizes = {**SMALL, "vocab_size": 50, "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0}
    model = make(config or f"{name}Config", f"{name}ForCausalLM", **sizes, **options)
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
            torch.nn.init.normal_(parameter, 0.0 if "Gemma" in name else 1.0, 0.2)
    return model, tokens()


class WrittenHere(nn.Module):
    """Llama's norm in a module that no table names."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class GemmaHere(nn.Module):
    """Gemma's, of which a part is a method."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size))
        self.eps = eps

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        output = self._norm(x.float())
        output = output * (1.0 + self.weight.float())
        return output.type_as(x)
