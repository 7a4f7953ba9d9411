"""Who runs in the next step, how far, and with how many draft nodes.

There are no phases: a sequence has tokens, the model has computed some of them, and a step
computes what is missing. A sequence whose tokens are complete gets its draft nodes in that same
step. Preempting a sequence closes its table; catching up does the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from outrider.config import EngineConfig
from outrider.drafters.base import Budget
from outrider.errors import OutOfSlots
from outrider.kv import KVCache
from outrider.request import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One sequence's part of a step: compute ``tokens[kv.length : stop]``, then a tree.

    Slots of the pool for all of it are reserved. ``complete``: the last token is among them, so
    the step decides about new tokens.
    """

    seq: Sequence
    stop: int
    budget: Budget
    complete: bool


class Scheduler:
    """Admission, the budget of a step, and preemption. Mutates the KV cache's tables.

    ``on_preempt`` is called with each sequence that lost its slots.
    """

    def __init__(
        self, kv: KVCache, config: EngineConfig, on_preempt: Callable[[Sequence], None]
    ) -> None:
        self._kv = kv
        self._config = config
        self._on_preempt = on_preempt
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        """A sequence ended or was cancelled."""
        if seq in self.running:
            self.running.remove(seq)
            self._kv.close(seq.id)
        elif seq in self.waiting:
            self.waiting.remove(seq)

    def plan(self) -> list[Slot]:
        """The next step. Sequences that only need their last token come first, so that prompts
        are computed between the others' steps and never instead of them."""
        left = self._config.max_step_tokens
        planned: dict[str, Slot] = {}
        for seq in sorted(self.running, key=lambda seq: self._missing(seq) > 1):
            if left and seq in self.running:
                left -= self._place(seq, left, planned)
        while left and self._admit(planned):
            left -= self._place(self.running[-1], left, planned)
        return list(planned.values())

    def _missing(self, seq: Sequence) -> int:
        return len(seq.tokens) - self._kv.length(seq.id)

    def _place(self, seq: Sequence, left: int, planned: dict[str, Slot]) -> int:
        """Plan one running sequence, preempting younger ones for its slots if it must. Returns
        the tokens it takes; 0 if it was preempted itself."""
        missing = self._missing(seq)
        num_chain = min(missing, self._config.chunk, left)
        budget = _budget(seq, left - num_chain) if num_chain == missing else Budget(0, 0)
        while not self._reserve(seq, num_chain + budget.num_nodes):
            if budget.num_nodes:
                budget = Budget(0, 0)
                continue
            victim = self.running[-1]
            planned.pop(victim.id, None)
            self._preempt(victim)
            if victim is seq:
                return 0
        planned[seq.id] = Slot(
            seq=seq,
            stop=self._kv.length(seq.id) + num_chain,
            budget=budget,
            complete=num_chain == missing,
        )
        return num_chain + budget.num_nodes

    def _reserve(self, seq: Sequence, num_slots: int) -> bool:
        try:
            self._kv.reserve(seq.id, num_slots)
        except OutOfSlots:
            return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._kv.close(seq.id)
        self.waiting.appendleft(seq)
        self._on_preempt(seq)

    def _admit(self, planned: dict[str, Slot]) -> bool:
        """Move the first waiting sequence that can start to the running ones."""
        if len(self.running) >= self._config.max_batch:
            return False
        for seq in self.waiting:
            if seq.sibling is not None and self._computing_prompt(seq.sibling):
                continue  # its prompt is being computed once, by the sibling
            # Room for all its tokens: a sequence that barely starts would be preempted at once.
            if self.running and self._kv.num_free <= len(seq.tokens):
                return False
            self.waiting.remove(seq)
            self._open(seq)
            self.running.append(seq)
            return True
        return False

    def _computing_prompt(self, seq: Sequence) -> bool:
        if seq.finish is not None:
            return False
        return seq.id not in self._kv or self._kv.length(seq.id) < seq.num_prompt

    def _open(self, seq: Sequence) -> None:
        source = seq.sibling
        if source is not None and seq.num_output == 0 and source.id in self._kv:
            self._kv.fork(source.id, seq.id, seq.num_prompt - 1)
        else:
            self._kv.open(seq.id, seq.tokens)


def _budget(seq: Sequence, left: int) -> Budget:
    """Draft nodes for a sequence: what it asks for, as far as it may still grow. The bonus token
    takes the last place."""
    depth = min(seq.num_draft, seq.max_length - len(seq.tokens) - 1)
    return Budget(min(seq.num_draft, left), depth) if depth > 0 and left > 0 else Budget(0, 0)
