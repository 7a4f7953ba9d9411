"""The prompts that a benchmark runs: the built-in ones, or a file of the user's.

A file has one JSON object a line, with ``id`` (or ``question_id``), ``category`` and ``turns``, the
list of the user's messages. Other keys are ignored: Spec-Bench and MT-Bench files can be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from outrider.errors import BadFile, ConfigError

BUILTIN = "builtin"

CATEGORIES = (
    "code_completion",
    "code_edit",
    "chat",
    "summarisation",
    "tool_calls",
    "math",
    "translation",
    "creative",
)
"""Categories of the built-in prompts. Their file takes them in turn: its first eight prompts are of
eight categories."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """``turns``: the user's messages, in order; the model answers each before the next is sent."""

    id: str
    category: str
    turns: tuple[str, ...]


def load_prompts(source: str, limit: int | None = None) -> list[Prompt]:
    """The first ``limit`` prompts (all for None) of a source, in order.

    ``source``: "builtin", "builtin:chat,math" for some categories of it, or the path of a file.
    Raises ConfigError for a limit or category that does not exist, BadFile for a file that is
    missing or does not hold what it should, with the number of the line.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}, expected 1 or more")
    name, colon, wanted = source.partition(":")
    if name == BUILTIN:
        prompts = _builtin(wanted.split(",") if colon else CATEGORIES)
    else:
        prompts = _read(Path(source))
    return prompts[:limit]


def _builtin(categories: Iterable[str]) -> list[Prompt]:
    chosen = [category.strip() for category in categories]
    for category in chosen:
        if category not in CATEGORIES:
            raise ConfigError(
                f"unknown category {category!r} of the built-in prompts; "
                f"known: {', '.join(CATEGORIES)}"
            )
    text = files("outrider.bench").joinpath("prompts.jsonl").read_text(encoding="utf-8")
    return [p for p in _parse(text, "prompts.jsonl") if p.category in chosen]


def _read(path: Path) -> list[Prompt]:
    try:
        return _parse(path.read_text(encoding="utf-8-sig"), str(path))
    except FileNotFoundError:
        raise BadFile(
            f"no prompt file {str(path)!r}; give the path of a .jsonl file, or {BUILTIN!r}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(f"cannot read prompt file {str(path)!r} as UTF-8 text: {error}") from error


def _parse(text: str, name: str) -> list[Prompt]:
    prompts: list[Prompt] = []
    first_line: dict[str, int] = {}
    # Not splitlines(): JSON strings may hold other line separators, U+2028 for one.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        prompt = _prompt(line, where)
        if prompt.id in first_line:
            raise BadFile(f"{where}: id {prompt.id!r} was used on line {first_line[prompt.id]}")
        first_line[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise BadFile(f"{name} holds no prompts; expected one JSON object a line")
    return prompts


def _prompt(line: str, where: str) -> Prompt:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:  # beside bad syntax: numbers or depth past sense
        raise BadFile(f"{where}: not valid JSON ({error})") from error
    if not isinstance(row, dict):
        raise BadFile(f"{where}: expected a JSON object, found {type(row).__name__}")
    if "id" not in row and "question_id" in row:
        row["id"] = row["question_id"]
    for key in ("id", "category", "turns"):
        if key not in row:
            raise BadFile(f"{where}: the key {key!r} is missing")
    if isinstance(row["id"], bool) or not isinstance(row["id"], str | int):
        raise BadFile(f"{where}: the id is {row['id']!r}, expected a string or a whole number")
    if not isinstance(row["category"], str) or not row["category"]:
        raise BadFile(f"{where}: category is {row['category']!r}, expected a name")
    if row["category"] == "all":
        raise BadFile(f"{where}: category 'all' is what the rows over all categories are called")
    turns = row["turns"]
    if not isinstance(turns, list) or not turns:
        raise BadFile(f"{where}: 'turns' must be a list of at least one message")
    if not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise BadFile(f"{where}: every message in 'turns' must be a string that is not empty")
    if any(0xD800 <= ord(char) <= 0xDFFF for turn in turns for char in turn):
        raise BadFile(f"{where}: a message holds half of a surrogate pair; that is no text")
    return Prompt(str(row["id"]), row["category"], tuple(turns))
