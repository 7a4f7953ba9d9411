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


def checked_depth(all_layers: int, num_layers: int | None, hidden_layers: Seq[int]) -> int:
    """The layers that a forward of a model of ``all_layers`` computes; None stands for all.

    Raises ValueError for a layer that does not exist or is not reached.
    """
    depth = all_layers if num_layers is None else num_layers
    if not 0 <= depth <= all_layers:
        raise ValueError(f"num_layers is {depth}, expected 0 to {all_layers}")
    if any(not 0 <= i <= depth for i in hidden_layers):
        raise ValueError(f"hidden_layers is {hidden_layers}, expected numbers from 0 to {depth}")
    return depth
