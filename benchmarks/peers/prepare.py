"""The model's files as each engine wants them, made once of the one GGUF file.

Engines that do not read GGUF get the de-quantised weights in bfloat16, so that all of them decode
the same model.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from catalog import PEERS, peers_dir
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast

from outrider.errors import UnsupportedModel, UserError
from outrider.models.gguf import GgufFile
from outrider.models.gguf_hf import read_config, read_tokenizer, read_weights
from outrider.models.load import fingerprint, locate


@dataclass(frozen=True, kw_only=True)
class Model:
    """``name`` as given; ``gguf``: the file; ``folder``: where what is made of it is kept.
    ``gguf_dtype``: as the file's name has it."""

    name: str
    gguf: Path
    folder: Path

    @property
    def gguf_dtype(self) -> str:
        words = self.gguf.stem.replace(".", "-").split("-")
        found = [w.upper() for w in words if w[:1] in "qQ" and w[1:2].isdecimal() and "_" in w]
        return found[-1] if found else "GGUF"

    def bfloat16_bytes(self) -> int:
        tensors = GgufFile.open(self.gguf).tensors.values()
        return 2 * sum(math.prod(tensor.shape) for tensor in tensors)


def find_model(name: str) -> Model:
    """Raises ModelNotFound, BadFile, and UnsupportedModel for what is no GGUF file."""
    path = locate(name)
    if not path.is_file():
        raise UnsupportedModel(f"{path} is a folder; the peers are compared on a .gguf file")
    return Model(name=name, gguf=path, folder=peers_dir() / "models" / fingerprint([path]))


def tokenizer_of(model: Model) -> PreTrainedTokenizerFast:
    return read_tokenizer(GgufFile.open(model.gguf))


def transformers_folder(model: Model) -> Path:
    """The model as transformers saves it, in bfloat16. Written once."""

    def write(folder: Path) -> None:
        torch.set_num_threads(1)  # many small operations; nothing else of this process uses torch
        file = GgufFile.open(model.gguf)
        config = read_config(file)
        config.dtype = torch.bfloat16
        config.architectures = [_ARCHITECTURES[config.model_type]]
        weights = {
            name: weight.to(torch.bfloat16).contiguous()
            for name, weight in read_weights(file, torch.bfloat16)
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(folder)
        read_tokenizer(file).save_pretrained(folder)

    return _once(model.folder / "transformers", write)


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


def openvino_folder(model: Model) -> Path:
    """The model in OpenVINO's format with int8 weights, converted once by optimum-intel in the
    peer's environment. Raises UserError."""
    source = transformers_folder(model)

    def write(folder: Path) -> None:
        python = PEERS["openvino"].python
        command = [str(python.with_name("optimum-cli")), "export", "openvino"]
        command += ["--model", str(source), "--task", "text-generation-with-past"]
        command += ["--weight-format", "int8", str(folder)]
        log = model.folder / "openvino.log"
        with log.open("w", encoding="utf-8") as output:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
                check=False,
            )
        if done.returncode or not (folder / "openvino_model.xml").is_file():
            raise UserError(f"{model.name} could not be converted for OpenVINO; see {log}")

    return _once(model.folder / "openvino-int8", write)


def _once(folder: Path, write: Callable[[Path], None]) -> Path:
    """``folder``, filled by ``write`` if it is not there; whole or not at all."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _temporary(folder.parent) as temporary:
            write(temporary)
            temporary.chmod(0o755)
            os.replace(temporary, folder)
    return folder


@contextlib.contextmanager
def _temporary(parent: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir=parent, prefix=".part-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
