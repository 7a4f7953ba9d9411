"""The noise that tokens are drawn with: what it depends on, and that it is what it should be."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency, chisquare, kstest

from outrider.sampling import Noise, Role

# Chance tests: each is right with probability 1 - ERROR for fresh seeds; these are fixed.
ERROR = 1e-4

ROLES = list(Role)


def test_noise_is_a_function_of_its_key() -> None:
    """Not of what was asked before, nor of how often, nor of a second object."""
    keys = [(p, role, base) for p in range(20) for role in ROLES for base in (0, 3)]
    first, second = Noise(5), Noise(5)
    forward = {key: first.exponentials(16, *key).clone() for key in keys}
    for key in reversed(keys):
        assert torch.equal(second.exponentials(16, *key), forward[key])
        assert torch.equal(second.exponentials(16, *key), forward[key])
    accepts = [first.accept(0.5, base, test) for base in range(50) for test in range(4)]
    assert accepts == [second.accept(0.5, base, test) for base in range(50) for test in range(4)]
    assert len({tuple(noise.tolist()) for noise in forward.values()}) == len(keys)


def test_seeds_give_different_noise() -> None:
    draws = {tuple(Noise(seed).exponentials(8, 0).tolist()) for seed in (0, 1, 2, 2**63 - 1, 2**63)}
    assert len(draws) == 5


def test_noise_is_exponential() -> None:
    sample = torch.cat([Noise(1).exponentials(1000, position) for position in range(20)])
    assert kstest(sample.numpy(), "expon").pvalue > ERROR


@pytest.mark.parametrize("seed", [0, 2, 8])
def test_noise_is_never_zero(seed: int) -> None:
    """Zero noise lets any token win, however unlikely. In 32 bits it came up once in 8 million
    numbers, which is every fiftieth token where the vocabulary has 150,000."""
    sample = Noise(seed).exponentials(2**22, 0)
    # Below 1e-11 in 4 million numbers: once in 20,000 seeds.
    assert float(sample.min()) > 1e-11
    assert kstest(sample[sample < 1e-4].numpy() * 1e4, "uniform").pvalue > ERROR


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((0, Role.DRAW, 0), (0, Role.DRAFT, 0)),
        ((0, Role.DRAW, 0), (0, Role.ACCEPT, 0)),
        ((0, Role.DRAW, 0), (1, Role.DRAW, 0)),
        ((0, Role.DRAFT, 0), (0, Role.DRAFT, 1)),
        ((1, Role.DRAFT, 0), (0, Role.DRAFT, 1)),
    ],
)
def test_streams_are_uncorrelated(one: tuple[int, Role, int], other: tuple[int, Role, int]) -> None:
    num = 100_000
    noise = Noise(11)
    both = np.stack([noise.exponentials(num, *key).numpy() for key in (one, other)])
    # The correlation of independent numbers has a deviation of 1 / sqrt(num): four of them.
    assert abs(np.corrcoef(both)[0, 1]) < 4 / math.sqrt(num)
    assert abs(np.corrcoef(both[:, :-1], both[:, 1:])[0, 2:]).max() < 4 / math.sqrt(num)


LAW = torch.tensor([0.4, 0.0, 0.3, 0.2, 0.1])
POSSIBLE = [0, 2, 3, 4]
NUM_DRAWS = 8000


def table(pairs: list[tuple[int, int]]) -> np.ndarray:
    counts = np.zeros((5, 5))
    np.add.at(counts, tuple(np.array(pairs).T), 1)
    return counts[np.ix_(POSSIBLE, POSSIBLE)]


def test_draws_follow_the_law() -> None:
    for draws in (
        [Noise(21).draw(LAW, position) for position in range(NUM_DRAWS)],
        [Noise(seed).draw(LAW, 5) for seed in range(NUM_DRAWS)],
    ):
        counts = np.bincount(draws, minlength=5)
        assert counts[1] == 0
        expected = LAW[POSSIBLE].double().numpy()
        expected = expected / expected.sum() * NUM_DRAWS
        assert chisquare(counts[POSSIBLE], expected).pvalue > ERROR


def test_draws_at_different_positions_and_seeds_are_independent() -> None:
    by_position = [Noise(22).draw(LAW, position) for position in range(NUM_DRAWS + 1)]
    assert chi2_contingency(table(list(itertools.pairwise(by_position)))).pvalue > ERROR
    by_seed = [Noise(seed).draw(LAW, 3) for seed in range(NUM_DRAWS + 1)]
    assert chi2_contingency(table(list(itertools.pairwise(by_seed)))).pvalue > ERROR
    across = [(Noise(seed).draw(LAW, 3), Noise(seed + 1).draw(LAW, 2)) for seed in range(NUM_DRAWS)]
    assert chi2_contingency(table(across)).pvalue > ERROR


def test_draft_draws_do_not_know_the_target_draws() -> None:
    noise = Noise(23)
    pairs = [
        (noise.draw(LAW, p), int(noise.race(LAW, p, Role.DRAFT, p).argmax()))
        for p in range(NUM_DRAWS)
    ]
    assert chi2_contingency(table(pairs)).pvalue > ERROR


def test_accept_tests_pass_as_often_as_they_should() -> None:
    noise = Noise(24)
    outcomes = np.array(
        [[noise.accept(0.3, base, test) for test in (1, 2)] for base in range(NUM_DRAWS)]
    )
    counts = np.bincount(outcomes[:, 0] * 2 + outcomes[:, 1], minlength=4)
    expected = np.array([0.49, 0.21, 0.21, 0.09]) * NUM_DRAWS
    assert chisquare(counts, expected).pvalue > ERROR
    # The second test of one block and the first of the next would be one under a key of position.
    diagonal = np.stack([outcomes[:-1, 1], outcomes[1:, 0]])
    assert abs(np.corrcoef(diagonal)[0, 1]) < 4 / math.sqrt(NUM_DRAWS)
    assert all(noise.accept(1.0, base, 1) for base in range(100))
    assert not any(noise.accept(0.0, base, 1) for base in range(100))


def test_accept_tests_do_not_know_the_draws() -> None:
    noise = Noise(25)
    counts = np.zeros((5, 2))
    for position in range(NUM_DRAWS):
        counts[noise.draw(LAW, position), int(noise.accept(0.5, position, 1))] += 1
    assert chi2_contingency(counts[POSSIBLE]).pvalue > ERROR


def test_the_race_draws_without_replacement() -> None:
    """The first two of the race: law of two draws, the second from what the first left."""
    noise = Noise(26)
    pairs = Counter(
        tuple(noise.race(LAW, p, Role.DRAFT).topk(2).indices.tolist()) for p in range(NUM_DRAWS)
    )
    keys = list(itertools.permutations(POSSIBLE, 2))
    probs = LAW.double().tolist()
    expected = np.array([probs[a] * probs[b] / (1.0 - probs[a]) for a, b in keys])
    assert set(pairs) <= set(keys)
    counts = [pairs[key] for key in keys]
    assert chisquare(counts, expected / expected.sum() * NUM_DRAWS).pvalue > ERROR


def test_a_draft_that_races_with_the_same_noise_agrees_often() -> None:
    """The probability of agreement under shared noise (Daliri et al., arXiv 2408.07978)."""
    noise = Noise(27)
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    agree = sum(noise.draw(p, i) == noise.draw(q, i) for i in range(NUM_DRAWS)) / NUM_DRAWS
    exact = sum(
        1.0 / sum(max(float(p[j] / p[i]), float(q[j] / q[i])) for j in range(3)) for i in range(3)
    )
    deviation = math.sqrt(exact * (1.0 - exact) / NUM_DRAWS)
    assert abs(agree - exact) < 4 * deviation


def test_streams_of_earlier_positions_are_freed() -> None:
    noise = Noise(5)
    first = noise.exponentials(8, 3).clone()
    for position in range(4, 9):
        noise.exponentials(8, position)
        noise.exponentials(8, position, Role.DRAFT, 3)
    noise.forget(before=7)
    assert [key[1] for key in noise._race] == [7, 8]
    noise.forget()
    assert not noise._race
    assert torch.equal(noise.exponentials(8, 3), first)
