"""From a request to its sequences. Whatever cannot be honoured is refused here, before the first
token."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from outrider.config import EngineConfig
from outrider.detokenize import Detokenizer, Tokenizer
from outrider.drafters.base import Drafter
from outrider.errors import ConfigError
from outrider.metrics import Stats
from outrider.models.base import Model
from outrider.request import Request, Sequence, sequence_seed
from outrider.sampling import Noise
from outrider.verify import Verifier, make_verifier


class Admission:
    """Checks requests for one target and makes their sequences.

    ``drafters`` makes the drafter of a specification; each is made once and shared by all
    sequences that name it. ``drafter`` and ``verifier`` are the defaults.
    """

    def __init__(
        self,
        target: Model,
        drafters: Callable[[str], Drafter],
        *,
        tokenizer: Tokenizer | None,
        end_tokens: Iterable[int],
        drafter: str,
        verifier: str,
        config: EngineConfig,
    ) -> None:
        self._target = target
        self._make_drafter = drafters
        self._drafters: dict[str, Drafter] = {}
        self._tokenizer = tokenizer
        self._end_tokens = frozenset(end_tokens)
        self._defaults = (drafter, verifier)
        self._config = config

    def drafter(self, spec: str) -> Drafter:
        """The drafter of a specification, made on first use. Raises ConfigError."""
        if spec not in self._drafters:
            self._drafters[spec] = self._make_drafter(spec)
        return self._drafters[spec]

    def admit(self, request: Request) -> list[Sequence]:
        """The ``n`` sequences of ``request``. Raises ConfigError for what cannot be honoured."""
        check(request, self._target, self._tokenizer, self._config)
        drafter = self.drafter(request.drafter or self._defaults[0])
        verifier = make_verifier(request.verifier or self._defaults[1])
        check_pair(drafter, verifier)
        return sequences(
            request,
            target=self._target,
            drafter=drafter,
            verifier=verifier,
            tokenizer=self._tokenizer,
            end_tokens=self._end_tokens,
            config=self._config,
        )


def max_tokens_of(target: Model) -> int:
    """The longest sequence that the target can hold, prompt included."""
    return min(target.context_length, target.kv.num_slots)


def check(
    request: Request, target: Model, tokenizer: Tokenizer | None, config: EngineConfig
) -> None:
    """Raise ConfigError for the first thing in ``request`` that this engine cannot do."""
    params, vocab_size = request.params, target.vocab_size
    limit = max_tokens_of(target)
    if not request.prompt:
        raise ConfigError("the prompt is empty; give at least one token")
    if len(request.prompt) >= limit:
        raise ConfigError(
            f"the prompt has {len(request.prompt)} tokens; at most {limit - 1} fit "
            f"(context {target.context_length}, KV pool {target.kv.num_slots})"
        )
    if len(request.prompt) + params.min_tokens > limit:
        raise ConfigError(
            f"min_tokens is {params.min_tokens}; at most {limit - len(request.prompt)} fit after "
            f"the {len(request.prompt)} tokens of the prompt"
        )
    for token in (*request.prompt, *params.logit_bias, *params.stop_token_ids):
        if not 0 <= token < vocab_size:
            raise ConfigError(f"token id {token} is not in the vocabulary of {vocab_size}")
    if params.logprobs is not None and params.logprobs > vocab_size:
        raise ConfigError(f"logprobs is {params.logprobs}, the vocabulary has {vocab_size} tokens")
    if params.stop and tokenizer is None:
        raise ConfigError("stop strings need a tokenizer; give stop_token_ids instead")
    special = _special_tokens(tokenizer) if params.stop else {}
    for stop in params.stop:
        if stop in special:
            raise ConfigError(
                f"the stop string {stop!r} is a special token, which is no part of the text; use "
                f"--stop-token-id {special[stop]} (stop_token_ids)"
            )
    if request.num_draft is not None and not 0 <= request.num_draft <= config.max_draft:
        raise ConfigError(f"num_draft is {request.num_draft}, expected 0 to {config.max_draft}")


def _special_tokens(tokenizer: Tokenizer | None) -> dict[str, int]:
    """Text -> id of the tokens that decoding skips, where the tokenizer tells them."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {str(token): id for id, token in added.items() if getattr(token, "special", False)}


def check_pair(drafter: Drafter, verifier: Verifier) -> None:
    """Raise ConfigError if the verifier cannot take the drafter's trees."""
    if verifier.chains_only and not drafter.is_chain:
        raise ConfigError(
            f"verifier {verifier.name!r} takes chains, drafter {drafter.name!r} proposes trees; "
            "use verifier 'traversal', or a drafter of chains"
        )


def sequences(
    request: Request,
    *,
    target: Model,
    drafter: Drafter,
    verifier: Verifier,
    tokenizer: Tokenizer | None,
    end_tokens: frozenset[int],
    config: EngineConfig,
) -> list[Sequence]:
    """The ``n`` sequences of a checked request. All but the first wait for the first one's prompt
    and share it."""
    params = request.params
    ends = frozenset(params.stop_token_ids)
    if not params.ignore_eos:
        ends |= end_tokens
    num_draft = drafter.num_draft if request.num_draft is None else request.num_draft
    made: list[Sequence] = []
    for index in range(params.n):
        made.append(
            Sequence(
                id=f"{request.id}/{index}",
                request=request,
                index=index,
                noise=Noise(sequence_seed(params, index)),
                drafter=drafter,
                verifier=verifier,
                num_draft=min(num_draft, config.max_draft),
                max_length=min(max_tokens_of(target), len(request.prompt) + params.max_tokens),
                end_tokens=ends,
                detokenizer=Detokenizer(tokenizer, params.stop),
                stats=Stats(),
                tokens=list(request.prompt),
                sibling=made[0] if made else None,
            )
        )
    return made
