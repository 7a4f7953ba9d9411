"""The few numbers that a table of measurements needs. Pure functions; nothing is changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the bounds of its confidence interval, NaN where they are not known."""

    estimate: float
    low: float
    high: float


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two middle ones. Raises ValueError for none."""
    return float(np.median(_finite("values", values)))


def median_ratio(
    numerators: Sequence[float],
    denominators: Sequence[float],
    *,
    level: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Median of the ratios of paired samples, with a bootstrap percentile interval.

    Pair i was measured side by side, one prompt in one round for example, so pairs are drawn
    again together (Efron and Tibshirani 1993, chapter 13). One pair alone says nothing about
    the spread: its bounds are NaN. Raises ValueError unless there are equally many finite samples
    on both sides, at least one, and no denominator is 0.
    """
    above, below = _pairs(numerators, denominators)
    if not below.all():
        raise ValueError("a denominator is 0")
    ratios = above / below
    return _bootstrap(
        float(np.median(ratios)),
        lambda chosen: np.median(ratios[chosen], axis=1),
        len(ratios),
        level,
        num_resamples,
        seed,
    )


def pooled_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Sum over sum: tokens per second, acceptance rate, acceptance length of several runs.

    The mean of the runs' ratios would count a short run as much as a long one. NaN if the
    denominators sum to 0 (no draft, no rate). Raises ValueError unless there are equally many
    finite samples on both sides, at least one.
    """
    above, below = _pairs(numerators, denominators)
    total = float(below.sum())
    return float(above.sum()) / total if total else math.nan


def pooled_ratio_interval(
    numerators: Sequence[float],
    denominators: Sequence[float],
    *,
    level: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """:func:`pooled_ratio` with a bootstrap percentile interval; runs are drawn again whole.

    Bounds are NaN for a single run, and where a resample may have no denominator. Raises
    ValueError as :func:`pooled_ratio` does.
    """
    above, below = _pairs(numerators, denominators)
    estimate = pooled_ratio(numerators, denominators)
    if not below.all():
        return Interval(estimate, math.nan, math.nan)
    return _bootstrap(
        estimate,
        lambda chosen: above[chosen].sum(axis=1) / below[chosen].sum(axis=1),
        len(above),
        level,
        num_resamples,
        seed,
    )


def acceptance_by_position(tried: Sequence[int], accepted: Sequence[int]) -> list[float]:
    """How often the draft token at each position was accepted, given that all before it were.

    ``tried[i]``: steps that had a draft at position i and accepted all before it; ``accepted[i]``:
    how many of them accepted position i too. Positions that no step tried are left out. Raises
    ValueError for counts that cannot be: more accepted than tried, or more tried than were
    accepted one position before.
    """
    if len(tried) != len(accepted):
        raise ValueError(f"{len(tried)} counts of tries, {len(accepted)} of acceptances")
    reached = tried[0] if tried else 0
    for position, (num_tried, num_accepted) in enumerate(zip(tried, accepted, strict=True)):
        if not 0 <= num_accepted <= num_tried <= reached:
            raise ValueError(
                f"position {position}: reached {reached} times, tried {num_tried} times, "
                f"accepted {num_accepted} times"
            )
        reached = num_accepted
    return [a / t for t, a in zip(tried, accepted, strict=True) if t]


def survival(conditional: Sequence[float]) -> list[float]:
    """Chance that a long enough draft is accepted up to and with each position.

    ``conditional``: from :func:`acceptance_by_position`. The sum of the first K, plus 1 for the
    bonus token, is the acceptance length of chains of K tokens (Leviathan et al.,
    arXiv 2211.17192, with a rate for each position).
    """
    return list(accumulate(conditional, mul))


def _finite(name: str, values: Sequence[float]) -> Floats:
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or not len(array) or not np.isfinite(array).all():
        raise ValueError(f"{name} must be one or more finite numbers")
    return array


def _pairs(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[Floats, Floats]:
    above, below = _finite("numerators", numerators), _finite("denominators", denominators)
    if len(above) != len(below):
        raise ValueError(f"{len(above)} numerators and {len(below)} denominators are no pairs")
    return above, below


def _bootstrap(
    estimate: float,
    statistic: Callable[[Integers], Floats],
    num_samples: int,
    level: float,
    num_resamples: int,
    seed: int,
) -> Interval:
    """``statistic`` takes sample indices ``[num_resamples, num_samples]``, one resample a row."""
    if not 0.0 < level < 1.0:
        raise ValueError(f"level is {level}, expected between 0 and 1")
    if num_resamples < 1:
        raise ValueError(f"num_resamples is {num_resamples}, expected 1 or more")
    if num_samples == 1:
        return Interval(estimate, math.nan, math.nan)
    generator = np.random.default_rng(seed)
    chosen = generator.integers(0, num_samples, (num_resamples, num_samples))
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(statistic(chosen), [tail, 1.0 - tail])
    return Interval(estimate, float(low), float(high))
