"""Settings and fixtures for all tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import settings

from outrider.request import Request, SamplingParams, Sequence
from outrider.sampling import Noise

# The same examples on every run; a failure prints the example and how to replay it.
settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("repeatable")

torch.set_num_threads(1)  # the tensors are tiny: threads would only cost


@pytest.fixture
def make_sequence() -> Callable[..., Sequence]:
    """Builds a Sequence that has tokens, parameters and end tokens, but no engine around it."""

    def make(
        prompt: list[int],
        output: list[int] | None = None,
        *,
        params: SamplingParams | None = None,
        end_tokens: frozenset[int] = frozenset(),
        seed: int = 0,
        seq_id: str = "a",
    ) -> Sequence:
        request = Request(id=seq_id, prompt=tuple(prompt), params=params or SamplingParams())
        missing = cast(Any, None)
        seq = Sequence(
            id=seq_id,
            request=request,
            index=0,
            noise=Noise(seed),
            drafter=missing,
            verifier=missing,
            num_draft=0,
            max_length=10**6,
            end_tokens=end_tokens,
            detokenizer=missing,
            stats=missing,
            tokens=list(prompt),
        )
        for token in output or []:
            seq.append(token)
        return seq

    return make
