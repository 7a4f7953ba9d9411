"""Attention of packed rows to the KV pool, on PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from outrider.batch import Row


class Attention(Protocol):
    """How the queries of one forward reach their keys."""

    def __call__(
        self, query: torch.Tensor, pool: torch.Tensor, window: int | None, scale: float
    ) -> torch.Tensor:
        """Attention of a layer with this ``window``; ``[T, H * D]``.

        ``query`` ``[T, H, D]``. ``pool`` ``[2, Hkv, num_slots, D]``: keys and values, in which
        those of this forward are written already.
        """
        ...


FOLD_LIMIT = 32
"""Up to this many queries, the query heads that share a key-value head become its queries, so
that keys are read once per key-value head. With more queries the mask would have to be repeated
at a size that matters, and keys stay in the processor's cache anyhow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """One row under one attention window. ``mask``: additive, ``[Q * G, L]`` if ``fold`` (G query
    heads per key-value head), else ``[Q, L]``; None if every query sees every key or ``causal``."""

    row: Row
    mask: torch.Tensor | None
    causal: bool
    fold: bool


def plan_rows(
    rows: Seq[Row], windows: Seq[int | None], groups: int
) -> dict[int | None, list[RowPlan]]:
    """What attention needs of each row, once per forward, for every window of the model.

    ``groups``: query heads per key-value head. Rows without queries are left out.
    """
    plans: dict[int | None, list[RowPlan]] = {window: [] for window in windows}
    for row in rows:
        num_queries = row.stop - row.start
        if num_queries == 0:
            continue
        fold = num_queries <= FOLD_LIMIT
        tiled: dict[int, torch.Tensor] = {}  # windows often share one mask
        for window in windows:
            mask = row.masks[window]
            narrow = window is not None and num_queries > window
            causal = row.causal and not narrow and not fold
            if causal:
                mask = None
            elif mask is not None and fold and groups > 1 and num_queries > 1:
                if id(mask) not in tiled:
                    tiled[id(mask)] = mask.repeat_interleave(groups, 0)
                mask = tiled[id(mask)]
            plans[window].append(RowPlan(row=row, mask=mask, causal=causal, fold=fold))
    return plans


class RowAttention:
    """Attention row by row, keys read in place where they lie in one stretch. Arguments as for
    :func:`plan_rows`."""

    def __init__(self, rows: Seq[Row], windows: Seq[int | None], groups: int) -> None:
        self._plans = plan_rows(rows, windows, groups)

    def __call__(
        self, query: torch.Tensor, pool: torch.Tensor, window: int | None, scale: float
    ) -> torch.Tensor:
        return attend(query, pool, self._plans[window], scale)


def attend(
    query: torch.Tensor, pool: torch.Tensor, plans: Seq[RowPlan], scale: float
) -> torch.Tensor:
    """Attention of every row's queries to its keys; ``[T, H * D]``.

    ``query`` ``[T, H, D]``. ``pool`` ``[2, Hkv, num_slots, D]``: keys and values, any strides.
    The plans cover the T tokens in order.
    """
    outputs = [_attend_row(query, pool, plan, scale) for plan in plans]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_row(
    query: torch.Tensor, pool: torch.Tensor, plan: RowPlan, scale: float
) -> torch.Tensor:
    row = plan.row
    num_queries, num_kv_heads, head_dim = row.stop - row.start, pool.shape[1], pool.shape[3]
    if row.slots is None:
        stored = pool[:, :, row.first : row.last]
    else:
        stored = pool.index_select(2, row.slots)
    # 4-D without enable_gqa: that option leaves the fast CPU kernel.
    q = query[row.start : row.stop].view(num_queries, num_kv_heads, -1, head_dim)  # [Q, Hkv, G, D]
    if plan.fold:
        keys, values = stored.chunk(2)  # [1, Hkv, L, D]
        q = q.transpose(0, 1).reshape(1, num_kv_heads, -1, head_dim)
        out = F.scaled_dot_product_attention(q, keys, values, plan.mask, scale=scale)
        out = out.view(num_kv_heads, num_queries, -1, head_dim).transpose(0, 1)
    else:
        # Key-value heads are the batch; the keys of a head repeat over its queries by stride 0.
        shape = (num_kv_heads, q.shape[2], stored.shape[2], head_dim)
        keys, values = (part.unsqueeze(1).expand(shape) for part in stored.unbind())
        out = F.scaled_dot_product_attention(
            q.permute(1, 2, 0, 3), keys, values, plan.mask, is_causal=plan.causal, scale=scale
        )
        out = out.permute(2, 0, 1, 3)
    return out.reshape(num_queries, -1)
