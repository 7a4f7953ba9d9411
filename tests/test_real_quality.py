"""What the types of weights cost on the published models, against float32 on PyTorch.

The text is the built-in prompts, four windows of 512 tokens: 2044 predictions. The limits, for the
kernels and for the same weights on PyTorch alike:

TODO
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from test_real import DRAFT, LARGE, SMALL

pytestmark = pytest.mark.real

GEMMA = "gemma-3-270m"
MODELS = [SMALL, GEMMA, DRAFT, LARGE]


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that KL's mean, its 99th percentile and the ratio of perplexities may be, the least
    that the agreement of the most likely token may be."""

    kl_mean: float
    kl_p99: float
    ratio: float
    top1: float
