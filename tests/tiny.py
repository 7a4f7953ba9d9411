"""Tiny random models of every family: the transformers original, and our decoder of its weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from outrider.models.config import DecoderConfig
from outrider.models.decoder import Decoder

VOCAB = 97

_SIZE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama-bias-tied": (
        LlamaConfig,
        {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
            "head_dim": 16,
        },
    ),
    "mistral": (MistralConfig, {"sliding_window": 5, "num_key_value_heads": 1}),
    "qwen2": (Qwen2Config, {}),
    "qwen2-sliding": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "smollm3": (SmolLM3Config, {"no_rope_layers": [1, 0, 1]}),
    "gemma3": (
        Gemma3TextConfig,
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
"""What each family's configuration changes of the common size."""


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """The configuration of a family of FAMILIES, with ``changes``."""
    make, own = FAMILIES[family]
    return make(**{**_SIZE, **own, **changes})


def tiny_hf(config: PreTrainedConfig, *, seed: int = 0) -> PreTrainedModel:
    """A random float32 model in which every weight matters: norms and biases are random too."""
    hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in hf.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)
    return hf


def tiny_decoder(hf: PreTrainedModel, *, num_slots: int = 512, **options: Any) -> Decoder:
    """Our decoder with the weights of ``hf``."""
    options = {"dtype": torch.float32, "num_slots": num_slots, **options}
    model = Decoder(DecoderConfig.from_hf(hf.config), **options)
    model.load_weights(hf.state_dict().items())
    return model


def tiny_pair(
    family: str, *, seed: int = 0, num_slots: int = 512, prefix_cache: bool = True, **changes: Any
) -> tuple[PreTrainedModel, Decoder]:
    """A transformers model and our decoder with the same random weights."""
    hf = tiny_hf(tiny_config(family, **changes), seed=seed)
    return hf, tiny_decoder(hf, num_slots=num_slots, prefix_cache=prefix_cache)
