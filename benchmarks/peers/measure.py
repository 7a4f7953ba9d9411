"""The run itself: engines are loaded, warmed up, judged, and answer in turn."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from client import Worker, WorkerFailed
from plan import Spec, pack, yardstick_of
from reference import Closeness, Reference, cached, compare, compute, judge
from table import Contender, Sample, in_one_measure

Say = Callable[[str], None]

WARM = 8
"""Tokens of the answer that warms a mode up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """``num_tokens`` of every answer; ``timeout`` of every request in seconds; ``memory`` for all
    engines that are loaded at once, in bytes; ``logs``: the folder of what engines print."""

    num_tokens: int
    repeats: int
    timeout: float
    memory: int
    logs: Path


def start(spec: Spec, settings: Settings) -> tuple[Worker, dict[str, Any]]:
    """A loaded worker and what it says of itself. Raises WorkerFailed."""
    settings.logs.mkdir(parents=True, exist_ok=True)
    log = settings.logs / f"{re.sub(r'[^a-zA-Z0-9=]+', '-', spec.name)}.log"
    log.write_bytes(b"")
    try:
        worker = Worker(spec.command, log)
    except OSError as error:
        raise WorkerFailed(f"{spec.command[0]} cannot be started: {error}") from None
    try:
        loaded = worker.call("load", options=dict(spec.options), timeout=settings.timeout)
    except BaseException:
        worker.close()
        raise
    return worker, {**loaded, "memory_bytes": worker.memory()}


def reference_of(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    float32: Spec,
    settings: Settings,
    say: Say,
) -> Reference:
    """From the cache in ``folder``, else computed by the engine ``float32``. Raises
    WorkerFailed."""
    if known := cached(folder, prompts):
        return known
    say("laws of the float32 model, computed once")
    worker, _ = start(float32, settings)
    try:
        return compute(folder, prompts, worker, timeout=settings.timeout)
    finally:
        worker.close()


class Measurement:
    """``taken``, the samples as they were taken, and by the names of specs ``loaded`` (what the
    engine says of itself) and ``failures`` fill up in :meth:`run`. ``closeness`` goes by (engine,
    dtype)."""

    def __init__(
        self,
        specs: Sequence[Spec],
        prompts: Sequence[tuple[str, list[int]]],
        settings: Settings,
        reference: Reference | None,
        bar: Any,
        say: Say,
    ) -> None:
        self.groups = pack(specs, settings.memory)
        self.taken: list[Sample] = []
        self.loaded: dict[str, dict[str, Any]] = {}
        self.failures: dict[str, str] = {}
        self.closeness: dict[tuple[str, str], Closeness | None] = {}
        self._specs, self._prompts, self._settings = specs, prompts, settings
        self._reference, self._say = reference, say
        modes = sum(len(spec.modes) for group in self.groups for spec in group)
        answers = settings.repeats * len(prompts) * modes
        self._bar, self._task = bar, bar.add_task("answers", total=answers)

    @property
    def reference_perplexity(self) -> float | None:
        """Of the float32 model on the text."""
        if self._reference is None:
            return None
        flat = np.memmap(self._reference.logits, np.float32, "r")
        rows = flat.reshape(-1, self._reference.columns)
        following = [token for tokens in self._reference.text.following for token in tokens]
        return compare(rows, rows, following).perplexity

    def run(self) -> None:
        """All answers. What fits in memory stays loaded and takes turns at every prompt; of
        several groups, one is done before the next is loaded."""
        if len(self.groups) > 1:
            self._say(f"not all engines fit in memory: {len(self.groups)} groups, one by one")
        for number, group in enumerate(self.groups):
            self._with_group(number, group)

    @property
    def samples(self) -> list[Sample]:
        """All of one measure: seconds of a group are scaled to what the yardstick needed over
        all groups, as far as it was measured there."""
        yardstick = yardstick_of(self._specs)
        if len(self.groups) == 1 or yardstick is None:
            return self.taken
        key = (yardstick.engine, yardstick.dtype, yardstick.modes[0].spec)
        return in_one_measure(self.taken, key)

    def _with_group(self, group_number: int, group: Sequence[Spec]) -> None:
        workers: dict[str, Worker] = {}
        try:
            for spec in group:
                if spec.name not in self.failures:
                    self._load(spec, workers)
            for repeat in range(self._settings.repeats):
                for number, (prompt, ids) in enumerate(self._prompts):
                    turns = [(spec, mode) for spec in group for mode in spec.modes]
                    shift = (number + repeat) % len(turns)
                    for spec, mode in turns[shift:] + turns[:shift]:
                        if spec.name in workers:
                            self._answer(workers, spec, mode, prompt, ids, repeat, group_number)
                        self._bar.advance(self._task)
        finally:
            for worker in workers.values():
                worker.close()

    def _load(self, spec: Spec, workers: dict[str, Worker]) -> None:
        self._bar.update(self._task, description=f"loading {spec.name}")
        try:
            worker, loaded = start(spec, self._settings)
        except WorkerFailed as error:
            self._fail(spec, error, workers)
            return
        workers[spec.name] = worker
        self.loaded.setdefault(spec.name, loaded)
        try:
            for mode in spec.modes:
                self._generate(worker, self._prompts[0][1], WARM, mode)
            self._judge(spec, worker)
        except WorkerFailed as error:
            self._fail(spec, error, workers)
        self._bar.update(self._task, description="answers")

    def _judge(self, spec: Spec, worker: Worker) -> None:
        """Once for each engine and dtype, by the process of its plain decoding."""
        key = (spec.engine, spec.dtype)
        plain = any(mode.spec == "plain" for mode in spec.modes)
        if self._reference is not None and plain and key not in self.closeness:
            self.closeness[key] = judge(self._reference, worker, timeout=self._settings.timeout)

    def _answer(
        self,
        workers: dict[str, Worker],
        spec: Spec,
        mode: Any,
        prompt: str,
        ids: list[int],
        repeat: int,
        group: int,
    ) -> None:
        worker, count = workers[spec.name], self._settings.num_tokens
        try:
            first = self._generate(worker, ids, 1, mode)
            whole = self._generate(worker, ids, count, mode)
            if len(whole["ids"]) != count:
                raise WorkerFailed(f"{len(whole['ids'])} tokens in place of {count} at {prompt}")
        except WorkerFailed as error:
            self._fail(spec, error, workers)
            return
        self.taken.append(
            Sample(
                engine=spec.engine,
                dtype=spec.dtype,
                mode=mode.spec,
                prompt=prompt,
                repeat=repeat,
                group=group,
                ids=whole["ids"],
                seconds=whole["seconds"],
                first_seconds=first["seconds"],
            )
        )

    def _generate(
        self, worker: Worker, ids: list[int], num_tokens: int, mode: Any
    ) -> dict[str, Any]:
        return worker.call(
            "generate",
            ids=ids,
            num_tokens=num_tokens,
            mode=mode.as_json(),
            timeout=self._settings.timeout,
        )

    def _fail(self, spec: Spec, error: WorkerFailed, workers: dict[str, Worker]) -> None:
        """The engine is left out from here on; the others go on."""
        self.failures[spec.name] = str(error)
        self._say(f"{spec.name} FAILED: {error}")
        if worker := workers.pop(spec.name, None):
            worker.close()

    def contenders(self) -> list[Contender]:
        """Every engine in every mode, in the order of the specs."""
        return [
            Contender(
                engine=spec.engine,
                version=_main_version(self.loaded.get(spec.name, {})),
                dtype=spec.dtype,
                mode=mode.spec,
                plain=mode.spec == "plain",
                notes=tuple(self.loaded.get(spec.name, {}).get("notes", ())),
                failure=self.failures.get(spec.name),
                closeness=self.closeness.get((spec.engine, spec.dtype)),
            )
            for spec in self._specs
            for mode in spec.modes
        ]


def _main_version(loaded: dict[str, Any]) -> str:
    """The first of the versions is the engine's own."""
    versions: dict[str, str] = loaded.get("versions", {})
    return next(iter(versions.values()), "-")
