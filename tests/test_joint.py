"""The joint law of the first tokens, sampled through the real engine, is the target's.

Every drafter under every verifier of laws, at temperatures 0.7, 1.0 and 1.3 with top-p, top-k,
min-p, penalties and end tokens: each pair alone in an engine, and all pairs, coupled and plain
requests together in the steps of one. Three tokens with two drafts a step take one to three
rounds, so noise that links a round to the next would show. Outputs of coupled requests are
compared with plain ones token by token.

False alarms: seeds are fixed, so the outcome is the same on every run. For other seeds, a right
engine would fail somewhere in this file once in about 600 choices: 160 p-values are held against
ALPHA. (Statistics of cells of expectation 5 and more; their far tails are approximate.)

Power, at 99 % and level ALPHA, for the joint law of two tokens and whatever the direction of the
error (checked by ``test_power_statement``): the two samples of a pair find a total-variation
distance of 0.155, those of all pairs together one of 0.062 under each set of parameters and the
probes one of 0.081 ("left") to 0.28 ("dice"). Errors that sit in few cells, or in unlikely ones,
show much earlier. test_joint_mistakes.py finds every mistake tried so far at the size
at which the right engine is tested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import cast

import pytest

from joint import Case, Law, Outcome, Sample, add_up, detectable, fit, sample
from joint_cases import (
    ALPHA,
    CHAINS,
    NUM,
    PAIRS,
    PARAMS,
    PROBES,
    TREES,
    WORLD,
    cases,
    exact_laws,
    of_all,
    p_value,
    sample_alone,
)
from outrider.config import EngineConfig
from outrider.metrics import total

Samples = dict[tuple[str, str], dict[str, Sample]]


ALONE_SEEDS = {pair: 10_000_000 + 10_000 * i for i, pair in enumerate(PAIRS)}
MIXED_SEEDS = {pair: 20_000_000 + 10_000 * i for i, pair in enumerate(PAIRS)}
PLAIN_SEED = MIXED_SEEDS["none", "coupled"]


@pytest.fixture(scope="module")
def alone() -> Samples:
    return {pair: sample_alone(*pair, seed=seed) for pair, seed in ALONE_SEEDS.items()}


@pytest.fixture(scope="module")
def mixed() -> Samples:
    """All pairs and parameters in one engine whose pool is too small for its batch; a part of the
    plain requests' seeds once more for coupled requests of every drafter."""
    wanted: dict[tuple[str, str], list[Case]] = {}
    for pair, seed in MIXED_SEEDS.items():
        wanted[pair] = cases(*pair, seed, NUM, 5)
    for drafter in (*CHAINS, *TREES):
        wanted[drafter, "coupled"] = cases(drafter, "coupled", PLAIN_SEED, NUM // 5, 5)
    engine = WORLD.engine(
        config=EngineConfig(max_batch=96, max_step_tokens=400, chunk=3), num_slots=350
    )
    flat = [case for group in wanted.values() for case in group]
    samples = iter(sample(engine, WORLD.prompt, flat))
    return {pair: dict(zip(PARAMS, samples, strict=False)) for pair in wanted}


def show(value: object) -> str:
    return value if isinstance(value, str) else "-".join(cast(tuple[str, ...], value))


@pytest.mark.parametrize("pair", PAIRS, ids=show)
def test_alone(pair: tuple[str, str], alone: Samples) -> None:
    p = of_all(alone[pair])
    assert p > ALPHA, f"p = {p}, seeds from {ALONE_SEEDS[pair]}"


@pytest.mark.parametrize("pair", PAIRS, ids=show)
def test_mixed(pair: tuple[str, str], mixed: Samples) -> None:
    p = of_all(mixed[pair])
    assert p > ALPHA, f"p = {p}, seeds from {MIXED_SEEDS[pair]}"


@pytest.mark.parametrize("pair", PAIRS, ids=show)
def test_alone_and_mixed(pair: tuple[str, str], alone: Samples, mixed: Samples) -> None:
    """Twice the sample; and drafts were accepted and rejected, or it would say nothing."""
    both = {name: alone[pair][name].counts + mixed[pair][name].counts for name in PARAMS}
    assert p_value((both[name], exact_laws()[name]) for name in PARAMS) > ALPHA
    if pair[0] != "none":
        for name in PARAMS:
            stats = total([alone[pair][name].stats, mixed[pair][name].stats])
            assert 0.02 < stats.accepted / stats.drafted < 0.9, (name, stats)
            assert len(alone[pair][name].num_rounds) >= 2


@pytest.mark.parametrize("name", PARAMS)
def test_all_pairs_together(name: str, alone: Samples, mixed: Samples) -> None:
    """What is wrong in the same direction everywhere shows in the sum."""
    counts: Counter[Outcome] = Counter()
    for pair in PAIRS:
        counts += alone[pair][name].counts + mixed[pair][name].counts
    assert sum(counts.values()) == 2 * NUM * len(PAIRS)
    assert p_value([(counts, exact_laws()[name])]) > ALPHA


def test_the_mixed_batch_is_mixed(mixed: Samples) -> None:
    stats = total(one.stats for group in mixed.values() for one in group.values())
    assert stats.preemptions > 100
    assert stats.prompt_forwards > 100
    assert stats.faults == 0


@pytest.mark.parametrize("drafter", [*CHAINS, *TREES])
def test_coupled_is_plain(drafter: str, mixed: Samples) -> None:
    """The same seed gives the same tokens, whatever drafts and runs beside it: so the coupled
    joint law is that of plain requests, which is tested above."""
    num_accepted = 0
    for name in PARAMS:
        plain, coupled = mixed["none", "coupled"][name], mixed[drafter, "coupled"][name]
        assert len(coupled.by_seed) == NUM // 5
        for seed, output in coupled.by_seed.items():
            assert output == plain.by_seed[seed], f"{name}, (seed, index) {seed}"
        num_accepted += coupled.stats.accepted
    assert num_accepted > 0


@pytest.mark.parametrize("verifier", ["rejection", "block", "traversal"])
def test_without_drafts_every_verifier_is_plain(verifier: str, mixed: Samples) -> None:
    for name, case in zip(PARAMS, cases("none", verifier, PLAIN_SEED, 40, 5), strict=True):
        for seed, output in sample(WORLD.engine(), WORLD.prompt, [case])[0].by_seed.items():
            assert output == mixed["none", "coupled"][name].by_seed[seed], f"{name}, {seed}"


@pytest.mark.parametrize(
    ("probe", "drafter", "verifier"),
    [
        ("coin", "draft:1,k=2", "rejection"),
        ("coin", "draft:1,k=2", "block"),
        ("coin", "draft:1,k=2", "traversal"),
        ("dice", "draft:1,k=3,width=2", "rejection"),
        ("dice", "draft:1,k=3,width=2", "traversal"),
        ("dice", "replacement", "rejection"),
        ("dice", "replacement", "traversal"),
        ("twins", "ensemble:[draft:1,k=2,draft:1,k=2]", "rejection"),
        ("twins", "ensemble:[draft:1,k=2,draft:1,k=2]", "traversal"),
        ("late", "draft:1,k=2", "block"),
        ("left", "draft:1,k=2", "rejection"),
    ],
)
def test_probes(probe: str, drafter: str, verifier: str) -> None:
    p, one = PROBES[probe].sample(drafter, verifier)
    assert p > ALPHA
    assert one.stats.faults == 0
    assert len(one.num_rounds) >= 2  # outputs that took more rounds and fewer are counted together


def test_power_statement() -> None:
    """The numbers in the docstring of this file."""

    def tv(num: int, laws: Iterable[Law]) -> float:
        """Of the joint law of two tokens, ``num`` samples of each."""
        laws = list(laws)
        counts = [Counter({o: round(num * p) for o, p in probs.items()}) for probs in laws]
        fits = [fit(c, probs, length=2) for c, probs in zip(counts, laws, strict=True)]
        return detectable(num * len(laws), add_up(fits).df, ALPHA)

    assert tv(2 * NUM, exact_laws().values()) == pytest.approx(0.155, abs=0.001)
    together = max(tv(2 * NUM * len(PAIRS), [probs]) for probs in exact_laws().values())
    assert together == pytest.approx(0.062, abs=0.001)
    probes = [detectable(p.num, p.vocab_size**2 - 1, ALPHA) for p in PROBES.values()]
    assert min(probes) == pytest.approx(0.081, abs=0.001)
    assert max(probes) == pytest.approx(0.277, abs=0.001)
