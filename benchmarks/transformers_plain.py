"""Decoding at batch 1, greedy: Outrider against `generate` of transformers, on the same weights.

Both sides decode the same prompts to the same number of tokens, in turn, in one process.
With --draft, both sides also decode with a draft model (transformers: assistant_model).

    python benchmarks/transformers_plain.py --model smollm2-135m-instruct
    python benchmarks/transformers_plain.py --model qwen2.5-coder-1.5b-instruct \
        --draft qwen2.5-coder-0.5b-instruct --prompts builtin:code_completion,code_edit
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from outrider.bench.report import environment
from outrider.bench.workloads import load_prompts
from outrider.llm import LLM
from outrider.models.gguf import GgufFile
from outrider.models.gguf_hf import read_config, read_weights
from outrider.models.load import LoadedModel
from outrider.request import SamplingParams

Decode = Callable[[list[int]], list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--draft", help="a draft model; both sides are then run with it as well")
    parser.add_argument("--num-draft", type=int, default=4)
    parser.add_argument("--prompts", default="builtin")
    parser.add_argument("--limit", type=int, default=8, help="number of prompts")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    llm = LLM(args.model, dtype=args.dtype, prefix_cache=False, progress=True)
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)
    theirs = as_transformers(llm.target)
    sides: dict[str, Decode] = {
        "outrider plain": lambda ids: ours(llm, ids, params, "none"),
        "transformers plain": lambda ids: generate(theirs, ids, args.max_tokens),
    }
    if args.draft:
        spec = f"draft:{args.draft},k={args.num_draft}"
        llm.engine.drafter(spec)
        assistant = as_transformers(llm.drafts[args.draft])
        assistant.generation_config.num_assistant_tokens = args.num_draft
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0
        sides[f"outrider {spec}"] = lambda ids: ours(llm, ids, params, spec)
        sides["transformers draft"] = lambda ids: generate(
            theirs, ids, args.max_tokens, assistant_model=assistant
        )
    prompts = [llm.encode(p.turns[0]) for p in load_prompts(args.prompts, limit=args.limit)]
    for decode in sides.values():
        decode(prompts[0])  # warm up
    rates = measure(sides, prompts, args.repeats)
    report(rates, args)


def ours(llm: LLM, ids: list[int], params: SamplingParams, drafter: str) -> list[int]:
    (seq,) = llm.submit(ids, params, drafter=drafter)
    while seq.finish is None:
        llm.engine.step()
    return seq.output


def generate(model: Any, ids: list[int], max_tokens: int, **options: Any) -> list[int]:
    inputs = torch.tensor([ids])
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    tokens: list[int] = output[0, len(ids) :].tolist()
    return tokens


def as_transformers(loaded: LoadedModel) -> Any:
    """A transformers model of the same file and dtype as ``loaded``."""
    dtype = loaded.model.dtype
    if loaded.path.is_dir():
        return AutoModelForCausalLM.from_pretrained(loaded.path, dtype=dtype).eval()
    file = GgufFile.open(loaded.path)
    model = AutoModelForCausalLM.from_config(read_config(file), dtype=dtype)
    model.load_state_dict(dict(read_weights(file, dtype)), strict=False)
    model.tie_weights()
    return model.eval()


def measure(
    sides: dict[str, Decode], prompts: list[list[int]], repeats: int
) -> dict[str, list[float]]:
    """Tokens/s of every side in every repeat; the sides take turns at every prompt."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        tokens = dict.fromkeys(sides, 0)
        seconds = dict.fromkeys(sides, 0.0)
        for number, ids in enumerate(prompts):
            names = list(sides)
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                start = time.perf_counter()
                tokens[name] += len(sides[name](ids))
                seconds[name] += time.perf_counter() - start
        for name in sides:
            rates[name].append(tokens[name] / seconds[name])
    return rates


def report(rates: dict[str, list[float]], args: argparse.Namespace) -> None:
    base = statistics.median(rates["transformers plain"])
    print(f"{args.model} {args.dtype}, {args.repeats} repeats, {args.max_tokens} tokens a prompt")
    for name, values in rates.items():
        middle = statistics.median(values)
        print(
            f"{name:45s} {middle:7.1f} tokens/s  ({min(values):.1f} to {max(values):.1f})"
            f"  {middle / base:5.2f} x transformers plain"
        )
    if args.json:
        document = {"environment": environment(), "settings": vars(args), "rates": rates}
        args.json.write_text(json.dumps(document, indent=1, default=str), encoding="utf-8")


if __name__ == "__main__":
    main()
