"""Weights through torchao on CUDA: what is refused, and what can be tried on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from outrider.batch import Work, build
from outrider.errors import ConfigError
from outrider.models import load as loading
from outrider.models import quantize
from outrider.models.decoder import Decoder
from outrider.models.graphs import GraphDecoder
from outrider.models.load import _for_cuda, load
from outrider.models.resources import weight_format
from tiny import tiny_config, tiny_decoder, tiny_hf

CUDA = torch.device("cuda")


def card(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, minor))


def decoder(**changes: Any) -> Decoder:
    return tiny_decoder(tiny_hf(tiny_config("llama", **changes)), dtype=torch.bfloat16)


class FakeTorchao(SimpleNamespace):
    """Notes which linears got which settings, by their names, instead of converting them."""

    def __init__(self) -> None:
        super().__init__(PerRow=lambda: "row")
        self.calls: list[tuple[dict[str, Any], list[str]]] = []
        self.Int8WeightOnlyConfig = self.Int4WeightOnlyConfig = dict
        self.Float8DynamicActivationFloat8WeightConfig = dict

    def quantize_(
        self, model: nn.Module, config: dict[str, Any], filter_fn: Callable[[nn.Module, str], bool]
    ) -> None:
        taken = [name for name, module in model.named_modules() if filter_fn(module, name)]
        self.calls.append((config, taken))


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> FakeTorchao:
    fake = FakeTorchao()
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(quantization=fake))
    monkeypatch.setitem(sys.modules, "torchao.quantization", fake)
    return fake


@pytest.mark.parametrize(
    ("format", "capability", "said"),
    [
        ("fp8", (8, 6), "dtype fp8 needs compute capability 8.9, cuda has 8.6; use bfloat16"),
        ("int4", (7, 5), "dtype int4 needs compute capability 8.0, cuda has 7.5"),
        ("int8", (7, 0), "dtype int8 needs compute capability 7.5, cuda has 7.0"),
    ],
)
def test_cards_that_are_too_old(
    monkeypatch: pytest.MonkeyPatch,
    torchao: FakeTorchao,
    format: str,
    capability: tuple[int, int],
    said: str,
) -> None:
    card(monkeypatch, *capability)
    with pytest.raises(ConfigError, match=said):
        quantize.check_format(format, CUDA)
    card(monkeypatch, 9, 0)
    quantize.check_format(format, CUDA)


def test_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch, 9, 0)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ConfigError, match=r"needs torchao .*'outrider\[quant\]'") as raised:
        quantize.check_format("int8", CUDA)
    assert "\n" not in str(raised.value)


def test_a_load_says_so_before_it_reads_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch, 9, 0)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    monkeypatch.setattr(loading, "usable_device", lambda _: CUDA)
    with pytest.raises(ConfigError, match="dtype int8 on CUDA needs torchao"):
        load("no such model", dtype="int8", device="cuda", fetch=False)


def test_on_the_cpu() -> None:
    with pytest.raises(ConfigError, match="dtype fp8 runs on CUDA only, device is cpu; use int8"):
        load("smollm2-135m-instruct", dtype="fp8", fetch=False)
    with pytest.raises(ConfigError, match="runs on CUDA only, device is cpu"):
        quantize.quantize(decoder(), "int8")
    with pytest.raises(ConfigError, match=r"possible: float32, .*int8, int4, fp8"):
        weight_format("fp4")


def test_what_loading_makes_for_cuda() -> None:
    made = decoder()
    model = _for_cuda(made, "bfloat16")
    assert isinstance(model, GraphDecoder)
    assert model.decoder is made
    with pytest.raises(ConfigError, match="runs on CUDA only"):
        _for_cuda(made, "int4")


def test_every_linear_gets_its_format_once(torchao: FakeTorchao) -> None:
    model = decoder(hidden_size=64, intermediate_size=96, vocab_size=112)
    linears = sorted(name for name, module in model.named_modules() if type(module) is nn.Linear)
    assert len(linears) == 4 * 3 + 1
    quantize.convert(model, "int4")
    taken = {config["group_size"]: names for config, names in torchao.calls}
    assert taken.keys() == {32, 64}
    assert taken[32] == [name for name in taken[32] if name.endswith("down")]  # 96 inputs
    assert sorted(taken[32] + taken[64]) == linears
    for format in ("int8", "fp8"):
        torchao.calls.clear()
        quantize.convert(model, format)
        ((config, names),) = torchao.calls
        assert sorted(names) == linears
        assert config["set_inductor_config"] is False
        assert config.get("granularity") == ("row" if format == "fp8" else None)


@pytest.mark.parametrize(
    ("format", "said"),
    [
        ("int4", "inputs are a multiple of 32, this model has one of 40"),
        ("fp8", "sizes are multiples of 16, this model has one of 40 x 32; use int8"),
    ],
)
def test_sizes_that_a_format_does_not_take(torchao: FakeTorchao, format: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        quantize.convert(decoder(), format)
    assert not torchao.calls  # nothing is half converted


@pytest.mark.parametrize("tied", [False, True])
def test_int8_is_near_bfloat16(tied: bool) -> None:
    pytest.importorskip("torchao.quantization", exc_type=ImportError)
    logits = []
    for format in ("bfloat16", "int8"):
        made = decoder(tie_word_embeddings=tied)
        if format == "int8":
            quantize.convert(made, format)
            assert type(made.layers[0].down.weight) is not nn.Parameter
            assert type(made.head.weight) is not nn.Parameter
            assert type(made.embedding) is nn.Parameter  # a tied one stays as it is
        model = GraphDecoder(made)
        model.kv.open("a")
        batch = build([Work(seq_id="a", chain=[5, 6, 7])], model.kv, windows=model.windows)
        logits.append(model.forward(batch).logits.float())
    error = float((logits[1] - logits[0]).norm() / logits[0].norm())
    assert 0.0 < error < 0.05
