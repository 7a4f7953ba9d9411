"""The native decoder as the engine's target, and what its callers may do wrong."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gguf_writer import tokenizer
from harness import Harness, make_engine
from outrider.batch import Work, build
from outrider.errors import BadFile
from outrider.kernels.formats import quantise, unpack
from outrider.metrics import Stats
from outrider.models.decoder import Decoder
from outrider.models.load import load
from outrider.models.native import NativeDecoder
from outrider.request import Request, SamplingParams
from outrider.tree import TokenTree
from tiny import VOCAB, tiny_config, tiny_decoder, tiny_hf

Target = Decoder | NativeDecoder

TREE = TokenTree.from_paths([[1, 2, 3], [1, 4], [5, 6]])


@cache
def weights(family: str) -> Any:
    """A small transformers model whose heads the kernels take."""
    return tiny_hf(tiny_config(family, head_dim=64, hidden_size=64, intermediate_size=96))


def native(
    family: str = "llama", format: str = "bfloat16", *, threads: int = 1, **options: Any
) -> NativeDecoder:
    decoder = tiny_decoder(weights(family), dtype=torch.bfloat16, **options)
    return NativeDecoder(decoder, format, threads=threads)


def logits_of(model: Target, length: int, **options: Any) -> torch.Tensor:
    """Logits of a prompt's end and a tree, of a sequence that is closed again."""
    model.kv.open("a")
    work = Work(seq_id="a", chain=list(range(1, length + 1)), tree=TREE)
    batch = build([work], model.kv, windows=model.windows, dtype=model.dtype)
    logits = model.forward(batch, **options).logits
    model.kv.close("a")
    return logits


# What callers ask for.


@pytest.mark.parametrize("make", [native, lambda: tiny_decoder(weights("llama"))])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_layers": 4}, "num_layers is 4, expected 0 to 3"),
        ({"num_layers": -1}, "num_layers is -1, expected 0 to 3"),
        ({"hidden_layers": (4,)}, r"hidden_layers is \(4,\), expected numbers from 0 to 3"),
        ({"hidden_layers": (-1, 0)}, r"hidden_layers is \(-1, 0\), expected numbers from 0 to 3"),
        ({"hidden_layers": (2,), "num_layers": 1}, "expected numbers from 0 to 1"),
    ],
)
def test_layers_that_are_not_there(
    make: Callable[[], Target], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        logits_of(make(), 3, **options)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_layers_in_any_order_and_twice(depth: int) -> None:
    model = native()
    twin = tiny_decoder(weights("llama"))
    layers = (depth, 0, depth)
    states: list[torch.Tensor] = []
    for one in (model, twin):
        one.kv.open("a")
        work = Work(seq_id="a", chain=[3, 1, 4, 1, 5])
        batch = build([work], one.kv, windows=one.windows, dtype=one.dtype)
        hidden = one.forward(batch, hidden_layers=layers, num_layers=depth).hidden
        assert hidden is not None
        states.append(hidden)
    got, expected = states
    assert got.shape == expected.shape == (5, 3 * 64)
    assert torch.equal(got[:, :64], got[:, 128:])
    assert (got - expected).norm() / expected.norm() < 0.03


# Threads.


def test_decoders_with_other_numbers_of_threads_take_turns() -> None:
    expected = logits_of(native(), 21)
    models = [native(threads=threads) for threads in (4, 2, 5)]
    for turn in range(30):
        assert torch.equal(logits_of(models[turn % 3], 21), expected), turn


def test_decoders_in_python_threads() -> None:
    expected = logits_of(native(), 21)
    wrong: list[int] = []

    def run(model: NativeDecoder) -> None:
        for _ in range(15):
            if not torch.equal(logits_of(model, 21), expected):
                wrong.append(model.threads)

    models = [native(threads=threads) for threads in (4, 2)]
    callers = [threading.Thread(target=run, args=(model,)) for model in models]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


SCRIPT = """
import os, torch
from test_native import logits_of, native

torch.set_num_threads(1)
model = native(threads=3)
expected = logits_of(model, 21)
child = os.fork()
same = torch.equal(logits_of(model, 21), expected)
if child == 0:
    os._exit(0 if same else 1)
assert same
assert os.waitpid(child, 0)[1] == 0

import resource, numpy as np
from outrider.batch import Work, build
from outrider.models.native import NativeDecoder
from tiny import tiny_config, tiny_decoder, tiny_hf

LENGTH = 100_000
config = tiny_config("llama", head_dim=64, num_hidden_layers=1, num_key_value_heads=1)
decoder = tiny_decoder(
    tiny_hf(config), dtype=torch.bfloat16, num_slots=LENGTH + 64, prefix_cache=False
)
model = NativeDecoder(decoder, "bfloat16", threads=4)
model.kv.open("a")
model.kv.reserve("a", LENGTH)
model.kv.commit("a", np.arange(LENGTH), [1] * LENGTH)

def run(num_tokens):
    batch = build([Work(seq_id="a", chain=[1] * num_tokens)], model.kv, windows=())
    return batch, model.forward(batch).logits

_, first = run(1)
model.kv.commit("a", np.empty(0, np.int64), ())
batch = build([Work(seq_id="a", chain=[1] * 16)], model.kv, windows=())
pages = int(open("/proc/self/statm").read().split()[0])
old = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 4 * 2**20, old[1]))
try:
    model.forward(batch)
    raise SystemExit("expected MemoryError")
except MemoryError as error:
    assert "a forward of 16 tokens" in str(error), error
resource.setrlimit(resource.RLIMIT_AS, old)
assert torch.isfinite(model.forward(batch).logits).all()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="fork and limits of Linux")
def test_a_fork_and_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child has the bits of its parent; memory that runs out is an error that can be caught."""
    # Freed memory goes back at once, so that the limit means what it says.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def test_buffers_follow_the_forward() -> None:
    """Small after large and large after small, with more and fewer threads."""
    model = native("gemma3", "int8")
    for length, threads in ((1, 1), (37, 3), (2, 5), (50, 1), (16, 2), (50, 4)):
        model.threads = threads
        fresh = logits_of(native("gemma3", "int8"), length)
        assert torch.equal(logits_of(model, length), fresh), length


def test_without_a_compiler_pytorch_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the numbers that the kernels would have multiplied by."""
    from outrider.kernels import library

    folder = tmp_path / "model"
    weights("llama").to(torch.bfloat16).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    with_kernels = load(str(folder), dtype="int8").model
    assert isinstance(with_kernels, NativeDecoder)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setattr(library, "INSTALLED", tmp_path)
    library.load_library.cache_clear()
    library._built.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="runs on PyTorch.*: false failed: exit status 1"):
            model = load(str(folder), dtype="int8").model
    finally:
        library.load_library.cache_clear()
        library._built.cache_clear()
    assert isinstance(model, Decoder)
    packed = unpack(with_kernels.packed[0])[:, : model.hidden_size]
    assert torch.equal(model.layers[0].qkv.weight.float(), packed.bfloat16().float())
    assert torch.isfinite(logits_of(model, 5)).all()


def test_stored_weights_of_another_shape_are_refused() -> None:
    """Also where the padding makes them as large as the right ones."""
    name = "layers.0.mlp.down_proj.weight"
    decoder = tiny_decoder(weights("llama"), dtype=torch.bfloat16)
    assert decoder.matrices()[name].shape == (64, 96)
    stored = {name: quantise(torch.randn(64, 80), "int4")}
    with pytest.raises(BadFile, match=rf"{name} has shape \(64, 80\), expected \(64, 96\)"):
        NativeDecoder(decoder, "int4", stored=stored)


# Answers. Every drafter gives those of plain decoding, bit for bit, in a pool that is too small.

DRAFTERS = [
    "ngram:k=4,n=2",
    "suffix:k=6,width=2",
    "draft:m,k=3",
    "draft:m,k=6,width=2",
    "ensemble:[ngram:k=2,draft:m,k=3,suffix:k=2]",
]

PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 0.5, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
]


def requests() -> list[Request]:
    """One for each way to choose; their prompts begin alike and repeat themselves."""
    rng = np.random.default_rng(1)
    start = rng.integers(3, VOCAB, 18).tolist()
    return [
        Request(
            id=str(i),
            prompt=(*start, *start[: 5 + i], *rng.integers(3, VOCAB, 2).tolist()),
            params=SamplingParams(max_tokens=24, seed=7 + i, n=2, **params),
        )
        for i, params in enumerate(PARAMS)
    ]


def target(family: str, format: str, **options: Any) -> Target:
    if format == "float32":
        return tiny_decoder(weights(family), **options)
    return native(family, format, **options)


def engine(model: Any, draft: Any, drafter: str, **config: int) -> Harness:
    return make_engine(
        model, drafts={"m": draft}, tokenizer=False, end_tokens=(), drafter=drafter, **config
    )


@pytest.mark.parametrize(
    ("family", "format"),
    [
        ("llama", "bfloat16"),
        ("gemma3", "bfloat16"),
        ("gemma3", "int8"),
        ("qwen2-sliding", "int4"),
        ("llama", "float32"),
    ],
)
def test_answers_are_those_of_plain_decoding(family: str, format: str) -> None:
    roomy = target(family, format, prefix_cache=False)
    draft = target(family, "float32" if format == "float32" else "int4")
    plain = engine(roomy, draft, "none")
    expected = [[answer.essence for answer in plain.run(one)] for one in requests()]
    model = target(family, format, num_slots=64)
    stats: list[Stats] = []
    for drafter in DRAFTERS:
        harness = engine(model, draft, drafter, chunk=7, max_step_tokens=40, max_batch=5)
        answers = harness.run(*requests(), arrivals=(0, 1, 3))
        got = [answer.essence for answer in answers]
        assert got == [essence for one in expected for essence in one], drafter
        stats += [answer.seq.stats for answer in answers]
    assert sum(one.preemptions for one in stats) > 2, "the pool is large enough"
    assert sum(one.accepted for one in stats) > 20
