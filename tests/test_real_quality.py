"""What the types of weights cost on the published models, against the same file in float32 on
PyTorch. Run with `make test-real`.

The text is the built-in prompts, four windows of 512 tokens: 2044 predictions. LIMITS hold, for
each model and type, on the kernels and on PyTorch alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from outrider.bench.quality import markdown, measure
from test_real import SMALL, require

pytestmark = pytest.mark.real


@dataclass(frozen=True, slots=True)
class Limit:
    """``kl_mean``, ``kl_p99``: the most, in nats. ``ratio``: perplexities differ by at most this
    share, either way. ``top1``: the least share of positions with the same most likely token."""

    kl_mean: float
    kl_p99: float
    ratio: float
    top1: float


LIMITS: dict[str, dict[str, Limit]] = {
    SMALL: {
        "bfloat16": Limit(0.002, 0.012, 0.005, 0.96),
        "int8": Limit(0.012, 0.06, 0.01, 0.93),
        "int4": Limit(0.009, 0.05, 0.01, 0.94),
    },
}
"""About half as much again as was measured. The file of SmolLM2 holds 4-bit weights: int4 keeps
them as they are, so it costs the rounding of the inputs alone, and less than int8, which rounds
the weights once more."""


@pytest.mark.parametrize("model", LIMITS)
def test_quality(model: str) -> None:
    require(model)
    limits = LIMITS[model]
    reference, *rows = measure(model, list(limits))
    print(markdown([reference, *rows]))
    assert reference.kl_mean < 1e-9
    assert reference.top1 == 1.0
    assert len(rows) == 2 * len(limits)
    for row in rows:
        limit = limits[row.dtype]
        assert row.num_positions == 2044
        assert row.kl_mean < limit.kl_mean, row
        assert row.kl_p99 < limit.kl_p99, row
        assert abs(row.perplexity_ratio - 1) < limit.ratio, row
        assert row.top1 > limit.top1, row
