"""What the decoder refuses: configurations it does not implement, weights that do not fit."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma3Config,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from outrider.batch import Work, build
from outrider.errors import BadFile, UnsupportedModel
from outrider.models.config import DecoderConfig
from outrider.models.decoder import Decoder
from tiny import FAMILIES, VOCAB, tiny_config, tiny_hf

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
CHUNKED = ["full_attention", "full_attention", "chunked_attention"]
SLIDING = ["full_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama", {"architectures": ["LlamaForCausalLMEagle3"]}, "'LlamaForCausalLMEagle3'"),
        ("llama", {"hidden_act": "relu"}, "activation 'relu'"),
        ("gemma3", {"hidden_activation": "gelu"}, "activation 'gelu'"),
        ("llama", {"rope_parameters": {**LONGROPE, "rope_theta": 1e4}}, "rope type 'longrope'"),
        ("qwen2", {"rope_parameters": MROPE}, "rope parameter 'mrope_section'"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("qwen3", {"layer_types": CHUNKED}, "layer type 'chunked_attention'"),
        ("qwen3", {"layer_types": SLIDING}, "sliding_window None"),
        ("llama", {"num_key_value_heads": 3}, "3 key-value heads"),
    ],
)
def test_refuses_what_it_does_not_implement(
    family: str, changes: dict[str, Any], named: str
) -> None:
    check_refusal(tiny_config(family, **copy.deepcopy(changes)), named)


@pytest.mark.parametrize("config_type", [MixtralConfig, Gemma2Config, Gemma3Config])
def test_refuses_other_models(config_type: type[PreTrainedConfig]) -> None:
    check_refusal(config_type(), f"model_type {config_type.model_type!r}")


def check_refusal(config: PreTrainedConfig, named: str) -> None:
    """The message names what is not supported, then what is, in one line."""
    with pytest.raises(UnsupportedModel) as raised:
        DecoderConfig.from_hf(config)
    message = str(raised.value)
    assert named in message
    assert "; supported: " in message
    assert "\n" not in message


def check_loaded(hf: PreTrainedModel, model: Decoder) -> None:
    """The decoder computes what ``hf`` computes."""
    tokens = random.Random(0).choices(range(VOCAB), k=6)
    model.kv.open("s")
    batch = build([Work(seq_id="s", chain=tokens)], model.kv, windows=model.windows)
    with torch.no_grad():
        expected = hf(input_ids=torch.tensor([tokens])).logits[0, -1:]
    torch.testing.assert_close(model.forward(batch).logits, expected, rtol=0.0, atol=1e-4)


def empty_decoder(family: str) -> tuple[dict[str, torch.Tensor], Decoder]:
    hf = tiny_hf(tiny_config(family))
    return hf.state_dict(), Decoder(
        DecoderConfig.from_hf(hf.config), dtype=torch.float32, num_slots=64
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_needed_in_its_shape(family: str) -> None:
    weights, model = empty_decoder(family)
    tied = model.config.tied
    for name in weights:
        if name == "lm_head.weight" and tied:
            continue
        without = {key: value for key, value in weights.items() if key != name}
        with pytest.raises(BadFile, match=f"{name.removeprefix('model.')}: missing"):
            model.load_weights(without.items())
        wrong = torch.zeros(*weights[name].shape[:-1], weights[name].shape[-1] + 1)
        with pytest.raises(BadFile, match=f"tensor {name} has shape"):
            model.load_weights({**weights, name: wrong}.items())


def test_unknown_and_repeated_tensors_are_refused() -> None:
    weights, model = empty_decoder("llama")
    bias = "model.layers.0.self_attn.q_proj.bias"
    with pytest.raises(BadFile, match=f"{bias}: unknown"):
        model.load_weights({**weights, bias: torch.zeros(32)}.items())
    deeper = {f"model.layers.{i}.input_layernorm.weight": torch.zeros(32) for i in range(3, 11)}
    with pytest.raises(BadFile, match=r"8 tensors, .* and 3 more: unknown"):
        model.load_weights({**weights, **deeper}.items())
    with pytest.raises(BadFile, match=r"tensor norm\.weight is given twice"):
        model.load_weights([*weights.items(), ("norm.weight", torch.zeros(32))])


def test_head_of_a_tied_model_is_the_embedding() -> None:
    hf = tiny_hf(tiny_config("llama-bias-tied"))
    weights = dict(hf.state_dict())
    for head in ({}, {"lm_head.weight": torch.zeros(VOCAB, 32)}):
        weights.pop("lm_head.weight", None)
        model = Decoder(DecoderConfig.from_hf(hf.config), dtype=torch.float32, num_slots=64)
        model.load_weights({**weights, **head}.items())
        check_loaded(hf, model)


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model.", "model.language_model."])
def test_prefixes_of_names(prefix: str) -> None:
    hf = tiny_hf(tiny_config("gemma3"))
    weights = {prefix + name.removeprefix("model."): w for name, w in hf.state_dict().items()}
    weights[f"{prefix}layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    model = Decoder(DecoderConfig.from_hf(hf.config), dtype=torch.float32, num_slots=64)
    model.load_weights(weights.items())
    check_loaded(hf, model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected a whole number from 1"),
        ({"num_hidden_layers": 2**32}, "num_hidden_layers is 4294967296"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"intermediate_size": 2**40}, "intermediate_size is 1099511627776"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}},
            "rope_theta is nan",
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}}, "rope_theta is 0"),
    ],
)
def test_numbers_that_no_model_has(change: dict[str, Any], message: str) -> None:
    config = tiny_config("llama")
    for name, value in change.items():
        object.__setattr__(config, name, value)
    with pytest.raises(UnsupportedModel, match=message):
        DecoderConfig.from_hf(config)
