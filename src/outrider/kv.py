"""Which slot of a model's KV pool holds which token. Bookkeeping only: the model owns the tensors.

One slot stands for one token in every layer. A sequence is a table of slots: committed ones, in
token order, then scratch ones that the current step writes and :meth:`KVCache.commit` keeps or
frees. Keys are rotated when they are written, so the order of slots in memory means nothing, and
accepting a path of a tree is an edit of the table.

Slots are shared by reference: by forks, and through the prefix index, which knows blocks of
committed tokens. Scratch slots are never shared.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from outrider.errors import OutOfSlots
from outrider.tree import IntArray

BLOCK = 16
"""Tokens per block of the prefix index."""


@dataclass(slots=True, eq=False)
class _Block:
    """BLOCK committed tokens after the tokens of ``parent``, and the slots that hold them."""

    id: int
    key: tuple[int, tuple[int, ...]]
    slots: IntArray
    num_children: int = 0


@dataclass(slots=True, eq=False)
class _Table:
    home: int  # new slots are looked for from here upwards
    slots: IntArray  # [capacity]; the first ``length`` are committed, then ``num_scratch``
    length: int = 0
    num_scratch: int = 0
    block: int = 0  # id of the last block that is in the index, 0 for none yet
    tail: list[int] = field(default_factory=list)  # committed tokens after that block
    indexed: bool = True  # whether further blocks may join the index


class KVCache:
    """Slot tables of all sequences of one model.

    ``num_slots``: tokens the pool can hold. ``prefix_cache``: keep the blocks of finished
    sequences until their slots are needed, and let new sequences start from them.
    """

    def __init__(self, num_slots: int, *, prefix_cache: bool = True) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots is {num_slots}, expected 1 or more")
        self.num_slots = num_slots
        self.prefix_cache = prefix_cache
        self._refs = np.zeros(num_slots, np.int32)
        self._indexed = np.zeros(num_slots, np.int32)  # 1 for the slots of blocks in the index
        self._tables: dict[str, _Table] = {}
        self._blocks: OrderedDict[tuple[int, tuple[int, ...]], _Block] = OrderedDict()
        self._by_id: dict[int, _Block] = {}
        self._next_block = 1

    def __contains__(self, seq_id: str) -> bool:
        return seq_id in self._tables

    # Reading: nothing below changes the cache.

    def length(self, seq_id: str) -> int:
        """Committed tokens of a sequence."""
        return self._tables[seq_id].length

    def slots(self, seq_id: str) -> IntArray:
        """Slots of the committed tokens, in token order. A view: do not write to it."""
        table = self._tables[seq_id]
        return table.slots[: table.length]

    def scratch(self, seq_id: str) -> IntArray:
        """Slots reserved since the last commit, in the order of reservation. A view."""
        table = self._tables[seq_id]
        return table.slots[table.length : table.length + table.num_scratch]

    @property
    def num_free(self) -> int:
        """Slots that a reservation can get: unused ones, and those only the index holds."""
        # Referred to by nobody but the index, if by that. This is asked in every step.
        return int(np.count_nonzero(self._refs == self._indexed))

    # Changing.

    def open(self, seq_id: str, tokens: Seq[int] = ()) -> int:
        """Make a table; share the longest indexed prefix of ``tokens`` but never the last token.

        Returns the number of tokens found: the committed length of the new table.
        """
        if seq_id in self._tables:
            raise ValueError(f"sequence {seq_id!r} is open already")
        found: list[_Block] = []
        parent = 0
        for start in range(0, len(tokens) - BLOCK, BLOCK) if self.prefix_cache else ():
            block = self._blocks.get((parent, tuple(tokens[start : start + BLOCK])))
            if block is None:
                break
            found.append(block)
            parent = block.id
        table = _Table(home=self._new_home(), slots=np.empty(64, np.int64), block=parent)
        self._tables[seq_id] = table
        if found:
            slots = np.concatenate([block.slots for block in found])
            self._refs[slots] += 1
            self._extend(table, slots)
            table.length, table.num_scratch = len(slots), 0
        for block in reversed(found):  # parents end up younger than their children
            self._blocks.move_to_end(block.key)
        return table.length

    def reserve(self, seq_id: str, num_tokens: int) -> IntArray:
        """Add ``num_tokens`` scratch slots and return them. Raises OutOfSlots, changing nothing."""
        table = self._tables[seq_id]
        free = np.flatnonzero(self._refs[table.home :] == 0)[:num_tokens] + table.home
        if len(free) < num_tokens:
            below = np.flatnonzero(self._refs[: table.home] == 0)
            missing = num_tokens - len(free) - len(below)
            if missing > 0:
                if not self._evict(missing):
                    raise OutOfSlots(
                        f"{num_tokens} slots wanted, {self.num_free} of {self.num_slots} free"
                    )
                return self.reserve(seq_id, num_tokens)
            free = np.concatenate([free, below[: num_tokens - len(free)]])
        self._refs[free] = 1
        self._extend(table, free)
        return free

    def commit(self, seq_id: str, keep: IntArray, tokens: Seq[int]) -> None:
        """Keep the scratch slots at the indices ``keep``, in that order, as ``tokens``; free the
        rest."""
        table = self._tables[seq_id]
        if len(keep) != len(tokens):
            raise ValueError(f"{len(keep)} slots kept for {len(tokens)} tokens")
        scratch = self.scratch(seq_id).copy()
        kept = scratch[keep]
        self._refs[scratch] = 0
        self._refs[kept] = 1
        table.slots[table.length : table.length + len(kept)] = kept
        table.length += len(kept)
        table.num_scratch = 0
        if self.prefix_cache and table.indexed:
            table.tail.extend(tokens)
            self._index(table)

    def fork(self, seq_id: str, new_id: str, length: int) -> None:
        """Open ``new_id`` on the first ``length`` committed tokens of ``seq_id``, shared."""
        source = self._tables[seq_id]
        if length > source.length:
            raise ValueError(f"{length} tokens wanted, {source.length} are committed")
        if new_id in self._tables:
            raise ValueError(f"sequence {new_id!r} is open already")
        slots = source.slots[:length].copy()
        self._refs[slots] += 1
        # A fork inside a block has no block of its own to continue from: it stays unindexed.
        table = _Table(home=self._new_home(), slots=slots, length=length, indexed=False)
        self._tables[new_id] = table

    def close(self, seq_id: str) -> IntArray:
        """Forget a sequence. Returns the slots that nobody holds any more."""
        table = self._tables.pop(seq_id)
        slots = table.slots[: table.length + table.num_scratch]
        self._refs[slots] -= 1
        released: IntArray = slots[self._refs[slots] == 0]
        return released

    def clear(self) -> None:
        """Empty the prefix index. Open sequences keep their slots."""
        for block in self._blocks.values():
            self._refs[block.slots] -= 1
        self._indexed[:] = 0
        self._blocks.clear()
        self._by_id.clear()
        for table in self._tables.values():
            table.indexed = False

    def check(self) -> None:
        """Raise AssertionError if any count, table or block disagrees with the others."""
        refs = np.zeros(self.num_slots, np.int32)
        indexed = np.zeros(self.num_slots, np.int32)
        for seq_id, table in self._tables.items():
            used = table.slots[: table.length + table.num_scratch]
            assert len(np.unique(used)) == len(used), f"{seq_id} holds a slot twice"
            refs[used] += 1
            scratch = self.scratch(seq_id)
            assert (self._refs[scratch] == 1).all(), f"scratch of {seq_id} is shared"
        children: dict[int, int] = {}
        for key, block in self._blocks.items():
            assert block.key == key
            assert self._by_id[block.id] is block
            refs[block.slots] += 1
            indexed[block.slots] += 1
            children[key[0]] = children.get(key[0], 0) + 1
            assert key[0] == 0 or key[0] in self._by_id, "a block outlived its parent"
        for block in self._blocks.values():
            assert block.num_children == children.get(block.id, 0)
        assert len(self._by_id) == len(self._blocks)
        assert (refs == self._refs).all(), "reference counts are wrong"
        assert (indexed == self._indexed).all(), "the slots of the index are wrong"

    # Inside.

    def _extend(self, table: _Table, slots: IntArray) -> None:
        start = table.length + table.num_scratch
        if start + len(slots) > len(table.slots):
            grown = np.empty(max(2 * len(table.slots), start + len(slots)), np.int64)
            grown[:start] = table.slots[:start]
            table.slots = grown
        table.slots[start : start + len(slots)] = slots
        table.num_scratch += len(slots)

    def _new_home(self) -> int:
        """The middle of the longest free run (its start if the pool is empty): room to grow, so
        that a sequence usually lies in one stretch and can be read without gathering."""
        free = np.concatenate([[False], self._refs == 0, [False]])
        edges = np.flatnonzero(free[1:] != free[:-1])
        if len(edges) == 0:
            return 0
        starts, stops = edges[::2], edges[1::2]
        longest = int((stops - starts).argmax())
        start, stop = int(starts[longest]), int(stops[longest])
        return start if not self._tables else (start + stop) // 2

    def _index(self, table: _Table) -> None:
        while len(table.tail) >= BLOCK:
            if table.block and table.block not in self._by_id:
                table.indexed = False  # the parent was evicted: a child could not be found again
                table.tail.clear()
                return
            key = (table.block, tuple(table.tail[:BLOCK]))
            block = self._blocks.get(key)
            if block is None:
                first = table.length - len(table.tail)
                block = _Block(self._next_block, key, table.slots[first : first + BLOCK].copy())
                self._next_block += 1
                self._refs[block.slots] += 1
                self._indexed[block.slots] = 1
                self._blocks[key] = block
                self._by_id[block.id] = block
                if table.block:
                    self._by_id[table.block].num_children += 1
            table.block = block.id
            del table.tail[:BLOCK]

    def _evict(self, num_slots: int) -> bool:
        """Free at least ``num_slots`` slots, oldest unused leaves first; whether it could."""
        if self.num_free - np.count_nonzero(self._refs == 0) < num_slots:
            return False
        freed = 0
        # A sequence that wrote an indexed block a second time may hold the blocks after it while
        # nobody holds that block: then leaves in use go too, to reach it.
        used_too = False
        while freed < num_slots and self._blocks:
            before = len(self._blocks)
            passed: set[int] = set()
            for oldest in list(self._blocks.values()):
                if freed >= num_slots:
                    break
                passed.add(oldest.id)
                block: _Block | None = oldest
                # A parent that is older than its last child comes right after it.
                while block is not None and freed < num_slots and self._can_drop(block, used_too):
                    freed += self._drop(block)
                    parent = self._by_id.get(block.key[0])
                    block = parent if parent is not None and parent.id in passed else None
            used_too = len(self._blocks) == before
        return freed >= num_slots

    def _can_drop(self, block: _Block, used_too: bool) -> bool:
        unused = bool((self._refs[block.slots] == 1).any())
        return block.num_children == 0 and (unused or used_too)

    def _drop(self, block: _Block) -> int:
        del self._blocks[block.key]
        del self._by_id[block.id]
        parent = self._by_id.get(block.key[0])
        if parent is not None:
            parent.num_children -= 1
        self._refs[block.slots] -= 1
        self._indexed[block.slots] = 0
        return int((self._refs[block.slots] == 0).sum())
