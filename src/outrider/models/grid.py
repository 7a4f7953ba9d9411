"""Attention in fixed shapes: queries in a grid of rows, keys gathered by slot.

A row is queries that see the same prefix; the keys of the same forward follow it and alone have a
mask of their own, so no mask of queries times context is ever made. Lengths are tensors: one shape
serves every step that fits in it, and can be recorded as a graph.

Shapes: B rows of Q queries, L columns for the prefix and N for the keys of this forward, H query
heads, Hkv key-value heads, G = H / Hkv, d head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from outrider.batch import Row, visible_among_new
from outrider.models.staging import Field
from outrider.tree import BoolArray, IntArray

Arrays = Mapping[str, npt.NDArray[Any]]
Tensors = Mapping[str, torch.Tensor]

SCORE_BYTES = 256 << 20
"""Scores of one layer take at most this much; beyond it, keys are taken in chunks."""

LEAST_SCORE = -1e30
"""Stands for the maximum of no scores at all: finite, so that differences stay numbers."""


@dataclass(frozen=True, slots=True)
class GridRow:
    """n queries that share their keys.

    ``tokens`` int64 ``[n]``: their places in the batch, at ``positions`` int64 ``[n]``.
    ``prefix`` int64: the slots of positions 0, 1, ... that all of them see. ``new`` int64 ``[m]``:
    slots of further keys, at ``new_positions``; ``sees`` bool ``[n, m]`` says who sees which.
    """

    tokens: IntArray
    positions: IntArray
    prefix: IntArray
    new: IntArray
    new_positions: IntArray
    sees: BoolArray


def rows_of(row: Row) -> list[GridRow]:
    """A row of a batch as it is: committed tokens are the prefix, all else is new."""
    return [_split(row)] if row.stop > row.start else []


def rows_by_token(row: Row) -> list[GridRow]:
    """Each query of a row of a batch on its own, its whole path as the prefix.

    The keys of a token then lie in the columns of their positions, whatever else is computed.
    """
    whole = _split(row)
    nothing = np.empty(0, np.int64)
    return [
        GridRow(
            tokens=whole.tokens[i : i + 1],
            positions=whole.positions[i : i + 1],
            prefix=np.concatenate([whole.prefix, whole.new[whole.sees[i]]]),
            new=nothing,
            new_positions=nothing,
            sees=np.empty((1, 0), np.bool_),
        )
        for i in range(len(whole.tokens))
    ]


def _split(row: Row) -> GridRow:
    work = row.work
    num_chain, total = len(work.chain), len(work.chain) + len(work.tree)
    length = len(row.table) - total
    places = np.concatenate([np.arange(num_chain), num_chain - 1 + work.tree.depths]) + length
    query = np.concatenate([np.arange(num_chain), np.arange(num_chain + work.start, total)])
    return GridRow(
        tokens=np.arange(row.start, row.stop),
        positions=places[query],
        prefix=row.table[:length],
        new=row.table[length:],
        new_positions=places,
        sees=visible_among_new(work)[query],
    )


@dataclass(frozen=True, slots=True)
class Grid:
    """The shape of a grid: B ``rows`` of Q ``queries``; L ``keys`` and N ``new`` columns."""

    rows: int
    queries: int
    keys: int
    new: int

    @property
    def cells(self) -> int:
        return self.rows * self.queries

    def columns(self, window: int | None) -> int:
        """Columns for the prefix under a window: what lies before it is left out."""
        return self.keys if window is None else min(self.keys, -(-window // 16) * 16)

    def fields(self, name: str, windows: Seq[int | None]) -> dict[str, Field]:
        """What a forward has to know of its grid. ``source``: the token of each cell."""
        made = {f"{name}.source": Field(torch.int32, (self.cells,))}
        for i, window in enumerate(windows):
            width = self.columns(window) + self.new
            made[f"{name}.table{i}"] = Field(torch.int32, (self.rows, width))
            made[f"{name}.length{i}"] = Field(torch.int32, (self.rows,))
            made[f"{name}.sees{i}"] = Field(torch.bool, (self.rows, self.queries, self.new))
            if window is not None:
                made[f"{name}.back{i}"] = Field(torch.int32, (self.rows, self.queries))
        return made

    def fill(
        self,
        name: str,
        windows: Seq[int | None],
        rows: Seq[GridRow],
        arrays: Arrays,
        *,
        places: IntArray,
        padding: int,
    ) -> None:
        """Write ``rows`` into the fields of this grid, zeros before.

        ``places``: where each token of the batch stands in the forward. ``padding``: the slot
        that unused columns read; it holds finite numbers.
        """
        source = arrays[f"{name}.source"].reshape(self.rows, self.queries)
        for b, row in enumerate(rows):
            source[b, : len(row.tokens)] = places[row.tokens]
        for i, window in enumerate(windows):
            table, length = arrays[f"{name}.table{i}"], arrays[f"{name}.length{i}"]
            sees = arrays[f"{name}.sees{i}"]
            width = self.columns(window)
            table[:] = padding
            for b, row in enumerate(rows):
                num, num_new = len(row.tokens), len(row.new)
                first, seen = 0, row.sees
                if window is not None:
                    first = min(len(row.prefix), max(0, int(row.positions.min()) - window + 1))
                    seen = seen & (row.positions[:, None] - row.new_positions < window)
                    # Column j is visible if it is at least so far right.
                    arrays[f"{name}.back{i}"][b, :num] = row.positions - window + 1 - first
                length[b] = len(row.prefix) - first
                table[b, : length[b]] = row.prefix[first:]
                table[b, width : width + num_new] = row.new
                sees[b, :num, :num_new] = seen


class GridAttention:
    """Attention of one grid, planned on the device once per forward.

    ``tensors``: the fields of ``grid`` called ``name``. ``chunk``: columns taken at a time, always
    as many, so that the sums of a row are cut at the same places in every forward; None takes as
    many as memory allows. ``aligned``: the tokens are the cells, in their order.

    Returns ``[B * Q, H * d]``, a row for every cell.
    """

    def __init__(
        self,
        grid: Grid,
        name: str,
        windows: Seq[int | None],
        tensors: Tensors,
        *,
        num_kv_heads: int,
        chunk: int | None,
        aligned: bool,
    ) -> None:
        self._grid, self._num_kv_heads, self._chunk = grid, num_kv_heads, chunk
        self._source = None if aligned else tensors[f"{name}.source"]
        self._index: dict[int | None, torch.Tensor] = {}
        self._bias: dict[int | None, torch.Tensor] = {}
        self._blind: dict[int | None, torch.Tensor] = {}
        for i, window in enumerate(windows):
            table, length = tensors[f"{name}.table{i}"], tensors[f"{name}.length{i}"]
            self._index[window] = self._pool_rows(table)
            column = torch.arange(table.shape[1], device=table.device, dtype=torch.int32)
            is_new = column >= grid.columns(window)
            seen = (is_new | (column < length[:, None]))[:, None, None, None]
            if window is not None:
                back = tensors[f"{name}.back{i}"][:, None, None, :, None]
                seen = seen & (is_new | (column >= back))
            zeros = torch.zeros(seen.shape, device=table.device)
            self._bias[window] = zeros.masked_fill_(~seen, -torch.inf)
            self._blind[window] = ~tensors[f"{name}.sees{i}"][:, None, None]

    def _pool_rows(self, table: torch.Tensor) -> torch.Tensor:
        """int32 ``[2, B, Hkv, columns]``: rows of the pool, one a head, of keys and of values."""
        num = self._num_kv_heads
        head = torch.arange(2 * num, device=table.device, dtype=torch.int32)
        return (table * (2 * num))[None, :, None] + head.view(2, 1, num, 1)

    def __call__(
        self, query: torch.Tensor, pool: torch.Tensor, window: int | None, scale: float
    ) -> torch.Tensor:
        grid, (_, num_kv_heads, _, size) = self._grid, pool.shape
        if self._source is not None:
            query = query.index_select(0, self._source)
        q = query.view(grid.rows, grid.queries, num_kv_heads, -1, size)
        num_heads = q.shape[3] * num_kv_heads
        q = q.permute(0, 2, 3, 1, 4).reshape(grid.rows * num_kv_heads, -1, size)
        pool_rows = pool.permute(2, 0, 1, 3).reshape(-1, size)  # the pool as it lies in memory
        width = self._index[window].shape[3]
        chunk = self._chunk or SCORE_BYTES // (4 * grid.cells * num_heads)
        if self._chunk is None and width <= max(chunk, 64):
            out = self._whole(q, pool_rows, window, scale)
        else:
            out = self._in_chunks(q, pool_rows, window, scale, max(chunk, 64))
        out = out.view(grid.rows, num_kv_heads, -1, grid.queries, size)
        return out.permute(0, 3, 1, 2, 4).reshape(grid.cells, -1)

    def _whole(
        self, q: torch.Tensor, pool: torch.Tensor, window: int | None, scale: float
    ) -> torch.Tensor:
        keys, values = self._gather(pool, window, slice(None))
        scores = self._scores(q, keys, window, scale, slice(None))
        self._hide_new(scores, window)
        return torch.bmm(torch.softmax(scores, -1).to(values.dtype), values)

    def _in_chunks(
        self, q: torch.Tensor, pool: torch.Tensor, window: int | None, scale: float, chunk: int
    ) -> torch.Tensor:
        """Chunks of keys, merged by their maxima and sums as in FlashAttention (arXiv 2205.14135)
        and Flash-Decoding; the prefix apart from what differs behind it, as in cascade attention
        (Hydragen, arXiv 2402.05099). A chunk without visible keys changes no bit."""
        width = self._index[window].shape[3] - self._grid.new
        chunks = [slice(at, min(at + chunk, width)) for at in range(0, width, chunk)]
        if self._grid.new:
            chunks.append(slice(width, None))
        top = q.new_full((*q.shape[:2], 1), LEAST_SCORE, dtype=torch.float32)
        total = torch.zeros_like(top)
        out = q.new_zeros(q.shape, dtype=torch.float32)
        for part in chunks:
            keys, values = self._gather(pool, window, part)
            scores = self._scores(q, keys, window, scale, part)
            if part.stop is None:
                self._hide_new(scores, window)
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
            weights = scores.sub_(new_top).exp_()
            fade = (top - new_top).exp_()
            total = total * fade + weights.sum(-1, keepdim=True)
            out = out * fade + product(weights.to(values.dtype), values)
            top = new_top
        return (out / total.clamp_min_(torch.finfo(torch.float32).tiny)).to(q.dtype)

    def _gather(
        self, pool: torch.Tensor, window: int | None, part: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[B * Hkv, columns, d]``."""
        index = self._index[window][..., part]
        both = pool.index_select(0, index.reshape(-1))
        keys, values = both.view(2, -1, index.shape[3], pool.shape[1]).unbind()
        return keys, values

    def _scores(
        self, q: torch.Tensor, keys: torch.Tensor, window: int | None, scale: float, part: slice
    ) -> torch.Tensor:
        """float32 ``[B * Hkv, G * Q, columns]``."""
        grid = self._grid
        products = product(q, keys.transpose(1, 2))
        by_cell = products.view(grid.rows, self._num_kv_heads, -1, grid.queries, keys.shape[1])
        scores = torch.add(self._bias[window][..., part], by_cell, alpha=scale)
        return scores.view(products.shape)

    def _hide_new(self, scores: torch.Tensor, window: int | None) -> None:
        """Mask the last N columns of ``scores``, in place."""
        grid = self._grid
        if grid.new:
            new = scores.view(grid.rows, self._num_kv_heads, -1, grid.queries, scores.shape[-1])
            new[..., -grid.new :].masked_fill_(self._blind[window], -torch.inf)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The batched matrix product of two tensors of one dtype, in float32."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    if _has_wide_product(a.device, a.dtype):
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


@cache
def _has_wide_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PyTorch multiplies narrow numbers into float32 here, as it does on CUDA."""
    one = torch.zeros(1, 16, 16, dtype=dtype, device=device)
    try:
        torch.bmm(one, one, out_dtype=torch.float32)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True
