"""What a model is stored as: a GGUF file, or a folder of transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast

from outrider.errors import BadFile, UnsupportedModel
from outrider.models.gguf import GgufFile
from outrider.models.gguf_hf import read_config, read_tokenizer, read_weights, stated_ends
from outrider.models.gguf_panels import kept_weights, read_panels

if TYPE_CHECKING:
    from outrider.kernels.formats import Panels

# Nothing in a model folder is ever run: transformers would ask on standard input otherwise.
_LOCAL = {"local_files_only": True, "trust_remote_code": False}


class Source(Protocol):
    """A stored model. Whatever is damaged in it raises BadFile, what is not known here
    UnsupportedModel."""

    def config(self) -> PreTrainedConfig: ...

    def weights(self, dtype: torch.dtype, without: Set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights under their names in transformers, unpacked ones as ``dtype``. ``without``:
        names, less "model.", that may be left out."""
        ...

    def kept(self, format: str) -> Set[str]:
        """Names, less "model.", of the weights that ``format`` takes as they are."""
        ...

    def stored(self, names: Set[str]) -> dict[str, Panels]:
        """The weights ``names``, of ``kept``, in the layout of the kernels."""
        ...

    def tokenizer(self) -> PreTrainedTokenizerFast: ...

    def ends(self) -> list[int]:
        """The tokens that the model's files say end a text or a turn."""
        ...

    def files(self) -> list[Path]:
        """What the fingerprint is taken of."""
        ...


def open_source(path: Path) -> Source:
    """The model at ``path``. Raises BadFile and UnsupportedModel."""
    return Gguf(path) if path.is_file() else Folder(path)


class Gguf:
    """A model in one GGUF file."""

    def __init__(self, path: Path) -> None:
        self._file = GgufFile.open(path)

    def config(self) -> PreTrainedConfig:
        return read_config(self._file)

    def weights(self, dtype: torch.dtype, without: Set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        return read_weights(self._file, dtype, without=without)

    def kept(self, format: str) -> Set[str]:
        return kept_weights(self._file, format)

    def stored(self, names: Set[str]) -> dict[str, Panels]:
        return read_panels(self._file, names)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return read_tokenizer(self._file)

    def ends(self) -> list[int]:
        return stated_ends(self._file)

    def files(self) -> list[Path]:
        return [self._file.path]


class Folder:
    """A model as transformers saves it: config.json, a tokenizer, safetensors."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if not (path / "config.json").is_file():
            ggufs = sorted(path.glob("*.gguf"))
            hint = f"; to load the file in it, name it: {ggufs[0]}" if ggufs else ""
            raise BadFile(f"{path} has no config.json, so it is no model folder{hint}")
        self._shards = _shards(path)

    def config(self) -> PreTrainedConfig:
        stated = _json(self._path / "config.json")
        if method := stated.get("quantization_config"):
            name = method.get("quant_method") if isinstance(method, dict) else None
            raise UnsupportedModel(
                f"{self._path} has weights quantised with {name or 'an unnamed method'!r}; "
                "take the plain ones"
            )
        try:
            config: PreTrainedConfig = AutoConfig.from_pretrained(self._path, **_LOCAL)
        except Exception as error:  # unknown types, and values of the wrong kind
            kind = stated.get("model_type")
            raise UnsupportedModel(
                f"{self._path}: the configuration of type {kind!r} cannot be used: "
                f"{_first_line(error)}"
            ) from None
        return config

    def kept(self, format: str) -> Set[str]:
        return frozenset()

    def stored(self, names: Set[str]) -> dict[str, Panels]:
        return {}

    def weights(self, dtype: torch.dtype, without: Set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for shard in self._shards:
            try:
                with safe_open(shard, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 - the file is no mapping
                        yield name, file.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise BadFile(
                    f"{shard} is truncated or corrupted ({_first_line(error)}); download it again"
                ) from None

    def tokenizer(self) -> PreTrainedTokenizerFast:
        try:
            tokenizer = AutoTokenizer.from_pretrained(self._path, **_LOCAL)
        except Exception as error:  # missing files, broken JSON, unknown classes
            raise BadFile(
                f"{self._path}: its tokenizer cannot be read: {_first_line(error)}"
            ) from None
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise UnsupportedModel(f"{self._path} has no tokenizer.json; only fast tokenizers work")
        return tokenizer

    def ends(self) -> list[int]:
        ends: list[int | None] = []
        for name in ("generation_config.json", "config.json"):
            if (self._path / name).is_file():
                stated = _json(self._path / name).get("eos_token_id")
                ends += stated if isinstance(stated, list) else [stated]
        return [end for end in ends if end is not None]

    def files(self) -> list[Path]:
        return [self._path / "config.json", *self._shards]


def _shards(path: Path) -> list[Path]:
    """The safetensors files of a folder. Raises BadFile."""
    index = path / "model.safetensors.index.json"
    found = sorted(path.glob("*.safetensors"))
    if index.is_file():
        weight_map = _json(index).get("weight_map", {})
        if not isinstance(weight_map, dict) or not all(
            isinstance(name, str) for name in weight_map.values()
        ):
            raise BadFile(f"{index}: its weight_map must name a file for every tensor")
        names = sorted(set(weight_map.values()))
        missing = [name for name in names if path / Path(name).name not in found]
        if missing or not names:
            raise BadFile(f"{path} lacks {missing or 'all files'} of its index; download it again")
        return [path / Path(name).name for name in names]
    if (path / "model.safetensors") in found:
        return [path / "model.safetensors"]
    if len(found) == 1:
        return found
    if found:
        raise BadFile(f"{path} has {len(found)} weight files but no {index.name}")
    pickles = [p.name for kind in ("*.bin", "*.pt", "*.pth") for p in path.glob(kind)]
    if pickles:
        raise BadFile(
            f"{path} has its weights in {pickles[0]}, a pickle, which could run code; "
            "convert them to safetensors"
        )
    raise BadFile(f"{path} has no *.safetensors file")


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadFile(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadFile(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
