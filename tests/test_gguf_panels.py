"""Quantised weights of GGUF files reach the kernels number for number."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Ggml

from gguf_writer import make_hf, write_gguf
from outrider.errors import ConfigError
from outrider.kernels.formats import alternate, join, quantise, unpack, values_of
from outrider.models.dequant import dequantize
from outrider.models.gguf_panels import _panels
from outrider.models.load import load
from outrider.models.native import NativeDecoder

KINDS = [Ggml.Q4_0, Ggml.Q4_1, Ggml.Q8_0, Ggml.Q4_K, Ggml.Q6_K]


def blocks_of(kind: Ggml, rows: int, cols: int) -> torch.Tensor:
    """Random bytes with sensible float16 scales, uint8 ``[rows, bytes]``: every code occurs."""
    rng = np.random.default_rng(int(kind))
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows * cols // size, num_bytes), dtype=np.uint8)
    at = {Ggml.Q4_1: (0, 2), Ggml.Q4_K: (0, 2), Ggml.Q6_K: (208,)}.get(kind, (0,))
    for place in at:
        scales = rng.uniform(-0.1, 0.1, len(blocks)).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
    return torch.from_numpy(blocks.reshape(rows, -1))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("rows", "cols"), [(32, 256), (45, 768), (64, 1280)])
def test_the_numbers_are_those_of_the_file(kind: Ggml, rows: int, cols: int) -> None:
    blocks = blocks_of(kind, rows, cols)
    panels = _panels(blocks, kind)
    expected = dequantize(blocks.numpy(), kind, torch.float32)
    assert torch.equal(values_of(panels)[:rows, :cols], expected)
    assert panels.shape == (rows, cols)
    assert not values_of(panels)[rows:].any()


@pytest.mark.parametrize("kind", KINDS[:3], ids=lambda kind: kind.name)
def test_columns_are_filled_up(kind: Ggml) -> None:
    blocks = blocks_of(kind, 32, 96)
    values = values_of(_panels(blocks, kind))
    assert values.shape == (32, 128)
    assert torch.equal(values[:, :96], dequantize(blocks.numpy(), kind, torch.float32))
    assert not values[:, 96:].any()


def test_a_scale_that_no_offset_holds_is_refused() -> None:
    blocks = blocks_of(Ggml.Q4_0, 32, 32)
    blocks[5, :2] = torch.tensor([-9000.0]).half().view(torch.uint8)
    with pytest.raises(ConfigError, match="a scale above 8188"):
        _panels(blocks, Ggml.Q4_0)


def test_linears_of_several_kinds() -> None:
    q4, q6 = (_panels(blocks_of(kind, 64, 256), kind) for kind in (Ggml.Q4_K, Ggml.Q6_K))
    assert torch.equal(unpack(join([q4, q6])), torch.cat([values_of(q4), values_of(q6)]))
    for gate, up in ((q4, q6), (q4, q4), (quantise(torch.randn(40, 256), "int8"),) * 2):
        both = unpack(alternate(gate, up)).view(-1, 2, 32, 256)
        assert torch.equal(both[:, 0].flatten(0, 1), values_of(gate))
        assert torch.equal(both[:, 1].flatten(0, 1), values_of(up))


@pytest.mark.parametrize(
    ("kind", "file_type", "dtype", "kept"),
    [
        (Ggml.Q4_0, 2, "int4", True),
        (Ggml.Q8_0, 7, "int8", True),
        (Ggml.Q8_0, 7, "int4", False),  # a file of 8 bits is rounded where 4 are wanted
        (Ggml.Q4_0, None, "int4", False),
    ],
)
@pytest.mark.parametrize("kernels", [True, False])
def test_a_file_of_the_format_is_taken_as_it_is(
    tmp_path: Path, kind: Ggml, file_type: int | None, dtype: str, kept: bool, kernels: bool
) -> None:
    path = tmp_path / "model.gguf"
    add = (lambda writer: None) if file_type is None else (lambda w: w.add_file_type(file_type))
    write_gguf(make_hf("llama", head_dim=64), path, "llama", kind, metadata=add)
    truth = load(str(path), dtype="float32").model
    model = load(str(path), dtype=dtype, kernels=kernels).model
    assert isinstance(model, NativeDecoder) == kernels
    for i, name in enumerate(("qkv", "out", "gate_up", "down")):
        weight = getattr(truth.layers[0], name).weight
        if isinstance(model, NativeDecoder):
            got = unpack(model.packed[i])[:, : weight.shape[1]]
            if name == "gate_up":
                weight = weight.view(2, -1, 32, weight.shape[1]).transpose(0, 1).reshape(got.shape)
        else:
            got, weight = getattr(model.layers[0], name).weight, weight.bfloat16()
        assert torch.equal(got, weight) == kept, name
    head = unpack(model.packed[-1])[:, : truth.hidden_size] if kernels else model.head.weight
    exact = truth.head.weight if kernels else truth.head.weight.bfloat16()
    assert torch.equal(head, exact) == kept
