"""The few numbers that a table of measurements needs. Pure functions; nothing is changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two middle ones. Raises ValueError for none."""
    return float(np.median(_finite("values", values)))


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median of the ratios of paired samples, say of one prompt in one round.

    Raises ValueError unless there are equally many finite samples on both sides, at least one, and
    no denominator is 0.
    """
    return float(np.median(_ratios(numerators, denominators)))


def ratio_interval(
    numerators: Sequence[float],
    denominators: Sequence[float],
    *,
    level: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Bootstrap percentile interval (low, high) of :func:`median_ratio`; raises as it does.

    Pairs are drawn again together (Efron and Tibshirani 1993, chapter 13). One pair alone says
    nothing about the spread: both bounds are NaN.
    """
    ratios = _ratios(numerators, denominators)
    chosen = _resamples(len(ratios), num_resamples, seed)
    return _percentiles(np.median(ratios[chosen], axis=1), level, len(ratios))


def pooled_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Sum over sum: tokens per second, acceptance rate, acceptance length of several runs.

    The mean of the runs' ratios would count a short run as much as a long one. NaN if the
    denominators sum to 0 (no draft, no rate). Raises ValueError unless there are equally many
    finite samples on both sides, at least one.
    """
    above, below = _pairs(numerators, denominators)
    total = float(below.sum())
    return float(above.sum()) / total if total else math.nan


def pooled_interval(
    numerators: Sequence[float],
    denominators: Sequence[float],
    *,
    level: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Bootstrap percentile interval (low, high) of :func:`pooled_ratio`; whole runs are redrawn.

    Both bounds are NaN for a single run, and if a denominator is 0: a resample might have nothing
    but it. Raises ValueError as :func:`pooled_ratio` does.
    """
    above, below = _pairs(numerators, denominators)
    if not below.all():
        return math.nan, math.nan
    chosen = _resamples(len(above), num_resamples, seed)
    sums = above[chosen].sum(axis=1) / below[chosen].sum(axis=1)
    return _percentiles(sums, level, len(above))


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


def _ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Floats:
    above, below = _pairs(numerators, denominators)
    if not below.all():
        raise ValueError("a denominator is 0")
    return above / below


def _resamples(num_samples: int, num_resamples: int, seed: int) -> Integers:
    """Indices of samples drawn with replacement, one resample a row: ``[resamples, samples]``."""
    if num_resamples < 1:
        raise ValueError(f"num_resamples is {num_resamples}, expected 1 or more")
    generator = np.random.default_rng(seed)
    return generator.integers(0, num_samples, (num_resamples, num_samples))


def _percentiles(values: Floats, level: float, num_samples: int) -> tuple[float, float]:
    if not 0.0 < level < 1.0:
        raise ValueError(f"level is {level}, expected between 0 and 1")
    if num_samples == 1:
        return math.nan, math.nan
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(values, [tail, 1.0 - tail])
    return float(low), float(high)
