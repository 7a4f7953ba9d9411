"""Joint laws of the first tokens: samples drawn through the real engine, and the exact law.

Where the enumeration (exact.py) proves the verifiers alone, this looks at everything together:
scheduler, drafters, node laws, noise and commit. A fault shows as a joint law that is not the
target's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import cast

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.stats import chi2, ncx2

from fake_model import FakeModel
from outrider.config import EngineConfig
from outrider.drafters import make_drafter
from outrider.drafters.base import Budget, Drafter, DrafterContext, Feedback, Needs
from outrider.engine import Engine
from outrider.metrics import Stats, total
from outrider.request import Request, SamplingParams, Sequence, sequence_seed
from outrider.sampling import Noise, Role, law
from outrider.tree import TokenTree
from outrider.verify import Verifier

Outcome = tuple[int, ...]
Law = dict[Outcome, float]


@dataclass(frozen=True, kw_only=True)
class World:
    """A target, its draft models and a prompt.

    ``scale``: logits of the target lie in ``[-scale, scale]``; a draft model's differ by up to
    ``draft_noise``. Draft models are numbered from 1. ``extra``: drafters that only tests know.
    """

    vocab_size: int
    seed: int
    scale: float
    draft_noise: float
    prompt: tuple[int, ...]
    end_tokens: frozenset[int] = frozenset()
    extra: Mapping[str, Callable[[World], Drafter]] = field(default_factory=dict)

    def model(self, num_slots: int, *, draft: int = 0) -> FakeModel:
        """The target, or a draft model."""
        return FakeModel(
            vocab_size=self.vocab_size,
            num_slots=num_slots,
            seed=self.seed,
            scale=self.scale,
            noise=self.draft_noise if draft else 0.0,
            noise_seed=draft,
        )

    def context(self) -> DrafterContext:
        """What drafters are made from; a draft model is named by its number."""
        return DrafterContext(
            vocab_size=self.vocab_size, load_draft=lambda name: self.model(8192, draft=int(name))
        )

    def engine(self, *, config: EngineConfig | None = None, num_slots: int = 8192) -> Engine:
        def drafters(spec: str) -> Drafter:
            if spec in self.extra:
                return self.extra[spec](self)
            return make_drafter(spec, self.context())

        return Engine(
            self.model(num_slots),
            drafters,
            end_tokens=self.end_tokens,
            config=config or EngineConfig(max_batch=128, max_step_tokens=8192),
        )

    def law(self, params: SamplingParams) -> Law:
        """Probability of every output of at most ``max_tokens`` tokens, path by path."""
        target = self.model(1)
        ends = frozenset() if params.ignore_eos else self.end_tokens
        done: Law = {}
        todo: list[tuple[Outcome, float]] = [((), 1.0)]
        while todo:
            output, probability = todo.pop()
            ended = output[-1:] and output[-1] in ends and len(output) >= params.min_tokens
            if ended or len(output) == params.max_tokens:
                done[output] = probability
                continue
            logits = target.plain_logits([*self.prompt, *output])
            probs = law(logits, params, prompt=self.prompt, output=output, end_tokens=ends)
            for token, p in enumerate(probs.tolist()):
                if p > 0.0:
                    todo.append(((*output, token), probability * p))
        return done


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """What is asked for, ``num`` times, in requests of ``n`` sequences; request i has the seed
    ``seed + i``. A verifier or noise given as an object takes the place of the engine's own, so
    that wrong ones can be tried."""

    drafter: str
    verifier: str | Verifier
    params: SamplingParams
    seed: int
    num: int
    n: int
    noise: Callable[[int], Noise] | None = None


@dataclass(kw_only=True)
class Sample:
    """The outputs of one case. ``by_seed``: the output of each request's seed and index;
    ``num_rounds`` counts the sequences by the target forwards they took."""

    counts: Counter[Outcome] = field(default_factory=Counter)
    by_seed: dict[tuple[int, int], Outcome] = field(default_factory=dict)
    num_rounds: Counter[int] = field(default_factory=Counter)
    stats: Stats = field(default_factory=Stats)

    def add(self, seqs: Seq[Sequence]) -> None:
        for seq in seqs:
            output = tuple(seq.output)
            self.counts[output] += 1
            self.by_seed[cast(int, seq.params.seed), seq.index] = output
            self.num_rounds[seq.stats.target_forwards] += 1
        self.stats = total([self.stats, *(seq.stats for seq in seqs)])


def sample(engine: Engine, prompt: tuple[int, ...], cases: Seq[Case]) -> list[Sample]:
    """The sample of each case. Requests of the cases take turns, so that all share the engine's
    steps."""
    made: list[list[Sequence]] = [[] for _ in cases]
    rounds = range(max(case.num // case.n for case in cases))
    turns = [
        (i, number) for i in rounds for number, case in enumerate(cases) if i < case.num // case.n
    ]
    num_running = 0
    while turns or engine.has_work:
        while turns and num_running < 2 * engine.config.max_batch:
            i, number = turns.pop(0)
            seqs = _add(engine, prompt, cases[number], f"{number}-{i}", i)
            made[number] += seqs
            num_running += len(seqs)
        for event in engine.step():
            assert event.error is None, event.error
            num_running -= event.finish is not None
    samples = [Sample() for _ in cases]
    for one, seqs in zip(samples, made, strict=True):
        one.add(seqs)
    return samples


def _add(
    engine: Engine, prompt: tuple[int, ...], case: Case, request_id: str, i: int
) -> list[Sequence]:
    seqs = engine.add(
        Request(
            id=request_id,
            prompt=prompt,
            params=replace(case.params, seed=case.seed + i, n=case.n),
            drafter=case.drafter,
            verifier=case.verifier if isinstance(case.verifier, str) else "traversal",
        )
    )
    for seq in seqs:
        if not isinstance(case.verifier, str):
            seq.verifier = case.verifier
        if case.noise is not None:
            seq.noise = case.noise(sequence_seed(seq.params, seq.index))
    return seqs


@dataclass(frozen=True)
class Fit:
    """A chi-square statistic and its degrees of freedom. Independent ones can be added."""

    statistic: float
    df: int

    @property
    def p_value(self) -> float:
        return float(chi2.sf(self.statistic, self.df))


def fit(counts: Counter[Outcome], exact: Law, *, length: int | None = None) -> Fit:
    """Pearson's statistic of ``counts`` against ``exact``, of the first ``length`` tokens.

    Outcomes of an expectation below 5 share cells, the least likely ones first. An impossible
    outcome gives an infinite statistic.
    """
    probs = _prefix(exact, length)
    seen = _prefix(counts, length)
    if not seen.keys() <= probs.keys():
        return Fit(np.inf, 1)
    num = sum(seen.values())
    mass = sum(probs.values())  # 1 but for rounding
    cells: list[tuple[float, float]] = []
    low_expected = low_seen = 0.0
    for outcome, p in sorted(probs.items(), key=lambda item: item[1]):
        low_expected += num * p / mass
        low_seen += seen.get(outcome, 0)
        if low_expected >= 5.0:
            cells.append((low_expected, low_seen))
            low_expected = low_seen = 0.0
    if low_expected and cells:
        cells[-1] = (cells[-1][0] + low_expected, cells[-1][1] + low_seen)
    statistic = sum((observed - expected) ** 2 / expected for expected, observed in cells)
    return Fit(statistic, len(cells) - 1)


def add_up(fits: Iterable[Fit]) -> Fit:
    """The fit of independent samples together."""
    parts = list(fits)
    return Fit(sum(part.statistic for part in parts), sum(part.df for part in parts))


def _prefix(values: dict[Outcome, float] | Counter[Outcome], length: int | None) -> Law:
    short: Law = {}
    for outcome, value in values.items():
        short[outcome[:length]] = short.get(outcome[:length], 0.0) + value
    return short


def detectable(num: int, df: int, alpha: float, power: float = 0.99) -> float:
    """The total-variation distance from which a test at level ``alpha`` fails with this power.

    ``num`` samples at noncentrality ``num * sum((q - p)**2 / p)``, which by Cauchy-Schwarz is at
    least ``4 * num * TV**2``: a distance that is spread in the worst way. Others show earlier.
    """
    limit = chi2.isf(alpha, df)
    needed = brentq(lambda nc: ncx2.sf(limit, df, nc) - power, 1e-3, 1e4)
    return 0.5 * float(np.sqrt(needed / num))


# Drafters that the library does not have.


@dataclass(frozen=True)
class Place:
    """Where a draft token stands: its node, its rank among its siblings, its absolute position
    and the length of the sequence."""

    node: int
    rank: int
    position: int
    base: int


Draw = Callable[[Noise, torch.Tensor, Place], int]


def independent(noise: Noise, q: torch.Tensor, place: Place) -> int:
    """A draw of its own for every node: with replacement among siblings."""
    return int(noise.race(q, place.node + 1, Role.DRAFT, place.base).argmax())


def ranked(noise: Noise, q: torch.Tensor, place: Place) -> int:
    """The candidate of the node's rank, without chance."""
    return int(q.argsort(descending=True, stable=True)[place.rank])


def like_the_target(noise: Noise, q: torch.Tensor, place: Place) -> int:
    """Wrong under any verifier of laws: the noise that the target will draw with."""
    return int(noise.race(q, place.position).argmax())


class ShapeDrafter:
    """Fills a tree of fixed shape from draft model 1, by ``draw``.

    ``laws``: whether the tree says that its tokens were drawn from the draft's laws, and then
    ``replacement``: whether it says with replacement.
    """

    needs = Needs()

    def __init__(
        self, world: World, parents: Seq[int], draw: Draw, *, laws: bool, replacement: bool = True
    ) -> None:
        self.name = draw.__name__
        self.num_draft = len(parents)
        self.is_chain = list(parents) == list(range(-1, len(parents) - 1))
        self._parents = list(parents)
        self._draw = draw
        self._tell = laws
        self._replacement = replacement
        self._logits = lru_cache(maxsize=None)(world.model(1, draft=1).plain_logits)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree | None]:
        return [self._tree(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def _tree(self, seq: Sequence, budget: Budget) -> TokenTree:
        paths: list[Outcome] = []
        rows: dict[int, int] = {}
        laws: list[torch.Tensor] = []
        parents = self._parents[: budget.num_nodes]
        for node, parent in enumerate(parents):
            above = paths[parent] if parent >= 0 else ()
            if parent not in rows:
                rows[parent] = len(laws)
                laws.append(self._law(seq, above))
            base = len(seq.tokens)
            place = Place(node, parents[:node].count(parent), base + len(above), base)
            paths.append((*above, self._draw(seq.noise, laws[rows[parent]], place)))
        return TokenTree(
            tokens=np.array([path[-1] for path in paths], np.int64),
            parents=np.array(parents, np.int64),
            law=np.array([rows[parent] for parent in parents], np.int64) if self._tell else None,
            laws=torch.stack(laws) if self._tell else None,
            replacement=self._replacement,
        )

    def _law(self, seq: Sequence, path: Outcome) -> torch.Tensor:
        return law(
            self._logits((*seq.tokens, *path)),
            seq.params,
            prompt=seq.request.prompt,
            output=[*seq.output, *path],
            end_tokens=seq.end_tokens,
        )

    def observe(self, seqs: Seq[Sequence], feedback: Seq[Feedback]) -> None:
        pass

    def forget(self, seq_id: str) -> None:
        pass
