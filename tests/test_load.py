"""Models come out of every kind of storage as they went in; what is damaged is refused."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from gguf_writer import (
    TOKENS,
    assert_same_logits,
    last_logits,
    make_hf,
    tiny_load,
    tokenizer,
    write_gguf,
)
from outrider.errors import BadFile, ConfigError, ModelNotFound, UnsupportedModel, UserError
from outrider.models import fetch
from outrider.models.catalog import CATALOG
from outrider.models.gguf import GgufFile
from outrider.models.gguf_hf import read_tokenizer
from outrider.models.load import fingerprint, load, locate, same_vocabulary


@pytest.fixture(scope="module")
def llama_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "llama.gguf"
    write_gguf(make_hf("llama"), path, "llama")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sharded folder of a tiny qwen2."""
    path = tmp_path / "folder"
    make_hf("qwen2").save_pretrained(path, max_shard_size="20KB")
    tokenizer().save_pretrained(path)
    (path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    return path


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
    change_config(folder, quantization_config=["gptq"])
    refuse(folder, UnsupportedModel, "quantised with 'an unnamed method'")
    change_config(folder, quantization_config=None, model_type="no-such-type")
    refuse(folder, UnsupportedModel, "type 'no-such-type' cannot be used")
    change_config(folder, model_type="gpt2", architectures=None)
    refuse(folder, UnsupportedModel, "gpt2")
    (folder / "config.json").write_text("{broken")
    refuse(folder, BadFile, "not valid JSON")


@pytest.mark.parametrize("weight_map", [["a.safetensors"], {"a": 3}, "a.safetensors"])
def test_folder_with_a_broken_index(folder: Path, weight_map: Any) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    refuse(folder, BadFile, "weight_map must name a file for every tensor")


def test_folder_with_a_broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{broken")
    refuse(folder, BadFile, "tokenizer cannot be read")


# Names and options --------------------------------------------------------------------------


def test_options_are_checked(llama_gguf: Path) -> None:
    with pytest.raises(ConfigError, match="dtype is 'int3', possible: float32, bfloat16, float16"):
        tiny_load(llama_gguf, dtype="int3")
    with pytest.raises(ConfigError, match="'float64'"):
        tiny_load(llama_gguf, dtype=torch.float64)
    with pytest.raises(ConfigError, match="device is 'nowhere'"):
        tiny_load(llama_gguf, device="nowhere")
    with pytest.raises(ConfigError, match="num_slots is 0"):
        tiny_load(llama_gguf, num_slots=0)
    model = tiny_load(
        llama_gguf, dtype=torch.bfloat16, prefix_cache=False, num_slots=None, kernels=False
    ).model
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
