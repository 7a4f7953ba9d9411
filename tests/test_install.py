"""The hook that compiles the kernels while the package is being installed."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.kernels import build

ROOT = Path(__file__).parents[1]


def test_building_needs_the_standard_library_alone() -> None:
    """What the hook loads has no other package at hand, ours included."""
    code = f"""
import contextlib
import importlib.util
spec = importlib.util.spec_from_file_location("kernels_build", {build.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.portable_name(), module.local_name())
"""
    out = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.split() == [build.portable_name(), build.local_name()]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that writes four letters."""
    script = tmp_path / "compiler"
    lines = '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; printf text > "$2"\n'
    script.write_text(lines, encoding="utf-8")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


@contextlib.contextmanager
def run_hook(version: str) -> Iterator[dict[str, Any]]:
    """What the hook tells the builder of wheels."""
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    hook = module.KernelsHook(str(ROOT), {}, None, None, str(ROOT), "wheel")
    data: dict[str, Any] = {"force_include": {}, "pure_python": True, "tag": None}
    hook.initialize(version, data)
    try:
        yield data
    finally:
        hook.finalize(version, data, "")
    assert not hook.folder.exists()


@pytest.mark.usefixtures("compiler")
def test_a_wheel_carries_the_library() -> None:
    with run_hook("standard") as data:
        [(source, place)] = data["force_include"].items()
        assert Path(source).read_text(encoding="utf-8") == "text"
    assert place == f"outrider/kernels/{build.portable_name()}-4.so"
    assert data["pure_python"] is False
    assert data["tag"].startswith("py3-none-")
    assert "manylinux" not in data["tag"]


@pytest.mark.usefixtures("compiler")
def test_an_editable_install_builds_into_the_cache() -> None:
    with run_hook("editable") as data:
        pass
    assert build.find(build.cache_folder(), build.local_name())
    assert data == {"force_include": {}, "pure_python": True, "tag": None}


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("version", ["standard", "editable"])
@pytest.mark.parametrize("cxx", ["false", "no-such-compiler"])
def test_without_a_compiler_the_wheel_is_pure(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], version: str, cxx: str
) -> None:
    monkeypatch.setenv("CXX", cxx)
    with run_hook(version) as data:
        pass
    assert data == {"force_include": {}, "pure_python": True, "tag": None}
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("installing without compiled C++ kernels: ")
