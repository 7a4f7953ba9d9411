"""Drafters by name; the draft model and the ensemble on their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest
import torch

from fake_model import FakeModel
from harness import (
    TEST_DRAFTERS,
    VOCAB,
    Scripted,
    fake,
    make_engine,
    oracle,
    plain,
    prompt_of,
    request,
)
from outrider import drafters as registry
from outrider.drafters import describe, known_drafters, make_drafter, parse_spec
from outrider.drafters.base import Budget, Drafter, DrafterContext, Needs
from outrider.drafters.draft_model import DraftModel
from outrider.drafters.ensemble import Ensemble
from outrider.drafters.ngram import Ngram
from outrider.drafters.none import NoDraft
from outrider.drafters.suffix import Suffix
from outrider.errors import ConfigError
from outrider.request import SamplingParams, Sequence
from outrider.sampling import Noise
from outrider.tree import TokenTree
from outrider.verify import make_verifier

LOADED: list[str] = []


def load_draft(name: str) -> FakeModel:
    if name != "tiny":
        raise ConfigError(f"no model {name!r}")
    LOADED.append(name)
    return fake()


CONTEXT = DrafterContext(vocab_size=VOCAB, load_draft=load_draft)


def make(spec: str) -> Drafter:
    return make_drafter(spec, CONTEXT)


# Specifications.


@pytest.mark.parametrize(
    ("spec", "kind", "num_draft", "is_chain"),
    [
        ("none", NoDraft, 0, True),
        ("ngram", Ngram, 8, True),
        ("ngram:", Ngram, 8, True),
        (" ngram:k=3, n=2 ", Ngram, 3, True),
        ("suffix", Suffix, 8, True),
        ("suffix:width=2,k=5,min_prob=0.2", Suffix, 5, False),
        ("draft:tiny", DraftModel, 4, True),
        ("draft:tiny,k=6,width=2", DraftModel, 6, False),
        ("draft:k=6,tiny", DraftModel, 6, True),
        ("ensemble:[ngram,suffix]", Ensemble, 16, False),
        ("ensemble:[ngram:k=2,n=2,draft:tiny,k=3,width=2,suffix]", Ensemble, 13, False),
        ("ensemble:[ngram,k=2,suffix,k=1]", Ensemble, 3, False),
    ],
)
def test_a_specification_makes_its_drafter(
    spec: str, kind: type, num_draft: int, is_chain: bool
) -> None:
    drafter = make(spec)
    assert type(drafter) is kind
    assert (drafter.num_draft, drafter.is_chain) == (num_draft, is_chain)
    assert drafter.name == spec


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ("", "unknown drafter ''"),
        ("magic", "unknown drafter 'magic'"),
        ("Ngram", "unknown drafter 'Ngram'"),
        ("ngram:size=3", "unknown option 'size'"),
        ("ngram:name=x", "unknown option 'name'"),
        ("draft:tiny,context=x", "unknown option 'context'"),
        ("draft:tiny,model=x", "unknown option 'model'"),
        ("none:k=3", "unknown option 'k'"),
        ("ngram:k=three", "k is 'three', expected int"),
        ("ngram:k=", "k is '', expected int"),
        ("ngram:k=2.5", "k is '2.5', expected int"),
        ("suffix:factor=much", "factor is 'much', expected float"),
        ("suffix:min_prob=nan", "min_prob"),
        ("ngram:k=3,k=4", "option 'k' is given twice"),
        ("ngram:3", "expected no argument"),
        ("none:x", "expected no argument"),
        ("draft", "expected MODEL"),
        ("draft:", "expected MODEL"),
        ("draft:k=3", "expected MODEL"),
        ("draft:tiny,other", "expected MODEL"),
        ("draft:missing", "no model 'missing'"),
        ("ngram:k=-1", "-1"),
        ("ngram:k=0", "0"),
        ("suffix:k=-2", "-2"),
        ("suffix:width=0", "0"),
        ("draft:tiny,k=0", "k is 0"),
        ("draft:tiny,width=-1", "width is -1"),
        ("draft:tiny,depth=-1", "depth is -1"),
        ("ensemble", "expected ensemble:[spec,spec,...]"),
        ("ensemble:ngram,suffix", "expected ensemble:[spec,spec,...]"),
        ("ensemble:[ngram", "expected ensemble:[spec,spec,...]"),
        ("ensemble:[]", "0 member(s)"),
        ("ensemble:[ngram]", "1 member(s)"),
        ("ensemble:[ngram:size=1,suffix]", "unknown option 'size'"),
        ("ensemble:[magic,suffix]", "unknown drafter 'magic'"),
        ("ensemble:[ngram,magic]", "magic"),
        ("ensemble:[draft,ngram]", "expected MODEL"),
    ],
)
def test_a_wrong_specification_names_the_part_that_is_wrong(spec: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(spec)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_model_is_loaded_for_a_specification_that_is_wrong() -> None:
    LOADED.clear()
    for spec in (
        "draft:tiny,k=x",
        "ensemble:[draft:tiny,magic:k=2]",
        "ensemble:[draft:tiny,ngram:z=1]",
    ):
        with pytest.raises(ConfigError):
            make(spec)
    parse_spec("draft:tiny,k=3")
    assert LOADED == []
    parse_spec("draft:tiny,k=3").make(CONTEXT)
    assert LOADED == ["tiny"]


def test_options_of_members_reach_them() -> None:
    drafter = make("ensemble:[ngram:k=2,n=5,min_n=3,draft:tiny,k=3,width=2,depth=2]")
    assert isinstance(drafter, Ensemble)
    ngram, draft = drafter.members
    assert isinstance(ngram, Ngram)
    assert isinstance(draft, DraftModel)
    assert list(ngram._sizes) == [5, 4, 3]
    assert (draft.num_draft, draft.width, draft.depth, draft.stream) == (3, 2, 2, 1)


def test_every_drafter_is_described_with_all_its_options() -> None:
    lines = describe()
    assert [line.partition(":")[0] for line in lines] == list(known_drafters())
    assert "none" in lines
    assert "ngram:n=3,k=8,min_n=1,match=latest" in lines
    assert "draft:MODEL,k=4,width=1,depth=0" in lines
    assert "ensemble:[SPEC,SPEC,...]" in lines
    for line in lines:  # a description is a specification
        if "SPEC" not in line:
            make(line.replace("MODEL", "tiny"))


class Elsewhere(Scripted):
    """A drafter of another package."""

    def __init__(self, name: str, where: str, *, k: int = 2, loud: bool = False) -> None:
        super().__init__(lambda seq, budget: TokenTree.empty(), num_draft=k)
        self.name, self.where, self.loud = name, where, loud


def test_other_packages_add_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    def entries(*, group: str) -> list[EntryPoint]:
        assert group == "outrider.drafters"
        return [
            EntryPoint("elsewhere", f"{__name__}:Elsewhere", group),
            EntryPoint("none", f"{__name__}:Elsewhere", group),  # may not take a name we have
        ]

    monkeypatch.setattr(registry, "entry_points", entries)
    drafter = make("elsewhere:here,k=7,loud=TRUE")
    assert isinstance(drafter, Elsewhere)
    assert (drafter.where, drafter.num_draft, drafter.loud) == ("here", 7, True)
    assert "elsewhere:WHERE,k=2,loud=False" in describe()
    assert make("none").num_draft == 0
    assert not isinstance(make("none"), Elsewhere)
    for spec, part in (
        ("elsewhere:here,loud=perhaps", "loud is 'perhaps', expected bool"),
        ("elsewhere", "expected WHERE"),
        ("nowhere", "elsewhere"),
    ):
        with pytest.raises(ConfigError, match=part):
            make(spec)
    assert isinstance(make("ensemble:[ngram,elsewhere:here,k=1]"), Ensemble)


# The draft model.

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
    assert model.kv.length(seq.id) == 9
    assert len(model.kv.scratch(seq.id)) == 0
    seq.append(int(tree.tokens[0]))
    seq.append((int(tree.tokens[1]) + 1) % VOCAB)
    (tree,) = drafter.propose([seq], [Budget(3, 2)])
    assert tree is not None
    assert tree.tokens.tolist() == greedy(model, seq.tokens, 2)
    assert model.kv.length(seq.id) == 11


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
        assert model.kv.length(long.id) == expected
        assert len(model.kv.scratch(long.id)) == 0
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
        assert len(model.kv.scratch(seq.id)) == 0
    drafter.forget("a")
    assert "a" not in model.kv
    (tree,) = drafter.propose([two], [Budget(3, 3)])
    assert tree is not None
    assert tree.tokens.tolist() == greedy(model, two.tokens, 3)
    drafter.forget("b")
    drafter.forget("never seen")
    assert model.kv.num_free == 24


def test_a_tree_stops_growing_where_room_ends(make_sequence: MakeSequence) -> None:
    model = fake(num_slots=12, prefix_cache=False)
    seq = drafting_as(make_sequence, list(prompt_of(10)), "a")
    (tree,) = draft_model(model, k=6).propose([seq], [Budget(6, 6)])
    assert tree is not None
    assert tree.tokens.tolist() == greedy(model, seq.tokens, 3)  # the third needs no slot
    assert len(model.kv.scratch("a")) == 0


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


# The ensemble.


def test_members_share_the_nodes_in_proportion() -> None:
    drafter = make("ensemble:[ngram:k=6,suffix:k=2,ngram:k=1]")
    assert isinstance(drafter, Ensemble)
    for nodes, expected in ((9, [6, 2, 1]), (3, [3, 0, 0]), (1, [1, 0, 0]), (18, [12, 4, 2])):
        shares = drafter._shares(Budget(nodes, 4))
        assert [share.num_nodes for share in shares] == expected
        assert all(share.depth == min(share.num_nodes, 4) for share in shares)


def scripted(tree: TokenTree | None, num_draft: int = 4) -> Scripted:
    return Scripted(lambda seq, budget: tree, num_draft=num_draft)


def test_an_ensemble_merges_cuts_and_passes_on(make_sequence: MakeSequence) -> None:
    members = [scripted(TokenTree.chain([3, 4, 5, 6, 7, 8])), scripted(TokenTree.chain([3, 9]))]
    drafter = Ensemble("both", members)
    seq = make_sequence([1, 2])
    (tree,) = drafter.propose([seq], [Budget(8, 8)])
    assert tree is not None
    assert tree.tokens.tolist() == [
        3,
        4,
        5,
        6,
        9,
    ]  # four of the first, two of the second, one shared
    assert tree.parents.tolist() == [-1, 0, 1, 2, 0]
    drafter.forget("x")
    drafter.observe([], [])
    assert [member.forgotten for member in members] == [["x"], ["x"]]


def test_an_ensemble_fails_only_if_nothing_is_proposed(make_sequence: MakeSequence) -> None:
    seq = make_sequence([1, 2])
    failing, good = scripted(None), scripted(TokenTree.chain([5]))
    assert Ensemble("x", [failing, failing]).propose([seq], [Budget(4, 4)]) == [None]
    (tree,) = Ensemble("x", [failing, good]).propose([seq], [Budget(4, 4)])
    assert tree is not None
    assert tree.tokens.tolist() == [5]


def test_members_that_do_not_go_together_are_refused() -> None:
    def needing(needs: Needs) -> Scripted:
        member = scripted(None)
        member.needs = needs
        return member

    with pytest.raises(ConfigError, match="probe nodes"):
        Ensemble("x", [needing(Needs(probe_logits=True)), scripted(None)])
    with pytest.raises(ConfigError, match="different hidden layers"):
        Ensemble("x", [needing(Needs(hidden_layers=(1,))), needing(Needs(hidden_layers=(2,)))])
    assert Ensemble("x", [needing(Needs(hidden_layers=(2,))), scripted(None)]).needs == Needs(
        hidden_layers=(2,)
    )


@pytest.mark.parametrize("verifier", ["rejection", "traversal"])
def test_draws_of_two_members_of_one_tree_are_independent(
    make_sequence: MakeSequence, verifier: str
) -> None:
    model = fake(windows=(None,), absolute=True)
    context = DrafterContext(vocab_size=VOCAB, load_draft=lambda name: model)
    firsts = []
    for seed in range(30):
        seq = make_sequence(
            list(prompt_of(6)), params=SamplingParams(temperature=5.0), seq_id=str(seed)
        )
        seq.verifier, seq.noise = make_verifier(verifier), Noise(seed)
        drafter = make_drafter("ensemble:[draft:m,k=2,draft:m,k=2]", context)
        (tree,) = drafter.propose([seq], [Budget(4, 4)])
        assert tree is not None
        firsts.append(tree.tokens[tree.children(-1)].tolist())
        assert len(tree) == 4
        drafter.forget(seq.id)
    assert sum(a == b for a, b in firsts) < 10


def test_two_drafters_may_share_one_draft_model() -> None:
    harness = make_engine()
    requests = [
        request(prompt_of(8, i), id=str(i), drafter=spec, temperature=1.0)
        for i, spec in enumerate(
            ["draft:good,k=2", "draft:good,k=4", "ensemble:[draft:good,k=3,draft:good,width=2]"]
        )
    ]
    answers = harness.run(*requests)
    assert [a.essence for a in answers] == [plain(r)[0].essence for r in requests]
    assert all(a.seq.stats.accepted for a in answers)


def test_a_drafter_is_made_once_for_all_that_name_it() -> None:
    made = []

    def build() -> Scripted:
        made.append(1)
        return oracle(fake())

    harness = make_engine(drafters={"mine": build})
    harness.run(*(replace(request(drafter="mine"), id=str(i)) for i in range(3)))
    assert len(made) == 1
    assert set(TEST_DRAFTERS) >= {"oracle", "random"}
