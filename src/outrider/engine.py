"""The loop. One step: plan, draft, one forward of the target, verify, commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from outrider.admission import Admission
from outrider.batch import ForwardBatch, Work, build
from outrider.config import EngineConfig
from outrider.detokenize import Tokenizer
from outrider.drafters.base import Drafter, Feedback
from outrider.emit import emit
from outrider.errors import ConfigError, ModelFault
from outrider.models.base import Forward, Model
from outrider.request import Event, FinishReason, Request, Sequence, TokenLogprob
from outrider.sampling import NodeLaws
from outrider.scheduler import Scheduler, Slot
from outrider.tree import ROOT, TokenTree
from outrider.verify import Verdict


class Engine:
    """Decodes many sequences at once with one target model.

    ``drafters`` makes the drafter of a specification; each is made once and shared by all
    sequences that name it. ``end_tokens`` end a sequence unless it ignores them.
    """

    def __init__(
        self,
        target: Model,
        drafters: Callable[[str], Drafter],
        *,
        tokenizer: Tokenizer | None = None,
        end_tokens: Iterable[int] = (),
        drafter: str = "none",
        verifier: str = "coupled",
        config: EngineConfig | None = None,
    ) -> None:
        self.target = target
        self.config = config or EngineConfig()
        self.admission = Admission(
            target,
            drafters,
            tokenizer=tokenizer,
            end_tokens=end_tokens,
            drafter=drafter,
            verifier=verifier,
            config=self.config,
        )
        self._scheduler = Scheduler(target.kv, self.config, self._on_preempt)
        self._sequences: dict[str, dict[str, Sequence]] = {}  # of each request, by their ids

    def drafter(self, spec: str) -> Drafter:
        """The drafter of a specification, made on first use. Raises ConfigError."""
        return self.admission.drafter(spec)

    def add(self, request: Request) -> list[Sequence]:
        """Queue a request: one sequence for each of its ``n``. Raises ConfigError, before anything
        is computed, if any part of it cannot be honoured."""
        if request.id in self._sequences:
            raise ConfigError(f"request {request.id!r} is running already; give it another id")
        made = self.admission.admit(request)
        self._sequences[request.id] = {seq.id: seq for seq in made}
        for seq in made:
            self._scheduler.add(seq)
        return made

    def cancel(self, request_id: str) -> list[Event]:
        """End all sequences of a request now and free what they hold."""
        events: list[Event] = []
        for seq in list(self._sequences.get(request_id, {}).values()):
            seq.finish = FinishReason.CANCELLED
            seq.detokenizer.finish()
            events.append(Event.of(seq, len(seq.tokens), []))
            self._release(seq)
        return events

    @property
    def has_work(self) -> bool:
        """Whether any sequence has not ended."""
        return bool(self._sequences)

    def run(self) -> Iterator[Event]:
        """Step until every sequence has ended."""
        while self.has_work:
            yield from self.step()

    def step(self) -> list[Event]:
        """One forward of the target, and all that it decides.

        An exception of a drafter, of the model or of a verifier is a programming error: it
        propagates. The step is then undone, so that the next one starts from what was committed;
        cancel the requests that cannot go on.
        """
        clock = [time.perf_counter()]
        slots = self._scheduler.plan()
        if not slots:
            return []
        try:
            trees = self._draft(slots)
            clock.append(time.perf_counter())
            batch = self._batch(slots, trees)
            layers = sorted({i for slot in slots for i in slot.seq.drafter.needs.hidden_layers})
            forward = self.target.forward(batch, hidden_layers=layers)
            clock.append(time.perf_counter())
            verdicts = self._verify(slots, trees, batch, forward)
            clock.append(time.perf_counter())
        except BaseException:
            for slot in slots:
                self.target.kv.commit(slot.seq.id, np.empty(0, np.int64), ())
            raise
        events = self._commit(slots, trees, batch, forward, verdicts, layers)
        clock.append(time.perf_counter())
        for slot in slots:
            slot.seq.stats.record_times(clock)
        return events

    def _draft(self, slots: list[Slot]) -> list[TokenTree]:
        """One propose() per distinct drafter. A draft that failed (None) or that is no sound tree
        is a fault: it is counted, and the step goes on without it. A drafter that raises has a
        bug, which nothing hides: see :meth:`step`."""
        trees = [TokenTree.empty() for _ in slots]
        wanted = [i for i, slot in enumerate(slots) if slot.budget.num_nodes]
        for drafter in {id(slots[i].seq.drafter): slots[i].seq.drafter for i in wanted}.values():
            mine = [i for i in wanted if slots[i].seq.drafter is drafter]
            budgets = [slots[i].budget for i in mine]
            proposed = drafter.propose([slots[i].seq for i in mine], budgets)
            for i, tree, budget in zip(mine, proposed, budgets, strict=True):
                chains_only = slots[i].seq.verifier.chains_only
                if (
                    tree is None
                    or not tree.is_sound(self.target.vocab_size)
                    or (chains_only and not tree.is_chain)
                ):
                    slots[i].seq.stats.faults += 1
                else:
                    trees[i] = tree.truncate(budget.num_nodes, budget.depth)
        return trees

    def _batch(self, slots: list[Slot], trees: list[TokenTree]) -> ForwardBatch:
        target = self.target
        works = [
            Work(
                seq_id=slot.seq.id,
                chain=slot.seq.tokens[target.kv.length(slot.seq.id) : slot.stop],
                tree=tree,
                apart=slot.seq.suspect,
            )
            for slot, tree in zip(slots, trees, strict=True)
        ]
        return build(
            works, target.kv, windows=target.windows, dtype=target.dtype, device=target.device
        )

    def _verify(
        self, slots: list[Slot], trees: list[TokenTree], batch: ForwardBatch, forward: Forward
    ) -> list[Verdict | ModelFault | None]:
        """What each sequence keeps; None while its tokens are not complete. All logits are looked
        at, also inside a prompt: values that are not numbers are never committed."""
        verdicts: list[Verdict | ModelFault | None] = []
        logits = forward.logits.cpu()  # where a step waits for the device, once
        for slot, tree, rows in zip(slots, trees, batch.logit_rows, strict=True):
            seq = slot.seq
            laws = NodeLaws(logits[rows], seq, tree)
            if not laws.are_numbers:
                verdicts.append(ModelFault("the model's logits are not finite numbers"))
            elif not slot.complete:
                verdicts.append(None)
            else:
                verdicts.append(seq.verifier.verify(tree, laws, seq.noise, len(seq.tokens)))
        return verdicts

    def _commit(
        self,
        slots: list[Slot],
        trees: list[TokenTree],
        batch: ForwardBatch,
        forward: Forward,
        verdicts: list[Verdict | ModelFault | None],
        layers: list[int],
    ) -> list[Event]:
        """Tokens, KV, counters, what drafters learn, events: for a list of tokens, always."""
        events: list[Event] = []
        lessons: list[tuple[Sequence, Feedback]] = []
        for i, (slot, tree, verdict) in enumerate(zip(slots, trees, verdicts, strict=True)):
            seq = slot.seq
            if isinstance(verdict, ModelFault):
                events += self._fault(seq, verdict)
                continue
            start, old = self.target.kv.length(seq.id), len(seq.tokens)
            chain = seq.tokens[start : slot.stop]
            path: tuple[int, ...] = ()
            logprobs: list[TokenLogprob] = []
            logits = forward.logits[batch.logit_rows[i]]
            if verdict is not None:
                drafted = [int(tree.tokens[node]) for node in verdict.path]
                logprobs = emit(seq, [*drafted, verdict.token], logits, rows=[ROOT, *verdict.path])
                path = verdict.path[: len(seq.tokens) - old]
                seq.noise.forget(before=len(seq.tokens))
            seq.stats.record_step(tree, verdict, emitted=len(seq.tokens) - old)
            keep = np.array([*range(len(chain)), *(len(chain) + node for node in path)], np.int64)
            kept = [*chain, *(int(tree.tokens[node]) for node in path)]
            self.target.kv.commit(seq.id, keep, kept)
            computed = batch.rows[i].start + keep
            feedback = Feedback.of(
                seq.drafter.needs,
                forward,
                layers,
                computed,
                logits=logits,
                start=start,
                tokens=kept,
                tree=tree,
                num_accepted=len(path),
            )
            lessons.append((seq, feedback))
            if verdict is not None:
                events.append(Event.of(seq, old, logprobs))
        for drafter in {id(seq.drafter): seq.drafter for seq, _ in lessons}.values():
            mine = [lesson for lesson in lessons if lesson[0].drafter is drafter]
            drafter.observe([seq for seq, _ in mine], [feedback for _, feedback in mine])
        for slot in slots:
            if slot.seq.finish is not None:
                self._release(slot.seq)
        return events

    def _fault(self, seq: Sequence, fault: ModelFault) -> list[Event]:
        """Keep nothing of the step. Drafts may be the reason, or another sequence's values among
        this one's: from now on it is computed without either. If that fails too, it ends."""
        kv = self.target.kv
        seq.stats.faults += 1
        self.target.scrub(kv.scratch(seq.id).tolist())
        kv.commit(seq.id, np.empty(0, np.int64), ())
        if not seq.suspect:
            seq.suspect, seq.num_draft = True, 0
            return []
        seq.finish = FinishReason.ERROR
        seq.detokenizer.finish()
        return [Event.of(seq, len(seq.tokens), [], str(fault))]

    def _release(self, seq: Sequence) -> None:
        self._scheduler.remove(seq)
        seq.drafter.forget(seq.id)
        seq.noise.forget()  # whoever asked keeps the sequence
        del self._sequences[seq.request.id][seq.id]
        if not self._sequences[seq.request.id]:
            del self._sequences[seq.request.id]

    def _on_preempt(self, seq: Sequence) -> None:
        seq.stats.preemptions += 1
        seq.drafter.forget(seq.id)
