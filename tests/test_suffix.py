import math
import random
from collections import Counter
from dataclasses import fields

import numpy as np
import pytest

from outrider.drafters.base import Budget
from outrider.drafters.suffix import Automaton, Store, Suffix
from outrider.errors import ConfigError
from outrider.request import FinishReason, Request, Sequence


def sequence(prompt, output=(), *, id="s", scope=None, num_draft=None):
    # A drafter looks at the tokens and the request only: the other fields may be anything.
    required = {f.name: None for f in fields(Sequence) if f.default is f.default_factory}
    request = Request(id=id, prompt=tuple(prompt), scope=scope, num_draft=num_draft)
    return Sequence(**(required | {"id": id, "request": request, "tokens": [*prompt, *output]}))


def propose(drafter, seq, num_nodes=100, depth=100):
    [tree] = drafter.propose([seq], [Budget(num_nodes=num_nodes, depth=depth)])
    assert tree.law is None
    return tree


def finish(drafter, seq):
    """Run and end a sequence as the loop does."""
    drafter.observe([seq], [None])
    seq.finish = FinishReason.STOP
    drafter.forget(seq.id)


def followers(texts, context):
    """How often each token follows ``context``; -1 for the end of a finished text."""
    counts = Counter()
    for text in texts:
        for end in range(len(context), len(text)):
            if text[end - len(context) : end] == context:
                counts[text[end]] += 1
    return counts


def reference_score(texts, context, *, k, depth, factor, offset, min_prob):
    """Best score of the greedy walks from all matches, by the definition; None if one is a tie."""
    best = 0.0
    for length in range(1, min(depth, len(context)) + 1):
        limit = min(k, math.floor(factor * length + offset))
        prob, path, score = 1.0, context[len(context) - length :], 0.0
        for _ in range(limit):
            counts = followers(texts, path[-depth:])
            total = sum(counts.values())
            counts.pop(-1, None)
            top = max(counts.values(), default=0)
            prob *= top / total if total else 0.0
            if not counts or prob < min_prob:
                break
            if list(counts.values()).count(top) > 1:
                return None
            path = [*path, max(counts, key=counts.get)]
            score += prob
        best = max(best, score)
    return best


@pytest.mark.parametrize("seed", range(20))
def test_automaton_counts_every_substring(seed):
    rng = random.Random(seed)
    depth = rng.randint(1, 6)
    text = []
    automaton = Automaton(depth)
    for _ in range(60):
        token = rng.randrange(rng.choice([1, 2, 3]))
        text.append(token)
        automaton.append(token)
        start = rng.randrange(len(text))
        context = text[start : start + rng.randint(1, depth)]
        found = automaton.matches(context)
        assert found[0][0] == len(context), f"{seed=} {text} {context}"
        for length, state in found:
            expected = followers([text], context[len(context) - length :])
            assert dict(automaton.counts(state)) == expected, f"{seed=} {text} {context}"
    assert len(automaton) == 60
    assert len(automaton._link) <= 2 * 60


@pytest.mark.parametrize("seed", range(20))
def test_steps_slide_a_window_of_depth_tokens(seed):
    rng = random.Random(seed)
    depth = 3
    text = [rng.randrange(2) for _ in range(80)]
    automaton = Automaton(depth)
    for token in text:
        automaton.append(token)
    [(length, state), *_] = automaton.matches(text[:1])
    path = text[:1]
    for token in text[1:40]:
        state = automaton.step(state, length, token)
        length = min(length + 1, depth)
        path.append(token)
        assert dict(automaton.counts(state)) == followers([text], path[-depth:]), f"{seed=}"


def test_score_equals_the_definition():
    num_checked = 0
    for seed in range(60):
        rng = random.Random(seed)
        options = {
            "k": rng.randint(1, 6),
            "depth": rng.randint(1, 8),
            "factor": rng.choice([0.5, 1.0, 2.0]),
            "offset": rng.choice([-1.0, 0.0, 1.5]),
            "min_prob": rng.choice([0.0, 0.1, 0.4]),
        }
        drafter = Suffix("suffix", **options)
        finished = []
        for i in range(3):
            output = [rng.randrange(4) for _ in range(20)]
            finish(drafter, sequence([], output, id=str(i), scope="a"))
            finished.append([*output, -1])
        seq = sequence([], scope="a")
        for _ in range(60):
            seq.append(rng.randrange(4))
            own = reference_score([seq.tokens], seq.tokens, **options)
            shared = reference_score(finished, seq.tokens, **options)
            if own is None or shared is None:
                continue
            num_checked += 1
            tree = propose(drafter, seq)
            score = float(np.exp(tree.scores).sum()) if len(tree) else 0.0
            assert score == pytest.approx(max(own, shared)), f"{seed=} {options} {seq.tokens}"
    assert num_checked > 300


def test_the_walk_stops_below_min_prob():
    text = [1, 2, 9, 1, 2, 9, 1, 2, 8, 1, 3, 1]  # 1 -> 2 three times of four, 2 -> 9 two of three
    seq = sequence(text)
    options = {"k": 4, "depth": 1, "factor": 4.0}
    tree = propose(Suffix("suffix", min_prob=0.5, **options), seq)
    assert tree.tokens.tolist() == [2, 9, 1]
    assert np.exp(tree.scores).tolist() == pytest.approx([0.75, 0.5, 0.5])
    tree = propose(Suffix("suffix", min_prob=0.51, **options), seq)
    assert tree.tokens.tolist() == [2]


def test_the_end_of_the_own_text_is_no_continuation():
    tree = propose(Suffix("suffix", k=1), sequence([1, 2, 1]))
    assert tree.tokens.tolist() == [2]
    assert tree.scores.tolist() == [0.0]


def test_factor_and_offset_bound_the_draft_by_the_match():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]  # the match has two tokens
    assert len(propose(Suffix("suffix"), sequence(text))) == 2
    assert len(propose(Suffix("suffix", factor=2.0), sequence(text))) == 4
    assert len(propose(Suffix("suffix", factor=2.0, offset=-1.0), sequence(text))) == 3
    assert len(propose(Suffix("suffix", factor=0.0, offset=0.5), sequence(text))) == 0


def test_periodic_text_gives_a_full_draft():
    tree = propose(Suffix("suffix", k=8), sequence([1, 2, 3] * 6))
    assert tree.is_chain
    assert tree.tokens.tolist() == [1, 2, 3, 1, 2, 3, 1, 2]


def test_ties_go_to_the_token_seen_last():
    assert propose(Suffix("suffix", k=1), sequence([1, 2, 1, 3, 1])).tokens.tolist() == [3]


def test_counts_add_up_over_the_segments_of_a_store():
    drafter = Suffix("suffix", k=1, max_cached_tokens=80)  # segments of ten tokens
    for i, token in enumerate([2, 2, 2, 3, 3]):
        finish(drafter, sequence([], [1, token, *range(10, 17)], id=str(i), scope="x"))
    assert len(drafter.store.segments("x")) == 5
    tree = propose(drafter, sequence([1], scope="x"))
    assert tree.tokens.tolist() == [2]
    assert np.exp(tree.scores).tolist() == pytest.approx([0.6])


def test_width_makes_a_tree_of_the_most_probable_paths():
    text = [1, 2, 7, 1, 2, 7, 1, 3, 8, 1, 2, 6, 1]
    drafter = Suffix("suffix", k=4, width=2, depth=1, factor=4.0, min_prob=0.0)
    assert not drafter.is_chain
    tree = propose(drafter, sequence(text))
    # 1 -> 2 (3/4), 3 (1/4); 2 -> 7 (2/3), 6 (1/3); 7 -> 1
    assert tree.tokens.tolist() == [2, 7, 1, 2]
    assert tree.parents.tolist() == [-1, 0, 1, 2]
    tree = propose(drafter, sequence(text), num_nodes=4, depth=2)
    assert tree.tokens.tolist() == [2, 7, 3, 6]
    assert tree.parents.tolist() == [-1, 0, -1, 0] or tree.parents.tolist() == [-1, 0, 0, -1]
    assert np.all(np.diff(tree.scores) <= 1e-12)
    assert tree.best(2).tokens.tolist() == [2, 7]


@pytest.mark.parametrize(
    ("num_draft", "num_nodes", "depth", "expected"),
    [(None, 100, 100, 4), (None, 3, 100, 3), (None, 100, 2, 2), (None, 9, 0, 0), (6, 100, 100, 6)],
)
@pytest.mark.parametrize("width", [1, 2])
def test_never_more_than_budget_and_number_wanted(num_draft, num_nodes, depth, expected, width):
    seq = sequence([1, 2] * 10, num_draft=num_draft)
    tree = propose(Suffix("suffix", k=4, width=width), seq, num_nodes, depth)
    assert len(tree) == expected
    assert len(tree) == 0 or tree.depths.max() <= depth


def test_finished_outputs_are_shared_within_their_scope_only():
    drafter = Suffix("suffix")
    finish(drafter, sequence([9], [1, 2, 3, 4], id="a", scope="alice"))
    finish(drafter, sequence([9], [1, 2, 5, 6], id="n"))
    assert propose(drafter, sequence([1, 2], id="b", scope="alice")).tokens.tolist() == [3, 4]
    assert len(propose(drafter, sequence([1, 2], id="c", scope="bob"))) == 0
    assert len(propose(drafter, sequence([1, 2], id="d"))) == 0
    assert len(drafter.store) == 5  # the output and its end mark; never the prompt
    assert drafter.store.num_scopes == 1


def test_the_end_of_a_finished_output_counts_but_is_never_drafted():
    drafter = Suffix("suffix", k=4, factor=4.0)
    finish(drafter, sequence([], [7, 1, 2], id="a", scope="x"))
    finish(drafter, sequence([], [7, 1], id="b", scope="x"))
    tree = propose(drafter, sequence([7], id="c", scope="x"))
    assert tree.tokens.tolist() == [1, 2]
    assert np.exp(tree.scores).tolist() == pytest.approx([1.0, 0.5])


def test_a_preempted_sequence_joins_once_and_whole():
    drafter = Suffix("suffix")
    seq = sequence([9], [1, 2], scope="x")
    propose(drafter, seq)
    drafter.forget(seq.id)  # preempted
    assert len(drafter.store) == 0
    seq.append(3)
    assert drafter.propose([seq], [Budget(num_nodes=4, depth=4)])[0] is not None
    seq.finish = FinishReason.LENGTH
    drafter.forget(seq.id)
    drafter.forget(seq.id)
    assert len(drafter.store) == 4
    [segment] = drafter.store.segments("x")
    [(_, state)] = segment.matches([1])
    assert dict(segment.counts(state)) == {2: 1}
    assert drafter._texts == {}


def test_the_better_source_wins():
    drafter = Suffix("suffix", k=4)
    finish(drafter, sequence([], [1, 2, 3, 4, 5, 6], id="a", scope="x"))
    # The own text continues 3 with 9, but the shared store matches three tokens.
    tree = propose(drafter, sequence([3, 9, 1, 2, 3], id="b", scope="x"))
    assert tree.tokens.tolist() == [4, 5, 6]


def test_eviction_takes_the_oldest_and_its_counts():
    store = Store(max_tokens=40, depth=8)
    for i in range(30):
        store.add("x" if i % 2 else "y", [i, 100 + i, 7, 8])
        assert len(store) <= 40
        assert i < 8 or len(store) > 30  # a segment goes, not all of it
    segments = store.segments("x")
    assert sum(map(len, segments)) + sum(map(len, store.segments("y"))) == len(store)
    counts = Counter()
    for segment in segments:
        for _, state in segment.matches([7])[:1]:
            counts.update(dict(segment.counts(state)))
    assert 1 <= counts[8] <= 4  # 20 tokens of this scope at most
    assert not any(segment.matches([1]) for segment in segments)
    assert any(segment.matches([29]) for segment in segments)
    for i in range(20):
        store.add("z", [i, i, i])
    assert store.num_scopes == 1  # the scopes that fell silent are gone
    assert len(store._order) == len(store.segments("z"))


def test_a_text_longer_than_the_store_keeps_its_end():
    store = Store(max_tokens=16, depth=4)
    store.add("x", list(range(100)))
    assert len(store) <= 16
    assert any(segment.matches([99]) for segment in store.segments("x"))
    assert not any(segment.matches([50]) for segment in store.segments("x"))


def test_periodic_text_costs_a_bounded_number_of_steps_a_token():
    class Counted(list):
        writes = 0

        def __setitem__(self, key, value):
            Counted.writes += 1
            super().__setitem__(key, value)

    automaton = Automaton(depth=16)
    automaton._count = Counted(automaton._count)
    for _ in range(1000):
        automaton.append(5)
    assert Counted.writes <= 17 * 1000


@pytest.mark.parametrize(
    "options",
    [
        {"k": 0},
        {"depth": 0},
        {"depth": 2.5},
        {"width": 0},
        {"max_cached_tokens": 1},
        {"factor": -1.0},
        {"offset": math.inf},
        {"min_prob": 1.5},
        {"min_prob": math.nan},
    ],
)
def test_bad_options_are_refused(options):
    with pytest.raises(ConfigError, match=r"drafter 'suffix' is .*, expected"):
        Suffix("suffix", **options)
