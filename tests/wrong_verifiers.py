"""Verifiers and proposals that look right and change the law of the output.

Each is a mistake that was made somewhere. The enumeration must tell every one of them from the
real thing.
"""

from __future__ import annotations

import torch

from outrider.sampling import Chance
from outrider.tree import ROOT, TokenTree
from outrider.verify import DISTRIBUTION_EXACT, Laws, Verdict


def _norm(weights: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    total = weights.sum()
    return weights / total if total > 0.0 else otherwise


class _Wrong:
    name = "wrong"
    exactness = DISTRIBUTION_EXACT
    needs_laws = True
    chains_only = False


class _BlockTests(_Wrong):
    """The quantities of block verification (arXiv 2403.10444) on a chain of drawn tokens."""

    chains_only = True

    def tests(self, tree: TokenTree, laws: Laws) -> tuple[list[float], list[float]]:
        """Path masses p_0 .. p_n and the acceptance probabilities h_0 .. h_n."""
        assert tree.laws is not None
        masses = [1.0]
        for node in range(len(tree)):
            token = int(tree.tokens[node])
            ratio = float(laws(node - 1)[token] / tree.laws[node][token])
            masses.append(min(1.0, masses[-1] * ratio))
        passes = [1.0]
        for i in range(1, len(tree)):
            left = float((masses[i] * laws(i - 1) - tree.laws[i]).clamp_min(0.0).sum())
            below = left + 1.0 - masses[i]
            passes.append(left / below if below > 0.0 else 1.0)
        return masses, [*passes, masses[-1]] if len(tree) else passes

    def residual(self, tree: TokenTree, laws: Laws, kept: int, mass: float) -> torch.Tensor:
        assert tree.laws is not None
        p = laws(kept - 1)
        if kept == len(tree):
            return p
        return _norm((mass * p - tree.laws[kept]).clamp_min(0.0), p)


class BlockStopsAtFirstFailure(_BlockTests):
    """Block verification that does not look past the first test that fails."""

    def verify(self, tree: TokenTree, laws: Laws, chance: Chance, base: int) -> Verdict:
        masses, passes = self.tests(tree, laws)
        kept = 0
        while kept < len(tree) and chance.accept(passes[kept + 1], base, kept + 1):
            kept += 1
        rest = self.residual(tree, laws, kept, masses[kept])
        return Verdict(tuple(range(kept)), chance.draw(rest, base + kept))


class BlockWithTokenResidual(_BlockTests):
    """Block acceptance, but the token after it from token-level rejection's residual."""

    def verify(self, tree: TokenTree, laws: Laws, chance: Chance, base: int) -> Verdict:
        _, passes = self.tests(tree, laws)
        kept = len(tree)
        while kept > 0 and not chance.accept(passes[kept], base, kept):
            kept -= 1
        rest = self.residual(tree, laws, kept, 1.0)
        return Verdict(tuple(range(kept)), chance.draw(rest, base + kept))


class _Recursive(_Wrong):
    """Recursive rejection sampling whose draft law after a rejected sibling is ``after``."""

    def after(self, q: torch.Tensor, token: int) -> torch.Tensor:
        raise NotImplementedError

    def verify(self, tree: TokenTree, laws: Laws, chance: Chance, base: int) -> Verdict:
        assert tree.laws is not None
        node, path = ROOT, []
        while children := tree.children(node):
            p, q = laws(node), tree.laws[tree.law_of(children[0])]
            for child in children:
                token = int(tree.tokens[child])
                if chance.accept(min(1.0, float(p[token] / q[token])), base, child + 1):
                    node = child
                    path.append(child)
                    break
                p = _norm((p - q).clamp_min(0.0), p)
                q = self.after(q, token)
            else:
                return Verdict(tuple(path), chance.draw(p, base + len(path)))
        return Verdict(tuple(path), chance.draw(laws(node), base + len(path)))


class RejectionWithoutRenormalising(_Recursive):
    """The rejected token is taken out of q, but the rest of q is not scaled up to 1."""

    def after(self, q: torch.Tensor, token: int) -> torch.Tensor:
        return q.index_fill(0, torch.tensor([token]), 0.0)


class RejectionWithUnchangedLaw(_Recursive):
    """q stays as it was: right for draws with replacement, wrong for draws without."""

    def after(self, q: torch.Tensor, token: int) -> torch.Tensor:
        return q


def drop_unlikely(tree: TokenTree, threshold: float) -> TokenTree:
    """A chain cut before its first token of draft probability below ``threshold``.

    Wrong: the token was drawn and looked at, and its value decides whether it counts.
    """
    assert tree.laws is not None
    for node in range(len(tree)):
        if float(tree.laws[node][int(tree.tokens[node])]) < threshold:
            return tree.truncate(node, len(tree))
    return tree


def argmax_as_if_drawn(laws: torch.Tensor) -> TokenTree:
    """A chain of the most likely tokens of ``laws`` ``[N, V]``, said to be drawn from them."""
    return TokenTree.chain(laws.argmax(-1).numpy(), laws)
