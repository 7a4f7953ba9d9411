"""Models with random weights, made where they run, and a drafter that knows the answer."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig

from outrider.config import EngineConfig
from outrider.drafters.base import Budget, Drafter, Feedback, Needs
from outrider.drafters.none import NoDraft
from outrider.engine import Engine
from outrider.models.base import Model
from outrider.models.config import DecoderConfig
from outrider.models.decoder import Decoder
from outrider.request import Request, SamplingParams, Sequence
from outrider.tree import TokenTree

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "small": {
        "vocab_size": 4096,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    },
    "SmolLM2-135M": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "Llama-3-8B": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
"""Those of the published models; the context is longer, so that 16k tokens fit."""


def random_decoder(
    shape: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    num_slots: int,
    certain: bool = False,
    seed: int = 0,
) -> Decoder:
    """``certain``: layers add little to the embedding, so that every token is followed by one
    token, by a margin that no rounding bridges. Answers of different shapes of a forward can then
    be compared, and a drafter can be right as often as it is meant to be."""
    config = DecoderConfig.from_hf(LlamaConfig(max_position_embeddings=32768, **SHAPES[shape]))
    model = Decoder(config, dtype=dtype, device=device, num_slots=num_slots, prefix_cache=False)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.fill_(1.0)
                continue
            small = 0.05 if certain and name.endswith(("out.weight", "down.weight")) else 1.0
            weight.normal_(0.0, small * weight.shape[1] ** -0.5, generator=generator)
        if certain and not config.tied:
            model.head.weight.copy_(model.embedding.roll(1, 0))
    return model


def same_weights(source: Decoder, *, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A decoder with the weights of another one, and a pool of its own."""
    model = Decoder(
        source.config,
        dtype=dtype,
        device=device,
        num_slots=source.kv.num_slots,
        prefix_cache=False,
    )
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), source.parameters(), strict=True):
            mine.copy_(theirs)
    return model


@dataclass
class Oracle:
    """Proposes the known plain answer, each token wrong with probability ``error``.

    ``answers``: by the id of the sequence. Which tokens are wrong depends on their places alone.
    ``width`` above 1 makes trees: every node has so many children, and but for one all are wrong
    leaves.
    """

    answers: dict[str, list[int]]
    error: float
    num_draft: int
    vocab_size: int
    width: int = 1
    name: str = "oracle"
    needs: Needs = field(default_factory=Needs)
    is_chain: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_chain = self.width == 1

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree | None]:
        trees: list[TokenTree | None] = []
        for seq, budget in zip(seqs, budgets, strict=True):
            at = seq.num_output
            depth = min(budget.num_nodes // self.width, budget.depth)
            tokens = self.answers[seq.id][at : at + depth]
            chance = np.random.default_rng([at, len(seq.request.prompt)]).random(len(tokens))
            path = [
                self._other(token, 1) if chance[i] < self.error else token
                for i, token in enumerate(tokens)
            ]
            leaves = [
                [*path[:i], self._other(path[i], 1 + other)]
                for i in range(len(path))
                for other in range(1, self.width)
            ]
            trees.append(TokenTree.from_paths([*leaves, path]))
        return trees

    def _other(self, token: int, step: int) -> int:
        return (token + step) % self.vocab_size

    def observe(self, seqs: Seq[Sequence], feedback: Seq[Feedback]) -> None:
        pass

    def forget(self, seq_id: str) -> None:
        pass


def make_engine(model: Model, drafter: Drafter | None = None, *, batch: int = 32) -> Engine:
    """An engine without text around ``model``; without ``drafter`` it decodes plainly."""
    plain = NoDraft("none")
    return Engine(
        model,
        lambda spec: plain if drafter is None else drafter,
        drafter="none" if drafter is None else drafter.name,
        config=EngineConfig(max_batch=batch),
    )


def requests(
    number: int, *, prompt: int, tokens: int, vocab_size: int, temperature: float = 0.0
) -> list[Request]:
    """Requests with random prompts, the same at every call."""
    rng = np.random.default_rng(0)
    return [
        Request(
            id=str(i),
            prompt=tuple(rng.integers(0, vocab_size, prompt + i % 3).tolist()),
            params=SamplingParams(max_tokens=tokens, temperature=temperature, seed=i),
        )
        for i in range(number)
    ]


def answers(engine: Engine, todo: Seq[Request]) -> dict[str, list[int]]:
    """Decode ``todo``; the tokens of each sequence by its id."""
    return {seq.id: list(seq.output) for seq in decode(engine, todo)}


def decode(engine: Engine, todo: Seq[Request]) -> list[Sequence]:
    """Decode ``todo``; its finished sequences."""
    seqs = [seq for request in todo for seq in engine.add(request)]
    for _ in engine.run():
        pass
    return seqs
