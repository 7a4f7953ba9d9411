"""Attention of the C++ kernels: what a query's result may depend on, bit for bit, and its twin.

Contexts are written into the pool. In most of them large values cancel, so that a sum taken in
another order is far off.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from outrider.batch import ForwardBatch, Work, build
from outrider.kernels.library import available_sets
from outrider.models.decoder import Decoder
from outrider.models.native import NativeDecoder
from outrider.tree import TokenTree
from tiny import VOCAB, tiny_config, tiny_decoder, tiny_hf

Target = Decoder | NativeDecoder

CONTEXTS = (0, 1, 15, 16, 17, 127, 128, 129, 255, 256, 257, 513)
"""Around the bounds of blocks of 16 and chunks of 128 keys."""

SHAPES = {
    "llama": {},  # 4 heads, 2 key-value heads
    "mistral": {"sliding_window": 100},  # 1 key-value head
    # 5 heads: the queries that go together end inside a token.
    "odd": {"num_attention_heads": 5, "num_key_value_heads": 1, "hidden_size": 80},
    "wide": {
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 128,
        "hidden_size": 96,
    },
}


@cache
def weights(shape: str) -> Any:
    family = shape if shape in ("llama", "mistral") else "llama"
    size = {"head_dim": 64, "hidden_size": 64, "num_hidden_layers": 1}
    hf = tiny_hf(
        tiny_config(family, **{**size, "max_position_embeddings": 2048, **SHAPES[shape]}), seed=1
    )
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.copy_(parameter.bfloat16())
    return hf


def native(shape: str, isa: str | None = None, *, threads: int = 2) -> NativeDecoder:
    decoder = tiny_decoder(weights(shape), dtype=torch.bfloat16, num_slots=2048, prefix_cache=False)
    return NativeDecoder(decoder, "bfloat16", threads=threads, isa=isa)


def pool_of(model: Target) -> torch.Tensor:
    """``[S, 2 * Hkv, d]``: a view of the layer's pool."""
    return model._pools[0] if isinstance(model, NativeDecoder) else model.layers[0].pool


def context(shape: str, length: int, *, seed: int, cancelling: bool = True) -> torch.Tensor:
    """Keys and values bfloat16 ``[length, 2 * Hkv, d]``. ``cancelling``: tokens come in pairs of
    nearly equal keys and nearly opposite values, somewhere in the context."""
    config = weights(shape).config
    generator = torch.Generator().manual_seed(seed)
    size = (length, 2, config.num_key_value_heads, config.head_dim)
    data = torch.randn(size, generator=generator)
    if cancelling:
        order = torch.randperm(length, generator=generator)
        first, second = order[: length // 2], order[length // 2 : length // 2 * 2]
        data[:, 0] *= 0.3
        data[second, 0] = data[first, 0] + 0.003 * data[second, 0]
        data[first, 1] *= 4096
        data[second, 1] -= data[first, 1]
    return data.flatten(1, 2).bfloat16()


def place(model: Target, seq_id: str, data: torch.Tensor) -> None:
    """Open a sequence that has computed ``data``."""
    model.kv.open(seq_id)
    if len(data):
        model.kv.reserve(seq_id, len(data))
        model.kv.commit(seq_id, np.arange(len(data)), [1] * len(data))
        pool = pool_of(model)
        pool[torch.from_numpy(model.kv.slots(seq_id))] = data.to(pool.dtype)


def forward(model: Target, *works: Work) -> torch.Tensor:
    """The state ``[T, D]`` behind the layer."""
    return run(model, build(works, model.kv, windows=model.windows, dtype=model.dtype))


def run(model: Target, batch: ForwardBatch) -> torch.Tensor:
    hidden = model.forward(batch, hidden_layers=(1,)).hidden
    assert hidden is not None
    return hidden


def tokens(number: int, *, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, number).tolist()


def one_by_one(model: NativeDecoder, data: torch.Tensor, chain: list[int]) -> torch.Tensor:
    """The states of ``chain`` behind a context, by forwards of one token each."""
    place(model, "single", data)
    states = []
    for token in chain:
        states.append(forward(model, Work(seq_id="single", chain=[token])))
        model.kv.commit("single", np.arange(1), [token])
    model.kv.close("single")
    return torch.cat(states)


@pytest.mark.parametrize("isa", available_sets())
@pytest.mark.parametrize("shape", SHAPES)
def test_a_chain_is_its_tokens_one_by_one(shape: str, isa: str) -> None:
    model = native(shape, isa)
    for length in CONTEXTS:
        data, chain = context(shape, length, seed=length), tokens(9, seed=length)
        place(model, "a", data)
        together = forward(model, Work(seq_id="a", chain=chain))
        model.kv.close("a")
        assert torch.isfinite(together).all()
        assert torch.equal(together, one_by_one(model, data, chain)), length


@pytest.mark.parametrize("isa", available_sets())
@pytest.mark.parametrize("shape", SHAPES)
def test_threads_and_shares_of_the_work(shape: str, isa: str) -> None:
    """Rows with few queries are split by chunks, rows with many are not: that depends on the
    number of threads, and no result may."""
    model = native(shape, isa)
    for length, num_tokens in ((0, 150), (1, 1), (130, 60), (500, 1), (513, 8), (257, 130)):
        place(model, "a", context(shape, length, seed=length))
        states = []
        for threads in (1, 2, 3, 5, 8):
            model.threads = threads
            states.append(forward(model, Work(seq_id="a", chain=tokens(num_tokens, seed=3))))
            model.kv.commit("a", np.empty(0, np.int64), ())
        model.kv.close("a")
        for state in states[1:]:
            assert torch.equal(state, states[0]), (length, num_tokens)


def test_long_prompts_in_pieces() -> None:
    """Queries see earlier queries through the pool, however the prompt is cut."""
    model = native("odd")
    prompt = tokens(300, seed=4)
    model.kv.open("a")
    whole = forward(model, Work(seq_id="a", chain=prompt))
    model.kv.close("a")
    model.kv.open("a")
    parts, at = [], 0
    for size in (1, 127, 3, 60, 100, 9):
        part = prompt[at : at + size]
        parts.append(forward(model, Work(seq_id="a", chain=part)))
        model.kv.commit("a", np.arange(size), part)
        at += size
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("isa", available_sets())
@pytest.mark.parametrize("shape", ["llama", "mistral"])
def test_a_node_is_the_end_of_its_path(shape: str, isa: str) -> None:
    model = native(shape, isa)
    rng = np.random.default_rng(5)
    for length in (0, 1, 14, 15, 16, 95, 125, 127, 128, 250, 255, 300, 513):
        paths = [rng.integers(3, 9, rng.integers(1, 21)).tolist() for _ in range(4)]
        tree = TokenTree.from_paths(paths)
        data, chain = context(shape, length, seed=length), tokens(2, seed=length)
        place(model, "a", data)
        together = forward(model, Work(seq_id="a", chain=chain, tree=tree))
        model.kv.close("a")
        for leaf in set(range(len(tree))) - set(tree.parents.tolist()):
            path = np.flatnonzero(tree.ancestors[leaf])
            alone = one_by_one(model, data, [*chain, *tree.tokens[path].tolist()])
            got = torch.cat([together[: len(chain)], together[len(chain) + path]])
            assert torch.equal(got, alone), (length, leaf)


@pytest.mark.parametrize("shape", ["llama", "mistral"])
def test_slots_in_any_order(shape: str) -> None:
    model = native(shape)
    tree = TokenTree.from_paths([[5, 6, 7], [5, 8], [9]])
    for length in CONTEXTS:
        place(model, "a", context(shape, length, seed=length))
        works = [Work(seq_id="a", chain=tokens(5, seed=6), tree=tree)]
        batch = build(works, model.kv, windows=())
        expected = run(model, batch)
        pool = pool_of(model)
        order = np.random.default_rng(length).permutation(len(pool))
        pool[torch.from_numpy(order)] = pool.clone()
        moved = replace(
            batch,
            write_slots=torch.from_numpy(order[batch.write_slots.numpy()]),
            rows=tuple(replace(row, table=order[row.table]) for row in batch.rows),
        )
        assert torch.equal(run(model, moved), expected), length
        model.kv.close("a")


def test_other_rows_change_nothing() -> None:
    model = native("llama")
    tree = TokenTree.from_paths([[5, 6, 7], [5, 8], [9]])
    works = [
        Work(seq_id="0", chain=tokens(1, seed=7)),
        Work(seq_id="1", chain=tokens(70, seed=8)),
        Work(seq_id="2", chain=tokens(2, seed=9), tree=tree),
        Work(seq_id="3", chain=tokens(3, seed=10)),
    ]
    for work, length in zip(works, (513, 0, 126, 1), strict=True):
        place(model, work.seq_id, context("llama", length, seed=length))
    together = forward(model, *works)
    for work in works:
        model.kv.commit(work.seq_id, np.empty(0, np.int64), ())
    alone = torch.cat([forward(model, work) for work in works])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("isa", available_sets())
def test_nothing_before_the_window_counts(isa: str) -> None:
    model = native("mistral", isa)
    window = SHAPES["mistral"]["sliding_window"]
    for length in (100, 127, 128, 150, 227, 228, 229, 300, 513):
        states = []
        for seed in (1, 2):  # other tokens before the window
            data = context("mistral", length, seed=length)
            before = length - (window - 1)
            data[:before] = context("mistral", before, seed=seed)
            place(model, "a", data)
            states.append(forward(model, Work(seq_id="a", chain=tokens(4, seed=length))))
            if seed == 1:  # the first token of the window does count
                pool_of(model)[torch.from_numpy(model.kv.slots("a"))[before]] += 1000
                model.kv.commit("a", np.empty(0, np.int64), ())
                other = forward(model, Work(seq_id="a", chain=tokens(4, seed=length)))
                assert not torch.equal(other[0], states[0][0]), length
            model.kv.close("a")
        assert torch.equal(*states), length


@pytest.mark.parametrize("isa", available_sets())
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_its_twin(shape: str, isa: str) -> None:
    model, twin = native(shape, isa), tiny_decoder(weights(shape), num_slots=2048)
    tree = TokenTree.from_paths([[5, 6, 7], [5, 8], [9]])
    for length in CONTEXTS:
        data = 2 * context(shape, length, seed=length, cancelling=False)
        work = Work(seq_id="a", chain=tokens(2, seed=length), tree=tree)
        states = []
        for one in (model, twin):
            place(one, "a", data)
            states.append(forward(one, work))
            one.kv.close("a")
        error = (states[0] - states[1]).norm() / states[1].norm()
        assert error < 0.015, (length, error)


def inputs(model: Target, value: float, at: int, length: int, part: int) -> torch.Tensor:
    """States of two rows: in the first one's context, a number of a token's key (``part`` 0) or
    value (1) is ``value``."""
    data = context("llama", length, seed=1)
    place(model, "good", data)
    bad = data.clone()
    bad[at, 2 * part : 2 * part + 2, 3] = value
    place(model, "bad", bad)
    states = forward(model, *(Work(seq_id=one, chain=[5]) for one in ("bad", "good")))
    for one in ("bad", "good"):
        model.kv.close(one)
    model.scrub(range(2048))
    return states


@pytest.mark.parametrize("isa", available_sets())
@pytest.mark.parametrize("part", [0, 1])
def test_what_is_no_number_is_not_hidden(part: int, isa: str) -> None:
    model = native("llama", isa)
    for at in (0, 100, 127, 128, 199):
        bad, good = inputs(model, float("nan"), at, 200, part)
        assert not torch.isfinite(bad).any(), at
        assert torch.isfinite(good).all(), at
    if part == 1:
        assert not torch.isfinite(inputs(model, float("inf"), 100, 200, part)[0]).any()


@pytest.mark.parametrize("isa", available_sets())
def test_scores_of_minus_infinity_weigh_nothing(isa: str) -> None:
    """Also where all scores of a chunk are: the first one, a later one, or both."""
    hf = tiny_hf(
        tiny_config(
            "llama-bias-tied",
            head_dim=64,
            hidden_size=64,
            num_hidden_layers=1,
            max_position_embeddings=2048,
        )
    )
    with torch.no_grad():
        # Every query is large in the dimension that the rotation turns least.
        hf.model.layers[0].self_attn.q_proj.bias[31::64] = 100
    decoder = tiny_decoder(hf, dtype=torch.bfloat16, num_slots=2048, prefix_cache=False)
    model = NativeDecoder(decoder, "bfloat16", isa=isa)
    twin = tiny_decoder(hf, num_slots=2048, prefix_cache=False)
    generator = torch.Generator().manual_seed(1)
    data = torch.randn((400, 8, 64), generator=generator).bfloat16()
    data[:, :4, 31] = 0
    for hidden in (slice(0, 1), slice(0, 128), slice(128, 256), slice(5, 300), slice(0, 400)):
        masked = data.clone()
        masked[hidden, :4, 31] = -3e38
        states = []
        for one in (model, twin):
            place(one, "a", masked)
            states.append(forward(one, Work(seq_id="a", chain=[5])))
            one.kv.close("a")
        error = (states[0] - states[1]).norm() / states[1].norm()
        assert error < 0.02, (hidden, error)
