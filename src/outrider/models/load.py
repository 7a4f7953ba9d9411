"""One way to load a model, whatever it is stored as."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from outrider.errors import BadFile, ConfigError, ModelNotFound, UnsupportedModel
from outrider.models import fetch as fetching
from outrider.models.catalog import CATALOG, find
from outrider.models.fetch import ModelRow, list_models
from outrider.models.resources import (
    CUDA_ONLY,
    QUANTISED,
    kv_slots,
    read_dtype,
    usable_device,
    weight_format,
)
from outrider.models.sources import Source, open_source

__all__ = ["LoadedModel", "ModelRow", "list_models", "load", "locate", "same_vocabulary"]

if TYPE_CHECKING:
    from outrider.models.decoder import Decoder
    from outrider.models.graphs import GraphDecoder
    from outrider.models.native import NativeDecoder

TEXT_ENDS = ("<|endoftext|>", "<|end_of_text|>")
"""Tokens that end a text wherever a tokenizer has them."""

TURN_ENDS = ("<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "</s>")
"""Tokens that end a turn if the chat template writes them."""

HUB_ID = re.compile(r"\w[\w.-]*/(?![^:]*\.gguf$)[\w.-]+(:[\w./-]+\.gguf)?")
"""org/name, or org/name:file.gguf; org/file.gguf is a path."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LoadedModel:
    """A model ready to run, with all that belongs to it.

    ``end_tokens``: any of these ends the output. ``path``: the folder or file it came from.
    ``fingerprint``: 16 hexadecimal digits that tell files apart, see :func:`fingerprint`.
    """

    name: str
    model: Decoder | GraphDecoder | NativeDecoder
    tokenizer: PreTrainedTokenizerFast
    end_tokens: frozenset[int]
    path: Path
    fingerprint: str

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain text, with a BOS token if the tokenizer adds one."""
        return list(self.tokenizer.encode(text))

    def chat(
        self, messages: Seq[Mapping[str, Any]], *, tools: Seq[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of a conversation, up to where the answer begins.

        Without a chat template the contents are joined by newlines and encoded as plain text.
        Raises ConfigError for messages or tools that the template does not take.
        """
        if self.tokenizer.chat_template is None:
            contents = [message.get("content") for message in messages]
            if tools or not all(isinstance(content, str) for content in contents):
                raise ConfigError(
                    f"{self.name} has no chat template: it takes plain text, and no tools"
                )
            return self.encode("\n".join(str(content) for content in contents))
        try:
            ids = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                add_generation_prompt=True,
                return_dict=False,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise ConfigError(
                f"the chat template of {self.name} refuses the messages: {error}"
            ) from None
        return list(ids)


def load(
    name: str,
    *,
    dtype: str | torch.dtype = "bfloat16",
    device: torch.device | str = "cpu",
    num_slots: int | None = None,
    prefix_cache: bool = True,
    kernels: bool = True,
    progress: bool = True,
    fetch: bool = True,
) -> LoadedModel:
    """Load a named model, a folder of transformers, a .gguf file or a model of the hub.

    ``dtype``: float32, bfloat16, float16, or int8, int4 and fp8 for the linears. On the
    CPU all but float32 and float16 run on the C++ kernels unless ``kernels`` is False or they
    cannot be had here, which a warning says. On CUDA forwards are recorded as graphs, and int8,
    int4 and fp8 weights go through torchao.

    What exists as a path wins over names and hub ids ("org/name", "org/name:file.gguf"). What is
    not there yet is fetched if ``fetch`` is set, with a bar on stderr if ``progress`` is.
    ``num_slots``: tokens the KV pool holds; by default enough for two sequences of the model's
    context or of 8192 tokens, whichever is less, in at most a quarter of the memory.

    While a GGUF file is unpacked, torch works with one thread. Raises ConfigError, ModelNotFound,
    BadFile, UnsupportedModel and UserError.
    """
    format = weight_format(dtype)
    place = usable_device(device)
    if format in CUDA_ONLY and place.type != "cuda":
        raise ConfigError(f"dtype {format} runs on CUDA only, device is {place}; use int8")
    if format in QUANTISED and place.type == "cuda":
        from outrider.models.quantize import check_format

        check_format(format, place)
    if num_slots is not None and num_slots < 1:
        raise ConfigError(f"num_slots is {num_slots}, expected 1 or more")
    path = locate(name, fetch=fetch, progress=progress)
    source = open_source(path)
    try:
        model = _build(source, format, place, num_slots, prefix_cache, kernels)
    except (BadFile, UnsupportedModel) as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from None
    tokenizer = source.tokenizer()
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=tokenizer,
        end_tokens=end_tokens(tokenizer, source.ends()),
        path=path,
        fingerprint=fingerprint(source.files()),
    )


def locate(name: str, *, fetch: bool = True, progress: bool = True) -> Path:
    """The folder or file that ``name`` stands for, fetched if need be (see :func:`load`)."""
    if not name.strip():
        raise ModelNotFound("the model's name is empty; give a name, a path or a hub id")
    try:
        path = Path(name).expanduser()
        if path.exists():
            return path
    except (RuntimeError, OSError, ValueError):  # no such user, too long a name, a NUL in it
        raise ModelNotFound(f"no file or folder {name!r}") from None
    if name in CATALOG:
        found = fetching.cached(CATALOG[name])
    elif HUB_ID.fullmatch(name):
        found = fetching.hub_cached(name)
    elif "/" in name or os.sep in name or path.suffix == ".gguf":
        raise ModelNotFound(f"no file or folder {name!r}")
    else:
        find(name)  # raises, with what is known
        raise AssertionError(name)
    if found is not None:
        return found
    if not fetch:
        raise ModelNotFound(
            f"{name} is not on this machine (no such path, and not in the cache); "
            f"fetch it with `outrider pull {name}`"
        )
    return fetching.pull(name, progress=progress)


def end_tokens(tokenizer: PreTrainedTokenizerFast, stated: Iterable[int]) -> frozenset[int]:
    """``stated`` ids, the tokenizer's own EOS, and the known end markers that apply."""
    ends = set(stated)
    if tokenizer.eos_token_id is not None:
        ends.add(int(tokenizer.eos_token_id))
    template = tokenizer.chat_template or ""
    special = {str(token): id for id, token in tokenizer.added_tokens_decoder.items()}
    ends |= {special[token] for token in TEXT_ENDS if token in special}
    ends |= {special[token] for token in TURN_ENDS if token in special and token in str(template)}
    return frozenset(ends)


def same_vocabulary(a: LoadedModel, b: LoadedModel) -> None:
    """Check that two tokenizers give every id the same token, or raise ConfigError.

    Ids that only fill up the table (``[PAD151665]`` of GGUF files) do not count.
    """
    left, right = _tokens(a.tokenizer), _tokens(b.tokenizer)
    if left == right:
        return
    token = min(id for id in left.keys() | right.keys() if left.get(id) != right.get(id))
    raise ConfigError(
        f"{a.name} and {b.name} have different tokenizers ({len(left)} and {len(right)} tokens): "
        f"token {token} is {left.get(token)!r} in one and {right.get(token)!r} in the other"
    )


def _tokens(tokenizer: PreTrainedTokenizerFast) -> dict[int, str]:
    table = {id: token for token, id in tokenizer.get_vocab().items()}
    return {id: token for id, token in table.items() if token != f"[PAD{id}]"}


def fingerprint(files: Iterable[Path], samples: int = 64) -> str:
    """16 hexadecimal digits of SHA-256 over the sizes of ``files`` and 4 KiB at ``samples`` evenly
    spaced places of each.

    Cheap for any size, and other weights give another one; no proof that files are equal.
    """
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for i in range(samples):
                file.seek(i * max(0, size - 4096) // (samples - 1))
                digest.update(file.read(4096))
    return digest.hexdigest()[:16]


def _build(
    source: Source,
    format: str,
    device: torch.device,
    num_slots: int | None,
    prefix_cache: bool,
    kernels: bool,
) -> Decoder | GraphDecoder | NativeDecoder:
    """Read the weights, for the kernels where they can run and else for PyTorch."""
    from outrider.models.config import DecoderConfig
    from outrider.models.decoder import Decoder
    from outrider.models.native import NativeDecoder, round_weights, why_not

    config, dtype = DecoderConfig.from_hf(source.config()), read_dtype(format)
    num_slots = kv_slots(num_slots, config, dtype, device)
    wanted = kernels and device.type == "cpu" and format in (*QUANTISED, "bfloat16")
    reason = why_not(config) if wanted else None
    if reason is not None:
        warnings.warn(
            f"decoding runs on PyTorch, much slower, without the C++ kernels: {reason}",
            RuntimeWarning,
            stacklevel=4,
        )
    native = wanted and reason is None
    kept = source.kept(format)
    with _one_thread():
        decoder = Decoder(
            config, dtype=dtype, device=device, num_slots=num_slots, prefix_cache=prefix_cache
        )
        stored = source.stored(kept & decoder.matrices().keys()) if native else {}
        # An embedding that is the head as well has to be read as both.
        without = stored.keys() - {"embed_tokens.weight"}
        decoder.load_weights(source.weights(dtype, without), without=without)
        if native:
            return NativeDecoder(decoder, format, stored=stored)
        if format in QUANTISED and device.type == "cpu":
            round_weights(decoder, format, keep=kept)
    return decoder if device.type == "cpu" else _for_cuda(decoder, format)


def _for_cuda(decoder: Decoder, format: str) -> GraphDecoder:
    from outrider.models.graphs import GraphDecoder
    from outrider.models.quantize import quantize

    if format in QUANTISED:
        quantize(decoder, format)
    return GraphDecoder(decoder)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Unpacking is many small operations: threads wait on each other more than they help."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
