"""The compiled library: building it once, finding it again, and calling it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from outrider.errors import Error
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
    """The library for ``isa``, by default OUTRIDER_ISA or the best this CPU has. Raises
    NoKernels."""
    sets = available_sets()
    chosen = isa or os.environ.get("OUTRIDER_ISA") or sets[-1]
    if chosen not in sets:
        raise NoKernels(f"instruction set {chosen!r} is not one of this CPU's: {', '.join(sets)}")
    try:
        return Library(_built(), chosen)
    except OSError as error:
        raise NoKernels(f"the kernels cannot be loaded: {error}") from None


@cache
def _built() -> Path:
    """Path of the shared library, compiled now if it is not in the cache."""
    files = sorted(SOURCES.iterdir())
    sets = X86_SETS if platform.machine() in ("x86_64", "AMD64") else {"plain": []}
    digest = hashlib.sha256(repr((FLAGS, sets, platform.platform())).encode())
    for file in files:
        digest.update(file.read_bytes())
    folder = cache_dir() / "kernels"
    path = folder / f"outrider-{digest.hexdigest()[:16]}.so"
    if path.is_file():
        return path
    compiler = os.environ.get("CXX") or next(
        filter(None, map(shutil.which, ("g++", "clang++"))), ""
    )
    if not compiler:
        raise NoKernels("no C++ compiler was found (g++ or clang++, or name one in CXX)")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        objects = [str(Path(temporary) / f"{name}.o") for name in (*sets, "pool")]
        commands = [
            [compiler, *FLAGS, *flags, f"-DISA={name}", "-c", str(SOURCES / "stack.cpp"), "-o", out]
            for (name, flags), out in zip(sets.items(), objects, strict=False)
        ]
        commands.append([compiler, *FLAGS, "-c", str(SOURCES / "pool.cpp"), "-o", objects[-1]])
        whole = str(Path(temporary) / "whole.so")
        commands.append([compiler, "-shared", "-o", whole, *objects, "-lpthread"])
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                first = (done.stderr.strip().splitlines() or ["no message"])[0]
                raise NoKernels(f"{compiler} failed: {first}")
        os.replace(whole, path)
    return path
