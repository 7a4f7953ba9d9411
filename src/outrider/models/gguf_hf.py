"""What a GGUF file holds, in the words of transformers: configuration, weights, tokenizer.

Undoes what llama.cpp's convert_hf_to_gguf.py did: tensor names, the order of rows in the query
and key projections of Llama, and the 1 that is added to the weights of Gemma's norms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Set
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    convert_gguf_tokenizer,
)

from outrider.errors import BadFile, UnsupportedModel, UserError
from outrider.models.gguf import GgufFile
from outrider.models.rope import Rope

DIGITWISE = ("smollm", "starcoder", "refact", "command-r")
"""``tokenizer.ggml.pre``: split before every digit, then as GPT-2 does (llama-vocab.cpp)."""

GPT2_SPLITS = ("default", "gpt-2", *DIGITWISE)

_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_NAMES = {
    **_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def read_config(file: GgufFile) -> PreTrainedConfig:
    """The transformers configuration of the model. Raises BadFile and UnsupportedModel."""
    architecture = file.architecture
    if architecture not in _CONFIGS:
        raise UnsupportedModel(
            f"{file.path}: GGUF architecture {architecture!r} is not supported; supported: "
            f"{', '.join(_CONFIGS)}"
        )
    if int(file.get("split.count", 1)) > 1:
        raise UnsupportedModel(
            f"{file.path} is one of {file.get('split.count')} files; join them first with "
            "llama-gguf-split --merge"
        )
    if file.get("{arch}.expert_count", 0):
        raise UnsupportedModel(f"{file.path}: mixtures of experts are not supported")
    if "token_embd.weight" not in file.tensors:
        raise BadFile(f"{file.path} has no tensor 'token_embd.weight'; it is not a whole model")
    heads = _integer(file, "{arch}.attention.head_count")
    if heads < 1:
        raise BadFile(f"{file.path}: {architecture}.attention.head_count is {heads}")
    hidden = _integer(file, "{arch}.embedding_length")
    head_dim = _integer(file, "{arch}.attention.key_length", hidden // heads)
    for key in ("{arch}.attention.value_length", "{arch}.rope.dimension_count"):
        if (given := _integer(file, key, head_dim)) != head_dim:
            key = key.replace("{arch}", architecture)
            raise UnsupportedModel(f"{file.path}: {key} {given}, supported: head size {head_dim}")
    _check_layers(file, _integer(file, "{arch}.block_count"))
    kv_heads = _integer(file, "{arch}.attention.head_count_kv", heads)
    feed_forward = _integer(file, "{arch}.feed_forward_length")
    for name, rows in (
        ("token_embd", None),
        ("blk.0.attn_q", heads * head_dim),
        ("blk.0.attn_k", kv_heads * head_dim),
        ("blk.0.ffn_up", feed_forward),
    ):
        _check_shape(file, f"{name}.weight", rows, hidden)
    common = {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": _integer(file, "{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": _integer(file, "{arch}.context_length"),
        "rms_norm_eps": float(file.need("{arch}.attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
    }
    try:
        config: PreTrainedConfig = AutoConfig.for_model(**common, **_CONFIGS[architecture](file))
    except UserError:
        raise
    except Exception as error:  # values of the wrong kind
        raise BadFile(f"{file.path}: its metadata is no valid configuration: {error}") from None
    return config


def _check_layers(file: GgufFile, stated: int) -> None:
    """Raise BadFile unless the file has as many layers as its metadata says. A damaged number
    could otherwise ask for more layers than there is memory."""
    layers = {int(m[1]) for name in file.tensors if (m := re.match(r"blk\.(\d{1,9})\.", name))}
    found = max(layers, default=-1) + 1
    if stated < 1 or stated != found:
        raise BadFile(
            f"{file.path}: {file.architecture}.block_count is {stated}, its tensors are those of "
            f"{found} layers; download it again"
        )


def _check_shape(file: GgufFile, name: str, rows: int | None, columns: int) -> None:
    """Raise BadFile unless the matrix is there and has the shape that the metadata gives it,
    before anything of that shape is allocated. ``rows`` None: any number of them."""
    if name not in file.tensors:
        raise BadFile(f"{file.path} has no tensor {name!r}; it is not a whole model")
    shape = file.tensors[name].shape
    expected = (shape[0] if rows is None else rows, columns)
    if shape != expected:
        raise BadFile(
            f"{file.path}: {name!r} has the shape {shape}, by the metadata it is {expected}; "
            "download it again"
        )


def _integer(file: GgufFile, key: str, default: int | None = None) -> int:
    value = file.need(key) if default is None else file.get(key, default)
    if not isinstance(value, int):
        key = key.replace("{arch}", file.architecture)
        raise UnsupportedModel(f"{file.path}: {key} differs from layer to layer")
    return value


def _llama(file: GgufFile) -> dict[str, Any]:
    window = file.get("llama.attention.sliding_window")
    return {
        "model_type": "llama" if window is None else "mistral",
        "rope_parameters": _rope(file),
        "sliding_window": window,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


def _qwen(model_type: str) -> Callable[[GgufFile], dict[str, Any]]:
    return lambda file: {"model_type": model_type, "rope_parameters": _rope(file)}


def _gemma3(file: GgufFile) -> dict[str, Any]:
    layers = _integer(file, "gemma3.block_count")
    every = _integer(file, "gemma3.attention.sliding_window_pattern", 6)
    head_dim = _integer(file, "gemma3.attention.key_length")
    if layers == 62:  # the 27B model scales by the width a head would have
        width = _integer(file, "gemma3.embedding_length")
        head_dim = width // _integer(file, "gemma3.attention.head_count")
    local = float(file.get("gemma3.rope.freq_base_swa", 10_000.0))
    return {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": head_dim,
        "sliding_window": _integer(file, "gemma3.attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)
        ],
        "rope_parameters": {
            "full_attention": _rope(file),
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        "final_logit_softcapping": file.get("gemma3.final_logit_softcapping"),
    }


_CONFIGS: dict[str, Callable[[GgufFile], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen("qwen2"),
    "qwen3": _qwen("qwen3"),
    "gemma3": _gemma3,
}


def _rope(file: GgufFile) -> dict[str, Any]:
    """``rope_parameters`` of transformers."""
    parameters: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(file.get("{arch}.rope.freq_base", 10_000.0)),
    }
    prefix = f"{file.architecture}.rope.scaling."
    scaling = {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}
    scaling.pop("finetuned", None)
    kind = scaling.pop("type", "none" if not scaling else "linear")
    if kind in ("linear", "yarn"):
        parameters |= {"rope_type": kind, "factor": float(scaling.pop("factor"))}
    if kind == "yarn":
        original = scaling.pop("original_context_length")
        parameters["original_max_position_embeddings"] = int(original)
    if scaling or kind not in ("none", "linear", "yarn"):
        raise UnsupportedModel(
            f"{file.path}: rope scaling {kind!r} with {', '.join(scaling) or 'no settings'} is not "
            "supported; supported: linear and yarn without further settings"
        )
    if "rope_freqs.weight" in file.tensors:
        return _llama3_rope(file, parameters["rope_theta"])
    return parameters


def _llama3_rope(file: GgufFile, theta: float) -> dict[str, Any]:
    """Llama 3's scaling, which a GGUF file holds as one divisor for each frequency."""
    divisors = file.tensor("rope_freqs.weight", torch.float32)
    parameters = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": round(float(divisors.max()), 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = {"rope_type": "default", "rope_theta": theta}
    head_dim, anywhere = 2 * len(divisors), torch.zeros(1, dtype=torch.int64)
    rates = [
        Rope.from_hf(p, head_dim=head_dim, max_positions=8192).frequencies(anywhere)[0]
        for p in (plain, parameters)
    ]
    if not torch.allclose(rates[0] / rates[1], divisors, rtol=1e-3):
        raise UnsupportedModel(
            f"{file.path}: the rope divisors in 'rope_freqs.weight' are not those of Llama 3; "
            "supported: Llama 3 scaling from 8192 positions"
        )
    return parameters


def hf_names(file: GgufFile) -> dict[str, str]:
    """The file's names of all weights, and what transformers calls them."""
    names = _GEMMA_NAMES if file.architecture == "gemma3" else _NAMES
    # The divisors of rope are in the configuration.
    return {name: _hf_name(name, names) for name in file.tensors if name != "rope_freqs.weight"}


def read_weights(
    file: GgufFile, dtype: torch.dtype, *, without: Set[str] = frozenset()
) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights under their transformers names, one at a time; matrices as ``dtype``, vectors
    as float32. ``without``: names, less "model.", that are left out."""
    for name, hf_name in hf_names(file).items():
        if hf_name.removeprefix("model.") in without:
            continue
        vector = len(file.tensors[name].shape) == 1
        weight = file.tensor(name, torch.float32 if vector else dtype)
        if file.architecture == "gemma3" and name.endswith("norm.weight"):
            weight = weight - 1.0
        yield hf_name, in_halves(file, name, weight)


def in_halves(file: GgufFile, name: str, weight: torch.Tensor) -> torch.Tensor:
    """``weight`` ``[out, ...]`` of tensor ``name`` with its rows in the order of transformers: for
    Llama, files hold the rotated pairs of queries and keys side by side."""
    match = re.search(r"\.attn_([qk])\.", name)
    if file.architecture != "llama" or match is None:
        return weight
    key = "head_count" if match[1] == "q" else "head_count_kv"
    heads = _integer(file, "{arch}.attention.head_count")
    return _in_halves(weight, _integer(file, f"{{arch}}.attention.{key}", heads))


def _in_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of rotated pairs (0, 1), (2, 3), ... reordered to pairs (i, i + half a head)."""
    pairs = weight.view(heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _hf_name(name: str, names: dict[str, str]) -> str:
    """A name that is not known stays as it is; the decoder refuses it."""
    stem, _, leaf = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{leaf}"
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if block is None or block[2] not in names:
        return name
    return f"model.layers.{block[1]}.{names[block[2]]}.{leaf}"


def read_tokenizer(file: GgufFile) -> PreTrainedTokenizerFast:
    """The tokenizer, with the chat template if there is one.

    Raises BadFile, and UnsupportedModel for one whose way to split text is not known: it would
    give wrong tokens without a word.
    """
    kind, split = file.need("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre", "default")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(
            f"{file.path}: tokenizer {kind!r} is not supported; supported: gpt2, llama"
        )
    if kind == "gpt2" and split not in GGUF_PRE_TOKENIZER_SPLITS and split not in GPT2_SPLITS:
        raise UnsupportedModel(
            f"{file.path}: the pre-tokenizer {split!r} is not supported; load the folder of the "
            "original model instead"
        )
    tokens = file.need("tokenizer.ggml.tokens")
    parts = {"tokenizer_type": kind, "pre_tokenizer_type": split, "tokens": tokens}
    for key in ("merges", "scores", "token_type"):
        if (value := file.get(f"tokenizer.ggml.{key}")) is not None:
            parts[key] = value if isinstance(value, list) else value.tolist()
    try:
        backend, _ = convert_gguf_tokenizer(file.architecture, parts)
    except Exception as error:  # merges of unknown tokens and the like
        raise BadFile(f"{file.path}: its tokenizer cannot be built: {error}") from None
    if kind == "gpt2" and split in DIGITWISE:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    special = {}
    for role in ("bos", "eos", "unknown", "padding"):
        token = file.get(f"tokenizer.ggml.{role}_token_id")
        if token is not None and not 0 <= token < len(tokens):
            raise BadFile(f"{file.path}: {role} token {token} is beyond its {len(tokens)} tokens")
        name = {"unknown": "unk", "padding": "pad"}.get(role, role)
        special[f"{name}_token"] = None if token is None else tokens[token]
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        **special,
        add_bos_token=bool(file.get("tokenizer.ggml.add_bos_token", kind == "llama")),
        add_eos_token=bool(file.get("tokenizer.ggml.add_eos_token", False)),
        chat_template=file.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )


def stated_ends(file: GgufFile) -> list[int]:
    """The tokens that the file says end a text or a turn."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    return [int(file.metadata[key]) for key in keys if key in file.metadata]
