"""Trees of draft tokens: what follows from the parents, and how trees are merged and cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.tree import FIXED, ROOT, TokenTree, merge, walk

#        root
#      5      7
#    6   5      7
#    9
BRANCHED = TokenTree.from_paths([[5, 6, 9], [5, 5], [7, 7]])


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 12) -> TokenTree:
    """Any tree of fixed candidates, siblings of one token included."""
    num_nodes = draw(st.integers(0, max_nodes))
    parents = [draw(st.integers(ROOT, i - 1)) for i in range(num_nodes)]
    tokens = [draw(st.integers(0, 2)) for _ in range(num_nodes)]
    return TokenTree(tokens=np.array(tokens, np.int64), parents=np.array(parents, np.int64))


def paths(tree: TokenTree) -> list[list[int]]:
    """The tokens on the way to each node."""
    return [tree.path_tokens(node) for node in range(len(tree))]


def test_from_paths_shares_prefixes() -> None:
    assert BRANCHED.tokens.tolist() == [5, 6, 9, 5, 7, 7]
    assert BRANCHED.parents.tolist() == [ROOT, 0, 1, 0, ROOT, 4]
    assert BRANCHED.tokens.dtype == BRANCHED.parents.dtype == np.int64
    assert len(TokenTree.from_paths([])) == 0
    assert len(TokenTree.from_paths([[], [1]])) == 1


def test_children_depths_and_paths() -> None:
    assert BRANCHED.children(ROOT) == [0, 4]
    assert BRANCHED.children(0) == [1, 3]
    assert BRANCHED.children(5) == []
    assert BRANCHED.depths.tolist() == [1, 2, 3, 2, 1, 2]
    assert BRANCHED.path(2) == [0, 1, 2]
    assert BRANCHED.path_tokens(3) == [5, 5]
    assert BRANCHED.path(ROOT) == BRANCHED.path_tokens(ROOT) == []
    assert list(walk(BRANCHED)) == [ROOT, 0, 1, 2, 3, 4, 5]


def test_empty_tree() -> None:
    tree = TokenTree.empty()
    assert len(tree) == 0
    assert tree.is_chain
    assert tree.children(ROOT) == []
    assert tree.ancestors.shape == (0, 0)
    assert tree.truncate(4, 4) is tree
    assert merge([]).tokens.tolist() == []


def test_chain() -> None:
    laws = torch.eye(4)[:3]
    chain = TokenTree.chain([3, 1, 2], laws)
    assert chain.is_chain
    assert [chain.law_of(node) for node in range(3)] == [0, 1, 2]
    assert chain.depths.tolist() == [1, 2, 3]
    assert TokenTree.chain([3]).law_of(0) == FIXED
    assert TokenTree.chain(np.empty(0, np.int64)).is_chain
    assert not BRANCHED.is_chain
    assert not TokenTree.from_paths([[1], [2]]).is_chain


@given(trees())
def test_ancestors_are_the_paths(tree: TokenTree) -> None:
    for node in range(len(tree)):
        assert np.flatnonzero(tree.ancestors[node]).tolist() == tree.path(node)
        assert int(tree.depths[node]) == len(tree.path(node))


@given(trees(), st.integers(0, 12), st.integers(0, 5))
def test_truncate_keeps_the_first_nodes_of_small_depth(
    tree: TokenTree, num_nodes: int, depth: int
) -> None:
    cut = tree.truncate(num_nodes, depth)
    expected = [path for path in paths(tree) if len(path) <= depth][:num_nodes]
    assert paths(cut) == expected


def test_select_carries_everything_along() -> None:
    tree = TokenTree(
        tokens=np.array([5, 6, 7, 8]),
        parents=np.array([ROOT, 0, ROOT, 2]),
        law=np.array([0, FIXED, 0, 1]),
        laws=torch.rand(2, 9),
        replacement=True,
        scores=np.array([-1.0, -2.0, -3.0, -4.0]),
        probe=np.array([False, False, True, True]),
    )
    kept = tree.select([3, 2])
    assert kept.tokens.tolist() == [7, 8]
    assert kept.parents.tolist() == [ROOT, 0]
    assert [kept.law_of(0), kept.law_of(1)] == [0, 1]
    assert kept.laws is tree.laws
    assert kept.replacement
    assert kept.scores is not None
    assert kept.scores.tolist() == [-3.0, -4.0]
    assert kept.is_probe(0)
    assert kept.is_probe(1)
    assert not tree.is_probe(0)


def test_select_refuses_orphans() -> None:
    with pytest.raises(ValueError, match="without its parent"):
        BRANCHED.select([0, 2])


def test_best_keeps_the_highest_scores() -> None:
    scores = np.array([-0.1, -0.5, -0.9, -0.3, -0.5, -0.6])
    tree = TokenTree(tokens=BRANCHED.tokens, parents=BRANCHED.parents, scores=scores)
    assert paths(tree.best(3)) == [[5], [5, 6], [5, 5]]  # the tie of -0.5 goes to the lower node
    assert paths(tree.best(4)) == [[5], [5, 6], [5, 5], [7]]
    assert tree.best(6) is tree


def test_best_keeps_parents_when_scores_are_equal() -> None:
    scores = np.zeros(6)
    tree = TokenTree(tokens=BRANCHED.tokens, parents=BRANCHED.parents, scores=scores)
    for num_nodes in range(7):
        assert len(tree.best(num_nodes)) == num_nodes


def test_best_breaks_ties_by_index() -> None:
    scores = -(np.arange(99.0) * 37 % 3)
    star = TokenTree(tokens=np.arange(99), parents=np.full(99, ROOT), scores=scores)
    ranked = sorted(range(99), key=lambda node: (-scores[node], node))
    for num_nodes in range(99):
        assert star.best(num_nodes).tokens.tolist() == sorted(ranked[:num_nodes])


def test_best_refuses_drawn_tokens_and_missing_scores() -> None:
    drawn = TokenTree(
        tokens=np.array([1, 2]),
        parents=np.array([ROOT, 0]),
        law=np.array([0, 1]),
        laws=torch.rand(2, 4),
        scores=np.zeros(2),
    )
    for tree in (drawn, BRANCHED):
        with pytest.raises(ValueError, match="needs scores"):
            tree.best(1)


@given(st.lists(trees(max_nodes=6), max_size=4))
def test_merge_offers_every_path_once(group: list[TokenTree]) -> None:
    merged = merge(group)
    offered = {tuple(path) for tree in group for path in paths(tree)}
    assert {tuple(path) for path in paths(merged)} == offered
    if len([tree for tree in group if len(tree)]) > 1:
        assert len(merged) == len(offered)
    assert all(parent < node for node, parent in enumerate(merged.parents.tolist()))


def test_merge_keeps_every_draw() -> None:
    laws = torch.rand(3, 9)
    one = TokenTree.chain([5, 6], laws[:2])
    two = TokenTree.chain([5], laws[2:])
    merged = merge([one, BRANCHED, two])
    assert len(merged) == len(one) + len(BRANCHED) + len(two)
    drawn = [node for node in range(len(merged)) if merged.law_of(node) != FIXED]
    assert [merged.path_tokens(node) for node in drawn] == [[5], [5, 6], [5]]
    assert merged.laws is not None
    assert torch.equal(merged.laws[[merged.law_of(node) for node in drawn]], laws)


def test_merge_takes_the_better_score_of_a_shared_node() -> None:
    one = TokenTree(tokens=np.array([1]), parents=np.array([ROOT]), scores=np.array([-2.0]))
    two = TokenTree(tokens=np.array([1]), parents=np.array([ROOT]), scores=np.array([-1.0]))
    merged = merge([one, two])
    assert merged.scores is not None
    assert merged.scores.tolist() == [-1.0]
    assert merge([one, TokenTree.chain([1])]).scores is None


def test_merge_keeps_probes_apart() -> None:
    """A probe node must not become a candidate, nor a candidate a probe node."""
    probe = TokenTree(tokens=np.array([1]), parents=np.array([ROOT]), probe=np.array([True]))
    candidate = TokenTree.chain([1])
    for group in ([probe, candidate], [candidate, probe]):
        merged = merge(group)
        assert sorted(merged.is_probe(node) for node in range(len(merged))) == [False, True]


def test_merge_refuses_mixed_replacement() -> None:
    laws = torch.rand(1, 9)
    without = TokenTree.chain([1], laws)
    drawn_with = TokenTree(
        tokens=np.array([2]),
        parents=np.array([ROOT]),
        law=np.array([0]),
        laws=laws,
        replacement=True,
    )
    with pytest.raises(ValueError, match="replacement"):
        merge([without, drawn_with])
    assert merge([BRANCHED, drawn_with]).replacement  # fixed candidates were not drawn at all


def test_trees_are_compared_by_identity() -> None:
    assert BRANCHED == BRANCHED
    assert TokenTree.from_paths([[5, 6, 9], [5, 5], [7, 7]]) != BRANCHED


def test_is_sound() -> None:
    assert BRANCHED.is_sound(10)
    assert not BRANCHED.is_sound(9)
    assert not TokenTree.chain([-1]).is_sound(9)
    laws = torch.full((1, 4), 0.25)
    assert TokenTree.chain([1], laws).is_sound(4)
    laws[0, 2] = torch.nan
    assert not TokenTree.chain([1], laws).is_sound(4)


@pytest.mark.parametrize(
    "parts",
    [
        {"parents": np.array([-1, 1])},
        {"parents": np.array([-1, 5])},
        {"parents": np.array([-2, 0])},
        {"parents": np.array([-1])},
        {"parents": np.array([-1, 0, 1])},
        {"parents": np.array([-1.0, 0.0])},
        {"law": np.array([0, 1])},
        {"law": np.array([-2, 0])},
        {"law": np.array([0])},
        {"laws": None},
        {"laws": torch.full((1, 5), 0.2)},
        {"laws": torch.full((4,), 0.25)},
        {"laws": torch.tensor([[1.5, -0.5, 0.0, 0.0]])},
        {"laws": torch.tensor([[torch.inf, 0.0, 0.0, 0.0]])},
        {"scores": np.zeros(1)},
        {"probe": np.zeros(3, np.bool_)},
    ],
)
def test_unsound_trees_are_told_without_an_error(parts: dict[str, Any]) -> None:
    sound: dict[str, Any] = {
        "tokens": np.array([1, 2]),
        "parents": np.array([-1, 0]),
        "law": np.array([0, -1]),
        "laws": torch.full((1, 4), 0.25),
    }
    assert TokenTree(**sound).is_sound(4)
    assert not TokenTree(**sound | parts).is_sound(4)
