"""Mistakes that test_joint.py must see: each is sampled as its right counterpart is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest
import torch

from joint import sample
from joint_cases import (
    ALPHA,
    NUM,
    PARAMS,
    PROBES,
    WORLD,
    cases,
    of_all,
    sample_alone,
)
from outrider.request import SamplingParams
from outrider.sampling import Chance, NodeLaws, Noise, law
from outrider.tree import ROOT, TokenTree
from outrider.verify import Laws, Rejection, Verdict, Verifier
from wrong_drafters import WRONG_DRAFTERS
from wrong_verifiers import (
    BlockStopsAtFirstFailure,
    BlockWithTokenResidual,
    RejectionWithUnchangedLaw,
)

WRONG_WORLD = replace(WORLD, extra=WRONG_DRAFTERS)


class NoiseWithoutBase(Noise):
    """Wrong: accept tests keyed by the position of the drafted token alone."""

    def accept(self, probability: float, base: int, test: int) -> bool:
        return super().accept(probability, 0, base + test)


class Wrong:
    """A verifier that is wrong where there are drafts."""

    name = "wrong"
    exactness = "none"
    needs_laws = True
    chains_only = False

    def verify(self, tree: TokenTree, laws: Laws, chance: Chance, base: int) -> Verdict:
        if len(tree) == 0:
            return Verdict((), chance.draw(laws(ROOT), base))
        return self.decide(tree, laws, chance, base)

    def decide(self, tree: TokenTree, laws: Laws, chance: Chance, base: int) -> Verdict:
        raise NotImplementedError


class Given(Wrong):
    """One that is defined elsewhere."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier

    def decide(self, tree: TokenTree, laws: Laws, chance: Chance, base: int) -> Verdict:
        return self._verifier.verify(tree, laws, chance, base)


class ResidualIsTheTarget(Wrong):
    """Chains: accepts with p/q, but draws from p after a rejection."""

    def decide(self, tree: TokenTree, laws: Laws, chance: Chance, base: int) -> Verdict:
        assert tree.laws is not None
        kept = 0
        for node, token in enumerate(tree.tokens.tolist()):
            ratio = float(laws(node - 1)[token] / tree.laws[node][token])
            if not chance.accept(min(1.0, ratio), base, node + 1):
                break
            kept += 1
        return Verdict(tuple(range(kept)), chance.draw(laws(kept - 1), base + kept))


class Misread(Rejection):
    """Rejection sampling from the target's laws under other parameters or another path."""

    def __init__(
        self, change: Callable[[SamplingParams], SamplingParams], *, path: bool = True
    ) -> None:
        self._change = change
        self._path = path

    def verify(self, tree: TokenTree, laws: Laws, chance: Chance, base: int) -> Verdict:
        return super().verify(tree, _Changed(laws, self._change, self._path), chance, base)


class _Changed:
    def __init__(
        self, laws: Laws, change: Callable[[SamplingParams], SamplingParams], path: bool
    ) -> None:
        self._laws = cast(NodeLaws, laws)
        self._change = change
        self._path = path

    def __call__(self, node: int) -> torch.Tensor:
        seq = self._laws._seq
        path = self._laws._tree.path_tokens(node) if self._path else []
        return law(
            self._laws.logits(node),
            self._change(seq.params),
            prompt=seq.request.prompt,
            output=[*seq.output, *path],
            end_tokens=seq.end_tokens,
        )

    def greedy(self, node: int) -> int | None:
        return None


MISTAKES: dict[str, tuple[str, str, str | Verifier, Callable[[int], Noise] | None]] = {
    "residual is p": ("pairs", "draft:1,k=2", ResidualIsTheTarget(), None),
    "block stops at the first failure": (
        "coin",
        "draft:1,k=2",
        Given(BlockStopsAtFirstFailure()),
        None,
    ),
    "argmax said to be drawn, rejection": ("pairs", "argmax said to be drawn", "rejection", None),
    "argmax said to be drawn, block": ("pairs", "argmax said to be drawn", "block", None),
    "drops unlikely draws": ("pairs", "drops unlikely draws", "rejection", None),
    "no top-p": ("pairs", "draft:1,k=2", Misread(lambda p: replace(p, top_p=1.0)), None),
    "no temperature": (
        "pairs",
        "draft:1,k=2",
        Misread(lambda p: replace(p, temperature=1.0)),
        None,
    ),
    "penalties without the path": (
        "pairs",
        "draft:1,k=2",
        Misread(lambda p: p, path=False),
        None,
    ),
    "accept noise used again, block": ("coin", "draft:1,k=2", "block", NoiseWithoutBase),
    "accept noise used again, traversal": ("coin", "draft:1,k=2", "traversal", NoiseWithoutBase),
    "drawn with the target's noise, block": (
        "left",
        "drawn with the target's noise",
        "block",
        None,
    ),
    "siblings' law unchanged": (
        "dice",
        "draft:1,k=3,width=2",
        Given(RejectionWithUnchangedLaw()),
        None,
    ),
    "wrong about replacement, rejection": ("dice", "wrong about replacement", "rejection", None),
    "wrong about replacement, traversal": ("dice", "wrong about replacement", "traversal", None),
    "one stream for two, rejection": ("twins", "one stream for two", "rejection", None),
    "one stream for two, traversal": ("twins", "one stream for two", "traversal", None),
    "equal draws are one node": ("twins", "equal draws are one node", "rejection", None),
    "block with the token residual": (
        "late",
        "draft:1,k=2",
        Given(BlockWithTokenResidual()),
        None,
    ),
    "drawn with the target's noise, rejection": (
        "left",
        "drawn with the target's noise",
        "rejection",
        None,
    ),
}
"""Where each is looked for: in the sample of a pair alone, or in one of the probes."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_flagged(mistake: str) -> None:
    where, drafter, verifier, noise = MISTAKES[mistake]
    if where == "pairs":
        p = of_all(sample_alone(drafter, verifier, seed=40_000_000, world=WRONG_WORLD))
    else:
        p, _ = PROBES[where].sample(drafter, verifier, noise, extra=WRONG_DRAFTERS)
    assert p < ALPHA, f"{where}: not seen, p = {p}"


def test_misreading_nothing_is_right() -> None:
    """What the misreadings change gives them away, not the way they are written."""
    right = sample_alone("draft:1,k=2", Misread(lambda p: p), seed=40_000_000)
    assert of_all(right) > ALPHA


def test_one_wrong_case_in_a_mixed_batch() -> None:
    """Only its own sample shows it."""
    ways: list[str | Verifier] = ["rejection", ResidualIsTheTarget()]
    group = [
        case
        for i, way in enumerate(ways)
        for case in cases("draft:1,k=2", way, 50_000_000 + 10_000 * i, NUM, 5)
    ]
    samples = iter(sample(WORLD.engine(), WORLD.prompt, group))
    p = [of_all(dict(zip(PARAMS, samples, strict=False))) for _ in ways]
    assert p[1] < ALPHA < p[0], p
