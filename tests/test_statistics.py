import math
import statistics

import numpy as np
import pytest

from outrider.bench.statistics import (
    Interval,
    acceptance_by_position,
    median,
    median_ratio,
    pooled_ratio,
    pooled_ratio_interval,
    survival,
)


@pytest.mark.parametrize("values", [[3.0], [1.0, 9.0, 2.0], [4.0, 1.0, 2.0, 8.0]])
def test_median(values):
    assert median(values) == statistics.median(values)


def test_median_ratio_is_of_pairs():
    # The ratio of the medians would be 10 / 2.
    assert median_ratio([1.0, 10.0, 100.0], [1.0, 2.0, 100.0]).estimate == 1.0


def test_median_ratio_of_constant_ratios_is_certain():
    assert median_ratio([2.0, 4.0, 8.0], [1.0, 2.0, 4.0]) == Interval(2.0, 2.0, 2.0)


def test_intervals_are_reproducible_and_follow_the_seed():
    rng = np.random.default_rng(7)
    above, below = rng.gamma(9.0, size=15), rng.gamma(9.0, size=15)
    for function in (median_ratio, pooled_ratio_interval):
        one = function(above, below, num_resamples=200, seed=1)
        assert one == function(above, below, num_resamples=200, seed=1)
        assert one != function(above, below, num_resamples=200, seed=2)
        assert one.low < one.estimate < one.high
        narrow = function(above, below, num_resamples=200, seed=1, level=0.5)
        assert one.low < narrow.low < narrow.high < one.high


@pytest.mark.parametrize(
    ("function", "truth"), [(median_ratio, math.exp(0.3)), (pooled_ratio_interval, math.exp(0.345))]
)
def test_intervals_cover_the_truth_as_often_as_they_say(function, truth):
    # Numerators are exp(0.3 + 0.3 z) with denominators 1: median e^0.3, mean e^(0.3 + 0.045).
    rng = np.random.default_rng(11)
    covered = 0
    for seed in range(200):
        above = np.exp(0.3 + 0.3 * rng.standard_normal(30))
        interval = function(above, np.ones(30), level=0.9, num_resamples=300, seed=seed)
        covered += interval.low <= truth <= interval.high
    assert 0.82 <= covered / 200 <= 0.97


def test_pairs_are_drawn_together():
    # Every pair has the ratio 1, whatever its size: drawn apart, the ratios would scatter.
    sizes = [1.0, 10.0, 100.0, 1000.0]
    assert pooled_ratio_interval(sizes, sizes) == Interval(1.0, 1.0, 1.0)


def test_one_pair_has_no_interval():
    for function in (median_ratio, pooled_ratio_interval):
        interval = function([3.0], [2.0])
        assert interval.estimate == 1.5
        assert math.isnan(interval.low)
        assert math.isnan(interval.high)


def test_pooled_ratio_is_sum_over_sum():
    assert pooled_ratio([1, 90], [10, 100]) == pytest.approx(91 / 110)  # not (0.1 + 0.9) / 2
    assert math.isnan(pooled_ratio([0, 0], [0, 0]))
    interval = pooled_ratio_interval([0, 3], [0, 4])
    assert interval.estimate == 0.75
    assert math.isnan(interval.low)


@pytest.mark.parametrize("function", [median_ratio, pooled_ratio, pooled_ratio_interval])
def test_samples_that_are_no_pairs_are_refused(function):
    for above, below in (([], []), ([1.0], [1.0, 2.0]), ([math.nan], [1.0]), ([1.0], [math.inf])):
        with pytest.raises(ValueError, match="finite numbers|no pairs"):
            function(above, below)


def test_bad_parameters_are_refused():
    with pytest.raises(ValueError, match="finite numbers"):
        median([])
    with pytest.raises(ValueError, match="denominator is 0"):
        median_ratio([1.0, 2.0], [1.0, 0.0])
    with pytest.raises(ValueError, match="level"):
        median_ratio([1.0, 2.0], [1.0, 1.0], level=95)
    with pytest.raises(ValueError, match="num_resamples"):
        median_ratio([1.0, 2.0], [1.0, 1.0], num_resamples=0)


def test_acceptance_by_position_is_conditional():
    assert acceptance_by_position([10, 8, 4, 0], [8, 6, 1, 0]) == [0.8, 0.75, 0.25]
    assert acceptance_by_position([], []) == []


@pytest.mark.parametrize(
    ("tried", "accepted"), [([10], [11]), ([10, 9], [8, 1]), ([10], [-1]), ([10, 5], [8])]
)
def test_impossible_counts_are_refused(tried, accepted):
    with pytest.raises(ValueError, match="position|counts"):
        acceptance_by_position(tried, accepted)


def test_survival_multiplies_up():
    assert survival([0.8, 0.5, 0.25]) == pytest.approx([0.8, 0.4, 0.1])
    # With equal rates this is the published acceptance length, (1 - a^(K+1)) / (1 - a).
    assert 1 + sum(survival([0.7] * 5)) == pytest.approx((1 - 0.7**6) / 0.3)
