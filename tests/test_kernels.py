"""The C++ kernels against their PyTorch twins, on every instruction set this CPU has."""

from __future__ import annotations

import ctypes
import mmap
import threading

import numpy as np
import pytest
import torch

from outrider.batch import Work, build
from outrider.kernels.formats import FORMATS, INPUTS, Packed, huge_bytes, pack, unpack
from outrider.kernels.library import available_sets, load_library
from outrider.models.decoder import Decoder
from outrider.models.native import NativeDecoder
from outrider.tree import TokenTree
from tiny import FAMILIES, tiny_config, tiny_decoder, tiny_hf

TREE = TokenTree.from_paths([[1, 2, 3], [1, 4], [5, 6, 7], [5, 8]])


def run_linear(packed: Packed, x: torch.Tensor, isa: str, threads: int) -> torch.Tensor:
    y = torch.full((len(x), -(-packed.rows // 32) * 32), torch.nan)
    struct = packed.struct()
    x = x.contiguous()
    code = load_library(isa).linear(
        ctypes.byref(struct), x.data_ptr(), len(x), x.shape[1], y.data_ptr(), threads
    )
    assert code == 0
    return y[:, : packed.rows]


def twin_input(packed: Packed, x: torch.Tensor) -> torch.Tensor:
    """What the kernels see of ``x``: bfloat16, or int8 with a scale for each group."""
    padded = torch.nn.functional.pad(x, (0, packed.cols - x.shape[1]))
    if not packed.integer:
        return padded.bfloat16().float()
    groups = padded.view(len(x), -1, INPUTS)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    return ((groups / torch.where(scale == 0, 1.0, scale)).round() * scale).view(len(x), -1)


@pytest.mark.parametrize("isa", available_sets())
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(96, 128), (70, 100), (33, 576), (1, 8), (64, 32)])
def test_linear_equals_its_twin(isa: str, format: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(shape), torch.randn(shape[0])
    packed = pack(weight, format, bias=bias)
    twin = unpack(packed)
    for num_rows in (1, 2, 7, 8, 9, 17):
        x = torch.randn(num_rows, shape[1])
        expected = twin_input(packed, x) @ twin.T + bias
        got = run_linear(packed, x, isa, threads=2)
        assert torch.allclose(got, expected, atol=1e-3), (got - expected).abs().max()
        # Bit for bit whatever the number of rows and threads.
        assert torch.equal(got, run_linear(packed, x, isa, threads=1))
        assert torch.equal(got[-1:], run_linear(packed, x[-1:], isa, threads=2))


def test_thread_counts_change_between_runs() -> None:
    """A thread that takes no part in a run must not take up a later one halfway, or twice."""
    torch.manual_seed(2)
    packed, x = pack(torch.randn(256, 64), "bfloat16"), torch.randn(3, 64)
    isa = available_sets()[-1]
    expected = run_linear(packed, x, isa, 1)
    for turn in range(600):
        threads = (6, 2, 6, 3, 1, 2)[turn % 6]
        assert torch.equal(run_linear(packed, x, isa, threads), expected), turn


def test_runs_from_several_python_threads() -> None:
    torch.manual_seed(2)
    packed, x = pack(torch.randn(256, 64), "int8"), torch.randn(3, 64)
    isa = available_sets()[-1]
    expected = run_linear(packed, x, isa, 1)
    wrong: list[int] = []

    def run(threads: int) -> None:
        for _ in range(100):
            if not torch.equal(run_linear(packed, x, isa, threads), expected):
                wrong.append(threads)

    callers = [threading.Thread(target=run, args=(threads,)) for threads in (1, 2, 3, 4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.parametrize(("format", "limit"), [("bfloat16", 0.005), ("int8", 0.01), ("int4", 0.12)])
def test_packing_stays_close(format: str, limit: float) -> None:
    torch.manual_seed(1)
    weight = torch.randn(64, 256)
    error = unpack(pack(weight, format))[:, :256] - weight
    assert error.norm() / weight.norm() < limit


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_none(format: str, bad: float) -> None:
    packed = pack(torch.randn(32, 64), format)
    x = torch.zeros(1, 64)
    x[0, 5] = bad
    assert not torch.isfinite(run_linear(packed, x, available_sets()[-1], 1)).any()


def decoder_pair(family: str, format: str, **options: object) -> tuple[Decoder, NativeDecoder]:
    """A float32 decoder with the rounded weights, and the kernels'."""
    config = tiny_config(family, head_dim=64, hidden_size=128, intermediate_size=160)
    hf = tiny_hf(config)
    twin = tiny_decoder(hf)
    with torch.no_grad():
        for layer in twin.layers:
            for linear in (layer.qkv, layer.out, layer.gate_up, layer.down):
                rounded = unpack(pack(linear.weight.bfloat16(), format))
                linear.weight.copy_(rounded[:, : linear.weight.shape[1]])
        rounded = unpack(pack(twin.head.weight.bfloat16(), format))[:, : config.hidden_size]
        twin.head.weight = torch.nn.Parameter(rounded, requires_grad=False)
        twin.embedding.copy_(twin.embedding.bfloat16())
    native = NativeDecoder(tiny_decoder(hf, dtype=torch.bfloat16), format, **options)
    return twin, native


def run_steps(model: Decoder | NativeDecoder) -> list[torch.Tensor]:
    """Logits and hidden states of a prompt, a tree under it and a tree after a branch."""
    rng = np.random.default_rng(0)

    def tokens(number: int) -> list[int]:
        return rng.integers(0, model.vocab_size, number).tolist()

    steps = [
        ([Work(seq_id="a", chain=tokens(21)), Work(seq_id="b", chain=tokens(3))], []),
        ([Work(seq_id="a", chain=tokens(1), tree=TREE), Work(seq_id="b", chain=tokens(2))], [4, 6]),
        ([Work(seq_id="a", chain=tokens(1)), Work(seq_id="b", chain=tokens(1), tree=TREE)], []),
    ]
    outputs: list[torch.Tensor] = []
    model.kv.open("a")
    model.kv.open("b")
    for works, path in steps:
        batch = build(works, model.kv, windows=model.windows, dtype=model.dtype)
        forward = model.forward(batch, hidden_layers=(0, 1, 3))
        assert forward.hidden is not None
        outputs += [forward.logits.float(), forward.hidden.float()]
        for work in works:
            nodes = path if work.seq_id == "a" and len(work.tree) else []
            keep = [*range(len(work.chain)), *(len(work.chain) + node for node in nodes)]
            kept = [*work.chain, *(int(work.tree.tokens[node]) for node in nodes)]
            model.kv.commit(work.seq_id, np.array(keep, np.int64), kept)
    return outputs


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("format", FORMATS)
def test_decoder_equals_its_twin(family: str, format: str) -> None:
    twin, native = decoder_pair(family, format, threads=2)
    for got, expected in zip(run_steps(native), run_steps(twin), strict=True):
        # The twin keeps inputs and the pool in float32: what remains is their rounding.
        error = (got - expected).norm() / expected.norm()
        assert error < 0.06, error


@pytest.mark.parametrize("isa", available_sets())
def test_instruction_sets_agree(isa: str) -> None:
    best = run_steps(decoder_pair("gemma3", "int8", threads=2)[1])
    this = run_steps(decoder_pair("gemma3", "int8", threads=1, isa=isa)[1])
    for got, expected in zip(this, best, strict=True):
        assert (got - expected).norm() / expected.norm() < 0.02


@pytest.mark.parametrize("isa", available_sets())
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2-sliding"])
def test_rows_do_not_depend_on_the_batch(family: str, format: str, isa: str) -> None:
    """Every node of a tree has the bits of its path computed token by token."""
    _, native = decoder_pair(family, format, isa=isa, threads=2)
    rng = np.random.default_rng(3)
    prompt = rng.integers(0, native.vocab_size, 19).tolist()

    def logits(works: list[Work]) -> torch.Tensor:
        return native.forward(build(works, native.kv, windows=())).logits

    native.kv.open("other")
    other = Work(seq_id="other", chain=rng.integers(0, native.vocab_size, 5).tolist())
    native.kv.open("tree")
    together = logits([other, Work(seq_id="tree", chain=prompt, tree=TREE)])[1:]
    for node in range(-1, len(TREE)):
        native.kv.open("path")
        for token in [*prompt, *TREE.path_tokens(node)]:
            alone = logits([Work(seq_id="path", chain=[token])])
            native.kv.commit("path", np.arange(1), [token])
        native.kv.close("path")
        assert torch.equal(alone[0], together[node + 1]), node


class NoHugePages(mmap.mmap):
    """A mapping of a system without huge pages."""

    def madvise(self, *args: int) -> None:
        raise OSError(22, "Invalid argument")


def test_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.kernels.formats.mmap.mmap", NoHugePages)
    memory = huge_bytes(100)
    assert len(memory) == 100
    assert not memory.any()
