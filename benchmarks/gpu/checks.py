"""Exactness: recorded against not recorded, device against host, speculative against plain."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import numpy as np
import torch
from models import Oracle, answers, decode, make_engine, random_decoder, requests, same_weights
from twins import attention_error, quantised_error

from outrider.batch import Work, build
from outrider.models.base import Forward, Model
from outrider.models.decoder import Decoder
from outrider.models.graphs import GraphDecoder
from outrider.models.recorder import EagerRecorder
from outrider.tree import ROOT, TokenTree

Check = dict[str, Any]
Checks = dict[str, Check]

FLOAT32_ERROR = 1e-4
"""Of the largest number: what sums in another order may change in these small models."""

BFLOAT16_ERROR = 0.05

QUANTISED_ERROR = {"int8": 0.1, "fp8": 0.35, "int4": 0.8}
"""Norm of the difference to float32 by that of the logits. About twice what the roundings of these
formats give on the CPU; logits of another model would be at 1.4."""

TREE = TokenTree.from_paths([[5, 6, 7, 8, 9, 10], [5, 11], [12]])


def run_checks(
    device: torch.device, shape: str, context: int, save: Callable[[Checks], None]
) -> Checks:
    """Every check by name: ``ok`` (None if it was left out), and the number that decided.

    ``context``: tokens before the tree where attention is compared. ``save`` gets what there is
    after each check.
    """
    host = torch.device("cpu")
    reference = random_decoder(shape, dtype=torch.float32, device=host, num_slots=4096)
    expected = traffic(reference)
    wide, narrow = torch.float32, torch.bfloat16

    def decoder(dtype: torch.dtype) -> Decoder:
        return same_weights(reference, dtype=dtype, device=device)

    def graphs(dtype: torch.dtype, **options: Any) -> GraphDecoder:
        return GraphDecoder(decoder(dtype), **options)

    recorded = {dtype: graphs(dtype) for dtype in (wide, narrow)}
    fixed = graphs(narrow, fixed_tokens=16)
    sure = random_decoder(shape, dtype=narrow, device=device, num_slots=4096, certain=True)
    certain = GraphDecoder(sure)
    todo: dict[str, Callable[[], Check]] = {
        "float32: eager on the device against the host": lambda: _near(
            traffic(decoder(wide)), expected, FLOAT32_ERROR
        ),
        "float32: graphs against the host": lambda: _near(
            traffic(recorded[wide]), expected, FLOAT32_ERROR
        ),
        "bfloat16: graphs against float32": lambda: _near(
            traffic(recorded[narrow]), expected, BFLOAT16_ERROR
        ),
        "bfloat16: graphs against eager": lambda: _near(
            traffic(recorded[narrow]), traffic(decoder(narrow)), BFLOAT16_ERROR
        ),
        "bfloat16: graphs against the same forwards, not recorded": lambda: _equal(
            traffic(recorded[narrow]), traffic(graphs(narrow, recorder=EagerRecorder()))
        ),
        "graphs were recorded": lambda: _recorded(recorded[narrow]),
        "fixed shapes: a tree against token by token": lambda: _tree_bits(fixed),
        "a replayed forward does not wait": lambda: _no_wait(recorded[narrow]),
        "a step waits once": lambda: _one_wait(certain),
    }
    for dtype, allowed in ((wide, FLOAT32_ERROR), (narrow, BFLOAT16_ERROR)):
        for chunk, how in ((None, "keys at once"), (128, "keys in chunks")):
            name = f"{str(dtype).removeprefix('torch.')}: attention against a dense mask, {how}"
            todo[name] = partial(_attention, device, dtype, context, chunk, allowed)
    for width, kind in ((1, "chain"), (2, "tree")):
        todo[f"certain model, greedy: {kind} against plain"] = partial(
            _same_answers, certain, 0.0, width
        )
        for heat in (0.0, 0.8):
            name = f"fixed shapes, temperature {heat}: {kind} against plain"
            todo[name] = partial(_same_answers, fixed, heat, width)
    for format in QUANTISED_ERROR:
        todo[f"{format}: graphs against float32"] = partial(
            _quantised, partial(decoder, narrow), format, expected
        )
    done: Checks = {}
    for name, check in todo.items():
        try:
            done[name] = check()
        except Exception as error:  # the other checks still tell something
            done[name] = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        save(done)
    return done


def forward(model: Model, works: Seq[Work]) -> Forward:
    batch = build(works, model.kv, windows=model.windows, dtype=model.dtype, device=model.device)
    return model.forward(batch)


def commit(model: Model, work: Work, node: int) -> None:
    path = work.tree.path(node)
    keep = [*range(len(work.chain)), *(len(work.chain) + node for node in path)]
    tokens = [*work.chain, *(int(work.tree.tokens[node]) for node in path)]
    model.kv.commit(work.seq_id, np.array(keep, np.int64), tokens)


def traffic(model: Model, steps: int = 24) -> list[torch.Tensor]:
    """Logits, float32 on the host, of the same random chains and trees of four sequences."""
    rng = random.Random(0)
    results: list[torch.Tensor] = []
    names = ["a", "b", "c", "d"]
    for name in names:
        model.kv.open(name)
    for step in range(steps):
        works: list[Work] = []
        for name in names:
            chain = rng.randint(1, 300) if step == 0 else rng.choice([1, 1, 1, 5])
            parents = [rng.randint(max(ROOT, i - 3), i - 1) for i in range(rng.choice([0, 3, 7]))]
            tokens = [rng.randrange(model.vocab_size) for _ in range(chain + len(parents))]
            tree = TokenTree(
                tokens=np.array(tokens[chain:], np.int64), parents=np.array(parents, np.int64)
            )
            works.append(Work(seq_id=name, chain=tokens[:chain], tree=tree))
        results.append(forward(model, works).logits.float().cpu())
        for work in works:
            commit(model, work, rng.randint(ROOT, len(work.tree) - 1))
    for name in names:
        model.kv.close(name)
    return results


def _at_most(error: float, allowed: float) -> Check:
    return {"ok": error <= allowed, "error": error, "allowed": allowed}


def _near(got: Seq[torch.Tensor], expected: Seq[torch.Tensor], allowed: float) -> Check:
    worst = max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, expected, strict=True)
    )
    return _at_most(worst, allowed)


def _equal(got: Seq[torch.Tensor], expected: Seq[torch.Tensor]) -> Check:
    different = sum(not torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    return {"ok": different == 0, "different": different, "of": len(got)}


def _recorded(model: GraphDecoder) -> Check:
    return {"ok": model.num_recorded > 0, "recorded": model.num_recorded}


def _attention(
    device: torch.device, dtype: torch.dtype, context: int, chunk: int | None, allowed: float
) -> Check:
    return _at_most(attention_error(device, dtype, context, chunk), allowed)


def _quantised(decoder: Callable[[], Decoder], format: str, expected: Seq[torch.Tensor]) -> Check:
    error = quantised_error(decoder(), format, traffic, expected)
    if isinstance(error, str):
        return {"ok": None, "left_out": error}
    return _at_most(error, QUANTISED_ERROR[format])


def _tree_bits(model: GraphDecoder) -> Check:
    model.kv.open("a")
    prompt = Work(seq_id="a", chain=[token % model.vocab_size for token in range(1, 1021)])
    forward(model, [prompt])
    commit(model, prompt, ROOT)
    at_once = forward(model, [Work(seq_id="a", chain=[4], tree=TREE)]).logits
    model.kv.commit("a", np.empty(0, np.int64), ())
    last = TREE.path(5)
    rows = [0, *(1 + node for node in last)]
    got: list[torch.Tensor] = []
    for token in (4, *(int(TREE.tokens[node]) for node in last)):
        work = Work(seq_id="a", chain=[token])
        got.append(forward(model, [work]).logits[0])
        commit(model, work, ROOT)
    model.kv.close("a")
    return _equal(got, list(at_once[rows]))


def _no_wait(model: GraphDecoder) -> Check:
    """PyTorch raises if a forward with a tree, its inputs included, waits for the device."""
    if model.device.type != "cuda":
        return {"ok": None, "left_out": "there is no device to wait for"}
    model.kv.open("a")
    work = Work(seq_id="a", chain=[4], tree=TREE)
    for _ in range(3):  # a shape is recorded when it comes again
        forward(model, [work])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward(model, [work])
    except RuntimeError as error:
        return {"ok": False, "error": str(error).splitlines()[0]}
    finally:
        torch.cuda.set_sync_debug_mode("default")
        model.kv.close("a")
    return {"ok": True}


def _one_wait(model: GraphDecoder, batch: int = 4) -> Check:
    """How often a step of several sequences waits for the device: to read logits, once."""
    if model.device.type != "cuda":
        return {"ok": None, "left_out": "there is no device to wait for"}
    engine = make_engine(model)
    todo = requests(batch, prompt=40, tokens=12, vocab_size=model.vocab_size)
    for request in todo:
        engine.add(request)
    for _ in range(6):
        engine.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for _ in engine.run():
        pass
    waits = sum("called a synchronizing" in str(one.message) for one in caught)
    return {"ok": waits == 1, "waits": waits, "sequences": batch}


def _same_answers(model: GraphDecoder, temperature: float, width: int) -> Check:
    todo = requests(4, prompt=40, tokens=48, vocab_size=model.vocab_size, temperature=temperature)
    plain = answers(make_engine(model), todo)
    oracle = Oracle(plain, error=0.3, num_draft=6, vocab_size=model.vocab_size, width=width)
    seqs = decode(make_engine(model, oracle), todo)
    accepted = sum(seq.stats.accepted for seq in seqs)
    same = sum(list(seq.output) == plain[seq.id] for seq in seqs)
    return {"ok": same == len(seqs) and accepted > 0, "same": same, "accepted": accepted}
