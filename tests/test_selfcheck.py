"""Kernels that compute wrong numbers are seen when they are loaded, and not used."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outrider.errors import ConfigError
from outrider.kernels import library, selfcheck
from outrider.kernels.library import NoKernels, available_sets, load_library

SETS = available_sets()

Break = Callable[[library.Library], None]


def shift_output(lib: library.Library, format: int, by: float, lane: int) -> None:
    """One output of the linears of ``format`` is off."""
    real = lib.linear

    def linear(struct: Any, x: int, rows: int, num: int, y: int, threads: int) -> int:
        code = real(struct, x, rows, num, y, threads)
        if struct._obj.panels[0].format == format:
            stride = -(-struct._obj.rows // 32) * 32
            floats = (ctypes.c_float * (rows * stride)).from_address(y)
            floats[(rows - 1) * stride + lane] += by
        return int(code)

    lib.linear = linear


def change_model(lib: library.Library, change: Callable[[Any, Any], None]) -> None:
    """The layer stack computes another model or batch than it was asked for."""
    real = lib.forward

    def forward(model: Any, batch: Any, scratch: int, threads: int) -> int:
        change(model._obj, batch._obj)
        return int(real(model, batch, scratch, threads))

    lib.forward = forward


def no_window(model: Any, batch: Any) -> None:
    model.layers[1].window = 0


def other_activation(model: Any, batch: Any) -> None:
    model.gelu = 1 - model.gelu


def no_tree(model: Any, batch: Any) -> None:
    counts = ctypes.cast(batch.rows[0].extra_count, ctypes.POINTER(ctypes.c_int32))
    counts[20] = counts[21] = 0


def no_norm(model: Any, batch: Any) -> None:
    model.layers[1].mlp_post_norm = None


def no_rotation(model: Any, batch: Any) -> None:
    model.layers[0].rope = -1


def one_layer(model: Any, batch: Any) -> None:
    batch.last_layer = 1


WRONG: dict[str, Break] = {
    "a linear in bfloat16": lambda lib: shift_output(lib, 0, 0.01, 69),
    "a linear in int8": lambda lib: shift_output(lib, 1, 0.01, 0),
    "a linear in int8_32": lambda lib: shift_output(lib, 2, 0.01, 5),
    "a linear in int4": lambda lib: shift_output(lib, 3, float("nan"), 33),
    "a linear in int6": lambda lib: shift_output(lib, 4, 0.01, 40),
    "the layers in bfloat16 (window)": lambda lib: change_model(lib, no_window),
    "the layers in bfloat16 (activation)": lambda lib: change_model(lib, other_activation),
    "the layers in bfloat16 (tree)": lambda lib: change_model(lib, no_tree),
    "the layers in bfloat16 (norm)": lambda lib: change_model(lib, no_norm),
    "the layers in bfloat16 (rotation)": lambda lib: change_model(lib, no_rotation),
    "the layers in bfloat16 (layers)": lambda lib: change_model(lib, one_layer),
}


@pytest.fixture
def breaking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[str], Break], None]]:
    """Spoils the functions of some instruction sets when they are loaded."""

    def spoil(sets: list[str], how: Break) -> None:
        class Wrong(library.Library):
            def __init__(self, lib: ctypes.CDLL, isa: str) -> None:
                super().__init__(lib, isa)
                if isa in sets:
                    how(self)

        monkeypatch.setattr(library, "Library", Wrong)

    monkeypatch.delenv("OUTRIDER_ISA", raising=False)
    load_library.cache_clear()
    yield spoil
    load_library.cache_clear()


@pytest.mark.parametrize("isa", SETS)
def test_the_numbers_are_right(isa: str) -> None:
    assert selfcheck.fault(load_library(isa)) is None


@pytest.mark.parametrize("what", WRONG)
def test_wrong_numbers_are_seen(breaking: Callable[..., None], what: str) -> None:
    breaking(["plain"], WRONG[what])
    kind = what.partition(" (")[0]
    with pytest.raises(
        NoKernels, match=rf"kernels for 'plain' compute wrong numbers: {kind} (is|are) off"
    ):
        load_library("plain")


def test_the_next_set_takes_over(breaking: Callable[..., None]) -> None:
    if len(SETS) < 2:
        pytest.skip("this CPU has one instruction set")
    breaking([SETS[-1]], WRONG["a linear in int8"])
    with pytest.warns(RuntimeWarning) as said:
        assert load_library().isa == SETS[-2]
    assert len(said) == 1
    text = str(said[0].message)
    assert text.startswith(f"the kernels for {SETS[-1]!r} compute wrong numbers: a linear in int8")
    assert text.endswith(f"; trying {SETS[-2]!r}")


@pytest.mark.filterwarnings("ignore:the kernels for")
def test_no_set_is_right(breaking: Callable[..., None]) -> None:
    breaking(SETS, WRONG["a linear in int4"])
    with pytest.raises(NoKernels, match="'plain' compute wrong numbers: a linear in int4"):
        load_library()


def test_a_named_set_is_refused_rather_than_replaced(
    breaking: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking([SETS[-1]], WRONG["a linear in int8"])
    monkeypatch.setenv("OUTRIDER_ISA", SETS[-1])
    with pytest.raises(ConfigError, match=r"OUTRIDER_ISA is .*wrong numbers.*name another one or"):
        load_library()
