"""Builders shared by the tests of the loop: an engine, a run, the plain answer, test drafters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch

from fake_model import FakeModel
from outrider.config import EngineConfig
from outrider.drafters import make_drafter
from outrider.drafters.base import Budget, Drafter, DrafterContext, Feedback, Needs
from outrider.engine import Engine
from outrider.errors import ConfigError
from outrider.request import Event, FinishReason, Request, SamplingParams, Sequence, TokenLogprob
from outrider.sampling import law
from outrider.tree import ROOT, TokenTree

END = 0
"""The end-of-sequence token of the toy vocabulary."""

PIECES: tuple[bytes, ...] = (
    *(b"", b""),  # END and another special token: never text
    *(b"\xc3", b"\xa9"),  # e with acute accent
    *(b"\xe2\x82", b"\xac", b"\xe2", b"\x82\xac"),  # euro sign, split in two ways
    *(b"\xf0\x9f", b"\x98", b"\x80"),  # a face, in three parts
    *(b" the", b" a", b"st", b"op", b"stop", b"\n", b"\n\n", b" \xe4\xbd", b"\xa0", b"o"),
    *(letter.encode() for letter in "abcdefghijk"),
)
VOCAB = len(PIECES)


class ToyTokenizer:
    """Characters may be split over tokens; END and token 1 are special."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return b"".join(PIECES[token] for token in token_ids).decode("utf-8", errors="replace")


def text_of(tokens: Seq[int]) -> str:
    """The text of whole outputs, decoded at once."""
    return ToyTokenizer().decode(list(tokens), skip_special_tokens=True)


def fake(**options: Any) -> FakeModel:
    """A target of the toy vocabulary whose text repeats itself: it sees two tokens back."""
    usual = {"vocab_size": VOCAB, "windows": (2,), "absolute": False, "scale": 12.0}
    return FakeModel(**usual | options)


DRAFTS: dict[str, dict[str, Any]] = {
    "good": {"noise": 3.0},
    "bad": {"noise": 100.0},
    "short": {"noise": 3.0, "context_length": 24},
    "small": {"noise": 3.0, "num_slots": 40},
    "padded": {"noise": 3.0, "vocab_size": VOCAB + 3},
    "narrow": {"noise": 3.0, "vocab_size": VOCAB - 1},
}
"""Draft models by name, as differences to the target's options."""


def make_engine(
    target: FakeModel | None = None,
    *,
    drafts: Mapping[str, FakeModel] | None = None,
    drafters: Mapping[str, Callable[[], Drafter]] | None = None,
    tokenizer: bool = True,
    end_tokens: Seq[int] = (END,),
    drafter: str = "none",
    verifier: str = "coupled",
    **config: int,
) -> Harness:
    """An engine over a fake target. ``drafters`` adds test drafters by name to those of
    :data:`TEST_DRAFTERS`; ``config`` are fields of EngineConfig."""
    target = target or fake()
    made: dict[str, FakeModel] = dict(drafts or {})
    known = TEST_DRAFTERS | {
        name: (lambda _, build=build: build()) for name, build in (drafters or {}).items()
    }

    def load_draft(name: str) -> FakeModel:
        if name not in made:
            if name not in DRAFTS:
                raise ConfigError(f"no draft model {name!r}")
            same = {"seed": target.seed, "windows": target.windows, "absolute": target.absolute}
            made[name] = fake(**same | {"num_slots": 4096} | DRAFTS[name])
        return made[name]

    context = DrafterContext(vocab_size=target.vocab_size, load_draft=load_draft)
    engine = Engine(
        target,
        lambda spec: known[spec](target) if spec in known else make_drafter(spec, context),
        tokenizer=ToyTokenizer() if tokenizer else None,
        end_tokens=end_tokens,
        drafter=drafter,
        verifier=verifier,
        config=EngineConfig(**config),
    )
    return Harness(engine=engine, target=target, drafts=made)


@dataclass
class Answer:
    """What the events of one sequence said."""

    seq: Sequence
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None

    def take(self, event: Event) -> None:
        assert self.finish is None, f"{event.seq_id}: an event after the end"
        assert (event.request_id, event.index) == (self.seq.request.id, self.seq.index)
        self.tokens += event.tokens
        self.text += event.text
        self.logprobs += event.logprobs
        self.finish, self.error = event.finish, event.error

    @property
    def essence(self) -> tuple[list[int], str, FinishReason | None]:
        """What may not depend on the drafter."""
        return self.tokens, self.text, self.finish


@dataclass
class Harness:
    """An engine whose every step is checked."""

    engine: Engine
    target: FakeModel
    drafts: dict[str, FakeModel]
    answers: dict[str, Answer] = field(default_factory=dict)
    all_answers: list[Answer] = field(default_factory=list)  # an id may be used again

    def add(self, *requests: Request) -> list[Answer]:
        made = [Answer(seq) for request in requests for seq in self.engine.add(request)]
        self.answers |= {answer.seq.id: answer for answer in made}
        self.all_answers += made
        return made

    def step(self) -> list[Event]:
        events = self.engine.step()
        self.take(events)
        self.check()
        return events

    def cancel(self, request_id: str) -> None:
        self.take(self.engine.cancel(request_id))
        self.check()

    def take(self, events: Seq[Event]) -> None:
        for event in events:
            self.answers[event.seq_id].take(event)

    def check(self) -> None:
        """After every step: sound tables, no scratch, one owner of tokens, sane counters."""
        for model in (self.target, *self.drafts.values()):
            model.kv.check()
        for answer in self.answers.values():
            seq, stats = answer.seq, answer.seq.stats
            assert answer.tokens == seq.output
            assert list(answer.logprobs) == list(seq.logprobs)
            assert answer.finish == seq.finish
            assert seq.text.startswith(answer.text)
            if seq.finish is not None:
                assert answer.text == seq.text
                assert seq.id not in self.target.kv
            assert len(seq.tokens) <= seq.max_length
            assert dict(seq.output_counts) == {t: seq.output.count(t) for t in set(seq.output)}
            assert 0 <= stats.accepted <= stats.drafted
            assert stats.tokens == seq.num_output
            assert round(stats.acceptance_length * stats.target_forwards) == stats.tokens
            assert sum(stats.accepted_at) == stats.accepted
            assert all(a <= t for a, t in zip(stats.accepted_at, stats.tried_at, strict=True))
            for model in (self.target, *self.drafts.values()):
                if seq.id in model.kv:
                    assert len(model.kv.scratch(seq.id)) == 0, f"{seq.id} keeps scratch slots"
                    assert model.kv.length(seq.id) <= len(seq.tokens)
        texts = [answer.seq.tokens for answer in self.all_answers]
        for model in (self.target, *self.drafts.values()):
            for known in indexed(model):
                assert any(text[: len(known)] == known for text in texts), (
                    "the prefix index holds tokens that were never committed"
                )

    def run(self, *requests: Request, arrivals: Seq[int] = ()) -> list[Answer]:
        """Answers in order; request i joins before step ``arrivals[i]`` (0 without)."""
        answers: dict[int, list[Answer]] = {}
        waiting = dict(enumerate(requests))
        number = 0
        while waiting or self.engine.has_work:
            for i in list(waiting):
                if number >= (arrivals[i] if arrivals else 0):
                    answers[i] = self.add(waiting.pop(i))
            self.step()
            number += 1
            assert number < 5000, "the engine makes no progress"
        self.check_empty()
        return [answer for i in range(len(requests)) for answer in answers[i]]

    def check_empty(self) -> None:
        """Nothing is held once nothing runs."""
        assert not self.engine.has_work
        for model in (self.target, *self.drafts.values()):
            model.kv.clear()
            model.kv.check()
            assert model.kv.num_free == model.kv.num_slots, "slots leaked"


def indexed(model: FakeModel) -> list[list[int]]:
    """The texts that the prefix index of a model knows, one for each block."""
    texts: dict[int, list[int]] = {0: []}
    for block in sorted(model.kv._blocks.values(), key=lambda block: block.id):
        parent, tokens = block.key
        texts[block.id] = [*texts[parent], *tokens]
    return [text for block, text in texts.items() if block]


def request(
    prompt: Seq[int] = (14, 3, 22, 9, 22),
    *,
    id: str = "r",
    drafter: str | None = None,
    verifier: str | None = None,
    num_draft: int | None = None,
    scope: str | None = None,
    **params: Any,
) -> Request:
    """A request of 24 greedy tokens unless ``params`` say otherwise."""
    return Request(
        id=id,
        prompt=tuple(prompt),
        params=SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "seed": 7} | params),
        drafter=drafter,
        verifier=verifier,
        num_draft=num_draft,
        scope=scope,
    )


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random tokens; no special ones."""
    return tuple(np.random.default_rng(seed).integers(2, VOCAB, length).tolist())


def plain(wanted: Request, end_tokens: Seq[int] = (END,), **target: Any) -> list[Answer]:
    """The answers of plain decoding, alone, without a prefix cache; ``target`` are options of
    :func:`fake`. What they say is remembered: do not change it."""
    params = wanted.params
    names = params.__dataclass_fields__
    values = {name: getattr(params, name) for name in names if name != "logit_bias"}
    bias = tuple(sorted(params.logit_bias.items()))
    options = tuple(sorted(target.items()))
    key = tuple(values.items())
    return list(_plain(wanted.prompt, key, bias, tuple(end_tokens), options))


@cache
def _plain(
    prompt: tuple[int, ...],
    values: tuple[tuple[str, Any], ...],
    bias: tuple[tuple[int, float], ...],
    end_tokens: tuple[int, ...],
    target: tuple[tuple[str, Any], ...],
) -> tuple[Answer, ...]:
    engine = make_engine(fake(**dict(target) | {"prefix_cache": False}), end_tokens=end_tokens)
    params = SamplingParams(**dict(values), logit_bias=dict(bias))
    return tuple(engine.run(Request(id="plain", prompt=prompt, params=params)))


# Test drafters.


class Scripted:
    """A drafter that proposes what ``make(seq, budget)`` returns, whatever it is."""

    needs = Needs()
    name = "scripted"

    def __init__(
        self,
        make: Callable[[Sequence, Budget], TokenTree | None],
        *,
        num_draft: int = 4,
        is_chain: bool = False,
    ) -> None:
        self.make = make
        self.num_draft = num_draft
        self.is_chain = is_chain
        self.forgotten: list[str] = []
        self.lessons: list[tuple[str, Feedback]] = []

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree | None]:
        return [self.make(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def observe(self, seqs: Seq[Sequence], feedback: Seq[Feedback]) -> None:
        self.lessons += [(seq.id, one) for seq, one in zip(seqs, feedback, strict=True)]

    def forget(self, seq_id: str) -> None:
        self.forgotten.append(seq_id)


def foresee(model: FakeModel, seq: Sequence, path: Seq[int]) -> int:
    """The token that plain decoding of ``seq`` emits after ``path``."""
    tokens = [*seq.tokens, *path]
    probs = law(
        model.plain_logits(tokens),
        seq.params,
        prompt=seq.request.prompt,
        output=[*seq.output, *path],
        end_tokens=seq.end_tokens,
    )
    if seq.params.temperature == 0.0:
        return int(probs.argmax())
    return seq.noise.draw(probs, len(tokens))


def oracle(model: FakeModel, *, num_draft: int = 4) -> Scripted:
    """Chains that are always right, also behind the end of the answer."""

    def make(seq: Sequence, budget: Budget) -> TokenTree:
        path: list[int] = []
        while len(path) < min(budget.num_nodes, budget.depth):
            path.append(foresee(model, seq, path))
        return TokenTree.chain(path)

    return Scripted(make, num_draft=num_draft, is_chain=True)


def random_trees(model: FakeModel, *, num_draft: int = 6, probes: bool = False) -> Scripted:
    """Trees of any shape, with duplicate siblings, often beyond the budget, half of it right.

    With ``probes`` a third of the nodes are probes, whose descendants are probes too.
    """
    rng = np.random.default_rng(5)

    def make(seq: Sequence, budget: Budget) -> TokenTree:
        num_nodes = int(rng.integers(0, 2 * budget.num_nodes + 2))
        tokens: list[int] = []
        parents: list[int] = []
        paths: dict[int, list[int]] = {ROOT: []}
        probe: list[bool] = []
        for node in range(num_nodes):
            parent = int(rng.integers(max(-1, node - 3), node))
            right = rng.random() < 0.6
            token = foresee(model, seq, paths[parent]) if right else int(rng.integers(VOCAB))
            above = parent != ROOT and probe[parent]
            tokens.append(token)
            parents.append(parent)
            paths[node] = [*paths[parent], token]
            probe.append(probes and (above or bool(rng.random() < 0.3)))
        return TokenTree(
            tokens=np.asarray(tokens, np.int64),
            parents=np.asarray(parents, np.int64),
            probe=np.asarray(probe, np.bool_) if probes else None,
        )

    return Scripted(make, num_draft=num_draft)


def liar(model: FakeModel) -> Scripted:
    """Every kind of draft that is none, in turn; every fifth is right."""
    good = oracle(model)
    turn = 0

    def make(seq: Sequence, budget: Budget) -> TokenTree | None:
        nonlocal turn
        turn += 1
        match turn % 5:
            case 0:
                return good.make(seq, budget)
            case 1:
                return None
            case 2:
                return TokenTree.chain([VOCAB])
            case 3:
                return TokenTree.chain([3, -1])
            case _:
                laws = torch.full((1, VOCAB), 1 / VOCAB)
                laws[0, 4] = torch.nan
                return TokenTree.chain([3], laws)

    return Scripted(make, is_chain=True)


TEST_DRAFTERS: dict[str, Callable[[FakeModel], Drafter]] = {
    "oracle": oracle,
    "random": random_trees,
    "probing": lambda model: random_trees(model, probes=True),
    "liar": liar,
}
