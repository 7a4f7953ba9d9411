"""What the benchmark calls a near-tie, on a model whose logits are given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.bench import neartie
from outrider.bench.neartie import Difference, first_difference
from outrider.bench.runner import PLAIN, Contender, Sample, _differences
from outrider.metrics import Stats
from outrider.request import SamplingParams
from outrider.sampling import Noise

MODEL: Any = SimpleNamespace(dtype=torch.float32)
IDS = [1, 2, 3]
HALF = 2**-22
"""Twice float32's eps: the tolerance is this times the largest logit."""


def differ(
    monkeypatch: pytest.MonkeyPatch, logits: torch.Tensor, pair: tuple[int, int], **params: Any
) -> Difference:
    monkeypatch.setattr(neartie, "text_logits", lambda model, tokens: logits[None])
    expected, got = pair
    options = SamplingParams(**params)
    return first_difference(
        MODEL, IDS, [0, expected], [0, got, 5], 7, params=options, seed=options.seed or 0
    )


def test_greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([1.0, 4.0, 4.0 - HALF, 3.0])
    tie = differ(monkeypatch, logits, (1, 2), temperature=0.0)
    assert (tie.prompt, tie.position, tie.expected, tie.got) == (7, 1, 1, 2)
    assert tie.near_tie
    assert not differ(monkeypatch, logits, (1, 3), temperature=0.0).near_tie
    # Close to each other, but neither is close to being chosen.
    logits = torch.tensor([1.0, 1.0, 4.0])
    assert not differ(monkeypatch, logits, (0, 1), temperature=0.0).near_tie


def test_a_prefix_is_no_tie() -> None:
    for expected, got in (([4, 5], [4]), ([4], [4, 5])):
        found = first_difference(
            MODEL, IDS, expected, got, 0, params=SamplingParams(temperature=0.0), seed=0
        )
        assert (found.position, found.gap, found.near_tie) == (1, None, False)
        assert None in (found.expected, found.got)


def race(margin: float, temperature: float, seed: int) -> torch.Tensor:
    """Logits of four tokens whose race token 2 loses to token 1 by ``margin`` logits."""
    noise = Noise(seed).exponentials(4, len(IDS) + 1).double().log() * temperature
    values = torch.tensor([-2.0, 3.0, 3.0 - margin, -1.0]).double()
    return (values + noise).float()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_drawn_tokens_tie_in_the_race(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    for seed in range(5):
        params = {"temperature": temperature, "seed": seed}
        logits = race(0.0, temperature, seed)
        assert differ(monkeypatch, logits, (1, 2), **params).near_tie
        assert not differ(monkeypatch, logits, (1, 0), **params).near_tie
        found = differ(monkeypatch, race(0.01, temperature, seed), (1, 2), **params)
        assert not found.near_tie
        assert found.gap == pytest.approx(0.01, rel=1e-3)
        other = first_difference(
            MODEL, IDS, [0, 1], [0, 2], 7, params=SamplingParams(**params), seed=seed + 1
        )
        assert not other.near_tie, "the noise of another seed explains nothing"


def test_tokens_that_were_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = Noise(0).exponentials(3, len(IDS) + 1)
    winner, loser = (int(i) for i in (-noise[:2]).argsort(descending=True))
    logits = torch.full((3,), -50.0)
    logits[winner], logits[loser] = 2.0, 2.0 + 0.5 * HALF
    # Top-1 keeps one of two equals; the race is not close, the cut is.
    params = {"temperature": 1.0, "top_k": 1, "seed": 0}
    assert differ(monkeypatch, logits, (winner, loser), **params).near_tie
    logits[loser] = 1.0
    found = differ(monkeypatch, logits, (winner, loser), **params)
    assert (found.gap, found.near_tie) == (None, False)
    for cut in ({"min_p": 0.5}, {"top_p": 0.5}):
        found = differ(monkeypatch, logits, (winner, loser), temperature=1.0, seed=0, **cut)
        assert (found.gap, found.near_tie) == (None, False)


def sample(contender: Contender, repeat: int, tokens: tuple[int, ...]) -> Sample:
    return Sample(
        contender=contender,
        prompt=0,
        workload="w",
        repeat=repeat,
        ids=tuple(IDS),
        tokens=tokens,
        seconds=1.0,
        stats=Stats(),
    )


def test_differences_of_every_repeat_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neartie, "text_logits", lambda model, tokens: torch.arange(9.0)[None])
    mine = Contender(drafter="ngram")
    samples = [sample(PLAIN, repeat, (8, 1)) for repeat in range(4)]
    answers = [(8, 1), (8, 2), (8, 2), (8, 3)]
    samples += [sample(mine, repeat, tokens) for repeat, tokens in enumerate(answers)]
    llm: Any = SimpleNamespace(target=SimpleNamespace(model=MODEL))
    found = _differences(llm, samples, SamplingParams(temperature=0.0))
    assert [difference.got for difference, _ in found] == [2, 3]
