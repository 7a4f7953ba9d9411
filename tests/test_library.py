"""Building the library of kernels when installed or on first use, and finding it again.

A compiler that is a script stands for the real one, which takes long: it copies a library.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import ConfigError
from outrider.kernels import build, library
from outrider.kernels.library import NoKernels, available_sets, load_library

SETS = available_sets()


def forget() -> None:
    """As in a new process."""
    load_library.cache_clear()
    library._built.cache_clear()


@pytest.fixture
def real() -> Path:
    """A library that works."""
    load_library()
    lib = library._built()
    assert isinstance(lib, ctypes.CDLL)
    return Path(lib._name)


@pytest.fixture
def fresh(real: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing was installed, built or tried yet."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OUTRIDER_ISA", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(library, "INSTALLED", tmp_path / "package")
    (tmp_path / "package").mkdir()
    forget()
    yield tmp_path
    forget()


def compiler(folder: Path, ending: str) -> Path:
    """A compiler that notes its calls in the file ``calls`` and goes on with lines of shell;
    ``$out`` is the file that it should write."""
    script = folder / "compiler"
    find_out = 'while [ "$1" != -o ]; do shift; done; out=$2'
    text = f'#!/bin/sh\necho "$@" >> {folder}/calls\n{find_out}\n{ending}\n'
    script.write_text(text, encoding="utf-8")
    script.chmod(0o755)
    return script


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text(encoding="utf-8").splitlines()


def built(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "kernels").glob("*.so"))


# Building.


def test_the_library_is_built_once(
    fresh: Path, real: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", str(compiler(fresh, f'cp {real} "$out"')))
    for _ in range(2):
        assert load_library().isa == SETS[-1]
        forget()
    out, err = capfd.readouterr()
    assert out == ""
    assert err == "building the C++ kernels (once, takes up to half a minute)\n"
    assert len(calls(fresh)) == len(build.sets()) + 2
    assert [path.stem for path in built(fresh)] == [f"{build.local_name()}-{real.stat().st_size}"]
    assert not list((fresh / "cache" / "kernels").glob("building-*"))


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("echo 'no room' >&2; echo more >&2; exit 1", "no room"),
        (
            "echo x.s: >&2; echo 'x.s: Fatal error: no room' >&2; exit 1",
            "x.s: Fatal error: no room",
        ),
        ("exit 3", "exit status 3"),
    ],
)
def test_a_failure_is_not_tried_again(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, ending: str, said: str
) -> None:
    monkeypatch.setenv("CXX", str(compiler(fresh, ending)))
    for isa in (None, "plain", None):
        with pytest.raises(NoKernels, match=f"kernels cannot be built: .*compiler failed: {said}$"):
            load_library(isa)
    text = "\n".join(calls(fresh))
    assert text.count("pool.cpp") == 1
    assert "-shared" not in text
    assert not built(fresh)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("no-such-compiler -v", "CXX is 'no-such-compiler', which is not a command"),
        ("g++ '", r"""CXX is "g\+\+ '", which is no command"""),
        ("", r"no C\+\+ compiler was found"),
    ],
)
def test_a_compiler_that_is_none(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, named: str, said: str
) -> None:
    monkeypatch.setenv("CXX", named)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NoKernels, match=said):
        load_library()


def test_a_cache_that_cannot_be_written(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fresh / "cache").write_text("a file", encoding="utf-8")
    monkeypatch.setenv("CXX", str(compiler(fresh, "exit 0")))
    with pytest.raises(NoKernels, match=r"kernels cannot be built in .*cache/kernels: "):
        load_library()


def test_a_library_in_a_cache_that_cannot_be_written(
    fresh: Path, real: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write anywhere: making folders fails instead."""
    folder = fresh / "cache" / "kernels"
    folder.mkdir(parents=True)
    shutil.copy(real, folder / f"{build.local_name()}-{real.stat().st_size}.so")

    def refuse(*_: object, **__: object) -> Any:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    assert build.find_or_build(folder, build.local_name()).parent == folder


def test_a_disk_that_is_full(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(compiler(fresh, 'echo half > "$out"')))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(NoKernels, match=r"cannot be built in .*: No space left on device"):
        load_library()
    assert not built(fresh)


def test_the_cache_goes_away_while_it_is_built(
    fresh: Path, real: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(compiler(fresh, f"rm -rf {fresh}/cache")))
    with pytest.raises(NoKernels, match=r"cannot be built in .*: No such file"):
        load_library()
    forget()
    monkeypatch.setenv("CXX", str(compiler(fresh, f'cp {real} "$out"')))
    load_library()
    shutil.rmtree(fresh / "cache")
    assert load_library("plain").isa == "plain"  # of the same file, which is open


def test_windows_has_none(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(NoKernels, match="there are none for Windows"):
        load_library()


# Several processes.

PROCESS = """
import sys
from pathlib import Path
from outrider.kernels import build
print(build.find_or_build(Path(sys.argv[1]), "a"))
"""


def start(folder: Path, script: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROCESS, str(folder)]
    environment = os.environ | {"CXX": str(script)}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


def test_processes_take_turns(tmp_path: Path) -> None:
    """The first one waits in its compiler until the others wait for it: one builds, all find it."""
    folder, go = tmp_path / "kernels", tmp_path / "go"
    wait = f'until [ -e {go} ]; do sleep 0.05; done; echo text > "$out"'
    script = compiler(tmp_path, wait)
    processes = [start(folder, script) for _ in range(3)]
    said = [process.stderr.readline() for process in processes if process.stderr]
    go.touch()
    results = [process.communicate() for process in processes]
    assert sorted(text.split()[0] for text in said) == ["building", "waiting", "waiting"]
    assert {out for out, _ in results} == {f"{folder}/a-5.so\n"}
    assert all(err == "" for _, err in results)
    assert len(calls(tmp_path)) == len(build.sets()) + 2


def test_without_locks_the_last_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    monkeypatch.setenv("CXX", str(compiler(tmp_path, 'echo text > "$out"')))
    assert build.find_or_build(tmp_path, "a").read_text(encoding="utf-8") == "text\n"


def test_an_interrupted_build_leaves_nothing_to_load(tmp_path: Path) -> None:
    """Killed while it links, without a chance to tidy up; the next one builds."""
    folder = tmp_path / "kernels"
    hang = 'echo half > "$out"; case $out in *whole.so) kill -9 $PPID; sleep 0.1;; esac'
    process = start(folder, compiler(tmp_path, hang))
    out, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert out == ""
    assert build.find(folder, "a") is None
    out, _ = start(folder, compiler(tmp_path, 'echo text > "$out"')).communicate()
    assert out == f"{folder}/a-5.so\n"


def test_an_interrupt_ends_the_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    waited: list[Any] = []

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

        def communicate(self, *args: Any, **options: Any) -> Any:
            waited.append(self)
            if len(waited) == 1:
                raise KeyboardInterrupt
            return super().communicate(*args, **options)

    monkeypatch.setattr("subprocess.Popen", Interrupted)
    monkeypatch.setenv("CXX", str(compiler(tmp_path, "exec sleep 20")))
    with pytest.raises(KeyboardInterrupt):
        build.find_or_build(tmp_path / "kernels", "a")
    assert [process.returncode for process in started] == [-signal.SIGTERM] * len(started)
    assert len(started) == len(build.sets()) + 1
    assert not list((tmp_path / "kernels").glob("building-*"))


# Finding.


def test_only_a_whole_library_is_found(tmp_path: Path) -> None:
    assert build.find(tmp_path / "none", "a") is None
    (tmp_path / "a-5.so").write_bytes(b"text")
    (tmp_path / "b-4.so").write_bytes(b"text")
    assert build.find(tmp_path, "a") is None
    (tmp_path / "a-4.so").write_bytes(b"text")
    assert build.find(tmp_path, "a") == tmp_path / "a-4.so"


@pytest.mark.parametrize("change", ["source", "name", "flags", "machine", "system"])
def test_the_name_follows_what_the_library_is_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    before = build.portable_name()
    copy = tmp_path / "csrc"
    shutil.copytree(build.SOURCES, copy)
    (copy / "vec.inl~").write_text("left by an editor", encoding="utf-8")
    monkeypatch.setattr(build, "SOURCES", copy)
    assert build.portable_name() == before
    if change == "source":
        with (copy / "vec.inl").open("a") as file:
            file.write("\n")
    elif change == "name":
        (copy / "vec.inl").rename(copy / "vec2.inl")
    elif change == "flags":
        monkeypatch.setitem(build.X86_SETS, "avx2", ["-mavx"])
        monkeypatch.setattr(build, "FLAGS", ["-O2"])
    else:
        monkeypatch.setattr(f"platform.{change}", lambda: "other")
    assert build.portable_name() != before
    assert build.local_name().startswith(build.portable_name())


def test_the_installed_library_is_taken_first(
    fresh: Path, real: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    installed = fresh / "package" / f"{build.portable_name()}-{real.stat().st_size}.so"
    shutil.copy(real, installed)
    assert load_library().isa == SETS[-1]
    lib = library._built()
    assert isinstance(lib, ctypes.CDLL)
    assert lib._name == str(installed)


def test_an_installed_library_of_other_sources_is_not_taken(
    fresh: Path, real: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    shutil.copy(real, fresh / "package" / f"outrider-0123456789abcdef-{real.stat().st_size}.so")
    with pytest.raises(NoKernels, match="no C"):
        load_library()


def test_an_installed_library_that_cannot_be_loaded(
    fresh: Path, real: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one built on a newer system; here it is no library at all."""
    (fresh / "package" / f"{build.portable_name()}-4.so").write_bytes(b"text")
    monkeypatch.setenv("CXX", str(compiler(fresh, f'cp {real} "$out"')))
    with pytest.warns(RuntimeWarning, match="the installed kernels cannot be loaded"):
        assert load_library().isa == SETS[-1]
    assert built(fresh)


@pytest.mark.parametrize("kind", ["zeros", "folder"])
def test_a_library_of_the_cache_that_is_none(
    fresh: Path, real: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Of the right name and size: it is made again, once."""
    folder, size = fresh / "cache" / "kernels", real.stat().st_size
    monkeypatch.setenv("CXX", str(compiler(fresh, f'cp {real} "$out"')))
    place = folder / f"{build.local_name()}-{size}.so"
    if kind == "zeros":
        folder.mkdir(parents=True)
        place.write_bytes(bytes(size))
    else:
        place.mkdir(parents=True)
        name = f"{build.local_name()}-{place.stat().st_size}.so"
        place.rename(folder / name)
    assert load_library().isa == SETS[-1]
    assert [path.stat().st_size for path in built(fresh) if path.is_file()] == [size]


def test_what_a_killed_build_left_goes(
    fresh: Path, real: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fresh / "cache" / "kernels" / "building-x").mkdir(parents=True)
    monkeypatch.setenv("CXX", str(compiler(fresh, f'cp {real} "$out"')))
    load_library()
    assert not list((fresh / "cache" / "kernels").glob("building-*"))


def test_each_compiler_has_libraries_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    names = [build.local_name()]
    for named in ("g++", "g++ -march=native"):
        monkeypatch.setenv("CXX", named)
        names.append(build.local_name())
    assert len(set(names)) == 3


def test_no_home(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", "~nosuchuser/x")
    with pytest.raises(OSError, match="name a folder in OUTRIDER_CACHE"):
        build.cache_dir()
    with pytest.raises(NoKernels, match="there is no cache"):
        load_library()


def test_what_was_built_cannot_be_loaded(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(compiler(fresh, 'echo text > "$out"')))
    with pytest.raises(NoKernels, match="the kernels cannot be loaded: "):
        load_library()


def test_unknown_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoKernels, match="'sse9' is not one of this CPU's: plain"):
        load_library("sse9")
    forget()
    monkeypatch.setenv("OUTRIDER_ISA", "sse9")
    with pytest.raises(ConfigError, match="OUTRIDER_ISA is 'sse9', possible here: plain"):
        load_library()
    forget()
