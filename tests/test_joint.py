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
show much earlier. So every mistake at the end of this file is found at the size at which the right
engine is tested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import cast

import pytest
import torch

from joint import (
    Case,
    Law,
    Outcome,
    Sample,
    ShapeDrafter,
    World,
    add_up,
    detectable,
    fit,
    independent,
    like_the_target,
    ranked,
    sample,
)
from outrider.config import EngineConfig
from outrider.drafters import make_drafter
from outrider.drafters.base import Budget
from outrider.drafters.ensemble import Ensemble
from outrider.metrics import total
from outrider.request import SamplingParams, Sequence
from outrider.sampling import Chance, NodeLaws, Noise, law
from outrider.tree import ROOT, TokenTree
from outrider.verify import Laws, Rejection, Verdict, Verifier
from wrong_verifiers import (
    BlockStopsAtFirstFailure,
    BlockWithTokenResidual,
    RejectionWithUnchangedLaw,
    drop_unlikely,
)

ALPHA = 1e-5
NUM = 150
"""Outputs of one pair under one set of parameters, alone and once more in the mixed batch."""

PARAMS = {
    "plain": SamplingParams(max_tokens=3, ignore_eos=True),
    "cool": SamplingParams(max_tokens=3, temperature=0.7, top_p=0.85, ignore_eos=True),
    "warm": SamplingParams(
        max_tokens=3,
        temperature=1.3,
        top_k=4,
        repetition_penalty=1.3,
        presence_penalty=0.2,
        frequency_penalty=0.4,
        ignore_eos=True,
    ),
    "ends": SamplingParams(max_tokens=3, min_p=0.25, min_tokens=2),
}

CHAINS = ("ngram:k=2", "suffix:k=2", "draft:1,k=2")
TREES = (
    "draft:1,k=3,width=2",
    "replacement",
    "fixed",
    "ensemble:[draft:1,k=2,draft:2,k=2]",
    "ensemble:[ngram:k=2,draft:1,k=2]",
)
PAIRS = [
    *((drafter, verifier) for drafter in CHAINS for verifier in ("rejection", "block")),
    *((drafter, verifier) for drafter in (*CHAINS, *TREES) for verifier in ("traversal",)),
    *((drafter, "rejection") for drafter in TREES),
    ("none", "coupled"),
]
SHAPE = (-1, -1, 0)


def shared_stream(world: World) -> Ensemble:
    """Wrong: two members that draw with the same noise, here from the same model."""
    return Ensemble("shared", [make_drafter(f"draft:{i},k=2", world.context()) for i in (1, 1)])


class MergesEqualDraws(Ensemble):
    """Wrong: draws of the two members that agree become one node."""

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree | None]:
        return [_first_of_each_path(cast(TokenTree, t)) for t in super().propose(seqs, budgets)]


def _first_of_each_path(tree: TokenTree) -> TokenTree:
    first: dict[tuple[int, ...], int] = {}
    for node in range(len(tree)):
        path = tuple(tree.path_tokens(node))
        if tree.parents[node] in (ROOT, *first.values()):
            first.setdefault(path, node)
    return tree.select(list(first.values()))


class Dropping(ShapeDrafter):
    """Wrong: looks at what was drawn and keeps it only if it was likely."""

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree | None]:
        drawn = super().propose(seqs, budgets)
        return [drop_unlikely(cast(TokenTree, tree), 0.3) for tree in drawn]


def merging(world: World) -> Ensemble:
    members = [
        make_drafter("draft:1,k=2", replace(world.context(), stream=stream)) for stream in (0, 1)
    ]
    return MergesEqualDraws("merging", members)


WORLD = World(
    vocab_size=6,
    seed=130,
    scale=1.2,
    draft_noise=2.5,
    prompt=(1, 2, 1, 2, 1),
    end_tokens=frozenset({1}),
    extra={
        "replacement": lambda world: ShapeDrafter(world, SHAPE, independent, laws=True),
        "fixed": lambda world: ShapeDrafter(world, SHAPE, ranked, laws=False),
        "argmax said to be drawn": lambda world: ShapeDrafter(world, (-1, 0), ranked, laws=True),
        "drawn with the target's noise": lambda world: ShapeDrafter(
            world, (-1, 0), like_the_target, laws=True
        ),
        "wrong about replacement": lambda world: ShapeDrafter(
            world, SHAPE, independent, laws=True, replacement=False
        ),
        "one stream for two": shared_stream,
        "equal draws are one node": merging,
        "drops unlikely draws": lambda world: Dropping(world, (-1, 0), independent, laws=True),
    },
)
"""Chosen so that no token is very likely and the n-gram drafts are accepted now and then."""


Samples = dict[tuple[str, str], dict[str, Sample]]


@pytest.fixture(scope="module")
def exact() -> dict[str, Law]:
    return {name: WORLD.law(params) for name, params in PARAMS.items()}


def cases(drafter: str, verifier: str | Verifier, seed: int, num: int, n: int) -> list[Case]:
    return [
        Case(drafter=drafter, verifier=verifier, params=params, seed=seed + 1000 * i, num=num, n=n)
        for i, params in enumerate(PARAMS.values())
    ]


def sample_alone(drafter: str, verifier: str | Verifier, seed: int) -> dict[str, Sample]:
    """One set of parameters after the other, each in an engine of its own."""
    return {
        name: sample(WORLD.engine(), WORLD.prompt, [case])[0]
        for name, case in zip(PARAMS, cases(drafter, verifier, seed, NUM, NUM), strict=True)
    }


def p_value(samples: Iterable[tuple[Counter[Outcome], Law]]) -> float:
    """The smaller of the two: joint law of all tokens, joint law of the first two."""
    samples = list(samples)
    return min(
        add_up(fit(counts, probs, length=length) for counts, probs in samples).p_value
        for length in (2, None)
    )


def of_all(samples: dict[str, Sample], exact: dict[str, Law]) -> float:
    return p_value((one.counts, exact[name]) for name, one in samples.items())


@pytest.fixture(scope="module")
def alone() -> Samples:
    return {pair: sample_alone(*pair, seed=10_000_000 + 10_000 * i) for i, pair in enumerate(PAIRS)}


PLAIN_SEED = 20_000_000 + 10_000 * PAIRS.index(("none", "coupled"))


@pytest.fixture(scope="module")
def mixed() -> Samples:
    """All pairs and parameters in one engine whose pool is too small for its batch; a part of the
    plain requests' seeds once more for coupled requests of every drafter."""
    wanted: dict[tuple[str, str], list[Case]] = {}
    for i, pair in enumerate(PAIRS):
        wanted[pair] = cases(*pair, 20_000_000 + 10_000 * i, NUM, 5)
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
def test_alone(pair: tuple[str, str], alone: Samples, exact: dict[str, Law]) -> None:
    assert of_all(alone[pair], exact) > ALPHA


@pytest.mark.parametrize("pair", PAIRS, ids=show)
def test_mixed(pair: tuple[str, str], mixed: Samples, exact: dict[str, Law]) -> None:
    assert of_all(mixed[pair], exact) > ALPHA


@pytest.mark.parametrize("pair", PAIRS, ids=show)
def test_alone_and_mixed(
    pair: tuple[str, str], alone: Samples, mixed: Samples, exact: dict[str, Law]
) -> None:
    """Twice the sample; and drafts were accepted and rejected, or it would say nothing."""
    both = {name: alone[pair][name].counts + mixed[pair][name].counts for name in PARAMS}
    assert p_value((both[name], exact[name]) for name in PARAMS) > ALPHA
    if pair[0] != "none":
        for name in PARAMS:
            stats = total([alone[pair][name].stats, mixed[pair][name].stats])
            assert 0.02 < stats.accepted / stats.drafted < 0.9, (name, stats)
            assert len(alone[pair][name].num_rounds) >= 2


@pytest.mark.parametrize("name", PARAMS)
def test_all_pairs_together(
    name: str, alone: Samples, mixed: Samples, exact: dict[str, Law]
) -> None:
    """What is wrong in the same direction everywhere shows in the sum."""
    counts: Counter[Outcome] = Counter()
    for pair in PAIRS:
        counts += alone[pair][name].counts + mixed[pair][name].counts
    assert sum(counts.values()) == 2 * NUM * len(PAIRS)
    assert p_value([(counts, exact[name])]) > ALPHA


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


# Small worlds in which a certain kind of mistake would show.


@dataclass(frozen=True, kw_only=True)
class Probe:
    """``num`` outputs of ``length`` tokens in a world of its own."""

    vocab_size: int
    seed: int
    scale: float
    draft_noise: float
    length: int
    num: int

    def sample(
        self, drafter: str, verifier: str | Verifier, noise: Callable[[int], Noise] | None = None
    ) -> tuple[float, Sample]:
        """The p-value of the sample, and the sample."""
        world = World(
            vocab_size=self.vocab_size,
            seed=self.seed,
            scale=self.scale,
            draft_noise=self.draft_noise,
            prompt=(1,),
            extra=WORLD.extra,
        )
        params = SamplingParams(max_tokens=self.length)
        case = Case(
            drafter=drafter,
            verifier=verifier,
            params=params,
            seed=31,
            num=self.num,
            n=self.num,
            noise=noise,
        )
        (one,) = sample(world.engine(), world.prompt, [case])
        return p_value([(one.counts, world.law(params))]), one


PROBES = {
    # A coin with two nearly equal sides, a draft that is sure of one: many rounds, few outcomes.
    "coin": Probe(vocab_size=2, seed=0, scale=0.3, draft_noise=3.0, length=4, num=600),
    # Nearly fair dice and a draft that hardly ever agrees: all siblings are tried.
    "dice": Probe(vocab_size=6, seed=0, scale=0.3, draft_noise=3.0, length=3, num=300),
    # The second draft is good where the first one is doubtful.
    "late": Probe(vocab_size=3, seed=177, scale=1.5, draft_noise=3.0, length=3, num=1600),
    # After a rejection two tokens are left, and the draft knew one of them much better.
    "left": Probe(vocab_size=3, seed=152, scale=1.5, draft_noise=8.0, length=3, num=2400),
    "twins": Probe(vocab_size=3, seed=152, scale=1.5, draft_noise=8.0, length=3, num=1000),
}


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


# The harness itself: mistakes that it must see, in the sample of one pair alone.


class NoiseWithoutBase(Noise):
    """Wrong: accept tests keyed by the position of the drafted token alone."""

    def accept(self, probability: float, base: int, test: int) -> bool:
        return super().accept(probability, 0, base + test)


class Wrong:
    """A verifier that is wrong where there are drafts."""

    name = "wrong"
    exactness = "none"
    needs_laws = True
    chains_only = False

    def verify(self, tree: TokenTree, laws: Laws, chance: Chance, base: int) -> Verdict:
        if len(tree) == 0:
            return Verdict((), chance.draw(laws(ROOT), base))
        return self.decide(tree, laws, chance, base)

    def decide(self, tree: TokenTree, laws: Laws, chance: Chance, base: int) -> Verdict:
        raise NotImplementedError


class Given(Wrong):
    """One that is defined elsewhere."""

    def __init__(self, verifier: Verifier) -> None:
        self.name = type(verifier).__name__
        self.decide = verifier.verify  # type: ignore[method-assign]


class ResidualIsTheTarget(Wrong):
    """Chains: accepts with p/q, but draws from p after a rejection."""

    def decide(self, tree: TokenTree, laws: Laws, chance: Chance, base: int) -> Verdict:
        assert tree.laws is not None
        kept = 0
        for node, token in enumerate(tree.tokens.tolist()):
            ratio = float(laws(node - 1)[token] / tree.laws[node][token])
            if not chance.accept(min(1.0, ratio), base, node + 1):
                break
            kept += 1
        return Verdict(tuple(range(kept)), chance.draw(laws(kept - 1), base + kept))


class Misread(Rejection):
    """Rejection sampling from the target's laws under other parameters or another path."""

    def __init__(
        self, change: Callable[[SamplingParams], SamplingParams], *, path: bool = True
    ) -> None:
        self._change = change
        self._path = path

    def verify(self, tree: TokenTree, laws: Laws, chance: Chance, base: int) -> Verdict:
        return super().verify(tree, _Changed(laws, self._change, self._path), chance, base)


class _Changed:
    def __init__(
        self, laws: Laws, change: Callable[[SamplingParams], SamplingParams], path: bool
    ) -> None:
        self._laws = cast(NodeLaws, laws)
        self._change = change
        self._path = path

    def __call__(self, node: int) -> torch.Tensor:
        seq = self._laws._seq
        path = self._laws._tree.path_tokens(node) if self._path else []
        return law(
            self._laws.logits(node),
            self._change(seq.params),
            prompt=seq.request.prompt,
            output=[*seq.output, *path],
            end_tokens=seq.end_tokens,
        )

    def greedy(self, node: int) -> int | None:
        return None


MISTAKES: dict[str, tuple[str, str, str | Verifier, Callable[[int], Noise] | None]] = {
    "residual is p": ("pairs", "draft:1,k=2", ResidualIsTheTarget(), None),
    "block stops at the first failure": (
        "coin",
        "draft:1,k=2",
        Given(BlockStopsAtFirstFailure()),
        None,
    ),
    "argmax said to be drawn, rejection": ("pairs", "argmax said to be drawn", "rejection", None),
    "argmax said to be drawn, block": ("pairs", "argmax said to be drawn", "block", None),
    "drops unlikely draws": ("pairs", "drops unlikely draws", "rejection", None),
    "no top-p": ("pairs", "draft:1,k=2", Misread(lambda p: replace(p, top_p=1.0)), None),
    "no temperature": (
        "pairs",
        "draft:1,k=2",
        Misread(lambda p: replace(p, temperature=1.0)),
        None,
    ),
    "penalties without the path": (
        "pairs",
        "draft:1,k=2",
        Misread(lambda p: p, path=False),
        None,
    ),
    "accept noise used again, block": ("coin", "draft:1,k=2", "block", NoiseWithoutBase),
    "accept noise used again, traversal": ("coin", "draft:1,k=2", "traversal", NoiseWithoutBase),
    "drawn with the target's noise, block": (
        "left",
        "drawn with the target's noise",
        "block",
        None,
    ),
    "siblings' law unchanged": (
        "dice",
        "draft:1,k=3,width=2",
        Given(RejectionWithUnchangedLaw()),
        None,
    ),
    "wrong about replacement, rejection": ("dice", "wrong about replacement", "rejection", None),
    "wrong about replacement, traversal": ("dice", "wrong about replacement", "traversal", None),
    "one stream for two, rejection": ("twins", "one stream for two", "rejection", None),
    "one stream for two, traversal": ("twins", "one stream for two", "traversal", None),
    "equal draws are one node": ("twins", "equal draws are one node", "rejection", None),
    "block with the token residual": (
        "late",
        "draft:1,k=2",
        Given(BlockWithTokenResidual()),
        None,
    ),
    "drawn with the target's noise, rejection": (
        "left",
        "drawn with the target's noise",
        "rejection",
        None,
    ),
}
"""Where each is looked for: in the sample of a pair alone, or in one of the probes."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_flagged(mistake: str, exact: dict[str, Law]) -> None:
    where, drafter, verifier, noise = MISTAKES[mistake]
    if where == "pairs":
        p = of_all(sample_alone(drafter, verifier, seed=40_000_000), exact)
    else:
        p, _ = PROBES[where].sample(drafter, verifier, noise)
    assert p < ALPHA


def test_misreading_nothing_is_right(exact: dict[str, Law]) -> None:
    """What the misreadings change gives them away, not the way they are written."""
    right = sample_alone("draft:1,k=2", Misread(lambda p: p), seed=40_000_000)
    assert of_all(right, exact) > ALPHA


def test_one_wrong_case_in_a_mixed_batch(exact: dict[str, Law]) -> None:
    """Only its own sample shows it."""
    ways: list[str | Verifier] = ["rejection", ResidualIsTheTarget()]
    group = [
        case
        for i, way in enumerate(ways)
        for case in cases("draft:1,k=2", way, 50_000_000 + 10_000 * i, NUM, 5)
    ]
    samples = iter(sample(WORLD.engine(), WORLD.prompt, group))
    p = [of_all(dict(zip(PARAMS, samples, strict=False)), exact) for _ in ways]
    assert p[1] < ALPHA < p[0], p


def test_power_statement(exact: dict[str, Law]) -> None:
    """The numbers in the docstring of this file."""

    def tv(num: int, laws: Iterable[Law]) -> float:
        """Of the joint law of two tokens, ``num`` samples of each."""
        laws = list(laws)
        counts = [Counter({o: round(num * p) for o, p in probs.items()}) for probs in laws]
        fits = [fit(c, probs, length=2) for c, probs in zip(counts, laws, strict=True)]
        return detectable(num * len(laws), add_up(fits).df, ALPHA)

    assert tv(2 * NUM, exact.values()) == pytest.approx(0.155, abs=0.001)
    together = max(tv(2 * NUM * len(PAIRS), [probs]) for probs in exact.values())
    assert together == pytest.approx(0.062, abs=0.001)
    probes = [detectable(p.num, p.vocab_size**2 - 1, ALPHA) for p in PROBES.values()]
    assert min(probes) == pytest.approx(0.081, abs=0.001)
    assert max(probes) == pytest.approx(0.277, abs=0.001)
