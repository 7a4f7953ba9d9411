"""Batches, by what a model makes of them: a query must see exactly its own path."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import numpy as np
import pytest
import torch

from fake_model import FakeModel
from outrider.batch import ForwardBatch, Work, build
from outrider.errors import OutOfSlots
from outrider.models.base import Forward, Model
from outrider.tree import ROOT, TokenTree

TREE = TokenTree.from_paths([[3, 4, 5], [3, 6], [7, 7, 7, 7], [8]])
PROMPT = [9, 2, 9, 4, 1, 7, 3, 0, 5, 5]
WINDOWS: list[tuple[int | None, ...]] = [(None,), (4,), (None, 3), (2, None), (3, 64), (64,)]


def forward(model: FakeModel, works: list[Work]) -> tuple[ForwardBatch, list[torch.Tensor]]:
    """One forward; the logits of each work."""
    batch = build(works, model.kv, windows=model.windows)
    model.kv.check()
    logits = model.forward(batch).logits
    return batch, [logits[rows] for rows in batch.logit_rows]


def expect(model: FakeModel, logits: torch.Tensor, paths: list[list[int]]) -> None:
    """Row i of ``logits`` is what the model says after the tokens of path i."""
    assert len(logits) == len(paths)
    for row, path in zip(logits, paths, strict=True):
        assert torch.equal(row, model.plain_logits(path)), f"after {path}"


def tree_paths(tokens: list[int], tree: TokenTree, start: int = 0) -> list[list[int]]:
    return [[*tokens, *tree.path_tokens(node)] for node in range(start, len(tree))]


def compute(model: FakeModel, seq_id: str, tokens: list[int]) -> None:
    """Compute and commit tokens."""
    forward(model, [Work(seq_id=seq_id, chain=tokens, logits=False)])
    model.kv.commit(seq_id, np.arange(len(tokens)), tokens)


@pytest.fixture(params=WINDOWS, ids=str)
def model(request: pytest.FixtureRequest) -> FakeModel:
    return FakeModel(windows=request.param, num_slots=400)


def test_whole_prompt(model: FakeModel) -> None:
    model.kv.open("a")
    batch, (logits,) = forward(model, [Work(seq_id="a", chain=PROMPT)])
    expect(model, logits, [PROMPT])
    assert batch.num_tokens == len(PROMPT)
    assert batch.positions.tolist() == list(range(len(PROMPT)))
    assert batch.rows[0].causal


def test_prompt_in_chunks(model: FakeModel) -> None:
    model.kv.open("a")
    for start in range(0, len(PROMPT), 3):
        chunk = PROMPT[start : start + 3]
        batch, (logits,) = forward(model, [Work(seq_id="a", chain=chunk)])
        assert batch.rows[0].causal == (start == 0)
        expect(model, logits, [PROMPT[: start + len(chunk)]])
        model.kv.commit("a", np.arange(len(chunk)), chunk)


def test_one_token_at_a_time(model: FakeModel) -> None:
    model.kv.open("a")
    for i, token in enumerate(PROMPT):
        _, (logits,) = forward(model, [Work(seq_id="a", chain=[token])])
        expect(model, logits, [PROMPT[: i + 1]])
        model.kv.commit("a", np.arange(1), [token])


def test_a_single_token_needs_no_mask() -> None:
    model = FakeModel()
    model.kv.open("a")
    compute(model, "a", PROMPT)
    batch, _ = forward(model, [Work(seq_id="a", chain=[1])])
    assert batch.rows[0].masks == {None: None}


def test_tree_after_chain(model: FakeModel) -> None:
    model.kv.open("a")
    compute(model, "a", PROMPT[:6])
    batch, (logits,) = forward(model, [Work(seq_id="a", chain=PROMPT[6:], tree=TREE)])
    expect(model, logits, [PROMPT, *tree_paths(PROMPT, TREE)])
    assert not batch.rows[0].causal
    depths = TREE.depths + len(PROMPT) - 1
    assert batch.positions.tolist() == [6, 7, 8, 9, *depths.tolist()]


def test_tree_with_prompt_in_one_forward(model: FakeModel) -> None:
    model.kv.open("a")
    batch, (logits,) = forward(model, [Work(seq_id="a", chain=PROMPT, tree=TREE)])
    expect(model, logits, [PROMPT, *tree_paths(PROMPT, TREE)])
    assert not batch.rows[0].causal


def test_tree_without_chain(model: FakeModel) -> None:
    model.kv.open("a")
    compute(model, "a", PROMPT)
    _, (logits,) = forward(model, [Work(seq_id="a", tree=TREE)])
    expect(model, logits, tree_paths(PROMPT, TREE))


def test_growing_tree(model: FakeModel) -> None:
    """Level by level, as a drafter grows it; the nodes before ``start`` are in scratch."""
    model.kv.open("a")
    compute(model, "a", PROMPT)
    tree = TokenTree.empty()
    for parents in ([ROOT, ROOT], [0, 0, 1], [3, 2, 2], [5]):
        start = len(tree)
        tree = TokenTree(
            tokens=np.append(tree.tokens, [start + i for i in range(len(parents))]),
            parents=np.append(tree.parents, parents),
        )
        batch, (logits,) = forward(model, [Work(seq_id="a", tree=tree, start=start)])
        expect(model, logits, tree_paths(PROMPT, tree, start))
        assert batch.num_tokens == len(parents)
    assert len(model.kv.scratch("a")) == len(tree)


def test_accepted_path_leaves_holes(model: FakeModel) -> None:
    """After a path of a tree is kept its slots are not in a row; later queries see them all."""
    model.kv.open("a")
    compute(model, "a", PROMPT)
    tokens = list(PROMPT)
    for path in ([4, 5, 6, 7], [0, 3], [8], []):
        _, (logits,) = forward(model, [Work(seq_id="a", chain=[1], tree=TREE)])
        tokens.append(1)
        expect(model, logits, [tokens, *tree_paths(tokens, TREE)])
        kept = [int(TREE.tokens[node]) for node in path]
        model.kv.commit("a", np.array([0, *(node + 1 for node in path)]), [1, *kept])
        tokens += kept
    _, (logits,) = forward(model, [Work(seq_id="a", chain=[2])])
    expect(model, logits, [[*tokens, 2]])


def test_scattered_sequence_is_gathered(model: FakeModel) -> None:
    model.kv.open("a")
    compute(model, "a", PROMPT)
    model.kv.fork("a", "b", 7)  # goes on in the middle of the free pool
    chain = [1, 2, 3]
    works = [
        Work(seq_id="b", chain=chain, tree=TREE),
        Work(seq_id="a", chain=chain, tree=TREE),
    ]
    batch, (forked, whole) = forward(model, works)
    assert batch.rows[0].slots is not None
    assert batch.rows[0].first == batch.rows[0].last == 0
    assert batch.rows[1].slots is None
    expect(model, forked, [[*PROMPT[:7], *chain], *tree_paths([*PROMPT[:7], *chain], TREE)])
    expect(model, whole, [[*PROMPT, *chain], *tree_paths([*PROMPT, *chain], TREE)])


def test_rows_and_logits_of_several_sequences() -> None:
    model = FakeModel()
    for seq_id in "abcd":
        model.kv.open(seq_id)
    compute(model, "d", PROMPT)
    works = [
        Work(seq_id="a", chain=PROMPT),
        Work(seq_id="b", chain=PROMPT[:4], logits=False),
        Work(seq_id="c", chain=PROMPT[:2], tree=TREE),
        Work(seq_id="d", tree=TREE.truncate(2, 9)),
    ]
    batch, (a, b, c, d) = forward(model, works)
    expect(model, a, [PROMPT])
    expect(model, b, [])
    expect(model, c, [PROMPT[:2], *tree_paths(PROMPT[:2], TREE)])
    expect(model, d, tree_paths(PROMPT, TREE.truncate(2, 9)))
    edges = [0, *np.cumsum([work.num_tokens for work in works]).tolist()]
    assert [(row.start, row.stop) for row in batch.rows] == list(itertools.pairwise(edges))
    assert batch.num_tokens == edges[-1]
    assert len(set(batch.write_slots.tolist())) == edges[-1]


def test_an_empty_batch() -> None:
    batch = build([], FakeModel().kv)
    assert batch.num_tokens == 0
    assert batch.logit_index.dtype == torch.int64


def test_masks_are_additive_and_of_the_models_type() -> None:
    model = FakeModel()
    model.kv.open("a")
    batch = build([Work(seq_id="a", chain=PROMPT)], model.kv, dtype=torch.bfloat16)
    mask = batch.rows[0].masks[None]
    assert mask is not None
    assert mask.dtype == torch.bfloat16
    causal = torch.full((10, 10), -torch.inf).triu(1)
    assert torch.equal(mask.float(), causal)


def test_a_wide_window_shares_the_full_mask() -> None:
    model = FakeModel(windows=(None, 64, 3))
    model.kv.open("a")
    batch, _ = forward(model, [Work(seq_id="a", chain=PROMPT)])
    masks = batch.rows[0].masks
    assert masks[None] is not None
    assert masks[64] is not None
    assert torch.equal(masks[None], masks[64])
    assert masks[3] is not None
    assert not torch.equal(masks[None], masks[3])


def test_out_of_slots() -> None:
    model = FakeModel(num_slots=12)
    model.kv.open("a")
    with pytest.raises(OutOfSlots):
        build([Work(seq_id="a", chain=PROMPT, tree=TREE)], model.kv)
    assert len(model.kv.scratch("a")) == 0


def test_reserved_slots_are_used_and_not_doubled() -> None:
    """A scheduler may reserve beforehand."""
    model = FakeModel()
    model.kv.open("a")
    reserved = model.kv.reserve("a", 14).tolist()
    batch, (logits,) = forward(model, [Work(seq_id="a", chain=PROMPT)])
    assert batch.write_slots.tolist() == reserved[: len(PROMPT)]
    assert model.kv.scratch("a").tolist() == reserved
    expect(model, logits, [PROMPT])


@pytest.mark.parametrize("seed", range(12))
def test_random_traffic(seed: int) -> None:
    """Sequences come, are forked, grow by chunks and by paths of random trees, and go."""
    rng = random.Random(seed)
    model = FakeModel(windows=rng.choice(WINDOWS), num_slots=600, seed=seed)
    kv = model.kv
    computed: dict[str, list[int]] = {}
    for step in range(25):
        if len(computed) < 4 and rng.random() < 0.5:
            name = f"s{step}"
            if computed and rng.random() < 0.4:
                source = rng.choice(list(computed))
                length = rng.randint(0, len(computed[source]))
                kv.fork(source, name, length)
                computed[name] = computed[source][:length]
            else:
                prompt = [rng.randrange(2)] * rng.randint(1, 60)
                computed[name] = prompt[: kv.open(name, prompt)]
        works = []
        for name, tokens in computed.items():
            num_chain = rng.randint(0 if tokens else 1, 20 if rng.random() < 0.3 else 2)
            num_nodes = rng.randint(0 if num_chain else 1, 8)
            tree = TokenTree(
                tokens=np.array([rng.randrange(9) for _ in range(num_nodes)], np.int64),
                parents=np.array([rng.randint(ROOT, i - 1) for i in range(num_nodes)], np.int64),
            )
            chain = [tokens[-1] if tokens else 1] * num_chain
            works.append(Work(seq_id=name, chain=chain, tree=tree))
        if not works:
            continue
        _, all_logits = forward(model, works)
        for work, logits in zip(works, all_logits, strict=True):
            tokens = [*computed[work.seq_id], *work.chain]
            expect(model, logits, [[*tokens]][: len(work.chain)] + tree_paths(tokens, work.tree))
            path = work.tree.path(rng.randint(ROOT, len(work.tree) - 1))
            keep = [*range(len(work.chain)), *(len(work.chain) + node for node in path)]
            kept = [*work.chain, *(int(work.tree.tokens[node]) for node in path)]
            kv.commit(work.seq_id, np.array(keep, np.int64), kept)
            computed[work.seq_id] += kept
            if len(computed[work.seq_id]) > 100 or rng.random() < 0.1:
                kv.close(work.seq_id)
                del computed[work.seq_id]
        kv.check()


# The fake model itself: it must notice what a batch can get wrong.


@pytest.fixture
def tree_batch() -> tuple[FakeModel, ForwardBatch, torch.Tensor]:
    model = FakeModel()
    model.kv.open("a")
    compute(model, "a", PROMPT[:4])
    batch = build([Work(seq_id="a", chain=PROMPT[4:], tree=TREE)], model.kv)
    return model, batch, model.forward(batch).logits


def test_fake_model_is_a_model() -> None:
    model: Model = FakeModel()
    assert isinstance(model.forward(build([], model.kv)), Forward)


def test_every_entry_of_the_mask_matters(
    tree_batch: tuple[FakeModel, ForwardBatch, torch.Tensor],
) -> None:
    model, batch, right = tree_batch
    (row,) = batch.rows
    mask = row.masks[None]
    assert mask is not None
    for query in (5, 6, 9):  # the last chain token and two nodes: rows 0, 1 and 4 of the logits
        for key in range(mask.shape[1]):
            wrong = mask.clone()
            wrong[query, key] = 0.0 if mask[query, key] < 0.0 else -torch.inf
            rows = (dataclasses.replace(row, masks={None: wrong}),)
            logits = model.forward(dataclasses.replace(batch, rows=rows)).logits
            same = (logits == right).all(1).tolist()
            assert same == [i != query - 5 for i in range(len(right))]


def test_positions_slots_and_tokens_matter(
    tree_batch: tuple[FakeModel, ForwardBatch, torch.Tensor],
) -> None:
    model, batch, right = tree_batch
    last = batch.num_tokens - 1
    for name in ("positions", "input_ids"):
        wrong = getattr(batch, name).clone()
        wrong[last] += 1
        logits = model.forward(dataclasses.replace(batch, **{name: wrong})).logits
        assert (logits == right).all(1).tolist() == [True] * (len(right) - 1) + [False]
    everything_later = dataclasses.replace(batch, positions=batch.positions + 1)
    assert not torch.equal(model.forward(everything_later).logits, right)
    wrong = batch.write_slots.clone()
    wrong[0] = 999  # its slot keeps what was there, but nobody sees the new place
    fresh = FakeModel()
    fresh.kv = model.kv
    assert not torch.equal(
        fresh.forward(dataclasses.replace(batch, write_slots=wrong)).logits, right
    )


def test_fake_model_refuses_impossible_batches(
    tree_batch: tuple[FakeModel, ForwardBatch, torch.Tensor],
) -> None:
    model, batch, _ = tree_batch
    with pytest.raises(AssertionError, match="context"):
        model.forward(dataclasses.replace(batch, positions=batch.positions + 250))
    with pytest.raises(AssertionError, match="vocabulary"):
        model.forward(dataclasses.replace(batch, input_ids=batch.input_ids + 30))
    with pytest.raises(AssertionError, match="one slot"):
        model.forward(dataclasses.replace(batch, write_slots=batch.write_slots * 0))


def test_fake_logits_are_spread_and_seeded() -> None:
    model = FakeModel(vocab_size=1000, scale=4.0)
    logits = model.plain_logits(PROMPT)
    assert logits.dtype == torch.float32
    assert float(logits.abs().max()) <= 4.0
    assert float(logits.std()) == pytest.approx(8 / math.sqrt(12), rel=0.1)
    assert not torch.equal(logits, model.plain_logits(PROMPT[::-1]))
    assert not torch.equal(logits, FakeModel(vocab_size=1000, seed=1).plain_logits(PROMPT))
    near = FakeModel(vocab_size=1000, noise=0.5).plain_logits(PROMPT)
    assert 0.0 < float((logits - near).abs().max()) <= 0.5
    early = model.plain_logits(PROMPT, num_layers=2)
    assert 0.0 < float((logits - early).abs().max()) <= 1.0


def test_a_narrow_window_makes_text_that_repeats() -> None:
    model = FakeModel(windows=(2,), absolute=False)
    assert torch.equal(model.plain_logits([1, 2, 3]), model.plain_logits([9, 9, 2, 3]))
    assert not torch.equal(model.plain_logits([1, 2, 3]), model.plain_logits([1, 1, 3]))


def test_hidden_states_and_early_exit() -> None:
    model = FakeModel()
    model.kv.open("a")
    batch = build([Work(seq_id="a", chain=PROMPT)], model.kv)
    early = model.forward(batch, num_layers=2)
    assert torch.equal(early.logits[0], model.plain_logits(PROMPT, num_layers=2))
    hidden = model.forward(batch, hidden_layers=(0, 4)).hidden
    assert hidden is not None
    assert hidden.shape == (len(PROMPT), 2 * model.hidden_size)
    assert torch.equal(hidden, model.plain_hidden(PROMPT, (0, 4)))
    # Keys that an early exit left out are missing in a full forward.
    model.forward(batch, num_layers=2)
    model.kv.commit("a", np.arange(len(PROMPT)), PROMPT)
    _, (logits,) = forward(model, [Work(seq_id="a", chain=[1])])
    assert not torch.equal(logits[0], model.plain_logits([*PROMPT, 1]))


def test_broken_slots_stay_broken_until_scrubbed() -> None:
    broken = True

    def break_at(token: int, position: int) -> float | None:
        return math.inf if broken and position == 3 else None

    model = FakeModel(break_at=break_at)
    model.kv.open("a")
    _, (logits,) = forward(model, [Work(seq_id="a", chain=PROMPT[:3], tree=TREE.truncate(2, 1))])
    assert not logits.isfinite().any()  # the mask hides the broken slot, but 0 * NaN is NaN
    assert logits[1].isinf().all()
    broken = False
    model.scrub(model.kv.scratch("a").tolist())
    _, (logits,) = forward(model, [Work(seq_id="a", chain=PROMPT[:3], tree=TREE.truncate(2, 1))])
    expect(model, logits, [PROMPT[:3], *tree_paths(PROMPT[:3], TREE.truncate(2, 1))])
