"""What is asked for, and the state of one sequence while it is answered."""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.detokenize import Detokenizer
    from outrider.drafters.base import Drafter
    from outrider.metrics import Stats
    from outrider.sampling import Noise
    from outrider.verify import Verifier

SEED_LIMIT = 2**63
MOST_ANSWERS = 4096
"""Each answer of a request is a sequence of its own from the start."""


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the end of the model's context or of the pool
    CANCELLED = "cancelled"
    ERROR = "error"  # the target's logits were not numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen, alike for plain and speculative decoding. Values are checked here.

    ``temperature`` 0 takes the most likely token. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are
    off. ``repetition_penalty`` counts prompt and output tokens (CTRL, arXiv 1909.05858);
    ``presence_penalty`` and ``frequency_penalty`` count output tokens only, as OpenAI defines
    them. ``min_tokens`` output tokens come before any end is possible. ``stop`` strings end the
    output and are cut from the text. ``logprobs`` is the number of alternatives reported beside
    each token's own log-probability; None reports nothing. ``n`` sequences are drawn, each with a
    seed derived from ``seed``; without one, every request gets a seed of its own.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    min_tokens: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, math.inf, "0 or more")
        _integer("top_k", self.top_k, 0, "0 (off) or more")
        _number("top_p", self.top_p, 0.0, 1.0, "above 0, at most 1", above=True)
        _number("min_p", self.min_p, 0.0, 1.0, "from 0 (off) to 1")
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, "above 0", above=True)
        for name in ("presence_penalty", "frequency_penalty"):
            _number(name, getattr(self, name), -math.inf, math.inf, "a finite number")
        _integer("min_tokens", self.min_tokens, 0, "0 or more")
        _integer("max_tokens", self.max_tokens, 1, "1 or more")
        if self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens is {self.min_tokens}, max_tokens {self.max_tokens}: "
                "min_tokens may not be the larger one"
            )
        _integer("n", self.n, 1, f"1 to {MOST_ANSWERS}")
        if self.n > MOST_ANSWERS:
            raise ConfigError(f"n is {self.n}, expected 1 to {MOST_ANSWERS}")
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, "0 or more")
        if self.seed is not None:
            _integer("seed", self.seed, 0, "from 0 to 2**63 - 1")
            if self.seed >= SEED_LIMIT:
                raise ConfigError(f"seed is {self.seed}, expected from 0 to 2**63 - 1")
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) and s for s in self.stop):
            raise ConfigError(f"stop is {self.stop!r}, expected a tuple of non-empty strings")
        if not isinstance(self.stop_token_ids, tuple):
            raise ConfigError(
                f"stop_token_ids is {self.stop_token_ids!r}, expected a tuple of token ids"
            )
        if not isinstance(self.logit_bias, Mapping):
            raise ConfigError(
                f"logit_bias is {self.logit_bias!r}, expected a mapping from token ids to numbers"
            )
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"ignore_eos is {self.ignore_eos!r}, expected True or False")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, "token ids of 0 or more")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, "token ids of 0 or more")
            _number(f"logit_bias of token {token}", bias, -math.inf, math.inf, "a finite number")

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the most likely token of the unprocessed logits is always the choice."""
        changed = self.has_penalties or self.logit_bias or self.min_tokens
        return self.temperature == 0.0 and not changed

    @property
    def has_penalties(self) -> bool:
        """Whether the law of a token depends on the tokens before it."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def _number(
    name: str, value: float, low: float, high: float, expected: str, *, above: bool = False
) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value > high or value < low or (above and value == low):
        raise ConfigError(f"{name} is {value!r}, expected {expected}")


def _integer(name: str, value: int, low: int, expected: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(f"{name} is {value!r}, expected {expected}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One thing to answer.

    ``drafter`` and ``verifier`` are names ("ngram:k=8", "coupled"); None takes the engine's
    default. ``num_draft`` overrides the drafter's own number of draft tokens a step. ``scope``
    names whose history shared draft stores may use for this request and learn from it; None keeps
    the request to itself.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    drafter: str | None = None
    verifier: str | None = None
    num_draft: int | None = None
    scope: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability of an emitted token under the target's unprocessed law, natural log."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What one step added to one sequence. ``tokens`` may be empty, one or many."""

    seq_id: str
    request_id: str
    index: int
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    error: str | None = None

    @classmethod
    def of(
        cls,
        seq: Sequence,
        num_old: int,
        logprobs: Seq[TokenLogprob] = (),
        error: str | None = None,
    ) -> Self:
        """What ``seq`` has beyond its first ``num_old`` tokens. Takes the decided text from it."""
        return cls(
            seq_id=seq.id,
            request_id=seq.request.id,
            index=seq.index,
            tokens=tuple(seq.tokens[num_old:]),
            text=seq.detokenizer.take(final=seq.finish is not None),
            logprobs=tuple(logprobs),
            finish=seq.finish,
            error=error,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One answer being written. ``tokens`` holds prompt and output; never a speculative token.

    How far the model has computed it is known to the model's KV cache alone. ``suspect``: a step
    gave it logits that are no numbers; it is computed without drafts, and apart from others.
    """

    id: str
    request: Request
    index: int
    noise: Noise
    drafter: Drafter
    verifier: Verifier
    num_draft: int
    max_length: int
    end_tokens: frozenset[int]
    detokenizer: Detokenizer
    stats: Stats
    tokens: list[int]
    sibling: Sequence | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    suspect: bool = False
    output_counts: Counter[int] = field(default_factory=Counter)

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def text(self) -> str:
        return self.detokenizer.text

    def append(self, token: int) -> None:
        """Add one emitted token."""
        self.tokens.append(token)
        self.output_counts[token] += 1


def sequence_seed(params: SamplingParams, index: int) -> int:
    """Seed of the ``index``-th sequence of a request; a fresh one if the request has none.

    The derived seeds are spread by a multiplicative hash (Knuth, 2**64 / golden ratio), so that
    seed s, index 1 and seed s + 1, index 0 are different streams.
    """
    if params.seed is None:
        return secrets.randbelow(SEED_LIMIT)
    return params.seed if index == 0 else (params.seed + index * 0x9E3779B97F4A7C15) % 2**64
