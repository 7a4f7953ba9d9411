"""Logits of a text by one forward, outside the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from outrider.batch import Work, build
from outrider.models.base import Model


def text_logits(model: Model, tokens: Sequence[int], *, everywhere: bool = False) -> torch.Tensor:
    """Logits after the last of ``tokens``, float32 ``[1, V]``, or after every one, ``[T, V]``.
    Leaves the model's cache as it was. Raises OutOfSlots."""
    seq_id = "text-logits"
    model.kv.open(seq_id)
    try:
        batch = build(
            [Work(seq_id=seq_id, chain=tokens)],
            model.kv,
            windows=model.windows,
            dtype=model.dtype,
            device=model.device,
        )
        if everywhere:
            index = torch.arange(len(tokens), device=batch.logit_index.device)
            batch = replace(batch, logit_index=index, logit_rows=(slice(0, len(tokens)),))
        return model.forward(batch).logits.float().cpu()
    finally:
        model.kv.close(seq_id)
