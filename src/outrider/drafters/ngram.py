"""Prompt lookup: what followed the last few tokens when they stood earlier in the same text.

Saxena, "Prompt Lookup Decoding" (2023), with the match that is wanted, earliest or latest, left to
the user: which one accepts more depends on the text.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.drafters.base import Budget, Feedback, Needs
from outrider.errors import ConfigError
from outrider.request import Sequence
from outrider.tree import TokenTree

MATCHES = ("latest", "first")


class Ngram:
    """Drafts the continuation of an earlier occurrence of the last ``n`` tokens, as a chain.

    If the last ``n`` tokens are new, the last ``n - 1`` are looked up, and so on down to
    ``min_n``. ``match`` says which occurrence is continued. ``k`` is the number of draft tokens a
    step. Raises ConfigError for values that make no sense.
    """

    is_chain = True
    needs = Needs()

    def __init__(
        self, name: str, *, n: int = 3, k: int = 8, min_n: int = 1, match: str = "latest"
    ) -> None:
        for option, value in (("n", n), ("k", k), ("min_n", min_n)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{option} of drafter {name!r} is {value!r}, expected 1 or more")
        if min_n > n:
            raise ConfigError(f"min_n of drafter {name!r} is {min_n}, expected at most n = {n}")
        if match not in MATCHES:
            raise ConfigError(
                f"match of drafter {name!r} is {match!r}, expected one of {', '.join(MATCHES)}"
            )
        self.name = name
        self.num_draft = k
        self._sizes = range(n, min_n - 1, -1)
        self._latest = match == "latest"
        self._indices: dict[str, _Index] = {}

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree | None]:
        """One chain of fixed candidates per sequence; the empty tree where nothing matches.

        Every chain has as many tokens as the budget and ``k`` (or the request's ``num_draft``)
        allow.
        """
        return [self._chain(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def observe(self, seqs: Seq[Sequence], feedback: Seq[Feedback]) -> None:
        """Nothing to learn: :meth:`propose` reads the tokens it has not seen yet."""

    def forget(self, seq_id: str) -> None:
        """Drop the index of a sequence."""
        self._indices.pop(seq_id, None)

    def _chain(self, seq: Sequence, budget: Budget) -> TokenTree:
        if seq.id not in self._indices:
            self._indices[seq.id] = _Index(self._sizes, latest=self._latest)
        index = self._indices[seq.id]
        index.catch_up(seq.tokens)
        wanted = self.num_draft if seq.request.num_draft is None else seq.request.num_draft
        num_tokens = min(wanted, budget.num_nodes, budget.depth)
        start = index.find(seq.tokens)
        if start is None or num_tokens < 1:
            return TokenTree.empty()
        # Past the end of the text the draft continues with itself: the text repeats with this
        # period.
        period = len(seq.tokens) - start
        return TokenTree.chain([seq.tokens[start + i % period] for i in range(num_tokens)])


class _Index:
    """Where each n-gram of one text is followed by a token. ``sizes``: longest first."""

    def __init__(self, sizes: range, *, latest: bool) -> None:
        self._latest = latest
        self._next: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in sizes}
        self._seen = 1  # n-grams ending before this position are known

    def catch_up(self, tokens: Seq[int]) -> None:
        """Take in the n-grams that got a successor since the last call."""
        for end in range(self._seen, len(tokens)):
            for size, table in self._next.items():
                if size > end:
                    continue
                gram = tuple(tokens[end - size : end])
                if self._latest:
                    table[gram] = end
                else:
                    table.setdefault(gram, end)
        self._seen = max(self._seen, len(tokens))

    def find(self, tokens: Seq[int]) -> int | None:
        """Position of the token after an earlier occurrence of the longest suffix that has one."""
        for size, table in self._next.items():
            if size < len(tokens):
                start = table.get(tuple(tokens[-size:]))
                if start is not None:
                    return start
        return None
