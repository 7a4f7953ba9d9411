"""Our own decoder for the Llama, Mistral, Qwen, SmolLM and Gemma-3 families.

Shapes: T packed tokens, D hidden size, H query heads, Hkv key-value heads, d head size, I
intermediate size, V vocabulary, S slots of the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from outrider.batch import ForwardBatch
from outrider.errors import BadFile
from outrider.kv import KVCache
from outrider.models.attention import Attention, RowAttention
from outrider.models.base import Forward, checked_depth
from outrider.models.config import DecoderConfig
from outrider.models.rope import RopeTable, rotate_

Rotation = tuple[torch.Tensor, torch.Tensor]

NUM_SPARE = 2
"""Slots for forwards of a fixed shape: one stays zero and is read, one is written, as padding."""

NUM_NAMED = 5
"""How many tensors an error names."""


class Layer(nn.Module):
    """One block: attention and MLP with their norms and residuals.

    The linears are plain ``nn.Linear`` modules, so that they can be swapped for quantised ones:
    ``qkv`` (rows: queries, keys, values), ``out``, ``gate_up`` (rows: gate, up), ``down``.
    ``pool`` ``[S, 2 * Hkv, d]`` holds each slot's rotated keys, then its values; the last
    NUM_SPARE slots are beyond those that the tables know.
    """

    def __init__(
        self,
        config: DecoderConfig,
        index: int,
        *,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        c = config
        self.num_heads, self.num_kv_heads, self.head_dim = c.num_heads, c.num_kv_heads, c.head_dim
        self.window, self.rope = c.layers[index].window, c.layers[index].rope
        self.scale, self.eps, self.activation = c.attention_scale, c.norm_eps, c.activation

        def linear(num_in: int, num_out: int, bias: bool) -> nn.Linear:
            return _linear(num_in, num_out, bias=bias, dtype=dtype, device=device)

        def norm(*shape: int) -> nn.Parameter:
            # Gemma multiplies by (1 + weight) in float32; the sum would not survive bfloat16.
            return _weight(*shape, dtype=torch.float32 if c.norm_offset else dtype, device=device)

        num_qk = c.num_heads + c.num_kv_heads
        self.qkv = linear(c.hidden_size, (num_qk + c.num_kv_heads) * c.head_dim, c.qkv_bias)
        self.out = linear(c.num_heads * c.head_dim, c.hidden_size, c.out_bias)
        self.gate_up = linear(c.hidden_size, 2 * c.intermediate_size, c.mlp_bias)
        self.down = linear(c.intermediate_size, c.hidden_size, c.mlp_bias)
        self.attention_norm = norm(c.hidden_size)
        self.mlp_norm = norm(c.hidden_size)
        self.attention_post_norm = norm(c.hidden_size) if c.post_norms else None
        self.mlp_post_norm = norm(c.hidden_size) if c.post_norms else None
        self.qk_norm = norm(num_qk, c.head_dim) if c.qk_norm else None
        # zeros, not empty: slots that were never written are read under a mask of -inf.
        self.pool = torch.zeros(
            num_slots + NUM_SPARE, 2 * c.num_kv_heads, c.head_dim, dtype=dtype, device=device
        )
        by_head = self.pool.view(-1, 2, c.num_kv_heads, c.head_dim)
        self.pool_by_head = by_head.permute(1, 2, 0, 3)  # [2, Hkv, S, d], the same memory

    def forward(
        self,
        x: torch.Tensor,
        write_slots: torch.Tensor,
        rotation: Rotation | None,
        attention: Attention,
    ) -> None:
        """Add this block to ``x`` ``[T, D]``, in place. Writes ``pool`` at ``write_slots``."""
        attended = self._attention(x, write_slots, rotation, attention)
        if self.attention_post_norm is not None:
            attended = _rms_norm(attended, self.attention_post_norm, self.eps)
        x.add_(attended)
        mixed = self._mlp(x)
        if self.mlp_post_norm is not None:
            mixed = _rms_norm(mixed, self.mlp_post_norm, self.eps)
        x.add_(mixed)

    def _attention(
        self,
        x: torch.Tensor,
        write_slots: torch.Tensor,
        rotation: Rotation | None,
        attention: Attention,
    ) -> torch.Tensor:
        h = _rms_norm(x, self.attention_norm, self.eps)
        qkv = self.qkv(h).view(len(x), -1, self.head_dim)  # [T, H + 2 * Hkv, d]
        qk = qkv[:, : self.num_heads + self.num_kv_heads]
        if self.qk_norm is not None:
            qk.copy_(_rms_norm(qk, self.qk_norm, self.eps))
        if rotation is not None:
            rotate_(qk, *rotation)
        self.pool.index_copy_(0, write_slots, qkv[:, self.num_heads :])
        query = qkv[:, : self.num_heads]
        attended: torch.Tensor = self.out(
            attention(query, self.pool_by_head, self.window, self.scale)
        )
        return attended

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(_rms_norm(x, self.mlp_norm, self.eps)).chunk(2, -1)
        gate = F.silu(gate) if self.activation == "silu" else F.gelu(gate, approximate="tanh")
        mixed: torch.Tensor = self.down(gate.mul_(up))
        return mixed


class Decoder(nn.Module):
    """A causal language model with a KV pool; implements :class:`outrider.models.base.Model`.

    ``num_slots``: tokens the pool can hold. Weights are undefined until :meth:`load_weights`.
    Inference only: what :meth:`forward` returns cannot be used in autograd without a clone.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        num_slots: int,
        prefix_cache: bool = True,
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype, self.device = dtype, torch.device(device)
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.context_length, self.num_layers = config.context_length, len(config.layers)
        self.windows = config.windows
        self.kv = KVCache(num_slots, prefix_cache=prefix_cache)
        self.embedding = _weight(
            config.vocab_size, config.hidden_size, dtype=dtype, device=self.device
        )
        layers = [
            Layer(config, i, num_slots=num_slots, dtype=dtype, device=self.device)
            for i in range(self.num_layers)
        ]
        self.layers = cast(Seq[Layer], nn.ModuleList(layers))
        norm_dtype = torch.float32 if config.norm_offset else dtype
        self.norm = _weight(config.hidden_size, dtype=norm_dtype, device=self.device)
        self.head = _linear(
            config.hidden_size,
            config.vocab_size,
            bias=False,
            dtype=dtype,
            device=torch.device("meta") if config.tied else self.device,
        )
        if config.tied:
            self.head.weight = self.embedding
        self._embed_scale = float(torch.tensor(config.embed_scale).to(dtype))
        self._tables = [
            RopeTable(rope, length=config.context_length, dtype=dtype, device=self.device)
            for rope in config.ropes
        ]

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        *,
        hidden_layers: Seq[int] = (),
        num_layers: int | None = None,
    ) -> Forward:
        """Compute a batch; see :meth:`outrider.models.base.Model.forward`.

        ``batch`` must be built with this model's ``windows``, ``dtype`` and ``device``, and hold
        a token. Writes the pool at ``batch.write_slots``. Logits and hidden states are of the
        model's dtype. Raises ValueError for a layer that does not exist or is not reached.
        """
        num_tokens = batch.num_tokens
        every = len(batch.logit_index) == num_tokens
        return self.compute(
            batch.input_ids,
            batch.positions,
            batch.write_slots,
            None if every else batch.logit_index,
            RowAttention(
                batch.rows, self.windows, self.config.num_heads // self.config.num_kv_heads
            ),
            hidden_layers=hidden_layers,
            depth=checked_depth(self.num_layers, num_layers, hidden_layers),
        )

    @torch.inference_mode()
    def compute(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        write_slots: torch.Tensor,
        logit_index: torch.Tensor | None,
        attention: Attention,
        *,
        hidden_layers: Seq[int] = (),
        depth: int,
    ) -> Forward:
        """The forward of packed tokens, whatever reaches their keys.

        ``input_ids`` ``[T]`` integers; ``positions``, ``write_slots``: int64 ``[T]``.
        ``logit_index``: integers ``[R]``, the tokens whose logits are wanted; None for all. On a
        device other than the CPU nothing here waits for it, so that it can be recorded.
        """
        x = F.embedding(input_ids, self.embedding)
        if self._embed_scale != 1.0:
            x.mul_(self._embed_scale)
        rotations = [table(positions) for table in self._tables]
        states = _States(hidden_layers, x)
        for i, layer in enumerate(self.layers[:depth]):
            states.record(i, x)
            rotation = None if layer.rope is None else rotations[layer.rope]
            layer(x, write_slots, rotation, attention)
        states.record(depth, x)
        return Forward(logits=self._logits(x, logit_index), hidden=states.hidden)

    def _logits(self, x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
        if index is not None and len(index) == 0:
            return x.new_empty(0, self.vocab_size)
        if index is not None:
            x = x.index_select(0, index)
        logits: torch.Tensor = self.head(_rms_norm(x, self.norm, self.config.norm_eps))
        return logits

    @torch.inference_mode()
    def scrub(self, slots: Seq[int]) -> None:
        """Zero the pool's ``slots`` in every layer."""
        index = torch.as_tensor(slots, dtype=torch.int64, device=self.device)
        for layer in self.layers:
            layer.pool.index_fill_(0, index, 0.0)

    @torch.no_grad()
    def matrices(self) -> dict[str, torch.Tensor]:
        """The weights of all linears, ``[out, in]``, by the names of :meth:`load_weights` without
        prefix; the head comes last, under the name of the embedding where they are tied."""
        found = {
            name: target.weight
            for name, target in _targets(self).items()
            if name.endswith("_proj.weight")
        }
        name = "embed_tokens.weight" if self.config.tied else "lm_head.weight"
        return found | {name: self.head.weight}

    def load_weights(
        self, tensors: Iterable[tuple[str, torch.Tensor]], *, without: Set[str] = frozenset()
    ) -> None:
        """Copy in weights under their Hugging Face names, fused and cast on the way.

        The prefixes "model." and "language_model." may be there or not. Rotary ``inv_freq``
        buffers are ignored, as is the head of a tied model. ``without``: names without prefix of
        tensors that do not come and keep no values. Raises BadFile for tensors that are missing,
        unknown, given twice or of the wrong shape.
        """
        targets = _targets(self)
        missing = set(targets) - without
        unknown: list[str] = []
        for name, tensor in tensors:
            short = name
            while short.startswith(("model.", "language_model.")):
                short = short.partition(".")[2]
            if short.endswith("rotary_emb.inv_freq"):
                continue
            if short == "lm_head.weight" and self.config.tied:
                continue
            if short not in targets:
                unknown.append(name)
                continue
            if short not in missing:
                raise BadFile(f"tensor {name} is given twice; expected every tensor once")
            missing.remove(short)
            targets[short].load(name, tensor)
        if unknown:
            raise BadFile(
                f"{_named(unknown)}: unknown to a {self.config.model_type} decoder of "
                f"{self.num_layers} layers; the weights do not belong to this configuration"
            )
        if missing:
            raise BadFile(
                f"{_named(sorted(missing))}: missing for a {self.config.model_type} decoder of "
                f"{self.num_layers} layers; the file is incomplete or of another model"
            )


class _States:
    """The hidden states asked for, written side by side as the layers pass."""

    def __init__(self, layers: Seq[int], x: torch.Tensor) -> None:
        self._layers = tuple(layers)
        self.hidden = x.new_empty(len(x), len(layers) * x.shape[1]) if layers else None

    def record(self, layer: int, x: torch.Tensor) -> None:
        if self.hidden is None:
            return
        size = x.shape[1]
        for place, wanted in enumerate(self._layers):
            if wanted == layer:
                self.hidden[:, place * size : (place + 1) * size] = x


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a tensor of the file goes: into ``weight``, a part of a parameter.

    ``shape`` is the shape in the file; a head's norm is repeated for all heads. ``offset`` is
    added to it after rounding to ``dtype``, as transformers does.
    """

    weight: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: float = 0.0

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if tuple(tensor.shape) != self.shape:
            raise BadFile(
                f"tensor {name} has shape {tuple(tensor.shape)}, expected {self.shape}; "
                "the weights do not belong to this configuration"
            )
        self.weight.copy_(tensor.to(self.dtype))
        if self.offset:
            self.weight.add_(self.offset)


def _targets(model: Decoder) -> dict[str, _Target]:
    """Every tensor that a file has to hold, by its Hugging Face name without prefix."""
    c, dtype = model.config, model.dtype
    targets: dict[str, _Target] = {}

    def add(name: str, weight: torch.Tensor) -> None:
        targets[name] = _Target(weight, tuple(weight.shape), dtype)

    def add_norm(name: str, weight: torch.Tensor | None) -> None:
        if weight is not None:
            offset = 1.0 if c.norm_offset else 0.0
            targets[name] = _Target(weight, (weight.shape[-1],), dtype, offset)

    def add_linear(names: dict[str, int], linear: nn.Linear) -> None:
        """``names``: the tensors that are stacked in ``linear``, with their numbers of rows."""
        row = 0
        for name, size in names.items():
            add(f"{name}.weight", linear.weight[row : row + size])
            if linear.bias is not None:
                add(f"{name}.bias", linear.bias[row : row + size])
            row += size

    add("embed_tokens.weight", model.embedding)
    add_norm("norm.weight", model.norm)
    if not c.tied:
        add("lm_head.weight", model.head.weight)
    num_q, num_kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    for i, layer in enumerate(model.layers):
        at = f"layers.{i}"
        qkv = {"q_proj": num_q, "k_proj": num_kv, "v_proj": num_kv}
        add_linear({f"{at}.self_attn.{name}": n for name, n in qkv.items()}, layer.qkv)
        add_linear({f"{at}.self_attn.o_proj": c.hidden_size}, layer.out)
        gate_up = {"gate_proj": c.intermediate_size, "up_proj": c.intermediate_size}
        add_linear({f"{at}.mlp.{name}": n for name, n in gate_up.items()}, layer.gate_up)
        add_linear({f"{at}.mlp.down_proj": c.hidden_size}, layer.down)
        if layer.qk_norm is not None:
            add_norm(f"{at}.self_attn.q_norm.weight", layer.qk_norm[: c.num_heads])
            add_norm(f"{at}.self_attn.k_norm.weight", layer.qk_norm[c.num_heads :])
        add_norm(f"{at}.input_layernorm.weight", layer.attention_norm)
        if c.post_norms:
            add_norm(f"{at}.post_attention_layernorm.weight", layer.attention_post_norm)
            add_norm(f"{at}.pre_feedforward_layernorm.weight", layer.mlp_norm)
            add_norm(f"{at}.post_feedforward_layernorm.weight", layer.mlp_post_norm)
        else:
            add_norm(f"{at}.post_attention_layernorm.weight", layer.mlp_norm)
    return targets


def _named(names: Seq[str]) -> str:
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    what = "tensors" if len(names) > 1 else "tensor"
    return f"{len(names)} {what}, {', '.join(names[:NUM_NAMED])}{more}"


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm (arXiv 1910.07467) over the last dimension, computed in float32; the product with
    ``weight`` is taken in the dtype of ``weight``, which is where transformers rounds."""
    normed = F.rms_norm(x.to(weight.dtype), (x.shape[-1],), None, eps)
    return normed.mul_(weight).to(x.dtype)


def _weight(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


def _linear(
    num_in: int, num_out: int, *, bias: bool, dtype: torch.dtype, device: torch.device
) -> nn.Linear:
    """A linear without initial values: they are about to be loaded."""
    linear = nn.Linear(num_in, num_out, bias=bias, dtype=dtype, device="meta")
    return linear.to_empty(device=device).requires_grad_(False)
