"""What the decoder has to know about a model, read from its transformers configuration.

Whatever the decoder does not implement is refused here, by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from transformers import PreTrainedConfig

from outrider.errors import UnsupportedModel
from outrider.models.rope import Rope

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
"""The architecture of each ``model_type`` the decoder implements."""

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """How one layer attends. ``window``: tokens it sees, itself included; None for all.

    ``rope``: index into :attr:`DecoderConfig.ropes`; None for a layer without positions.
    """

    window: int | None
    rope: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Shape and variants of a decoder.

    ``norm_offset``: norms multiply by (1 + weight), in float32. ``post_norms``: the outputs of
    attention and MLP are normed too. ``embed_scale``: factor on the embeddings, rounded to the
    model's dtype. ``attention_scale``: factor on the products of queries and keys. ``tied``: the
    head is the embedding.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    layers: tuple[LayerConfig, ...]
    ropes: tuple[Rope, ...]
    norm_eps: float
    activation: str
    attention_scale: float
    tied: bool
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    norm_offset: bool = False
    embed_scale: float = 1.0

    @property
    def numbers_per_slot(self) -> int:
        """Numbers that one token holds in the KV pool, over all layers."""
        return 2 * len(self.layers) * self.num_kv_heads * self.head_dim

    @property
    def num_weights(self) -> int:
        """Weights of the embedding, the head and the linears."""
        heads = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (heads + 3 * self.intermediate_size)
        ends = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return ends + len(self.layers) * layer

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Attention windows of the layers, each once, full attention first."""
        return tuple(sorted({layer.window for layer in self.layers}, key=lambda w: w or 0))

    @classmethod
    def from_hf(cls, config: PreTrainedConfig) -> Self:
        """Read a transformers configuration. Raises UnsupportedModel."""
        _refuse_other_models(config)
        model_type = config.model_type
        gemma = model_type == "gemma3_text"
        _refuse_nonsense(config)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        if heads % kv_heads or head_dim % 2:
            raise UnsupportedModel(
                f"{heads} heads of size {head_dim} with {kv_heads} key-value heads are not "
                "supported; supported: a multiple of the key-value heads and an even size"
            )
        activation = config.hidden_activation if gemma else config.hidden_act
        if activation not in ACTIVATIONS:
            raise UnsupportedModel(_not_supported("activation", activation, ACTIVATIONS))
        windows = _windows(config)
        ropes, uses = _ropes(config, head_dim)
        bias = bool(getattr(config, "attention_bias", False))
        return cls(
            model_type=model_type,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            context_length=_context_length(config, ropes),
            layers=tuple(
                LayerConfig(window=window, rope=rope)
                for window, rope in zip(windows, uses, strict=True)
            ),
            ropes=ropes,
            norm_eps=config.rms_norm_eps,
            activation=activation,
            attention_scale=(config.query_pre_attn_scalar if gemma else head_dim) ** -0.5,
            tied=bool(config.tie_word_embeddings),
            qkv_bias=bias or model_type == "qwen2",  # Qwen2 has no switch for it
            out_bias=bias,
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            qk_norm=gemma or model_type == "qwen3",
            post_norms=gemma,
            norm_offset=gemma,
            embed_scale=config.hidden_size**0.5 if gemma else 1.0,
        )


def _not_supported(what: str, given: object, known: tuple[str, ...]) -> str:
    return f"{what} {given!r} is not supported; supported: {', '.join(known)}"


def _refuse_nonsense(config: PreTrainedConfig) -> None:
    """Numbers that no model has, in a damaged file for example."""
    limits = {
        "vocab_size": 2**24,
        "hidden_size": 2**20,
        "intermediate_size": 2**22,
        "num_hidden_layers": 2**12,
        "num_attention_heads": 2**14,
        "num_key_value_heads": 2**14,
        "max_position_embeddings": 2**31,
    }
    if getattr(config, "head_dim", None) is not None:
        limits["head_dim"] = 2**14
    for name, most in limits.items():
        value = getattr(config, name)
        if not isinstance(value, int) or not 1 <= value <= most:
            raise UnsupportedModel(f"{name} is {value!r}, expected a whole number from 1 to {most}")
    eps = config.rms_norm_eps
    if not isinstance(eps, int | float) or not 0.0 <= eps < 1.0:
        raise UnsupportedModel(f"rms_norm_eps is {eps!r}, expected a number from 0 to below 1")


def _refuse_other_models(config: PreTrainedConfig) -> None:
    known = tuple(ARCHITECTURES)
    if config.model_type not in ARCHITECTURES:
        raise UnsupportedModel(_not_supported("model_type", config.model_type, known))
    expected = ARCHITECTURES[config.model_type]
    for given in config.architectures or ():
        if given != expected:
            raise UnsupportedModel(_not_supported("architecture", given, (expected,)))
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if getattr(config, name, None) is not None:
            raise UnsupportedModel(f"{name} is not supported; supported: models without it")
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModel("use_bidirectional_attention is not supported; supported: causal")
    if getattr(config, "is_heterogeneous", False):
        raise UnsupportedModel("layers of different shapes are not supported; supported: one shape")


def _layer_types(config: PreTrainedConfig) -> list[str]:
    """The attention of every layer. Llama and Mistral have the same one in all layers."""
    if config.model_type in ("llama", "mistral"):
        sliding = config.model_type == "mistral" and config.sliding_window is not None
        return [LAYER_TYPES[sliding]] * config.num_hidden_layers
    types: list[str] = list(config.layer_types)[: config.num_hidden_layers]
    for given in types:
        if given not in LAYER_TYPES:
            raise UnsupportedModel(_not_supported("layer type", given, LAYER_TYPES))
    return types


def _windows(config: PreTrainedConfig) -> list[int | None]:
    types = _layer_types(config)
    window = getattr(config, "sliding_window", None)
    if "sliding_attention" in types and not window:
        raise UnsupportedModel(
            f"sliding_attention with sliding_window {window!r} is not supported; "
            "supported: a window of 1 token or more"
        )
    return [window if kind == "sliding_attention" else None for kind in types]


def _ropes(config: PreTrainedConfig, head_dim: int) -> tuple[tuple[Rope, ...], list[int | None]]:
    """The rotations a model uses, each once, and every layer's index into them."""

    def rope(parameters: dict[str, Any]) -> Rope:
        return Rope.from_hf(
            parameters, head_dim=head_dim, max_positions=config.max_position_embeddings
        )

    parameters = config.rope_parameters
    num_layers = config.num_hidden_layers
    if config.model_type == "gemma3_text":
        types = _layer_types(config)
        kinds = sorted(set(types))
        return tuple(rope(parameters[kind]) for kind in kinds), [kinds.index(t) for t in types]
    rotates = getattr(config, "no_rope_layers", None) or [1] * num_layers  # 0 marks NoPE
    return (rope(parameters),), [0 if flag else None for flag in rotates[:num_layers]]


def _context_length(config: PreTrainedConfig, ropes: tuple[Rope, ...]) -> int:
    """Positions the model is meant for. ``max_position_embeddings`` is the length before scaling
    in the configurations that publish linear, dynamic or yarn, except for Gemma."""
    length = int(config.max_position_embeddings)
    if config.model_type == "gemma3_text":
        return length
    return max([length, *(rope.scaled_length for rope in ropes)])
