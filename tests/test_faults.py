"""Logits that are no numbers, of the target or a draft: who fails, who goes on, what stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness import (
    DRAFTS,
    VOCAB,
    Answer,
    Harness,
    Scripted,
    fake,
    foresee,
    make_engine,
    plain,
    prompt_of,
    request,
)
from outrider.drafters.base import Budget
from outrider.kv import KVCache
from outrider.metrics import total
from outrider.request import FinishReason, Sequence
from outrider.tree import TokenTree


def essences(answers: list[Answer]) -> list[Any]:
    return [answer.essence for answer in answers]


# Faults of the target.

FILLS = [np.nan, np.inf, -np.inf]


@pytest.fixture
def interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """All sequences take the first free slots: each one's lie among the others'."""
    monkeypatch.setattr(KVCache, "_new_home", lambda self: 0)


def no_slot_is_broken(*harnesses: Harness) -> bool:
    return not any(
        model._broken.any() for h in harnesses for model in (h.target, *h.drafts.values())
    )


def neighbours(num: int = 3) -> list[Any]:
    """Requests around the faulty one: with and without drafts, greedy and sampled."""
    return [
        request(
            prompt_of(5 + i, 20 + i),
            id=f"neighbour {i}",
            drafter=["none", "oracle", "draft:good,k=4"][i % 3],
            temperature=[0.0, 1.0][i % 2],
            max_tokens=40,
        )
        for i in range(num)
    ]


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize(
    ("temperature", "verifier"), [(0.0, "coupled"), (1.0, "coupled"), (0.0, "traversal")]
)
@pytest.mark.usefixtures("interleaved")
def test_a_draft_that_breaks_the_target_costs_a_step_only(
    fill: float, temperature: float, verifier: str
) -> None:
    """Logits are no numbers at a drafted token that plain decoding never meets."""
    one = request(temperature=temperature, drafter="poison", verifier=verifier, max_tokens=40)
    others = neighbours()
    poison = next(t for t in range(2, VOCAB) if t not in {*one.prompt, *plain(one)[0].tokens})
    real = {pair for r in others for pair in enumerate_pairs([*r.prompt, *plain(r)[0].tokens])}
    target = fake(
        break_at=lambda token, position: (
            fill if token == poison and (token, position) not in real else None
        )
    )

    def make(seq: Sequence, budget: Budget) -> TokenTree:
        return TokenTree.chain([foresee(target, seq, ()), poison])

    harness = make_engine(target, drafters={"poison": lambda: Scripted(make)}, chunk=16)
    others = [r for r in others if "draft" not in str(r.drafter)]
    answers = harness.run(others[0], one, *others[1:])
    for r, answer in zip([others[0], one, *others[1:]], answers, strict=True):
        assert answer.essence == plain(r)[0].essence
        assert answer.error is None
    assert answers[1].seq.stats.faults == 1
    assert answers[1].seq.stats.drafted == 0
    assert no_slot_is_broken(harness)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("drafter", ["none", "oracle", "draft:good,k=4", "random"])
@pytest.mark.parametrize("place", [0, 1, 7])
@pytest.mark.usefixtures("interleaved")
def test_a_sequence_whose_own_logits_are_no_numbers_fails_alone(
    fill: float, drafter: str, place: int
) -> None:
    """It ends with the tokens before; its neighbours, whose slots lie around its own, go on."""
    others = neighbours(6)
    one = request(prompt_of(6, 3), id="faulty", drafter=drafter, max_tokens=40, ignore_eos=True)
    tokens = plain(one)[0].tokens
    position = len(one.prompt) + place
    target = fake(
        break_at=lambda token, at: fill if (token, at) == (tokens[place], position) else None
    )
    harness = make_engine(target)
    asked = [*others[:3], one, *others[3:]]
    answers = harness.run(*asked)
    for r, answer in zip(asked, answers, strict=True):
        if r is not one and answer.finish is not FinishReason.ERROR:
            assert answer.essence == plain(r)[0].essence
    faulty = answers[3]
    assert faulty.finish is FinishReason.ERROR
    assert faulty.tokens == tokens[: place + 1]
    assert faulty.text == faulty.seq.text
    assert faulty.error == "the model's logits are not finite numbers"
    for r, answer in zip(asked, answers, strict=True):
        met = (tokens[place], position)
        meets = met in enumerate_pairs([*r.prompt, *plain(r)[0].tokens])
        assert r is one or meets or answer.finish is not FinishReason.ERROR
    assert no_slot_is_broken(harness)


def enumerate_pairs(tokens: list[int]) -> list[tuple[int, int]]:
    return [(token, position) for position, token in enumerate(tokens)]


@pytest.mark.parametrize("chunk", [1, 4, 512])
@pytest.mark.parametrize("place", [0, 17, 39])
@pytest.mark.usefixtures("interleaved")
def test_a_broken_prompt_fails_before_its_first_token(chunk: int, place: int) -> None:
    """Also where the values arise in a part of the prompt that no token is drawn from, and
    neighbours that read around them go on. What they wrote is in no index afterwards."""
    prompt = prompt_of(40, 6)
    met = (prompt[place], place)
    target = fake(break_at=lambda token, position: np.nan if (token, position) == met else None)
    others = [
        r for r in neighbours(6) if met not in enumerate_pairs([*r.prompt, *plain(r)[0].tokens])
    ]
    assert len(others) > 2
    broken = request(prompt, id="broken")
    harness = make_engine(target, chunk=chunk)
    answers = harness.run(*others, broken, arrivals=[*range(len(others)), 2])
    assert essences(answers[:-1]) == [plain(r)[0].essence for r in others]
    assert answers[-1].finish is FinishReason.ERROR
    assert (answers[-1].tokens, answers[-1].text) == ([], "")
    assert no_slot_is_broken(harness)
    # The same words before the broken one, or without it, are fine.
    target.break_at = None
    (answer,) = harness.run(broken)
    assert answer.essence == plain(broken)[0].essence


def test_cancelling_a_broken_prompt_leaves_nothing_behind() -> None:
    target = fake(num_slots=64, break_at=lambda token, position: np.nan if position == 20 else None)
    harness = make_engine(target, chunk=6)
    harness.add(request(prompt_of(40, 6), id="broken"))
    for _ in range(4):
        harness.step()
    harness.cancel("broken")
    assert no_slot_is_broken(harness)
    target.break_at = None
    one = request(prompt_of(30, 2))
    assert harness.run(one)[0].essence == plain(one, num_slots=64)[0].essence


# Faults of a draft model.


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("drafter", ["draft:good,k=4", "draft:good,k=6,width=3", "ensemble"])
@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
def test_a_draft_that_breaks_costs_its_drafts_only(
    fill: float, drafter: str, verifier: str
) -> None:
    """At some positions, met in catching up and in drafting: that step is plain decoding."""
    if drafter == "ensemble":
        drafter = "ensemble:[draft:good,ngram:k=2]"
    good = fake(
        **DRAFTS["good"],
        break_at=lambda token, position: fill if position in (8, 9, 21) else None,
    )
    for temperature in (0.0, 1.0):
        one = request(
            drafter=drafter,
            verifier=verifier,
            temperature=temperature,
            max_tokens=40,
            ignore_eos=True,
        )
        harness = make_engine(drafts={"good": good})
        (answer,) = harness.run(one)
        stats = answer.seq.stats
        if verifier == "coupled" or temperature == 0.0:
            assert answer.essence == plain(one)[0].essence
        assert len(answer.tokens) == 40
        if "ensemble" not in drafter:
            assert 0 < stats.faults < stats.target_forwards
        assert no_slot_is_broken(harness)


def test_a_draft_that_breaks_once_drafts_again() -> None:
    broken_steps = 3

    def break_at(token: int, position: int) -> float | None:
        nonlocal broken_steps
        if position == 9 and broken_steps:
            broken_steps -= 1
            return float("nan")
        return None

    good = fake(**DRAFTS["good"], break_at=break_at)
    one = request(drafter="draft:good,k=4", max_tokens=60, ignore_eos=True)
    (answer,) = make_engine(drafts={"good": good}).run(one)
    assert answer.essence == plain(one)[0].essence
    assert answer.seq.stats.faults == 3
    assert answer.seq.stats.accepted > 8


def test_a_draft_that_always_breaks_is_plain_decoding() -> None:
    good = fake(break_at=lambda token, position: float("nan"))
    one = request(drafter="draft:good,k=4", ignore_eos=True)
    harness = make_engine(drafts={"good": good})
    (answer,) = harness.run(one)
    stats = answer.seq.stats
    assert answer.essence == plain(one)[0].essence
    assert (stats.drafted, stats.faults) == (0, stats.target_forwards - 1)
    assert no_slot_is_broken(harness)


def test_faults_of_one_draft_do_not_end_the_drafts_of_others() -> None:
    """Sequences share the draft's pool: values that are no numbers must not stay in it."""
    token = 5
    good = fake(**DRAFTS["good"], break_at=lambda t, position: np.nan if t == token else None)
    requests = [
        request(prompt_of(9, i), id=str(i), drafter="draft:good,k=4", max_tokens=60, seed=i)
        for i in range(6)
    ]
    answers = make_engine(drafts={"good": good}).run(*requests)
    assert essences(answers) == [plain(r)[0].essence for r in requests]
    assert total(a.seq.stats for a in answers).faults > 0
    for answer in answers:
        if token not in answer.seq.tokens:
            assert answer.seq.stats.accepted > 0
