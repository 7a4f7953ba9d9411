"""Drafters that look right and change the law of the output under a verifier of laws."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import cast

from joint import ShapeDrafter, World, independent, like_the_target, ranked
from outrider.drafters import make_drafter
from outrider.drafters.base import Budget, Drafter
from outrider.drafters.ensemble import Ensemble
from outrider.request import Sequence
from outrider.tree import ROOT, TokenTree
from wrong_verifiers import drop_unlikely

CHAIN = (-1, 0)
SHAPE = (-1, -1, 0)


def shared_stream(world: World) -> Ensemble:
    """Wrong: two members that draw with the same noise, here from the same model."""
    return Ensemble("shared", [make_drafter(f"draft:{i},k=2", world.context()) for i in (1, 1)])


class MergesEqualDraws(Ensemble):
    """Wrong: draws of the two members that agree become one node."""

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree | None]:
        return [_first_of_each_path(cast(TokenTree, t)) for t in super().propose(seqs, budgets)]


def _first_of_each_path(tree: TokenTree) -> TokenTree:
    first: dict[tuple[int, ...], int] = {}
    for node in range(len(tree)):
        path = tuple(tree.path_tokens(node))
        if tree.parents[node] in (ROOT, *first.values()):
            first.setdefault(path, node)
    return tree.select(list(first.values()))


class Dropping(ShapeDrafter):
    """Wrong: looks at what was drawn and keeps it only if it was likely."""

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree | None]:
        drawn = super().propose(seqs, budgets)
        return [drop_unlikely(cast(TokenTree, tree), 0.3) for tree in drawn]


def merging(world: World) -> Ensemble:
    """Two members that are right by themselves, merged in the wrong way."""
    members = [
        make_drafter("draft:1,k=2", replace(world.context(), stream=stream)) for stream in (0, 1)
    ]
    return MergesEqualDraws("merging", members)


WRONG_DRAFTERS: dict[str, Callable[[World], Drafter]] = {
    "argmax said to be drawn": lambda world: ShapeDrafter(world, CHAIN, ranked, laws=True),
    "drawn with the target's noise": lambda world: ShapeDrafter(
        world, CHAIN, like_the_target, laws=True
    ),
    "wrong about replacement": lambda world: ShapeDrafter(
        world, SHAPE, independent, laws=True, replacement=False
    ),
    "one stream for two": shared_stream,
    "equal draws are one node": merging,
    "drops unlikely draws": lambda world: Dropping(world, CHAIN, independent, laws=True),
}
