"""Speculative and plain tokens are the same on the published models, over 50 prompts, with the
kernels: bit for bit, greedy and sampled. Run with `make test-real`.

The prompts are the built-in ones, cut to their beginnings so that the tests take minutes. Plain
decoding runs one prompt at a time, speculation all of them together: one row at a time against
many.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from outrider.bench.workloads import load_prompts
from outrider.errors import ConfigError
from outrider.kernels.library import available_sets, load_library
from outrider.llm import LLM
from outrider.metrics import Stats, total
from outrider.models.native import NativeDecoder
from outrider.request import SamplingParams
from test_real import DRAFT, LARGE, SMALL, require

pytestmark = pytest.mark.real

NUM_PROMPTS = 50
PREFIX = 240
"""Characters of a prompt."""

GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 3}
OTHER = {"temperature": 1.0, "top_k": 40, "repetition_penalty": 1.1, "seed": 4}


def texts() -> list[str]:
    """50 different prompts: the beginnings of all turns."""
    turns = [turn[:PREFIX] for prompt in load_prompts("builtin") for turn in prompt.turns]
    chosen = list(dict.fromkeys(turns))[:NUM_PROMPTS]
    assert len(chosen) == NUM_PROMPTS
    return chosen


def answers(
    llm: LLM, params: dict[str, Any], drafter: str, prompts: list[str], *, together: bool
) -> tuple[list[list[int]], Stats]:
    """Tokens of the answers to ``prompts``, and the sum of their counters."""
    groups = [prompts] if together else [[prompt] for prompt in prompts]
    found = [
        answer[0]
        for group in groups
        for answer in llm.generate_all(group, SamplingParams(**params), drafter=drafter)
    ]
    return [list(one.token_ids) for one in found], total(one.stats for one in found)


def assert_same(llm: LLM, params: dict[str, Any], drafters: list[str], prompts: list[str]) -> None:
    print(f"seed {params.get('seed', 'none: greedy')}")
    assert isinstance(llm.target.model, NativeDecoder)
    plain, _ = answers(llm, params, "none", prompts, together=False)
    assert len({tuple(tokens) for tokens in plain}) > len(prompts) // 2
    for drafter in drafters:
        got, stats = answers(llm, params, drafter, prompts, together=True)
        for number, (one, expected) in enumerate(zip(got, plain, strict=True)):
            assert one == expected, f"{drafter}: prompt {number}, {prompts[number]!r}"
        print(f"{drafter}: {stats.accepted} of {stats.drafted} drafts accepted")
        assert stats.faults == 0
        assert 0 < stats.accepted < stats.drafted, f"{drafter} says nothing"


@cache
def small(dtype: str) -> LLM:
    """The small model; its draft is itself in coarser weights, so that some drafts fail."""
    require(SMALL)
    draft_dtype = "int8" if dtype == "int4" else "int4"
    return LLM(
        SMALL, dtype=dtype, draft_dtype=draft_dtype, exact=True, num_slots=8192, prefix_cache=False
    )


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_small_model_over_50_prompts(dtype: str, params: dict[str, Any]) -> None:
    drafters = ["ngram:n=3,k=8", "suffix:k=8,width=3", f"draft:{SMALL},k=4"]
    assert_same(small(dtype), params | {"max_tokens": 24}, drafters, texts())


def test_pair_over_50_prompts() -> None:
    require(LARGE, DRAFT)
    llm = LLM(LARGE, dtype="int4", exact=True, num_slots=4096, prefix_cache=False)
    assert_same(llm, GREEDY | {"max_tokens": 16}, [f"draft:{DRAFT},k=4"], texts())


def test_penalties_and_several_verifiers() -> None:
    """Greedy, every verifier is bit-exact; penalties look at all tokens before."""
    llm, prompts = small("int8"), texts()[:8]
    drafter = f"draft:{SMALL},k=4"
    assert_same(llm, OTHER | {"max_tokens": 24}, [drafter, "suffix:k=8,width=3"], prompts)
    params = SamplingParams(temperature=0.0, max_tokens=24)
    plain = [llm.generate(prompt, params).token_ids for prompt in prompts]
    for verifier in ("rejection", "traversal", "block"):
        got = llm.generate_all(prompts, params, drafter=drafter, verifier=verifier)
        assert [one[0].token_ids for one in got] == plain, verifier


def test_the_prefix_cache_and_threads_change_nothing() -> None:
    require(SMALL)
    llm, prompts = small("bfloat16"), texts()[:8]
    params = SamplingParams(**SAMPLED, max_tokens=24, n=2)
    expected = [[one.token_ids for one in group] for group in llm.generate_all(prompts, params)]
    other = LLM(SMALL, exact=True, drafter="suffix:k=8,width=3", num_slots=2048)
    assert isinstance(other.target.model, NativeDecoder)
    for threads in (1, 2, 3):
        other.target.model.threads = threads
        got = [[o.token_ids for o in group] for group in other.generate_all(prompts, params)]
        assert got == expected, threads


@pytest.fixture
def instruction_set(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    monkeypatch.setenv("OUTRIDER_ISA", request.param)
    load_library.cache_clear()
    yield request.param
    load_library.cache_clear()


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("instruction_set", available_sets(), indirect=True)
def test_every_instruction_set(instruction_set: str, dtype: str) -> None:
    """As OUTRIDER_ISA chooses it: with less than this CPU has, slower, and exact too."""
    require(SMALL)
    llm = LLM(SMALL, dtype=dtype, draft_dtype="int4", num_slots=2048, prefix_cache=False)
    assert isinstance(llm.target.model, NativeDecoder)
    assert llm.target.model._library.isa == instruction_set
    assert_same(llm, GREEDY | {"max_tokens": 16}, ["suffix:k=8,width=3"], texts()[:6])


def test_exact_refuses_what_cannot_be_exact() -> None:
    require(SMALL)
    for options in ({"dtype": "float32"}, {"dtype": "int8", "kernels": False}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            with pytest.raises(ConfigError, match="exact decoding with dtype"):
                LLM(SMALL, exact=True, num_slots=256, **options)  # type: ignore[arg-type]


def test_exact_costs_nothing() -> None:
    """It is a check, not another arithmetic: the tokens are those of the same model without it."""
    require(SMALL)
    params = SamplingParams(temperature=0.0, max_tokens=24)
    prompt = texts()[0]
    without = LLM(SMALL, dtype="int8", num_slots=8192, prefix_cache=False)
    exact = small("int8")
    assert type(without.target.model) is type(exact.target.model)
    assert without.generate(prompt, params).token_ids == exact.generate(prompt, params).token_ids
