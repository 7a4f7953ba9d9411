"""Plain decoding and every way to speculate give the same tokens, text and end."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from harness import fake, make_engine, plain, prompt_of, request, text_of
from outrider.metrics import total
from outrider.request import Request

DRAFTERS = [
    "ngram:k=4,n=2",
    "suffix:k=6",
    "suffix:k=6,width=3",
    "draft:good,k=4",
    "draft:bad,k=3",
    "draft:short,k=4",  # a shorter context than the target's
    "draft:small,k=4",  # a pool that is too small for a batch
    "draft:padded,k=4",  # a vocabulary padded beyond the target's
    "draft:narrow,k=4",  # one that lacks the target's last rows
    "draft:good,k=6,width=3",
    "ensemble:[ngram:k=3,draft:good,k=3,suffix:width=2]",
    "oracle",
    "random",
    "probing",
    "liar",
]
CHAINS = [d for d in DRAFTERS if "width" not in d and d not in ("random", "probing")]

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalties": {"repetition_penalty": 1.4, "presence_penalty": 1.0},
    "greedy, frequency": {"frequency_penalty": 1.5},
    "greedy, bias": {"logit_bias": {22: 6.0, 9: -20.0}},
    "greedy, min_tokens": {"min_tokens": 20, "stop_token_ids": tuple(range(2, 9)), "stop": ("a",)},
    "greedy, stop ids": {"stop_token_ids": (16, 7)},
    "greedy, stop strings": {"stop": ("st", "op", "fg", " the a")},
    "greedy, ignore_eos": {"ignore_eos": True, "max_tokens": 60},
    "t=0.7": {"temperature": 0.7},
    "t=1": {"temperature": 1.0},
    "t=1.3": {"temperature": 1.3, "ignore_eos": True},
    "t=2, top-k": {"temperature": 2.0, "top_k": 4},
    "t=2, top-p": {"temperature": 2.0, "top_p": 0.8},
    "t=2, min-p": {"temperature": 2.0, "min_p": 0.05},
    "t=1, all cuts": {"temperature": 1.0, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
    "t=1, penalties": {
        "temperature": 1.0,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
    },
    "t=1, bias, stops": {
        "temperature": 1.0,
        "logit_bias": {15: 8.0},
        "min_tokens": 4,
        "stop": ("stop", "k"),
    },
}
GREEDY = ["greedy", "greedy, penalties", "greedy, min_tokens", "greedy, stop strings"]


def wanted(name: str, **more: Any) -> Request:
    return request(**{"max_tokens": 40} | PARAMS[name] | more)


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_coupled_verification_gives_the_tokens_of_plain_decoding(drafter: str, params: str) -> None:
    one = wanted(params, drafter=drafter, verifier="coupled")
    (answer,) = make_engine().run(one)
    assert answer.essence == plain(one)[0].essence
    ended_by_token = answer.tokens[-1] in answer.seq.end_tokens
    if not one.params.stop:
        assert answer.text == text_of(answer.tokens[: -1 if ended_by_token else None])


@pytest.mark.parametrize("params", GREEDY)
@pytest.mark.parametrize(
    ("verifier", "drafter"),
    [
        *product(["rejection", "traversal"], DRAFTERS),
        *product(["block"], CHAINS),
    ],
)
def test_every_verifier_is_bit_exact_when_greedy(verifier: str, drafter: str, params: str) -> None:
    one = wanted(params, drafter=drafter, verifier=verifier)
    (answer,) = make_engine().run(one)
    assert answer.essence == plain(one)[0].essence


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_drafts_of_these_tests_are_accepted_and_rejected(
    drafter: str, temperature: float
) -> None:
    """The tests above would say nothing about drafts that never or always hold."""
    requests = [
        request(prompt_of(6 + i, i), id=str(i), drafter=drafter, max_tokens=60, ignore_eos=True)
        for i in range(3)
    ]
    requests = [replace(r, params=replace(r.params, temperature=temperature)) for r in requests]
    # Peaked laws, so that a sampled text repeats itself too.
    stats = total(a.seq.stats for a in make_engine(fake(scale=40.0)).run(*requests))
    assert stats.accepted > 5
    assert drafter in ("oracle", "liar") or stats.accepted < stats.drafted
    assert (drafter == "liar") == (stats.faults > 0)


def mixed_batch(*, coupled_only: bool = False) -> list[Request]:
    """Different drafters, verifiers, parameters, K, seeds and lengths side by side."""
    names = list(PARAMS)
    batch: list[Request] = []
    for i, drafter in enumerate([*DRAFTERS, "none"]):
        name = names[(5 * i + 3) % len(names)]
        verifiers = ["coupled", "rejection", "traversal"] if name in GREEDY else ["coupled"]
        one = wanted(
            name,
            prompt=prompt_of(1 + 3 * i, i),
            id=f"{i}",
            drafter=drafter,
            verifier="coupled" if coupled_only else verifiers[i % len(verifiers)],
            seed=100 + i,
        )
        batch.append(replace(one, num_draft=[None, 0, 1, 7][i % 4] if drafter != "none" else None))
    # Two of a kind, and sampling verifiers, whose tokens depend on the drafts.
    batch.append(replace(batch[0], id="twin"))
    for verifier in ("rejection", "traversal", "block"):
        batch.append(
            wanted("t=1", id=verifier, drafter="draft:good,k=4", verifier=verifier, seed=3)
        )
    return batch


def is_exact(one: Request) -> bool:
    return one.params.temperature == 0.0 or one.verifier == "coupled"


def assert_same(requests: list[Request], answers: list[Any], **target: Any) -> None:
    for one, answer in zip(requests, answers, strict=True):
        if is_exact(one):
            assert answer.essence == plain(one, **target)[0].essence, one


@pytest.mark.parametrize("chunk", [1, 3, 16])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("max_batch", [3, 8])
def test_a_mixed_batch_gives_the_tokens_of_each_alone(
    chunk: int, prefix_cache: bool, max_batch: int
) -> None:
    requests = mixed_batch()
    engine = make_engine(fake(prefix_cache=prefix_cache), chunk=chunk, max_batch=max_batch)
    arrivals = [(3 * i) % 11 for i in range(len(requests))]
    assert_same(requests, engine.run(*requests, arrivals=arrivals))


@pytest.mark.parametrize("num_slots", [90, 100, 128, 200])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preempted_sequences_go_on_with_the_same_tokens(num_slots: int, prefix_cache: bool) -> None:
    requests = mixed_batch()
    target = {"num_slots": num_slots}
    engine = make_engine(fake(**target, prefix_cache=prefix_cache), chunk=16)
    answers = engine.run(*requests)
    assert_same(requests, answers, **target)
    assert total(a.seq.stats for a in answers).preemptions > 0


@pytest.mark.parametrize("drafter", ["none", *DRAFTERS])
def test_preemption_after_every_step(drafter: str) -> None:
    """All sequences lose their slots before each step, whatever they were at."""
    requests = [
        wanted(name, prompt=prompt_of(4 + i, i), id=name, drafter=drafter)
        for i, name in enumerate(["greedy", "t=1", "t=1, penalties", "greedy, stop strings"])
    ]
    harness = make_engine(fake(prefix_cache=False), chunk=1000)
    answers = harness.add(*requests)
    scheduler = harness.engine._scheduler
    while harness.engine.has_work:
        harness.step()
        for seq in reversed(list(scheduler.running)):
            scheduler._preempt(seq)
    harness.check_empty()
    assert_same(requests, answers)
    assert all(a.seq.stats.preemptions == a.seq.stats.target_forwards - 1 for a in answers)


@pytest.mark.parametrize("max_step_tokens", [1, 2, 7, 40])
def test_steps_of_few_tokens(max_step_tokens: int) -> None:
    requests = mixed_batch()[:8]
    engine = make_engine(chunk=16, max_batch=4, max_step_tokens=max_step_tokens)
    assert_same(requests, engine.run(*requests))


@pytest.mark.parametrize("chunk", [1, 3, 16])
@pytest.mark.parametrize("drafter", ["none", "draft:good,k=4", "suffix:k=6,width=3", "random"])
def test_prompts_around_a_multiple_of_the_chunk(chunk: int, drafter: str) -> None:
    """A last chunk of one token is a prompt all the same."""
    requests = [
        wanted("t=1", prompt=prompt_of(m * chunk + rest, 9), id=f"{m}+{rest}", drafter=drafter)
        for m, rest in product([1, 2, 5], [0, 1, 2])
    ]
    answers = make_engine(chunk=chunk).run(*requests)
    assert_same(requests, answers)
    for one, answer in zip(requests, answers, strict=True):
        if one.id == f"5+{1}" and chunk == 16:  # shared blocks shorten the prompts of others
            assert answer.seq.stats.prompt_forwards <= 5


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_prompts_longer_than_the_chunk_of_target_and_draft(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.drafters.draft_model.CHUNK", 4)
    requests = [
        wanted(name, prompt=prompt_of(30 + i, i), id=name, drafter=drafter)
        for i, name in enumerate(["greedy", "t=1"])
    ]
    answers = make_engine(chunk=7).run(*requests)
    assert_same(requests, answers)
    assert [a.seq.stats.prompt_forwards for a in answers] == [4, 4]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_to_the_end_of_the_context(drafter: str) -> None:
    """A draft of 24 positions serves a target of 48: it drafts while it can."""
    target = {"context_length": 48, "windows": (None,), "absolute": True}
    one = wanted("t=1.3", max_tokens=1000, prompt=prompt_of(5), drafter=drafter)
    (answer,) = make_engine(fake(**target)).run(one)
    assert answer.essence == plain(one, **target)[0].essence
    assert len(answer.seq.tokens) == 48
    assert answer.finish == "length"


@pytest.mark.parametrize("drafter", ["none", *DRAFTERS])
def test_several_answers_to_one_prompt(drafter: str) -> None:
    one = wanted("t=1", n=3, prompt=prompt_of(20), drafter=drafter)
    answers = make_engine(chunk=16).run(one)
    expected = plain(one)
    assert [a.essence for a in answers] == [p.essence for p in expected]
    assert len({tuple(a.tokens) for a in answers}) == 3
    single = replace(one, params=replace(one.params, n=1))
    assert answers[0].essence == plain(single)[0].essence


@pytest.mark.parametrize("num_slots", [90, 120])
def test_several_answers_under_preemption(num_slots: int) -> None:
    target = {"num_slots": num_slots}
    requests = [
        wanted("t=1", n=3, prompt=prompt_of(20, i), id=str(i), drafter="draft:good,k=4", seed=i)
        for i in range(3)
    ]
    answers = make_engine(fake(**target), chunk=16).run(*requests)
    expected = [p for one in requests for p in plain(one, **target)]
    assert [a.essence for a in answers] == [p.essence for p in expected]
    assert total(a.seq.stats for a in answers).preemptions > 0


@pytest.mark.parametrize("drafter", ["draft:good,k=4", "random", "ngram:k=4,n=2"])
def test_windows_wide_contexts_and_positions(drafter: str) -> None:
    """Targets whose laws depend on all tokens, and on where they stand."""
    for windows in [(None,), (5,), (4, None)]:
        target = {"windows": windows, "absolute": True}
        requests = [
            wanted(name, prompt=prompt_of(19 + i, i), id=name, drafter=drafter)
            for i, name in enumerate(["greedy", "t=1"])
        ]
        assert_same(requests, make_engine(fake(**target), chunk=5).run(*requests), **target)
