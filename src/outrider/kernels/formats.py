"""Weights in the layouts of the kernels, and back.

See csrc/linear.inl for the layouts: panels of 32 outputs, inputs padded to whole groups.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from dataclasses import dataclass

import torch

from outrider.kernels import library

LANES = 32
HUGE = 2 * 1024 * 1024

FORMATS = {"bfloat16": 0, "int8": 1, "int4": 2}
GROUPS = {"bfloat16": 32, "int8": 64, "int4": 32}
"""Inputs that share a scale, by format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """One linear's weights. ``weights`` uint8; ``scales``, ``offsets`` float16
    ``[panels, groups, 32]``; ``bias`` float32 ``[panels * 32]``."""

    format: str
    rows: int
    cols: int
    group: int
    weights: torch.Tensor
    scales: torch.Tensor | None
    offsets: torch.Tensor | None
    bias: torch.Tensor | None

    def struct(self) -> library.Linear:
        """What the kernels read. Valid as long as this object lives."""
        return library.Linear(
            weights=self.weights.data_ptr(),
            scales=_pointer(self.scales),
            offsets=_pointer(self.offsets),
            bias=_pointer(self.bias),
            format=FORMATS[self.format],
            rows=self.rows,
            cols=self.cols,
            group=self.group,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes that one pass over the linear reads."""
        parts = (self.weights, self.scales, self.offsets)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def huge_bytes(num_bytes: int) -> torch.Tensor:
    """uint8 ``[num_bytes]``, zero, on huge pages where the system grants them, with room behind
    it for prefetches."""
    memory = mmap.mmap(-1, num_bytes + 2 * HUGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages refuses
            memory.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=-address % HUGE)


def pack(
    weight: torch.Tensor, format: str, *, bias: torch.Tensor | None = None, group: int = 0
) -> Packed:
    """Round ``weight`` float ``[N, K]`` to a format and lay it out for the kernels.

    int8: symmetric, scale max|w| / 127 of each group. int4: asymmetric, the group's range in 16
    steps.
    """
    num_rows, num_cols = weight.shape
    group = group or GROUPS[format]
    rows, cols = -(-num_rows // LANES) * LANES, -(-num_cols // group) * group
    padded = torch.nn.functional.pad(weight.float(), (0, cols - num_cols, 0, rows - num_rows))
    scales = offsets = None
    if format == "bfloat16":
        values = padded.to(torch.bfloat16).view(torch.int16)
        laid = values.view(rows // LANES, LANES, cols // 2, 2).permute(0, 2, 1, 3).contiguous()
        laid = laid.view(torch.uint8)
    else:
        grouped = padded.view(rows, cols // group, group)
        if format == "int8":
            scale = (grouped.abs().amax(-1) / 127).half()
            q = (grouped / _safe(scale)).round_().clamp_(-127, 127) + 128
        else:
            low, high = grouped.amin(-1), grouped.amax(-1)
            scale = ((high - low) / 15).half()
            offset = (low + 8 * scale.float()).half()
            q = (grouped - (offset.float() - 8 * scale.float())[..., None]) / _safe(scale)
            q = q.round_().clamp_(0, 15)
            offsets = _by_panel(offset)
        scales = _by_panel(scale)
        laid = lay_out(q.view(rows, cols).to(torch.uint8), format)
    weights = huge_bytes(laid.numel())
    weights.copy_(laid.flatten())
    return Packed(
        format=format,
        rows=num_rows,
        cols=cols,
        group=group,
        weights=weights,
        scales=scales,
        offsets=offsets,
        bias=None
        if bias is None
        else torch.nn.functional.pad(bias.float(), (0, rows - num_rows)).contiguous(),
    )


def _safe(scale: torch.Tensor) -> torch.Tensor:
    scale = scale.float()
    return torch.where(scale == 0, 1.0, scale)[..., None]


def _by_panel(values: torch.Tensor) -> torch.Tensor:
    """``[rows, groups]`` -> ``[panels, groups, 32]``."""
    rows, groups = values.shape
    return values.view(rows // LANES, LANES, groups).transpose(1, 2).contiguous()


def lay_out(q: torch.Tensor, format: str) -> torch.Tensor:
    """uint8 ``[rows, cols]`` of stored integers in the order of the kernels."""
    rows, cols = q.shape
    if format == "int8":
        return q.view(rows // LANES, LANES, cols // 4, 4).permute(0, 2, 1, 3).contiguous()
    eights = q.view(rows // LANES, LANES, cols // 8, 2, 4)
    both = eights[:, :, :, 0] | (eights[:, :, :, 1] << 4)
    return both.permute(0, 2, 1, 3).contiguous()


def unpack(packed: Packed) -> torch.Tensor:
    """The weights that the kernels multiply by: float32 ``[rows, cols]``, the padding of the
    inputs included."""
    panels = -(-packed.rows // LANES)
    cols = packed.cols
    if packed.format == "bfloat16":
        values = packed.weights.view(torch.bfloat16).view(panels, cols // 2, LANES, 2)
        return values.permute(0, 2, 1, 3).reshape(-1, cols)[: packed.rows].float()
    if packed.format == "int8":
        q = packed.weights.view(panels, cols // 4, LANES, 4).permute(0, 2, 1, 3)
        q = q.reshape(-1, cols).float() - 128
    else:
        both = packed.weights.view(panels, cols // 8, LANES, 4).permute(0, 2, 1, 3)
        q = torch.stack([both & 15, both >> 4], 3).reshape(-1, cols).float() - 8
    assert packed.scales is not None
    spread = [
        values.transpose(1, 2).reshape(panels * LANES, -1).float()
        for values in (packed.scales, packed.offsets)
        if values is not None
    ]
    weight = q.view(panels * LANES, -1, packed.group) * spread[0][..., None]
    if len(spread) == 2:
        weight = weight + spread[1][..., None]
    return weight.view(-1, cols)[: packed.rows]
