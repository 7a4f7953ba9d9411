"""The few numbers that a table of measurements needs. Pure functions; nothing is changed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two middle ones. Raises ValueError for none."""
    return float(np.median(_finite("values", values)))


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
