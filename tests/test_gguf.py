"""GGUF files are read as they were written; what is damaged or unknown is refused."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGUFWriter
from gguf import GGMLQuantizationType as Ggml
from transformers import (
    LlamaConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gguf_writer import (
    GGUF_FAMILIES,
    assert_same_logits,
    make_hf,
    tiny_load,
    write_gguf,
)
from outrider.errors import BadFile, UnsupportedModel, UserError
from outrider.models.dequant import dequantize
from outrider.models.gguf import GgufFile
from outrider.models.gguf_hf import read_config


@pytest.fixture(scope="module")
def llama_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "llama.gguf"
    write_gguf(make_hf("llama"), path, "llama")
    return path


def test_llama_config_is_known_to_read_rope(tmp_path: Path) -> None:
    """``head_dim`` and the like survive the way through the metadata."""
    hf, path = make_hf("llama-bias-tied"), tmp_path / "model.gguf"
    write_gguf(hf, path, "llama-bias-tied")
    config = read_config(GgufFile.open(path))
    assert isinstance(config, LlamaConfig)
    for name in ("head_dim", "attention_bias", "mlp_bias", "tie_word_embeddings", "vocab_size"):
        assert getattr(config, name) == getattr(hf.config, name)


@pytest.mark.parametrize("kind", [Ggml.F32, Ggml.F16, Ggml.Q8_0, Ggml.Q4_1], ids=lambda k: k.name)
@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_gguf_gives_the_logits_of_the_original(tmp_path: Path, family: str, kind: Ggml) -> None:
    hf, path = make_hf(family), tmp_path / "model.gguf"
    write_gguf(hf, path, family, kind)
    loaded = tiny_load(path)
    assert loaded.path == path
    assert_same_logits(loaded.model, hf)


def test_wrong_permutation_would_be_seen(tmp_path: Path) -> None:
    """The comparison above is sharp enough to tell two orders of the rows apart."""
    hf, path = make_hf("llama"), tmp_path / "model.gguf"
    write_gguf(hf, path, "llama")
    weight = hf.model.layers[0].self_attn.q_proj.weight
    with torch.no_grad():
        weight.copy_(weight.view(4, 2, -1, 32).transpose(1, 2).reshape(weight.shape))
    with pytest.raises(AssertionError):
        assert_same_logits(tiny_load(path).model, hf)


@pytest.mark.parametrize("kind", sorted(set(GGML_QUANT_SIZES) & set(gguf.quants._type_traits)))
def test_unpacking_is_that_of_the_gguf_package(kind: Ggml) -> None:
    block, size = GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(int(kind))
    rows = generator.integers(0, 256, (5, 768 // block * size), np.uint8)
    rows = rows & 0x7B if size > 2 else rows  # no half-precision number is infinite or NaN
    if kind in (Ggml.F16, Ggml.BF16):
        rows &= 0x3B
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.quants.dequantize(rows, kind))
        got = dequantize(rows, kind, torch.float32)
    torch.testing.assert_close(got, expected, atol=0, rtol=0, equal_nan=True)
    assert torch.equal(
        dequantize(rows, kind, torch.bfloat16).nan_to_num(), expected.bfloat16().nan_to_num()
    )


def test_unpacking_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(3).integers(0, 120, (37, 34 * 8), np.uint8)
    whole = dequantize(rows, Ggml.Q8_0, torch.float32)
    monkeypatch.setattr("outrider.models.dequant.CHUNK", 1000)
    assert torch.equal(dequantize(rows, Ggml.Q8_0, torch.float32), whole)


def test_gguf_is_read_as_the_gguf_package_reads_it(llama_gguf: Path) -> None:
    ours, theirs = GgufFile.open(llama_gguf), gguf.GGUFReader(llama_gguf)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            value = ours.metadata[key]
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents()
    assert [t.name for t in theirs.tensors] == list(ours.tensors)
    for tensor in theirs.tensors:
        entry = ours.tensors[tensor.name]
        assert (entry.start, entry.size) == (tensor.data_offset, tensor.n_bytes)


@pytest.mark.parametrize("divisor", [8.0, 32.0])
def test_llama3_rope_is_recognised(tmp_path: Path, divisor: float) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": divisor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    hf = make_hf("llama", rope_parameters=rope, head_dim=16)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](hf.config, torch.device("cpu"))
    plain = 1.0 / 500_000.0 ** (torch.arange(0, 16, 2) / 16)
    divisors = (plain / scaled).numpy().astype(np.float32)
    assert np.median(divisors[divisors > 1.0]) > 1.0
    path = tmp_path / "model.gguf"
    write_gguf(hf, path, "llama", extra={"rope_freqs.weight": divisors})
    assert read_config(GgufFile.open(path)).rope_parameters == rope
    assert_same_logits(tiny_load(path).model, hf)
    divisors[-2] *= 1.5
    write_gguf(hf, path, "llama", extra={"rope_freqs.weight": divisors})
    with pytest.raises(UnsupportedModel, match="not those of Llama 3"):
        tiny_load(path)


def scaling(kind: str, **extra: float) -> Callable[[GGUFWriter], None]:
    def add(writer: GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", kind)
        writer.add_float32("llama.rope.scaling.factor", 4.0)
        if kind == "yarn":
            writer.add_uint32("llama.rope.scaling.original_context_length", 16)
        for key, value in extra.items():
            writer.add_float32(f"llama.rope.scaling.{key}", value)

    return add


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling(tmp_path: Path, kind: str) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = 16
    hf, path = make_hf("llama", rope_parameters=rope), tmp_path / "model.gguf"
    write_gguf(hf, path, "llama", metadata=scaling(kind))
    assert_same_logits(tiny_load(path).model, hf)


def test_what_the_decoder_cannot_do_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    cases: list[tuple[Callable[[GGUFWriter], None], str]] = [
        (scaling("longrope"), "longrope"),
        (scaling("yarn", yarn_attn_factor=2.0), "yarn_attn_factor"),
        (lambda w: w.add_expert_count(4), "mixtures of experts"),
        (lambda w: w.add_uint16("split.count", 3), "llama-gguf-split"),
        (lambda w: w.add_rope_dimension_count(4), "llama.rope.dimension_count 4"),
    ]
    for metadata, message in cases:
        write_gguf(make_hf("llama"), path, "llama", metadata=metadata)
        with pytest.raises(UnsupportedModel, match=message) as caught:
            tiny_load(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    write_gguf(make_hf("llama"), path, "llama", pre="some-new-one")
    with pytest.raises(UnsupportedModel, match="pre-tokenizer 'some-new-one'"):
        tiny_load(path)
    path.write_bytes(path.read_bytes().replace(b"llama", b"gpt-x"))
    with pytest.raises(UnsupportedModel, match="'gpt-x' is not supported; supported: llama"):
        tiny_load(path)


def test_truncated_gguf_is_refused_wherever_it_ends(tmp_path: Path, llama_gguf: Path) -> None:
    whole, path = llama_gguf.read_bytes(), tmp_path / "cut.gguf"
    last = max(e.start + e.size for e in GgufFile.open(llama_gguf).tensors.values())
    for length in [0, 3, 4, 11, 23, *range(24, last, 211), last - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(BadFile) as caught:
            GgufFile.open(path)
        assert str(path) in str(caught.value)
    path.write_bytes(whole[:last])
    GgufFile.open(path)


def test_damaged_headers_raise_nothing_else(tmp_path: Path, llama_gguf: Path) -> None:
    whole, path = llama_gguf.read_bytes(), tmp_path / "damaged.gguf"
    header = min(e.start for e in GgufFile.open(llama_gguf).tensors.values())
    for seed in range(300):
        rng = random.Random(seed)
        data = bytearray(whole)
        for _ in range(rng.choice([1, 1, 4])):
            data[rng.randrange(header)] = rng.randrange(256)
        path.write_bytes(data)
        try:
            GgufFile.open(path)
        except UserError:
            continue
        except Exception as error:
            pytest.fail(f"seed {seed}: {error!r}")


def test_damaged_gguf_is_named(tmp_path: Path, llama_gguf: Path) -> None:
    whole, path = llama_gguf.read_bytes(), tmp_path / "damaged.gguf"
    path.write_bytes(b"GGML" + whole[4:])
    with pytest.raises(BadFile, match="not a GGUF file: it starts with b'GGML'"):
        tiny_load(path)
    path.write_bytes(whole[:4] + struct.pack("<I", 9) + whole[8:])
    with pytest.raises(BadFile, match="version 9"):
        tiny_load(path)
    place = whole.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 2 * 8
    path.write_bytes(whole[:place] + struct.pack("<I", 77) + whole[place + 4 :])
    with pytest.raises(UnsupportedModel, match="unknown quantisation type 77"):
        tiny_load(path)
    path.write_bytes(whole[:place] + struct.pack("<I", int(Ggml.I32)) + whole[place + 4 :])
    with pytest.raises(UnsupportedModel, match="type I32 cannot be unpacked"):
        tiny_load(path)
    path.write_bytes(whole.replace(b"blk.1.ffn_up", b"blk.0.ffn_up"))
    with pytest.raises(BadFile, match=r"two tensors named 'blk.0.ffn_up.weight'"):
        tiny_load(path)
    path.write_bytes(whole.replace(b"blk.1.ffn_up", b"blk.1.ffn_xx"))
    with pytest.raises(BadFile, match=r"blk.1.ffn_xx.weight"):
        tiny_load(path)
    path.write_bytes(whole.replace(b"llama.block_count", b"llama.block_xxxxx"))
    with pytest.raises(BadFile, match=r"lacks 'llama.block_count'"):
        tiny_load(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_count", 2**31, "block_count is 2147483648, its tensors are those of 3 layers"),
        ("block_count", 2, "block_count is 2, its tensors are those of 3 layers"),
        ("block_count", 0, "block_count is 0"),
        ("feed_forward_length", 2**21, r"'blk.0.ffn_up.weight' has the shape"),
        ("embedding_length", 2**19, r"'token_embd.weight' has the shape"),
        ("attention.head_count", 2**13, r"'blk.0.attn_q.weight' has the shape"),
        ("attention.head_count_kv", 2**13, r"'blk.0.attn_k.weight' has the shape"),
    ],
)
def test_metadata_that_is_not_of_the_tensors(
    tmp_path: Path, key: str, value: int, message: str
) -> None:
    path = tmp_path / "model.gguf"

    def change(writer: GGUFWriter) -> None:
        writer.kv_data[0][f"llama.{key}"].value = value

    write_gguf(make_hf("llama"), path, "llama", metadata=change)
    with pytest.raises(BadFile, match=message):
        read_config(GgufFile.open(path))


@pytest.mark.parametrize(
    "name", ["token_embd.weight", "blk.2.ffn_norm.weight", "output_norm.weight"]
)
def test_missing_tensor(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(make_hf("llama"), path, "llama", skip=name)
    with pytest.raises(BadFile) as caught:
        tiny_load(path)
    assert str(path) in str(caught.value)


def test_threads_are_as_before(llama_gguf: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        tiny_load(llama_gguf)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
