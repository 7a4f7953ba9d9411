"""The loop: interference, seeds, ids, what drafters are told."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch

from harness import (
    Answer,
    Scripted,
    fake,
    make_engine,
    oracle,
    plain,
    prompt_of,
    random_trees,
    request,
)
from outrider.config import EngineConfig
from outrider.drafters.base import Budget, Needs
from outrider.errors import ConfigError
from outrider.request import FinishReason, Sequence
from outrider.tree import TokenTree

SPECULATIVE = ["ngram:k=4,n=2", "suffix:k=6,width=3", "draft:good,k=4", "draft:good,k=6,width=3"]


def essences(answers: list[Answer]) -> list[Any]:
    return [answer.essence for answer in answers]


# Steps with and without drafts in turn (a step without drafts reads stale state).


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_steps_with_and_without_drafts_in_turn(temperature: float) -> None:
    target = fake()
    right = oracle(target)
    turns = Counter[str]()

    def make(seq: Sequence, budget: Budget) -> TokenTree:
        turns[seq.id] += 1
        full = right.make(seq, budget)
        assert full is not None
        return full.truncate([0, 4, 1, 0, 0, 2][turns[seq.id] % 6], 9)

    requests = [
        request(
            prompt_of(9 + i, i),
            id=str(i),
            temperature=temperature,
            drafter="in turn",
            ignore_eos=True,
        )
        for i in range(2)
    ]
    engine = make_engine(target, drafters={"in turn": lambda: Scripted(make)})
    answers = engine.run(*requests, arrivals=[0, 2])
    assert essences(answers) == [plain(r)[0].essence for r in requests]
    assert all(0 < a.seq.stats.drafted < 4 * a.seq.stats.target_forwards for a in answers)


@pytest.mark.parametrize("drafter", SPECULATIVE)
def test_no_drafts_wanted_is_plain_decoding(drafter: str) -> None:
    one = request(drafter=drafter, num_draft=0)
    (answer,) = make_engine().run(one)
    assert answer.essence == plain(one)[0].essence
    assert (answer.seq.stats.drafted, answer.seq.stats.target_forwards) == (0, len(answer.tokens))


def test_num_draft_is_a_ceiling() -> None:
    for wanted, most in ((2, 2), (None, 4), (64, 64)):
        sizes: list[int] = []

        def make(seq: Sequence, budget: Budget, sizes: list[int] = sizes) -> TokenTree:
            sizes.append(budget.num_nodes)
            return TokenTree.chain([3] * 99)

        harness = make_engine(drafters={"wide": lambda make=make: Scripted(make)})
        (answer,) = harness.run(request(drafter="wide", num_draft=wanted, max_tokens=99))
        assert max(sizes) == most
        assert answer.seq.stats.drafted <= most * answer.seq.stats.target_forwards


# Others' requests (drafted slots in the shared prefix cache changed other requests' text).


@pytest.mark.parametrize("drafter", [*SPECULATIVE, "random", "oracle"])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_speculation_does_not_change_other_requests(drafter: str, prefix_cache: bool) -> None:
    """All share a prompt, so that they meet in the prefix index; one is cancelled on the way."""
    prompt = prompt_of(33, 1)
    harness = make_engine(fake(prefix_cache=prefix_cache), chunk=16)
    quiet = [request(prompt, id=f"quiet {i}", drafter="none", max_tokens=40) for i in range(3)]
    loud = [
        request(
            prompt,
            id=f"loud {i}",
            drafter=drafter,
            temperature=1.0,
            seed=i,
            max_tokens=40,
            ignore_eos=True,
        )
        for i in range(3)
    ]
    answers = harness.add(quiet[0], loud[0])
    for number in range(5):
        harness.step()
        if number == 2:
            answers += harness.add(quiet[1], loud[1])
    harness.cancel("loud 0")
    answers += harness.run(quiet[2], loud[2])
    for one, answer in zip(
        [quiet[0], loud[0], quiet[1], loud[1], quiet[2], loud[2]], answers, strict=True
    ):
        whole = plain(one)[0]
        if one.id == "loud 0":
            assert answer.finish is FinishReason.CANCELLED
            assert answer.tokens == whole.tokens[: len(answer.tokens)]
            assert whole.text.startswith(answer.text)
        else:
            assert answer.essence == whole.essence


def test_a_shared_prompt_is_computed_once() -> None:
    prompt = prompt_of(65, 1)
    target = fake()
    harness = make_engine(target)
    harness.add(request(prompt, id="a", drafter="oracle", max_tokens=1))
    harness.step()
    first = target.num_computed
    (answer,) = harness.add(request(prompt, id="b", drafter="oracle", max_tokens=1))
    harness.step()
    assert answer.finish is not None
    assert (first, target.num_computed - first) == (65, 1)


def test_several_answers_compute_their_prompt_once() -> None:
    for num_prompt in (1, 2, 20):
        target = fake(prefix_cache=False)
        make_engine(target, chunk=7).run(
            request(prompt_of(num_prompt), n=3, max_tokens=2, ignore_eos=True)
        )
        # Beside the prompt: its last token for two more draws, and the first tokens of all three.
        assert target.num_computed == num_prompt + 2 + 3


# Seeds (ignored; shared between requests; dependent on the engine's step count or batch).


@pytest.mark.parametrize("drafter", ["none", *SPECULATIVE])
@pytest.mark.parametrize("verifier", ["coupled", "rejection", "traversal"])
def test_the_same_seed_gives_the_same_tokens(drafter: str, verifier: str) -> None:
    one = request(temperature=1.3, drafter=drafter, verifier=verifier, seed=11)
    (alone,) = make_engine().run(one)
    harness = make_engine()
    harness.run(request(id="before", temperature=1.0, seed=None))
    others = [
        request(prompt_of(5 + i, i), id=str(i), temperature=1.0, seed=None, drafter="random")
        for i in range(5)
    ]
    busy = harness.run(*others[:3], one, *others[3:], arrivals=[0, 0, 1, 2, 2, 3])[3]
    assert busy.essence == alone.essence


def test_requests_without_a_seed_differ() -> None:
    harness = make_engine(fake(scale=1.0))
    unseeded = request(temperature=2.0, seed=None, max_tokens=12, ignore_eos=True)
    seen = set()
    for _ in range(100):
        (answer,) = harness.run(unseeded)
        seen.add(tuple(answer.tokens))
    assert len(seen) == 100
    answers = harness.run(*(replace(unseeded, id=str(i)) for i in range(20)))
    assert len({tuple(a.tokens) for a in answers} | seen) == 120


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_seeded_unseeded_and_greedy_requests_in_one_batch(size: int) -> None:
    """Rows in any order; probabilistic drafts are not let into other rows."""
    kinds = [
        request(prompt_of(6, 1), id="greedy", drafter="draft:good,k=4"),
        request(prompt_of(7, 2), id="seeded", temperature=1.0, seed=5, drafter="random"),
        request(prompt_of(8, 3), id="unseeded", temperature=1.0, seed=None, drafter="ngram"),
        request(
            prompt_of(9, 4),
            id="rejection",
            temperature=1.0,
            seed=6,
            drafter="draft:good,k=4",
            verifier="rejection",
        ),
        request(prompt_of(10, 5), id="plain", temperature=0.7, seed=7),
        request(prompt_of(11, 6), id="tree", drafter="draft:good,k=6,width=3"),
        request(prompt_of(12, 7), id="unseeded too", temperature=1.0, seed=None),
        request(prompt_of(13, 8), id="cut", temperature=1.0, top_k=3, seed=8, drafter="oracle"),
    ][:size]
    seed = 2
    rng = np.random.default_rng(seed)
    orders = list(permutations(range(size))) if size <= 3 else [rng.permutation(size) for _ in "ab"]
    for order in orders:
        answers = make_engine().run(*(kinds[i] for i in order))
        for i, answer in zip(order, answers, strict=True):
            one = kinds[i]
            if one.params.seed is None:
                continue
            expected = make_engine().run(one)[0] if one.id == "rejection" else plain(one)[0]
            assert answer.essence == expected.essence, (seed, order, one.id)


# Requests and the engine.


def test_an_id_is_free_once_all_its_answers_have_ended() -> None:
    harness = make_engine()
    first = harness.add(request(n=2, temperature=1.0, seed=1))
    while first[0].finish is None or first[1].finish is None:
        if all(a.finish is None for a in first):
            harness.step()
            continue
        with pytest.raises(ConfigError, match="running already"):
            harness.engine.add(request(n=2))
        harness.step()
    assert len(harness.run(request(n=2))) == 2


def test_the_second_answer_keeps_its_requests_id_taken() -> None:
    """The first of two answers has ended; the other runs on under the same id."""
    for seed in range(20):
        harness = make_engine()
        first, second = harness.add(request(n=2, temperature=2.0, seed=seed, max_tokens=40))
        while first.finish is None:
            harness.step()
        if second.finish is None:
            break
    with pytest.raises(ConfigError, match="running already"):
        harness.engine.add(request(n=2))


def test_a_step_without_work_does_nothing() -> None:
    harness = make_engine()
    assert harness.step() == []
    assert harness.target.num_forwards == 0


def test_the_default_drafter_and_verifier() -> None:
    harness = make_engine(drafter="oracle", verifier="traversal")
    (answer,) = harness.run(request())
    assert (answer.seq.drafter.name, answer.seq.verifier.name) == ("scripted", "traversal")
    assert harness.engine.drafter("oracle") is answer.seq.drafter


def test_run_yields_the_events_of_all_steps() -> None:
    harness = make_engine()
    (answer,) = harness.add(request())
    harness.take(list(harness.engine.run()))
    harness.check()
    assert answer.essence == plain(request())[0].essence


@pytest.mark.parametrize(
    "bad", [{"max_batch": 0}, {"chunk": 0}, {"max_step_tokens": 0}, {"max_draft": -1}]
)
def test_engine_settings_are_checked(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        EngineConfig(**bad)


# What drafters are told.


class Listening(Scripted):
    """Asks for hidden states; remembers all it is told."""

    def __init__(self, model: Any, layers: tuple[int, ...]) -> None:
        super().__init__(random_trees(model).make, num_draft=6)
        self.needs = Needs(hidden_layers=layers)
        self.name = f"listening {layers}"


def test_feedback_tells_every_committed_token_once_with_its_state() -> None:
    target = fake(windows=(None,), absolute=True)
    drafters = {layers: Listening(target, layers) for layers in [(1, 3), (0,), (4, 1)]}
    harness = make_engine(
        target,
        drafters={str(layers): lambda layers=layers: drafters[layers] for layers in drafters},
        chunk=7,
    )
    requests = [
        request(prompt_of(17 + i, i), id=str(i), drafter=str(layers))
        for i, layers in enumerate(drafters)
    ]
    answers = harness.run(*requests, request(prompt_of(20, 9), id="deaf", drafter="draft:good"))
    for answer, (layers, drafter) in zip(answers, drafters.items(), strict=False):
        told: list[int] = []
        for seq_id, feedback in drafter.lessons:
            assert seq_id == answer.seq.id
            assert feedback.start == len(told)
            told += feedback.tokens.tolist()
            assert feedback.hidden is not None
            states = target.plain_hidden(told, layers)[feedback.start :]
            assert torch.equal(feedback.hidden, states)
        assert told == answer.seq.tokens[: len(told)]
        # The last block may have ended on an accepted draft, or on a token without keys.
        assert len(answer.seq.tokens) - len(told) in (0, 1)
        assert sum(f.num_accepted for _, f in drafter.lessons) == answer.seq.stats.accepted


def test_drafters_forget_at_the_end_when_preempted_and_when_cancelled() -> None:
    harness = make_engine(fake(prefix_cache=False))
    harness.add(request(id="a", drafter="oracle"), request(id="b", drafter="oracle"))
    drafter = harness.engine.drafter("oracle")
    assert isinstance(drafter, Scripted)
    harness.step()
    scheduler = harness.engine._scheduler
    scheduler._preempt(scheduler.running[-1])
    assert drafter.forgotten == ["b/0"]
    harness.step()
    harness.cancel("a")
    assert drafter.forgotten == ["b/0", "a/0"]
    while harness.engine.has_work:
        harness.step()
    assert drafter.forgotten == ["b/0", "a/0", "b/0"]


def test_a_tree_for_a_verifier_of_chains_is_a_fault() -> None:
    """A drafter that says it makes chains, and does not."""
    tree = TokenTree(tokens=np.array([3, 4]), parents=np.array([-1, -1]))
    harness = make_engine(
        drafters={"false": lambda: Scripted(lambda seq, budget: tree, is_chain=True)}
    )
    one = request(drafter="false", verifier="block")
    (answer,) = harness.run(one)
    assert answer.essence == plain(one)[0].essence
    assert answer.seq.stats.faults > 0
    assert answer.seq.stats.drafted == 0


def test_a_drafter_that_raises_leaves_the_engine_usable() -> None:
    def make(seq: Sequence, budget: Budget) -> TokenTree:
        raise RuntimeError("a bug")

    harness = make_engine(drafters={"raising": lambda: Scripted(make)})
    one = request(id="good", drafter="none")
    (answer,) = harness.add(one)
    harness.add(request(id="bad", drafter="raising"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a bug"):
            harness.step()
        harness.check()  # no scratch is left
    harness.cancel("bad")
    while harness.engine.has_work:
        harness.step()
    harness.check_empty()
    assert answer.essence == plain(one)[0].essence


def test_many_drafts_in_small_steps_hold_up_nobody() -> None:
    requests = [
        request(prompt_of(9, i), id=str(i), drafter="oracle", max_tokens=40, ignore_eos=True)
        for i in range(3)
    ]
    requests = [replace(one, num_draft=7) for one in requests]
    harness = make_engine(max_step_tokens=8)
    answers = harness.add(*requests)
    while not any(answer.finish for answer in answers):
        harness.step()
    assert sum(len(answer.tokens) > 0 for answer in answers) >= 2
    while harness.engine.has_work:
        harness.step()
    assert essences(answers) == [plain(one)[0].essence for one in requests]


def test_ready_sequences_share_the_drafts_and_take_turns() -> None:
    requests = [
        replace(request(prompt_of(2, i), id=str(i), drafter="wide", ignore_eos=True), num_draft=7)
        for i in range(3)
    ]
    wrong = Scripted(lambda seq, budget: TokenTree.chain([3] * 7))
    for size in (8, 3):
        harness = make_engine(drafters={"wide": lambda: wrong}, max_step_tokens=size)
        answers = harness.add(*requests)
        for _ in range(12):
            harness.step()
        counts = [answer.seq.stats.target_forwards for answer in answers]
        assert min(counts) >= max(counts) // 2 > 0


def test_noise_is_freed_when_a_sequence_ends() -> None:
    harness = make_engine()
    (answer,) = harness.run(request(drafter="draft:good,k=4", temperature=1.0))
    assert not answer.seq.noise._race
