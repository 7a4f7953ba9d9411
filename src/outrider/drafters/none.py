"""Plain decoding: the drafter that guesses nothing."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.drafters.base import Budget, Feedback, Needs
from outrider.request import Sequence
from outrider.tree import TokenTree


class NoDraft:
    """Proposes the empty tree."""

    num_draft = 0
    is_chain = True
    needs = Needs()

    def __init__(self, name: str) -> None:
        self.name = name

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree | None]:
        return [TokenTree.empty() for _ in seqs]

    def observe(self, seqs: Seq[Sequence], feedback: Seq[Feedback]) -> None:
        pass

    def forget(self, seq_id: str) -> None:
        pass
