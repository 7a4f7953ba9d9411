"""GGUF blocks to plain numbers.

The block layouts are those of ggml-quants.c in llama.cpp. The types that published files mostly
use are unpacked here with torch, many rows at once; the rest goes through the ``gguf`` package,
which is right but several times slower. Both give the same float32 values, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Ggml
from gguf.quants import dequantize as slow_dequantize

from outrider.errors import UnsupportedModel

CHUNK = 1 << 18
"""Weights unpacked at a time, so that what lies in between stays in the cache."""

Bytes = npt.NDArray[np.uint8]


def dequantize(rows: Bytes, kind: Ggml, dtype: torch.dtype) -> torch.Tensor:
    """``rows`` uint8 ``[R, bytes per row]`` as ``dtype`` ``[R, columns]``; ``rows`` is only read.

    Raises UnsupportedModel for a type that cannot be unpacked.
    """
    values = _values(rows[:1], kind)
    out = torch.empty(len(rows), values.shape[1], dtype=dtype)
    step = max(1, CHUNK // values.shape[1])
    for start in range(0, len(rows), step):
        out[start : start + step] = _values(rows[start : start + step], kind)
    return out


def _values(rows: Bytes, kind: Ggml) -> torch.Tensor:
    """float32 ``[R, columns]``."""
    rows = np.array(rows)  # out of the file, and writable as torch wants it
    if kind in _PLAIN:
        return torch.from_numpy(rows).view(_PLAIN[kind]).float()
    if kind in _BLOCKS:
        size, unpack = _BLOCKS[kind]
        blocks = torch.from_numpy(rows).view(-1, size)
        return unpack(blocks).view(len(rows), -1)
    try:
        values: npt.NDArray[Any] = slow_dequantize(rows, kind)
    except NotImplementedError:
        raise UnsupportedModel(
            f"weights of type {kind.name} cannot be unpacked; take a file in another quantisation"
        ) from None
    return torch.from_numpy(np.ascontiguousarray(values, np.float32))


def half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 number at byte ``at`` of every block: float32 ``[n, 1]``."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 ``[n, b]`` as ``[n, 2 b]``: all low halves, then all high ones."""
    return torch.cat([codes & 15, codes >> 4], dim=1)


def _fifth_bits(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The 32 high bits at byte ``at``, each as 0 or 16: uint8 ``[n, 32]``."""
    spread = blocks[:, at : at + 4].repeat_interleave(8, dim=1)
    shift = torch.arange(8, dtype=torch.uint8).repeat(4)
    return ((spread >> shift) & 1) << 4


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return (nibbles(blocks[:, 2:]).float() - 8.0) * half(blocks, 0)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return (nibbles(blocks[:, 4:]).float() * half(blocks, 0)).add_(half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return (codes.float() - 16.0) * half(blocks, 0)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    codes = nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return (codes.float() * half(blocks, 0)).add_(half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).float() * half(blocks, 0)


def six_bits(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima of a K block, 6 bits each: uint8 ``[n, 12]`` as two ``[n, 8]``."""
    low, mid, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([low & 63, (high & 15) | ((low >> 6) << 4)], dim=1)
    minima = torch.cat([mid & 63, (high >> 4) | ((mid >> 6) << 4)], dim=1)
    return scales, minima


def _scale_and_shift(blocks: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """``codes`` uint8 ``[n, 8, 32]`` times scale, minus minimum, of each group of 32."""
    scales, minima = six_bits(blocks[:, 4:16])
    scale = half(blocks, 0) * scales.float()
    shift = half(blocks, 2) * minima.float()
    return codes.float().mul_(scale[:, :, None]).sub_(shift[:, :, None])


def q4_k_codes(blocks: torch.Tensor) -> torch.Tensor:
    """uint8 ``[n, 8, 32]``, 0 to 15."""
    packed = blocks[:, 16:].view(-1, 4, 1, 32)
    return torch.cat([packed & 15, packed >> 4], dim=2).view(-1, 8, 32)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _scale_and_shift(blocks, q4_k_codes(blocks))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    packed = blocks[:, 48:].view(-1, 4, 1, 32)
    codes = torch.cat([packed & 15, packed >> 4], dim=2).view(-1, 8, 32)
    bit = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    high = (blocks[:, None, 16:48] >> bit) & 1
    return _scale_and_shift(blocks, codes | (high << 4))


def q6_k_codes(blocks: torch.Tensor) -> torch.Tensor:
    """uint8 ``[n, 16, 16]``, 0 to 63."""
    low = blocks[:, :128].view(-1, 2, 1, 64)
    low = torch.cat([low & 15, low >> 4], dim=2).view(-1, 2, 4, 32)
    shift = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    high = (blocks[:, 128:192].view(-1, 2, 1, 32) >> shift) & 3
    return (low | (high << 4)).view(-1, 16, 16)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    codes = q6_k_codes(blocks).float().sub_(32.0)
    scale = half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return codes.mul_(scale[:, :, None])


_PLAIN = {Ggml.F32: torch.float32, Ggml.F16: torch.float16, Ggml.BF16: torch.bfloat16}

_BLOCKS: dict[Ggml, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    Ggml.Q4_0: (18, _q4_0),
    Ggml.Q4_1: (20, _q4_1),
    Ggml.Q5_0: (22, _q5_0),
    Ggml.Q5_1: (24, _q5_1),
    Ggml.Q8_0: (34, _q8_0),
    Ggml.Q4_K: (144, _q4_k),
    Ggml.Q5_K: (176, _q5_k),
    Ggml.Q6_K: (210, _q6_k),
}
"""Bytes per block, and how to unpack ``[n, bytes]`` to float32 ``[n, ...]``."""
