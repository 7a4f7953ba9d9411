"""The profile command on a tiny model: that its measurements are there, not how long they are."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from outrider.bench import profile as profiling
from outrider.bench.report import write_json
from outrider.errors import ConfigError
from outrider.kernels.library import available_sets, load_library
from outrider.models.load import LoadedModel
from outrider.models.native import NativeDecoder
from tiny import tiny_config, tiny_decoder, tiny_hf


def loaded(*, native: bool, num_slots: int = 512) -> LoadedModel:
    hf = tiny_hf(tiny_config("llama", head_dim=64, hidden_size=128, intermediate_size=160))
    decoder = tiny_decoder(hf, dtype=torch.bfloat16, num_slots=num_slots)
    return LoadedModel(
        name="tiny",
        model=NativeDecoder(decoder, "int8") if native else decoder,
        tokenizer=PreTrainedTokenizerFast.__new__(PreTrainedTokenizerFast),
        end_tokens=frozenset(),
        path=Path("tiny"),
        fingerprint="0",
    )


@pytest.mark.parametrize("native", [True, False])
def test_profile(native: bool, tmp_path: Path) -> None:
    model = loaded(native=native)
    result = profiling.profile(model, "int8", sizes=(1, 2, 8), contexts=(4, 40), repeats=2)
    assert list(result.t_of_m) == ["1", "2", "8"]
    assert list(result.t_by_context) == ["4", "40"]
    assert result.t_of_m == result.t_by_context["40"]
    assert all(t > 0 for times in result.t_by_context.values() for t in times.values())
    assert result.largest_speedup >= 1.0
    assert (result.bandwidth is not None) == native
    if native:
        assert result.parts["linears"] + result.parts["rest"] == pytest.approx(
            result.parts["whole"]
        )
        assert result.weight_bytes == model.model.weight_bytes
    assert model.model.kv.num_free == 512, "the profile left something in the pool"
    write_json(tmp_path / "out.json", asdict(result))
    assert json.loads((tmp_path / "out.json").read_text())["t_of_m"] == result.t_of_m
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_contexts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no room to profile 64 tokens .* the KV pool holds 16"):
        profiling.profile(loaded(native=True, num_slots=16), "int8")
    model = loaded(native=False, num_slots=100)
    assert profiling.longest_context(model.model, (1, 8)) == 56
    with pytest.raises(ConfigError, match="57 tokens and 8 more do not fit; expected at most 56"):
        profiling.profile(model, "int8", sizes=(1, 8), contexts=(4, 57), repeats=1)


def test_profiles_are_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    by_kernels = profiling.stored_path(loaded(native=True), "int8")
    by_pytorch = profiling.stored_path(loaded(native=False), "int8")
    assert by_kernels != by_pytorch
    assert available_sets()[-1] in by_kernels.name or load_library().isa in by_kernels.name
    assert "-cpu-pytorch-" in by_pytorch.name


def test_plots_are_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"outrider\[bench\]"):
        profiling.check_plots()


@pytest.mark.parametrize("isa", available_sets())
def test_read_sums_everything(isa: str) -> None:
    data = torch.arange(512 * 8, dtype=torch.int64)
    for threads in (1, 2, 3):
        assert load_library(isa).read(data.data_ptr(), data.numel() * 8, threads) == data.sum()
