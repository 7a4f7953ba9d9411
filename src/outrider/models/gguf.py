"""A GGUF file: its metadata and its tensors, read where they lie.

The format is llama.cpp's (docs/gguf.md of the ggml repository). The reader of the ``gguf`` package
takes about ten seconds for a vocabulary of 150,000 tokens and does not notice a truncated file,
hence this one. Nothing in a file is trusted: every length is checked against the file's size.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Ggml

from outrider.errors import BadFile, UnsupportedModel
from outrider.models.dequant import dequantize

VERSIONS = (2, 3)

_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file. ``shape`` in torch's order; ``start``, ``size`` in bytes."""

    name: str
    shape: tuple[int, ...]
    kind: Ggml
    start: int
    size: int


@dataclass(frozen=True, eq=False)
class GgufFile:
    """``metadata``: numbers, strings, lists of strings, and arrays of numbers, by their keys."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Entry]
    _bytes: npt.NDArray[np.uint8]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read the header and check that every tensor lies within the file.

        Raises BadFile and UnsupportedModel.
        """
        try:
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise BadFile(f"{path} cannot be read: {error}") from None
        if data[:4] != b"GGUF":
            raise BadFile(f"{path} is not a GGUF file: it starts with {bytes(data[:4])!r}")
        reader = _Reader(path, data)
        metadata, tensors = reader.header()
        return cls(path, metadata, tensors, np.frombuffer(data, np.uint8))

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the metadata; ``{arch}`` in the key stands for the architecture's name."""
        return self.metadata.get(key.replace("{arch}", self.architecture), default)

    def need(self, key: str) -> Any:
        """A value that has to be there. Raises BadFile."""
        value = self.get(key)
        if value is None:
            key = key.replace("{arch}", self.architecture)
            raise BadFile(f"{self.path} lacks {key!r} in its metadata; download the file again")
        return value

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One tensor, unpacked to ``dtype``."""
        entry = self.tensors[name]
        return dequantize(self.rows(name), entry.kind, dtype).view(entry.shape)

    def rows(self, name: str) -> npt.NDArray[np.uint8]:
        """One tensor as it lies in the file: uint8 ``[rows, bytes]``, not to be written to."""
        entry = self.tensors[name]
        rows = math.prod(entry.shape[:-1])
        return self._bytes[entry.start : entry.start + entry.size].reshape(rows, -1)


class _Reader:
    """A cursor over the header."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 4

    def header(self) -> tuple[dict[str, Any], dict[str, Entry]]:
        version = self._number("<I")
        if version not in VERSIONS:
            raise BadFile(f"{self.path} has GGUF version {version}; versions 2 and 3 can be read")
        num_tensors, num_values = self._number("<Q"), self._number("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string()
            metadata[key] = self._value(self._number("<I"))
        raw = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise BadFile(f"{self.path} has the alignment {alignment!r}; it must be 1 or more")
        base = -(-self.at // alignment) * alignment
        tensors: dict[str, Entry] = {}
        for name, shape, code, offset in raw:
            if name in tensors:
                raise BadFile(f"{self.path} has two tensors named {name!r}")
            tensors[name] = self._entry(name, shape, code, base + offset)
        return metadata, tensors

    def _take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise BadFile(
                f"{self.path} is truncated or corrupted: its header goes on past the end of the "
                f"file ({len(self.data)} bytes); download it again"
            )
        self.at += size
        return self.data[self.at - size : self.at]

    def _number(self, form: str) -> int:
        return int(struct.unpack(form, self._take(struct.calcsize(form)))[0])

    def _string(self) -> str:
        text = self._take(self._number("<Q"))
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise BadFile(f"{self.path} is corrupted: text in its header is not UTF-8") from None

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._number("<I"), self._number("<Q")
            if item == _STRING:
                return [self._string() for _ in range(count)]
            return self._scalars(item, count)
        return self._scalars(kind, 1)[0].item()

    def _scalars(self, kind: int, count: int) -> npt.NDArray[Any]:
        if kind not in _SCALARS:
            raise BadFile(f"{self.path} is corrupted: its header has a value of type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._number("<I")
        dims = self._scalars(10, num_dims).tolist()
        return name, tuple(reversed(dims)), self._number("<I"), self._number("<Q")

    def _entry(self, name: str, shape: tuple[int, ...], code: int, start: int) -> Entry:
        try:
            kind = Ggml(code)
        except ValueError:
            raise UnsupportedModel(
                f"{self.path}: tensor {name!r} has the unknown quantisation type {code}; "
                "take a file in another quantisation, such as Q4_K_M or Q8_0"
            ) from None
        block, size = GGML_QUANT_SIZES[kind]
        if not shape or min(shape) < 1 or shape[-1] % block:
            raise BadFile(f"{self.path}: {name!r} of shape {shape} cannot be of type {kind.name}")
        num_bytes = math.prod(shape) // block * size
        if start + num_bytes > len(self.data):
            raise BadFile(
                f"{self.path} is truncated: {name!r} ends at byte {start + num_bytes}, the file at "
                f"{len(self.data)}; download it again"
            )
        return Entry(name, shape, kind, start, num_bytes)
