"""One engine in one process: a request in JSON on every line of stdin, a reply on every line of
stdout. Standard library only; the environments of the peers share nothing else.

    {"op": "load", "options": {...}}         -> {"versions": {...}, "dtype": ..., "notes": [...]}
    {"op": "generate", "ids": [...], "num_tokens": n, "mode": {...}} -> {"ids", "seconds"}
    {"op": "logits", "sequences": [...], "positions": [[...]], "path": ...} -> {"rows", "columns"}

An error is answered by {"error": ..., "trace": ...}; the process goes on.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Protocol


class Rows(Protocol):
    """Some rows of float32 logits, as numpy has them."""

    shape: tuple[int, ...]

    def tobytes(self) -> bytes: ...


class Engine(Protocol):
    """What a worker script has to bring."""

    def load(self, options: dict[str, Any]) -> dict[str, Any]:
        """Load the model. Returns ``versions``, ``dtype`` (in words) and ``notes``."""
        ...

    def generate(self, ids: list[int], num_tokens: int, mode: dict[str, Any]) -> list[int]:
        """Greedy tokens after ``ids``, ``num_tokens`` of them whatever they are, nothing reused
        of earlier calls. ``mode``: its name under "name", and its numbers."""
        ...

    def logits(self, ids: list[int], positions: list[int]) -> Rows | None:
        """Logits ``[len(positions), V]`` after each token of ``ids`` at ``positions``, float32;
        None where the engine does not give them."""
        ...


def serve(make: Callable[[], Engine]) -> None:
    """Answer requests until stdin ends. What the engine prints goes to stderr."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    engine = make()
    for line in sys.stdin:
        try:
            reply = _answer(engine, json.loads(line))
        except Exception as error:  # an engine may raise anything; the runner decides
            lines = str(error).strip().splitlines() or [""]
            reply = {
                "error": f"{type(error).__name__}: {lines[0]}",
                "trace": traceback.format_exc(),
            }
        print(json.dumps(reply), file=replies, flush=True)


def _answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    match request["op"]:
        case "load":
            start = time.perf_counter()
            loaded = engine.load(request["options"])
            return {**loaded, "seconds": time.perf_counter() - start}
        case "generate":
            start = time.perf_counter()
            ids = engine.generate(request["ids"], request["num_tokens"], request["mode"])
            seconds = time.perf_counter() - start
            return {"ids": [int(id) for id in ids], "seconds": seconds}
        case "logits":
            return _write_logits(engine, request)
        case other:
            raise ValueError(f"unknown op {other!r}")


def _write_logits(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    """All rows in one file, one after the other: a line of JSON would be too long for them."""
    count = columns = 0
    with open(request["path"], "wb") as file:
        for rows in _all_rows(engine, request["sequences"], request["positions"]):
            if rows is None:
                return {"rows": 0, "columns": 0}
            file.write(rows.tobytes())
            count, columns = count + rows.shape[0], rows.shape[1]
    return {"rows": count, "columns": columns}


def _all_rows(
    engine: Engine, sequences: list[list[int]], positions: list[list[int]]
) -> Iterator[Rows | None]:
    for ids, wanted in zip(sequences, positions, strict=True):
        yield engine.logits(ids, wanted)
