"""Outrider and its peers on the same prompts, in turn, each in a process of its own.

    python benchmarks/peers/run.py --limit 1 --max-tokens 8 --repeats 1
    python benchmarks/peers/run.py --model qwen2.5-coder-1.5b-instruct \\
        --prompts builtin:code_completion,code_edit --limit 4 --dtype int8 --dtype int4 \\
        --drafter none --drafter suffix:k=8 --json peers.json --markdown peers.md

Greedy, batch 1, every answer exactly --max-tokens long, all cores, nothing reused between answers.
Prints a Markdown table. Set the peers up first: python benchmarks/peers/setup.py
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from catalog import ENGINES, parse_mode, peers_dir
from client import WorkerFailed
from measure import Measurement, Settings, reference_of
from plan import GIB, Spec, free_memory, outrider_specs, peer_specs
from prepare import Model, find_model, tokenizer_of
from table import OUTRIDER, Contender, make_rows, markdown

from outrider.bench.report import environment, write_json
from outrider.bench.workloads import Prompt, load_prompts
from outrider.drafters import parse_spec
from outrider.errors import ConfigError, UserError
from outrider.files import check_output, write_whole
from outrider.models.resources import weight_format
from outrider.terminal import progress

DRAFTS = {"qwen2.5-coder-1.5b-instruct": "qwen2.5-coder-0.5b-instruct"}
"""The draft model of a target, unless --draft says otherwise."""

RESERVE = 2 * GIB
"""Memory that is left to everything else."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--model", default="smollm2-135m-instruct", help="a name of `outrider models`, or a .gguf")
    add("--draft", help="draft model; none for no draft. Default: the one that fits, if known")
    add("--engine", action="append", choices=[*ENGINES, OUTRIDER], help="default: all; repeatable")
    add(
        "--mode",
        action="append",
        default=[],
        metavar="ENGINE=MODE",
        help="a peer's modes in place of its own ones, as in vllm=lookup:k=8,n=3; repeatable",
    )
    add("--dtype", action="append", help="Outrider's. Default: bfloat16, int8, int4; repeatable")
    add(
        "--drafter",
        action="append",
        help="Outrider's, in every dtype beside plain decoding. Default: suffix:k=8, "
        "ngram:n=3,k=8, and the draft model with k=4; repeatable",
    )
    add("--prompts", default="builtin", help="as in `outrider bench`")
    add("--limit", type=int, default=8, help="number of prompts")
    add("--max-tokens", type=int, default=64)
    add("--repeats", type=int, default=3)
    add("--context", type=int, default=2048, help="tokens of prompt and answer that fit")
    add("--threads", type=int, default=os.cpu_count() or 1, help="default: all cores")
    add("--memory", type=float, help="GiB for all engines. Default: what is free, less 2")
    add("--timeout", type=float, default=1800.0, help="seconds that an engine may take to answer")
    add("--no-quality", action="store_true", help="do not compare laws with the float32 model's")
    add("--json", type=Path, help="file for all that was measured")
    add("--markdown", type=Path, help="file for the table, which is printed in any case")
    return made


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    try:
        return run(args)
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    except WorkerFailed as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Error: interrupted", file=sys.stderr)
        return 130


def run(args: argparse.Namespace) -> int:
    """Everything, in order. Raises UserError and, for the float32 reference, WorkerFailed."""
    check(args)
    modes = chosen_modes(args.mode)
    if args.engine and (unused := modes.keys() - set(args.engine)):
        raise ConfigError(f"--mode names {', '.join(sorted(unused))}, which --engine leaves out")
    prompts = load_prompts(args.prompts, limit=args.limit)
    model = find_model(args.model)
    draft = find_draft(args.draft, model)
    settings = Settings(
        num_tokens=args.max_tokens,
        repeats=args.repeats,
        timeout=args.timeout,
        memory=int(args.memory * GIB) if args.memory else max(GIB, free_memory() - RESERVE),
        logs=peers_dir() / "logs",
    )
    encoded = encode(model, prompts, args.context - args.max_tokens)
    common = {"threads": args.threads, "context": args.context}
    names = args.engine or [*ENGINES, OUTRIDER]
    peers = [name for name in names if name in ENGINES]
    say("files of the model")
    specs, missing = peer_specs(peers, modes, model, draft, common)
    for name, reason in missing.items():
        say(f"{name} is left out: {reason}")
    if OUTRIDER in names:
        drafters = args.drafter or default_drafters(draft)
        dtypes = args.dtype or ["bfloat16", "int8", "int4"]
        specs += outrider_specs(dtypes, drafters, model, draft, common)
    reference = None
    if not args.no_quality:
        text = [
            ids for _, ids in encode(model, load_prompts("builtin", limit=8), args.context - 64)
        ]
        (float32,) = outrider_specs(["float32"], [], model, None, common)
        reference = reference_of(model.folder, text, float32, settings, say)
    with progress() as bar:
        measurement = Measurement(specs, encoded, settings, reference, bar, say)
        measurement.run()
    rows = make_rows(
        [*measurement.contenders(), *[_left_out(name, why) for name, why in missing.items()]],
        measurement.samples,
    )
    head = (
        f"{args.model}, {len(prompts)} prompts of {args.prompts}, {args.max_tokens} tokens an "
        f"answer, {args.repeats} repeats, {args.threads} threads"
    )
    command = shlex.join([Path(sys.executable).name, *sys.argv])
    if len(measurement.groups) > 1:
        head += (
            f". In {len(measurement.groups)} groups, in the measure of Outrider's plain decoding"
        )
    report = f"{head}\n\n```\n{command}\n```\n\n{markdown(rows)}\n"
    print(report)
    if args.markdown:
        write_whole(args.markdown, lambda file: _write(file, report))
    if args.json:
        write_json(args.json, document(args, command, specs, measurement, rows, reference, model))
    return 0 if measurement.taken else 1


def check(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that cannot be honoured."""
    for name in ("limit", "max_tokens", "repeats", "threads"):
        if getattr(args, name) < 1:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} is {getattr(args, name)}, expected 1 or more")
    for name in ("memory", "timeout"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name} is {value}, expected a number above 0")
    most = 4 * (os.cpu_count() or 1)
    if args.threads > most:
        raise ConfigError(f"--threads is {args.threads}, expected 1 to {most} on this machine")
    if args.max_tokens < 2:
        raise ConfigError("--max-tokens is 1, expected 2 or more: the first comes with the prompt")
    if args.context <= args.max_tokens:
        raise ConfigError(f"--context is {args.context}, expected more than --max-tokens")
    for dtype in args.dtype or []:
        weight_format(dtype)
    for drafter in args.drafter or []:
        parse_spec(drafter)
    check_output("--json", args.json)
    check_output("--markdown", args.markdown)


def chosen_modes(given: list[str]) -> dict[str, list[str]]:
    """The modes of --mode by engine. Raises ConfigError."""
    modes: dict[str, list[str]] = {}
    for text in given:
        name, _, spec = text.partition("=")
        if name not in ENGINES:
            raise ConfigError(f"--mode {text!r}: expected ENGINE=MODE, one of {', '.join(ENGINES)}")
        parse_mode(spec)
        modes.setdefault(name, []).append(spec)
    return modes


def find_draft(given: str | None, model: Model) -> Model | None:
    name = given or DRAFTS.get(model.name, "none")
    return None if name == "none" else find_model(name)


def default_drafters(draft: Model | None) -> list[str]:
    return ["suffix:k=8", "ngram:n=3,k=8", *([f"draft:{draft.name},k=4"] if draft else [])]


def encode(model: Model, prompts: list[Prompt], most: int) -> list[tuple[str, list[int]]]:
    """Id and tokens of every prompt's first turn. Raises ConfigError for one that is too long."""
    tokenizer = tokenizer_of(model)
    encoded = []
    for prompt in prompts:
        message = {"role": "user", "content": prompt.turns[0]}
        if tokenizer.chat_template is None:
            ids = list(tokenizer.encode(prompt.turns[0]))
        else:
            ids = list(
                tokenizer.apply_chat_template(
                    [message], add_generation_prompt=True, return_dict=False
                )
            )
        if len(ids) > most:
            raise ConfigError(
                f"prompt {prompt.id!r} has {len(ids)} tokens, {most} fit; raise --context"
            )
        encoded.append((prompt.id, ids))
    return encoded


def _left_out(name: str, reason: str) -> Contender:
    return Contender(engine=name, version="-", dtype="-", mode="-", plain=False, failure=reason)


def document(
    args: argparse.Namespace,
    command: str,
    specs: list[Spec],
    measurement: Measurement,
    rows: Any,
    reference: Any,
    model: Model,
) -> dict[str, Any]:
    """All that was measured, for JSON."""
    return {
        "environment": {**environment(), "command": command},
        "settings": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(args).items()
        },
        "model_file": model.gguf.name,
        "groups": [[spec.name for spec in group] for group in measurement.groups],
        "engines": {
            spec.name: {
                "options": {
                    key: value
                    for key, value in spec.options.items()
                    if not str(value).startswith(os.sep)
                },
                **measurement.loaded.get(spec.name, {}),
            }
            for spec in specs
        },
        "rows": [asdict(row) for row in rows],
        "samples": [asdict(sample) for sample in measurement.taken],
        "quality_positions": reference.text.num_positions if reference else None,
        "reference_perplexity": measurement.reference_perplexity,
    }


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # workers are ended on the way out
    sys.exit(main())
