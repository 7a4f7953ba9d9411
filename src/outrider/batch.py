"""One forward of a model: work for several sequences, packed into tensors.

A model has computed ``kv.length(seq)`` tokens of a sequence; a forward computes what is missing
(the chain) and, below it, draft nodes (the tree). Prompts, decoding, resuming after preemption and
a drafter's catching up are all this.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch

from outrider.kv import KVCache
from outrider.tree import BoolArray, IntArray, TokenTree

SPREAD = 1.5
"""A sequence is read in place while its window is at most this many times its tokens."""

SLACK = 64
"""... plus this many slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One sequence's share of one forward: catch up ``chain``, then the nodes ``[start:]``.

    Nodes before ``start`` sit in scratch already, computed by earlier forwards. ``logits``:
    whether rows are wanted for the last chain token (if there is a chain) and the new nodes.
    ``apart``: read no slot but the sequence's own. Otherwise slots of others that lie between may
    be read and masked, which is no protection against values that are not numbers.
    """

    seq_id: str
    chain: Seq[int] = ()
    tree: TokenTree = field(default_factory=TokenTree.empty)
    start: int = 0
    logits: bool = True
    apart: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens this forward computes."""
        return len(self.chain) + len(self.tree) - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence's queries and where its keys lie. Q queries, L keys.

    Keys are ``pool[first:last]`` read in place or, where a sequence lies scattered, gathered by
    ``slots`` (int64 ``[L]``; then first = last = 0). ``masks`` has, for each attention window of
    the model (None: full attention), an additive mask ``[Q, L]`` of the model's dtype, or None if
    every query sees every key. ``causal``: Q == L and the full-attention mask is lower triangular.

    ``table``, int64: the slots of the committed tokens, the chain and the nodes of ``work``, in
    this order: all that a kernel needs that follows slots instead of reading windows.
    """

    work: Work
    table: IntArray
    start: int
    stop: int
    first: int
    last: int
    slots: torch.Tensor | None
    masks: dict[int | None, torch.Tensor | None]
    causal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """T packed tokens of B sequences.

    ``input_ids``, ``positions``, ``write_slots``: int64 ``[T]``. ``logit_index``: int64 ``[R]``,
    the tokens whose logits are wanted; ``logit_rows[b]`` is the share of sequence b in them.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    write_slots: torch.Tensor
    rows: tuple[Row, ...]
    logit_index: torch.Tensor
    logit_rows: tuple[slice, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


def build(
    works: Seq[Work],
    kv: KVCache,
    *,
    windows: Seq[int | None] = (None,),
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> ForwardBatch:
    """Pack ``works``. Reserves in ``kv`` the scratch slots that are still missing.

    ``windows``: the attention windows that the model's layers use. Without any, the model follows
    the slot tables itself and makes its own inputs: the tensors then stay on the host. Raises
    OutOfSlots.
    """
    if not windows:
        device = "cpu"  # a copy of each would only wait for the device
    ids: list[IntArray] = []
    positions: list[IntArray] = []
    write: list[IntArray] = []
    index: list[IntArray] = []
    rows: list[Row] = []
    logit_rows: list[slice] = []
    num_tokens = num_logits = 0
    for work in works:
        num_chain, num_nodes = len(work.chain), len(work.tree)
        total = num_chain + num_nodes
        missing = total - len(kv.scratch(work.seq_id))
        if missing > 0:
            kv.reserve(work.seq_id, missing)
        length = kv.length(work.seq_id)
        scratch = kv.scratch(work.seq_id)[:total]
        # Queries in scratch order: the chain, then the nodes that are new.
        place = np.concatenate([np.arange(num_chain), length + num_chain - 1 + work.tree.depths])
        place[:num_chain] += length
        query = np.concatenate([np.arange(num_chain), np.arange(num_chain + work.start, total)])
        num_queries = len(query)
        ids.append(np.concatenate([np.asarray(work.chain, np.int64), work.tree.tokens])[query])
        positions.append(place[query])
        write.append(scratch[query])
        rows.append(
            _row(work, kv.slots(work.seq_id), scratch, place, query, num_tokens, windows).finish(
                dtype, device
            )
        )
        if work.logits:
            first = max(num_chain - 1, 0)
            index.append(np.arange(num_tokens + first, num_tokens + num_queries))
        wanted = len(index[-1]) if work.logits else 0
        logit_rows.append(slice(num_logits, num_logits + wanted))
        num_logits += wanted
        num_tokens += num_queries

    def tensor(arrays: list[IntArray]) -> torch.Tensor:
        joined = np.concatenate(arrays) if arrays else np.empty(0, np.int64)
        return torch.from_numpy(joined.astype(np.int64, copy=False)).to(device)

    return ForwardBatch(
        input_ids=tensor(ids),
        positions=tensor(positions),
        write_slots=tensor(write),
        rows=tuple(rows),
        logit_index=tensor(index),
        logit_rows=tuple(logit_rows),
    )


@dataclass(slots=True)
class _RowPlan:
    """A row before it is turned into tensors; ``masks`` bool ``[Q, L]``, True = sees."""

    work: Work
    table: IntArray
    start: int
    stop: int
    first: int
    last: int
    slots: IntArray | None
    masks: dict[int | None, BoolArray | None]
    causal: bool

    def finish(self, dtype: torch.dtype, device: torch.device | str) -> Row:
        return Row(
            work=self.work,
            table=self.table,
            start=self.start,
            stop=self.stop,
            first=self.first,
            last=self.last,
            slots=None if self.slots is None else torch.from_numpy(self.slots).to(device),
            masks={w: _additive(m, dtype, device) for w, m in self.masks.items()},
            causal=self.causal,
        )


def _additive(
    mask: BoolArray | None, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor | None:
    if mask is None:
        return None
    sees = torch.from_numpy(mask)
    zeros = torch.zeros(mask.shape, dtype=dtype)
    return zeros.masked_fill_(~sees, -torch.inf).to(device)


def _row(
    work: Work,
    committed: IntArray,
    scratch: IntArray,
    place: IntArray,
    query: IntArray,
    start: int,
    windows: Seq[int | None],
) -> _RowPlan:
    num_queries, length = len(query), len(committed)
    slots = np.concatenate([committed, scratch])
    first, last = int(slots.min()), int(slots.max()) + 1
    in_place = not work.apart and last - first <= SPREAD * len(slots) + SLACK
    column = slots - first if in_place else np.arange(len(slots))
    num_keys = last - first if in_place else len(slots)
    in_order = num_keys == len(slots) and bool((column == np.arange(num_keys)).all())
    causal = in_order and length == 0 and num_queries == num_keys and len(work.tree) == 0
    key_position = np.concatenate([np.arange(length), place])
    masks: dict[int | None, BoolArray | None] = {}
    sees: BoolArray | None = None
    for window in windows:
        narrow = window is not None and bool(
            (place[query].max() - key_position.min()) >= window if num_queries else False
        )
        if window is not None and not narrow and None in masks:
            masks[window] = masks[None]
            continue
        if num_queries == 1 and num_keys == len(slots) == length + 1 and not narrow:
            masks[window] = None  # one token that sees everything
            continue
        if sees is None:
            sees = _visible(work, length, query)
        seen = sees
        if narrow:
            assert window is not None
            seen = sees & (place[query][:, None] - key_position[None, :] < window)
        mask = np.zeros((num_queries, num_keys), np.bool_)
        mask[:, column] = seen
        masks[window] = mask
    return _RowPlan(
        work=work,
        table=slots,
        start=start,
        stop=start + num_queries,
        first=first if in_place else 0,
        last=last if in_place else 0,
        slots=None if in_place else slots,
        masks=masks,
        causal=causal,
    )


def _visible(work: Work, length: int, query: IntArray) -> BoolArray:
    """bool ``[Q, length + total]``: [[1, causal, 0], [1, 1, ancestors]]."""
    total = len(work.chain) + len(work.tree)
    sees = np.ones((len(query), length + total), np.bool_)
    sees[:, length:] = visible_among_new(work)[query]
    return sees


def visible_among_new(work: Work) -> BoolArray:
    """Who sees whom among the chain and all nodes of ``work``: bool ``[N, N]``, queries first."""
    num_chain, total = len(work.chain), len(work.chain) + len(work.tree)
    new = np.zeros((total, total), np.bool_)
    new[:num_chain, :num_chain] = np.tri(num_chain, dtype=np.bool_)
    new[num_chain:, :num_chain] = True
    new[num_chain:, num_chain:] = work.tree.ancestors
    return new
