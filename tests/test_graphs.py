"""Forwards of fixed shapes: what they compute, what padding may not change, how they are replayed.

Everything but ``torch.cuda.graph`` itself runs here: a recorder that replays into fixed results
stands for it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from harness import make_engine
from outrider.batch import Work, build
from outrider.models import grid
from outrider.models.base import Forward, Model
from outrider.models.decoder import Decoder
from outrider.models.graphs import GraphDecoder
from outrider.request import Request, SamplingParams
from outrider.tree import ROOT, TokenTree
from tiny import FAMILIES, VOCAB, tiny_config, tiny_decoder, tiny_hf

TREE = TokenTree.from_paths([[3, 4, 5], [3, 6], [7, 8]])


@cache
def weights(family: str) -> Any:
    return tiny_hf(tiny_config(family, max_position_embeddings=2048))


def decoder(family: str = "llama", **options: Any) -> Decoder:
    return tiny_decoder(weights(family), **options)


class Aliasing:
    """Replays like a CUDA graph: into the tensors of the recording, all overwritten by the next
    replay of any recording."""

    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = 0
        self._results: list[Forward] = []

    def record(self, run: Callable[[], Forward]) -> Callable[[], Forward]:
        self.num_recorded += 1
        fixed = run()
        self._results.append(fixed)

        def replay() -> Forward:
            self.num_replayed += 1
            for result in self._results:
                for tensor in (result.logits, result.hidden):
                    if tensor is not None:
                        tensor.fill_(math.nan)
            fresh = run()
            fixed.logits.copy_(fresh.logits)
            if fixed.hidden is not None and fresh.hidden is not None:
                fixed.hidden.copy_(fresh.hidden)
            return fixed

        return replay


def run(model: Model, works: Seq[Work], **options: Any) -> Forward:
    batch = build(works, model.kv, windows=model.windows, dtype=model.dtype, device=model.device)
    return model.forward(batch, **options)


def commit(model: Model, work: Work, node: int = ROOT) -> None:
    path = work.tree.path(node)
    keep = [*range(len(work.chain)), *(len(work.chain) + node for node in path)]
    tokens = [*work.chain, *(int(work.tree.tokens[node]) for node in path)]
    model.kv.commit(work.seq_id, np.array(keep, np.int64), tokens)


def start(model: Model, seq_id: str, tokens: Seq[int]) -> None:
    model.kv.open(seq_id)
    work = Work(seq_id=seq_id, chain=tokens)
    run(model, [work])
    commit(model, work)


def close_to(got: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert got is not None
    assert expected is not None
    torch.testing.assert_close(got, expected, rtol=0.0, atol=2e-4)


# What is computed.


def random_work(rng: random.Random, seq_id: str, is_new: bool) -> Work:
    if is_new:
        return Work(seq_id=seq_id, chain=[rng.randrange(VOCAB) for _ in range(rng.randint(1, 90))])
    num_nodes = rng.choice([0, 0, 1, 4, rng.randint(0, 20)])
    parents = [rng.randint(max(ROOT, i - 4), i - 1) for i in range(num_nodes)]
    tree = TokenTree(
        tokens=np.array([rng.randrange(VOCAB) for _ in parents], np.int64),
        parents=np.array(parents, np.int64),
    )
    chain = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 1, 1, 2, 9]))]
    return Work(seq_id=seq_id, chain=chain, tree=tree, logits=rng.random() < 0.9)


@pytest.mark.parametrize("fixed_tokens", [None, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_random_traffic_equals_the_plain_decoder(family: str, fixed_tokens: int | None) -> None:
    seed = sum(family.encode())
    rng = random.Random(seed)
    plain = decoder(family, num_slots=2048)
    recorder = Aliasing()
    model = GraphDecoder(
        decoder(family, num_slots=2048),
        recorder=recorder,
        max_tokens=32,
        fixed_tokens=fixed_tokens,
    )
    running: list[str] = []
    for step in range(40):
        new = [f"s{step}"] if (len(running) < 5 and rng.random() < 0.5) or not running else []
        for seq_id in new:
            plain.kv.open(seq_id)
            model.kv.open(seq_id)
        ran = [*rng.sample(running, rng.randint(min(1, len(running)), len(running))), *new]
        works = [random_work(rng, seq_id, seq_id in new) for seq_id in ran]
        options: dict[str, Any] = {"hidden_layers": (1, 3, 0)} if rng.random() < 0.3 else {}
        expected, got = run(plain, works, **options), run(model, works, **options)
        assert got.logits.dtype == expected.logits.dtype
        close_to(got.logits, expected.logits)
        if options:
            close_to(got.hidden, expected.hidden)
        for work in works:
            node = rng.randint(ROOT, len(work.tree) - 1)
            commit(plain, work, node)
            commit(model, work, node)
        running += new
        if running and rng.random() < 0.15:
            seq_id = running.pop(0)
            plain.kv.close(seq_id)
            model.kv.close(seq_id)
    assert recorder.num_recorded == model.num_recorded > 0, f"seed {seed}"
    assert recorder.num_replayed > 5, f"seed {seed}"


def test_nodes_of_earlier_forwards_are_seen() -> None:
    """Draft models add a level of their tree at a time."""
    plain, model = decoder(), GraphDecoder(decoder())
    for one in (plain, model):
        start(one, "a", range(20))
        run(one, [Work(seq_id="a", chain=[5], tree=TREE.truncate(2, 9))])
    work = Work(seq_id="a", chain=[5], tree=TREE, start=2)
    assert TREE.truncate(2, 9).tokens.tolist() == TREE.tokens[:2].tolist()
    close_to(run(model, [work]).logits, run(plain, [work]).logits)


def test_stopping_early() -> None:
    plain, model = decoder(), GraphDecoder(decoder())
    for one in (plain, model):
        one.kv.open("a")
    work = Work(seq_id="a", chain=[1, 2, 3], tree=TREE)
    for _ in range(3):
        got = run(model, [work], num_layers=1, hidden_layers=(1,))
        expected = run(plain, [work], num_layers=1, hidden_layers=(1,))
        close_to(got.logits, expected.logits)
        close_to(got.hidden, expected.hidden)
    with pytest.raises(ValueError, match="num_layers is 4, expected 0 to 3"):
        run(model, [work], num_layers=4)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_chunks_of_keys_change_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = (GraphDecoder(decoder(family)) for _ in range(2))
    rng = random.Random(4)
    prompt = [rng.randrange(VOCAB) for _ in range(300)]
    works = [Work(seq_id="a", chain=[1], tree=TREE), Work(seq_id="b", chain=[9, 8])]
    results = []
    for model in (whole, cut):
        if model is cut:
            monkeypatch.setattr(grid, "SCORE_BYTES", 0)
        start(model, "a", prompt)
        start(model, "b", prompt[:70])
        results.append(run(model, works).logits)
    close_to(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types(dtype: torch.dtype) -> None:
    """As near to float32 as the plain decoder of the same type is."""
    models: list[Model] = [
        decoder(),
        decoder(dtype=dtype),
        GraphDecoder(decoder(dtype=dtype)),
        GraphDecoder(decoder(dtype=dtype), fixed_tokens=4),
    ]
    results = []
    for model in models:
        start(model, "a", list(range(3, 60)))
        work = Work(seq_id="a", chain=[1], tree=TREE)
        results.append(run(model, [work]).logits.float())
    exact, plain, *others = results
    error = float((plain - exact).norm())
    assert error > 0.0
    for other in others:
        assert float((other - exact).norm()) < 1.5 * error


# What may not change a bit.


def two_runs(change: Callable[[GraphDecoder], Seq[Work]], **options: Any) -> list[torch.Tensor]:
    """Logits of sequence "a", before and after ``change``; its works may follow those of a."""
    model = GraphDecoder(decoder("gemma3", num_slots=256), **options)
    start(model, "a", list(range(30)))
    mine = Work(seq_id="a", chain=[4], tree=TREE)
    first = run(model, [mine]).logits
    model.kv.commit("a", np.empty(0, np.int64), ())
    others = change(model)
    return [first, run(model, [mine, *others]).logits[: len(first)]]


@pytest.mark.parametrize("options", [{}, {"fixed_tokens": 8}])
def test_slots_of_nobody_are_never_read(options: dict[str, Any]) -> None:
    def spoil(model: GraphDecoder) -> Seq[Work]:
        mine = set(model.kv.slots("a").tolist())
        others = [slot for slot in range(model.kv.num_slots) if slot not in mine]
        for layer in model.decoder.layers:
            layer.pool[others] = math.nan
            layer.pool[-1] = math.nan  # where padding writes
        return ()

    first, second = two_runs(spoil, **options)
    assert torch.equal(first, second)


@pytest.mark.parametrize("max_tokens", [16, 64])
def test_broken_numbers_stay_where_they_are(max_tokens: int) -> None:
    """Also where padding copies them (the first row's, in a forward that no grid fits)."""
    model = GraphDecoder(decoder(num_slots=256), max_tokens=max_tokens)
    for seq_id in "abc":
        start(model, seq_id, list(range(9)))
    works = [Work(seq_id="a", chain=[1], tree=TREE)]
    works += [Work(seq_id=seq_id, chain=[1]) for seq_id in "bc"]
    expected = run(model, works).logits
    before = model.num_recorded
    slots = model.kv.slots("a").tolist()
    for layer in model.decoder.layers:
        layer.pool[slots] = math.nan
    for _ in range(3):
        got = run(model, works).logits
        assert got[:-2].isnan().all()
        assert torch.equal(got[-2:], expected[-2:])
    assert model.num_recorded == before + 1
    model.scrub(slots)
    assert run(model, works).logits.isfinite().all()


def test_neighbours_change_no_bit_in_fixed_shapes() -> None:
    def join(model: GraphDecoder) -> Seq[Work]:
        start(model, "b", list(range(60, 90)))
        return [Work(seq_id="b", chain=[3, 4], tree=TREE)]

    first, second = two_runs(join, fixed_tokens=4)
    assert torch.equal(first, second)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2-sliding"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tree_has_the_bits_of_token_after_token(family: str, dtype: torch.dtype) -> None:
    rng = random.Random(8)
    prompt = [rng.randrange(VOCAB) for _ in range(1020)]  # columns of keys grow on the way
    model = GraphDecoder(
        decoder(family, dtype=dtype, num_slots=2048), recorder=Aliasing(), fixed_tokens=8
    )
    start(model, "a", prompt)
    tree = TokenTree.from_paths([[5, 6, 7, 8, 9, 10], [5, 11], [12]])
    at_once = run(model, [Work(seq_id="a", chain=[4], tree=tree)]).logits
    model.kv.commit("a", np.empty(0, np.int64), ())
    for row, token in [(0, 4), *((1 + node, int(tree.tokens[node])) for node in tree.path(5))]:
        work = Work(seq_id="a", chain=[token])
        assert torch.equal(run(model, [work]).logits[0], at_once[row]), row
        commit(model, work)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_answers_are_those_of_plain_decoding(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(1)
    first = rng.integers(3, VOCAB, 12).tolist()
    requests = [
        Request(
            id=str(i),
            prompt=(*first, *first[: 3 + i]),
            params=SamplingParams(max_tokens=20, seed=i, temperature=temperature),
        )
        for i, temperature in enumerate((0.0, 0.8))
    ]

    def answers(drafter: str, **config: int) -> tuple[list[Any], int]:
        model: Any = GraphDecoder(
            decoder(dtype=dtype, num_slots=128), recorder=Aliasing(), fixed_tokens=8
        )
        draft: Any = GraphDecoder(decoder("qwen3", dtype=dtype), recorder=Aliasing())
        harness = make_engine(
            model, drafts={"m": draft}, tokenizer=False, end_tokens=(), drafter=drafter, **config
        )
        done = harness.run(*requests)
        return [answer.essence for answer in done], sum(a.seq.stats.drafted for a in done)

    expected, _ = answers("none", max_batch=1)
    for drafter in ("ngram:k=4,n=2", "draft:m,k=3", "draft:m,k=6,width=2"):
        got, drafted = answers(drafter, chunk=7, max_step_tokens=20)
        assert got == expected, drafter
        assert drafted > 10


# How it is done.


def test_a_shape_is_recorded_when_it_comes_again() -> None:
    recorder = Aliasing()
    model = GraphDecoder(decoder(), recorder=recorder, max_tokens=16)
    start(model, "a", list(range(10)))
    seen = []
    for _ in range(4):
        work = Work(seq_id="a", chain=[1])
        run(model, [work])
        commit(model, work)
        seen.append((recorder.num_recorded, recorder.num_replayed))
    assert seen == [(0, 0), (1, 1), (1, 2), (1, 3)]
    for _ in range(3):  # too large for any bucket
        run(model, [Work(seq_id="a", chain=[1] * 17)])
        model.kv.commit("a", np.empty(0, np.int64), ())
    assert model.num_recorded == recorder.num_recorded == 1


def test_unlike_rows_are_not_forced_into_one_grid() -> None:
    model = GraphDecoder(decoder(num_slots=1024), max_tokens=64)
    for seq_id in "abcdefgh":
        model.kv.open(seq_id)
    works = [Work(seq_id=seq_id, chain=[1] * (40 if seq_id == "a" else 1)) for seq_id in "abcdefgh"]
    for _ in range(2):
        run(model, works)
    assert model.num_recorded == 0
    for _ in range(2):
        run(model, works[1:])
    assert model.num_recorded == 1


def test_results_belong_to_the_caller() -> None:
    model = GraphDecoder(decoder(), recorder=Aliasing())
    start(model, "a", list(range(10)))
    works = [Work(seq_id="a", chain=[token]) for token in range(4)]
    kept = []
    for work in works:
        result = run(model, [work], hidden_layers=(1,))
        assert result.hidden is not None
        kept.append((result, result.logits.clone(), result.hidden.clone()))
        model.kv.commit("a", np.empty(0, np.int64), ())
    for result, logits, hidden in kept:
        assert torch.equal(result.logits, logits)
        assert result.hidden is not None
        assert torch.equal(result.hidden, hidden)


def test_the_shape_that_was_used_longest_ago_goes() -> None:
    recorder = Aliasing()
    model = GraphDecoder(decoder(), recorder=recorder, max_shapes=2)
    start(model, "a", [1])
    recorder.num_recorded = 0

    def steps(*sizes: int) -> int:
        """How many recordings forwards of so many tokens make."""
        before = recorder.num_recorded
        for size in sizes:
            run(model, [Work(seq_id="a", chain=[1] * size)])
            model.kv.commit("a", np.empty(0, np.int64), ())
        return recorder.num_recorded - before

    assert steps(2, 2, 4, 4, 2) == 2
    assert steps(8, 8) == 1  # 4 goes
    assert steps(2, 8) == 0
    assert steps(4, 4) == 1
    assert model.num_recorded == 2


def test_impossible_sizes() -> None:
    with pytest.raises(ValueError, match="max_shapes is 0, expected 1 or more"):
        GraphDecoder(decoder(), max_shapes=0)
    with pytest.raises(ValueError, match="tokens are 0 and None, expected 1 or more"):
        GraphDecoder(decoder(), max_tokens=0)
