"""What a type of weights costs in quality: its next-token laws against those of float32.

The text is fixed: the built-in prompts, joined. It is cut into windows that are computed apart,
each in one forward, so that every model sees the same tokens after the same context.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from outrider.bench.logits import text_logits
from outrider.bench.workloads import BUILTIN, load_prompts
from outrider.errors import ConfigError
from outrider.models.base import Model
from outrider.models.load import LoadedModel
from outrider.models.load import load as load_model
from outrider.models.native import NativeDecoder
from outrider.models.resources import weight_format

WINDOW = 512
"""Tokens of a window."""

NUM_WINDOWS = 4

ROWS = 32
"""Positions whose laws are compared at once: each needs a few float64 copies of the vocabulary."""

REFERENCE = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """One model against the reference, the same file in float32 on PyTorch.

    ``num_positions``: predictions that were compared. ``perplexity``: exp of the mean negative
    log-probability, in nats, of the tokens of the text; ``perplexity_ratio``: by the reference's.
    ``kl_mean``, ``kl_p99``: mean and 99th percentile over the positions of KL(reference || model)
    in nats. ``top1``: share of the positions whose most likely token is the reference's.
    """

    model: str
    dtype: str
    kernels: bool
    num_positions: int
    perplexity: float
    perplexity_ratio: float
    kl_mean: float
    kl_p99: float
    top1: float


def measure(
    name: str,
    dtypes: Sequence[str],
    *,
    kernels: Sequence[bool] = (True, False),
    num_windows: int = NUM_WINDOWS,
    progress: Callable[[int, int], None] | None = None,
) -> list[Quality]:
    """The quality of the model ``name`` in each of ``dtypes``, on the C++ kernels and (False in
    ``kernels``) on PyTorch; the reference first. One model is in memory at a time, beside the
    reference's logits. ``progress`` is told how many models are done, and of how many.

    Raises ConfigError, also where the kernels were asked for and cannot be had, and what
    :func:`outrider.models.load.load` raises.
    """
    runs = _runs(dtypes, kernels)
    load = partial(load_model, num_slots=2 * WINDOW, prefix_cache=False)
    loaded = load(name, dtype=REFERENCE, kernels=False)
    windows = text_windows(loaded, num_windows)
    reference = [text_logits(loaded.model, window, everywhere=True) for window in windows]
    results = [_against(reference, windows, loaded.model, (loaded.name, REFERENCE, False))]
    for dtype, on_kernels in runs:
        if progress is not None:
            progress(len(results), len(runs) + 1)
        del loaded
        gc.collect()
        loaded = load(name, dtype=dtype, kernels=on_kernels)
        if on_kernels and not isinstance(loaded.model, NativeDecoder):
            raise ConfigError(f"{name} in {dtype} cannot run on the C++ kernels here")
        label = (loaded.name, dtype, on_kernels)
        results.append(_against(reference, windows, loaded.model, label))
    if progress is not None:
        progress(len(runs) + 1, len(runs) + 1)
    return results


def _runs(dtypes: Sequence[str], kernels: Sequence[bool]) -> list[tuple[str, bool]]:
    """(dtype, on kernels) without the reference; float16 runs on PyTorch alone."""
    known = list(dict.fromkeys(weight_format(dtype) for dtype in dtypes))
    return [
        (dtype, on_kernels)
        for dtype in known
        for on_kernels in dict.fromkeys(kernels)
        if dtype != REFERENCE and not (on_kernels and dtype == "float16")
    ]


def text_windows(loaded: LoadedModel, num_windows: int = NUM_WINDOWS) -> list[list[int]]:
    """The first ``num_windows`` windows of WINDOW tokens of the fixed text. Each begins with what
    the tokenizer puts before any text. Raises ConfigError for more windows than the text has."""
    if num_windows < 1:
        raise ConfigError(f"num_windows is {num_windows}, expected 1 or more")
    text = "\n\n".join(turn for prompt in load_prompts(BUILTIN) for turn in prompt.turns)
    start = loaded.encode("")
    tokens = loaded.encode(text)[len(start) :]
    size = WINDOW - len(start)
    if num_windows * size > len(tokens):
        raise ConfigError(
            f"num_windows is {num_windows}, the text has {len(tokens) // size} for this tokenizer"
        )
    return [[*start, *tokens[i * size : (i + 1) * size]] for i in range(num_windows)]


def compare(
    reference: Sequence[torch.Tensor], windows: Sequence[Sequence[int]], model: Model
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``reference``: logits ``[T, V]`` of every window.

    Returns, float64 ``[positions]`` over all windows: the log-probability of the token that
    follows under the reference and under the model, KL(reference || model), and 1 where both
    have the same most likely token. The last token of a window is followed by nothing.
    """
    parts = []
    for theirs, tokens in zip(reference, windows, strict=True):
        ours = text_logits(model, tokens, everywhere=True)
        following = torch.tensor(list(tokens[1:]))[:, None]
        for rows in _blocks(len(tokens) - 1):
            p = torch.log_softmax(theirs[rows].double(), -1)
            q = torch.log_softmax(ours[rows].double(), -1)
            told = following[rows]
            kl = (p.exp() * (p - q)).sum(-1)
            same = (p.argmax(-1) == q.argmax(-1)).double()
            parts.append((p.gather(1, told)[:, 0], q.gather(1, told)[:, 0], kl, same))
    first, second, kl, same = (torch.cat(column) for column in zip(*parts, strict=True))
    return first, second, kl, same


def _blocks(num_rows: int) -> Iterator[slice]:
    for start in range(0, num_rows, ROWS):
        yield slice(start, min(start + ROWS, num_rows))


def _against(
    reference: Sequence[torch.Tensor],
    windows: Sequence[Sequence[int]],
    model: Model,
    label: tuple[str, str, bool],
) -> Quality:
    theirs, ours, kl, same = compare(reference, windows, model)
    name, dtype, kernels = label
    return Quality(
        model=name,
        dtype=dtype,
        kernels=kernels,
        num_positions=len(kl),
        perplexity=math.exp(-float(ours.mean())),
        perplexity_ratio=math.exp(float(theirs.mean() - ours.mean())),
        kl_mean=float(kl.mean()),
        kl_p99=float(kl.quantile(0.99)),
        top1=float(same.mean()),
    )


def markdown(rows: Sequence[Quality]) -> str:
    """One line for each of ``rows`` under a head, as a Markdown table."""
    lines = [
        "| model | weights | runs on | perplexity | ratio | KL mean | KL p99 | same top-1 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        place = "kernels" if row.kernels else "PyTorch"
        lines.append(
            f"| {row.model} | {row.dtype} | {place} | {row.perplexity:.3f} "
            f"| {row.perplexity_ratio:.4f} | {row.kl_mean:.5f} | {row.kl_p99:.4f} "
            f"| {row.top1:.1%} |"
        )
    return "\n".join(lines)
