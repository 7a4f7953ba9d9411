"""Running contenders side by side: the same prompts, interleaved, in one process."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from outrider.bench.neartie import Difference, first_difference
from outrider.bench.statistics import median, pooled_interval, pooled_ratio
from outrider.bench.workloads import Prompt
from outrider.errors import ConfigError
from outrider.llm import LLM, completion
from outrider.metrics import Stats, total
from outrider.request import SamplingParams, sequence_seed
from outrider.verify import BIT_EXACT, make_verifier

ALL = "all"
"""The workload of the rows that sum up all classes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to decode."""

    drafter: str
    verifier: str = "coupled"


PLAIN = Contender(drafter="none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer of one contender. ``prompt`` counts turns; ``seconds`` is wall time from the
    request to its last token, the computing of the prompt included."""

    contender: Contender
    prompt: int
    workload: str
    repeat: int
    ids: tuple[int, ...]
    tokens: tuple[int, ...]
    seconds: float
    stats: Stats


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contender on one workload, against plain decoding of the same run.

    Times are medians over the repeats, summed over the prompts. ``speedup``: plain decoding's time
    by the contender's; ``speedup_low`` and ``speedup_high`` are a 95 % bootstrap interval over the
    prompts (over the repeats of a single prompt), None where one answer alone was measured.
    ``token_match``: share of the answers whose tokens equal plain decoding's. ``exact``: all of
    them do or first differ at a near-tie (:mod:`outrider.bench.neartie`); None where the verifier
    promises the distribution, not the tokens. ``guarantee``: what the verifier promises.
    """

    drafter: str
    verifier: str
    workload: str
    guarantee: str
    exact: bool | None
    token_match: float
    tokens_per_second: float
    speedup: float
    speedup_low: float | None
    speedup_high: float | None
    acceptance_length: float
    acceptance_rate: float | None
    acceptance_by_position: list[float]
    tokens: int
    num_answers: int
    faults: int
    differences: list[Difference]


def compare(
    llm: LLM,
    contenders: Sequence[Contender],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    repeats: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[Row]:
    """Measure plain decoding and ``contenders``; one row per contender and workload, and one for
    all workloads together. Every drafter is made and warmed up before anything is timed. Answers
    are drawn with ``seed`` if ``params`` has none. Raises ConfigError, see :func:`check_all`."""
    if params.seed is None:  # every request would get a seed of its own: nothing to compare
        params = replace(params, seed=seed)
    check_all(llm, contenders, prompts, params)
    everyone = [PLAIN, *(c for c in contenders if c != PLAIN)]
    for contender in everyone:
        _answer(llm, contender, llm.encode(prompts[0].turns[0]), params)
    samples = _measure(llm, everyone, prompts, params, repeats, progress)
    workloads = list(dict.fromkeys(p.category for p in prompts))
    if len(workloads) > 1:
        workloads.append(ALL)
    differences = _differences(llm, samples, params)
    return [
        _row(
            contender,
            workload,
            [s for s in samples if workload in (ALL, s.workload)],
            [
                d
                for d, s in differences
                if s.contender == contender and workload in (ALL, s.workload)
            ],
            greedy=params.temperature == 0.0,
            seed=seed,
        )
        for workload in workloads
        for contender in everyone
    ]


def check_all(
    llm: LLM,
    contenders: Sequence[Contender],
    prompts: Sequence[Prompt],
    params: SamplingParams,
) -> None:
    """Raise ConfigError for the first contender or prompt that cannot be run. Makes the drafters.

    Of later turns only the least length is known, with empty answers before them.
    """
    for contender in contenders:
        llm.check([0], params, drafter=contender.drafter, verifier=contender.verifier)
    for prompt in prompts:
        messages: list[dict[str, str]] = []
        for turn in prompt.turns:
            messages.append({"role": "user", "content": turn})
            with _named(prompt):
                llm.check(llm.encode(messages), params)
            messages.append({"role": "assistant", "content": ""})


@contextlib.contextmanager
def _named(prompt: Prompt) -> Iterator[None]:
    """Say which prompt a ConfigError is about."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"prompt {prompt.id!r}: {error}") from None


def _measure(
    llm: LLM,
    contenders: list[Contender],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    repeats: int,
    progress: Callable[[int, int], None] | None,
) -> list[Sample]:
    """All answers. The order of the contenders turns with every prompt, so that none always runs
    on a machine that another one warmed or slowed. Later turns follow plain decoding's answers."""
    samples: list[Sample] = []
    histories: dict[int, list[int]] = {}
    steps = repeats * len(contenders) * sum(len(p.turns) for p in prompts)
    for repeat in range(repeats):
        number = 0
        for prompt in prompts:
            messages: list[dict[str, str]] = []
            for turn in prompt.turns:
                messages.append({"role": "user", "content": turn})
                ids = histories.setdefault(number, llm.encode(messages))
                shift = (number + repeat) % len(contenders)
                for contender in contenders[shift:] + contenders[:shift]:
                    with _named(prompt):
                        tokens, seconds, stats = _answer(llm, contender, ids, params)
                    samples.append(
                        Sample(
                            contender=contender,
                            prompt=number,
                            workload=prompt.category,
                            repeat=repeat,
                            ids=tuple(ids),
                            tokens=tokens,
                            seconds=seconds,
                            stats=stats,
                        )
                    )
                    if progress is not None:
                        progress(len(samples), steps)
                plain = _find(samples, PLAIN, number, repeat)
                messages.append({"role": "assistant", "content": llm.decode(plain.tokens)})
                number += 1
    return samples


def _answer(
    llm: LLM, contender: Contender, ids: Sequence[int], params: SamplingParams
) -> tuple[tuple[int, ...], float, Stats]:
    start = time.perf_counter()
    (seq,) = llm.submit(ids, params, drafter=contender.drafter, verifier=contender.verifier)
    while seq.finish is None:
        llm.engine.step()
    seconds = time.perf_counter() - start
    answer = completion(seq)
    return answer.token_ids, seconds, answer.stats


def _find(samples: list[Sample], contender: Contender, prompt: int, repeat: int) -> Sample:
    return next(
        s
        for s in reversed(samples)
        if s.contender == contender and s.prompt == prompt and s.repeat == repeat
    )


def _differences(
    llm: LLM, samples: list[Sample], params: SamplingParams
) -> list[tuple[Difference, Sample]]:
    """Where answers leave plain decoding's of the same repeat, and by how little. Answers that
    several repeats agree on are looked at once."""
    plain = {(s.prompt, s.repeat): s for s in samples if s.contender == PLAIN}
    distinct: dict[tuple[object, ...], tuple[Sample, Sample]] = {}
    for sample in samples:
        expected = plain[sample.prompt, sample.repeat]
        if make_verifier(sample.contender.verifier).exactness != BIT_EXACT:
            continue
        if sample.tokens != expected.tokens:
            key = (sample.contender, sample.prompt, expected.tokens, sample.tokens)
            distinct.setdefault(key, (expected, sample))
    model, seed = llm.target.model, sequence_seed(params, 0)
    return [
        (
            first_difference(
                *(model, s.ids, expected.tokens, s.tokens, s.prompt), params=params, seed=seed
            ),
            s,
        )
        for expected, s in distinct.values()
    ]


def _row(
    contender: Contender,
    workload: str,
    samples: list[Sample],
    differences: list[Difference],
    *,
    greedy: bool,
    seed: int,
) -> Row:
    mine = [s for s in samples if s.contender == contender]
    plain = [_find(samples, PLAIN, s.prompt, s.repeat) for s in mine]
    # Medians over the repeats, then sums over the prompts. Plain decoding's seconds are scaled to
    # the contender's number of tokens, which is the same wherever the tokens are.
    seconds = _medians(mine, [m.seconds for m in mine])
    equal = [p.seconds * len(m.tokens) / len(p.tokens) for m, p in zip(mine, plain, strict=True)]
    plain_seconds = _medians(mine, equal)
    tokens = _medians(mine, [float(len(m.tokens)) for m in mine])
    if len(seconds) > 1:
        low, high = pooled_interval(plain_seconds, seconds, seed=seed)
    else:
        low, high = pooled_interval(equal, [m.seconds for m in mine], seed=seed)
    stats = total(s.stats for s in mine)
    guarantee = make_verifier(contender.verifier).exactness
    compared = greedy or guarantee == BIT_EXACT
    return Row(
        drafter=contender.drafter,
        verifier=contender.verifier,
        workload=workload,
        guarantee=guarantee,
        exact=all(d.near_tie for d in differences) if compared else None,
        token_match=sum(m.tokens == p.tokens for m, p in zip(mine, plain, strict=True)) / len(mine),
        tokens_per_second=pooled_ratio(tokens, seconds),
        speedup=pooled_ratio(plain_seconds, seconds),
        speedup_low=_known(low),
        speedup_high=_known(high),
        acceptance_length=stats.acceptance_length,
        acceptance_rate=stats.acceptance_rate,
        acceptance_by_position=stats.acceptance_by_position,
        tokens=stats.tokens,
        num_answers=len(mine),
        faults=stats.faults,
        differences=differences,
    )


def _medians(samples: list[Sample], values: list[float]) -> list[float]:
    """The median over the repeats of each prompt's value."""
    by_prompt: dict[int, list[float]] = {}
    for sample, value in zip(samples, values, strict=True):
        by_prompt.setdefault(sample.prompt, []).append(value)
    return [median(group) for group in by_prompt.values()]


def _known(bound: float) -> float | None:
    return None if math.isnan(bound) else bound
