"""The decoder on the C++ kernels: one call for the whole layer stack.

Same weights, pool and protocol as :class:`outrider.models.decoder.Decoder`, which stays its twin:
the tests compare the two. A row's numbers do not depend on how many rows a forward has, in which
slots the tokens lie, or on the number of threads, so speculative decoding is bit-exact here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Container, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from outrider.batch import ForwardBatch, Row
from outrider.errors import BadFile
from outrider.kernels import library
from outrider.kernels.formats import (
    LANES,
    Packed,
    Panels,
    alternate,
    join,
    quantise,
    values_of,
)
from outrider.models.base import Forward, checked_depth
from outrider.models.config import DecoderConfig
from outrider.models.decoder import Decoder, Layer
from outrider.models.rope import RopeTable

HEAD_STEP = 64
"""Heads are read in whole groups of inputs of the linear behind them."""


def why_not(config: DecoderConfig) -> str | None:
    """Why the kernels cannot run a model of ``config`` here; None if they can."""
    if config.head_dim % HEAD_STEP:
        return f"heads of {config.head_dim} numbers; multiples of {HEAD_STEP} are built"
    try:
        library.load_library()
    except library.NoKernels as error:
        return str(error)
    return None


def round_weights(decoder: Decoder, format: str, *, keep: Container[str] = ()) -> None:
    """Give the linears of ``decoder``, in place, the values of the kernels' ``format``, rounded to
    the decoder's dtype: what stands in for the kernels where they cannot run. ``keep``: names as
    in :meth:`Decoder.matrices` of weights that stay as they are."""
    matrices = decoder.matrices()
    head = list(matrices)[-1]
    for name, weight in matrices.items():
        if name in keep:
            continue
        rounded = values_of(quantise(weight, format))[: len(weight), : weight.shape[1]]
        if name != head:
            weight.copy_(rounded)
            continue
        # A new tensor: the head may share its weights with the embedding, which is not rounded.
        rounded = rounded.to(weight.dtype)
        decoder.head.weight = torch.nn.Parameter(rounded, requires_grad=False)


class NativeDecoder:
    """Takes over a bfloat16 ``decoder`` on the CPU; its linears are packed as ``format`` and
    dropped. ``stored``: ready panels to take instead, by the names of :meth:`Decoder.matrices`.
    ``threads`` 0 takes PyTorch's number at each call. Raises NoKernels where :func:`why_not` gives
    a reason."""

    windows: tuple[int | None, ...] = ()
    """No masks are needed: the kernels follow the slot table."""

    def __init__(
        self,
        decoder: Decoder,
        format: str,
        *,
        stored: Mapping[str, Panels] | None = None,
        threads: int = 0,
        isa: str | None = None,
    ) -> None:
        reason = why_not(decoder.config)
        if reason is not None:
            raise library.NoKernels(reason)
        self.config = decoder.config
        self.vocab_size, self.hidden_size = decoder.vocab_size, decoder.hidden_size
        self.context_length, self.num_layers = decoder.context_length, decoder.num_layers
        self.dtype, self.device, self.kv = torch.float32, decoder.device, decoder.kv
        self.format, self.threads = format, threads
        self.embedding = decoder.embedding
        self._embed_scale = decoder.config.embed_scale
        self._pools = [layer.pool for layer in decoder.layers]
        self._library = library.load_library(isa)
        self.isa = self._library.isa
        self._scratch = self._library.scratch()
        self._tables = [
            RopeTable(rope, length=0, dtype=torch.float32, device=self.device)
            for rope in decoder.config.ropes
        ]
        self._kept: list[Any] = []  # what the structures point to
        self.packed: list[Packed] = []
        self._model = self._describe(decoder, stored or {})

    def __del__(self) -> None:
        if getattr(self, "_scratch", None):
            self._library.scratch_free(self._scratch)

    # Building.

    def _describe(self, decoder: Decoder, stored: Mapping[str, Panels]) -> library.Model:
        c = self.config
        matrices = decoder.matrices()
        head = list(matrices)[-1]

        def panels(name: str) -> Panels:
            shape = matrices[name].shape
            if name not in stored:
                return quantise(matrices[name], self.format)
            if stored[name].shape != shape:
                raise BadFile(
                    f"tensor {name} has shape {stored[name].shape}, expected {tuple(shape)}; "
                    "the weights do not belong to this configuration"
                )
            return stored[name]

        layers = (library.Layer * self.num_layers)()
        for i, layer in enumerate(decoder.layers):
            layers[i] = self._layer(layer, f"layers.{i}.", panels)
            for linear in (layer.qkv, layer.out, layer.gate_up, layer.down):
                linear.weight = torch.nn.Parameter(linear.weight[:0].clone(), requires_grad=False)
            matrices = {n: w for n, w in matrices.items() if not n.startswith(f"layers.{i}.")}
        self._kept.append(layers)
        model = library.Model(
            layers=ctypes.cast(layers, ctypes.POINTER(library.Layer)),
            num_layers=self.num_layers,
            hidden=c.hidden_size,
            intermediate=c.intermediate_size,
            num_heads=c.num_heads,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            gelu=int(c.activation != "silu"),
            eps=c.norm_eps,
            attention_scale=c.attention_scale,
            final_norm=self._vector(decoder.norm),
            head=self._add(join([panels(head)])),
        )
        if not c.tied:
            empty = decoder.head.weight[:0].clone()
            decoder.head.weight = torch.nn.Parameter(empty, requires_grad=False)
        return model

    def _layer(self, layer: Layer, prefix: str, panels: Callable[[str], Panels]) -> library.Layer:
        def part(name: str) -> Panels:
            return panels(f"{prefix}{name}_proj.weight")

        bias = layer.gate_up.bias
        qkv = [part(f"self_attn.{name}") for name in "qkv"]
        return library.Layer(
            qkv=self._add(join(qkv, bias=layer.qkv.bias)),
            out=self._add(join([part("self_attn.o")], bias=layer.out.bias)),
            gate_up=self._add(
                alternate(
                    part("mlp.gate"),
                    part("mlp.up"),
                    bias=None if bias is None else _alternate(*bias.chunk(2)),
                )
            ),
            down=self._add(join([part("mlp.down")], bias=layer.down.bias)),
            attention_norm=self._vector(layer.attention_norm),
            mlp_norm=self._vector(layer.mlp_norm),
            attention_post_norm=self._vector(layer.attention_post_norm),
            mlp_post_norm=self._vector(layer.mlp_post_norm),
            qk_norm=self._vector(layer.qk_norm),
            pool=layer.pool.data_ptr(),
            window=layer.window or 0,
            rope=-1 if layer.rope is None else layer.rope,
        )

    def _add(self, packed: Packed) -> library.Linear:
        self.packed.append(packed)
        return packed.struct()

    def _vector(self, weight: torch.Tensor | None) -> int | None:
        if weight is None:
            return None
        vector = weight.detach().float().contiguous()
        self._kept.append(vector)
        return vector.data_ptr()

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one forward reads."""
        return sum(packed.num_bytes for packed in self.packed)

    # Running.

    def forward(
        self,
        batch: ForwardBatch,
        *,
        hidden_layers: Seq[int] = (),
        num_layers: int | None = None,
    ) -> Forward:
        """Compute a batch; see :meth:`outrider.models.base.Model.forward`.

        Logits and hidden states are float32. Raises ValueError for a layer that does not exist or
        is not reached, and MemoryError.
        """
        depth = checked_depth(self.num_layers, num_layers, hidden_layers)
        num_tokens, num_logits = batch.num_tokens, len(batch.logit_index)
        x = F.embedding(batch.input_ids, self.embedding).float()
        if self._embed_scale != 1.0:
            x.mul_(self._embed_scale)
        logits = torch.empty(num_logits, self.vocab_size)
        states = {layer: torch.empty(num_tokens, self.hidden_size) for layer in hidden_layers}
        keep: list[Any] = []
        rotations = [table(batch.positions) for table in self._tables]
        cos = [c.contiguous() for c, _ in rotations]
        sin = [s.contiguous() for _, s in rotations]
        rows = (library.Row * len(batch.rows))(*(_row(row, keep) for row in batch.rows))
        wanted = [0] * (self.num_layers + 1)
        for layer, state in states.items():
            wanted[layer] = state.data_ptr()
        described = library.Batch(
            num_tokens=num_tokens,
            num_rows=len(batch.rows),
            num_logits=num_logits,
            first_layer=0,
            last_layer=depth,
            rows=rows,
            write_slots=batch.write_slots.data_ptr(),
            logit_index=batch.logit_index.data_ptr(),
            cos=_pointers([c.data_ptr() for c in cos]),
            sin=_pointers([s.data_ptr() for s in sin]),
            x=x.data_ptr(),
            logits=logits.data_ptr(),
            hidden=_pointers(wanted) if hidden_layers else None,
        )
        failed = self._library.forward(
            ctypes.byref(self._model),
            ctypes.byref(described),
            self._scratch,
            self.threads or torch.get_num_threads(),
        )
        if failed:
            raise MemoryError(f"no memory or threads for a forward of {num_tokens} tokens")
        hidden = torch.cat([states[i] for i in hidden_layers], dim=1) if hidden_layers else None
        return Forward(logits=logits, hidden=hidden)

    def scrub(self, slots: Seq[int]) -> None:
        """Zero the pool's ``slots`` in every layer."""
        index = torch.as_tensor(slots, dtype=torch.int64)
        for pool in self._pools:
            pool.index_fill_(0, index, 0.0)


def _alternate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Biases of panels of gate and up in turn, each filled up with zeros to 32."""
    parts = [F.pad(part, (0, -len(part) % LANES)).view(-1, LANES) for part in (gate, up)]
    return torch.stack(parts, 1).flatten()


def _pointers(values: list[int]) -> Any:
    return (ctypes.c_void_p * max(1, len(values)))(*values)


def _row(row: Row, keep: list[Any]) -> library.Row:
    """The keys of a row's queries, in the order of their positions. Arrays go to ``keep``."""
    work, num_queries = row.work, row.stop - row.start
    num_chain, tree, start = len(work.chain), work.tree, work.start
    shared = len(row.table) - len(tree)  # committed tokens and chain
    prefix_count = np.full(num_queries, shared, np.int32)
    prefix_count[:num_chain] = np.arange(shared - num_chain + 1, shared + 1)
    extra_count = np.zeros(num_queries, np.int32)
    new = tree.depths[start:]
    extra_count[num_chain:] = new
    stride = int(new.max()) if len(new) else 1
    extra = np.zeros((num_queries, stride), np.int64)
    for place, node in enumerate(range(start, len(tree))):
        path = np.flatnonzero(tree.ancestors[node])
        extra[num_chain + place, : len(path)] = row.table[shared + path]
    keep += [row.table, prefix_count, extra, extra_count]
    return library.Row(
        start=row.start,
        stop=row.stop,
        extra_stride=stride,
        prefix=row.table.ctypes.data,
        extra=extra.ctypes.data,
        prefix_count=prefix_count.ctypes.data,
        extra_count=extra_count.ctypes.data,
    )
