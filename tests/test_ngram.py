import random
from dataclasses import fields
from types import SimpleNamespace

import pytest

from outrider.drafters.base import Budget
from outrider.drafters.ngram import Ngram
from outrider.errors import ConfigError
from outrider.request import Request, Sequence


def sequence(tokens, *, id="s", num_draft=None):
    # A drafter looks at the tokens and the request only: the other fields may be anything.
    required = {f.name: None for f in fields(Sequence) if f.default is f.default_factory}
    request = Request(id=id, prompt=tuple(tokens), num_draft=num_draft)
    return Sequence(**(required | {"id": id, "request": request, "tokens": list(tokens)}))


def draft(drafter, seq, num_nodes=100, depth=100):
    [tree] = drafter.propose([seq], [Budget(num_nodes=num_nodes, depth=depth)])
    assert tree.is_chain
    assert tree.law is None
    return tree.tokens.tolist()


def reference(tokens, n, min_n, num_tokens, match):
    """The definition, by looking at every position."""
    for size in range(n, min_n - 1, -1):
        ends = [e for e in range(size, len(tokens)) if tokens[e - size : e] == tokens[-size:]]
        if ends:
            text, start = list(tokens), ends[-1] if match == "latest" else ends[0]
            for i in range(num_tokens):
                text.append(text[start + i])
            return text[len(tokens) :]
    return []


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("match", ["latest", "first"])
def test_equals_the_definition_while_the_text_grows(seed, match):
    rng = random.Random(seed)
    min_n = rng.randint(1, 3)
    n = min_n + rng.randint(0, 2)
    drafter = Ngram("ngram", n=n, min_n=min_n, k=6, match=match)
    seq = sequence([])
    for _ in range(60):
        for _ in range(rng.randint(0, 4)):
            seq.append(rng.randrange(3))
        expected = reference(seq.tokens, n, min_n, 6, match)
        assert draft(drafter, seq) == expected, f"{seed=} {n=} {min_n=} {seq.tokens}"


def test_the_longest_suffix_wins_over_a_later_shorter_one():
    seq = sequence([1, 2, 3, 9, 7, 3, 8, 1, 2, 3])
    assert draft(Ngram("ngram", n=3, k=1), seq) == [9]
    assert draft(Ngram("ngram", n=1, k=1), seq) == [8]


def test_latest_and_first_match():
    seq = sequence([5, 1, 5, 2, 5])
    assert draft(Ngram("ngram", k=1), seq) == [2]
    assert draft(Ngram("ngram", k=1, match="first"), seq) == [1]


def test_periodic_text_gives_a_full_draft():
    assert draft(Ngram("ngram", k=8), sequence([1, 2, 3, 1, 2, 3])) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_min_n_refuses_shorter_matches():
    assert draft(Ngram("ngram", n=3, min_n=2), sequence([1, 2, 3, 1])) == []


@pytest.mark.parametrize("tokens", [[], [1], [1, 2]])
def test_texts_without_a_match_draft_nothing(tokens):
    assert draft(Ngram("ngram", n=3), sequence(tokens)) == []


@pytest.mark.parametrize(
    ("num_draft", "num_nodes", "depth", "expected"),
    [(None, 100, 100, 4), (None, 3, 100, 3), (None, 100, 2, 2), (None, 0, 9, 0), (6, 100, 100, 6)],
)
def test_never_more_than_budget_and_number_wanted(num_draft, num_nodes, depth, expected):
    seq = sequence([1, 2, 1, 2], num_draft=num_draft)
    assert len(draft(Ngram("ngram", k=4), seq, num_nodes, depth)) == expected


def test_each_token_is_indexed_once():
    class Counted(list):
        reads = 0

        def __getitem__(self, key):
            Counted.reads += 1
            return super().__getitem__(key)

    seq = sequence(range(1000))
    seq.tokens = Counted(seq.tokens)
    drafter = Ngram("ngram", n=3)
    draft(drafter, seq)
    Counted.reads = 0
    seq.append(1000)
    draft(drafter, seq)
    assert Counted.reads <= 6  # three n-grams to index, three to look up


def test_sequences_are_kept_apart_and_forgotten():
    drafter = Ngram("ngram", k=1)
    one, two = sequence([1, 2, 1], id="one"), sequence([1, 3, 1], id="two")
    trees = drafter.propose([one, two], [Budget(num_nodes=1, depth=1)] * 2)
    assert [t.tokens.tolist() for t in trees] == [[2], [3]]
    drafter.forget("one")
    drafter.forget("unknown")
    assert list(drafter._indices) == ["two"]
    assert draft(drafter, one) == [2]  # a preempted sequence comes back


@pytest.mark.parametrize(
    "options",
    [{"n": 0}, {"k": 0}, {"min_n": 0}, {"n": 2, "min_n": 3}, {"n": "3"}, {"match": "best"}],
)
def test_bad_options_are_refused(options):
    with pytest.raises(ConfigError, match=r"drafter 'ngram' is .*, expected"):
        Ngram("ngram", **options)


def test_observe_changes_nothing():
    drafter = Ngram("ngram")
    drafter.observe([sequence([1])], [SimpleNamespace()])
    assert drafter._indices == {}
