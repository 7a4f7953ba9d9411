"""Drafters by name, and the ensemble."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint

import numpy as np
import pytest

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
from outrider.metrics import Stats
from outrider.request import SamplingParams, Sequence
from outrider.sampling import Noise
from outrider.tree import TokenTree
from outrider.verify import make_verifier

LOADED: list[str] = []
MakeSequence = Callable[..., Sequence]


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


class Optional(Scripted):
    def __init__(self, name: str, *, limit: float | None = None, k: int | None = 3) -> None:
        super().__init__(lambda seq, budget: TokenTree.empty(), num_draft=k or 1)
        self.name, self.limit = name, limit


class Nameless:
    def __init__(self, *, k: int = 2) -> None: ...


class Unannotated:
    def __init__(self, name: str, *, k=2) -> None: ...  # type: ignore[no-untyped-def]


class Listed:
    def __init__(self, name: str, *, k: list[int] = []) -> None: ...  # noqa: B006


class Required:
    def __init__(self, name: str, *, k: int) -> None: ...


def test_drafters_of_others_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def entries(*, group: str) -> list[EntryPoint]:
        values = {key: f"{__name__}:{key.title()}" for key in WRONG}
        values["optional"] = f"{__name__}:Optional"
        values["absent"] = "no_such_module_here:X"
        values["function"] = f"{__name__}:scripted"
        return [EntryPoint(key, value, group) for key, value in values.items()]

    WRONG = {
        "nameless": "must take 'name' first",
        "unannotated": "its option 'k' has no annotation, expected int, float, str, bool",
        "listed": "its option 'k' has the annotation",
        "required": "its option 'k' needs a default",
        "missing": "cannot be imported",
        "absent": "cannot be imported: No module named 'no_such_module_here'",
        "function": "is no class",
    }
    monkeypatch.setattr(registry, "entry_points", entries)
    lines = {line.partition(":")[0]: line for line in describe()}
    for name, message in WRONG.items():
        with pytest.raises(ConfigError) as caught:
            make(name)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
        assert f"drafter {name!r}" in str(caught.value)
        assert "cannot be used" in lines[name]
    assert lines["optional"] == "optional:limit=none,k=3"
    made = make("optional:limit=0.5,k=None")
    assert isinstance(made, Optional)
    assert (made.limit, made.num_draft) == (0.5, 1)
    assert make(lines["optional"]).num_draft == 3
    with pytest.raises(ConfigError, match="limit is 'x', expected float or none"):
        make("optional:limit=x")


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
    seq.stats = Stats()
    seq.stats = Stats()
    failing, good = scripted(None), scripted(TokenTree.chain([5]))
    assert Ensemble("x", [failing, failing]).propose([seq], [Budget(4, 4)]) == [None]
    (tree,) = Ensemble("x", [failing, good]).propose([seq], [Budget(4, 4)])
    assert tree is not None
    assert tree.tokens.tolist() == [5]
    assert seq.stats.faults == 1  # all failed: the loop counts that one


def test_an_unsound_member_is_a_fault_of_its_own(make_sequence: MakeSequence) -> None:
    seq = make_sequence([1, 2])
    seq.stats = Stats()
    bad = TokenTree(tokens=np.array([3, 4]), parents=np.array([-1, 7]))
    context = DrafterContext(vocab_size=VOCAB, load_draft=load_draft)
    members = [scripted(bad), scripted(TokenTree.chain([5]))]
    (tree,) = Ensemble("x", members, context=context).propose([seq], [Budget(2, 2)])
    assert tree is not None
    assert tree.tokens.tolist() == [5]
    assert seq.stats.faults == 1


def test_members_that_share_a_model_do_not_compute_the_text_again() -> None:
    harness = make_engine()
    one = request(drafter="ensemble:[draft:good,k=2,draft:good,k=2]", max_tokens=60)
    (answer,) = harness.run(replace(one, params=replace(one.params, ignore_eos=True)))
    assert len(answer.tokens) == 60
    # Each member computes every token once, and its own drafts but the last.
    bound = 2 * len(answer.seq.tokens) + answer.seq.stats.target_forwards * 2
    assert harness.drafts["good"].num_computed <= bound


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
