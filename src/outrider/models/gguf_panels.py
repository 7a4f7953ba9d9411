"""Weights of a GGUF file in the layout of the kernels, number for number.

Only types whose numbers a format of the kernels holds exactly: nothing is rounded here.
"""

from __future__ import annotations

from collections.abc import Callable, Set

import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Ggml

from outrider.errors import ConfigError
from outrider.kernels.formats import INPUTS, LANES, Panels, from_integers
from outrider.models.dequant import half, nibbles, q4_k_codes, q6_k_codes, six_bits
from outrider.models.gguf import GgufFile
from outrider.models.gguf_hf import hf_names, in_halves

FILE_TYPES = {"int4": {2, 3, 14, 15}, "int8": {7}}
"""Values of general.file_type (llama.h: llama_ftype) of files that are a format already: Q4_0,
Q4_1, Q4_K_S and Q4_K_M, and Q8_0."""


def kept_weights(file: GgufFile, format: str) -> Set[str]:
    """The weights that ``format`` takes as they are: those of a known type in a file that is of
    that format. Names of transformers, without "model."; vectors are left out.

    A file of 4 bits has its finer parts, such as the head in 6 bits, and they stay finer.
    """
    if file.metadata.get("general.file_type") not in FILE_TYPES.get(format, ()):
        return frozenset()
    return {
        hf_name.removeprefix("model.")
        for name, hf_name in hf_names(file).items()
        if file.tensors[name].kind in _KINDS and len(file.tensors[name].shape) == 2
    }


def read_panels(file: GgufFile, names: Set[str]) -> dict[str, Panels]:
    """The weights ``names``, as :func:`kept_weights` gives them."""
    found: dict[str, Panels] = {}
    for name, hf_name in hf_names(file).items():
        short = hf_name.removeprefix("model.")
        if short in names:
            rows = torch.from_numpy(file.rows(name).copy())
            found[short] = _panels(in_halves(file, name, rows), file.tensors[name].kind)
    return found


def _panels(rows: torch.Tensor, kind: Ggml) -> Panels:
    """``rows`` uint8 ``[R, bytes]`` of blocks of ``kind``."""
    size, format, read = _KINDS[kind]
    parts = {name: part.reshape(len(rows), -1) for name, part in read(rows.view(-1, size)).items()}
    q = parts.pop("q")
    shape = (len(rows), q.shape[1])
    columns, lines = -shape[1] % INPUTS, -shape[0] % LANES

    def padded(name: str, part: torch.Tensor) -> torch.Tensor:
        """With groups for the padded inputs, whose scales are 0."""
        more = 0 if name.startswith("outer") else columns * part.shape[1] // shape[1]
        return F.pad(part, (0, more, 0, lines))

    rest = {name: padded(name, part) for name, part in parts.items()}
    return from_integers(padded("q", q), format, shape=shape, **rest)


def _float16(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """float16 ``[n, 1]`` at byte ``at`` of every block."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _q4_0(blocks: torch.Tensor) -> dict[str, torch.Tensor]:
    # d (q - 8) = d q + offset; times 8 is exact unless it overflows.
    offsets = (half(blocks, 0) * -8.0).half()
    if (offsets.isinf() & half(blocks, 0).isfinite()).any():
        raise ConfigError(
            "a Q4_0 tensor of this file has a scale above 8188, which int4 cannot hold here; use "
            "dtype int8 or bfloat16"
        )
    return {"q": nibbles(blocks[:, 2:]), "scales": _float16(blocks, 0), "offsets": offsets}


def _q4_1(blocks: torch.Tensor) -> dict[str, torch.Tensor]:
    scales, offsets = _float16(blocks, 0), _float16(blocks, 2)
    return {"q": nibbles(blocks[:, 4:]), "scales": scales, "offsets": offsets}


def _q8_0(blocks: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"q": blocks[:, 2:] ^ 0x80, "scales": _float16(blocks, 0)}  # int8 + 128


def _q4_k(blocks: torch.Tensor) -> dict[str, torch.Tensor]:
    scales, minima = six_bits(blocks[:, 4:16])
    return {
        "q": q4_k_codes(blocks),
        "scales": scales.to(torch.int8),
        "offsets": minima.to(torch.int8),
        "outer_scales": _float16(blocks, 0),
        "outer_offsets": -_float16(blocks, 2),
    }


def _q6_k(blocks: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "q": q6_k_codes(blocks),
        "scales": blocks[:, 192:208].contiguous().view(torch.int8),
        "outer_scales": _float16(blocks, 208),
    }


_KINDS: dict[Ggml, tuple[int, str, Callable[[torch.Tensor], dict[str, torch.Tensor]]]] = {
    Ggml.Q4_0: (18, "int4", _q4_0),
    Ggml.Q4_1: (20, "int4", _q4_1),
    Ggml.Q8_0: (34, "int8_32", _q8_0),
    Ggml.Q4_K: (144, "int4", _q4_k),
    Ggml.Q6_K: (210, "int6", _q6_k),
}
"""Bytes per block, the kernels' format, and how to read blocks ``[n, bytes]``."""
