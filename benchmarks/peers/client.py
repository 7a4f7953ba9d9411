"""A worker process, seen from the run: requests, replies, and quiet in between.

Engines keep threads that spin for a while after their work. A worker is therefore stopped
(SIGSTOP, with all its children) whenever it is not asked anything: an idle engine takes nothing
from the one that is measured, and every engine keeps its own waiting policy while it works.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class WorkerFailed(Exception):
    """A worker answered with an error, died or took too long. The message is one line."""


class Worker:
    """Starts ``command`` in a process group of its own, stderr added to ``log``.

    Should this process die, the system itself wakes the stopped group and hangs it up.
    """

    def __init__(
        self, command: Sequence[str], log: Path, settings: Mapping[str, str] | None = None
    ) -> None:
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **(settings or {})},
                process_group=0,
            )
        self._received = b""
        self._running = True

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, op: str, *, timeout: float, **fields: Any) -> dict[str, Any]:
        """Send one request and wait for its reply, at most ``timeout`` seconds. Stops the worker
        afterwards. Raises WorkerFailed; after a death or a timeout the worker is closed."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({"op": op, **fields}).encode() + b"\n")
            self._process.stdin.flush()
            reply: dict[str, Any] = json.loads(self._line(timeout))
        except (OSError, ValueError) as error:
            self.close()
            raise WorkerFailed(f"{op}: {error}; {self._last_words()}") from None
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)
        if "error" in reply:
            with self._log.open("a", encoding="utf-8") as log:
                log.write(str(reply.get("trace", "")))
            raise WorkerFailed(f"{op}: {reply['error']}")
        return reply

    def _line(self, timeout: float) -> bytes:
        assert self._process.stdout is not None
        handle, end = self._process.stdout.fileno(), time.monotonic() + timeout
        while b"\n" not in self._received:
            ready, _, _ = select.select([handle], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise OSError(f"no reply within {timeout:.0f} s")
            if not (block := os.read(handle, 1 << 20)):
                raise OSError("the worker ended")
            self._received += block
        line, _, self._received = self._received.partition(b"\n")
        return line

    def memory(self) -> int:
        """Bytes of memory that the worker and its children hold (their proportional share)."""
        total = 0
        for pid in _group(self.pid):
            with contextlib.suppress(OSError, StopIteration, ValueError):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += 1024 * int(next(x for x in lines if x.startswith("Pss:")).split()[1])
        return total

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"last line of {self._log}: {lines[-1][:200]}" if lines else f"{self._log} is empty"

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def close(self) -> None:
        """End the worker and its children. May be called twice."""
        if not self._running:
            return
        self._running = False
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()


def _group(group: int) -> list[int]:
    """The processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if os.getpgid(int(entry.name)) == group:
                    found.append(int(entry.name))
    return found
