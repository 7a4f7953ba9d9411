import math
import statistics

import numpy as np
import pytest

from outrider.bench.statistics import median, pooled_interval, pooled_ratio


@pytest.mark.parametrize("values", [[3.0], [1.0, 9.0, 2.0], [4.0, 1.0, 2.0, 8.0]])
def test_median(values):
    assert median(values) == statistics.median(values)


def test_constant_ratios_are_certain():
    # Every pair has the ratio 2, whatever its size: drawn apart, the ratios would scatter.
    above, below = [2.0, 20.0, 200.0, 2000.0], [1.0, 10.0, 100.0, 1000.0]
    assert pooled_interval(above, below) == (2.0, 2.0)


def test_the_interval_holds_the_estimate_and_follows_level_and_seed():
    rng = np.random.default_rng(7)
    above, below = rng.gamma(9.0, size=40), rng.gamma(9.0, size=40)
    low, high = pooled_interval(above, below, seed=1, num_resamples=99)
    assert (low, high) == pooled_interval(above, below, seed=1, num_resamples=99)
    assert any(
        (low, high) != pooled_interval(above, below, seed=s, num_resamples=99) for s in (2, 3)
    )
    assert low < pooled_ratio(above, below) < high
    inner_low, inner_high = pooled_interval(above, below, seed=1, num_resamples=99, level=0.5)
    assert low < inner_low < inner_high < high


def test_the_interval_covers_the_truth_as_often_as_it_says():
    # Numerators are exp(0.3 + 0.3 z) with denominators 1: their mean is e^(0.3 + 0.045).
    rng = np.random.default_rng(11)
    covered = 0
    for seed in range(200):
        above = np.exp(0.3 + 0.3 * rng.standard_normal(30))
        low, high = pooled_interval(above, np.ones(30), level=0.9, num_resamples=300, seed=seed)
        covered += low <= math.exp(0.345) <= high
    assert 0.82 <= covered / 200 <= 0.97


def test_one_pair_has_no_interval():
    assert all(map(math.isnan, pooled_interval([3.0], [2.0])))


def test_pooled_ratio_is_sum_over_sum():
    assert pooled_ratio([1, 90], [10, 100]) == pytest.approx(91 / 110)  # not (0.1 + 0.9) / 2
    assert math.isnan(pooled_ratio([0, 0], [0, 0]))
    assert pooled_ratio([0, 3], [0, 4]) == 0.75
    assert all(map(math.isnan, pooled_interval([0, 3], [0, 4])))
    low, high = pooled_interval([1, 90] * 20, [10, 100] * 20)
    assert low < 91 / 110 < high
    assert low > 0.7  # the mean of the ratios is 0.5


@pytest.mark.parametrize("function", [pooled_ratio, pooled_interval])
def test_samples_that_are_no_pairs_are_refused(function):
    for above, below in (([], []), ([1.0], [1.0, 2.0]), ([math.nan], [1.0]), ([1.0], [math.inf])):
        with pytest.raises(ValueError, match=r"finite numbers|no pairs"):
            function(above, below)


def test_bad_parameters_are_refused():
    with pytest.raises(ValueError, match="finite numbers"):
        median([])
    with pytest.raises(ValueError, match="level"):
        pooled_interval([1.0, 2.0], [1.0, 1.0], level=95)
    with pytest.raises(ValueError, match="num_resamples"):
        pooled_interval([1.0, 2.0], [1.0, 1.0], num_resamples=0)
