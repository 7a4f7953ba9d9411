"""Compiles the C++ kernels while the package is built, where a compiler is found.

A wheel gets the library and the tag of its platform; without a compiler it is pure Python, and the
kernels are built on first use. An editable install builds into the user's cache.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

PACKAGE = "outrider/kernels"


class KernelsHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build = _load(Path(self.root) / "src" / PACKAGE / "build.py")
        self.folder = Path(tempfile.mkdtemp())
        try:
            if version == "editable":
                build.find_or_build(build.cache_folder(), build.local_name())
                return
            library = build.find_or_build(self.folder, build.portable_name())
        except (build.CannotBuild, OSError) as error:
            print(f"installing without compiled C++ kernels: {error}", file=sys.stderr)
            return
        build_data["force_include"][str(library)] = f"{PACKAGE}/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _platform() -> str:
    """This platform, as local builds are tagged: no claim which other C libraries will do."""
    return next(tag for tag in platform_tags() if not tag.startswith(("manylinux", "musllinux")))


def _load(path: Path) -> ModuleType:
    """The module at ``path``, without the package around it: what that needs is not there yet."""
    spec = importlib.util.spec_from_file_location("kernels_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
