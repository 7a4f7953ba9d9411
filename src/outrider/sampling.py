"""From logits to the law of the next token, and the chance by which it is drawn.

The law is the same for plain and speculative decoding, for the target and for a draft model, and
at every node of a draft tree with that node's own path. Chance is keyed by (seed, position, role):
it depends on nothing the engine does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from outrider.request import SamplingParams, Sequence
from outrider.tree import ROOT, TokenTree

MIN_TEMPERATURE = 1e-30
"""Lower ones above 0 mean this one: float32 cannot divide by them, and the law is the same."""


@dataclass(frozen=True, slots=True)
class Past:
    """What a law depends on of the tokens before it.

    ``prompt_ids``: the different tokens of the prompt, int64 ``[P]``; may be empty where there is
    no repetition penalty. ``counts``: how often each token was put out. ``num_output``: how many.
    """

    prompt_ids: torch.Tensor
    counts: Mapping[int, int]
    num_output: int

    @classmethod
    def of(cls, seq: Sequence, path: Seq[int] = ()) -> Self:
        """After the tokens of ``seq`` and the drafted ``path``. Copies no text: it is asked for at
        every node of every step."""
        params = seq.params
        penalised = params.repetition_penalty != 1.0
        counts = seq.output_counts
        if path and params.has_penalties:
            counts = counts.copy()
            counts.update(path)
        return cls(
            _different(seq.request.prompt if penalised else ()),
            counts,
            seq.num_output + len(path),
        )


@lru_cache(maxsize=64)
def _different(tokens: tuple[int, ...]) -> torch.Tensor:
    """The different tokens, int64 ``[P]``, ascending. Do not write to it."""
    return torch.tensor(sorted(set(tokens)), dtype=torch.int64)


def law(
    logits: torch.Tensor,
    params: SamplingParams,
    *,
    prompt: Seq[int],
    output: Seq[int],
    end_tokens: frozenset[int],
    counts: dict[int, int] | None = None,
) -> torch.Tensor:
    """The law of the token that follows ``prompt + output``: float32 ``[V]``, sums to 1.

    ``logits`` ``[V]`` of any float dtype; not changed. ``end_tokens`` are impossible until
    ``min_tokens`` output tokens exist. ``counts`` may give the token counts of ``output``.
    """
    past = Past(
        _different(tuple(prompt)), Counter(output) if counts is None else counts, len(output)
    )
    return law_after(logits, params, past, end_tokens)


def law_after(
    logits: torch.Tensor, params: SamplingParams, past: Past, end_tokens: frozenset[int]
) -> torch.Tensor:
    """:func:`law` of the token that follows ``past``.

    The order is: penalties, logit bias, min_tokens; temperature; top-k, top-p, min-p. Temperature
    0 is a point mass on the most likely token, the lowest id among equals.
    """
    scores = adjust_after(logits, params, past, end_tokens)
    if params.temperature == 0.0:
        return torch.zeros_like(scores).index_fill_(0, scores.argmax().reshape(1), 1.0)
    # The largest score becomes 0 first: divided by a tiny temperature it would overflow.
    scores = (scores - scores.max()) / max(params.temperature, MIN_TEMPERATURE)
    return truncate(torch.softmax(scores, dim=-1), params)


def best_tokens(logits: torch.Tensor) -> tuple[npt.NDArray[np.int64], bool]:
    """The most likely token of each row of ``logits`` ``[R, V]``, the lowest id among equals, and
    whether all rows are numbers: no NaN, no plus infinity, not minus infinity throughout.

    numpy's argmax finds both in one pass of one thread. PyTorch would start its threads for it,
    which then spin for a while on cores that the model needs.
    """
    rows = logits.float().numpy()
    best = rows.argmax(-1)
    return best, bool(np.isfinite(np.take_along_axis(rows, best[:, None], -1)).all())


def adjust(
    logits: torch.Tensor,
    params: SamplingParams,
    *,
    prompt: Seq[int],
    output: Seq[int],
    end_tokens: frozenset[int],
) -> torch.Tensor:
    """Logits after penalties, logit bias and min_tokens: float32 ``[V]``, a new tensor."""
    past = Past(_different(tuple(prompt)), Counter(output), len(output))
    return adjust_after(logits, params, past, end_tokens)


def adjust_after(
    logits: torch.Tensor, params: SamplingParams, past: Past, end_tokens: frozenset[int]
) -> torch.Tensor:
    """:func:`adjust` for the token that follows ``past``."""
    scores = logits.to(torch.float32, copy=True)
    if params.has_penalties:
        _penalise(scores, params, past)
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        scores[ids] += torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
    if past.num_output < params.min_tokens and end_tokens:
        scores[torch.tensor(sorted(end_tokens), dtype=torch.int64)] = -torch.inf
    return scores


def _penalise(scores: torch.Tensor, params: SamplingParams, past: Past) -> None:
    counts = past.counts
    if params.repetition_penalty != 1.0:
        # A token of both prompt and output is in here twice, and gets the same new score twice.
        ids = torch.cat([past.prompt_ids, torch.tensor(list(counts), dtype=torch.int64)])
        seen = scores[ids]
        factor = params.repetition_penalty
        scores[ids] = torch.where(seen > 0, seen / factor, seen * factor)
    if counts:
        ids = torch.tensor(list(counts), dtype=torch.int64)
        number = torch.tensor(list(counts.values()), dtype=torch.float32)
        scores[ids] -= params.presence_penalty + params.frequency_penalty * number


def truncate(probs: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Apply top-k, then top-p, then min-p to ``probs`` ``[V]``, each to the renormalised rest.

    Ties at a top-k or top-p boundary go to the lower token id, so the cut does not depend on the
    order in which a sort leaves equals.
    """
    if 0 < params.top_k < len(probs) or params.top_p < 1.0:
        sorted_probs, order = torch.sort(probs, descending=True, stable=True)
        keep = torch.ones_like(sorted_probs, dtype=torch.bool)
        if 0 < params.top_k < len(probs):
            keep[params.top_k :] = False
            sorted_probs = sorted_probs * keep
            sorted_probs = sorted_probs / sorted_probs.sum()
        if params.top_p < 1.0:
            # A token stays if the mass before it is still below top_p: at least one always does.
            keep &= (sorted_probs.cumsum(0) - sorted_probs) < params.top_p
            keep[0] = True
        probs = torch.zeros_like(probs).index_copy_(0, order, sorted_probs * keep)
        probs = probs / probs.sum()
    if params.min_p > 0.0:
        probs = torch.where(probs >= params.min_p * probs.max(), probs, 0.0)
        probs = probs / probs.sum()
    return probs


class NodeLaws:
    """The target's law at every node of one tree, each computed when first asked for.

    ``logits`` ``[1 + N, V]``: row 0 follows the sequence's last token, row 1 + i follows node i.
    ``are_numbers``: see :func:`best_tokens`; without it the laws mean nothing.
    """

    def __init__(self, logits: torch.Tensor, seq: Sequence, tree: TokenTree) -> None:
        self._logits = logits
        self._seq = seq
        self._tree = tree
        self._laws: dict[int, torch.Tensor] = {}
        best, self.are_numbers = best_tokens(logits)
        # Without processors that is the greedy choice of every node.
        params = seq.params
        self._plain_greedy: list[int] | None = None
        if (
            params.temperature == 0.0
            and not params.has_penalties
            and not params.logit_bias
            and seq.num_output >= params.min_tokens
        ):
            self._plain_greedy = best.tolist()

    def __call__(self, node: int) -> torch.Tensor:
        """Law of the token after ``node``: float32 ``[V]``. Do not write to it."""
        if node not in self._laws:
            self._laws[node] = self._compute(node)
        return self._laws[node]

    def _compute(self, node: int) -> torch.Tensor:
        row = self._logits[node + 1]
        if self._plain_greedy is not None:
            point = torch.zeros(len(row), dtype=torch.float32)
            point[self._plain_greedy[node + 1]] = 1.0
            return point
        seq = self._seq
        past = Past.of(seq, self._tree.path_tokens(node))
        return law_after(row, seq.params, past, seq.end_tokens)

    def greedy(self, node: int) -> int | None:
        """The only possible token after ``node`` at temperature 0; None at any other."""
        if self._plain_greedy is not None:
            return self._plain_greedy[node + 1]
        if self._seq.params.temperature == 0.0:
            return int(self(node).argmax())
        return None

    def logits(self, node: int) -> torch.Tensor:
        """Unprocessed logits after ``node``: float32 ``[V]``."""
        return self._logits[node + 1].float()


class Role(IntEnum):
    """What a piece of noise decides. Different roles at one position are independent."""

    DRAW = 0  # the target's own token at a position
    ACCEPT = 1  # whether a drafted token is accepted
    DRAFT = 2  # which token a drafter draws where the verifier needs draws from a known law


class Chance(Protocol):
    """The randomness a verifier may use. Tests replace it by exact enumeration."""

    def draw(self, probs: torch.Tensor, position: int) -> int:
        """A token of law ``probs`` ``[V]`` for the absolute position it will stand at."""
        ...

    def accept(self, probability: float, base: int, test: int) -> bool:
        """Whether a test of this probability passes: the ``test``-th of the block after ``base``
        tokens."""
        ...


class Noise:
    """Chance keyed by (seed, position, role), counter-based (Philox, Salmon et al. 2011).

    A draw is ``argmax(probs / E)`` with standard exponentials E of its position (the exponential
    race; Gumbel-max in other words). A draft model that races with the same E agrees with the
    target as often as their laws allow (Daliri et al., arXiv 2408.07978).

    Accept tests and independent draft draws are keyed by the block's first position as well:
    block and traversal verification look at later drafts before they decide about earlier ones,
    so noise of a later position may not be used again by the next block.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._race: dict[tuple[int, int, int], torch.Tensor] = {}

    def _generator(self, role: Role, first: int, second: int) -> np.random.Generator:
        # The counter's low word is left to Philox itself, which advances it within one stream.
        counter = np.array([0, first, second, int(role)], np.uint64)
        key = np.array([self._seed % 2**64, 0x6F75747269646572], np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=counter))

    def exponentials(
        self, num: int, position: int, role: Role = Role.DRAW, base: int = 0
    ) -> torch.Tensor:
        """Standard exponentials, float32 ``[num]``, all positive. Do not write to them.

        The last few streams of the target's draws are kept, until :meth:`forget`: nodes of one
        depth and a coupled draft share them, and so does the next step. Others are asked for once.
        """
        if role is not Role.DRAW:
            return self._exponentials(num, position, role, base)
        key = (num, position, base)
        if key not in self._race:
            while len(self._race) >= 32:
                self._race.pop(next(iter(self._race)))
            self._race[key] = self._exponentials(num, position, role, base)
        return self._race[key]

    def _exponentials(self, num: int, position: int, role: Role, base: int) -> torch.Tensor:
        # Drawn in float64: numpy's float32 draws have 23 random bits, so one in 8 million is 0,
        # which lets any token win, however unlikely. In a large vocabulary that is a token in
        # fifty.
        noise = self._generator(role, position, base).standard_exponential(num)
        np.maximum(noise, np.finfo(np.float32).tiny, out=noise)
        return torch.from_numpy(noise.astype(np.float32))

    def forget(self, before: int | None = None) -> None:
        """Free the streams kept for positions below ``before``, which will not be drawn again;
        all of them without it. Streams are large: one number per token of the vocabulary. Whoever
        asks for one again gets the same."""
        self._race = {
            key: stream
            for key, stream in self._race.items()
            if before is not None and key[1] >= before
        }

    def race(
        self, probs: torch.Tensor, position: int, role: Role = Role.DRAW, base: int = 0
    ) -> torch.Tensor:
        """``probs / E``, float32 ``[V]``: the first of its descending order is a draw from
        ``probs``, the first k are k draws without replacement."""
        return probs.float() / self.exponentials(len(probs), position, role, base)

    def draw(self, probs: torch.Tensor, position: int) -> int:
        return int(self.race(probs, position).argmax())

    def accept(self, probability: float, base: int, test: int) -> bool:
        return float(self._generator(Role.ACCEPT, base, test).random()) < probability


__all__ = [
    "ROOT",
    "Chance",
    "NodeLaws",
    "Noise",
    "Past",
    "Role",
    "adjust",
    "adjust_after",
    "law",
    "law_after",
    "truncate",
]
