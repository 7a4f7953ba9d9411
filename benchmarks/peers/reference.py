"""How far an engine's next-token laws are from those of the float32 model, on a fixed text.

The text: eight built-in prompts of eight categories in the model's chat template, each with the
float32 model's own greedy answer. Laws are compared after 32 tokens spread over every prompt and
after every token of every answer but the last.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from client import Worker

from outrider.files import write_whole

ANSWER = 32
"""Tokens of an answer."""

SPREAD = 32
"""Positions looked at in a prompt."""

BLOCK = 16
"""Laws compared at once: float64 copies of a vocabulary are large."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """``sequences``: token ids. ``positions[i]``: the tokens of sequence i after which laws are
    compared. ``following[i]``: for those in the prompt, the token that follows, else -1."""

    sequences: list[list[int]]
    positions: list[list[int]]
    following: list[list[int]]

    @property
    def num_positions(self) -> int:
        return sum(map(len, self.positions))


@dataclass(frozen=True, slots=True, kw_only=True)
class Closeness:
    """``kl_mean``, ``kl_p99``: of KL(float32 || engine), nats. ``top1``: share of the positions
    with the same most likely token. ``perplexity``: of the prompts' tokens at the positions."""

    positions: int
    kl_mean: float
    kl_p99: float
    top1: float
    perplexity: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The text and, as raw float32 ``[positions, columns]``, the logits of the float32 model."""

    text: Text
    logits: Path
    columns: int


def cached(folder: Path, prompts: Sequence[Sequence[int]]) -> Reference | None:
    """The reference of these prompts' token ids, if it was computed before."""
    home = _home(folder, prompts)
    try:
        stored = json.loads((home / "text.json").read_text(encoding="utf-8"))
        reference = Reference(
            text=Text(**stored["text"]), logits=home / "logits.f32", columns=stored["columns"]
        )
        size = reference.logits.stat().st_size
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return reference if size == 4 * reference.text.num_positions * reference.columns else None


def compute(
    folder: Path, prompts: Sequence[Sequence[int]], worker: Worker, *, timeout: float
) -> Reference:
    """Let a loaded float32 worker answer the prompts and give its laws; both are kept in
    ``folder``. Raises WorkerFailed."""
    answers = [
        worker.call(
            "generate",
            ids=list(ids),
            num_tokens=ANSWER,
            mode={"name": "none"},
            timeout=timeout,
        )["ids"]
        for ids in prompts
    ]
    text = make_text(prompts, answers)
    home = _home(folder, prompts)
    home.mkdir(parents=True, exist_ok=True)
    columns = 0

    def write(file: Path) -> None:
        nonlocal columns
        columns = _ask(worker, text, file, timeout) or 0

    write_whole(home / "logits.f32", write)
    stored = json.dumps({"text": asdict(text), "columns": columns})
    write_whole(home / "text.json", lambda file: _write(file, stored))
    return Reference(text=text, logits=home / "logits.f32", columns=columns)


def make_text(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Text:
    sequences, positions, following = [], [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = [*prompt, *answer]
        spread = sorted({int(i) for i in np.linspace(0, len(prompt) - 2, SPREAD)})
        in_answer = list(range(len(prompt) - 1, len(ids) - 1))
        sequences.append(ids)
        positions.append([*spread, *in_answer])
        following.append([ids[i + 1] for i in spread] + [-1] * len(in_answer))
    return Text(sequences=sequences, positions=positions, following=following)


def judge(reference: Reference, worker: Worker, *, timeout: float) -> Closeness | None:
    """Ask a loaded worker for its laws and compare; None if it has none to give. Raises
    WorkerFailed."""
    handle, name = tempfile.mkstemp(dir=reference.logits.parent, suffix=".part")
    os.close(handle)
    try:
        columns = _ask(worker, reference.text, Path(name), timeout)
        if columns is None:
            return None
        rows = (reference.text.num_positions, -1)
        theirs = np.memmap(name, np.float32, "r").reshape(rows)
        ours = np.memmap(reference.logits, np.float32, "r").reshape(rows)
        following = [token for tokens in reference.text.following for token in tokens]
        return compare(ours, theirs, following)
    finally:
        os.unlink(name)


def compare(
    reference: npt.NDArray[np.float32],
    logits: npt.NDArray[np.float32],
    following: Sequence[int],
) -> Closeness:
    """Both ``[positions, V]``. An engine that pads its vocabulary otherwise is compared on the
    columns that both have. ``following``: as in Text, flat."""
    shared = min(reference.shape[1], logits.shape[1])
    kl, same, told = [], [], []
    for start in range(0, len(reference), BLOCK):
        p = _log_softmax(reference[start : start + BLOCK, :shared])
        q = _log_softmax(logits[start : start + BLOCK, :shared])
        kl.append((np.exp(p) * (p - q)).sum(-1))
        same.append(p.argmax(-1) == q.argmax(-1))
        tokens = following[start : start + BLOCK]
        told += [q[row, token] for row, token in enumerate(tokens) if token >= 0]
    all_kl = np.concatenate(kl)
    return Closeness(
        positions=len(all_kl),
        kl_mean=float(all_kl.mean()),
        kl_p99=float(np.quantile(all_kl, 0.99)),
        top1=float(np.concatenate(same).mean()),
        perplexity=math.exp(-float(np.mean(told))),
    )


def _log_softmax(rows: npt.NDArray[np.float32]) -> Floats:
    wide = rows.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    values: Floats = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    return values


def _ask(worker: Worker, text: Text, path: Path, timeout: float) -> int | None:
    """The worker's logits into ``path``; the number of columns, None for no logits."""
    reply = worker.call(
        "logits",
        sequences=text.sequences,
        positions=text.positions,
        path=str(path),
        timeout=timeout,
    )
    return int(reply["columns"]) if reply["rows"] else None


def _home(folder: Path, prompts: Sequence[Sequence[int]]) -> Path:
    key = json.dumps([ANSWER, SPREAD, [list(ids) for ids in prompts]])
    return folder / f"reference-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
