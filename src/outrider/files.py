"""Writing results: whole or not at all, and refused before the work that leads to them."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from outrider.errors import ConfigError


def check_output(option: str, path: Path | None) -> None:
    """Raise ConfigError if nothing can be written to ``path``, the value of ``option``."""
    if path is None:
        return
    if not path.name:
        raise ConfigError(f"{option} {str(path)!r} names no file")
    try:
        if path.is_dir():
            raise ConfigError(f"{option} {path} is a folder; name a file in it")
        if not path.parent.is_dir():
            raise ConfigError(f"{option} {path}: the folder {path.parent} does not exist")
        if path.exists() and not path.is_file():
            return  # a pipe or a device: writing will tell
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ConfigError(f"{option} {path} cannot be written: {_reason(error)}") from None
    os.close(handle)
    os.unlink(temporary)


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _umask() -> int:
    mask = os.umask(0)  # there is no way to read it without setting it
    os.umask(mask)
    return mask


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then rename it. Pipes and devices are
    written to directly. Raises ConfigError for what the system refuses."""
    try:
        path = path.resolve() if path.is_symlink() and path.is_file() else path
        if path.exists() and not path.is_file():
            write(path)
            return
        handle, name = tempfile.mkstemp(
            dir=path.parent, prefix=path.stem, suffix=f".part{path.suffix}"
        )
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            temporary.chmod(0o666 & ~_umask())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {_reason(error)}") from None
