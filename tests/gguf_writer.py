"""Tiny random models, written to GGUF files as llama.cpp's converter writes them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import MODEL_ARCH, GGUFWriter
from gguf import GGMLQuantizationType as Ggml
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from outrider.batch import Work, build
from outrider.models.decoder import Decoder
from outrider.models.load import LoadedModel, load
from tiny import VOCAB, tiny_config, tiny_hf

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LETTERS = [chr(c) for c in range(ord("a"), ord("z") + 1)] + list("0123456789.,!?") + ["Ġ"]
PAIRS = ["th", "he", "Ġa", "in"]
TOKENS = [*SPECIAL, *LETTERS, *PAIRS]
TOKENS += [f"[PAD{i}]" for i in range(len(TOKENS), VOCAB)]

GGUF_FAMILIES: dict[str, tuple[str, MODEL_ARCH, dict[str, Any]]] = {
    "llama": ("llama", MODEL_ARCH.LLAMA, {}),
    "llama-bias-tied": ("llama", MODEL_ARCH.LLAMA, {}),
    "mistral": ("llama", MODEL_ARCH.LLAMA, {}),
    "qwen2": ("qwen2", MODEL_ARCH.QWEN2, {}),
    "qwen3": ("qwen3", MODEL_ARCH.QWEN3, {}),
    "gemma3": (
        "gemma3",
        MODEL_ARCH.GEMMA3,
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "query_pre_attn_scalar": 16,
        },
    ),
}


def make_hf(family: str, **changes: Any) -> PreTrainedModel:
    own = GGUF_FAMILIES[family][2]
    return tiny_hf(tiny_config(family, intermediate_size=64, **{**own, **changes}))


def write_gguf(
    hf: PreTrainedModel,
    path: Path,
    family: str,
    kind: Ggml = Ggml.F32,
    *,
    metadata: Callable[[GGUFWriter], None] = lambda writer: None,
    tokens: list[str] = TOKENS,
    pre: str = "smollm",
    skip: str = "",
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
) -> None:
    """What llama.cpp's converter writes. The matrices of ``hf`` become the quantised ones.

    Names come from the gguf package's own table, so a wrong name here and there cannot agree.
    """
    arch, model_arch, _ = GGUF_FAMILIES[family]
    c = hf.config
    writer = GGUFWriter(path, arch)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = c.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if family in ("gemma3", "mistral"):
        writer.add_sliding_window(c.sliding_window)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    kinds = [3 if t in SPECIAL else 5 if t.startswith("[PAD") else 1 for t in tokens]
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{pair[0]} {pair[1:]}" for pair in PAIRS])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    metadata(writer)
    names = gguf.get_tensor_name_map(model_arch, c.num_hidden_layers)
    for name, weight in hf.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new is not None, name
        values = weight.clone()
        if arch == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
            heads = c.num_attention_heads if ".q_proj." in name else c.num_key_value_heads
            halves = values.view(heads, 2, -1, *values.shape[1:])
            values = halves.transpose(1, 2).reshape(values.shape)
        if arch == "gemma3" and name.endswith("norm.weight"):
            values += 1.0
        if new == skip:
            continue
        if values.dim() == 1 or kind == Ggml.F32:
            writer.add_tensor(new, values.numpy())
            continue
        writer.add_tensor(new, gguf.quants.quantize(values.numpy(), kind), raw_dtype=kind)
        rounded = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind)
        weight.copy_(torch.from_numpy(rounded))
    for new, array in (extra or {}).items():
        writer.add_tensor(new, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def last_logits(model: Decoder, tokens: list[int]) -> torch.Tensor:
    model.kv.open("a")
    batch = build([Work(seq_id="a", chain=tokens)], model.kv, windows=model.windows)
    logits = model.forward(batch).logits[-1].clone()
    model.kv.close("a")
    return logits


def assert_same_logits(model: Decoder, hf: PreTrainedModel, tolerance: float = 1e-4) -> None:
    rng = random.Random(5)
    for length in (1, 9, 14):
        tokens = [rng.randrange(VOCAB) for _ in range(length)]
        with torch.no_grad():
            expected = hf(input_ids=torch.tensor([tokens])).logits[0, -1]
        torch.testing.assert_close(last_logits(model, tokens), expected, atol=tolerance, rtol=0)


def tiny_load(path: Path, **options: Any) -> LoadedModel:
    return load(str(path), **{"dtype": "float32", "num_slots": 64, **options})


def tokenizer(tokens: list[str] = TOKENS, pairs: list[str] = PAIRS) -> PreTrainedTokenizerFast:
    real = {t: i for i, t in enumerate(tokens) if t not in SPECIAL and not t.startswith("[PAD")}
    real |= {t: i for i, t in enumerate(tokens) if t in SPECIAL}
    backend = Tokenizer(BPE(vocab=real, merges=[(p[0], p[1:]) for p in pairs]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", chat_template=TEMPLATE
    )
