"""The draft model on its own: what it proposes, how it catches up, what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fake_model import FakeModel
from harness import VOCAB, fake, prompt_of
from outrider.drafters.base import Budget, DrafterContext
from outrider.drafters.draft_model import DraftModel
from outrider.request import SamplingParams, Sequence
from outrider.verify import make_verifier

MakeSequence = Callable[..., Sequence]


def drafting(
    make_sequence: MakeSequence, tokens: list[int], *, verifier: str = "coupled", **params: Any
) -> Sequence:
    seq = make_sequence(tokens, params=SamplingParams(**{"temperature": 0.0} | params))
    seq.verifier = make_verifier(verifier)
    return seq


def draft_model(model: FakeModel, **options: int) -> DraftModel:
    context = DrafterContext(vocab_size=VOCAB, load_draft=lambda name: model)
    return DraftModel("draft", "model", context=context, **options)


def greedy(model: FakeModel, tokens: list[int], num: int) -> list[int]:
    tokens = list(tokens)
    for _ in range(num):
        tokens.append(int(model.plain_logits(tokens).argmax()))
    return tokens[-num:]


def test_a_greedy_chain_is_what_the_model_says(make_sequence: MakeSequence) -> None:
    model = fake(windows=(None,), absolute=True)
    seq = drafting(make_sequence, list(prompt_of(9)))
    drafter = draft_model(model, k=5)
    (tree,) = drafter.propose([seq], [Budget(5, 5)])
    assert tree is not None
    assert tree.is_chain
    assert tree.tokens.tolist() == greedy(model, seq.tokens, 5)
    # Nothing that was drafted stays: the next draft starts from the accepted tokens alone.
    assert model.kv.length(drafter.table(seq.id)) == 9
    assert len(model.kv.scratch(drafter.table(seq.id))) == 0
    seq.append(int(tree.tokens[0]))
    seq.append((int(tree.tokens[1]) + 1) % VOCAB)
    (tree,) = drafter.propose([seq], [Budget(3, 2)])
    assert tree is not None
    assert tree.tokens.tolist() == greedy(model, seq.tokens, 2)
    assert model.kv.length(drafter.table(seq.id)) == 11


def test_a_coupled_chain_is_drawn_with_the_targets_noise(make_sequence: MakeSequence) -> None:
    model = fake(windows=(None,), absolute=True)
    seq = drafting(make_sequence, list(prompt_of(9)), temperature=1.0)
    (tree,) = draft_model(model, k=4).propose([seq], [Budget(4, 4)])
    assert tree is not None
    assert tree.law is None
    tokens = list(seq.tokens)
    for token in tree.tokens.tolist():
        probs = torch.softmax(model.plain_logits(tokens), -1)
        assert token == seq.noise.draw(probs, len(tokens))
        tokens.append(token)


@pytest.mark.parametrize("width", [1, 2])
def test_drawn_tokens_come_with_the_laws_they_were_drawn_from(
    make_sequence: MakeSequence, width: int
) -> None:
    model = fake(windows=(None,), absolute=True)
    seq = drafting(make_sequence, list(prompt_of(9)), verifier="rejection", temperature=1.0)
    (tree,) = draft_model(model, k=5, width=width).propose([seq], [Budget(5, 5)])
    assert tree is not None
    assert tree.laws is not None
    assert len(tree) == 5
    for node in range(len(tree)):
        path = tree.path_tokens(int(tree.parents[node]))
        q = torch.softmax(model.plain_logits([*seq.tokens, *path]), -1)
        assert torch.allclose(tree.laws[tree.law_of(node)], q, atol=1e-6)
        assert q[tree.tokens[node]] > 0
    siblings = [tree.tokens[tree.children(node)].tolist() for node in range(-1, 5)]
    assert all(len(set(tokens)) == len(tokens) <= width for tokens in siblings)


def test_a_tree_keeps_the_most_confident_nodes(make_sequence: MakeSequence) -> None:
    """As many nodes as the budget, the best by their paths' log-probabilities."""
    model = fake(windows=(None,), absolute=True)
    seq = drafting(make_sequence, list(prompt_of(9)))
    (tree,) = draft_model(model, k=6, width=3).propose([seq], [Budget(6, 6)])
    assert tree is not None
    assert tree.scores is not None
    assert len(tree) == 6
    for node in range(6):
        tokens = [*seq.tokens, *tree.path_tokens(int(tree.parents[node]))]
        confidence = torch.log_softmax(model.plain_logits(tokens), -1)[tree.tokens[node]]
        above = tree.scores[tree.parents[node]] if tree.parents[node] >= 0 else 0.0
        assert tree.scores[node] - above == pytest.approx(float(confidence), abs=1e-4)
    first = torch.log_softmax(model.plain_logits(seq.tokens), -1).topk(3)
    left_out = set(first.indices.tolist()) - set(tree.tokens[tree.children(-1)].tolist())
    for token in left_out:
        score = float(first.values[first.indices.tolist().index(token)])
        assert score <= tree.scores.min() + 1e-6


def test_a_long_prompt_is_caught_up_with_in_chunks(
    make_sequence: MakeSequence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.drafters.draft_model.CHUNK", 4)
    model = fake(windows=(None,), absolute=True)
    drafter = draft_model(model, k=2)
    long = drafting(make_sequence, list(prompt_of(9, 1)))
    sizes = []
    for expected in (4, 8, 9):
        (tree,) = drafter.propose([long], [Budget(2, 2)])
        assert tree is not None
        sizes.append(len(tree))
        assert model.kv.length(drafter.table(long.id)) == expected
        assert len(model.kv.scratch(drafter.table(long.id))) == 0
    assert sizes == [0, 0, 2]
    assert tree is not None
    assert tree.tokens.tolist() == greedy(model, long.tokens, 2)


def test_sequences_behind_do_not_hold_up_others(
    make_sequence: MakeSequence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.drafters.draft_model.CHUNK", 6)
    model = fake(windows=(None,), absolute=True)
    drafter = draft_model(model, k=2)
    seqs = [
        drafting_as(make_sequence, list(prompt_of(length, length)), f"s{length}")
        for length in (20, 5, 11)
    ]
    trees = drafter.propose(seqs, [Budget(2, 2)] * 3)
    assert [len(tree) for tree in trees if tree is not None] == [0, 2, 0]
    assert trees[1] is not None
    assert trees[1].tokens.tolist() == greedy(model, seqs[1].tokens, 2)


def drafting_as(make_sequence: MakeSequence, tokens: list[int], seq_id: str) -> Sequence:
    seq = make_sequence(tokens, params=SamplingParams(temperature=0.0), seq_id=seq_id)
    seq.verifier = make_verifier("coupled")
    return seq


def test_without_room_there_are_no_drafts_until_there_is(make_sequence: MakeSequence) -> None:
    model = fake(num_slots=24, prefix_cache=False)
    drafter = draft_model(model, k=3)
    one, two = (
        drafting_as(make_sequence, list(prompt_of(18, i)), name) for i, name in enumerate("ab")
    )
    trees = drafter.propose([one, two], [Budget(3, 3)] * 2)
    assert [len(tree) for tree in trees if tree is not None] == [3, 0]
    for seq in (one, two):
        assert len(model.kv.scratch(drafter.table(seq.id))) == 0
    drafter.forget("a")
    assert drafter.table("a") not in model.kv
    (tree,) = drafter.propose([two], [Budget(3, 3)])
    assert tree is not None
    assert tree.tokens.tolist() == greedy(model, two.tokens, 3)
    drafter.forget("b")
    drafter.forget("never seen")
    assert model.kv.num_free == 24


def test_a_tree_stops_growing_where_room_ends(make_sequence: MakeSequence) -> None:
    model = fake(num_slots=12, prefix_cache=False)
    seq = drafting_as(make_sequence, list(prompt_of(10)), "a")
    drafter = draft_model(model, k=6)
    (tree,) = drafter.propose([seq], [Budget(6, 6)])
    assert tree is not None
    assert tree.tokens.tolist() == greedy(model, seq.tokens, 3)  # the third needs no slot
    assert len(model.kv.scratch(drafter.table("a"))) == 0


@pytest.mark.parametrize("width", [1, 3])
def test_drafts_stop_at_the_drafts_context(make_sequence: MakeSequence, width: int) -> None:
    model = fake(context_length=12)
    drafter = draft_model(model, k=9, width=width)
    depths = []
    for length in (9, 11, 12, 13):
        seq = drafting_as(make_sequence, list(prompt_of(length)), str(length))
        (tree,) = drafter.propose([seq], [Budget(9, 9)])
        assert tree is not None
        depths.append(int(tree.depths.max(initial=0)))
    assert depths == [3, 1, 0, 0]


def test_a_token_that_the_draft_lacks_ends_its_drafts(make_sequence: MakeSequence) -> None:
    model = fake(vocab_size=VOCAB - 2)
    drafter = draft_model(model, k=2)
    seqs = [
        drafting_as(make_sequence, [3, 4, VOCAB - 1, 5], "a"),
        drafting_as(make_sequence, [3, 4, VOCAB - 3, 5], "b"),
    ]
    trees = drafter.propose(seqs, [Budget(2, 2)] * 2)
    assert [len(tree) for tree in trees if tree is not None] == [0, 2]


def test_a_draft_never_proposes_padding(make_sequence: MakeSequence) -> None:
    """Rows beyond the target's vocabulary are cut, rows the draft lacks are impossible."""
    for vocab_size in (VOCAB + 40, VOCAB - 20):
        model = fake(vocab_size=vocab_size)
        for width in (1, 4):
            drafter = draft_model(model, k=8, width=width)
            seq = drafting_as(make_sequence, list(np.array(prompt_of(8)) % 12), "a")
            (tree,) = drafter.propose([seq], [Budget(8, 8)])
            assert tree is not None
            assert tree.is_sound(min(VOCAB, vocab_size))
            drafter.forget("a")
