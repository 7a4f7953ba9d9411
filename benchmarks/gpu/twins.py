"""Two ways to compute one thing: attention in a grid and row by row, rounded weights and whole."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch

from outrider.batch import Work, build
from outrider.errors import ConfigError
from outrider.kv import KVCache
from outrider.models.attention import RowAttention
from outrider.models.base import Model
from outrider.models.decoder import Decoder
from outrider.models.graphs import GraphDecoder
from outrider.models.grid import Grid, GridAttention, rows_of
from outrider.models.quantize import convert
from outrider.models.staging import Layout
from outrider.tree import TokenTree

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 2, 64
WINDOWS = (None, 100)
TREE = TokenTree.from_paths([[1, 2, 3, 4], [1, 5, 6], [7, 8]])


def attention_error(
    device: torch.device, dtype: torch.dtype, context: int, chunk: int | None
) -> float:
    """Largest difference of :class:`GridAttention` in ``dtype`` to float32 attention with a dense
    mask on the host, by the largest number there.

    Two sequences: a tree after ``context`` tokens, and a chain after a third of them. ``chunk``:
    keys taken at a time.
    """
    kv = KVCache(context + context // 3 + 64, prefix_cache=False)
    works = [Work(seq_id="a", chain=[1], tree=TREE), Work(seq_id="b", chain=[1, 2, 3])]
    for name, length in (("a", context), ("b", context // 3)):
        kv.open(name)
        kv.reserve(name, length)
        kv.commit(name, np.arange(length), [1] * length)
    batch = build(works, kv, windows=WINDOWS, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    memory = torch.randn(kv.num_slots + 2, 2 * NUM_KV_HEADS, HEAD_DIM, generator=generator)
    memory[kv.num_slots :] = 0.0
    query = torch.randn(batch.num_tokens, NUM_HEADS, HEAD_DIM, generator=generator)
    memory, query = memory.to(dtype), query.to(dtype)

    def by_head(memory: torch.Tensor) -> torch.Tensor:
        return memory.view(-1, 2, NUM_KV_HEADS, HEAD_DIM).permute(1, 2, 0, 3)

    rows = [one for row in batch.rows for one in rows_of(row)]
    grid = Grid(
        len(rows),
        max(len(row.tokens) for row in rows),
        max(len(row.prefix) for row in rows),
        max(len(row.new) for row in rows),
    )
    layout = Layout(grid.fields("grid", WINDOWS))
    buffer, arrays = layout.host(pinned=False)
    places = np.arange(batch.num_tokens)
    grid.fill("grid", WINDOWS, rows, arrays, places=places, padding=kv.num_slots)
    attention = GridAttention(
        grid,
        "grid",
        WINDOWS,
        layout.views(buffer.to(device)),
        num_kv_heads=NUM_KV_HEADS,
        chunk=chunk,
        aligned=False,
    )
    dense = RowAttention(batch.rows, WINDOWS, NUM_HEADS // NUM_KV_HEADS)
    cells = np.concatenate(
        [i * grid.queries + np.arange(len(r.tokens)) for i, r in enumerate(rows)]
    )
    scale, worst = HEAD_DIM**-0.5, 0.0
    for window in WINDOWS:
        expected = dense(query.float(), by_head(memory.float()), window, scale)
        got = attention(query.to(device), by_head(memory.to(device)), window, scale)
        difference = got.float().cpu()[torch.from_numpy(cells)] - expected
        worst = max(worst, float(difference.abs().max() / expected.abs().max()))
    return worst


def quantised_error(
    decoder: Decoder,
    format: str,
    traffic: Callable[[Model], list[torch.Tensor]],
    expected: Seq[torch.Tensor],
) -> float | str:
    """Norm of the difference that weights of ``format`` make, by that of ``expected``; the reason
    if these weights cannot be had here. ``decoder`` is changed."""
    if decoder.device.type != "cuda" and format != "int8":
        return f"{format} runs on CUDA only"
    try:
        convert(decoder, format)
    except ConfigError as error:
        return str(error)
    got = traffic(GraphDecoder(decoder))
    return max(
        float((mine - theirs).norm() / theirs.norm())
        for mine, theirs in zip(got, expected, strict=True)
    )
