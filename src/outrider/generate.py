"""The `generate` command: stream one request's text, or print it as one JSON object."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from typing import Any

from outrider.llm import LLM, Completion, completion
from outrider.metrics import Stats, total
from outrider.request import SamplingParams


def print_answers(
    llm: LLM,
    prompt: str,
    params: SamplingParams,
    *,
    system: str | None,
    raw: bool,
    num_draft: int | None,
    scope: str | None,
    json_output: bool,
) -> None:
    """Answer ``prompt`` and print. With several answers the first streams, the rest follow."""
    if raw:
        ids = llm.encode(prompt, chat=False)
    else:
        messages = [{"role": "system", "content": system}] if system is not None else []
        ids = llm.encode([*messages, {"role": "user", "content": prompt}])
    sequences = llm.submit(ids, params, num_draft=num_draft, scope=scope)
    start = time.perf_counter()
    while llm.engine.has_work:
        for event in llm.engine.step():
            if event.index == 0 and not json_output:
                print(event.text, end="", flush=True)
    seconds = time.perf_counter() - start
    answers = [completion(seq) for seq in sequences]
    stats = replace(total(answer.stats for answer in answers), seconds=seconds)
    if json_output:
        print(json.dumps(as_json(answers, stats), ensure_ascii=False))
        return
    print()
    for number, answer in enumerate(answers[1:], start=2):
        print(f"\n--- answer {number} of {len(answers)}\n{answer.text}")
    print(_summary(stats), file=sys.stderr)


def as_json(answers: list[Completion], stats: Stats) -> dict[str, Any]:
    """The first answer's fields and ``stats`` of all answers together; several answers are listed
    under ``samples``."""
    result = _answer(answers[0])
    result["stats"] = stats_json(stats)
    if len(answers) > 1:
        result["samples"] = [
            _answer(answer) | {"stats": stats_json(answer.stats)} for answer in answers
        ]
    return result


def _answer(answer: Completion) -> dict[str, Any]:
    result: dict[str, Any] = {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason.value,
    }
    if answer.logprobs:
        result["logprobs"] = [
            {"token_id": p.token, "logprob": p.logprob, "top": [list(pair) for pair in p.top]}
            for p in answer.logprobs
        ]
    return result


def stats_json(stats: Stats) -> dict[str, Any]:
    """The counters and ratios that are shown to users."""
    return {
        "tokens": stats.tokens,
        "target_forwards": stats.target_forwards,
        "acceptance_length": stats.acceptance_length,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "acceptance_rate": stats.acceptance_rate,
        "acceptance_by_position": stats.acceptance_by_position,
        "faults": stats.faults,
        "seconds": stats.seconds,
        "tokens_per_second": stats.tokens / stats.seconds if stats.seconds else None,
    }


def _summary(stats: Stats) -> str:
    rate = "-" if stats.acceptance_rate is None else f"{stats.acceptance_rate:.0%}"
    speed = stats.tokens / stats.seconds if stats.seconds else 0.0
    faults = f", {stats.faults} failed drafts" if stats.faults else ""
    return (
        f"[{stats.tokens} tokens in {stats.seconds:.2f} s, {speed:.1f} tokens/s, "
        f"acceptance length {stats.acceptance_length:.2f}, acceptance rate {rate}{faults}]"
    )
