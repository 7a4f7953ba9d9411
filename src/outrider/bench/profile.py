"""t(M): the time of one target forward over M tokens, which decides whether speculation pays."""

from __future__ import annotations

import ctypes
import importlib.util
import platform
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
    """Measure ``loaded``. The sizes take turns, so that a slow moment hits all of them alike.
    Raises ConfigError for contexts that do not fit."""
    model = loaded.model
    most = longest_context(model, sizes)
    contexts = sorted(set(contexts))
    if contexts[-1] > most:
        raise ConfigError(
            f"a context of {contexts[-1]} tokens and {max(sizes)} more do not fit; expected at "
            f"most {most} (the model takes {model.context_length}, the KV pool holds "
            f"{model.kv.num_slots})"
        )
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
        parts = _parts(model, int(middle), repeats)
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


def longest_context(model: Model, sizes: Sequence[int] = SIZES) -> int:
    """The most tokens of context that leave room for ``sizes``. Raises ConfigError for none."""
    most = min(model.context_length, model.kv.num_slots) - max(sizes)
    if most < 1:
        raise ConfigError(
            f"there is no room to profile {max(sizes)} tokens after a context: the model takes "
            f"{model.context_length} tokens, the KV pool holds {model.kv.num_slots}"
        )
    return most


def _parts(model: NativeDecoder, context: int, repeats: int) -> dict[str, float]:
    """Median seconds of a forward of M = 1 and of its linears alone, by turns."""
    run, times = _linears(model.packed), []
    whole = _times(model, context, (1,), repeats, lambda _: times.append(run()))
    linears = statistics.median(times[1:])
    return {"whole": whole["1"], "linears": linears, "rest": whole["1"] - linears}


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


def _linears(packed: Sequence[Packed]) -> Callable[[], float]:
    """Something that runs all linears of a forward of M = 1, one after the other, head included,
    and gives the seconds."""
    library = load_library()
    jobs = [
        (p.struct(), torch.randn(1, p.cols), torch.empty(1, -(-p.rows // 32) * 32)) for p in packed
    ]

    def run() -> float:
        start = time.perf_counter()
        for struct, x, y in jobs:
            library.linear(
                *(ctypes.byref(struct), x.data_ptr(), 1, x.shape[1], y.data_ptr()),
                torch.get_num_threads(),
            )
        return time.perf_counter() - start

    return run


def stored_path(loaded: LoadedModel, dtype: str) -> Path:
    """Where the profile of this model, run this way on this machine, is kept for draft policies.
    Raises OSError."""
    folder = cache_dir() / "profiles"
    folder.mkdir(parents=True, exist_ok=True)
    model = loaded.model
    how = model.isa if isinstance(model, NativeDecoder) else "pytorch"
    parts = (platform.node(), loaded.fingerprint, dtype, model.device.type, how)
    return folder / f"{'-'.join(parts)}-{torch.get_num_threads()}.json"


def check_plots() -> None:
    """Raise ConfigError where :func:`plot` would."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib: pip install 'outrider[bench]'")


def plot(result: Profile, path: Path) -> None:
    """t(M) by context, against the time that reading the weights takes, as a PNG."""
    check_plots()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

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


__all__ = [
    "NoKernels",
    "Profile",
    "check_plots",
    "longest_context",
    "plot",
    "profile",
    "read_bandwidth",
    "stored_path",
]
