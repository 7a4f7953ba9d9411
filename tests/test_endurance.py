"""Ten thousand forwards of a changing mixture: memory stays flat and no answer changes.

The mixture comes from a generator with a fixed seed: requests of all kinds arrive, run, are
preempted in a pool that is too small, are cancelled; the number of threads changes, and forwards
run outside the engine, between its steps. The last part is about one request alone: the same
tokens whatever the drafter, with 1 thread and 2, on every instruction set.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import Harness, make_engine
from outrider.batch import ForwardBatch, Work, build
from outrider.kernels.library import available_sets, load_library
from outrider.metrics import Stats, total
from outrider.models.base import Forward
from outrider.models.decoder import Decoder
from outrider.models.native import NativeDecoder
from outrider.request import Request, SamplingParams, Sequence, TokenLogprob
from outrider.tree import TokenTree
from test_native import native, weights
from tiny import VOCAB, tiny_decoder

Target = Decoder | NativeDecoder

SEED = 11

NUM_SLOTS = 112
"""Room for about four sequences of the mixture."""

MOST_ROWS = 64

DRAFTERS = [
    "none",
    "ngram:k=4,n=2",
    "suffix:k=6,width=2,max_cached_tokens=64",
    "draft:m,k=3",
    "draft:m,k=6,width=2",
    "ensemble:[ngram:k=2,draft:m,k=3,suffix:k=2,max_cached_tokens=64]",
]

PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 9, "logprobs": 2},
    {"temperature": 0.5, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
]

VERIFIERS = ["coupled", "coupled", "rejection", "traversal"]


# What is held.


class _MallInfo(ctypes.Structure):
    """mallinfo2 of glibc: bytes of the C heap."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@dataclass(frozen=True, slots=True)
class Memory:
    """``blocks`` of Python's allocator; bytes in use of the C heap (0 where it cannot be asked);
    bytes of the process in memory."""

    blocks: int
    heap: int
    resident: int

    @classmethod
    def now(cls) -> Memory:
        gc.collect()
        heap = 0
        if hasattr(libc := ctypes.CDLL(None), "mallinfo2"):
            libc.mallinfo2.restype = _MallInfo
            info = libc.mallinfo2()
            heap = info.uordblks + info.hblkhd
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(sys.getallocatedblocks(), heap, pages * os.sysconf("SC_PAGE_SIZE"))


# The mixture.


def counted(model: Target, counts: Counter[int]) -> Target:
    """``model``, whose every forward counts as one of its number of rows."""
    forward = model.forward

    def count(batch: ForwardBatch, **options: Any) -> Forward:
        counts[batch.num_tokens] += 1
        return forward(batch, **options)

    model.forward = count  # type: ignore[method-assign]
    return model


@dataclass
class Mixture:
    """Drives an engine with random requests. ``counts``: how many forwards had how many rows
    so far, of the target and of the draft model."""

    harness: Harness
    draft: Target
    rng: np.random.Generator
    counts: Counter[int]
    num_requests: int = 0
    cancelled: int = 0
    stats: Stats = field(default_factory=Stats)

    def run(self, stop: int) -> None:
        """Until there were ``stop`` forwards, then what is not finished is cancelled."""
        engine, rng = self.harness.engine, self.rng
        live: dict[str, list[Sequence]] = {}
        while self.counts.total() < stop:
            if len(live) < 12 and rng.random() < 0.3:
                one = self.request()
                live[one.id] = engine.add(one)
            if live and rng.random() < 0.03:
                engine.cancel(str(rng.choice(list(live))))
                self.cancelled += 1
            if rng.random() < 0.05:
                for model in (self.harness.target, self.draft):
                    model.kv.check()
                    model.threads = int(rng.integers(1, 3))
            if rng.random() < 0.1:
                self.forward(self.harness.target, int(rng.integers(1, MOST_ROWS + 1)))
            before, busy = self.counts.total(), engine.has_work
            engine.step()
            assert self.counts.total() > before or not busy, "the engine makes no progress"
            for id in [id for id, seqs in live.items() if all(seq.finish for seq in seqs)]:
                self.stats = total([self.stats, *(seq.stats for seq in live.pop(id))])
        for id in live:
            engine.cancel(id)

    def request(self) -> Request:
        rng = self.rng
        self.num_requests += 1
        start = rng.integers(3, VOCAB, int(rng.integers(1, 30))).tolist()
        params = PARAMS[rng.integers(len(PARAMS))] | {"seed": int(rng.integers(100))}
        return Request(
            id=f"mixture-{self.num_requests}",
            prompt=(*start, *start[: int(rng.integers(0, 9))]),
            params=SamplingParams(
                max_tokens=int(rng.integers(1, 20)), n=int(rng.integers(1, 3)), **params
            ),
            drafter=DRAFTERS[rng.integers(len(DRAFTERS))],
            verifier=VERIFIERS[rng.integers(len(VERIFIERS))],
            scope=[None, "shared"][rng.integers(2)],
        )

    def widen(self) -> None:
        """Forwards of the most rows, so that all buffers have their sizes."""
        for threads in (1, 2):
            for model in (self.harness.target, self.draft):
                model.threads = threads
                for _ in range(8):
                    self.forward(model, MOST_ROWS)

    def forward(self, model: Target, size: int) -> None:
        """One outside the engine: of ``size`` rows if there is room, to some depth, with hidden
        states."""
        rng, size = self.rng, min(size, model.kv.num_free)
        if size < 1:
            return
        tokens = rng.integers(3, VOCAB, size)
        num_nodes = int(rng.integers(0, size))
        parents = np.array([rng.integers(-1, i) for i in range(num_nodes)], np.int64)
        tree = TokenTree(tokens=tokens[size - num_nodes :], parents=parents)
        depth = int(rng.integers(0, model.num_layers + 1))
        model.kv.open("forward")
        works = [Work(seq_id="forward", chain=tokens[: size - num_nodes].tolist(), tree=tree)]
        batch = build(works, model.kv, windows=model.windows, dtype=model.dtype)
        model.forward(batch, num_layers=depth, hidden_layers=range(0, depth + 1, 2))
        model.kv.close("forward")


def probes(drafters: list[str], logprobs: int | None = 0) -> list[Request]:
    """Requests whose answers are looked at: each drafter with each way to choose."""
    rng = np.random.default_rng(SEED)
    start = rng.integers(3, VOCAB, 12).tolist()
    more = {"max_tokens": 16, "seed": 5, "n": 2, "logprobs": logprobs}
    return [
        Request(
            id=f"{drafter}, {i}",
            prompt=(*start, *start[: 4 + i]),
            params=SamplingParams(**params | more),
            drafter=drafter,
        )
        for drafter in drafters
        for i, params in enumerate(PARAMS)
    ]


def answers(
    harness: Harness, requests: list[Request]
) -> list[tuple[list[int], list[TokenLogprob]]]:
    """Tokens of the answers to ``requests``, computed together, and their log-probabilities, which
    show a change of a single bit."""
    engine = harness.engine
    seqs = [seq for one in requests for seq in engine.add(one)]
    for _ in range(5000):
        engine.step()
        if not engine.has_work:
            break
    assert not engine.has_work, "the engine makes no progress"
    return [(seq.output, list(seq.logprobs)) for seq in seqs]


def engine_of(target: Target, draft: Target) -> Harness:
    """An engine with little room: prompts in chunks, a batch that is smaller than the queue."""
    return make_engine(
        target,  # type: ignore[arg-type]
        drafts={"m": draft},  # type: ignore[dict-item]
        tokenizer=False,
        end_tokens=(),
        chunk=7,
        max_step_tokens=60,
        max_batch=6,
    )


def model_of(family: str, format: str) -> Target:
    if format == "float32":
        return tiny_decoder(weights(family), num_slots=NUM_SLOTS)
    return native(family, format, num_slots=NUM_SLOTS)


def assert_empty(harness: Harness, draft: Target) -> None:
    """Nothing runs, so nobody holds a slot."""
    assert not harness.engine.has_work
    for model in (harness.target, draft):
        assert not model.kv._tables
        model.kv.check()
        model.kv.clear()
        model.kv.check()
        assert model.kv.num_free == model.kv.num_slots, "slots leaked"
        assert not model.kv._refs.any()


def endure(family: str, format: str, num_forwards: int) -> None:
    print(f"seed {SEED}")
    counts: Counter[int] = Counter()
    target = counted(model_of(family, format), counts)
    draft = counted(model_of(family, "int4"), counts)
    harness = engine_of(target, draft)
    mixture = Mixture(harness, draft, np.random.default_rng(SEED), counts)
    # Rows of the PyTorch twin differ in the last bits: only its tokens must be the same.
    logprobs = 0 if isinstance(target, NativeDecoder) else None
    plain = answers(harness, probes(["none"], logprobs))
    mixture.widen()
    memory: list[Memory] = []
    for leg in range(1, 5):
        mixture.run(leg * num_forwards // 4)
        got = answers(harness, probes(DRAFTERS, logprobs))
        assert got == plain * len(DRAFTERS), f"after {counts.total()} forwards"
        assert_empty(harness, draft)
        memory.append(Memory.now())
    print(*memory, sep="\n")
    # The first leg warmed up: caches filled. An object or a small tensor a forward would be more.
    first, last = memory[0], memory[-1]
    assert last.blocks - first.blocks < num_forwards // 4
    assert last.heap - first.heap < 500_000 + 64 * num_forwards
    assert last.resident - first.resident < 4 * 2**20
    # The mixture was one.
    stats = mixture.stats
    assert counts.total() >= num_forwards
    assert set(range(1, 25)) < set(counts), "not all numbers of rows"
    assert max(counts) > 55
    assert mixture.cancelled > num_forwards // 300
    assert stats.preemptions > 0
    assert 0 < stats.accepted < stats.drafted
    assert stats.faults == 0


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize(
    ("family", "format", "num_forwards"),
    [
        ("llama", "int8", 6_000),
        ("gemma3", "int4", 1_500),
        ("qwen2-sliding", "bfloat16", 1_500),
        ("llama", "float32", 1_500),
    ],
)
def test_many_forwards_leak_and_change_nothing(family: str, format: str, num_forwards: int) -> None:
    endure(family, format, num_forwards)


@pytest.mark.real  # needs no model, but minutes
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize("format", ["bfloat16", "int8", "int4", "float32"])
def test_very_many_forwards_leak_and_change_nothing(format: str) -> None:
    endure("llama", format, 100_000)


# Threads and instruction sets.


@pytest.mark.parametrize("isa", available_sets())
@pytest.mark.parametrize("format", ["bfloat16", "int8", "int4"])
def test_answers_on_every_instruction_set(
    format: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chosen as a user does, by OUTRIDER_ISA, for target and draft model alike."""
    monkeypatch.setenv("OUTRIDER_ISA", isa)
    load_library.cache_clear()
    try:
        target, draft = model_of("gemma3", format), model_of("gemma3", "int4")
    finally:
        load_library.cache_clear()
    assert isinstance(target, NativeDecoder)
    assert isinstance(draft, NativeDecoder)
    assert target._library.isa == draft._library.isa == isa
    harness, drafters = engine_of(target, draft), DRAFTERS[2:]
    plain = [answers(harness, [one]) for one in probes(["none"])]  # one at a time, 1 thread
    expected = [answer for alone in plain for answer in alone]
    for threads in (1, 2):
        target.threads = draft.threads = threads
        for model in (target, draft):
            model.kv.clear()
        got = answers(harness, probes(drafters))
        assert got == expected * len(drafters), threads
