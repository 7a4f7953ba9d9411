"""Several drafters, one tree (SpecInfer's merge, arXiv 2305.09781)."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.drafters.base import Budget, Drafter, DrafterContext, Feedback, Needs
from outrider.errors import ConfigError
from outrider.request import Sequence
from outrider.tree import TokenTree, merge


class Ensemble:
    """Merges the proposals of its members, which share the node budget in proportion to their k.

    A member's failed or unsound draft costs that draft only. Each is counted as a fault of the
    sequence, here; if no member has anything else, the ensemble fails, which the loop counts.
    Without a ``context`` trees are merged unchecked.
    """

    is_chain = False

    def __init__(
        self, name: str, members: Seq[Drafter], *, context: DrafterContext | None = None
    ) -> None:
        if len(members) < 2:
            raise ConfigError(f"drafter {name!r} has {len(members)} member(s), expected 2 or more")
        if any(member.needs.probe_logits for member in members):
            raise ConfigError(f"drafter {name!r}: a drafter with probe nodes cannot be a member")
        self.name = name
        self.members = tuple(members)
        self._context = context
        self.num_draft = sum(member.num_draft for member in members)
        layers = {layer for member in members for layer in member.needs.hidden_layers}
        if len({member.needs.hidden_layers for member in members} - {()}) > 1:
            raise ConfigError(f"drafter {name!r}: its members need different hidden layers")
        self.needs = Needs(hidden_layers=tuple(sorted(layers)))

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree | None]:
        proposals: list[list[TokenTree]] = [[] for _ in seqs]
        failed = [0] * len(seqs)
        shares = [self._shares(budget) for budget in budgets]
        for number, member in enumerate(self.members):
            mine = [i for i, share in enumerate(shares) if share[number].num_nodes]
            trees = member.propose([seqs[i] for i in mine], [shares[i][number] for i in mine])
            for i, tree in zip(mine, trees, strict=True):
                if tree is None or not self._is_sound(tree):
                    failed[i] += 1
                else:
                    share = shares[i][number]
                    proposals[i].append(tree.truncate(share.num_nodes, share.depth))
        for seq, sound, bad in zip(seqs, proposals, failed, strict=True):
            if sound and bad:
                seq.stats.faults += bad
        return [
            merge(trees) if trees or not bad else None
            for trees, bad in zip(proposals, failed, strict=True)
        ]

    def _is_sound(self, tree: TokenTree) -> bool:
        return self._context is None or tree.is_sound(self._context.vocab_size)

    def _shares(self, budget: Budget) -> list[Budget]:
        """Nodes for each member: all rounded down, what is left over to the first ones."""
        total = max(1, self.num_draft)
        nodes = [budget.num_nodes * member.num_draft // total for member in self.members]
        for i in range(budget.num_nodes - sum(nodes)):
            nodes[i % len(nodes)] += 1
        return [Budget(n, min(n, budget.depth)) for n in nodes]

    def observe(self, seqs: Seq[Sequence], feedback: Seq[Feedback]) -> None:
        for member in self.members:
            member.observe(seqs, feedback)

    def forget(self, seq_id: str) -> None:
        for member in self.members:
            member.forget(seq_id)
