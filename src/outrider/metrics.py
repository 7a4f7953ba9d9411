"""What was drafted, accepted and emitted: counters, and the ratios derived from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import TYPE_CHECKING

from outrider.tree import ROOT, TokenTree

if TYPE_CHECKING:
    from outrider.verify import Verdict


@dataclass(slots=True, kw_only=True)
class Stats:
    """Counters of one sequence, or summed over several. Ratios are of sums, never means of ratios.

    ``target_forwards`` counts the forwards that emitted tokens; ``prompt_forwards`` those that
    computed a part of a prompt only. ``accepted`` counts accepted draft tokens that were emitted,
    so ``accepted <= drafted`` and ``accepted <= tokens``. ``tried_at[i]`` and ``accepted_at[i]``
    belong to depth i + 1 of the draft: a depth is tried where every depth before it was accepted.
    ``faults`` counts drafts that failed (a step may have several, one of each member of an
    ensemble), and steps that gave nothing because the target's logits were no numbers.
    ``seconds`` is wall time spent in the steps of the sequence (shared by all its sequences).
    """

    tokens: int = 0
    target_forwards: int = 0
    prompt_forwards: int = 0
    drafted: int = 0
    accepted: int = 0
    faults: int = 0
    preemptions: int = 0
    seconds: float = 0.0
    draft_seconds: float = 0.0
    forward_seconds: float = 0.0
    verify_seconds: float = 0.0
    commit_seconds: float = 0.0
    tried_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per target forward, the bonus token included; 0 before the first."""
        return self.tokens / self.target_forwards if self.target_forwards else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted per drafted token; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """For each depth, how often a draft was accepted given that all before it were."""
        return [a / t for a, t in zip(self.accepted_at, self.tried_at, strict=True) if t]

    def record_step(self, tree: TokenTree, verdict: Verdict | None, *, emitted: int) -> None:
        """One forward: the draft it verified and how many tokens of the verdict were emitted.

        ``verdict`` None: a part of a prompt was computed. Drafts behind the end of the sequence
        count as drafted, not as accepted; probe nodes are no drafts.
        """
        if verdict is None:
            self.prompt_forwards += 1
            return
        self.target_forwards += 1
        self.tokens += emitted
        self.drafted += len(tree) if tree.probe is None else int((~tree.probe).sum())
        accepted = min(len(verdict.path), emitted)
        self.accepted += accepted
        ended_inside = emitted <= len(verdict.path)
        last = verdict.path[-1] if verdict.path else ROOT
        untried = all(tree.is_probe(child) for child in tree.children(last))
        tried = accepted if ended_inside or untried else accepted + 1
        while len(self.tried_at) < tried:
            self.tried_at.append(0)
            self.accepted_at.append(0)
        for depth in range(tried):
            self.tried_at[depth] += 1
            self.accepted_at[depth] += depth < accepted

    def record_times(self, clock: Sequence[float]) -> None:
        """Seconds of one step, from the five readings start, drafted, computed, verified, end."""
        parts = [after - before for before, after in pairwise(clock)]
        self.draft_seconds += parts[0]
        self.forward_seconds += parts[1]
        self.verify_seconds += parts[2]
        self.commit_seconds += parts[3]
        self.seconds += clock[-1] - clock[0]


def total(stats: Iterable[Stats]) -> Stats:
    """The sum of all counters."""
    result = Stats()
    for one in stats:
        for item in fields(Stats):
            mine, other = getattr(result, item.name), getattr(one, item.name)
            if isinstance(mine, list):
                size = max(len(mine), len(other))
                mine.extend([0] * (size - len(mine)))
                setattr(
                    result,
                    item.name,
                    [a + b for a, b in zip(mine, other + [0] * (size - len(other)), strict=True)],
                )
            else:
                setattr(result, item.name, mine + other)
    return result
