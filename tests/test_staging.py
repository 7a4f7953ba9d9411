"""The inputs of a forward of a fixed shape: one buffer, and how large its fields are."""

from __future__ import annotations

import math

import torch

from outrider.models.graphs import Shape
from outrider.models.grid import Grid, GridAttention
from outrider.models.staging import Field, Layout


def test_fields_of_a_buffer() -> None:
    layout = Layout(
        {
            "flags": Field(torch.bool, (3,)),
            "none": Field(torch.int32, (0, 4)),
            "ids": Field(torch.int64, (2, 2)),
        }
    )
    buffer, arrays = layout.host(pinned=False)
    assert not buffer.any()
    arrays["flags"][1] = True
    arrays["ids"][1] = (-5, 7)
    views = layout.views(buffer.clone())
    assert views["flags"].tolist() == [False, True, False]
    assert views["none"].shape == (0, 4)
    assert views["ids"].tolist() == [[0, 0], [-5, 7]]


def test_no_field_has_tokens_times_context() -> None:
    """The inputs of 128 drafts after 16384 tokens: a column per key, not one for every draft."""
    shape = Shape(128, 128, (Grid(1, 128, 16384, 128),))
    fields = shape.layout((None,)).fields
    assert max(math.prod(field.shape) for field in fields.values()) == 16384 + 128
    index = torch.zeros(shape.layout((None,)).num_bytes, dtype=torch.uint8)
    tensors = shape.layout((None,)).views(index)
    attention = GridAttention(
        shape.grids[0], "grid0", (None,), tensors, num_kv_heads=1, chunk=None, aligned=True
    )
    masks = [*attention._bias.values(), *attention._blind.values()]
    assert max(mask.numel() for mask in masks) == 16384 + 128
