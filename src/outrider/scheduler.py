"""Who runs in the next step, how far, and with how many draft nodes.

There are no phases: a sequence has tokens, the model has computed some of them, and a step
computes what is missing. A sequence whose tokens are complete gets its draft nodes in that same
step. Preempting a sequence closes its table; catching up does the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.config import EngineConfig
from outrider.drafters.base import Budget
from outrider.errors import OutOfSlots
from outrider.kv import KVCache
from outrider.request import Sequence

PROMPT_SHARE = 0.25
"""The part of a step's tokens that prompts may take before drafts get any."""


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


@dataclass(slots=True)
class _Part:
    """A :class:`Slot` in the making. ``missing``: tokens not computed before this step."""

    seq: Sequence
    missing: int
    num_chain: int
    budget: Budget = field(default_factory=lambda: Budget(0, 0))

    @property
    def is_complete(self) -> bool:
        return self.num_chain == self.missing

    def slot(self, length: int) -> Slot:
        return Slot(
            seq=self.seq,
            stop=length + self.num_chain,
            budget=self.budget,
            complete=self.is_complete,
        )


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
        self._step = 0
        self._last_run: dict[str, int] = {}  # the last step that each running sequence was in

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        """A sequence ended or was cancelled."""
        if seq in self.running:
            self._stop(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)

    def plan(self) -> list[Slot]:
        """The next step. Everyone's next token comes first, prompts have a share of their own, and
        drafts divide what is left: neither a long prompt nor many drafts hold up anybody else.
        Where not even the next tokens fit, those who waited longest go first. A step of N tokens
        runs at most N sequences: nobody is admitted whose first token would not fit."""
        self._step += 1
        parts: dict[str, _Part] = {}
        for seq in sorted(self.running, key=self._turn):
            if seq not in self.running:
                continue  # preempted for one before it
            is_prompt = self._missing(seq) > 1
            self._place(seq, parts, self._prompt_room(parts) if is_prompt else self._left(parts))
        while self._prompt_room(parts) and self._admit():
            self._place(self.running[-1], parts, self._prompt_room(parts))
        self._share(parts)
        for seq in list(self.running):
            self._extend(seq, parts)
        while self._left(parts) and self._admit():
            self._place(self.running[-1], parts, self._left(parts))
        self._share(parts)  # drafts of the prompts that were completed since
        self._last_run.update(dict.fromkeys(parts, self._step))
        return [part.slot(self._kv.length(part.seq.id)) for part in parts.values()]

    def _turn(self, seq: Sequence) -> tuple[int, bool]:
        return self._last_run.get(seq.id, 0), self._missing(seq) > 1

    def _missing(self, seq: Sequence) -> int:
        return len(seq.tokens) - self._kv.length(seq.id)

    def _left(self, parts: dict[str, _Part]) -> int:
        """Tokens of the step that are not given away."""
        taken = sum(part.num_chain + part.budget.num_nodes for part in parts.values())
        return self._config.max_step_tokens - taken

    def _prompt_room(self, parts: dict[str, _Part]) -> int:
        """What is left of the share that prompts have before drafts get anything."""
        share = max(1, int(self._config.max_step_tokens * PROMPT_SHARE))
        taken = sum(part.num_chain for part in parts.values() if part.missing > 1)
        return max(0, min(share - taken, self._left(parts)))

    def _place(self, seq: Sequence, parts: dict[str, _Part], room: int) -> None:
        """Give a running sequence at most ``room`` tokens of its chain, preempting younger ones
        for its slots if it must; nothing if it was preempted, just now or before."""
        if seq not in self.running or not room:
            return
        missing = self._missing(seq)
        num_chain = min(missing, self._config.chunk, room)
        while not self._reserve(seq, num_chain):
            victim = self.running[-1]
            parts.pop(victim.id, None)
            self._preempt(victim)
            if victim is seq:
                return
        parts[seq.id] = _Part(seq, missing, num_chain)

    def _extend(self, seq: Sequence, parts: dict[str, _Part]) -> None:
        """Let a running prompt use what the drafts left. For more than its share of the step
        nobody is preempted."""
        part = parts.get(seq.id)
        if part is None:
            self._place(seq, parts, self._left(parts))
            return
        more = min(part.missing, self._config.chunk) - part.num_chain
        more = min(more, self._left(parts))
        if more > 0 and self._reserve(seq, more):
            part.num_chain += more

    def _share(self, parts: dict[str, _Part]) -> None:
        """Divide what is left among the drafts of complete sequences that have none yet: evenly,
        and what cannot be divided to another one in each step."""
        drafting = [p for p in parts.values() if p.is_complete and not p.budget.num_nodes]
        wanted = [_budget(part.seq) for part in drafting]
        nodes = _divide([budget.num_nodes for budget in wanted], self._left(parts), self._step)
        for part, budget, num_nodes in zip(drafting, wanted, nodes, strict=True):
            if num_nodes and self._reserve(part.seq, num_nodes):
                part.budget = Budget(num_nodes, budget.depth)

    def _reserve(self, seq: Sequence, num_slots: int) -> bool:
        try:
            self._kv.reserve(seq.id, num_slots)
        except OutOfSlots:
            return False
        return True

    def _stop(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._last_run.pop(seq.id, None)
        self._kv.close(seq.id)

    def _preempt(self, seq: Sequence) -> None:
        self._stop(seq)
        self.waiting.appendleft(seq)
        self._on_preempt(seq)

    def _admit(self) -> bool:
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


def _budget(seq: Sequence) -> Budget:
    """The draft nodes a sequence asks for, as far as it may still grow. The bonus token takes the
    last place."""
    depth = min(seq.num_draft, seq.max_length - len(seq.tokens) - 1)
    return Budget(seq.num_draft, depth) if depth > 0 else Budget(0, 0)


def _divide(wanted: list[int], left: int, first: int) -> list[int]:
    """Grant every wish evenly, one by one from the ``first`` (modulo their number) on, until
    nothing is left."""
    if sum(wanted) <= left:
        return wanted
    granted = [0] * len(wanted)
    turn = first
    while left:
        i = turn % len(wanted)
        if granted[i] < wanted[i]:
            granted[i] += 1
            left -= 1
        turn += 1
    return granted
