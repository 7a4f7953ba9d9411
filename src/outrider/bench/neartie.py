"""Where two answers of the same prompt part, and whether rounding explains it.

A forward over many rows and a forward over one row add in different orders, so their logits differ
in the last bits. Where two tokens are closer than that to being chosen, the choice may flip; it is
a tie within the precision of the arithmetic, and the only difference that exact decoding may show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.bench.logits import text_logits
from outrider.models.base import Model
from outrider.request import SamplingParams
from outrider.sampling import MIN_TEMPERATURE, Noise, adjust, truncate

ULPS = 2
"""Logits within this many units in the last place of the larger one count as tied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """``position``: index in the answer of the first token that differs. ``gap``: by how much a
    logit would have to change for the less likely of the two tokens to be chosen, computed from
    scratch in one forward; ``tolerance``: what still is a near-tie. Both are None if one answer is
    only the beginning of the other, which no tie explains. ``gap`` alone is None for a token that
    top-k, top-p or min-p cut by more than the tolerance."""

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
    model: Model,
    ids: Sequence[int],
    expected: Sequence[int],
    got: Sequence[int],
    prompt: int,
    *,
    params: SamplingParams,
    seed: int,
) -> Difference:
    """The first difference of two answers to the prompt ``ids`` under ``params``, drawn with
    ``seed``, the seed of the sequence. Runs one forward on ``model``; leaves its cache as it was.
    ``min_tokens`` is not looked at: an end that came too early is no near-tie's fault."""
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
    output = expected[:position]
    logits = text_logits(model, [*ids, *output])[-1]
    tolerance = ULPS * torch.finfo(model.dtype).eps * float(logits.abs().max())
    scores = adjust(logits, params, prompt=ids, output=output, end_tokens=frozenset())
    pair = (expected[position], got[position])
    if params.temperature == 0.0:
        gap: float | None = float(scores.max() - scores[list(pair)].min())
    else:
        noise = Noise(seed).exponentials(len(scores), len(ids) + position)
        gap = _race_gap(scores, noise, params, pair, tolerance)
    return Difference(
        prompt=prompt,
        position=position,
        expected=pair[0],
        got=pair[1],
        gap=gap,
        tolerance=tolerance,
    )


def _race_gap(
    scores: torch.Tensor,
    noise: torch.Tensor,
    params: SamplingParams,
    pair: tuple[int, int],
    tolerance: float,
) -> float | None:
    """How far, in logits, the second of ``pair`` is from being drawn; None if it cannot be.

    The choice is the argmax of probs / E: of ``scores / T - log E`` among the tokens that are not
    cut. The cut may fall on the other side of either token by rounding too, so a token counts as
    drawn if it nearly is under any cut that moving one of the two by ``tolerance`` gives.
    """
    temperature = max(params.temperature, MIN_TEMPERATURE)
    values = scores.double() / temperature - noise.double().log()
    supports = [_kept(scores, temperature, params)]
    for token in pair:
        for step in (tolerance, -tolerance):
            moved = scores.clone()
            moved[token] += step
            supports.append(_kept(moved, temperature, params))
    gaps = []
    for token in pair:
        distances = [values[kept].max() - values[token] for kept in supports if kept[token]]
        gaps.append(min((float(d) for d in distances), default=math.inf))
    gap = max(gaps) * temperature
    return gap if math.isfinite(gap) else None


def _kept(scores: torch.Tensor, temperature: float, params: SamplingParams) -> torch.Tensor:
    """Which tokens can be drawn: bool ``[V]``."""
    probs = torch.softmax((scores - scores.max()) / temperature, dim=-1)
    return truncate(probs, params) > 0
