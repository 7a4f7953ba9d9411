"""Slot tables: against a naive model, and the cases that are hard to reach by chance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from outrider.errors import OutOfSlots
from outrider.kv import BLOCK, KVCache

NOTHING = np.empty(0, np.int64)


def story(number: int, length: int) -> list[int]:
    """Tokens of a story; stories 0 and 1 share their first two blocks, story 2 is another."""
    return [10 * number + i % 7 if i >= 2 * BLOCK or number == 2 else i for i in range(length)]


def write(kv: KVCache, seq_id: str, tokens: list[int]) -> None:
    """Reserve and commit."""
    kv.reserve(seq_id, len(tokens))
    kv.commit(seq_id, np.arange(len(tokens)), tokens)


def snapshot(kv: KVCache) -> Any:
    """Everything the cache knows, as plain values."""
    return (
        kv._refs.tolist(),
        {
            name: (t.slots[: t.length + t.num_scratch].tolist(), t.length, t.block, list(t.tail))
            for name, t in kv._tables.items()
        },
        [(key, block.id, block.slots.tolist()) for key, block in kv._blocks.items()],
    )


class Naive(RuleBasedStateMachine):
    """Every sequence is a list of tokens; the pool remembers which prefix each slot stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVCache(160)
        self.content: dict[int, tuple[int, ...]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.scratch: dict[str, list[int]] = {}
        self.opened = 0

    seqs = Bundle("seqs")

    def _new(self) -> str:
        self.opened += 1
        return f"s{self.opened}"

    @rule(target=seqs, number=st.integers(0, 2), length=st.integers(0, 70))
    def open(self, number: int, length: int) -> str:
        name, prompt = self._new(), story(number, length)
        found = self.kv.open(name, prompt)
        assert found % BLOCK == 0
        assert found < max(length, 1)
        self.tokens[name], self.scratch[name] = prompt[:found], []
        return name

    @rule(target=seqs, seq=seqs, share=st.floats(0, 1))
    def fork(self, seq: str, share: float) -> str:
        name = self._new()
        if seq not in self.tokens:
            seq = name
            self.kv.open(seq)
            self.tokens[name], self.scratch[name] = [], []
            return name
        length = round(share * len(self.tokens[seq]))
        self.kv.fork(seq, name, length)
        self.tokens[name], self.scratch[name] = self.tokens[seq][:length], []
        return name

    @rule(seq=seqs, num=st.integers(0, 40))
    def reserve(self, seq: str, num: int) -> None:
        if seq not in self.tokens:
            return
        before, free = snapshot(self.kv), self.kv.num_free
        if num > free:
            with pytest.raises(OutOfSlots, match=f"{num} slots wanted, {free} of 160 free"):
                self.kv.reserve(seq, num)
            assert snapshot(self.kv) == before
            return
        got = self.kv.reserve(seq, num).tolist()
        assert len(got) == num
        assert self.kv.num_free == free - num
        self.scratch[seq] += got
        for slot in got:
            self.content[slot] = ()  # whatever it held is gone

    @rule(seq=seqs, number=st.integers(0, 2), data=st.data())
    def commit(self, seq: str, number: int, data: st.DataObject) -> None:
        if seq not in self.tokens:
            return
        scratch, tokens = self.scratch[seq], self.tokens[seq]
        num = data.draw(st.integers(0, len(scratch)))
        keep = data.draw(st.permutations(range(len(scratch))))[:num]
        new = story(number, len(tokens) + num)[len(tokens) :]
        for index, token in zip(keep, new, strict=True):
            tokens.append(token)
            self.content[scratch[index]] = tuple(tokens)
        self.kv.commit(seq, np.array(keep, np.int64), new)
        self.scratch[seq] = []

    @rule(seq=seqs)
    def close(self, seq: str) -> None:
        if seq not in self.tokens:
            return
        before = set(self.kv.slots(seq).tolist()) | set(self.scratch[seq])
        released = set(self.kv.close(seq).tolist())
        assert released <= before
        assert seq not in self.kv
        del self.tokens[seq], self.scratch[seq]
        held = {slot for name in self.tokens for slot in self.kv.slots(name).tolist()}
        assert not released & held

    @precondition(lambda self: self.opened > 3)
    @rule()
    def clear(self) -> None:
        self.kv.clear()

    @invariant()
    def agrees(self) -> None:
        self.kv.check()
        held: set[int] = set()
        for name, tokens in self.tokens.items():
            assert name in self.kv
            assert self.kv.length(name) == len(tokens)
            slots = self.kv.slots(name).tolist()
            prefixes = [tuple(tokens[: i + 1]) for i in range(len(tokens))]
            assert [self.content[slot] for slot in slots] == prefixes
            assert self.kv.scratch(name).tolist() == self.scratch[name]
            held |= {*slots, *self.scratch[name]}
        assert self.kv.num_free == self.kv.num_slots - len(held)

    def teardown(self) -> None:
        for name in list(self.tokens):
            self.kv.close(name)
        assert self.kv.num_free == self.kv.num_slots
        self.kv.clear()
        self.kv.check()
        assert not self.kv._refs.any(), "slots leaked"


Naive.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestAgainstNaive = Naive.TestCase


def test_a_prefix_is_found_again_but_never_the_last_token() -> None:
    kv = KVCache(256)
    kv.open("a")
    write(kv, "a", story(0, 3 * BLOCK))
    slots = kv.slots("a").tolist()
    kv.close("a")
    assert kv.open("b", story(0, 3 * BLOCK)) == 2 * BLOCK
    assert kv.slots("b").tolist() == slots[: 2 * BLOCK]
    assert kv.open("c", story(0, 3 * BLOCK + 1)) == 3 * BLOCK
    assert kv.open("d", story(1, 3 * BLOCK + 1)) == 2 * BLOCK  # shares two blocks with story 0
    assert kv.open("e", story(2, 3 * BLOCK + 1)) == 0
    kv.check()


def test_a_block_is_found_only_after_its_own_prefix() -> None:
    kv = KVCache(256)
    kv.open("a")
    write(kv, "a", [*range(BLOCK), *range(100, 100 + BLOCK)])
    assert kv.open("b", [*range(100, 100 + BLOCK), 0]) == 0


def test_no_prefix_cache() -> None:
    kv = KVCache(64, prefix_cache=False)
    kv.open("a")
    write(kv, "a", story(0, 40))
    assert len(kv.close("a")) == 40
    assert kv.open("b", story(0, 40)) == 0
    assert kv.num_free == 64


def test_prefix_grows_over_many_commits() -> None:
    kv = KVCache(256)
    kv.open("a")
    for token in story(0, 2 * BLOCK):
        write(kv, "a", [token])
    assert kv.open("b", story(0, 2 * BLOCK + 1)) == 2 * BLOCK


def test_eviction_takes_the_oldest_and_children_before_parents() -> None:
    kv = KVCache(6 * BLOCK)
    for name, number in (("a", 0), ("b", 2)):
        kv.open(name)
        write(kv, name, story(number, 3 * BLOCK))
        kv.close(name)
    assert kv.num_free == 6 * BLOCK
    kv.open("c")
    kv.reserve("c", 1)
    kv.check()
    # The last block of the older story went, nothing else.
    assert kv.open("x", story(0, 4 * BLOCK)) == 2 * BLOCK
    assert kv.open("y", story(2, 4 * BLOCK)) == 3 * BLOCK
    kv.check()


def test_eviction_spares_what_was_used_last() -> None:
    kv = KVCache(4 * BLOCK)
    for name, number in (("a", 0), ("b", 2)):
        kv.open(name)
        write(kv, name, story(number, 2 * BLOCK))
        kv.close(name)
    assert kv.open("again", story(0, 2 * BLOCK + 1)) == 2 * BLOCK
    kv.close("again")
    kv.open("c")
    kv.reserve("c", 2 * BLOCK)
    assert kv.open("x", story(0, 3 * BLOCK)) == 2 * BLOCK
    assert kv.open("y", story(2, 3 * BLOCK)) == 0


def test_slots_of_open_sequences_are_never_evicted() -> None:
    kv = KVCache(3 * BLOCK)
    kv.open("a")
    write(kv, "a", story(0, 2 * BLOCK))
    kv.open("b")
    kv.reserve("b", BLOCK)
    with pytest.raises(OutOfSlots):
        kv.reserve("b", 1)
    assert kv.num_free == 0


def test_a_block_under_one_in_use_can_be_evicted() -> None:
    """Two sequences write the same block; the index keeps the first one's slots, and the second
    goes on below it. The block is then held by the index alone, its child by a sequence."""
    kv = KVCache(6 * BLOCK)
    kv.open("a")
    kv.open("b")
    write(kv, "a", story(0, BLOCK))
    write(kv, "b", story(0, 2 * BLOCK))
    kv.close("a")
    free = kv.num_free
    assert free == 4 * BLOCK
    assert len(kv.reserve("b", free)) == free
    kv.check()
    before = snapshot(kv)
    with pytest.raises(OutOfSlots):
        kv.reserve("b", 1)
    assert snapshot(kv) == before


def test_commit_keeps_a_path_and_frees_the_rest() -> None:
    kv = KVCache(32)
    kv.open("a")
    slots = kv.reserve("a", 6).tolist()
    kv.commit("a", np.array([0, 3, 5]), [7, 8, 9])
    assert kv.slots("a").tolist() == [slots[0], slots[3], slots[5]]
    assert kv.num_free == 29
    assert len(kv.scratch("a")) == 0
    kv.commit("a", NOTHING, [])
    assert kv.length("a") == 3


def test_fork_shares_and_then_parts() -> None:
    kv = KVCache(64, prefix_cache=False)
    kv.open("a")
    write(kv, "a", [1, 2, 3, 4])
    kv.fork("a", "b", 3)
    assert kv.slots("b").tolist() == kv.slots("a").tolist()[:3]
    assert kv.num_free == 60
    write(kv, "b", [9])
    assert kv.slots("b")[3] != kv.slots("a")[3]
    kept = kv.close("a").tolist()
    assert len(kept) == 1  # the rest is still b's
    assert kv.num_free == 60
    kv.check()


def test_a_new_sequence_starts_where_it_has_room() -> None:
    """Two sequences written in turns each lie in one stretch."""
    kv = KVCache(128)
    for name in ("a", "b"):
        kv.open(name)
        kv.reserve(name, 1)
        kv.commit(name, np.arange(1), [0])
    for _ in range(20):
        write(kv, "a", [0])
        write(kv, "b", [0])
    for name in ("a", "b"):
        assert (np.diff(kv.slots(name)) == 1).all()


def test_a_sequence_goes_on_after_the_index_is_cleared() -> None:
    kv = KVCache(128)
    kv.open("a")
    write(kv, "a", story(0, BLOCK))
    kv.clear()
    write(kv, "a", story(0, 3 * BLOCK)[BLOCK:])
    kv.check()
    assert kv.open("b", story(0, 3 * BLOCK)) == 0  # it may not be found by half of its prefix


def test_a_fork_inside_a_block_is_not_found_by_its_later_tokens() -> None:
    kv = KVCache(256)
    kv.open("a")
    write(kv, "a", story(0, 5))
    kv.fork("a", "b", 5)
    write(kv, "b", story(2, 2 * BLOCK))
    kv.check()
    assert kv.open("c", story(2, 2 * BLOCK + 1)) == 0


def test_a_sequence_whose_block_was_evicted_adds_no_child_to_it() -> None:
    kv = KVCache(4 * BLOCK)
    kv.open("a")
    kv.open("b")
    write(kv, "a", story(0, BLOCK))
    write(kv, "b", story(0, BLOCK))  # the index keeps the slots of a
    kv.close("a")
    kv.reserve("b", 3 * BLOCK)  # takes them
    more = story(0, 2 * BLOCK)[BLOCK:]
    kv.commit("b", np.arange(BLOCK), more)
    kv.check()
    assert kv.open("c", story(0, 3 * BLOCK)) == 0


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="num_slots"):
        KVCache(0)
    kv = KVCache(16)
    kv.open("a")
    with pytest.raises(ValueError, match="'a' is open already"):
        kv.open("a")
    with pytest.raises(ValueError, match="'a' is open already"):
        kv.fork("a", "a", 0)
    with pytest.raises(ValueError, match="1 tokens wanted, 0 are committed"):
        kv.fork("a", "b", 1)
    kv.reserve("a", 2)
    with pytest.raises(ValueError, match="2 slots kept for 1 tokens"):
        kv.commit("a", np.arange(2), [1])
    assert kv.length("a") == 0


def test_check_notices_a_wrong_count() -> None:
    kv = KVCache(16)
    kv.open("a")
    kv.reserve("a", 2)
    kv._refs[kv.scratch("a")[0]] = 2
    with pytest.raises(AssertionError, match="shared"):
        kv.check()
    kv._refs[kv.scratch("a")[0]] = 1
    kv._refs[9] = 1
    with pytest.raises(AssertionError, match="counts"):
        kv.check()


def test_check_notices_a_wrong_mark_of_the_index() -> None:
    kv = KVCache(64)
    kv.open("a")
    write(kv, "a", story(0, 20))
    kv.close("a")
    assert kv.num_free == 64
    kv._indexed[0] ^= 1
    with pytest.raises(AssertionError, match="slots of the index"):
        kv.check()
