"""What the loop needs of a model: target, draft model, head or remote worker alike."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch

from outrider.batch import ForwardBatch
from outrider.kv import KVCache


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """``logits`` ``[R, V]``, one row per entry of ``batch.logit_index``.

    ``hidden`` ``[T, len(hidden_layers) * D]``: for every token of the batch the states that enter
    the chosen layers, side by side; None if none was asked for.
    """

    logits: torch.Tensor
    hidden: torch.Tensor | None = None


class Model(Protocol):
    """A causal language model with a KV pool of its own."""

    vocab_size: int
    context_length: int
    num_layers: int
    windows: tuple[int | None, ...]
    """Attention windows of the layers, each once; None is full attention."""
    dtype: torch.dtype
    device: torch.device
    kv: KVCache

    def forward(
        self,
        batch: ForwardBatch,
        *,
        hidden_layers: Seq[int] = (),
        num_layers: int | None = None,
    ) -> Forward:
        """Compute a batch and write its keys and values into the pool.

        ``hidden_layers``: i stands for the state entering layer i; ``num_layers`` (the model's
        own number) for the state after the last one, before the final norm. A smaller
        ``num_layers`` stops there and applies the final norm and the head to that state.
        """
        ...

    def scrub(self, slots: Seq[int]) -> None:
        """Zero the pool's ``slots``: keys and values that are not numbers must not stay."""
        ...
