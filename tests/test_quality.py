"""How far a model is from its float32 reference: the numbers, the text, what is refused."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.bench import quality
from outrider.errors import ConfigError
from test_native import native, weights
from tiny import VOCAB, tiny_decoder

START = [1]


class Letters:
    """A tokenizer: one token a letter, after a first one."""

    def encode(self, text: str) -> list[int]:
        return [*START, *(3 + ord(letter) % (VOCAB - 3) for letter in text)]


def loaded(model: Any, name: str = "tiny") -> Any:
    return SimpleNamespace(name=name, model=model, encode=Letters().encode)


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "WINDOW", 40)
    monkeypatch.setattr(quality, "ROWS", 7)  # 39 positions are no multiple


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch, small_windows: None) -> list[tuple[str, str, bool]]:
    """Tiny models are loaded; returns what was asked for."""
    asked: list[tuple[str, str, bool]] = []

    def load(name: str, *, dtype: str, kernels: bool = True, num_slots: int, **_: Any) -> Any:
        asked.append((name, dtype, kernels))
        if kernels and dtype not in ("float32", "float16"):
            return loaded(native("llama", dtype, num_slots=num_slots), name)
        type = torch.float32 if dtype == "float32" else torch.bfloat16
        return loaded(tiny_decoder(weights("llama"), dtype=type, num_slots=num_slots), name)

    monkeypatch.setattr(quality, "load_model", load)
    return asked


def test_windows_of_the_fixed_text(small_windows: None) -> None:
    windows = quality.text_windows(loaded(None), 3)
    assert [len(window) for window in windows] == [40, 40, 40]
    assert [window[0] for window in windows] == START * 3
    text = "\n\n".join(turn for prompt in quality.load_prompts("builtin") for turn in prompt.turns)
    whole = Letters().encode(text)
    assert [token for window in windows for token in window[1:]] == whole[1 : 1 + 3 * 39]
    most = (len(whole) - 1) // 39
    assert len(quality.text_windows(loaded(None), most)) == most
    with pytest.raises(ConfigError, match=f"num_windows is {most + 1}, the text has {most} for"):
        quality.text_windows(loaded(None), most + 1)
    with pytest.raises(ConfigError, match="num_windows is 0, expected 1 or more"):
        quality.text_windows(loaded(None), 0)


def test_the_text_is_long_enough() -> None:
    """At least 1500 tokens for a tokenizer that is no worse than five letters a token."""
    text = [turn for prompt in quality.load_prompts("builtin") for turn in prompt.turns]
    assert sum(map(len, text)) / 5 > quality.NUM_WINDOWS * quality.WINDOW > 1500


@pytest.mark.parametrize("make", [native, lambda: tiny_decoder(weights("llama"))])
def test_logits_of_a_window_are_those_of_its_beginnings(make: Any) -> None:
    model, tokens = make(), [5, 3, 60, 7, 7, 21, 90]
    whole = quality.text_logits(model, tokens, everywhere=True)
    assert whole.shape == (7, VOCAB)
    assert whole.dtype == torch.float32
    for end in range(1, 8):
        last = quality.text_logits(model, tokens[:end], everywhere=True)[-1]
        assert torch.allclose(last, whole[end - 1], atol=1e-5)
    assert model.kv.num_free == model.kv.num_slots


def test_numbers_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two windows of three tokens over a vocabulary of two: four positions count."""
    theirs = [[0.5, 0.25, 0.9], [0.5, 0.8, 0.1]]  # the law of token 0 at each position
    ours = [[0.25, 0.25, 0.1], [0.5, 0.4, 0.9]]

    def logits(laws: list[float]) -> torch.Tensor:
        p = torch.tensor(laws)
        return torch.stack([p.log(), (1 - p).log()], 1) + 5.0  # not normalised

    windows = [[0, 0, 1], [1, 1, 0]]
    made = iter([logits(one) for one in ours])
    monkeypatch.setattr(quality, "text_logits", lambda model, tokens, everywhere: next(made))
    label = ("m", "int4", True)
    row = quality._against([logits(one) for one in theirs], windows, None, label)  # type: ignore[arg-type]
    assert row.num_positions == 4
    told = [0.25, 0.75, 0.5, 0.4]  # ours, of what follows: 0, 1; 1, 0
    known = [0.5, 0.75, 0.5, 0.8]
    expected = math.exp(-sum(map(math.log, told)) / 4)
    assert row.perplexity == pytest.approx(expected, rel=1e-5)
    other = math.exp(-sum(map(math.log, known)) / 4)
    assert row.perplexity_ratio == pytest.approx(expected / other, rel=1e-5)
    pairs = [(0.5, 0.25), (0.25, 0.25), (0.5, 0.5), (0.8, 0.4)]
    kl = [p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)) for p, q in pairs]
    assert row.kl_mean == pytest.approx(sum(kl) / 4, rel=1e-5)
    assert row.kl_p99 == pytest.approx(sorted(kl)[2] * 0.03 + max(kl) * 0.97, rel=1e-4)
    # Of the ties at 0.5 the first token is taken: they agree in the second and third position.
    assert row.top1 == 0.5


def test_a_model_equals_itself_and_a_coarser_one_is_worse(
    loads: list[tuple[str, str, bool]],
) -> None:
    told: list[tuple[int, int]] = []
    rows = quality.measure(
        "m", ["bfloat16", "int4"], num_windows=3, progress=lambda *at: told.append(at)
    )
    assert loads == [
        ("m", "float32", False),
        *(("m", dtype, kernels) for dtype in ("bfloat16", "int4") for kernels in (True, False)),
    ]
    assert told == [(i, 5) for i in range(1, 6)]
    reference, fine, _, coarse, _ = rows
    assert (reference.dtype, reference.kernels) == ("float32", False)
    assert reference.num_positions == 3 * 39
    assert (reference.kl_mean, reference.kl_p99) == pytest.approx((0.0, 0.0), abs=1e-12)
    assert (reference.perplexity_ratio, reference.top1) == (1.0, 1.0)
    assert 0.0 < fine.kl_mean < 0.01 < coarse.kl_mean
    assert fine.kl_mean < fine.kl_p99
    assert 0.3 < coarse.top1 < fine.top1 <= 1.0
    assert fine.perplexity / reference.perplexity == pytest.approx(fine.perplexity_ratio)


def test_what_runs_where(loads: list[tuple[str, str, bool]]) -> None:
    """float32 is the reference and runs once; float16 has no kernels; what is named twice runs
    once."""
    rows = quality.measure(
        "m", ["float16", "float32", "int8", "int8"], kernels=[True, True], num_windows=1
    )
    assert [(row.dtype, row.kernels) for row in rows] == [("float32", False), ("int8", True)]
    quality.measure("m", ["float16"], num_windows=1)
    assert loads[-1] == ("m", "float16", False)


def test_refusals(monkeypatch: pytest.MonkeyPatch, loads: list[tuple[str, str, bool]]) -> None:
    with pytest.raises(ConfigError, match="dtype is 'int3', possible"):
        quality.measure("m", ["int3"])
    assert not loads, "refused before anything is loaded"

    def without_kernels(name: str, *, dtype: str, num_slots: int, **_: Any) -> Any:
        return loaded(tiny_decoder(weights("llama"), num_slots=num_slots), name)

    monkeypatch.setattr(quality, "load_model", without_kernels)
    with pytest.raises(ConfigError, match=r"m in int8 cannot run on the C\+\+ kernels here"):
        quality.measure("m", ["int8"], num_windows=1)


def test_table(loads: list[tuple[str, str, bool]]) -> None:
    rows = quality.measure("m", ["bfloat16"], num_windows=1)
    head, rule, *lines = quality.markdown(rows).splitlines()
    assert head.count("|") == rule.count("|") == lines[0].count("|")
    assert lines[0].startswith("| m | float32 | PyTorch |")
    assert lines[0].endswith("| 1.0000 | 0.00000 | 0.0000 | 100.0% |")
    assert lines[1].startswith("| m | bfloat16 | kernels |")
    assert lines[2].startswith("| m | bfloat16 | PyTorch |")
