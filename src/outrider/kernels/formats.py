"""Weights in the layouts of the kernels, and back.

See csrc/linear.inl for the layouts: panels of 32 outputs, inputs padded to a multiple of 64.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import torch

from outrider.kernels import library

LANES = 32
INPUTS = 64
"""Inputs that are rounded to int8 together."""
OUTER = 256
"""Inputs that share an outer scale."""
HUGE = 2 * 1024 * 1024

FORMATS = {"bfloat16": 0, "int8": 1, "int8_32": 2, "int4": 3, "int6": 4}
"""outrider.h: Format. int8_32 and int6 are there for files that hold such weights."""
GROUPS = {"int8": 64, "int8_32": 32, "int4": 32, "int6": 16}
"""Inputs that share a scale, by format."""
ZEROS = {"int8": 128, "int8_32": 128, "int4": 0, "int6": 32}
"""What a format adds to an integer to store it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panels:
    """A weight matrix in one format: ``shape`` is ``(outputs, inputs)`` without the padding.

    ``weights`` uint8 ``[panels, bytes]``. A weight is scale x (stored integer - zero) + offset.
    ``scales`` and ``offsets``: ``[panels, groups, 32]``, float16; or int8, to be multiplied by
    ``outer_scales`` and ``outer_offsets``, float16 ``[panels, ceil(cols / 256), 32]``.
    """

    format: str
    shape: tuple[int, int]
    weights: torch.Tensor
    scales: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    outer_scales: torch.Tensor | None = None
    outer_offsets: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def cols(self) -> int:
        """Inputs with the padding."""
        return -(-self.shape[1] // INPUTS) * INPUTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """One linear for the kernels: panels in the order in which they are computed, which may come
    from several matrices. ``rows``, ``cols``, ``bias`` as outrider.h: Linear. ``memory`` holds
    all that the panels point to; ``parts`` are views of it, in the same order."""

    rows: int
    cols: int
    integer: bool
    panels: ctypes.Array[library.Panel]
    bias: torch.Tensor | None
    parts: tuple[Panels, ...]
    memory: torch.Tensor

    def struct(self) -> library.Linear:
        """What the kernels read. Valid as long as this object lives."""
        return library.Linear(
            panels=self.panels,
            bias=None if self.bias is None else self.bias.data_ptr(),
            rows=self.rows,
            cols=self.cols,
            integer=int(self.integer),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes that one pass over the linear reads."""
        return self.memory.numel()


def huge_bytes(num_bytes: int) -> torch.Tensor:
    """uint8 ``[num_bytes]``, zero, on huge pages where the system grants them, with room behind
    it for prefetches."""
    memory = mmap.mmap(-1, num_bytes + 2 * HUGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages refuses
            memory.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=-address % HUGE)


def pack(weight: torch.Tensor, format: str, *, bias: torch.Tensor | None = None) -> Packed:
    """``weight`` float ``[N, K]``, rounded to ``format``, as one linear."""
    return join([quantise(weight, format)], bias=bias)


def join(matrices: Seq[Panels], *, bias: torch.Tensor | None = None) -> Packed:
    """One linear with the outputs of all ``matrices``, which are whole panels but for the last."""
    return _packed(matrices, bias)


def alternate(gate: Panels, up: Panels, *, bias: torch.Tensor | None = None) -> Packed:
    """One linear of the panels of ``gate`` and ``up`` in turn. ``bias``: of all panels."""
    if all((getattr(gate, f) is None) == (getattr(up, f) is None) for f in _FIELDS) and (
        gate.format == up.format
    ):
        return _packed([_map(gate, lambda f, one: torch.stack([one, getattr(up, f)], 1))], bias)
    order = [
        _map(part, lambda _, one, i=i: one[i : i + 1])  # type: ignore[misc]
        for i in range(len(gate))
        for part in (gate, up)
    ]
    return _packed(order, bias)


_FIELDS = ("weights", "scales", "offsets", "outer_scales", "outer_offsets")


def _map(panels: Panels, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Panels:
    """``panels`` with each tensor ``change(field, tensor)``, flattened to panels again; all rows
    count."""
    changed: dict[str, Any] = {}
    for field in _FIELDS:
        old = getattr(panels, field)
        if old is not None:
            changed[field] = change(field, old).reshape(-1, *old.shape[1:])
    shape = (LANES * len(changed["weights"]), panels.shape[1])
    return replace(panels, shape=shape, **changed)


def _with(panels: Panels, field: str, tensor: torch.Tensor) -> Panels:
    changed: dict[str, Any] = {field: tensor}
    return replace(panels, **changed)


def _packed(runs: Seq[Panels], bias: torch.Tensor | None) -> Packed:
    """Copy ``runs`` of panels to where the kernels read them: one stream of bytes."""
    count, last = sum(map(len, runs)), runs[-1]
    sizes = [
        [0 if (part := getattr(run, field)) is None else part.nbytes for run in runs]
        for field in _FIELDS
    ]
    memory = huge_bytes(sum(map(sum, sizes)))
    described, views = (library.Panel * count)(), list(runs)
    at = 0
    for field, of_runs in zip(_FIELDS, sizes, strict=True):  # weights first: one stream
        first = 0
        for number, (run, size) in enumerate(zip(runs, of_runs, strict=True)):
            if size:
                old = getattr(run, field)
                new = memory[at : at + size].view(old.dtype).view(old.shape)
                new.copy_(old)
                views[number] = _with(views[number], field, new)
                for i in range(len(run)):
                    setattr(described[first + i], field, new.data_ptr() + i * (size // len(run)))
            at += size
            first += len(run)
    formats = [run.format for run in runs for _ in range(len(run))]
    for panel, format in zip(described, formats, strict=True):
        panel.format = FORMATS[format]
    if bias is not None:
        bias = torch.nn.functional.pad(bias.detach().float(), (0, LANES * count - len(bias)))
    return Packed(
        rows=LANES * count - (-last.shape[0] % LANES),
        cols=last.cols,
        integer=last.format != "bfloat16",
        panels=described,
        bias=None if bias is None else bias.contiguous(),
        parts=tuple(views),
        memory=memory,
    )


def quantise(weight: torch.Tensor, format: str) -> Panels:
    """Round ``weight`` float ``[N, K]`` to ``format``.

    int8, int8_32 and int6: symmetric. int4: the group's range in 16 steps. Scales of int8 and
    int8_32 are float16; those of int4 and int6 have 8 bits, and a float16 for every 256 inputs.
    """
    num_rows, num_cols = weight.shape
    rows, cols = -(-num_rows // LANES) * LANES, -(-num_cols // INPUTS) * INPUTS
    padded = torch.nn.functional.pad(weight.float(), (0, cols - num_cols, 0, rows - num_rows))
    if format == "bfloat16":
        values = padded.to(torch.bfloat16).view(torch.int16)
        laid = values.view(rows // LANES, LANES, cols // 2, 2).permute(0, 2, 1, 3).contiguous()
        laid = laid.view(torch.uint8).view(rows // LANES, -1)
        return Panels(format=format, shape=(num_rows, num_cols), weights=laid)
    group = GROUPS[format]
    grouped = padded.view(rows, -1, group)
    top = 31 if format == "int6" else 127
    offsets = outer_offsets = None
    if format == "int4":
        low = grouped.amin(-1)
        scales, outer_scales = _nest((grouped.amax(-1) - low) / 15, group)
        offsets, outer_offsets = _nest(low, group)
        start = _spread(offsets, outer_offsets, group)
        q = ((grouped - start[..., None]) / _safe(_spread(scales, outer_scales, group))).round_()
        q.clamp_(0, 15)
    else:
        scales, outer_scales = grouped.abs().amax(-1) / top, None
        if format == "int6":
            scales, outer_scales = _nest(scales, group)
        else:
            scales = scales.half()
        q = (grouped / _safe(_spread(scales, outer_scales, group))).round_().clamp_(-top, top)
        q += ZEROS[format]
    return from_integers(
        q.view(rows, cols).to(torch.uint8),
        format,
        shape=(num_rows, num_cols),
        scales=scales,
        offsets=offsets,
        outer_scales=outer_scales,
        outer_offsets=outer_offsets,
    )


def from_integers(
    q: torch.Tensor,
    format: str,
    *,
    shape: tuple[int, int],
    scales: torch.Tensor,
    offsets: torch.Tensor | None = None,
    outer_scales: torch.Tensor | None = None,
    outer_offsets: torch.Tensor | None = None,
) -> Panels:
    """Panels of ready integers: ``q`` uint8 ``[R, C]`` as the format stores them, R a multiple of
    32 and C of 64; ``scales``, ``offsets`` ``[R, C / group]``; ``outer_*`` ``[R, ceil(C / 256)]``,
    dtypes and ``shape`` as in :class:`Panels`."""

    def by_panel(values: torch.Tensor | None) -> torch.Tensor | None:
        if values is None:
            return None
        return values.view(-1, LANES, values.shape[1]).transpose(1, 2).contiguous()

    return Panels(
        format=format,
        shape=shape,
        weights=_lay_out(q, format),
        scales=by_panel(scales),
        offsets=by_panel(offsets),
        outer_scales=by_panel(outer_scales),
        outer_offsets=by_panel(outer_offsets),
    )


def _nest(values: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``[R, groups]`` as int8 ``[R, groups]`` and their float16 factors ``[R, outers]``."""
    rows, groups = values.shape
    each = OUTER // group
    padded = torch.nn.functional.pad(values, (0, -groups % each)).view(rows, -1, each)
    outer = (padded.abs().amax(-1) / 127).half()
    inner = (padded / _safe(outer)).round_().clamp_(-127, 127).to(torch.int8)
    return inner.view(rows, -1)[:, :groups].contiguous(), outer


def _spread(inner: torch.Tensor, outer: torch.Tensor | None, group: int) -> torch.Tensor:
    """float32 values of scales or offsets: ``[R, groups]``."""
    if outer is None:
        return inner.float()
    factors = outer.float().repeat_interleave(OUTER // group, 1)[:, : inner.shape[1]]
    return inner.float() * factors


def _safe(scale: torch.Tensor) -> torch.Tensor:
    """float32 ``[..., 1]`` to divide by."""
    scale = scale.float()
    return torch.where(scale == 0, 1.0, scale)[..., None]


def _lay_out(q: torch.Tensor, format: str) -> torch.Tensor:
    """Stored integers ``[rows, cols]`` in the order of the kernels: ``[panels, bytes]``, uint8."""
    panels, cols = len(q) // LANES, q.shape[1]
    if format in ("int8", "int8_32"):
        return q.view(panels, LANES, cols // 4, 4).permute(0, 2, 1, 3).reshape(panels, -1)
    eights = q.view(panels, LANES, cols // 8, 2, 4).permute(3, 0, 2, 1, 4)  # [2, P, C / 8, 32, 4]
    first, second = eights.unbind()
    low: torch.Tensor = ((first & 15) | (second << 4)).reshape(panels, cols // 8, -1)
    if format == "int4":
        return low.reshape(panels, -1)
    # Lanes 0..15 and 16..31 of both halves share a byte.
    parts = [half[:, :, at : at + 16] >> 4 for half in (first, second) for at in (0, 16)]
    high = parts[0] | (parts[1] << 2) | (parts[2] << 4) | (parts[3] << 6)
    return torch.cat([low, high.reshape(panels, cols // 8, -1)], -1).view(panels, -1)


def _integers(panels: Panels) -> torch.Tensor:
    """The inverse of _lay_out: uint8 ``[rows with padding, cols]``."""
    laid, count, cols = panels.weights, len(panels), panels.cols
    if panels.format in ("int8", "int8_32"):
        return laid.view(count, cols // 4, LANES, 4).permute(0, 2, 1, 3).reshape(-1, cols)
    chunks = laid.view(count, cols // 8, -1)
    low = chunks[:, :, :128].reshape(count, cols // 8, LANES, 4)
    halves = [low & 15, low >> 4]
    if panels.format == "int6":
        high = chunks[:, :, 128:].reshape(count, cols // 8, 16, 4)
        for i, half in enumerate(halves):
            both = torch.cat([(high >> (4 * i)) & 3, (high >> (4 * i + 2)) & 3], 2)
            halves[i] = half | (both << 4)
    return torch.stack(halves, 3).permute(0, 2, 1, 3, 4).reshape(-1, cols)


def values_of(panels: Panels) -> torch.Tensor:
    """The weights that the kernels multiply by: float32 ``[panels * 32, cols]``."""
    cols = panels.cols
    if panels.format == "bfloat16":
        pairs = panels.weights.view(torch.bfloat16).view(len(panels), cols // 2, LANES, 2)
        return pairs.permute(0, 2, 1, 3).reshape(-1, cols).float()
    group = GROUPS[panels.format]

    def by_row(values: torch.Tensor | None) -> torch.Tensor | None:
        if values is None:
            return None
        return values.transpose(1, 2).reshape(-1, values.shape[1])

    q = _integers(panels).float() - ZEROS[panels.format]
    scales, offsets = by_row(panels.scales), by_row(panels.offsets)
    assert scales is not None
    weight = q.view(len(q), -1, group)
    weight = weight * _spread(scales, by_row(panels.outer_scales), group)[..., None]
    if offsets is not None:
        weight = weight + _spread(offsets, by_row(panels.outer_offsets), group)[..., None]
    return weight.view(-1, cols)


def unpack(packed: Packed) -> torch.Tensor:
    """The weights of a linear as the kernels see them: float32 ``[rows, cols]``, the padding of
    the inputs included."""
    return torch.cat([values_of(part) for part in packed.parts])[: packed.rows]
