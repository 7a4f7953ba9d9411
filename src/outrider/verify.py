"""How much of a draft tree the target keeps, and which token it adds.

Every verifier returns a path of accepted nodes and one more token. All arithmetic is in the dtype
of the laws (float32 in the engine, float64 in the proofs).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from outrider.errors import ConfigError
from outrider.sampling import Chance
from outrider.tree import FIXED, ROOT, TokenTree

BIT_EXACT = "bit-exact"
DISTRIBUTION_EXACT = "distribution-exact"


@dataclass(frozen=True, slots=True)
class Verdict:
    """``path``: accepted nodes from the root down. ``token``: the target's own token after it."""

    path: tuple[int, ...]
    token: int


class Laws(Protocol):
    """The target's laws at the nodes of one tree."""

    def __call__(self, node: int) -> torch.Tensor:
        """Law of the token after ``node`` (ROOT: after the sequence): ``[V]``, sums to 1."""
        ...

    def greedy(self, node: int) -> int | None:
        """The only possible token where the law is a point mass by definition, else None."""
        ...


class Verifier(Protocol):
    name: str
    exactness: str
    """:data:`BIT_EXACT` or :data:`DISTRIBUTION_EXACT` (DESIGN: what each promises)."""

    needs_laws: bool
    """Whether drafted tokens must be drawn from known laws, independently of the target's noise."""

    chains_only: bool

    def verify(self, tree: TokenTree, laws: Laws, chance: Chance, base: int) -> Verdict:
        """``base``: length of the sequence; the root's children stand at this position."""
        ...


def _candidates(tree: TokenTree, node: int) -> list[int]:
    return [child for child in tree.children(node) if not tree.is_probe(child)]


class Coupled:
    """The target draws its own token at every node and the path follows its draws.

    The noise of a draw depends on (seed, position) alone, so the output does not depend on the
    drafts at all (Daliri et al., arXiv 2408.07978).
    """

    name = "coupled"
    exactness = BIT_EXACT
    needs_laws = False
    chains_only = False

    def verify(self, tree: TokenTree, laws: Laws, chance: Chance, base: int) -> Verdict:
        path: list[int] = []
        node = ROOT
        while True:
            token = laws.greedy(node)
            if token is None:
                token = chance.draw(laws(node), base + len(path))
            matching = [c for c in _candidates(tree, node) if tree.tokens[c] == token]
            if not matching:
                return Verdict(tuple(path), token)
            node = matching[0]
            path.append(node)


class _DraftLaws:
    """The law each sibling was drawn from, given the siblings tried before it."""

    def __init__(self, tree: TokenTree) -> None:
        self._tree = tree
        self._current: dict[int, torch.Tensor] = {}

    def ratio(self, child: int, p: torch.Tensor) -> float:
        """p(x) / q(x) of the child's token; 0 for a token that its law could not give, as when the
        law ran out of tokens: it is rejected and p stays."""
        token = int(self._tree.tokens[child])
        row = self._tree.law_of(child)
        if row == FIXED:
            return float(p[token])
        q = float(self._law(row)[token])
        return float(p[token]) / q if q > 0.0 else 0.0

    def excess(self, child: int, p: torch.Tensor) -> torch.Tensor:
        """(p - q)+, a new tensor. For a fixed candidate q is the point mass on its token."""
        row = self._tree.law_of(child)
        if row == FIXED:
            rest = p.clone()
            token = int(self._tree.tokens[child])
            rest[token] = (rest[token] - 1.0).clamp_min(0.0)
            return rest
        return (p - self._law(row)).clamp_min_(0.0)

    def remove(self, child: int) -> None:
        """The child was tried: without replacement, its token cannot be drawn again."""
        row = self._tree.law_of(child)
        if row == FIXED or self._tree.replacement:
            return
        rest = self._law(row).clone()
        rest[int(self._tree.tokens[child])] = 0.0
        total = rest.sum()
        self._current[row] = rest / total if total > 0.0 else rest

    def _law(self, row: int) -> torch.Tensor:
        if row not in self._current:
            assert self._tree.laws is not None
            self._current[row] = self._tree.laws[row]
        return self._current[row]


class Rejection:
    """Recursive rejection sampling, from the root down.

    On a chain this is speculative sampling (Leviathan et al., arXiv 2211.17192); on trees
    SpecInfer's multi-step rule for draws with replacement (arXiv 2305.09781) and Sequoia's for
    draws without (arXiv 2402.12374): accept a child with min(1, p/q), else p becomes
    norm((p - q)+) and the next sibling is tried.
    """

    name = "rejection"
    exactness = DISTRIBUTION_EXACT
    needs_laws = True
    chains_only = False

    def verify(self, tree: TokenTree, laws: Laws, chance: Chance, base: int) -> Verdict:
        path: list[int] = []
        node = ROOT
        while True:
            p = laws(node)
            drafts = _DraftLaws(tree)
            for child in _candidates(tree, node):
                if chance.accept(min(1.0, drafts.ratio(child, p)), base, child + 1):
                    node = child
                    path.append(child)
                    break
                rest = drafts.excess(child, p)
                total = rest.sum()
                p = rest / total if total > 0.0 else p
                drafts.remove(child)
            else:
                return Verdict(tuple(path), chance.draw(p, base + len(path)))


class Traversal:
    """Traversal verification, from the leaves up (arXiv 2505.12398).

    A node's acceptance probability carries the ratio of its whole path; if no descendant of it is
    accepted, the mass left over after them decides about the node itself.
    """

    name = "traversal"
    exactness = DISTRIBUTION_EXACT
    needs_laws = True
    chains_only = False

    def verify(self, tree: TokenTree, laws: Laws, chance: Chance, base: int) -> Verdict:
        verdict = self._visit(ROOT, 1.0, tree, laws, chance, base, ())
        assert verdict is not None  # the root is accepted with probability 1
        return verdict

    def _visit(
        self,
        node: int,
        mass: float,
        tree: TokenTree,
        laws: Laws,
        chance: Chance,
        base: int,
        path: tuple[int, ...],
    ) -> Verdict | None:
        p = laws(node)
        drafts = _DraftLaws(tree)
        for child in _candidates(tree, node):
            reach = min(1.0, mass * drafts.ratio(child, p))
            verdict = self._visit(child, reach, tree, laws, chance, base, (*path, child))
            if verdict is not None:
                return verdict
            rest = drafts.excess(child, mass * p)
            total = float(rest.sum())
            p = rest / total if total > 0.0 else p
            left = total + 1.0 - mass
            mass = total / left if left > 0.0 else 1.0
            drafts.remove(child)
        if node != ROOT and not chance.accept(mass, base, node + 1):
            return None
        return Verdict(path, chance.draw(p, base + len(path)))


class Block(Traversal):
    """Block verification (Sun et al., arXiv 2403.10444): traversal verification of a chain."""

    name = "block"
    chains_only = True

    def verify(self, tree: TokenTree, laws: Laws, chance: Chance, base: int) -> Verdict:
        if not tree.is_chain:
            raise ConfigError("verifier 'block' takes chains; use 'traversal' for trees")
        return super().verify(tree, laws, chance, base)


VERIFIERS: dict[str, type[Verifier]] = {v.name: v for v in (Coupled, Rejection, Block, Traversal)}


def make_verifier(name: str) -> Verifier:
    """The verifier of that name. Raises ConfigError."""
    if name not in VERIFIERS:
        raise ConfigError(f"unknown verifier {name!r}; known: {', '.join(VERIFIERS)}")
    return VERIFIERS[name]()
