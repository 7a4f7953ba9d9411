"""t(M): the time of one target forward over M tokens, which decides whether speculation pays."""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.batch import Work, build
from outrider.bench.report import environment
from outrider.errors import ConfigError
from outrider.files import write_whole
from outrider.kernels.build import cache_dir
from outrider.kernels.formats import Packed, huge_bytes
from outrider.kernels.library import NoKernels, load_library
from outrider.models.base import Model
from outrider.models.load import LoadedModel
from outrider.models.native import NativeDecoder

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64)
CONTEXTS = (64, 512, 2048)
READ_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Seconds are medians. ``t_of_m``: at the middle context. ``parts``: seconds of one forward of
    M = 1 there; "linears" is measured alone, "rest" is what remains of the whole. ``bandwidth``:
    bytes a second that a plain read of all threads reaches, None without kernels. ``limit``:
    seconds to read all weights once at that rate. ``largest_speedup``: of free and always accepted
    drafts, max over M of M t(1) / t(M), and the M it needs."""

    model: str
    dtype: str
    context: int
    t_of_m: dict[str, float]
    t_by_context: dict[str, dict[str, float]]
    parts: dict[str, float]
    weight_bytes: int | None
    bandwidth: float | None
    limit: float | None
    read_rate: float | None
    largest_speedup: float
    largest_speedup_at: int
    environment: dict[str, Any]


def profile(
    loaded: LoadedModel,
    dtype: str,
    *,
    sizes: Sequence[int] = SIZES,
    contexts: Sequence[int] = CONTEXTS,
    repeats: int = 9,
    progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Measure ``loaded``. The sizes take turns, so that a slow moment hits all of them alike."""
    model = loaded.model
    room = min(model.context_length, model.kv.num_slots) - max(sizes)
    contexts = sorted({min(context, room) for context in contexts if context > 0})
    if room < 1 or not contexts:
        raise ConfigError(f"a context of {model.context_length} tokens is too short to profile")
    by_context: dict[str, dict[str, float]] = {}
    steps = len(contexts) * repeats
    for number, context in enumerate(contexts):

        def tick(done: int, number: int = number) -> None:
            if progress is not None:
                progress(number * repeats + done, steps)

        by_context[str(context)] = _times(model, context, sizes, repeats, tick)
    middle = str(contexts[len(contexts) // 2])
    t_of_m = by_context[middle]
    best = max(sizes, key=lambda m: m * t_of_m["1"] / t_of_m[str(m)])
    parts, weights, bandwidth = {"whole": t_of_m["1"]}, None, None
    if isinstance(model, NativeDecoder):
        weights, bandwidth = model.weight_bytes, read_bandwidth()
        linears = _linears(model.packed, repeats)
        parts |= {"linears": linears, "rest": t_of_m["1"] - linears}
    return Profile(
        model=loaded.name,
        dtype=dtype,
        context=int(middle),
        t_of_m=t_of_m,
        t_by_context=by_context,
        parts=parts,
        weight_bytes=weights,
        bandwidth=bandwidth,
        limit=None if weights is None or bandwidth is None else weights / bandwidth,
        read_rate=None if weights is None else weights / parts["linears"],
        largest_speedup=best * t_of_m["1"] / t_of_m[str(best)],
        largest_speedup_at=best,
        environment=environment(),
    )


def _times(
    model: Model, context: int, sizes: Sequence[int], repeats: int, tick: Callable[[int], None]
) -> dict[str, float]:
    """Median seconds of a forward of M tokens after ``context`` others, every logit wanted."""
    seq_id = "profile"
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, context).tolist()
    model.kv.open(seq_id)
    try:
        for start in range(0, context, 512):
            chain = tokens[start : start + 512]
            _forward(model, Work(seq_id=seq_id, chain=chain))
            model.kv.commit(seq_id, np.arange(len(chain)), chain)
        times: dict[int, list[float]] = {size: [] for size in sizes}
        for repeat in range(repeats + 1):
            for size in sizes:
                seconds = _forward(model, _nodes(seq_id, size))
                model.kv.commit(seq_id, np.empty(0, np.int64), ())
                if repeat:  # the first round warms up
                    times[size].append(seconds)
            tick(repeat)
    finally:
        model.kv.close(seq_id)
    return {str(size): statistics.median(values) for size, values in times.items()}


def _nodes(seq_id: str, size: int) -> Work:
    from outrider.tree import TokenTree

    return Work(seq_id=seq_id, chain=[1], tree=TokenTree.chain([1] * (size - 1)))


def _forward(model: Model, work: Work) -> float:
    start = time.perf_counter()
    batch = build([work], model.kv, windows=model.windows, dtype=model.dtype, device=model.device)
    logits = model.forward(batch).logits
    if logits.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def read_bandwidth(repeats: int = 5) -> float:
    """Bytes a second of a plain read of a large buffer by all threads, the best of a few. Raises
    NoKernels."""
    library = load_library()
    data = huge_bytes(READ_BYTES)
    data.fill_(1)
    best = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        library.read(data.data_ptr(), READ_BYTES, torch.get_num_threads())
        best = max(best, READ_BYTES / (time.perf_counter() - start))
    return best


def _linears(packed: Sequence[Packed], repeats: int) -> float:
    """Median seconds of all linears of one forward of M = 1, one after the other, head included."""
    library = load_library()
    jobs = [
        (p.struct(), torch.randn(1, p.cols), torch.empty(1, -(-p.rows // 32) * 32)) for p in packed
    ]
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        for struct, x, y in jobs:
            library.linear(
                *(ctypes.byref(struct), x.data_ptr(), 1, x.shape[1], y.data_ptr()),
                torch.get_num_threads(),
            )
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def stored_path(loaded: LoadedModel, dtype: str) -> Path:
    """Where the profile of this model on this machine is kept for draft policies."""
    folder = cache_dir() / "profiles"
    folder.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    return folder / f"{os.uname().nodename}-{loaded.fingerprint}-{dtype}-{threads}.json"


def plot(result: Profile, path: Path) -> None:
    """t(M) by context, against the time that reading the weights takes, as a PNG."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'outrider[bench]'") from None
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for context, times in result.t_by_context.items():
        sizes = [int(size) for size in times]
        left.plot(sizes, [1e3 * t for t in times.values()], marker="o", ms=3, label=context)
        gain = [m * times["1"] / t for m, t in zip(sizes, times.values(), strict=True)]
        right.plot(sizes, gain, marker="o", ms=3, label=context)
    if result.limit is not None:
        left.axhline(1e3 * result.limit, color="grey", ls="--", label="reading the weights")
    left.set(xlabel="tokens in one forward, M", ylabel="milliseconds", ylim=(0, None))
    left.set_title(f"t(M), {result.model}, {result.dtype}")
    left.legend(title="context")
    right.plot([1, max(sizes)], [1, max(sizes)], color="grey", ls="--", label="free")
    right.set(xlabel="tokens in one forward, M", ylabel="M t(1) / t(M)")
    right.set_title("largest speed-up if all M tokens held")
    right.set_ylim(0, 1.3 * result.largest_speedup)
    write_whole(path, lambda file: figure.savefig(file, dpi=110, format="png"))
    pyplot.close(figure)


__all__ = ["NoKernels", "Profile", "plot", "profile", "read_bandwidth", "stored_path"]
