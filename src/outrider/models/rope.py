"""Rotary position embedding (Su et al., arXiv 2104.09864) and its published scalings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.errors import UnsupportedModel

BLOCK = 256
"""Positions computed at a time. Always the same number, as vectorised functions may round the
last elements of a tensor differently: the table must not depend on how it grew."""

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")

_KNOWN_PARAMETERS = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """One rotation. ``parameters``: transformers' ``rope_parameters``, as sorted pairs."""

    type: str
    head_dim: int
    max_positions: int
    parameters: tuple[tuple[str, Any], ...]

    @classmethod
    def from_hf(cls, parameters: Mapping[str, Any], *, head_dim: int, max_positions: int) -> Self:
        """Read one (not nested) ``rope_parameters``. Raises UnsupportedModel."""
        rope_type = parameters.get("rope_type")
        known = ", ".join(ROPE_TYPES)
        if rope_type not in ROPE_TYPES:
            raise UnsupportedModel(f"rope type {rope_type!r} is not supported; supported: {known}")
        unknown = sorted(set(parameters) - _KNOWN_PARAMETERS)
        if unknown:
            raise UnsupportedModel(
                f"rope parameter {unknown[0]!r} is not supported; supported: "
                f"those of the rope types {known}"
            )
        if parameters.get("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModel(
                f"partial_rotary_factor {parameters['partial_rotary_factor']} is not supported; "
                "supported: 1"
            )
        for name, value in parameters.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and not (math.isfinite(value) and value >= 0):
                raise UnsupportedModel(f"rope parameter {name} is {value}, expected 0 or more")
        if not parameters.get("rope_theta", 1.0) > 0:
            raise UnsupportedModel("rope parameter rope_theta is 0, expected more than 0")
        return cls(
            type=rope_type,
            head_dim=head_dim,
            max_positions=max_positions,
            parameters=tuple(sorted(parameters.items())),
        )

    @property
    def scaled_length(self) -> int:
        """Positions the scaling was made for."""
        parameters = dict(self.parameters)
        if self.type in ("linear", "dynamic"):
            return int(self.max_positions * parameters["factor"])
        if self.type == "yarn" and parameters["factor"] is not None:
            return int(parameters["original_max_position_embeddings"] * parameters["factor"])
        return self.max_positions

    def frequencies(self, positions: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Inverse frequencies, float32 ``[head_dim / 2]`` or, where they depend on the position,
        ``[n, head_dim / 2]``; and the factor on cosine and sine.

        ``positions``: int64 ``[n]``. With ``dynamic``, position p uses the frequencies of a
        sequence of max(p + 1, max_position_embeddings) tokens: a function of the token's own
        position. That is what transformers computes when a sequence grows token by token, and the
        only reading under which chunking and speculation cannot change the output.
        """
        if self.type == "default":
            theta = dict(self.parameters)["rope_theta"]
            exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
            return 1.0 / (theta**exponents), 1.0
        carrier = LlamaConfig(
            hidden_size=self.head_dim,
            num_attention_heads=1,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_positions,
            rope_parameters=dict(self.parameters),
        )
        seq_len = positions[:, None] + 1 if self.type == "dynamic" else None
        inverse, factor = ROPE_INIT_FUNCTIONS[self.type](carrier, seq_len=seq_len)
        return inverse, factor


class RopeTable:
    """Cosines and sines by position, in the model's dtype, computed in float32.

    The sines of the first half of a head are negated, so that rotating is
    ``x * cos + roll(x, head_dim / 2) * sin``.

    On the CPU the table grows with the positions asked for. Elsewhere it holds ``length``
    positions (rounded up) from the start: looking at a position would wait for the device.
    """

    def __init__(
        self, rope: Rope, *, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._rope = rope
        self._max_length = length
        self._grows = device.type == "cpu"
        self._table = torch.empty(0, 2, 1, rope.head_dim, dtype=dtype, device=device)
        if not self._grows:
            self._grow(length)

    def __len__(self) -> int:
        """Positions the table holds now."""
        return len(self._table)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine ``[T, 1, head_dim]`` of ``positions``, int64 ``[T]``. May grow the
        table."""
        if self._grows:
            needed = int(positions.max()) + 1
            if needed > len(self._table):
                self._grow(max(needed, min(2 * len(self._table), self._max_length)))
        cos, sin = self._table.index_select(0, positions).unbind(1)
        return cos, sin

    def _grow(self, length: int) -> None:
        starts = range(len(self._table), length, BLOCK)
        self._table = torch.cat([self._table, *map(self._block, starts)])

    def _block(self, start: int) -> torch.Tensor:
        positions = torch.arange(start, start + BLOCK)
        inverse, factor = self._rope.frequencies(positions)
        angles = positions[:, None].float() * inverse
        cos, sin = angles.cos() * factor, angles.sin() * factor
        block = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], dim=1)
        return block[:, :, None].to(self._table)


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate ``x`` ``[T, heads, head_dim]`` in place, rounding like transformers. ``cos`` and
    ``sin`` come from a :class:`RopeTable`."""
    swapped = x.roll(x.shape[-1] // 2, -1).mul_(sin)
    x.mul_(cos).add_(swapped)
