"""Our decoder computes what transformers computes, however the tokens are cut up and stored."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
)

from outrider import batch as batch_module
from outrider.batch import ForwardBatch, Work, build
from outrider.models.attention import FOLD_LIMIT
from outrider.models.config import DecoderConfig
from outrider.models.decoder import Decoder
from outrider.models.rope import Rope, RopeTable
from outrider.tree import TokenTree
from tiny import FAMILIES, VOCAB, tiny_config, tiny_decoder, tiny_hf, tiny_pair

TOLERANCE = 1e-4

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
}


def scaled(family: str, rope: str) -> dict[str, Any]:
    """Changes to the configuration of a family that scale its rope."""
    parameters: dict[str, Any] = {**ROPES[rope], "rope_theta": 10_000.0}
    if family == "gemma3":
        local = {"rope_type": "default", "rope_theta": 1_000.0}
        parameters = {"full_attention": parameters, "sliding_attention": local}
    length = 16 if rope == "dynamic" else 64  # dynamic begins where the length ends
    return {"rope_parameters": parameters, "max_position_embeddings": length}


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def random_tree(rng: random.Random, num_nodes: int) -> TokenTree:
    parents = [rng.randrange(-1, node) for node in range(num_nodes)]
    return TokenTree(
        tokens=np.asarray(random_tokens(rng, num_nodes), np.int64),
        parents=np.asarray(parents, np.int64),
    )


@torch.no_grad()
def reference(hf: PreTrainedModel, tokens: Seq[int]) -> torch.Tensor:
    """Logits of transformers for every token, ``[n, V]``, from scratch.

    With dynamic rope token by token, which is how the frequencies are a function of the position.
    """
    ids = torch.tensor([tokens])
    parameters = hf.config.rope_parameters
    if "dynamic" not in (parameters.get("rope_type"), *map(_rope_type, parameters.values())):
        return hf(input_ids=ids).logits[0]
    cache, rows = None, []
    for i in range(len(tokens)):
        out = hf(input_ids=ids[:, i : i + 1], cache=cache, use_cache=True)
        cache = out.cache
        rows.append(out.logits[0, 0])
    return torch.stack(rows)


def _rope_type(value: object) -> object:
    return value.get("rope_type") if isinstance(value, dict) else None


def make_batch(model: Decoder, works: Seq[Work]) -> ForwardBatch:
    return build(works, model.kv, windows=model.windows, dtype=model.dtype, device=model.device)


def all_logits(batch: ForwardBatch) -> ForwardBatch:
    return dataclasses.replace(batch, logit_index=torch.arange(batch.num_tokens))


def feed(model: Decoder, seq_id: str, tokens: Seq[int]) -> torch.Tensor:
    """Compute and commit tokens; the logits of all of them."""
    batch = all_logits(make_batch(model, [Work(seq_id=seq_id, chain=tokens)]))
    logits = model.forward(batch).logits
    model.kv.commit(seq_id, np.arange(len(tokens)), tokens)
    return logits


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0.0, atol=TOLERANCE)


def check_cuts(hf: PreTrainedModel, model: Decoder, tokens: Seq[int], cuts: Seq[int]) -> None:
    """One sequence computed in pieces of the given sizes equals transformers."""
    assert sum(cuts) == len(tokens)
    model.kv.open("s")
    rows, start = [], 0
    for size in cuts:
        rows.append(feed(model, "s", tokens[start : start + size]))
        start += size
    model.kv.close("s")
    assert_close(torch.cat(rows), reference(hf, tokens))


@pytest.mark.parametrize("rope", ["default", *ROPES])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, rope: str) -> None:
    changes = {} if rope == "default" else scaled(family, rope)
    hf, model = tiny_pair(family, prefix_cache=False, **changes)
    rng = random.Random(0)
    length = FOLD_LIMIT + 11
    tokens = random_tokens(rng, length)
    check_cuts(hf, model, tokens, [length])
    check_cuts(hf, model, tokens, [3, 1, length - 9, 5])
    check_cuts(hf, model, tokens, [1] * length)
    check_tree(hf, model, tokens[:17], random_tree(rng, 9))


def check_tree(hf: PreTrainedModel, model: Decoder, tokens: Seq[int], tree: TokenTree) -> None:
    """A tree below a sequence whose last 2 tokens are not computed yet, in one forward; then the
    same tree again, computed in two."""
    expected = tree_reference(hf, tokens, tree)
    model.kv.open("t")
    feed(model, "t", tokens[:-2])
    work = Work(seq_id="t", chain=tokens[-2:], tree=tree)
    assert_close(model.forward(make_batch(model, [work])).logits, expected)
    model.kv.commit("t", np.arange(2), tokens[-2:])
    top = tree.select(range(4))
    first = model.forward(make_batch(model, [Work(seq_id="t", tree=top)])).logits
    second = model.forward(make_batch(model, [Work(seq_id="t", tree=tree, start=4)])).logits
    assert_close(torch.cat([first, second]), expected[1:])
    model.kv.close("t")


def tree_reference(hf: PreTrainedModel, tokens: Seq[int], tree: TokenTree) -> torch.Tensor:
    """Logits after the sequence and after every node, each path from scratch."""
    paths = [tree.path_tokens(node) for node in range(-1, len(tree))]
    return torch.stack([reference(hf, [*tokens, *path])[-1] for path in paths])


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("gather", [False, True], ids=["in-place", "gathered"])
@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_batches_with_holes(
    family: str, gather: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences grow side by side, each step keeping a random branch of a random tree."""
    if gather:
        monkeypatch.setattr(batch_module, "SPREAD", 0)
        monkeypatch.setattr(batch_module, "SLACK", 0)
    hf, model = tiny_pair(family, num_slots=160)
    rng = random.Random(seed)
    tokens = {name: random_tokens(rng, size) for name, size in (("a", 3), ("b", 40), ("c", 9))}
    for name in tokens:
        model.kv.open(name)
    out_of_order = False
    for _ in range(4):
        trees = {name: random_tree(rng, rng.randrange(7)) for name in tokens}
        works = [
            Work(seq_id=name, chain=seq[model.kv.length(name) :], tree=trees[name])
            for name, seq in tokens.items()
        ]
        batch = make_batch(model, works)
        assert all((row.slots is not None) == gather for row in batch.rows)
        logits = model.forward(batch).logits
        for work, rows in zip(works, batch.logit_rows, strict=True):
            seq, tree = tokens[work.seq_id], trees[work.seq_id]
            assert_close(logits[rows], tree_reference(hf, seq, tree))
            path = tree.path(rng.randrange(-1, len(tree)))
            keep = [*range(len(work.chain)), *(len(work.chain) + node for node in path)]
            kept = [*work.chain, *(int(tree.tokens[node]) for node in path)]
            model.kv.commit(work.seq_id, np.asarray(keep, np.int64), kept)
            seq += [int(tree.tokens[node]) for node in path]
            seq += random_tokens(rng, 1)
            gaps = np.diff(model.kv.slots(work.seq_id))
            out_of_order |= bool((gaps != 1).any())
    assert out_of_order, "no sequence had a hole: the test tests nothing"


@pytest.mark.parametrize("family", ["mistral", "gemma3", "qwen3"])
def test_long_sequences(family: str) -> None:
    """Past the 512 keys that PyTorch's kernel takes at a time, whole blocks may be masked."""
    hf, model = tiny_pair(family, num_slots=1300)
    tokens = random_tokens(random.Random(0), 1200)
    check_cuts(hf, model, tokens, [1100, 60, 30, 8, 1, 1])


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_prompts_around_the_window(family: str) -> None:
    """A prompt as long as the window is plainly causal, one token more is not."""
    hf, model = tiny_pair(family, sliding_window=FOLD_LIMIT + 8, prefix_cache=False)
    tokens = random_tokens(random.Random(0), FOLD_LIMIT + 9)
    for length in (FOLD_LIMIT + 7, FOLD_LIMIT + 8, FOLD_LIMIT + 9):
        check_cuts(hf, model, tokens[:length], [length])


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states(family: str) -> None:
    """In the order asked for, repeats included, in a batch of a chain with a tree."""
    hf, model = tiny_pair(family)
    before_norm: list[torch.Tensor] = []
    hf.model.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0]))
    rng = random.Random(0)
    tokens, draft = random_tokens(rng, 9), random_tokens(rng, 4)
    with torch.no_grad():
        out = hf(input_ids=torch.tensor([tokens + draft]), output_hidden_states=True)
    states = [*out.hidden_states[:-1], before_norm[0]]
    model.kv.open("s")
    batch = make_batch(model, [Work(seq_id="s", chain=tokens, tree=TokenTree.chain(draft))])
    layers = (3, 0, 2, 2, 1)
    hidden = model.forward(batch, hidden_layers=layers).hidden
    assert hidden is not None
    assert_close(hidden, torch.cat([states[i][0] for i in layers], dim=-1))
    assert model.forward(batch).hidden is None


@pytest.mark.parametrize("family", FAMILIES)
def test_stop_at_a_depth(family: str) -> None:
    """The first layers with the final norm and the head equal a model cut there."""
    hf, model = tiny_pair(family)
    tokens = random_tokens(random.Random(0), 12)
    model.kv.open("s")
    batch = make_batch(model, [Work(seq_id="s", chain=tokens)])
    every = model.forward(batch, hidden_layers=(0, 1, 2, 3)).hidden
    assert every is not None
    for depth in range(4):
        cut = copy.deepcopy(hf)
        cut.model.layers = cut.model.layers[:depth]
        cut.model.config.num_hidden_layers = depth
        fresh = tiny_decoder(hf)
        fresh.kv.open("s")
        some = all_logits(make_batch(fresh, [Work(seq_id="s", chain=tokens)]))
        out = fresh.forward(some, num_layers=depth, hidden_layers=(depth,))
        assert_close(out.logits, reference(cut, tokens))
        assert out.hidden is not None
        assert_close(out.hidden, every[:, 32 * depth : 32 * depth + 32])
        written = [bool(layer.pool.any()) for layer in fresh.layers]
        assert written == [True] * depth + [False] * (3 - depth)
    with pytest.raises(ValueError, match="num_layers is 4"):
        model.forward(batch, num_layers=4)
    with pytest.raises(ValueError, match="hidden_layers"):
        model.forward(batch, num_layers=1, hidden_layers=(2,))


def test_logits_only_where_wanted() -> None:
    hf, model = tiny_pair("llama")
    tokens = random_tokens(random.Random(0), 12)
    for name in "abc":
        model.kv.open(name)
    works = [
        Work(seq_id="a", chain=tokens[:5]),
        Work(seq_id="b", chain=tokens, logits=False),
        Work(seq_id="c", chain=tokens[:7]),
    ]
    logits = model.forward(make_batch(model, works)).logits
    assert_close(logits, reference(hf, tokens)[[4, 6]])
    none = model.forward(make_batch(model, [Work(seq_id="a", chain=tokens, logits=False)])).logits
    assert none.shape == (0, VOCAB)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_rounds_like_transformers(family: str) -> None:
    """The same keys to the bit, and logits much closer to transformers than either is to float32:
    the roundings are at the same places, only sums may run in another order."""
    hf = tiny_hf(tiny_config(family))
    tokens = random_tokens(random.Random(0), 40)
    exact = reference(hf, tokens)
    # Cast at construction: .to(bfloat16) would cast the rope frequencies too.
    half = AutoModelForCausalLM.from_config(hf.config, dtype=torch.bfloat16).eval()
    half.load_state_dict(hf.state_dict())
    with torch.no_grad():
        out = half(input_ids=torch.tensor([tokens]), use_cache=True)
    model = tiny_decoder(half, dtype=torch.bfloat16)
    model.kv.open("s")
    got = feed(model, "s", tokens)
    assert got.dtype == torch.bfloat16
    keys = out.cache.layers[0].keys[0].transpose(0, 1)  # a sliding cache keeps the last ones
    ours = model.layers[0].pool[model.kv.slots("s"), : model.config.num_kv_heads]
    assert torch.equal(ours[-len(keys) :], keys)
    rounded = out.logits[0].float()
    assert (got.float() - rounded).norm() < 0.25 * (rounded - exact).norm()


@pytest.mark.parametrize("rope_type", ["default", *ROPES])
def test_rope_table_does_not_depend_on_its_growth(rope_type: str) -> None:
    parameters = {"rope_type": "default", **ROPES.get(rope_type, {}), "rope_theta": 500.0}
    rope = Rope.from_hf(parameters, head_dim=16, max_positions=64)

    def table() -> RopeTable:
        return RopeTable(rope, length=128, dtype=torch.float32, device=torch.device("cpu"))

    positions = torch.arange(2000)
    at_once, grown = table()(positions), table()
    for last in (0, 255, 256, 300, 1999):
        for got, expected in zip(grown(positions[: last + 1]), at_once, strict=True):
            assert torch.equal(got, expected[: last + 1])
    assert torch.equal(grown(torch.tensor([70, 3]))[1], at_once[1][[70, 3]])


def test_rope_table_off_the_cpu_is_complete_from_the_start() -> None:
    rope = Rope.from_hf(
        {"rope_type": "default", "rope_theta": 500.0}, head_dim=16, max_positions=64
    )
    meta = torch.device("meta")
    table = RopeTable(rope, length=48, dtype=torch.bfloat16, device=meta)
    cos, _ = table(torch.zeros(5, dtype=torch.int64, device=meta))
    assert len(table) >= 48
    assert cos.shape == (5, 1, 16)


def test_attributes() -> None:
    model = tiny_pair("qwen2-sliding", num_slots=77)[1]
    assert (model.vocab_size, model.hidden_size, model.num_layers) == (VOCAB, 32, 3)
    assert model.windows == (None, 6)
    assert (model.dtype, model.device) == (torch.float32, torch.device("cpu"))
    assert model.kv.num_slots == 77
    assert model.kv.prefix_cache
    assert not tiny_pair("llama", prefix_cache=False)[1].kv.prefix_cache
    assert tiny_pair("mistral")[1].windows == (5,)


@pytest.mark.parametrize(
    ("family", "rope", "length"),
    [
        ("llama", "linear", 256),
        ("llama", "dynamic", 32),
        ("llama", "llama3", 64),
        ("qwen2", "yarn", 64),
        ("gemma3", "linear", 64),
    ],
)
def test_context_length(family: str, rope: str, length: int) -> None:
    config = tiny_config(family, **scaled(family, rope))
    assert DecoderConfig.from_hf(config).context_length == length


def test_scrub_zeroes_the_slots_in_every_layer() -> None:
    model = tiny_pair("llama")[1]
    for layer in model.layers:
        layer.pool.fill_(float("nan"))
    model.scrub([3, 7])
    for layer in model.layers:
        assert layer.pool[[3, 7]].eq(0).all()
        assert layer.pool[[2, 4, 6, 8]].isnan().all()
