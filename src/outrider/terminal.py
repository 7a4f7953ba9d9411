"""What the commands share: reading their inputs, threads, and writing to the terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError


def read_prompt(argument: str | None, option: str | None, file: Path | None) -> str:
    """The prompt, from whichever one of the three was given, or standard input. Raises
    ConfigError."""
    given = [text for text in (argument, option) if text is not None]
    if len(given) + (file is not None) > 1:
        raise ConfigError("the prompt is given twice; use one of PROMPT, --prompt, --prompt-file")
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--prompt-file {file}: {error}") from error
    elif given and given[0] != "-":
        text = given[0]
    elif sys.stdin is None or sys.stdin.isatty():
        raise ConfigError('no prompt; give one as in: outrider generate "Name three rivers."')
    else:
        text = sys.stdin.read()
    check_text("the prompt", text)
    if not text.strip():
        raise ConfigError("the prompt is empty; give some text")
    return text


def check_text(what: str, text: str | None) -> None:
    """Raise ConfigError for text with bytes that were no UTF-8 where it came from."""
    if text is not None and any(0xD800 <= ord(char) <= 0xDFFF for char in text):
        raise ConfigError(f"{what} is not valid UTF-8 text")


def read_biases(pairs: list[str]) -> dict[int, float]:
    """Token id -> bias of pairs "ID=BIAS". Raises ConfigError."""
    biases: dict[int, float] = {}
    for pair in pairs:
        token, _, bias = pair.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise ConfigError(f"--logit-bias {pair!r}: expected ID=BIAS, as in 42=-1.5") from None
    return biases


def set_threads(threads: int | None) -> None:
    """Let PyTorch and the kernels use this many threads. Raises ConfigError."""
    if threads is None:
        return
    most = 4 * (os.cpu_count() or 1)
    if threads > most:
        raise ConfigError(f"--threads is {threads}, expected 1 to {most} on this machine")
    import torch

    torch.set_num_threads(threads)


def console(*, stderr: bool = False) -> Any:
    """A rich console that does not fold tables in files and pipes."""
    from rich.console import Console

    made = Console(stderr=stderr)
    if not made.is_terminal:
        made.width = max(made.width, 120)  # a file or a pipe has no edge
    return made


def progress() -> Any:
    """A bar on standard error for people; it leaves nothing behind."""
    from rich.progress import MofNCompleteColumn, Progress

    bars = console(stderr=True)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    return Progress(*columns, console=bars, transient=True, disable=not bars.is_terminal)
