"""A proposal of a drafter: a tree of tokens, given by parents.

Mask, depths, positions and paths follow from the parents. A chain is a tree in which every node's
parent is the node before it; plain decoding is the empty tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

ROOT = -1
"""The parent of the first nodes: the last token of the sequence itself."""

FIXED = -1
"""In :attr:`TokenTree.law`: the token was chosen, not drawn, so its law is a point mass."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenTree:
    """Draft tokens below the last token of a sequence (:data:`ROOT`).

    ``tokens``, ``parents``: int64 ``[N]``; ``parents[i] < i``. Children of one node are tried in
    the order of their indices.

    ``law``: int64 ``[N]``, or None if every node is a fixed candidate. ``law[i]`` is the row of
    ``laws`` (float ``[P, V]``) from which node i's token was drawn, :data:`FIXED` for a candidate
    that was chosen without chance. Siblings that share a row were drawn one after the other from
    it, without replacement unless ``replacement`` is set.

    ``scores``: float64 ``[N]``, log-confidence of the path that ends in the node; used to prune.

    ``probe``: bool ``[N]``; probe nodes are computed by the target but never accepted.
    """

    tokens: IntArray
    parents: IntArray
    law: IntArray | None = None
    laws: torch.Tensor | None = None
    replacement: bool = False
    scores: FloatArray | None = None
    probe: BoolArray | None = None
    _children: dict[int, list[int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents.tolist()):
            children.setdefault(parent, []).append(node)
        object.__setattr__(self, "_children", children)

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def empty(cls) -> Self:
        """The tree of plain decoding."""
        return cls(tokens=np.empty(0, np.int64), parents=np.empty(0, np.int64))

    @classmethod
    def chain(cls, tokens: Sequence[int] | IntArray, laws: torch.Tensor | None = None) -> Self:
        """One path. ``laws`` ``[N, V]``, row i the law token i was drawn from; None if chosen."""
        num_nodes = len(tokens)
        return cls(
            tokens=np.asarray(tokens, np.int64).reshape(num_nodes),
            parents=np.arange(-1, num_nodes - 1, dtype=np.int64),
            law=None if laws is None else np.arange(num_nodes, dtype=np.int64),
            laws=laws,
        )

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> Self:
        """Fixed candidates given as whole paths; shared prefixes become shared nodes."""
        tokens: list[int] = []
        parents: list[int] = []
        index: dict[tuple[int, int], int] = {}
        for path in paths:
            parent = ROOT
            for token in path:
                key = (parent, int(token))
                if key not in index:
                    index[key] = len(tokens)
                    tokens.append(int(token))
                    parents.append(parent)
                parent = index[key]
        return cls(tokens=np.asarray(tokens, np.int64), parents=np.asarray(parents, np.int64))

    def children(self, node: int) -> list[int]:
        """Indices of the children of ``node`` (:data:`ROOT` for the first nodes), ascending."""
        return self._children.get(node, [])

    @cached_property
    def depths(self) -> IntArray:
        """int64 ``[N]``; the children of the root have depth 1."""
        depths = np.zeros(len(self), np.int64)
        for node, parent in enumerate(self.parents.tolist()):
            depths[node] = 1 if parent == ROOT else depths[parent] + 1
        return depths

    @cached_property
    def ancestors(self) -> BoolArray:
        """bool ``[N, N]``: row i marks the nodes on the path to i, itself included.

        This is the attention mask among the nodes (SpecInfer, arXiv 2305.09781, section 4).
        """
        mask = np.eye(len(self), dtype=np.bool_)
        for node, parent in enumerate(self.parents.tolist()):
            if parent != ROOT:
                mask[node] |= mask[parent]
        return mask

    @property
    def is_chain(self) -> bool:
        """Whether every node's parent is the node before it."""
        return len(self.parents) == len(self) and bool(
            (self.parents == np.arange(-1, len(self) - 1)).all()
        )

    def path(self, node: int) -> list[int]:
        """Indices of the nodes from the root's child to ``node``; empty for :data:`ROOT`."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = int(self.parents[node])
        return path[::-1]

    def path_tokens(self, node: int) -> list[int]:
        """Tokens on the path to ``node``, in order; empty for :data:`ROOT`."""
        return [int(self.tokens[i]) for i in self.path(node)]

    def law_of(self, node: int) -> int:
        """Row of :attr:`laws` that ``node`` was drawn from, or :data:`FIXED`."""
        return FIXED if self.law is None else int(self.law[node])

    def is_probe(self, node: int) -> bool:
        """Whether ``node`` is only computed, never accepted."""
        return self.probe is not None and bool(self.probe[node])

    def is_sound(self, vocab_size: int) -> bool:
        """Whether this is a tree over the vocabulary that a drafter may propose: every parent is
        before its child, every token is in the vocabulary, every law is a row of ``laws``, whose
        numbers are finite and not negative. Nothing else may be asked of a tree that is not."""
        num_nodes = len(self)
        parts = (self.parents, self.law, self.scores, self.probe)
        if self.tokens.ndim != 1 or any(
            part is not None and part.shape != (num_nodes,) for part in parts
        ):
            return False
        num_laws = 0
        if self.laws is not None:
            if self.laws.ndim != 2 or self.laws.shape[1] != vocab_size:
                return False
            num_laws = len(self.laws)
            if num_laws:
                low, high = (float(value) for value in self.laws.aminmax())
                if not (low >= 0.0 and high < np.inf):  # NaN is neither
                    return False
        return (
            _within(self.tokens, 0, vocab_size)
            and _within(self.parents, ROOT, np.arange(num_nodes))
            and (self.law is None or _within(self.law, FIXED, num_laws))
        )

    def select(self, nodes: Sequence[int] | IntArray) -> Self:
        """The tree of the given nodes only; every kept node's parent must be kept too.

        The choice may not depend on the values of drawn tokens: a drawn token that is looked at
        and then dropped changes the law of the output.
        """
        keep = np.sort(np.asarray(nodes, np.int64))
        place = np.full(len(self) + 1, -1, np.int64)  # the last entry stands for ROOT
        place[keep] = np.arange(len(keep))
        parents = place[self.parents[keep]]
        if bool(((parents == -1) & (self.parents[keep] != ROOT)).any()):
            raise ValueError("select() would keep a node without its parent")
        return type(self)(
            tokens=self.tokens[keep],
            parents=parents,
            law=None if self.law is None else self.law[keep],
            laws=self.laws,
            replacement=self.replacement,
            scores=None if self.scores is None else self.scores[keep],
            probe=None if self.probe is None else self.probe[keep],
        )

    def truncate(self, num_nodes: int, depth: int) -> Self:
        """The first ``num_nodes`` nodes of at most the given depth, in index order."""
        if len(self) <= num_nodes and (len(self) == 0 or int(self.depths.max()) <= depth):
            return self
        return self.select(np.flatnonzero(self.depths <= depth)[:num_nodes])

    def best(self, num_nodes: int) -> Self:
        """The ``num_nodes`` nodes of highest score. Only for fixed candidates (EAGLE-2's rerank).

        Scores never rise along a path, so parents stay included; ties go to the lower index.
        """
        if len(self) <= num_nodes:
            return self
        if self.scores is None or self.law is not None:
            raise ValueError("best() needs scores, and candidates that were not drawn by chance")
        return self.select(np.argsort(-self.scores, kind="stable")[:num_nodes])


def _within(values: IntArray, low: int, end: int | IntArray) -> bool:
    """Whether all are integers from ``low`` to before ``end``."""
    return values.dtype == np.int64 and bool(((values >= low) & (values < end)).all())


def merge(trees: Sequence[TokenTree]) -> TokenTree:
    """All proposals under one root (SpecInfer's merge).

    Fixed candidates that agree share a node. Drawn tokens are never merged or dropped, whatever
    their values: each draw keeps its node and its law. Probe nodes stay probe nodes of their own.
    """
    trees = [tree for tree in trees if len(tree)]
    if len(trees) <= 1:
        return trees[0] if trees else TokenTree.empty()
    drawn = [tree for tree in trees if tree.law is not None]
    if any(tree.replacement != drawn[0].replacement for tree in drawn):
        raise ValueError("cannot merge trees drawn with and without replacement")
    tokens: list[int] = []
    parents: list[int] = []
    law: list[int] = []
    scores: list[float] = []
    probe: list[bool] = []
    index: dict[tuple[int, int], int] = {}
    num_laws = 0
    for tree in trees:
        place: dict[int, int] = {ROOT: ROOT}
        for node in range(len(tree)):
            key = (place[int(tree.parents[node])], int(tree.tokens[node]))
            fixed = tree.law_of(node) == FIXED
            score = 0.0 if tree.scores is None else float(tree.scores[node])
            shared = fixed and not tree.is_probe(node)
            if shared and key in index:
                place[node] = index[key]
                scores[index[key]] = max(scores[index[key]], score)
                continue
            place[node] = len(tokens)
            tokens.append(key[1])
            parents.append(key[0])
            law.append(FIXED if fixed else tree.law_of(node) + num_laws)
            scores.append(score)
            probe.append(tree.is_probe(node))
            if shared:
                index[key] = place[node]
        num_laws += 0 if tree.laws is None else len(tree.laws)
    laws = [tree.laws for tree in trees if tree.laws is not None]
    return TokenTree(
        tokens=np.asarray(tokens, np.int64),
        parents=np.asarray(parents, np.int64),
        law=np.asarray(law, np.int64) if laws else None,
        laws=torch.cat(laws) if laws else None,
        replacement=bool(drawn) and drawn[0].replacement,
        scores=None if any(t.scores is None for t in trees) else np.asarray(scores, np.float64),
        probe=np.asarray(probe, np.bool_) if any(probe) else None,
    )


def walk(tree: TokenTree) -> Iterator[int]:
    """The nodes of a tree, the root (:data:`ROOT`) first."""
    yield ROOT
    yield from range(len(tree))
