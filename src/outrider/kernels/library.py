"""The compiled library: its structures, its functions, and which instruction set to take."""

from __future__ import annotations

import ctypes
import os
import platform
import warnings
from functools import cache
from pathlib import Path

from outrider.errors import ConfigError, Error
from outrider.kernels import build

INSTALLED = Path(__file__).parent
"""Where a library that was built when the package was installed lies."""

NEEDS = {
    isa: {flag[2:].replace("512vnni", "512_vnni").replace("512bf16", "512_bf16") for flag in flags}
    for isa, flags in build.X86_SETS.items()
}
"""Names of /proc/cpuinfo that an instruction set needs."""


class NoKernels(Error):
    """The kernels cannot be built or loaded here; the message says why."""


class Panel(ctypes.Structure):
    """outrider.h: Panel."""

    _fields_ = [
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("outer_scales", ctypes.c_void_p),
        ("outer_offsets", ctypes.c_void_p),
        ("format", ctypes.c_int32),
        ("padding", ctypes.c_int32),
    ]


class Linear(ctypes.Structure):
    """outrider.h: Linear."""

    _fields_ = [
        ("panels", ctypes.POINTER(Panel)),
        ("bias", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("cols", ctypes.c_int32),
        ("integer", ctypes.c_int32),
        ("padding", ctypes.c_int32),
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
    """The functions of ``lib`` that were compiled for one instruction set. Raises AttributeError
    if one is missing."""

    def __init__(self, lib: ctypes.CDLL, isa: str) -> None:
        self.isa = isa
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
    return [isa for isa in build.X86_SETS if NEEDS[isa] <= flags]


@cache
def load_library(isa: str | None = None) -> Library:
    """The library for ``isa``, by default OUTRIDER_ISA or the best this CPU has whose numbers are
    right; warns of one whose numbers are not. Raises NoKernels, and ConfigError for an OUTRIDER_ISA
    that cannot be had."""
    sets = available_sets()
    wanted = os.environ.get("OUTRIDER_ISA")
    if wanted and wanted not in sets:
        raise ConfigError(f"OUTRIDER_ISA is {wanted!r}, possible here: {', '.join(sets)}")
    named = isa or wanted
    if named and named not in sets:
        raise NoKernels(f"instruction set {named!r} is not one of this CPU's: {', '.join(sets)}")
    candidates = [named] if named else sets[::-1]
    wrong = ""
    for candidate in candidates:
        if wrong:
            warnings.warn(f"{wrong}; trying {candidate!r}", RuntimeWarning, stacklevel=2)
        library = _checked(candidate)
        if isinstance(library, Library):
            return library
        wrong = library
    if wanted and not isa:
        raise ConfigError(f"OUTRIDER_ISA is {wanted!r}, but {wrong}; name another one or none")
    raise NoKernels(wrong)


def _checked(isa: str) -> Library | str:
    """The library for ``isa``, or how its numbers are wrong. Raises NoKernels."""
    from outrider.kernels import selfcheck  # it packs weights, and packing needs this module

    lib = _built()
    if isinstance(lib, str):
        raise NoKernels(lib)
    try:
        library = Library(lib, isa)
    except AttributeError as error:
        raise NoKernels(f"the kernels cannot be loaded: {error}") from None
    fault = selfcheck.fault(library)
    return library if fault is None else f"the kernels for {isa!r} compute wrong numbers: {fault}"


@cache
def _built() -> ctypes.CDLL | str:
    """The library that was installed, else the one in the cache, compiled now if need be; or why
    there is none, which is found out only once."""
    try:
        if path := build.find(INSTALLED, build.portable_name()):
            try:
                return ctypes.CDLL(str(path))
            except OSError as error:
                # Built on another system, newer than this one perhaps: build for this one.
                warnings.warn(
                    f"the installed kernels cannot be loaded ({error}); taking those of the cache",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return _cached()
    except build.CannotBuild as error:
        return f"the kernels cannot be built: {error}"
    except OSError as error:
        return f"the kernels cannot be loaded: {error}"


def _cached() -> ctypes.CDLL | str:
    """The library of the cache. One that cannot be loaded is compiled once more. Raises CannotBuild
    and OSError."""
    name, folder = build.local_name(), build.cache_folder()
    try:
        path = build.find_or_build(folder, name)
    except OSError as error:
        return f"the kernels cannot be built in {folder}: {error.strerror or error}"
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return ctypes.CDLL(str(build.rebuild(path, name)))
