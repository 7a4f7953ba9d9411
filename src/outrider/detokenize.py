"""Text from tokens, one token at a time, and the stop strings in it.

Nothing here assumes that a step brings one token: a stop string or a character may begin in one
step and end in another.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(Protocol):
    """What the loop needs of a tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> Any:
        """The text of one list of tokens, a string."""
        ...


class Detokenizer:
    """The text of one sequence's output.

    ``text`` is what was decoded, cut before the first stop string. :meth:`take` hands out what can
    no longer change: a tail that may still become a stop string or that ends inside a character
    is held back until it is decided.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Seq[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._decoded = 0  # tokens before this one are in the text for good
        self._prefix = 0  # decoding starts here: enough context for spaces between words
        self._taken = 0
        self.text = ""

    def push(self, token: int, *, may_stop: bool = True) -> bool:
        """Add one token. Returns whether a stop string is complete; the text then ends before it.

        ``may_stop`` False (before min_tokens) lets stop strings pass as text.
        """
        if self._tokenizer is None:
            return False
        self._ids.append(token)
        before = self._decode(self._prefix, self._decoded)
        after = self._decode(self._prefix, len(self._ids))
        if len(after) <= len(before) or after.endswith(REPLACEMENT):
            if self._is_skipped(token):
                self._ids.pop()
            return False
        return self._grow(after[len(before) :], may_stop)

    def _decode(self, start: int, stop: int) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(self._ids[start:stop], skip_special_tokens=True))

    def _is_skipped(self, token: int) -> bool:
        """Whether decoding leaves a token out (a special one): it need not be decoded again and
        again with those that follow. Twice, since some tokens are no text at the very start only
        (a space before the first word)."""
        assert self._tokenizer is not None
        return not self._tokenizer.decode([token, token], skip_special_tokens=True)

    def _grow(self, piece: str, may_stop: bool) -> bool:
        self._prefix, self._decoded = self._decoded, len(self._ids)
        searched = len(self.text)
        self.text += piece
        if not (may_stop and self._stop):
            return False
        found = [
            (at, stop)
            for stop in self._stop
            if (at := self.text.find(stop, max(0, searched - len(stop) + 1))) >= 0
        ]
        if not found:
            return False
        # What was handed out already cannot be taken back; take() never lets that happen.
        self.text = self.text[: max(min(found)[0], self._taken)]
        return True

    def finish(self) -> None:
        """No token follows: an unfinished character becomes text as it is."""
        if self._tokenizer is None or self._decoded == len(self._ids):
            return
        before = self._decode(self._prefix, self._decoded)
        after = self._decode(self._prefix, len(self._ids))
        self._grow(after[len(before) :], may_stop=False)

    def take(self, *, final: bool = False) -> str:
        """The text decided since the last call; ``final`` hands out all of it."""
        ready = len(self.text) if final else len(self.text) - self._undecided()
        ready = max(ready, self._taken)
        piece = self.text[self._taken : ready]
        self._taken = ready
        return piece

    def _undecided(self) -> int:
        """Length of the longest tail that is the beginning of a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
