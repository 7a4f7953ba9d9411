"""A model ready to use: loading, drafters by name, text in and text out."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from itertools import count

from outrider.config import EngineConfig
from outrider.drafters import make_drafter, parse_spec
from outrider.drafters.base import Drafter, DrafterContext
from outrider.engine import Engine
from outrider.errors import ConfigError, ModelFault
from outrider.metrics import Stats
from outrider.models.base import Model
from outrider.models.load import LoadedModel, load, same_vocabulary
from outrider.models.native import NativeDecoder
from outrider.models.resources import weight_format
from outrider.request import FinishReason, Request, SamplingParams, Sequence, TokenLogprob
from outrider.verify import make_verifier


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished answer. ``token_ids`` includes the end token, ``text`` does not."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats
    logprobs: tuple[TokenLogprob, ...] = ()


class LLM:
    """A target model with its engine.

    ``model`` and the MODEL of a drafter ``draft:MODEL`` are names that
    :func:`outrider.models.load.load` takes. Every draft model is loaded once. ``exact`` refuses a
    target whose arithmetic could make speculative and plain tokens differ at near-ties.

    Without ``params`` answers are drawn as ``SamplingParams()`` says, at temperature 1.0. The
    command line's default is 0, greedy: ``SamplingParams(temperature=0.0)`` here.

        llm = LLM("smollm2-135m-instruct", drafter="ngram:k=8")
        print(llm.generate("Write a haiku about rivers.").text)
    """

    def __init__(
        self,
        model: str,
        *,
        drafter: str = "none",
        verifier: str = "coupled",
        dtype: str = "bfloat16",
        draft_dtype: str | None = None,
        device: str = "cpu",
        num_slots: int | None = None,
        prefix_cache: bool = True,
        kernels: bool = True,
        exact: bool = False,
        config: EngineConfig | None = None,
        progress: bool = False,
    ) -> None:
        parse_spec(drafter)  # a mistake in it is reported before a model is loaded
        make_verifier(verifier)
        weight_format(draft_dtype or dtype)
        self._load = partial(
            load,
            device=device,
            num_slots=num_slots,
            prefix_cache=prefix_cache,
            kernels=kernels,
            progress=progress,
        )
        self.target = self._load(model, dtype=dtype)
        if exact and not isinstance(self.target.model, NativeDecoder):
            raise ConfigError(
                f"exact decoding with dtype {dtype} on {device} needs the C++ kernels; use dtype "
                "bfloat16, int8 or int4 on the CPU, with the kernels"
            )
        self._draft_dtype = draft_dtype or dtype
        self.drafts: dict[str, LoadedModel] = {}
        self._ids = count()
        self.engine = Engine(
            self.target.model,
            self._make_drafter,
            tokenizer=self.target.tokenizer,
            end_tokens=self.target.end_tokens,
            drafter=drafter,
            verifier=verifier,
            config=config,
        )
        self.engine.drafter(drafter)

    def _make_drafter(self, spec: str) -> Drafter:
        context = DrafterContext(
            vocab_size=self.target.model.vocab_size,
            load_draft=self._load_draft,
            target=self.target.model,
            fingerprint=self.target.fingerprint,
            tokenizer=self.target.tokenizer,
        )
        made, most = make_drafter(spec, context), self.engine.config.max_draft
        if made.num_draft > most:  # the engine would cut its drafts without a word
            raise ConfigError(
                f"drafter {spec!r} drafts {made.num_draft} tokens a step, expected at most {most}"
            )
        return made

    def _load_draft(self, name: str) -> Model:
        if name not in self.drafts:
            draft = self._load(name, dtype=self._draft_dtype)
            same_vocabulary(self.target, draft)
            self.drafts[name] = draft
        return self.drafts[name].model

    def encode(self, prompt: str | Seq[dict[str, str]], *, chat: bool = True) -> list[int]:
        """Token ids of a prompt: a text, put into the model's chat template as the user's turn
        unless ``chat`` is False, or the messages of a conversation."""
        if not isinstance(prompt, str):
            return self.target.chat(list(prompt))
        if chat:
            return self.target.chat([{"role": "user", "content": prompt}])
        return self.target.encode(prompt)

    def decode(self, tokens: Seq[int]) -> str:
        """The text of tokens, without special ones."""
        return str(self.target.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def submit(
        self,
        prompt: Seq[int],
        params: SamplingParams | None = None,
        *,
        drafter: str | None = None,
        verifier: str | None = None,
        num_draft: int | None = None,
        scope: str | None = None,
    ) -> list[Sequence]:
        """Queue the token ids of a prompt; ``engine.step()`` then works on it beside others.

        ``scope`` names whose history shared draft stores may use for this request and learn from
        it; None keeps the request to itself. Raises ConfigError, and then queues nothing.
        """
        request = Request(
            id=f"request-{next(self._ids)}",
            prompt=tuple(prompt),
            params=params or SamplingParams(),
            drafter=drafter,
            verifier=verifier,
            num_draft=num_draft,
            scope=scope,
        )
        return self.engine.add(request)

    def check(
        self,
        prompt: Seq[int],
        params: SamplingParams | None = None,
        *,
        drafter: str | None = None,
        verifier: str | None = None,
    ) -> None:
        """Raise ConfigError if :meth:`submit` would. Makes the drafter, queues nothing."""
        request = Request(
            id="check",
            prompt=tuple(prompt),
            params=params or SamplingParams(),
            drafter=drafter,
            verifier=verifier,
        )
        self.engine.admission.admit(request)

    def stream(
        self,
        prompt: str | Seq[dict[str, str]],
        params: SamplingParams | None = None,
        *,
        chat: bool = True,
        drafter: str | None = None,
        verifier: str | None = None,
        scope: str | None = None,
    ) -> Iterator[str]:
        """The text of one answer, piece by piece, as it is decided. Raises ConfigError for ``n``
        above 1."""
        if params is not None and params.n != 1:
            raise ConfigError(f"n is {params.n}, a stream has 1 answer; use generate_all for more")
        (seq,) = self.submit(
            self.encode(prompt, chat=chat),
            params,
            drafter=drafter,
            verifier=verifier,
            scope=scope,
        )
        try:
            while seq.finish is None:
                for event in self.engine.step():
                    if event.seq_id == seq.id and event.text:
                        yield event.text
        finally:
            if seq.finish is None:
                self.engine.cancel(seq.request.id)
        _raise_fault(seq)

    def generate(
        self,
        prompt: str | Seq[dict[str, str]],
        params: SamplingParams | None = None,
        *,
        chat: bool = True,
        drafter: str | None = None,
        verifier: str | None = None,
        scope: str | None = None,
    ) -> Completion:
        """One answer. Of ``n`` answers the first; :meth:`generate_all` gives all."""
        answers = self.generate_all(
            [prompt], params, chat=chat, drafter=drafter, verifier=verifier, scope=scope
        )
        return answers[0][0]

    def generate_all(
        self,
        prompts: Seq[str | Seq[dict[str, str]]],
        params: SamplingParams | None = None,
        *,
        chat: bool = True,
        drafter: str | None = None,
        verifier: str | None = None,
        scope: str | None = None,
    ) -> list[list[Completion]]:
        """The answers to several prompts, computed together: ``n`` for each prompt. Whatever
        fails, a refused prompt for one, leaves nothing of this call in the queue."""
        groups: list[list[Sequence]] = []
        try:
            for prompt in prompts:
                ids = self.encode(prompt, chat=chat)
                groups.append(
                    self.submit(ids, params, drafter=drafter, verifier=verifier, scope=scope)
                )
            while any(seq.finish is None for group in groups for seq in group):
                self.engine.step()
        except BaseException:
            for group in groups:
                self.engine.cancel(group[0].request.id)
            raise
        return [[completion(seq) for seq in group] for group in groups]


def completion(seq: Sequence) -> Completion:
    """The answer of a finished sequence. Raises ModelFault if the target failed."""
    _raise_fault(seq)
    assert seq.finish is not None
    return Completion(
        text=seq.text,
        token_ids=tuple(seq.output),
        finish_reason=seq.finish,
        stats=seq.stats,
        logprobs=tuple(seq.logprobs),
    )


def _raise_fault(seq: Sequence) -> None:
    if seq.finish is FinishReason.ERROR:
        raise ModelFault("the model's logits are not finite numbers; is the model file intact?")
