"""The commands of the command line. Heavy imports happen inside them."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.errors import ConfigError
from outrider.files import check_output
from outrider.terminal import console, progress, read_biases, read_prompt, set_threads

Model = Annotated[
    str,
    typer.Option("--model", "-m", help="Named model, hub id, folder or GGUF file."),
]
Dtype = Annotated[
    str, typer.Option(help="Weights: float32, bfloat16, float16, int8, int4 or, on CUDA, fp8.")
]
DraftDtype = Annotated[
    str | None, typer.Option(help="The same for draft models.", show_default="the target's")
]
Device = Annotated[str, typer.Option(help="Where the models run: cpu or cuda.")]
Kernels = Annotated[
    bool, typer.Option("--kernels/--no-kernels", help="C++ kernels, or PyTorch alone.")
]
Exact = Annotated[
    bool,
    typer.Option("--exact", help="Refuse to run where bits depend on the number of rows."),
]
Threads = Annotated[
    int | None, typer.Option(min=1, help="CPU threads.", show_default="PyTorch's choice")
]
Slots = Annotated[
    int | None,
    typer.Option("--num-slots", min=1, help="Tokens the KV pool holds.", show_default="by model"),
]


def models() -> None:
    """List the named models and which of them are in the cache.

    Example: outrider models
    """
    from rich.table import Table

    from outrider.models.load import list_models

    table = Table("name", "parameters", "size", "in cache", box=None)
    for row in list_models():
        table.add_row(row.name, row.parameters, row.size, "yes" if row.cached else "no")
    console().print(table)


def pull(
    name: Annotated[str, typer.Argument(help="A named model (see `outrider models`) or hub id.")],
) -> None:
    """Fetch a model into the cache. An interrupted fetch continues where it stopped.

    Example: outrider pull smollm2-135m-instruct
    """
    from outrider.models.fetch import pull as fetch

    typer.echo(fetch(name))


def drafters() -> None:
    """List the drafters, their options and the verifiers.

    Example: outrider drafters
    """
    from outrider.drafters import describe
    from outrider.verify import VERIFIERS

    for line in describe():
        typer.echo(line)
    typer.echo("")
    for name, verifier in VERIFIERS.items():
        typer.echo(f"verifier {name}: {verifier.exactness}")


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - or nothing reads standard input.")
    ] = None,
    model: Model = "smollm2-135m-instruct",
    prompt_option: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The prompt, as an option.")
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Do not apply the model's chat template.")
    ] = False,
    drafter: Annotated[
        str, typer.Option("--drafter", "-d", help="none, ngram:n=3,k=8, draft:MODEL,k=4, …")
    ] = "none",
    verifier: Annotated[
        str, typer.Option(help="coupled, rejection, block or traversal.")
    ] = "coupled",
    num_draft: Annotated[
        int | None, typer.Option(help="Draft tokens a step.", show_default="the drafter's k")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most output tokens.")] = 256,
    min_tokens: Annotated[int, typer.Option(help="Fewest output tokens.")] = 0,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    logit_bias: Annotated[
        list[str] | None, typer.Option(help="ID=BIAS, added to a token's logit. Repeatable.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="A string that ends the output. Repeatable.")
    ] = None,
    stop_token_id: Annotated[
        list[int] | None, typer.Option(help="A token that ends the output. Repeatable.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after an end-of-sequence token.")
    ] = False,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens.")] = None,
    scope: Annotated[
        str | None, typer.Option(help="Share drafter history among requests of this name.")
    ] = None,
    n: Annotated[int, typer.Option(help="Number of answers.")] = 1,
    logprobs: Annotated[
        int | None, typer.Option(help="Log-probabilities, with this many alternatives (--json).")
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the text.")
    ] = False,
    dtype: Dtype = "bfloat16",
    draft_dtype: DraftDtype = None,
    device: Device = "cpu",
    num_slots: Slots = None,
    kernels: Kernels = True,
    exact: Exact = False,
    threads: Threads = None,
) -> None:
    """Answer one prompt. The text streams to standard output, a summary goes to standard error.

    Example: outrider generate "Name three rivers." --drafter ngram:k=8 --max-tokens 64
    """
    from outrider.request import SamplingParams

    text = read_prompt(prompt, prompt_option, prompt_file)
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=read_biases(logit_bias or []),
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        stop_token_ids=tuple(stop_token_id or ()),
        ignore_eos=ignore_eos,
        seed=seed,
        n=n,
        logprobs=logprobs,
    )
    if raw and system is not None:
        raise ConfigError("--system needs the chat template; leave out --raw")
    if logprobs is not None and not json_output:
        raise ConfigError("--logprobs are part of the JSON output; add --json")
    set_threads(threads)
    from outrider.generate import print_answers

    llm = _llm(
        *(model, drafter, verifier, dtype, draft_dtype, device, num_slots),
        kernels=kernels,
        exact=exact,
    )
    _check_draft_dtype(llm, draft_dtype)
    print_answers(
        llm,
        text,
        params,
        system=system,
        raw=raw,
        num_draft=num_draft,
        scope=scope,
        json_output=json_output,
    )


def bench(
    model: Model = "smollm2-135m-instruct",
    drafter: Annotated[
        list[str] | None, typer.Option("--drafter", "-d", help="Repeatable; none is always run.")
    ] = None,
    verifier: Annotated[
        list[str] | None, typer.Option(help="Repeatable.", show_default="coupled")
    ] = None,
    prompts: Annotated[
        str, typer.Option(help="builtin, builtin:CLASS,CLASS or a JSONL file with turns.")
    ] = "builtin",
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most this many prompts; the classes take turns.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most output tokens a prompt.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of sampling and of the intervals.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved runs of everything.")] = 3,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write rows and environment to this file.")
    ] = None,
    dtype: Dtype = "bfloat16",
    draft_dtype: DraftDtype = None,
    device: Device = "cpu",
    num_slots: Slots = None,
    kernels: Kernels = True,
    exact: Exact = False,
    threads: Threads = None,
) -> None:
    """Compare drafters with plain decoding on the same prompts, interleaved.

    Example: outrider bench -m smollm2-135m-instruct -d ngram:n=3,k=8 -d suffix:k=8 --json out.json
    """
    from outrider.bench.report import environment, print_table, write_json
    from outrider.bench.runner import Contender, check_all, compare
    from outrider.bench.workloads import load_prompts
    from outrider.drafters import parse_spec
    from outrider.request import SamplingParams
    from outrider.verify import make_verifier

    check_output("--json", json_path)
    selected = load_prompts(prompts, limit=limit)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    contenders = list(
        dict.fromkeys(
            Contender(drafter=d, verifier=v)
            for d in map(str.strip, drafter or ["ngram:n=3,k=8", "suffix:k=8"])
            if d.rstrip(":") != "none"
            for v in verifier or ["coupled"]
        )
    )
    for contender in contenders:
        parse_spec(contender.drafter)
        make_verifier(contender.verifier)
    set_threads(threads)
    llm = _llm(
        *(model, "none", "coupled", dtype, draft_dtype, device, num_slots),
        kernels=kernels,
        exact=exact,
        prefix_cache=False,
    )
    check_all(llm, contenders, selected, params)  # what is refused is reported before the bar
    _check_draft_dtype(llm, draft_dtype)
    with progress() as bar:
        task = bar.add_task("answers", total=None)
        rows = compare(
            llm,
            contenders,
            selected,
            params,
            repeats=repeats,
            seed=seed,
            progress=lambda done, of: bar.update(task, completed=done, total=of),
        )
    print_table(console(), rows, model=model, dtype=dtype)
    if json_path is not None:
        settings = {
            "model": model,
            "dtype": dtype,
            "draft_dtype": draft_dtype or dtype,
            "prompts": prompts,
            "limit": limit,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "repeats": repeats,
        }
        document = {
            "environment": environment(),
            "settings": settings,
            "rows": [asdict(row) for row in rows],
        }
        write_json(json_path, document)


def profile(
    model: Model = "smollm2-135m-instruct",
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write everything measured to this file.")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Plot t(M) to this file.")] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Context lengths. Repeatable.", show_default="64, 512, 2048"),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds over all M.")] = 9,
    dtype: Dtype = "bfloat16",
    device: Device = "cpu",
    num_slots: Slots = None,
    kernels: Kernels = True,
    threads: Threads = None,
) -> None:
    """Measure t(M), the time of a forward over M tokens, and what speculation could gain at most.

    Example: outrider profile -m smollm2-135m-instruct --dtype int8 --png t.png
    """
    from outrider.bench import profile as profiling
    from outrider.bench.report import print_profile, write_json
    from outrider.models.load import load

    check_output("--json", json_path)
    check_output("--png", png)
    if png is not None:
        profiling.check_plots()
    set_threads(threads)
    loaded = load(model, dtype=dtype, device=device, num_slots=num_slots, kernels=kernels)
    most = profiling.longest_context(loaded.model)
    with progress() as bar:
        task = bar.add_task("rounds", total=None)
        result = profiling.profile(
            loaded,
            dtype,
            contexts=context or [c for c in profiling.CONTEXTS if c <= most] or [most],
            repeats=repeats,
            progress=lambda done, of: bar.update(task, completed=done, total=of),
        )
    print_profile(console(), result)
    if json_path is not None:
        write_json(json_path, asdict(result))
    if png is not None:
        profiling.plot(result, png)
    try:
        write_json(profiling.stored_path(loaded, dtype), asdict(result))
    except OSError as error:
        warnings.warn(f"not kept for draft policies: {error}", RuntimeWarning, stacklevel=1)


def _check_draft_dtype(llm: Any, draft_dtype: str | None) -> None:
    """Raise ConfigError for --draft-dtype where no drafter has loaded a draft model."""
    if draft_dtype is not None and not llm.drafts:
        raise ConfigError("--draft-dtype is for draft models; add --drafter draft:MODEL")


def _llm(
    model: str,
    drafter: str,
    verifier: str,
    dtype: str,
    draft_dtype: str | None,
    device: str,
    num_slots: int | None,
    **options: Any,
) -> Any:
    from outrider.llm import LLM

    return LLM(
        model,
        drafter=drafter,
        verifier=verifier,
        dtype=dtype,
        draft_dtype=draft_dtype,
        device=device,
        num_slots=num_slots,
        progress=True,
        **options,
    )
