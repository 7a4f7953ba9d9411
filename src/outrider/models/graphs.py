"""The decoder in forwards of a few fixed shapes, recorded once and replayed: CUDA graphs.

A batch is filled up to the next bucket: tokens, rows, queries of a row, columns of keys. Its
inputs travel to the device in one copy, into the place that the recorded forward reads. Unused
columns read a slot that is always zero; tokens of padding write to one that nobody reads, and
their results, which may be no numbers, are dropped.
What exceeds the buckets, long prompts above all, is computed in its own shape, not recorded.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from outrider.batch import ForwardBatch
from outrider.models.base import Forward, checked_depth
from outrider.models.decoder import Decoder
from outrider.models.grid import Arrays, Grid, GridAttention, GridRow, rows_by_token, rows_of
from outrider.models.recorder import CudaRecorder, EagerRecorder, Recorder, Run
from outrider.models.staging import Field, Layout
from outrider.tree import IntArray

MAX_TOKENS = 256
"""Tokens of the largest recorded forward: 16 sequences of 15 drafts."""

MAX_SHAPES = 128
"""Shapes that are kept; the one that was used longest ago goes. Each holds its inputs and its
logits on the device."""

LEAST_KEYS = 256
LEAST_NEW = 16

MAX_WASTE = 4
"""A grid may have this many cells for each token; beyond it, rows are too unlike for one grid."""

FIXED_CHUNK = 1024
"""Columns of keys taken at a time where all forwards have one shape."""


@dataclass(frozen=True)
class Shape:
    """Everything that a recording fixes. ``logits``: rows of logits."""

    tokens: int
    logits: int
    grids: tuple[Grid, ...]

    @property
    def aligned(self) -> bool:
        """Whether the tokens are the cells of one grid, so that nothing has to be moved."""
        return len(self.grids) == 1 and self.grids[0].cells == self.tokens

    def layout(self, windows: Seq[int | None]) -> Layout:
        """The inputs. ``cell``: the cell of each token; ``order``: where each token of the batch
        stands among those of the forward."""
        fields = {
            name: Field(torch.int64, (self.tokens,))
            for name in ("input_ids", "positions", "write_slots")
        }
        fields["logit_index"] = Field(torch.int32, (self.logits,))
        fields["order"] = Field(torch.int32, (self.tokens,))
        fields["cell"] = Field(torch.int32, (0 if self.aligned else self.tokens,))
        for i, grid in enumerate(self.grids):
            fields |= grid.fields(f"grid{i}", windows)
        return Layout(fields)


@dataclass(frozen=True)
class _Piece:
    """What one forward computes: ``rows`` hold the tokens ``start`` to ``stop`` of a batch."""

    input_ids: IntArray
    positions: IntArray
    write_slots: IntArray
    logit_index: IntArray
    rows: list[GridRow]
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @cached_property
    def wanted(self) -> IntArray:
        """The logits wanted of this piece, counted from its start."""
        index = self.logit_index
        return index[(index >= self.start) & (index < self.stop)] - self.start

    def largest(self, rows: Seq[GridRow]) -> tuple[int, int, int]:
        """The most queries, prefix tokens and new keys of a row."""
        return (
            max(len(row.tokens) for row in rows),
            max(len(row.prefix) for row in rows),
            max(len(row.new) for row in rows),
        )

    def fill(
        self, shape: Shape, groups: Seq[Seq[GridRow]], windows: Seq[int | None], arrays: Arrays,
        num_slots: int,
    ) -> None:  # fmt: skip
        """Write the inputs of a forward of ``shape``; ``groups``: the rows of each grid."""
        num = self.num_tokens
        places = np.arange(-self.start, len(self.input_ids) - self.start)
        cells = np.zeros(len(self.input_ids), np.int64)
        first = 0
        for grid, rows in zip(shape.grids, groups, strict=True):
            for b, row in enumerate(rows):
                at = first + b * grid.queries
                cells[row.tokens] = np.arange(at, at + len(row.tokens))
            first += grid.cells
        if shape.aligned:
            places = cells
        else:
            arrays["cell"][:num] = cells[self.start : self.stop]
        mine = slice(self.start, self.stop)
        arrays["write_slots"][:] = num_slots + 1
        for name in ("input_ids", "positions", "write_slots"):
            arrays[name][places[mine]] = getattr(self, name)[mine]
        arrays["order"][:num] = places[mine]
        arrays["logit_index"][: len(self.wanted)] = places[mine][self.wanted]
        for i, (grid, rows) in enumerate(zip(shape.grids, groups, strict=True)):
            grid.fill(f"grid{i}", windows, rows, arrays, places=places, padding=num_slots)


class GraphDecoder:
    """Takes over a ``decoder``; implements :class:`outrider.models.base.Model`.

    ``recorder``: by default CUDA graphs on CUDA, nothing elsewhere. A shape is recorded when it
    comes for the second time. ``max_tokens``: tokens of the largest recorded forward;
    ``max_shapes``: how many shapes are kept.

    ``fixed_tokens`` makes the numbers of a token independent of what else is computed: every
    forward has that many tokens, larger ones are cut into pieces, and every token reads the keys
    of its own path, in the order of their positions, in chunks of one size. Then speculative
    decoding is bit-exact as far as equal shapes give equal bits, which holds for the kernels in
    use here. Keys are read once per token instead of once per sequence, prompts are slow.
    """

    windows: tuple[int | None, ...] = ()
    """No masks are needed: the slot tables are read."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        recorder: Recorder | None = None,
        max_tokens: int = MAX_TOKENS,
        max_shapes: int = MAX_SHAPES,
        fixed_tokens: int | None = None,
    ) -> None:
        if max_shapes < 1:
            raise ValueError(f"max_shapes is {max_shapes}, expected 1 or more")
        if max_tokens < 1 or (fixed_tokens is not None and fixed_tokens < 1):
            raise ValueError(f"tokens are {max_tokens} and {fixed_tokens}, expected 1 or more")
        self.decoder, self.config = decoder, decoder.config
        self.vocab_size, self.hidden_size = decoder.vocab_size, decoder.hidden_size
        self.context_length, self.num_layers = decoder.context_length, decoder.num_layers
        self.dtype, self.device, self.kv = decoder.dtype, decoder.device, decoder.kv
        self.embedding, self.head = decoder.embedding, decoder.head
        self.max_tokens, self.fixed_tokens = max_tokens, fixed_tokens
        self.max_shapes = max_shapes
        if recorder is None:
            on_cuda = self.device.type == "cuda"
            recorder = CudaRecorder(self.device) if on_cuda else EagerRecorder()
        self._recorder = recorder
        self._known: dict[tuple[Shape, tuple[int, ...], int], _Recording] = {}

    @property
    def num_recorded(self) -> int:
        """Recorded forwards that are kept."""
        return sum(known.is_recorded for known in self._known.values())

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        *,
        hidden_layers: Seq[int] = (),
        num_layers: int | None = None,
    ) -> Forward:
        """Compute a batch; see :meth:`outrider.models.base.Model.forward`.

        ``batch`` must be built with this model's ``windows`` (none) and hold a token. Results are
        on the device, of the model's dtype, and belong to the caller. Nothing waits for the
        device, but for the recording of a shape. Raises ValueError for a layer that does not
        exist or is not reached.
        """
        depth = checked_depth(self.num_layers, num_layers, hidden_layers)
        parts = [self._forward(piece, tuple(hidden_layers), depth) for piece in self._pieces(batch)]
        if len(parts) == 1:
            return parts[0]
        states = [part.hidden for part in parts if part.hidden is not None]
        return Forward(
            logits=torch.cat([part.logits for part in parts]),
            hidden=torch.cat(states) if states else None,
        )

    def scrub(self, slots: Seq[int]) -> None:
        """Zero the pool's ``slots`` in every layer."""
        self.decoder.scrub(slots)

    def _pieces(self, batch: ForwardBatch) -> list[_Piece]:
        split = rows_of if self.fixed_tokens is None else rows_by_token
        rows = [one for row in batch.rows for one in split(row)]
        step = self.fixed_tokens or batch.num_tokens
        ids, positions, slots, index = (
            tensor.cpu().numpy()
            for tensor in (
                batch.input_ids,
                batch.positions,
                batch.write_slots,
                batch.logit_index,
            )
        )
        return [
            _Piece(
                input_ids=ids,
                positions=positions,
                write_slots=slots,
                logit_index=index,
                rows=rows[start : start + step],
                start=start,
                stop=min(start + step, batch.num_tokens),
            )
            for start in range(0, batch.num_tokens, step)
        ]

    def _forward(self, piece: _Piece, hidden_layers: tuple[int, ...], depth: int) -> Forward:
        shape = self._bucket(piece)
        groups = [piece.rows]
        if shape is None:
            groups = _alike(piece.rows)
            shape = _own_shape(piece, groups)
            known = _Recording(self.decoder, shape, hidden_layers, depth, None)
        else:
            known = self._recording(shape, hidden_layers, depth)
        buffer, arrays = known.layout.host(pinned=self.device.type == "cuda")
        piece.fill(shape, groups, self.decoder.windows, arrays, self.kv.num_slots)
        known.buffer.copy_(buffer, non_blocking=True)
        result = known(self._recorder)
        return Forward(
            logits=result.logits[: len(piece.wanted)].clone(),
            hidden=None if result.hidden is None else result.hidden[: piece.num_tokens].clone(),
        )

    def _recording(self, shape: Shape, hidden_layers: tuple[int, ...], depth: int) -> _Recording:
        key = (shape, hidden_layers, depth)
        known = self._known.pop(key, None)
        if known is None:
            chunk = None if self.fixed_tokens is None else FIXED_CHUNK
            known = _Recording(self.decoder, shape, hidden_layers, depth, chunk)
            if len(self._known) >= self.max_shapes:
                del self._known[next(iter(self._known))]
        self._known[key] = known  # the last: the one used most lately
        return known

    def _bucket(self, piece: _Piece) -> Shape | None:
        """The recorded shape that holds a piece; None if it is too large or too uneven."""
        queries, keys, new = piece.largest(piece.rows)
        if self.fixed_tokens is not None:
            width = FIXED_CHUNK * _power(-(-keys // FIXED_CHUNK))
            grid = Grid(self.fixed_tokens, 1, width, 0)
            return Shape(self.fixed_tokens, self.fixed_tokens, (grid,))
        rows, new = _power(len(piece.rows)), max(LEAST_NEW, _power(new))
        grid = Grid(rows, _power(queries), _key_columns(keys), new)
        # Rows of equal length fill their grid in their own order, which saves moving them.
        tokens = _power(piece.num_tokens)
        if tokens < grid.cells <= min(2 * tokens, self.max_tokens):
            tokens = grid.cells
        if tokens > self.max_tokens or grid.cells > MAX_WASTE * tokens:
            return None
        return Shape(tokens, tokens, (grid,))


class _Recording:
    """A forward of one shape: its inputs on the device, and how to run it."""

    def __init__(
        self,
        decoder: Decoder,
        shape: Shape,
        hidden_layers: tuple[int, ...],
        depth: int,
        chunk: int | None,
    ) -> None:
        self._decoder, self._shape, self._chunk = decoder, shape, chunk
        self._hidden_layers, self._depth = hidden_layers, depth
        self.layout = shape.layout(decoder.windows)
        self.buffer = torch.empty(self.layout.num_bytes, dtype=torch.uint8, device=decoder.device)
        self._tensors = self.layout.views(self.buffer)
        self._replay: Run | None = None
        self._num_runs = 0

    @property
    def is_recorded(self) -> bool:
        return self._replay is not None

    def __call__(self, recorder: Recorder) -> Forward:
        """Run on what is in ``buffer``; from the second time on as ``recorder`` does it."""
        self._num_runs += 1
        if self._num_runs == 2:
            self._replay = recorder.record(self._run)
        return self._run() if self._replay is None else self._replay()

    def _run(self) -> Forward:
        tensors, hidden_layers = self._tensors, self._hidden_layers
        result = self._decoder.compute(
            tensors["input_ids"],
            tensors["positions"],
            tensors["write_slots"],
            tensors["logit_index"],
            self._attention(),
            hidden_layers=hidden_layers,
            depth=self._depth,
        )
        if result.hidden is None or not self._shape.aligned:
            return result
        return Forward(logits=result.logits, hidden=result.hidden.index_select(0, tensors["order"]))

    def _attention(self) -> _Grids:
        decoder, shape = self._decoder, self._shape
        grids = [
            GridAttention(
                grid,
                f"grid{i}",
                decoder.windows,
                self._tensors,
                num_kv_heads=decoder.config.num_kv_heads,
                chunk=self._chunk,
                aligned=shape.aligned,
            )
            for i, grid in enumerate(shape.grids)
        ]
        return _Grids(grids, None if shape.aligned else self._tensors["cell"])


class _Grids:
    """Attention of several grids. ``cell``: where each token's result lies; None if in order."""

    def __init__(self, grids: Seq[GridAttention], cell: torch.Tensor | None) -> None:
        self._grids, self._cell = grids, cell

    def __call__(
        self, query: torch.Tensor, pool: torch.Tensor, window: int | None, scale: float
    ) -> torch.Tensor:
        parts = [grid(query, pool, window, scale) for grid in self._grids]
        every = parts[0] if len(parts) == 1 else torch.cat(parts)
        return every if self._cell is None else every.index_select(0, self._cell)


def _alike(rows: Seq[GridRow]) -> list[list[GridRow]]:
    """Rows in groups of about as many queries."""
    groups: dict[int, list[GridRow]] = {}
    for row in rows:
        groups.setdefault(_power(len(row.tokens)), []).append(row)
    return list(groups.values())


def _own_shape(piece: _Piece, groups: Seq[Seq[GridRow]]) -> Shape:
    """The shape of a piece without padding but for what its rows differ in."""
    grids: list[Grid] = []
    for rows in groups:
        queries, keys, new = piece.largest(rows)
        grids.append(Grid(len(rows), queries, _step_up(keys), _step_up(new)))
    return Shape(piece.num_tokens, len(piece.wanted), tuple(grids))


def _power(number: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(0, number - 1).bit_length()


def _step_up(number: int) -> int:
    """The next multiple of 16: matrix units want rows that start at round addresses."""
    return -(-number // 16) * 16


def _key_columns(number: int) -> int:
    """The next of 256, 384, 512, 768, ...: powers of two and one and a half times them."""
    power = max(LEAST_KEYS, _power(number))
    return power * 3 // 4 if power > LEAST_KEYS and number <= power * 3 // 4 else power
