"""Every verifier's output law, enumerated exactly, is the target's; wrong verifiers' are not."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from exact import (
    BASE,
    TOLERANCE,
    Drafts,
    Node,
    Oracle,
    Table,
    TableLaws,
    decode_blocks,
    distance,
    grid,
    outcomes,
    output_law,
    product_law,
    random_table,
    reference_tables,
    verify,
)
from outrider.errors import ConfigError
from outrider.sampling import Noise
from outrider.tree import FIXED, ROOT, TokenTree, merge
from outrider.verify import (
    VERIFIERS,
    Block,
    Coupled,
    Rejection,
    Traversal,
    Verifier,
    make_verifier,
)
from wrong_verifiers import (
    BlockStopsAtFirstFailure,
    BlockWithTokenResidual,
    RejectionWithoutRenormalising,
    RejectionWithUnchangedLaw,
    argmax_as_if_drawn,
    drop_unlikely,
)

ON_CHAINS = [Rejection(), Block(), Traversal(), Coupled()]
ON_TREES = [Rejection(), Traversal(), Coupled()]

# Target and draft tables of three-token laws (of four tokens where the last number says so).
KINDS: dict[str, tuple[bool, bool, int]] = {
    "no zeros": (False, False, 3),
    "zeros in p": (True, False, 3),
    "zeros in q": (False, True, 3),
    "zeros in both": (True, True, 3),
    "four tokens": (True, True, 4),
}


def tables(kind: str, num_drafts: int = 1, depth: int = 3) -> tuple[Table, list[Table]]:
    zeros_p, zeros_q, vocab = KINDS[kind]
    target = random_table(11, vocab, depth, zeros=zeros_p)
    drafts = [random_table(12 + i, vocab, depth, zeros=zeros_q) for i in range(num_drafts)]
    return target, drafts


def name(value: object) -> str | None:
    return value.name if hasattr(value, "name") else None


def assert_exact(
    propose: Callable[[Oracle], TokenTree],
    verifier: Verifier,
    target: Table,
    *,
    greedy: bool = False,
) -> float:
    law, accepted = output_law(propose, verifier, target, greedy=greedy)
    gap = distance(law, product_law(target, 3))
    assert gap < TOLERANCE, f"{verifier.name}: the law is off by {gap}"
    assert sum(law.values()) == pytest.approx(1.0, abs=TOLERANCE)
    return accepted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verifier", ON_CHAINS, ids=name)
@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_chains(length: int, verifier: Verifier, kind: str) -> None:
    target, drafts = tables(kind)
    assert_exact(Drafts(grid(*[1] * length), tuple(drafts)).propose, verifier, target)


UNEVEN = (
    Node(children=(Node(), Node(children=(Node(),)))),
    Node(),
    Node(children=(Node(),)),
)
TREES = {
    "(1,1)": grid(1, 1),
    "(2,1)": grid(2, 1),
    "(2,2)": grid(2, 2),
    "(3,)": grid(3),
    "uneven": UNEVEN,
}


@pytest.mark.parametrize("kind", ["no zeros", "zeros in both"])
@pytest.mark.parametrize("replacement", [False, True], ids=["without", "with"])
@pytest.mark.parametrize("verifier", ON_TREES, ids=name)
@pytest.mark.parametrize("shape", TREES)
def test_trees(shape: str, verifier: Verifier, replacement: bool, kind: str) -> None:
    target, drafts = tables(kind)
    propose = Drafts(TREES[shape], tuple(drafts), replacement=replacement).propose
    assert_exact(propose, verifier, target)


@pytest.mark.parametrize("verifier", ON_TREES, ids=name)
def test_the_law_runs_out_of_tokens(verifier: Verifier) -> None:
    """A top-k race over a law of fewer than k tokens gives tokens that the law cannot give."""
    for seed in range(4):
        target = random_table(seed, 3, 3, zeros=seed % 2 == 1)
        draft = random_table(seed + 10, 3, 3, zeros=True)
        draft[()] = torch.tensor([0.0, 0.3, 0.7], dtype=torch.float64)
        assert_exact(Drafts(grid(3, 2), (draft,), pad=True).propose, verifier, target)
        draft[()] = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
        assert_exact(Drafts(grid(2, 1), (draft,), pad=True).propose, verifier, target)


@pytest.mark.parametrize("verifier", ON_TREES, ids=name)
def test_draft_equal_to_target_is_always_accepted(verifier: Verifier) -> None:
    target, _ = tables("zeros in p")
    accepted = assert_exact(Drafts(grid(1, 1), (target,)).propose, verifier, target)
    if verifier.needs_laws:
        assert accepted == pytest.approx(2.0, abs=TOLERANCE)


@pytest.mark.parametrize("replacement", [False, True], ids=["without", "with"])
@pytest.mark.parametrize("verifier", ON_TREES, ids=name)
def test_several_draft_laws_at_one_parent(verifier: Verifier, replacement: bool) -> None:
    """Two drafts side by side, as SpecInfer merges them; both may give the same token."""
    target, drafts = tables("zeros in p", 2)
    shape = (*grid(2, 1), *grid(1, 1, source=1), Node(source=0))
    propose = Drafts(shape, tuple(drafts), replacement=replacement).propose
    assert_exact(propose, verifier, target)


@pytest.mark.parametrize("verifier", ON_TREES, ids=name)
def test_merge(verifier: Verifier) -> None:
    """merge() of two drawn trees and one of fixed candidates, all over the same few tokens."""
    target, drafts = tables("no zeros", 2)
    first = Drafts(grid(1, 1), (drafts[0],))
    second = Drafts(grid(2), (drafts[1],))
    fixed = TokenTree.from_paths([[0, 1], [2]])

    def propose(oracle: Oracle) -> TokenTree:
        one = first.propose(oracle)
        # The oracle names draft noise by node; the second drafter's is different noise.
        return merge([one, second.propose(_Shifted(oracle)), fixed, fixed])

    class _Shifted(Oracle):
        def __init__(self, oracle: Oracle) -> None:
            self._oracle = oracle

        def choose(self, probs: list[float], key: tuple[str, int, int]) -> int:
            return self._oracle.choose(probs, (key[0], key[1], 1))

    for tree, _ in outcomes(propose):
        assert len(tree) == 7
    assert_exact(propose, verifier, target)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verifier", ON_TREES, ids=name)
def test_fixed_candidates(verifier: Verifier, kind: str) -> None:
    """A deterministic top-k (EAGLE-2, Medusa, n-grams): each candidate is a point mass."""
    target, drafts = tables(kind)
    assert_exact(Drafts(grid(2, 2, source=FIXED), tuple(drafts)).propose, verifier, target)
    assert_exact(Drafts(grid(3, 1, source=FIXED), tuple(drafts)).propose, verifier, target)


@pytest.mark.parametrize("verifier", ON_TREES, ids=name)
def test_the_same_fixed_candidate_twice(verifier: Verifier) -> None:
    target, _ = tables("no zeros")
    tree = TokenTree(tokens=np.array([1, 1, 0, 1, 2]), parents=np.array([ROOT, ROOT, ROOT, 0, 1]))
    assert_exact(lambda oracle: tree, verifier, target)


@pytest.mark.parametrize("kind", ["no zeros", "zeros in both"])
@pytest.mark.parametrize("verifier", ON_TREES, ids=name)
def test_fixed_and_drawn_siblings(verifier: Verifier, kind: str) -> None:
    target, drafts = tables(kind)
    fixed = Node(source=FIXED, children=(Node(), Node(source=FIXED, rank=1)))
    shape = (Node(), fixed, Node(children=(Node(),)))
    assert_exact(Drafts(shape, tuple(drafts)).propose, verifier, target)


@pytest.mark.parametrize("verifier", ON_TREES, ids=name)
def test_probe_nodes_are_never_accepted(verifier: Verifier) -> None:
    target, drafts = tables("no zeros")
    probe = Node(probe=True, children=(Node(),))
    shape = (probe, Node(children=(Node(probe=True), Node())), probe)
    assert_exact(Drafts(shape, tuple(drafts), replacement=True).propose, verifier, target)
    only_probes = Drafts((probe, probe), tuple(drafts), replacement=True).propose
    assert assert_exact(only_probes, verifier, target) == 0.0


@pytest.mark.parametrize("verifier", ON_TREES, ids=name)
def test_point_masses(verifier: Verifier) -> None:
    """Temperature 0: one output is possible, and a draft that names it is taken whole."""
    target = {
        prefix: torch.eye(3, dtype=torch.float64)[int(law.argmax())]
        for prefix, law in random_table(4, 3, 3).items()
    }
    _, drafts = tables("no zeros")
    for greedy in (False, True):
        assert_exact(Drafts(grid(2, 2), tuple(drafts)).propose, verifier, target, greedy=greedy)
        right = Drafts(grid(1, 1, source=FIXED), (target,)).propose
        accepted = assert_exact(right, verifier, target, greedy=greedy)
        assert accepted == pytest.approx(2.0, abs=TOLERANCE)


# Expected numbers of accepted nodes, from an independent enumeration with rational numbers.
@pytest.mark.parametrize(
    ("verifier", "shape", "expected"),
    [
        (Rejection(), (1, 1), 1.4895106119370825),
        (Rejection(), (2, 1), 1.6420426632191338),
        (Rejection(), (2, 2), 1.8175106143856143),
        (Block(), (1, 1), 1.5483341413488472),
        (Traversal(), (1, 1), 1.5483341413488472),
        (Traversal(), (2, 1), 1.7071161926308984),
        (Traversal(), (2, 2), 1.8522217365967366),
        (Traversal(), (3, 2), 1.9248779865967367),
    ],
    ids=str,
)
def test_expected_accepted_length(
    verifier: Verifier, shape: tuple[int, ...], expected: float
) -> None:
    target, draft = reference_tables()
    accepted = assert_exact(Drafts(grid(*shape), (draft,)).propose, verifier, target)
    assert accepted == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("num_children", "replacement", "expected"),
    [(1, False, 0.875), (2, False, 0.9625), (3, False, 1.0), (2, True, 0.953125)],
)
def test_root_acceptance(num_children: int, replacement: bool, expected: float) -> None:
    target, draft = reference_tables()
    propose = Drafts(grid(num_children), (draft,), replacement=replacement).propose
    accepted = assert_exact(propose, Rejection(), target)
    assert accepted == pytest.approx(expected, abs=1e-12)


def test_coupled_output_does_not_depend_on_the_drafts() -> None:
    """Whatever tree is offered, one seed gives the tokens of plain decoding."""
    target, drafts = tables("no zeros")
    draft = Drafts(UNEVEN, tuple(drafts))
    trees = [tree for tree, _ in outcomes(draft.propose)][::7]
    longest = 0
    for seed in range(20):
        plain: list[int] = []
        for i in range(3):
            plain.append(Noise(seed).draw(target[tuple(plain)], BASE + i))
        for tree in trees:
            verdict = Coupled().verify(tree, TableLaws(target, tree), Noise(seed), BASE)
            tokens = [int(tree.tokens[node]) for node in verdict.path] + [verdict.token]
            assert tokens[:3] == plain[: len(tokens)], f"seed {seed}, tree {tree}"
            longest = max(longest, len(tokens))
    assert longest == 4  # the trees were followed to their leaves


def test_block_refuses_trees() -> None:
    target, _ = tables("no zeros")
    tree = TokenTree.from_paths([[0], [1]])
    with pytest.raises(ConfigError, match="traversal"):
        verify(Block(), tree, target, Oracle([]))


def test_verifiers_are_found_by_name() -> None:
    for known in VERIFIERS:
        assert make_verifier(known).name == known
    with pytest.raises(ConfigError, match=r"'typical'.*coupled, rejection, block, traversal"):
        make_verifier("typical")


# The harness itself: mistakes that it must see.

NOTICED = 1e-3


def assert_flagged(
    propose: Callable[[Oracle], TokenTree], verifier: Verifier, target: Table
) -> None:
    law, _ = output_law(propose, verifier, target)
    assert sum(law.values()) == pytest.approx(1.0, abs=TOLERANCE)
    assert distance(law, product_law(target, 3)) > NOTICED


@pytest.mark.parametrize("wrong", [BlockStopsAtFirstFailure(), BlockWithTokenResidual()], ids=type)
def test_wrong_block_verification_is_flagged(wrong: Verifier) -> None:
    target, draft = reference_tables()
    assert_flagged(Drafts(grid(1, 1), (draft,)).propose, wrong, target)


@pytest.mark.parametrize(
    "wrong", [RejectionWithoutRenormalising(), RejectionWithUnchangedLaw()], ids=type
)
def test_wrong_draft_law_of_siblings_is_flagged(wrong: Verifier) -> None:
    target, draft = reference_tables()
    assert_flagged(Drafts(grid(2), (draft,)).propose, wrong, target)
    # On a chain the two are right, which shows that it is the siblings that give them away.
    assert_exact(Drafts(grid(1, 1), (draft,)).propose, wrong, target)


@pytest.mark.parametrize("verifier", [Rejection(), Traversal()], ids=name)
def test_a_wrong_say_about_replacement_is_flagged(verifier: Verifier) -> None:
    target, draft = reference_tables()
    drawn = Drafts(grid(2), (draft,))

    def propose(oracle: Oracle) -> TokenTree:
        tree = drawn.propose(oracle)
        return TokenTree(
            tokens=tree.tokens, parents=tree.parents, law=tree.law, laws=tree.laws, replacement=True
        )

    assert_flagged(propose, verifier, target)


@pytest.mark.parametrize("verifier", [Rejection(), Block()], ids=name)
def test_dropping_an_unlikely_draw_is_flagged(verifier: Verifier) -> None:
    target, draft = reference_tables()
    drawn = Drafts(grid(1, 1), (draft,))
    assert_flagged(lambda oracle: drop_unlikely(drawn.propose(oracle), 1 / 3), verifier, target)


@pytest.mark.parametrize("verifier", [Rejection(), Block()], ids=name)
def test_argmax_with_the_law_it_was_not_drawn_from_is_flagged(verifier: Verifier) -> None:
    target, draft = reference_tables()
    first = draft[()]
    tree = argmax_as_if_drawn(torch.stack([first, draft[(int(first.argmax()),)]]))
    assert_flagged(lambda oracle: tree, verifier, target)
    # The very same tokens, given as what they are.
    assert_exact(lambda oracle: TokenTree.chain(tree.tokens), verifier, target)


def test_the_oracle_refuses_noise_used_twice() -> None:
    oracle = Oracle([])
    oracle.accept(0.5, BASE, 1)
    with pytest.raises(AssertionError, match="twice"):
        oracle.accept(0.5, BASE, 1)


# Several blocks in a row under the real noise: what one block looked at must not steer the next.


class _NoiseWithoutBase(Noise):
    """Accept tests keyed by the position of the drafted token alone."""

    def accept(self, probability: float, base: int, test: int) -> bool:
        return super().accept(probability, 0, base + test)


def joint_p_value(verifier: Verifier, make_noise: Callable[[int], Noise], num_seeds: int) -> float:
    """Chi-square of the first three tokens of seeds 0, 1, ... against fair coins.

    The tables hold laws of the next token given the last one."""
    vocab = 2
    fair = torch.tensor([0.5, 0.5], dtype=torch.float64)
    often = torch.tensor([0.9, 0.1], dtype=torch.float64)
    target = {(): fair, (0,): fair, (1,): fair}
    draft = {(): often, (0,): often, (1,): often.flip(0)}
    counts = Counter(
        decode_blocks(verifier, target, draft, make_noise(seed)) for seed in range(num_seeds)
    )
    keys = itertools.product(range(vocab), repeat=3)
    return float(chisquare([counts[key] for key in keys]).pvalue)


@pytest.mark.parametrize("verifier", ON_CHAINS, ids=name)
def test_blocks_in_a_row_are_independent(verifier: Verifier) -> None:
    """A right verifier fails this for one choice of 3000 seeds in 10,000; these are fixed."""
    assert joint_p_value(verifier, Noise, 3000) > 1e-4


def test_noise_shared_between_blocks_is_flagged() -> None:
    assert joint_p_value(Block(), _NoiseWithoutBase, 3000) < 1e-4
