"""The compiled library: building it once, finding it again, and calling it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from outrider.errors import ConfigError, Error
from outrider.models.fetch import cache_dir

SOURCES = Path(__file__).parent / "csrc"

FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-w"]

_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"]

X86_SETS = {
    "plain": [],
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512bf16": [*_AVX512, "-mavx512bf16"],
}
"""Instruction sets the kernels are compiled for, the best one last."""

NEEDS = {
    isa: {flag[2:].replace("512vnni", "512_vnni").replace("512bf16", "512_bf16") for flag in flags}
    for isa, flags in X86_SETS.items()
}
"""Names of /proc/cpuinfo that an instruction set needs."""


class NoKernels(Error):
    """The kernels cannot be built or loaded here; the message says why."""


class Linear(ctypes.Structure):
    """outrider.h: Linear."""

    _fields_ = [
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("format", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("cols", ctypes.c_int32),
        ("group", ctypes.c_int32),
    ]


class Layer(ctypes.Structure):
    """outrider.h: Layer."""

    _fields_ = [
        ("qkv", Linear),
        ("out", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("attention_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("attention_post_norm", ctypes.c_void_p),
        ("mlp_post_norm", ctypes.c_void_p),
        ("qk_norm", ctypes.c_void_p),
        ("pool", ctypes.c_void_p),
        ("window", ctypes.c_int32),
        ("rope", ctypes.c_int32),
    ]


class Model(ctypes.Structure):
    """outrider.h: Model."""

    _fields_ = [
        ("layers", ctypes.POINTER(Layer)),
        ("num_layers", ctypes.c_int32),
        ("hidden", ctypes.c_int32),
        ("intermediate", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("gelu", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("attention_scale", ctypes.c_float),
        ("final_norm", ctypes.c_void_p),
        ("head", Linear),
    ]


class Row(ctypes.Structure):
    """outrider.h: Row."""

    _fields_ = [
        ("start", ctypes.c_int32),
        ("stop", ctypes.c_int32),
        ("extra_stride", ctypes.c_int32),
        ("padding", ctypes.c_int32),
        ("prefix", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("prefix_count", ctypes.c_void_p),
        ("extra_count", ctypes.c_void_p),
    ]


class Batch(ctypes.Structure):
    """outrider.h: Batch."""

    _fields_ = [
        ("num_tokens", ctypes.c_int32),
        ("num_rows", ctypes.c_int32),
        ("num_logits", ctypes.c_int32),
        ("first_layer", ctypes.c_int32),
        ("last_layer", ctypes.c_int32),
        ("rows", ctypes.POINTER(Row)),
        ("write_slots", ctypes.c_void_p),
        ("logit_index", ctypes.c_void_p),
        ("cos", ctypes.POINTER(ctypes.c_void_p)),
        ("sin", ctypes.POINTER(ctypes.c_void_p)),
        ("x", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("hidden", ctypes.POINTER(ctypes.c_void_p)),
    ]


class Library:
    """The functions compiled for one instruction set."""

    def __init__(self, path: Path, isa: str) -> None:
        self.isa = isa
        lib = ctypes.CDLL(str(path))
        self.forward = getattr(lib, f"outrider_forward_{isa}")
        self.forward.argtypes = [
            ctypes.POINTER(Model), ctypes.POINTER(Batch), ctypes.c_void_p, ctypes.c_int,
        ]  # fmt: skip
        self.linear = getattr(lib, f"outrider_linear_{isa}")
        self.linear.argtypes = [
            ctypes.POINTER(Linear), ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p,
            ctypes.c_int,
        ]  # fmt: skip
        self.read = getattr(lib, f"outrider_read_{isa}")
        self.read.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self.read.restype = ctypes.c_uint64
        self.scratch = getattr(lib, f"outrider_scratch_{isa}")
        self.scratch.restype = ctypes.c_void_p
        self.scratch_free = getattr(lib, f"outrider_scratch_free_{isa}")
        self.scratch_free.argtypes = [ctypes.c_void_p]
        self.scratch_free.restype = None


def available_sets() -> list[str]:
    """Instruction sets that this CPU has, the best one last."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ["plain"]
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ["plain"]
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    flags = set(line.split())
    return [isa for isa in X86_SETS if NEEDS[isa] <= flags]


@cache
def load_library(isa: str | None = None) -> Library:
    """The library for ``isa``, by default OUTRIDER_ISA or the best this CPU has. Raises NoKernels,
    and ConfigError for an OUTRIDER_ISA that this CPU does not have."""
    sets = available_sets()
    wanted = os.environ.get("OUTRIDER_ISA")
    if wanted and wanted not in sets:
        raise ConfigError(f"OUTRIDER_ISA is {wanted!r}, possible here: {', '.join(sets)}")
    chosen = isa or wanted or sets[-1]
    if chosen not in sets:
        raise NoKernels(f"instruction set {chosen!r} is not one of this CPU's: {', '.join(sets)}")
    path = _built()
    if isinstance(path, str):
        raise NoKernels(path)
    try:
        return Library(path, chosen)
    except OSError as error:
        raise NoKernels(f"the kernels cannot be loaded: {error}") from None


@cache
def _built() -> Path | str:
    """Path of the shared library, compiled now if it is not in the cache; or why there is none,
    which is found out only once."""
    sets = X86_SETS if platform.machine() in ("x86_64", "AMD64") else {"plain": []}
    digest = hashlib.sha256(repr((FLAGS, sets, platform.platform())).encode())
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.read_bytes())
    folder, name = cache_dir() / "kernels", f"outrider-{digest.hexdigest()[:16]}"
    try:
        # The name ends in the size: loading a library that was cut short would kill the process.
        for path in folder.glob(f"{name}-*.so"):
            if path.stem == f"{name}-{path.stat().st_size}":
                return path
        return _build(folder, name, sets)
    except NoKernels as error:
        return str(error)
    except OSError as error:
        return f"the kernels cannot be built: {error}"


def _build(folder: Path, name: str, sets: dict[str, list[str]]) -> Path:
    """Compile the library for ``sets`` into ``folder``. Raises NoKernels and OSError."""
    compiler = _compiler()
    print("building the C++ kernels (once, takes up to half a minute)", file=sys.stderr, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        objects = {name: str(Path(temporary) / f"{name}.o") for name in (*sets, "pool")}
        stack, pool = str(SOURCES / "stack.cpp"), str(SOURCES / "pool.cpp")
        commands = [
            [*compiler, *FLAGS, *flags, f"-DISA={name}", "-c", stack, "-o", objects[name]]
            for name, flags in sets.items()
        ]
        _compile([*commands, [*compiler, *FLAGS, "-c", pool, "-o", objects["pool"]]])
        whole = str(Path(temporary) / "whole.so")
        _compile([[*compiler, "-shared", "-o", whole, *objects.values(), "-lpthread"]])
        path = folder / f"{name}-{os.stat(whole).st_size}.so"
        os.replace(whole, path)
    return path


def _compiler() -> list[str]:
    """The command of the compiler, from CXX or found. Raises NoKernels."""
    named = shlex.split(os.environ.get("CXX", ""))
    if named and shutil.which(named[0]) is None:
        raise NoKernels(f"CXX is {named[0]!r}, which is not a command; name a C++ compiler")
    found = named or [name for name in ("g++", "clang++") if shutil.which(name)][:1]
    if not found:
        raise NoKernels("no C++ compiler was found (g++ or clang++, or name one in CXX)")
    return found


def _compile(commands: list[list[str]]) -> None:
    """Run all ``commands`` at once. Raises NoKernels with the first line that one says."""
    running = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    said = [process.communicate()[1] for process in running]
    for process, text in zip(running, said, strict=True):
        if process.returncode:
            first = (text.strip().splitlines() or [f"exit status {process.returncode}"])[0]
            raise NoKernels(f"{commands[0][0]} failed: {first}")
