"""Settings of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """``max_batch``: sequences running at once. ``max_step_tokens``: tokens of one forward.

    ``chunk``: the most tokens of one prompt that one step computes. ``max_draft``: the ceiling of
    a request's ``num_draft``.
    """

    max_batch: int = 16
    max_step_tokens: int = 1024
    chunk: int = 512
    max_draft: int = 64

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_step_tokens", "chunk"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected 1 or more")
        if self.max_draft < 0:
            raise ConfigError(f"max_draft is {self.max_draft}, expected 0 or more")
