"""Recording a forward to repeat it: CUDA graphs, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from outrider.models.base import Forward

Run = Callable[[], Forward]


class Recorder(Protocol):
    """Turns a forward on fixed inputs into something that repeats it faster."""

    def record(self, run: Run) -> Run:
        """A function that does what ``run`` does, on the same inputs, with what is in them then.

        ``run`` may be called any number of times meanwhile: it only ever writes the same. Results
        live until the next forward of any recording.
        """
        ...


class EagerRecorder:
    """Records nothing. For the CPU, and to compare with."""

    def record(self, run: Run) -> Run:
        return run


class CudaRecorder:
    """CUDA graphs that share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, run: Run) -> Run:
        current = torch.cuda.current_stream(self._stream.device)
        # Once outside: libraries that set themselves up on first use may not do so in a recording.
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may use the device meanwhile; that is no part of it.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            result = run()

        def replay() -> Forward:
            graph.replay()
            return result

        return replay
