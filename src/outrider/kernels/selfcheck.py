"""Do the kernels of an instruction set compute the right numbers on this machine?

Asked whenever a process loads them, which remembers nothing and costs about 50 ms: each format's
linear, and two tiny layers with a head behind them, against PyTorch on the same rounded weights and
inputs.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from outrider.kernels import library
from outrider.kernels.formats import FORMATS, INPUTS, LANES, Packed, pack, unpack

LINEAR_LIMIT = 1e-4
"""Largest difference of a linear, against the largest output: only float32 sums differ."""

BFLOAT16_LIMIT, INTEGER_LIMIT = 0.005, 0.02
"""Norm of the difference of a token's logits, against their norm: inputs in between are rounded
too, and a last bit can tip one of them to its neighbour."""

HIDDEN, INTER, VOCAB = 96, 96, 70  # not whole groups or panels
HEADS, KV_HEADS, HEAD_DIM = 2, 1, 64
EPS, SCALE = 1e-5, 0.125
WINDOW = 5
NUM_SLOTS = 40


def fault(lib: library.Library) -> str | None:
    """What differs from the reference, in a few words; None if nothing does."""
    rng = np.random.default_rng(0)
    tokens = _Tokens(rng)
    for format in FORMATS:
        error = _linear_error(lib, format, rng)
        if not error < LINEAR_LIMIT:  # also NaN
            return f"a linear in {format} is off by {error:.2g} of its largest output"
        error = _stack_error(lib, format, tokens, rng)
        if not error < (BFLOAT16_LIMIT if format == "bfloat16" else INTEGER_LIMIT):
            return f"the layers in {format} are off by {error:.2g} of a token's logits"
    return None


def _random(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    """float32, mean 0, variance 1."""
    return torch.from_numpy((rng.random(shape, np.float32) - 0.5) * np.float32(12**0.5))


@dataclass(frozen=True, slots=True)
class _Linear:
    """A linear for the kernels, and the float32 ``[rows, cols]`` weights that it stands for."""

    packed: Packed
    weight: torch.Tensor
    bias: torch.Tensor

    @classmethod
    def random(cls, rng: np.random.Generator, rows: int, cols: int, format: str) -> _Linear:
        bias = _random(rng, rows)
        packed = pack(_random(rng, rows, cols) * cols**-0.5, format, bias=bias)
        return cls(packed, unpack(packed), bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, cols]`` -> ``[T, rows]``, the inputs rounded as the kernels round them."""
        x = F.pad(x, (0, self.packed.cols - x.shape[1]))
        if not self.packed.integer:
            seen = x.bfloat16().float()
        else:
            groups = x.view(len(x), -1, INPUTS)
            top = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30)
            seen = ((groups * (127 / top)).round() * (top / 127)).view(len(x), -1)
        return seen @ self.weight.T + self.bias


def _linear_error(lib: library.Library, format: str, rng: np.random.Generator) -> float:
    """The largest error over 1 to 9 rows: each has code of its own, up to 8."""
    linear = _Linear.random(rng, 70, 200, format)
    x = _random(rng, 9, 200)
    expected, struct, errors = linear(x), linear.packed.struct(), []
    for rows in range(1, 10):
        y = torch.full((rows, 96), torch.nan)
        if lib.linear(ctypes.byref(struct), x.data_ptr(), rows, 200, y.data_ptr(), 1):
            return float("inf")
        errors.append((y[:, :70] - expected[:rows]).abs().max())
    return float(torch.stack(errors).max() / expected.abs().max())  # NaN stays NaN


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer of a stack. ``norms``: before and after attention, before and after the MLP."""

    qkv: _Linear
    out: _Linear
    gate_up: _Linear
    down: _Linear
    norms: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]
    qk_norm: torch.Tensor | None
    window: int
    rope: int
    pool: torch.Tensor

    @classmethod
    def random(cls, rng: np.random.Generator, format: str, *, gemma: bool) -> _Layer:
        """With what only Gemma has: a window, norms behind attention and MLP and of the heads."""
        heads = HEADS + KV_HEADS
        before = _random(rng, HIDDEN)
        return cls(
            qkv=_Linear.random(rng, (heads + KV_HEADS) * HEAD_DIM, HIDDEN, format),
            out=_Linear.random(rng, HIDDEN, HEADS * HEAD_DIM, format),
            gate_up=_Linear.random(rng, 2 * INTER, HIDDEN, format),
            down=_Linear.random(rng, HIDDEN, INTER, format),
            norms=(
                before,
                _random(rng, HIDDEN) if gemma else None,
                _random(rng, HIDDEN),
                _random(rng, HIDDEN) if gemma else None,
            ),
            qk_norm=_random(rng, heads, HEAD_DIM) if gemma else None,
            window=WINDOW if gemma else 0,
            rope=0 if gemma else 1,
            pool=torch.zeros(NUM_SLOTS, 2 * KV_HEADS, HEAD_DIM, dtype=torch.bfloat16),
        )

    def struct(self) -> library.Layer:
        return library.Layer(
            qkv=self.qkv.packed.struct(),
            out=self.out.packed.struct(),
            gate_up=self.gate_up.packed.struct(),
            down=self.down.packed.struct(),
            attention_norm=_pointer(self.norms[0]),
            attention_post_norm=_pointer(self.norms[1]),
            mlp_norm=_pointer(self.norms[2]),
            mlp_post_norm=_pointer(self.norms[3]),
            qk_norm=_pointer(self.qk_norm),
            pool=_pointer(self.pool),
            window=self.window,
            rope=self.rope,
        )


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class _Tokens:
    """Two sequences, on slots in no order: 20 tokens and 2 nodes of a tree that do not see each
    other, 3 tokens."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.slots = rng.permutation(NUM_SLOTS)[:25].astype(np.int64)
        self.x = _random(rng, 25, HIDDEN)
        angle = _random(rng, 2, 25, HEAD_DIM // 2)
        self.cos = torch.cat([angle.cos(), angle.cos()], -1)
        self.sin = torch.cat([-angle.sin(), angle.sin()], -1)
        self.prefix = np.array([*range(1, 21), 20, 20, 1, 2, 3], np.int32)
        self.extra = np.array([0] * 20 + [1, 1] + [0] * 3, np.int32)
        self.visible = {window: self.seen(window) for window in (0, WINDOW)}
        self.logits = np.array([0, 15, 16, 19, 20, 21, 24], np.int64)

    def rows(self) -> ctypes.Array[library.Row]:
        """What the kernels are told. Valid as long as this object lives."""
        return (library.Row * 2)(self._row(0, 22), self._row(22, 25))

    def _row(self, start: int, stop: int) -> library.Row:
        return library.Row(
            start=start,
            stop=stop,
            extra_stride=1,
            prefix=self.slots[start:].ctypes.data,
            extra=self.slots[start:].ctypes.data,
            prefix_count=self.prefix[start:].ctypes.data,
            extra_count=self.extra[start:].ctypes.data,
        )

    def seen(self, window: int) -> torch.Tensor:
        """bool ``[25, 25]``: which tokens a token sees. A window of 0 sees all."""
        seen = np.zeros((25, 25), bool)
        for token, count in enumerate(self.prefix):
            start = 0 if token < 22 else 22
            tree = [token] if self.extra[token] else []
            seen[token, [*range(start, start + count), *tree][-window:]] = True
        return torch.from_numpy(seen)


def _stack_error(
    lib: library.Library, format: str, tokens: _Tokens, rng: np.random.Generator
) -> float:
    layers = [_Layer.random(rng, format, gemma=gemma) for gemma in (False, True)]
    head, norm = _Linear.random(rng, VOCAB, HIDDEN, format), _random(rng, HIDDEN)
    gelu = int(format != "int8")  # the activation knows nothing of formats: each of both once
    got = _run(lib, tokens, layers, head, norm, gelu)
    expected = _reference(tokens, layers, head, norm, gelu)
    return float(((got - expected).norm(dim=1) / expected.norm(dim=1)).max())


def _run(
    lib: library.Library,
    tokens: _Tokens,
    layers: list[_Layer],
    head: _Linear,
    norm: torch.Tensor,
    gelu: int,
) -> torch.Tensor:
    """Logits ``[7, VOCAB]`` of the kernels, NaN if they refuse."""
    structs = (library.Layer * 2)(*(layer.struct() for layer in layers))
    model = library.Model(
        layers=structs,
        num_layers=2,
        hidden=HIDDEN,
        intermediate=INTER,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        gelu=gelu,
        eps=EPS,
        attention_scale=SCALE,
        final_norm=norm.data_ptr(),
        head=head.packed.struct(),
    )
    x, logits = tokens.x.clone(), torch.full((len(tokens.logits), VOCAB), torch.nan)
    tables = [
        (ctypes.c_void_p * 2)(*(one.data_ptr() for one in table))
        for table in (tokens.cos, tokens.sin)
    ]
    batch = library.Batch(
        num_tokens=len(x),
        num_rows=2,
        num_logits=len(logits),
        first_layer=0,
        last_layer=2,
        rows=tokens.rows(),
        write_slots=tokens.slots.ctypes.data,
        logit_index=tokens.logits.ctypes.data,
        cos=tables[0],
        sin=tables[1],
        x=x.data_ptr(),
        logits=logits.data_ptr(),
        hidden=None,
    )
    scratch = lib.scratch()
    try:
        failed = lib.forward(ctypes.byref(model), ctypes.byref(batch), scratch, 1)
    finally:
        lib.scratch_free(scratch)
    return logits * torch.nan if failed else logits


def _rms(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    if weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def _reference(
    tokens: _Tokens, layers: list[_Layer], head: _Linear, norm: torch.Tensor, gelu: int
) -> torch.Tensor:
    """Logits ``[7, VOCAB]`` of the same stack on PyTorch."""
    x = tokens.x
    for layer in layers:
        before, after, mlp_before, mlp_after = layer.norms
        attended = _attend(tokens, layer, layer.qkv(_rms(x, before)))
        x = x + _rms(layer.out(attended), after)
        # Panels of gate and up lie in turn.
        both = layer.gate_up(_rms(x, mlp_before)).view(len(x), -1, 2, LANES)
        gate, up = both[:, :, 0].flatten(1), both[:, :, 1].flatten(1)
        gate = F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)
        x = x + _rms(layer.down(gate * up), mlp_after)
    return head(_rms(x[torch.from_numpy(tokens.logits)], norm))


def _attend(tokens: _Tokens, layer: _Layer, qkv: torch.Tensor) -> torch.Tensor:
    """Outputs of attention, ``[T, HEADS * HEAD_DIM]``."""
    heads = qkv.view(len(qkv), -1, HEAD_DIM)
    qk, values = heads[:, : HEADS + KV_HEADS], heads[:, HEADS + KV_HEADS :]
    qk = _rms(qk, layer.qk_norm)
    cos, sin = tokens.cos[layer.rope][:, None], tokens.sin[layer.rope][:, None]
    qk = qk * cos + qk.roll(HEAD_DIM // 2, -1) * sin
    queries, keys = qk[:, :HEADS], qk[:, HEADS:].bfloat16().float()
    scores = (queries[:, None] * keys).sum(-1).mul_(SCALE)  # [query, key, head]
    unseen = ~tokens.visible[layer.window][..., None]
    law = scores.masked_fill(unseen, -torch.inf).softmax(1)
    mixed = (law[..., None] * values.bfloat16().float()).sum(1)
    return mixed.flatten(1)
