"""Suffix decoding: the continuations that followed the longest matches of the text's end, by count.

Oliaro et al., arXiv 2411.04975. The paper's suffix trees are suffix automata here: the same counts,
linear memory, constant amortised time a token.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from outrider.drafters.base import Budget, Feedback, Needs
from outrider.errors import ConfigError
from outrider.request import Sequence
from outrider.tree import ROOT, TokenTree

END = -1
"""Stands after every text of a shared store: a text may also have ended here."""

SEGMENTS = 8
"""A shared store forgets this fraction of its size at once."""


class Suffix:
    """Drafts from the request's own tokens and, within its scope, from finished outputs.

    For every suffix of the text, up to ``depth`` tokens, that occurred before, likely
    continuations are followed from the most probable on: a token's probability is its share of
    what followed that suffix, a path's the product. Paths below ``min_prob`` are left out; a match
    of m tokens gives at most ``factor * m + offset`` nodes. The score of a match is the sum of its
    path probabilities, the expected number of accepted tokens; the best match is proposed.

    ``k`` is the number of draft nodes a step, ``width`` the most children of one node: 1 makes
    chains. ``max_cached_tokens`` bounds the finished outputs of all scopes together; the oldest
    are forgotten first. One cached token takes about half a kilobyte.

    A request without a scope neither reads nor writes anything shared. The output of one with a
    scope joins the scope's store in :meth:`forget`, if its ``finish`` is set by then: a sequence
    that was only preempted comes back. Raises ConfigError for values that make no sense.
    """

    needs = Needs()

    def __init__(
        self,
        name: str,
        *,
        k: int = 8,
        depth: int = 64,
        factor: float = 1.0,
        offset: float = 0.0,
        min_prob: float = 0.1,
        width: int = 1,
        max_cached_tokens: int = 200_000,
    ) -> None:
        for option, value, low in (
            ("k", k, 1),
            ("depth", depth, 1),
            ("width", width, 1),
            ("max_cached_tokens", max_cached_tokens, SEGMENTS),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ConfigError(
                    f"{option} of drafter {name!r} is {value!r}, expected {low} or more"
                )
        for option, number, least, most, expected in (
            ("factor", factor, 0.0, math.inf, "0 or more"),
            ("offset", offset, -math.inf, math.inf, "a finite number"),
            ("min_prob", min_prob, 0.0, 1.0, "from 0 to 1"),
        ):
            good = isinstance(number, int | float) and math.isfinite(number)
            if not good or not least <= number <= most:
                raise ConfigError(
                    f"{option} of drafter {name!r} is {number!r}, expected {expected}"
                )
        self.name = name
        self.num_draft = k
        self.is_chain = width == 1
        self.store = Store(max_cached_tokens, depth)
        self._depth = depth
        self._factor = factor
        self._offset = offset
        self._min_prob = min_prob
        self._width = width
        self._texts: dict[str, _Text] = {}

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree | None]:
        """One tree of fixed candidates per sequence, empty where nothing matches.

        ``scores`` are the logarithms of the path probabilities; nodes stand in falling order.
        """
        return [self._tree(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def observe(self, seqs: Seq[Sequence], feedback: Seq[Feedback]) -> None:
        """Note who ran, so that its output is known at the end even if it never proposed."""
        for seq in seqs:
            self._text(seq)

    def forget(self, seq_id: str) -> None:
        """Drop what is kept for a sequence; a finished one with a scope joins the shared store."""
        text = self._texts.pop(seq_id, None)
        if text is None or text.seq.finish is None or text.seq.request.scope is None:
            return
        self.store.add(text.seq.request.scope, text.seq.output)

    def _text(self, seq: Sequence) -> _Text:
        if seq.id not in self._texts:
            self._texts[seq.id] = _Text(seq, Automaton(self._depth))
        return self._texts[seq.id]

    def _tree(self, seq: Sequence, budget: Budget) -> TokenTree:
        own = self._text(seq).automaton
        for token in seq.tokens[len(own) :]:
            own.append(token)
        wanted = self.num_draft if seq.request.num_draft is None else seq.request.num_draft
        num_nodes = min(wanted, budget.num_nodes)
        context = seq.tokens[-self._depth :]
        best = _Guess()
        for source in ([own], self.store.segments(seq.request.scope)):
            best = self._best(source, context, num_nodes, budget.depth, best)
        return best.tree() if best.tokens else TokenTree.empty()

    def _best(
        self, source: Seq[Automaton], context: Seq[int], num_nodes: int, depth: int, best: _Guess
    ) -> _Guess:
        """The guess with the highest score among ``best`` and those of one source of texts."""
        for length, places in _matches(source, context):
            limit = min(num_nodes, math.floor(self._factor * length + self._offset))
            if limit <= best.score:
                break  # no node adds more than 1, and shorter matches may have fewer nodes yet
            guess = self._grow(places, length, limit, depth)
            if guess.score > best.score:
                best = guess
        return best

    def _grow(self, places: list[_Place], length: int, num_nodes: int, depth: int) -> _Guess:
        """Follow the most probable paths first, at most ``num_nodes`` nodes, ``depth`` deep."""
        guess = _Guess()
        heap: list[tuple[float, int, int, int, int, list[_Place]]] = []
        num_pushed = 0

        def push_children(parent: int, prob: float, level: int, places: list[_Place]) -> None:
            nonlocal num_pushed
            counts = _counts(places)
            total = sum(counts.values())
            counts.pop(END, None)
            # Ties go to the token that was seen last.
            latest_first = reversed(counts.items())
            for token, count in heapq.nlargest(self._width, latest_first, key=lambda item: item[1]):
                share = prob * count / total
                if share >= self._min_prob:
                    num_pushed += 1
                    heapq.heappush(heap, (-share, num_pushed, parent, token, level, places))

        if depth > 0:
            push_children(ROOT, 1.0, 1, places)
        while heap and len(guess.tokens) < num_nodes:
            negative, _, parent, token, level, places = heapq.heappop(heap)
            node = guess.add(token, parent, -negative)
            if level < depth:
                at = min(length + level - 1, self._depth)
                steps = ((text, text.step(state, at, token)) for text, state in places)
                after = [(text, state) for text, state in steps if state is not None]
                push_children(node, -negative, level + 1, after)
        return guess


@dataclass(frozen=True, slots=True)
class _Text:
    seq: Sequence
    automaton: Automaton


class _Guess:
    """A tree while it grows. ``score``: the sum of its path probabilities."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.probs: list[float] = []
        self.score = 0.0

    def add(self, token: int, parent: int, prob: float) -> int:
        """Add a node; returns its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.probs.append(prob)
        self.score += prob
        return len(self.tokens) - 1

    def tree(self) -> TokenTree:
        return TokenTree(
            tokens=np.asarray(self.tokens, np.int64),
            parents=np.asarray(self.parents, np.int64),
            scores=np.log(np.asarray(self.probs, np.float64)),
        )


class Automaton:
    """All substrings of a growing text, with the number of times each occurs.

    A suffix automaton (Blumer et al. 1985): a state stands for the substrings that end at the same
    places, a link leads to the state of the longest suffix that ends at more. At most two states a
    token. Counts are kept for substrings of at most ``depth + 1`` tokens, which bounds the time a
    token takes also in periodic text. State 0 is the empty string.
    """

    def __init__(self, depth: int) -> None:
        self._counted = depth + 1
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._longest = [0]
        self._count = [0]
        self._whole = 0  # state of the whole text
        self._tail = 0  # state of its last tokens, as many as are counted
        self._size = 0

    def __len__(self) -> int:
        """Tokens appended so far."""
        return self._size

    def append(self, token: int) -> None:
        """Add one token to the text. Changes which substrings the existing states stand for."""
        tail_length = min(self._size, self._counted - 1)
        self._extend(token)
        self._size += 1
        # _extend() may have moved the tail to a new state, which is then linked from the old one.
        self._tail = self._next[self._shorten(self._tail, tail_length)][token]
        state = self._tail
        while state:
            self._count[state] += 1
            state = self._link[state]

    def matches(self, context: Seq[int]) -> list[tuple[int, int]]:
        """Suffixes of ``context`` that occur, as (length, state), longest first.

        One per state; the suffixes in between belong to the state of the next longer one. The
        context may be at most ``depth`` tokens long.
        """
        state = length = 0
        for token in context:
            while state and token not in self._next[state]:
                state = self._link[state]
                length = self._longest[state]
            if token in self._next[state]:
                state = self._next[state][token]
                length += 1
        found = []
        while state:
            found.append((length, state))
            state = self._link[state]
            length = self._longest[state]
        return found

    def counts(self, state: int) -> Iterator[tuple[int, int]]:
        """The tokens that follow a state's substrings, each with the number of times it does."""
        for token, state_after in self._next[state].items():
            yield token, self._count[state_after]

    def step(self, state: int, length: int, token: int) -> int | None:
        """The state after ``token``, of a substring of ``length`` tokens; None if there is none.

        What is longer than ``depth`` loses its first token.
        """
        after = self._next[state].get(token)
        if after is None or length + 1 < self._counted:
            return after
        return self._shorten(after, self._counted - 1)

    def _shorten(self, state: int, length: int) -> int:
        """The state of the last ``length`` tokens of a state's substrings."""
        while state and self._longest[self._link[state]] >= length:
            state = self._link[state]
        return state

    def _extend(self, token: int) -> None:
        new = self._add(self._longest[self._whole] + 1, {}, 0, 0)
        state = self._whole
        self._whole = new
        while state != -1 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state == -1:
            return
        after = self._next[state][token]
        if self._longest[after] == self._longest[state] + 1:
            self._link[new] = after
            return
        # The shorter substrings of ``after`` now end at a place where its longer ones do not.
        clone = self._add(
            self._longest[state] + 1,
            dict(self._next[after]),
            self._link[after],
            self._count[after],
        )
        self._link[after] = self._link[new] = clone
        while state != -1 and self._next[state].get(token) == after:
            self._next[state][token] = clone
            state = self._link[state]

    def _add(self, longest: int, following: dict[int, int], link: int, count: int) -> int:
        self._longest.append(longest)
        self._next.append(following)
        self._link.append(link)
        self._count.append(count)
        return len(self._longest) - 1


class Store:
    """Finished outputs by scope, at most ``max_tokens`` tokens in all; the oldest go first.

    Counts cannot leave an automaton, so a scope's texts lie in several of them (segments), and
    the oldest segment of all is dropped as a whole. A text may go across two segments.
    """

    def __init__(self, max_tokens: int, depth: int) -> None:
        self._max_tokens = max_tokens
        self._depth = depth
        self._scopes: dict[str, deque[Automaton]] = {}
        self._order: deque[str] = deque()  # the scope of every segment, oldest segment first
        self._size = 0

    def __len__(self) -> int:
        """Tokens held, the marks between texts included."""
        return self._size

    @property
    def num_scopes(self) -> int:
        """Scopes of which anything is held."""
        return len(self._scopes)

    def segments(self, scope: str | None) -> list[Automaton]:
        """The texts of one scope; nothing for None."""
        return [] if scope is None else list(self._scopes.get(scope, ()))

    def add(self, scope: str, tokens: Seq[int]) -> None:
        """Add one text and drop the oldest segments of any scope while there are too many."""
        for token in (*tokens, END) if tokens else ():
            segments = self._scopes.setdefault(scope, deque())
            if not segments or len(segments[-1]) >= self._max_tokens // SEGMENTS:
                segments.append(Automaton(self._depth))
                self._order.append(scope)
            segments[-1].append(token)
            self._size += 1
            while self._size > self._max_tokens:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        scope = self._order.popleft()
        segments = self._scopes[scope]
        self._size -= len(segments.popleft())
        if not segments:
            del self._scopes[scope]


_Place = tuple[Automaton, int]


def _matches(source: Seq[Automaton], context: Seq[int]) -> Iterator[tuple[int, list[_Place]]]:
    """Suffixes of ``context`` with the states they reach in each text, longest first.

    A suffix that occurs at the same places as a longer one is left out.
    """
    found = [(text, text.matches(context)) for text in source]
    lengths = {length for _, matches in found for length, _ in matches}
    for length in sorted(lengths, reverse=True):
        places = []
        for text, matches in found:
            long_enough = [state for match, state in matches if match >= length]
            if long_enough:
                places.append((text, long_enough[-1]))
        yield length, places


def _counts(places: list[_Place]) -> dict[int, int]:
    """How often each token follows, over all texts."""
    counts: dict[int, int] = {}
    for text, state in places:
        for token, count in text.counts(state):
            counts[token] = counts.get(token, 0) + count
    return counts
