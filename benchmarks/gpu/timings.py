"""How fast: memory, forwards of M tokens, whole decoding."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from models import Oracle, decode, make_engine, random_decoder, requests
from torch import nn

from outrider.batch import Work, build
from outrider.errors import ConfigError
from outrider.models.base import Model
from outrider.models.decoder import Decoder
from outrider.models.graphs import GraphDecoder
from outrider.models.quantize import quantize
from outrider.models.recorder import EagerRecorder
from outrider.tree import TokenTree

Result = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What is measured, and until when (``time.monotonic()``)."""

    device: torch.device
    sizes: tuple[int, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    repeats: int
    tokens: int
    prompt: int
    deadline: float
    save: Callable[[Result], None]

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.deadline

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def bandwidth(plan: Plan, num_bytes: int) -> Result:
    """GB/s of a plain copy (bytes read and written) and of a sum (bytes read)."""
    source = torch.ones(num_bytes // 4, device=plan.device)
    target = torch.empty_like(source)
    copy = _seconds(plan, lambda: target.copy_(source))
    read = _seconds(plan, lambda: source.sum())
    return {
        "bytes": num_bytes,
        "copy_gb_s": 2 * num_bytes / copy / 1e9,
        "read_gb_s": num_bytes / read / 1e9,
    }


def t_of_m(plan: Plan, shape: str, *, format: str = "bfloat16") -> Result:
    """Seconds of a forward of M tokens, a chain of drafts, every logit wanted.

    ``seconds``: one forward, waited for. ``back_to_back``: one of several that follow each other
    without a wait. ``eager``: one forward of M = 1 that is not recorded. ``gb_s``, in bfloat16:
    bytes of weights and of keys and values that M = 1 has to read, by its time back to back.
    """
    slots = max(plan.contexts) + max(plan.sizes) + 16
    decoder = random_decoder(shape, dtype=torch.bfloat16, device=plan.device, num_slots=slots)
    for layer in decoder.layers:
        layer.pool[:slots].normal_()
    result: Result = {"shape": shape, "format": format, "contexts": {}}
    weights = _weight_bytes(decoder)
    if format == "bfloat16":
        result["weight_bytes"] = weights
    else:
        try:
            quantize(decoder, format)
        except (ConfigError, RuntimeError, AssertionError) as error:
            return result | {"left_out": [str(error).splitlines()[0]]}
    model = GraphDecoder(decoder, max_tokens=max(plan.sizes))
    for context in plan.contexts:
        row: Result = {"seconds": {}, "back_to_back": {}}
        result["contexts"][str(context)] = row
        for size in plan.sizes:
            if plan.is_over:
                return result | {"left_out": [f"from M={size} at context {context}: out of time"]}
            one, many = _forward(plan, model, context, size)
            row["seconds"][str(size)], row["back_to_back"][str(size)] = one, many
            plan.save(result)
        eager = GraphDecoder(decoder, recorder=EagerRecorder())
        row["eager"], _ = _forward(plan, eager, context, 1)
        if format == "bfloat16":
            read = weights + 2 * context * decoder.config.numbers_per_slot
            row["gb_s"] = read / row["back_to_back"]["1"] / 1e9
    return result


def decoding(plan: Plan, shape: str, *, errors: tuple[float, ...] = (0.1, 0.4)) -> Result:
    """Tokens per second of whole decoding, plain and with an oracle that is wrong that often.

    The first of two runs records the graphs; the second is reported. ``same``: share of the
    answers with the tokens of plain decoding.
    """
    longest = plan.prompt + plan.tokens + 32
    decoder = random_decoder(
        shape,
        dtype=torch.bfloat16,
        device=plan.device,
        num_slots=longest * max(plan.batches),
        certain=True,
    )
    model = GraphDecoder(decoder)
    result: Result = {"shape": shape, "batches": {}}
    for batch in plan.batches:
        row: Result = {}
        result["batches"][str(batch)] = row
        todo = requests(batch, prompt=plan.prompt, tokens=plan.tokens, vocab_size=model.vocab_size)
        known: dict[str, list[int]] = {}
        for error in (None, *errors):
            name = "plain" if error is None else f"oracle, error {error}"
            if plan.is_over:
                return result | {"left_out": [f"from batch {batch}, {name}: out of time"]}
            drafter = None
            if error is not None:
                drafter = Oracle(known, error, num_draft=7, vocab_size=model.vocab_size)
            for _ in range(2):
                engine = make_engine(model, drafter, batch=batch)
                start = time.perf_counter()
                seqs = decode(engine, todo)
                plan.wait()
                seconds = time.perf_counter() - start
            if error is None:
                known = {seq.id: list(seq.output) for seq in seqs}
            forwards = sum(seq.stats.target_forwards for seq in seqs)
            row[name] = {
                "tokens_per_second": batch * plan.tokens / seconds,
                "acceptance_length": batch * plan.tokens / forwards,
                "same": sum(list(seq.output) == known[seq.id] for seq in seqs) / batch,
            }
            plan.save(result)
    result["graphs"] = model.num_recorded
    return result


def _forward(plan: Plan, model: Model, context: int, size: int) -> tuple[float, float]:
    """Seconds of one forward, alone and among others."""
    kv = model.kv
    kv.open("t")
    kv.reserve("t", context)
    kv.commit("t", np.arange(context), [1] * context)
    tree = TokenTree.chain([1] * (size - 1))

    def step() -> None:
        batch = build(
            [Work(seq_id="t", chain=[1], tree=tree)],
            kv,
            windows=model.windows,
            dtype=model.dtype,
            device=model.device,
        )
        model.forward(batch)

    for _ in range(3):
        step()
    one = _seconds(plan, step)
    times = 4

    def several() -> None:
        for _ in range(times):
            step()

    many = _seconds(plan, several) / times
    kv.close("t")
    return one, many


def _seconds(plan: Plan, call: Callable[[], object]) -> float:
    """Median over ``plan.repeats`` of a call and the wait for the device."""
    call()
    plan.wait()
    times: list[float] = []
    for _ in range(plan.repeats):
        start = time.perf_counter()
        call()
        plan.wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _weight_bytes(decoder: Decoder) -> int:
    """Bytes of weights that a forward reads."""
    linears = [module for module in decoder.modules() if isinstance(module, nn.Linear)]
    return sum(linear.weight.numel() * linear.weight.element_size() for linear in linears)
