"""Where two answers of the same prompt part, and whether rounding explains it.

A forward over many rows and a forward over one row add in different orders, so their logits differ
in the last bits. Where the two most likely tokens are closer than that, the choice may flip; it is
a tie within the precision of the arithmetic, and the only difference that exact decoding may show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.batch import Work, build
from outrider.models.base import Model

ULPS = 2
"""Logits within this many units in the last place of the larger one count as tied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """``position``: index in the answer of the first token that differs. ``gap``: the two tokens'
    logits apart, computed from scratch in one forward; ``tolerance``: what still is a near-tie.
    Both are None if one answer is only the beginning of the other, which no tie explains."""

    prompt: int
    position: int
    expected: int | None
    got: int | None
    gap: float | None
    tolerance: float | None

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains the difference."""
        return self.gap is not None and self.tolerance is not None and self.gap <= self.tolerance


def first_difference(
    model: Model, ids: Sequence[int], expected: Sequence[int], got: Sequence[int], prompt: int
) -> Difference:
    """The first difference of two answers to the prompt ``ids``. Runs one forward on ``model``;
    leaves its cache as it was."""
    position = next(
        (i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b),
        min(len(expected), len(got)),
    )
    if position >= min(len(expected), len(got)):
        return Difference(
            prompt=prompt,
            position=position,
            expected=expected[position] if position < len(expected) else None,
            got=got[position] if position < len(got) else None,
            gap=None,
            tolerance=None,
        )
    logits = _next_logits(model, [*ids, *expected[:position]])
    pair = logits[[expected[position], got[position]]]
    eps = torch.finfo(model.dtype).eps
    return Difference(
        prompt=prompt,
        position=position,
        expected=expected[position],
        got=got[position],
        gap=float(logits.max() - pair.min()),
        tolerance=ULPS * eps * float(logits.abs().max()),
    )


def _next_logits(model: Model, tokens: Sequence[int]) -> torch.Tensor:
    """Logits after ``tokens``, float32 ``[V]``."""
    seq_id = "near-tie"
    model.kv.open(seq_id)
    try:
        batch = build(
            [Work(seq_id=seq_id, chain=tokens)],
            model.kv,
            windows=model.windows,
            dtype=model.dtype,
            device=model.device,
        )
        return model.forward(batch).logits[-1].float().cpu()
    finally:
        model.kv.close(seq_id)
