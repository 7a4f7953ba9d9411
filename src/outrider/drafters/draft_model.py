"""A small language model drafts for a large one: chains, and trees in the way of EAGLE-2."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch

from outrider.batch import Work, build
from outrider.drafters.base import Budget, DrafterContext, Feedback, Needs
from outrider.errors import ConfigError, OutOfSlots
from outrider.models.base import Model
from outrider.request import Sequence
from outrider.sampling import Past, Role, adjust_after, best_tokens, law_after
from outrider.tree import ROOT, TokenTree

CHUNK = 512
"""Tokens of one sequence that the draft model catches up with in one step."""

_KEYS = itertools.count()


@dataclass(slots=True)
class _Growth:
    """A tree being grown for one sequence. ``computed``: nodes whose keys lie in scratch."""

    seq: Sequence
    budget: Budget
    logits: torch.Tensor  # [frontier, V], what follows each frontier node
    frontier: list[int] = field(default_factory=lambda: [ROOT])
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    law: list[int] = field(default_factory=list)
    laws: list[torch.Tensor] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    failed: bool = False

    @property
    def drawn(self) -> bool:
        """Whether tokens are drawn from known laws rather than chosen."""
        return self.seq.verifier.needs_laws and self.seq.params.temperature > 0.0

    def add(self, node: int, tokens: list[int], scores: list[float]) -> None:
        """Give ``node`` children with these log-confidences of their own."""
        base = 0.0 if node == ROOT else self.scores[node]
        self.tokens += tokens
        self.scores += [base + score for score in scores]
        self.parents += [node] * len(tokens)

    def tree(self) -> TokenTree:
        return TokenTree(
            tokens=np.asarray(self.tokens, np.int64),
            parents=np.asarray(self.parents, np.int64),
            scores=np.asarray(self.scores, np.float64),
            law=np.asarray(self.law, np.int64) if self.drawn else None,
            laws=torch.stack(self.laws) if self.laws else None,
        )


class DraftModel:
    """Drafts with a model of the target's vocabulary.

    ``k`` nodes a step, ``depth`` forwards of the draft model. With ``width`` 1 the nodes are a
    chain. With more, and candidates that are chosen (greedy or coupled), the tree grows where the
    draft is confident: the ``width`` best nodes of a level get ``width`` children each, and the
    ``k`` nodes of the highest path confidence are proposed (EAGLE-2, arXiv 2406.16858). Where the
    verifier needs draws from known laws, the shape is fixed before anything is drawn: a trunk of
    ``depth`` nodes, the rest as siblings of its first nodes, drawn without replacement (as in
    Sequoia, arXiv 2402.12374). ``depth`` 0 takes k for chains and 2k/3 for trees.

    The model re-runs accepted tokens in its next forward; what it drafted is dropped at once.
    ``stream`` separates the noise of several draft models that serve one tree.
    """

    needs = Needs()

    def __init__(
        self,
        name: str,
        model: str,
        *,
        context: DrafterContext,
        k: int = 4,
        width: int = 1,
        depth: int = 0,
    ) -> None:
        for option, value, low in (("k", k, 1), ("width", width, 1), ("depth", depth, 0)):
            if value < low:
                raise ConfigError(f"drafter {name!r}: {option} is {value}, expected {low} or more")
        self.name = name
        self.num_draft = k
        self.width = width
        self.depth = depth
        self.is_chain = width == 1
        self.stream = context.stream
        self.model: Model = context.load_draft(model)
        self._vocab_size = context.vocab_size
        self._key = next(_KEYS)

    def table(self, seq_id: str) -> str:
        """Name of a sequence's table in the model's cache. Drafters that share a model share its
        pool, but each knows how far it computed a sequence itself."""
        return f"{self._key}:{seq_id}"

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree | None]:
        roots = self._catch_up(seqs)
        growths = {
            seq.id: _Growth(seq, self._limit(seq, budget), root)
            for seq, budget, root in zip(seqs, budgets, roots, strict=True)
            if root is not None
        }
        self._grow(list(growths.values()))
        trees: list[TokenTree | None] = []
        for seq in seqs:
            growth = growths.get(seq.id)
            if growth is None:
                trees.append(TokenTree.empty())
                continue
            table = self.table(seq.id)
            if growth.failed:
                self.model.scrub(self.model.kv.scratch(table).tolist())
            self.model.kv.commit(table, np.empty(0, np.int64), ())
            if growth.failed:
                trees.append(None)
                continue
            tree = growth.tree()
            trees.append(tree if growth.drawn else tree.best(growth.budget.num_nodes))
        return trees

    def observe(self, seqs: Seq[Sequence], feedback: Seq[Feedback]) -> None:
        pass

    def forget(self, seq_id: str) -> None:
        if self.table(seq_id) in self.model.kv:
            self.model.kv.close(self.table(seq_id))

    # Catching up.

    def _catch_up(self, seqs: Seq[Sequence]) -> list[torch.Tensor | None]:
        """Compute the committed tokens. Returns the logits ``[1, V]`` after the last one; None
        for a sequence that is still behind, beyond the model's context, without room, or that has
        a token which this model lacks."""
        kv = self.model.kv
        works: list[Work] = []
        ready: list[bool] = []
        for seq in seqs:
            table = self.table(seq.id)
            if table in kv and (kv.length(table) >= len(seq.tokens) or len(kv.scratch(table))):
                # Nothing new since the last draft, whose logits are gone; or an exception ended it.
                kv.close(table)
            if table not in kv:
                kv.open(table, seq.tokens)
            start = kv.length(table)
            stop = min(len(seq.tokens), start + CHUNK)
            chain = seq.tokens[start:stop]
            if (
                len(seq.tokens) >= self.model.context_length
                or max(chain) >= self.model.vocab_size
                or not self._reserve(table, len(chain))
            ):
                ready.append(False)
                continue
            works.append(Work(seq_id=table, chain=chain))
            ready.append(stop == len(seq.tokens))
        if not works:
            return [None] * len(seqs)
        rows = self._forward(works)
        computed = {work.seq_id: row for work, row in zip(works, rows, strict=True)}
        result: list[torch.Tensor | None] = []
        for seq, is_ready in zip(seqs, ready, strict=True):
            table = self.table(seq.id)
            row = computed.get(table)
            if row is None:
                result.append(None)
                continue
            _, finite = best_tokens(row)
            if finite:  # otherwise growing finds out, and nothing is kept
                chain = seq.tokens[kv.length(table) :][: len(kv.scratch(table))]
                kv.commit(table, np.arange(len(chain)), chain)
            result.append(row if is_ready or not finite else None)
        return result

    def _reserve(self, table: str, num_slots: int) -> bool:
        try:
            self.model.kv.reserve(table, num_slots)
        except OutOfSlots:
            return False
        return True

    def _forward(self, works: list[Work]) -> list[torch.Tensor]:
        """Logits ``[rows, V]`` of each work, over the target's vocabulary."""
        model = self.model
        batch = build(
            works, model.kv, windows=model.windows, dtype=model.dtype, device=model.device
        )
        logits = model.forward(batch).logits.cpu()
        missing = self._vocab_size - logits.shape[-1]
        if missing > 0:  # rows that only pad the target's vocabulary
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return [logits[rows, : self._vocab_size] for rows in batch.logit_rows]

    # Growing.

    def _limit(self, seq: Sequence, budget: Budget) -> Budget:
        nodes = budget.num_nodes
        depth = self.depth or (nodes if self.width == 1 else math.ceil(2 * nodes / 3))
        room = self.model.context_length - len(seq.tokens)
        return Budget(nodes, min(depth, budget.depth, nodes, room))

    def _grow(self, growths: list[_Growth]) -> None:
        """Level by level, one forward of the draft model for all sequences together."""
        for level in range(max((g.budget.depth for g in growths), default=0)):
            works: list[Work] = []
            active: list[_Growth] = []
            for growth in growths:
                if growth.failed or level >= growth.budget.depth or not growth.frontier:
                    continue
                best, finite = best_tokens(growth.logits)
                if not finite:
                    growth.failed = True
                    continue
                if self.width == 1 and growth.seq.params.is_plain_greedy:
                    growth.add(growth.frontier[0], [int(best[0])], [0.0])
                    growth.frontier = [len(growth.tokens) - 1]
                else:
                    self._expand(growth, level)
                if level + 1 < growth.budget.depth and growth.frontier:
                    work = self._work(growth)
                    if work is not None:
                        works.append(work)
                        active.append(growth)
            if works:
                for growth, rows in zip(active, self._forward(works), strict=True):
                    growth.logits = rows

    def _work(self, growth: _Growth) -> Work | None:
        """The next forward: the frontier's nodes. None, and no frontier, if slots ran out."""
        start = len(growth.computed)
        table = self.table(growth.seq.id)
        if not self._reserve(table, len(growth.frontier)):
            growth.frontier = []
            return None
        growth.computed += growth.frontier
        tree = growth.tree().select(growth.computed)
        return Work(seq_id=table, tree=tree, start=start)

    def _expand(self, growth: _Growth, level: int) -> None:
        """Give the frontier's nodes children and choose the next frontier among these."""
        width = self._children(growth, level)
        first = len(growth.tokens)
        for node, logits in zip(growth.frontier, growth.logits, strict=True):
            growth.add(node, *self._choose(growth, node, logits, width))
        new = range(first, len(growth.tokens))
        if growth.drawn:
            growth.frontier = list(new[:1])
        else:
            best = sorted(new, key=lambda node: -growth.scores[node])[: self.width]
            growth.frontier = sorted(best)

    def _children(self, growth: _Growth, level: int) -> int:
        """Children per node at this level; for draws a shape that no drawn value can change."""
        if not growth.drawn:
            return min(self.width, growth.budget.num_nodes)
        extra = growth.budget.num_nodes - growth.budget.depth - level * (self.width - 1)
        return 1 + max(0, min(self.width - 1, extra))

    def _choose(
        self, growth: _Growth, node: int, logits: torch.Tensor, width: int
    ) -> tuple[list[int], list[float]]:
        """At most ``width`` tokens after ``node``, best first, and their log-confidences."""
        seq, params = growth.seq, growth.seq.params
        path: list[int] = []
        position, above = len(seq.tokens), node
        while above != ROOT:
            path.insert(0, growth.tokens[above])
            above = growth.parents[above]
        position += len(path)
        past, ends = Past.of(seq, path), seq.end_tokens
        if params.temperature == 0.0:
            scores = adjust_after(logits, params, past, ends)
            if self.width == 1:
                return [int(scores.argmax())], [0.0]
            confidence = torch.log_softmax(scores, dim=-1)
        else:
            q = law_after(logits, params, past, ends)
            if growth.drawn:
                test = self.stream * 2**32 + node + 1
                race = seq.noise.race(q, test, Role.DRAFT, len(seq.tokens))
                width = min(width, int((q > 0).sum()))  # known before anything is drawn
                growth.law += [len(growth.laws)] * width
                growth.laws.append(q)
                return race.topk(width).indices.tolist(), [0.0] * width
            # The target will race with the same noise: what leads here is what it will draw.
            race = seq.noise.race(q, position)
            confidence = torch.log(race / race.sum())
        best = confidence.topk(width)
        kept = [i for i, value in enumerate(best.values.tolist()) if value > -np.inf]
        return [int(best.indices[i]) for i in kept], [float(best.values[i]) for i in kept]
