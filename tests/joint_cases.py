"""What the joint tests sample: parameters, pairs of drafter and verifier, and small worlds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from joint import (
    Case,
    Law,
    Outcome,
    Sample,
    ShapeDrafter,
    World,
    add_up,
    fit,
    independent,
    ranked,
    sample,
)
from outrider.drafters.base import Drafter
from outrider.request import SamplingParams
from outrider.sampling import Noise
from outrider.verify import Verifier

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

Extra = Mapping[str, Callable[[World], Drafter]]
SHAPE = (-1, -1, 0)
EXTRA: Extra = {
    "replacement": lambda world: ShapeDrafter(world, SHAPE, independent, laws=True),
    "fixed": lambda world: ShapeDrafter(world, SHAPE, ranked, laws=False),
}

WORLD = World(
    vocab_size=6,
    seed=130,
    scale=1.2,
    draft_noise=2.5,
    prompt=(1, 2, 1, 2, 1),
    end_tokens=frozenset({1}),
    extra=EXTRA,
)
"""Chosen so that no token is very likely and the n-gram drafts are accepted now and then."""


@lru_cache(maxsize=1)
def exact_laws() -> dict[str, Law]:
    """The law of the output under each of PARAMS."""
    return {name: WORLD.law(params) for name, params in PARAMS.items()}


def cases(drafter: str, verifier: str | Verifier, seed: int, num: int, n: int) -> list[Case]:
    return [
        Case(drafter=drafter, verifier=verifier, params=params, seed=seed + 1000 * i, num=num, n=n)
        for i, params in enumerate(PARAMS.values())
    ]


def sample_alone(
    drafter: str, verifier: str | Verifier, seed: int, world: World = WORLD
) -> dict[str, Sample]:
    """One set of parameters after the other, each in an engine of its own."""
    return {
        name: sample(world.engine(), world.prompt, [case])[0]
        for name, case in zip(PARAMS, cases(drafter, verifier, seed, NUM, NUM), strict=True)
    }


def p_value(samples: Iterable[tuple[Counter[Outcome], Law]]) -> float:
    """The smaller of the two: joint law of all tokens, joint law of the first two."""
    samples = list(samples)
    return min(
        add_up(fit(counts, probs, length=length) for counts, probs in samples).p_value
        for length in (2, None)
    )


def of_all(samples: dict[str, Sample]) -> float:
    """The p-value of the samples under all parameters together."""
    exact = exact_laws()
    return p_value((one.counts, exact[name]) for name, one in samples.items())


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
        self,
        drafter: str,
        verifier: str | Verifier,
        noise: Callable[[int], Noise] | None = None,
        *,
        extra: Extra = EXTRA,
    ) -> tuple[float, Sample]:
        """The p-value of the sample, and the sample."""
        world = World(
            vocab_size=self.vocab_size,
            seed=self.seed,
            scale=self.scale,
            draft_noise=self.draft_noise,
            prompt=(1,),
            extra=extra,
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
    "late": Probe(vocab_size=3, seed=177, scale=1.5, draft_noise=3.0, length=3, num=2400),
    # After a rejection two tokens are left, and the draft knew one of them much better.
    "left": Probe(vocab_size=3, seed=152, scale=1.5, draft_noise=8.0, length=3, num=2400),
    "twins": Probe(vocab_size=3, seed=152, scale=1.5, draft_noise=8.0, length=3, num=1000),
}
