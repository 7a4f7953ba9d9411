"""Many small inputs in one buffer, so that a forward sends its device one copy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT = 16
"""Bytes; every field starts at a multiple."""


@dataclass(frozen=True, slots=True)
class Field:
    """A tensor of a buffer."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


class Layout:
    """Where each field of a buffer lies. Layouts of equal fields are equal."""

    def __init__(self, fields: Mapping[str, Field]) -> None:
        self.fields = dict(fields)
        self.num_bytes = sum(_aligned(field.num_bytes) for field in self.fields.values())

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The fields of ``buffer``, uint8 ``[num_bytes]``, by name; they share its memory."""
        return {
            name: buffer[start : start + field.num_bytes].view(field.dtype).view(field.shape)
            for name, field, start in self._places()
        }

    def host(self, *, pinned: bool) -> tuple[torch.Tensor, dict[str, npt.NDArray[np.generic]]]:
        """A new buffer of zeros on the host, and its fields as numpy arrays.

        Pinned memory comes from PyTorch's cache, which gives it out again only when the copies
        that read it are done: nobody has to wait for them.
        """
        buffer = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=pinned).zero_()
        return buffer, {name: view.numpy() for name, view in self.views(buffer).items()}

    def _places(self) -> Iterator[tuple[str, Field, int]]:
        start = 0
        for name, field in self.fields.items():
            yield name, field, start
            start += _aligned(field.num_bytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
