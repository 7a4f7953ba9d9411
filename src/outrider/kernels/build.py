"""Compiling the library of kernels, and finding one that was compiled from the same sources.

Runs also while the package is being installed: it needs the standard library alone.

A library's name carries a hash of what it was made from, and its size: what was made from other
sources or cut short is not found. It is compiled beside its place and renamed into it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

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


class CannotBuild(Exception):
    """There is no compiler, or it failed; the message says so in one line."""


def sets() -> dict[str, list[str]]:
    """The instruction sets of this machine's architecture and the flags of each."""
    return X86_SETS if platform.machine() in ("x86_64", "AMD64") else {"plain": []}


def cache_dir() -> Path:
    """OUTRIDER_CACHE, else XDG_CACHE_HOME/outrider, else ~/.cache/outrider. Raises OSError where
    there is no home."""
    try:
        if own := os.environ.get("OUTRIDER_CACHE"):
            return Path(own).expanduser()
        base = os.environ.get("XDG_CACHE_HOME")
        return (Path(base) if base else Path.home() / ".cache") / "outrider"
    except RuntimeError as error:
        reason = str(error).rstrip(".")
        raise OSError(f"there is no cache ({reason}); name a folder in OUTRIDER_CACHE") from None


def cache_folder() -> Path:
    """Where libraries built for this user lie."""
    return cache_dir() / "kernels"


def portable_name() -> str:
    """The stem of a library that is installed with the package: a hash of the sources, the flags
    and the architecture. It may have been built on another machine."""
    made_of = (FLAGS, sets(), platform.system(), platform.machine())
    digest = hashlib.sha256(repr(made_of).encode())
    for file in sorted(SOURCES.iterdir()):
        if file.suffix in (".cpp", ".h", ".inl"):
            digest.update(f"\n{file.name}\n".encode())
            digest.update(file.read_bytes())
    return f"outrider-{digest.hexdigest()[:16]}"


def local_name() -> str:
    """The stem of a library in the cache, which machines with other C libraries may share. What a
    compiler of CXX makes, with the options there, is for those who name the same one."""
    named = os.environ.get("CXX", "").strip()
    compiler = "cxx" + hashlib.sha256(named.encode()).hexdigest()[:8] if named else ""
    return "-".join(filter(None, (portable_name(), *platform.libc_ver(), compiler)))


def find(folder: Path, name: str) -> Path | None:
    """The library ``name`` in ``folder``, if it is there and whole. Loading one that was cut short
    would kill the process, so the name ends in the size. Raises OSError."""
    for path in folder.glob(f"{name}-*.so"):
        # Another process may take it away meanwhile.
        with contextlib.suppress(FileNotFoundError):
            if path.stem == f"{name}-{path.stat().st_size}" and path.is_file():
                return path
    return None


def find_or_build(folder: Path, name: str) -> Path:
    """Path of the library in ``folder``, compiled now if it is not there; says so on stderr.

    Safe against other processes that do the same. Raises CannotBuild and OSError.
    """
    if path := find(folder, name):
        return path
    compiler = _compiler()
    folder.mkdir(parents=True, exist_ok=True)
    with _turn(folder):
        return find(folder, name) or _build(compiler, folder, name)


def rebuild(path: Path, name: str) -> Path:
    """The library ``name`` at ``path``, which cannot be loaded, compiled again. Raises as above."""
    compiler = _compiler()
    with _turn(path.parent):
        path.unlink(missing_ok=True)
        return _build(compiler, path.parent, name)


@contextlib.contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Wait until no other process builds in ``folder``. That saves work and is all it does:
    without locks in the file system, two of them build the same and the last one's stays."""
    import fcntl  # not on Windows, where nothing is built

    with open(folder / "build.lock", "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another process that builds the C++ kernels")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass
        yield


def _build(compiler: list[str], folder: Path, name: str) -> Path:
    _say("building the C++ kernels (once, takes up to half a minute)")
    for left in folder.glob("building-*"):  # of a build that was killed: this one has its turn
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="building-") as temporary:
        objects = {isa: str(Path(temporary) / f"{isa}.o") for isa in (*sets(), "pool")}
        stack, pool = str(SOURCES / "stack.cpp"), str(SOURCES / "pool.cpp")
        commands = [
            [*compiler, *FLAGS, *flags, f"-DISA={isa}", "-c", stack, "-o", objects[isa]]
            for isa, flags in sets().items()
        ]
        _run([*commands, [*compiler, *FLAGS, "-c", pool, "-o", objects["pool"]]])
        whole = str(Path(temporary) / "whole.so")
        _run([[*compiler, "-shared", "-o", whole, *objects.values(), "-lpthread"]])
        path = folder / f"{name}-{os.stat(whole).st_size}.so"
        os.replace(whole, path)
    return path


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _compiler() -> list[str]:
    """The command of the compiler, from CXX or found. Raises CannotBuild."""
    if sys.platform == "win32":
        raise CannotBuild("there are none for Windows; WSL has them")
    wanted = os.environ.get("CXX", "")
    try:
        named = shlex.split(wanted)
    except ValueError as error:
        raise CannotBuild(f"CXX is {wanted!r}, which is no command: {error}") from None
    if named and shutil.which(named[0]) is None:
        raise CannotBuild(f"CXX is {named[0]!r}, which is not a command; name a C++ compiler")
    found = named or [name for name in ("g++", "clang++") if shutil.which(name)][:1]
    if not found:
        raise CannotBuild("no C++ compiler was found (g++ or clang++, or name one in CXX)")
    return found


def _run(commands: list[list[str]]) -> None:
    """Run all ``commands`` at once. Raises CannotBuild with the first error that one reports."""
    running: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            process = subprocess.Popen(
                command,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
            running.append(process)
        said = [process.communicate()[1] for process in running]
    finally:
        for process in running:
            if process.poll() is None:  # interrupted, or the next one could not be started
                process.terminate()
                process.communicate()
    for command, process, text in zip(commands, running, said, strict=True):
        if process.returncode:
            lines = text.strip().splitlines() or [f"exit status {process.returncode}"]
            first = next((line for line in lines if "error" in line.lower()), lines[0])
            raise CannotBuild(f"{command[0]} failed: {first}")
