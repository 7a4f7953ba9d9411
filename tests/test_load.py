"""Models come out of every kind of storage as they went in; what is damaged is refused."""

from __future__ import annotations

import gc
import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, MODEL_ARCH, GGUFWriter
from gguf import GGMLQuantizationType as Ggml
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.batch import Work, build
from outrider.errors import BadFile, ConfigError, ModelNotFound, UnsupportedModel, UserError
from outrider.models import fetch
from outrider.models.catalog import CATALOG
from outrider.models.decoder import Decoder
from outrider.models.dequant import dequantize
from outrider.models.gguf import GgufFile
from outrider.models.gguf_hf import read_config, read_tokenizer
from outrider.models.load import LoadedModel, fingerprint, load, locate, same_vocabulary
from tiny import VOCAB, tiny_config, tiny_hf

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LETTERS = [chr(c) for c in range(ord("a"), ord("z") + 1)] + list("0123456789.,!?") + ["Ġ"]
PAIRS = ["th", "he", "Ġa", "in"]
TOKENS = [*SPECIAL, *LETTERS, *PAIRS]
TOKENS += [f"[PAD{i}]" for i in range(len(TOKENS), VOCAB)]

GGUF_FAMILIES: dict[str, tuple[str, MODEL_ARCH, dict[str, Any]]] = {
    "llama": ("llama", MODEL_ARCH.LLAMA, {}),
    "llama-bias-tied": ("llama", MODEL_ARCH.LLAMA, {}),
    "mistral": ("llama", MODEL_ARCH.LLAMA, {}),
    "qwen2": ("qwen2", MODEL_ARCH.QWEN2, {}),
    "qwen3": ("qwen3", MODEL_ARCH.QWEN3, {}),
    "gemma3": (
        "gemma3",
        MODEL_ARCH.GEMMA3,
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "query_pre_attn_scalar": 16,
        },
    ),
}


def make_hf(family: str, **changes: Any) -> PreTrainedModel:
    own = GGUF_FAMILIES[family][2]
    return tiny_hf(tiny_config(family, intermediate_size=64, **{**own, **changes}))


def write_gguf(
    hf: PreTrainedModel,
    path: Path,
    family: str,
    kind: Ggml = Ggml.F32,
    *,
    metadata: Callable[[GGUFWriter], None] = lambda writer: None,
    tokens: list[str] = TOKENS,
    pre: str = "smollm",
    skip: str = "",
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
) -> None:
    """What llama.cpp's converter writes. The matrices of ``hf`` become the quantised ones.

    Names come from the gguf package's own table, so a wrong name here and there cannot agree.
    """
    arch, model_arch, _ = GGUF_FAMILIES[family]
    c = hf.config
    writer = GGUFWriter(path, arch)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = c.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if family in ("gemma3", "mistral"):
        writer.add_sliding_window(c.sliding_window)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    kinds = [3 if t in SPECIAL else 5 if t.startswith("[PAD") else 1 for t in tokens]
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{pair[0]} {pair[1:]}" for pair in PAIRS])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    metadata(writer)
    names = gguf.get_tensor_name_map(model_arch, c.num_hidden_layers)
    for name, weight in hf.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new is not None, name
        values = weight.clone()
        if arch == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
            heads = c.num_attention_heads if ".q_proj." in name else c.num_key_value_heads
            halves = values.view(heads, 2, -1, *values.shape[1:])
            values = halves.transpose(1, 2).reshape(values.shape)
        if arch == "gemma3" and name.endswith("norm.weight"):
            values += 1.0
        if new == skip:
            continue
        if values.dim() == 1 or kind == Ggml.F32:
            writer.add_tensor(new, values.numpy())
            continue
        writer.add_tensor(new, gguf.quants.quantize(values.numpy(), kind), raw_dtype=kind)
        rounded = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind)
        weight.copy_(torch.from_numpy(rounded))
    for new, array in (extra or {}).items():
        writer.add_tensor(new, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def last_logits(model: Decoder, tokens: list[int]) -> torch.Tensor:
    model.kv.open("a")
    batch = build([Work(seq_id="a", chain=tokens)], model.kv, windows=model.windows)
    logits = model.forward(batch).logits[-1].clone()
    model.kv.close("a")
    return logits


def assert_same_logits(model: Decoder, hf: PreTrainedModel, tolerance: float = 1e-4) -> None:
    rng = random.Random(5)
    for length in (1, 9, 14):
        tokens = [rng.randrange(VOCAB) for _ in range(length)]
        with torch.no_grad():
            expected = hf(input_ids=torch.tensor([tokens])).logits[0, -1]
        torch.testing.assert_close(last_logits(model, tokens), expected, atol=tolerance, rtol=0)


def tiny_load(path: Path, **options: Any) -> LoadedModel:
    return load(str(path), **{"dtype": "float32", "num_slots": 64, **options})


@pytest.fixture(scope="module")
def llama_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "llama.gguf"
    write_gguf(make_hf("llama"), path, "llama")
    return path


def tokenizer(tokens: list[str] = TOKENS, pairs: list[str] = PAIRS) -> PreTrainedTokenizerFast:
    real = {t: i for i, t in enumerate(tokens) if t not in SPECIAL and not t.startswith("[PAD")}
    real |= {t: i for i, t in enumerate(tokens) if t in SPECIAL}
    backend = Tokenizer(BPE(vocab=real, merges=[(p[0], p[1:]) for p in pairs]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", chat_template=TEMPLATE
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sharded folder of a tiny qwen2."""
    path = tmp_path / "folder"
    make_hf("qwen2").save_pretrained(path, max_shard_size="20KB")
    tokenizer().save_pretrained(path)
    (path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    return path


# GGUF ---------------------------------------------------------------------------------------


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


# Tokenizers ---------------------------------------------------------------------------------


def test_gguf_tokenizer_and_chat(llama_gguf: Path) -> None:
    loaded = tiny_load(llama_gguf)
    text = "the heat in a thing 42"
    assert loaded.tokenizer.decode(loaded.encode(text)) == text
    assert [TOKENS[i] for i in loaded.encode("a he")] == ["a", "Ġ", "he"]
    ids = loaded.chat([{"role": "user", "content": "hi"}])
    assert [TOKENS[i] for i in ids] == [
        *("<|im_start|>", "u", "s", "e", "r", "Ġ", "h", "i", "<|im_end|>", "<|im_start|>")
    ]
    assert loaded.end_tokens == {0, 2}


def test_digits_are_split_before_spaces_join_them(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(make_hf("llama"), path, "llama")
    text = "a 12"
    pieces = read_tokenizer(GgufFile.open(path)).backend_tokenizer.pre_tokenizer
    assert [piece for piece, _ in pieces.pre_tokenize_str(text)] == ["a", "Ġ", "1", "2"]


def test_messages_the_template_refuses(tmp_path: Path, llama_gguf: Path) -> None:
    loaded = tiny_load(llama_gguf)
    loaded.tokenizer.chat_template = "{{ raise_exception('only users') }}"
    with pytest.raises(ConfigError, match="only users"):
        loaded.chat([{"role": "system", "content": "hi"}])
    loaded.tokenizer.chat_template = None
    assert loaded.chat([{"role": "user", "content": "hi"}]) == loaded.encode("hi")
    with pytest.raises(ConfigError, match="no chat template"):
        loaded.chat([{"role": "user", "content": "hi"}], tools=[{"type": "function"}])
    with pytest.raises(ConfigError, match="no chat template"):
        loaded.chat([{"role": "user", "content": [{"type": "text"}]}])


def test_turn_ends_count_only_if_the_template_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"

    def end_with_a_letter(writer: GGUFWriter) -> None:
        writer.kv_data[0]["tokenizer.ggml.eos_token_id"].value = 9

    write_gguf(make_hf("llama"), path, "llama", metadata=end_with_a_letter)
    assert tiny_load(path).end_tokens == {0, 2, 9}
    path.write_bytes(path.read_bytes().replace(b"<|im_end|>{% endfor", b"<|im_xxx|>{% endfor"))
    assert tiny_load(path).end_tokens == {0, 9}


def test_same_vocabulary(tmp_path: Path, folder: Path, llama_gguf: Path) -> None:
    a, b = tiny_load(llama_gguf), tiny_load(folder)
    assert len(a.tokenizer) != len(b.tokenizer)  # only one of them has filler tokens
    same_vocabulary(a, b)
    same_vocabulary(b, a)
    swapped, path = list(TOKENS), tmp_path / "model.gguf"
    swapped[10], swapped[11] = swapped[11], swapped[10]
    write_gguf(make_hf("llama"), path, "llama", tokens=swapped)
    with pytest.raises(ConfigError, match="token 10 is 'h' in one and 'i' in the other"):
        same_vocabulary(a, tiny_load(path))
    b.tokenizer.add_tokens(["<extra>"])
    with pytest.raises(ConfigError, match=r"48 and 49 tokens.*None in one and '<extra>'"):
        same_vocabulary(a, b)


# Folders ------------------------------------------------------------------------------------


def test_sharded_folder(folder: Path) -> None:
    assert len(list(folder.glob("*.safetensors"))) > 2
    loaded = tiny_load(folder)
    assert loaded.end_tokens == {0, 2, 7}
    assert_same_logits(loaded.model, make_hf("qwen2"))
    assert loaded.encode("in a") == [TOKENS.index("in"), TOKENS.index("Ġa")]


def test_single_file_folder(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "single"
    make_hf("gemma3").save_pretrained(path)
    tokenizer().save_pretrained(path)
    assert_same_logits(tiny_load(path).model, make_hf("gemma3"))


def refuse(folder: Path, error: type[UserError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        tiny_load(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_incomplete_folders(folder: Path, llama_gguf: Path) -> None:
    shards = sorted(folder.glob("*.safetensors"))
    data = shards[1].read_bytes()
    shards[1].write_bytes(data[:-8])
    refuse(folder, BadFile, f"{shards[1].name} is truncated or corrupted")
    shards[1].unlink()
    refuse(folder, BadFile, f"lacks .*{shards[1].name}")
    (folder / "model.safetensors.index.json").unlink()
    refuse(folder, BadFile, r"weight files but no model.safetensors.index.json")
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    refuse(folder, BadFile, "has no .*safetensors file")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    refuse(folder, BadFile, r"pytorch_model.bin, a pickle.*convert them to safetensors")
    (folder / "config.json").write_text("{broken")
    refuse(folder, BadFile, "has its weights in")
    (folder / "config.json").unlink()
    shutil.copy(llama_gguf, folder)
    refuse(folder, BadFile, r"no config.json.*name it: .*llama.gguf")


def test_folders_that_are_not_supported(folder: Path) -> None:
    change_config(folder, quantization_config={"quant_method": "gptq"})
    refuse(folder, UnsupportedModel, "quantised with 'gptq'")
    change_config(folder, quantization_config=None, model_type="no-such-type")
    refuse(folder, UnsupportedModel, "type 'no-such-type' cannot be used")
    change_config(folder, model_type="gpt2", architectures=None)
    refuse(folder, UnsupportedModel, "gpt2")
    (folder / "config.json").write_text("{broken")
    refuse(folder, BadFile, "not valid JSON")


def test_folder_with_a_broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{broken")
    refuse(folder, BadFile, "tokenizer cannot be read")


# Names and options --------------------------------------------------------------------------


def test_options_are_checked(llama_gguf: Path) -> None:
    with pytest.raises(ConfigError, match="dtype is 'int8', possible: float32, bfloat16, float16"):
        tiny_load(llama_gguf, dtype="int8")
    with pytest.raises(ConfigError, match="'float64'"):
        tiny_load(llama_gguf, dtype=torch.float64)
    with pytest.raises(ConfigError, match="device is 'nowhere'"):
        tiny_load(llama_gguf, device="nowhere")
    with pytest.raises(ConfigError, match="num_slots is 0"):
        tiny_load(llama_gguf, num_slots=0)
    model = tiny_load(llama_gguf, dtype=torch.bfloat16, prefix_cache=False, num_slots=None).model
    assert (model.dtype, model.kv.num_slots) == (torch.bfloat16, 256)
    assert not model.kv.prefix_cache


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "hub_cached", lambda name: None)
    monkeypatch.setattr(fetch, "pull", lambda name, progress: Path("pulled") / name)
    assert locate("gemma-3-270m") == Path("pulled/gemma-3-270m")
    assert locate("org/name") == Path("pulled/org/name")
    assert locate("org/name:a/b.gguf") == Path("pulled/org/name:a/b.gguf")
    for name in ("gemma-3-270m", "org/name"):
        with pytest.raises(ModelNotFound, match=f"outrider pull {name}"):
            locate(name, fetch=False)
    for name in ("org/name.gguf", "./org/name", "/no/such", "a/b/c", "x.gguf"):
        with pytest.raises(ModelNotFound, match=f"no file or folder '{name}'"):
            locate(name)
    with pytest.raises(ModelNotFound, match="did you mean 'gemma-3-270m'"):
        locate("gemma-3-270")
    (tmp_path / "org/name").mkdir(parents=True)
    (tmp_path / "gemma-3-270m").mkdir()
    assert locate("org/name") == Path("org/name")  # what exists wins
    assert locate("gemma-3-270m") == Path("gemma-3-270m")


def test_fingerprint_tells_weights_apart(tmp_path: Path, llama_gguf: Path) -> None:
    path = tmp_path / "copy.gguf"
    data = bytearray(llama_gguf.read_bytes())
    path.write_bytes(data)
    assert fingerprint([path]) == fingerprint([llama_gguf]) == tiny_load(path).fingerprint
    data[-100] ^= 1
    path.write_bytes(data)
    assert fingerprint([path]) != fingerprint([llama_gguf])


# Published models ---------------------------------------------------------------------------


def transformers_gguf(path: Path) -> PreTrainedModel:
    """The model as the GGUF loader of transformers reads it, in float32."""
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with no_init_weights():
        hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    parsed = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=hf)
    missing, unexpected = hf.load_state_dict(parsed["tensors"], strict=False, assign=True)
    hf.tie_weights()
    assert missing == (["lm_head.weight"] if config.tie_word_embeddings else [])
    assert unexpected == []
    return hf


@pytest.mark.real
@pytest.mark.parametrize("name", CATALOG)
def test_published_models_as_transformers_loads_them(name: str) -> None:
    path = fetch.cached(CATALOG[name])
    if path is None:
        pytest.skip(f"{name} is not in the cache")
    text = "def fib(n):\n    if n < 2:  # 1234 <|im_end|>\n\treturn n, 'Straße, 日本'  "
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokens = theirs(text).input_ids
    hf = transformers_gguf(path)
    with torch.no_grad():
        expected = hf(input_ids=torch.tensor([tokens])).logits[0, -1].clone()
    del hf  # the largest fills 7 GB
    gc.collect()
    loaded = load(name, dtype="float32", num_slots=64, fetch=False)
    assert loaded.encode(text) == tokens
    assert loaded.tokenizer.decode(tokens) == theirs.decode(tokens)
    assert loaded.tokenizer.get_vocab() == theirs.get_vocab()
    torch.testing.assert_close(last_logits(loaded.model, tokens), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.real
def test_the_published_pair_shares_its_tokenizer() -> None:
    names = ["qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct"]
    if any(fetch.cached(CATALOG[name]) is None for name in names):
        pytest.skip("the Qwen pair is not in the cache")
    tables = [read_tokenizer(GgufFile.open(locate(name))).get_vocab() for name in names]
    assert tables[0] == tables[1]


def test_llama_config_is_known_to_read_rope(tmp_path: Path) -> None:
    """``head_dim`` and the like survive the way through the metadata."""
    hf, path = make_hf("llama-bias-tied"), tmp_path / "model.gguf"
    write_gguf(hf, path, "llama-bias-tied")
    config = read_config(GgufFile.open(path))
    assert isinstance(config, LlamaConfig)
    for name in ("head_dim", "attention_bias", "mlp_bias", "tie_word_embeddings", "vocab_size"):
        assert getattr(config, name) == getattr(hf.config, name)
