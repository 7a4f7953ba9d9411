"""What the loop needs of a drafter, and how one is named.

A drafter keeps no speculative state: it sees committed tokens only, so nothing ever has to be
rolled back.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import torch

from outrider.detokenize import Tokenizer
from outrider.models.base import Forward, Model
from outrider.request import Sequence
from outrider.tree import IntArray, TokenTree


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a drafter wants from the target's forwards beside the accepted tokens."""

    hidden_layers: tuple[int, ...] = ()
    probe_logits: bool = False


@dataclass(frozen=True, slots=True)
class Budget:
    """The most a drafter may propose for one sequence in one step."""

    num_nodes: int
    depth: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """What the target computed and kept of one sequence in one step.

    ``tokens`` int64 ``[n]`` at the positions ``start, start + 1, ...``: the tokens whose states
    are final. ``hidden`` ``[n, H]``: their states at ``Needs.hidden_layers``. ``probe_logits``
    ``[num probes, V]``. ``tree`` is what had been proposed, ``num_accepted`` how much of it held.
    """

    start: int
    tokens: IntArray
    tree: TokenTree
    num_accepted: int
    hidden: torch.Tensor | None = None
    probe_logits: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        needs: Needs,
        forward: Forward,
        layers: Seq[int],
        computed: IntArray,
        *,
        logits: torch.Tensor,
        start: int,
        tokens: Seq[int],
        tree: TokenTree,
        num_accepted: int,
    ) -> Self:
        """Select from a forward what ``needs`` asks for.

        ``layers``: the hidden layers that the forward returned. ``computed`` int64 ``[n]``: the
        rows of its batch that hold ``tokens``. ``logits`` ``[1 + N, V]``: those of the last token
        and the nodes of ``tree``.
        """
        hidden = None
        if needs.hidden_layers and forward.hidden is not None:
            states = forward.hidden[torch.from_numpy(computed)]
            states = states.view(len(states), len(layers), -1)
            hidden = states[:, [layers.index(layer) for layer in needs.hidden_layers]].flatten(1)
        return cls(
            start=start,
            tokens=np.asarray(tokens, np.int64),
            tree=tree,
            num_accepted=num_accepted,
            hidden=hidden,
            probe_logits=logits[1 + np.flatnonzero(tree.probe)]
            if needs.probe_logits and tree.probe is not None
            else None,
        )


class Drafter(Protocol):
    """Guesses what comes next. One drafter serves many sequences."""

    name: str
    """The specification it was made from, as shown in tables ("ngram:k=8")."""

    num_draft: int
    """Draft nodes a step when the request does not say."""

    is_chain: bool
    """Whether every proposal is a chain."""

    needs: Needs

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree | None]:
        """One tree per sequence; the empty tree if there is nothing to guess.

        None says that drafting failed for this sequence (numbers that are not numbers, say): the
        step goes on without drafts and is counted. Where ``seq.verifier.needs_laws`` is set, a
        drafter that draws by chance must use ``Role.DRAFT`` noise and give the laws it drew from;
        one that chooses without chance gives fixed candidates. A tree that exceeds its budget is
        cut by the loop.
        """
        ...

    def observe(self, seqs: Seq[Sequence], feedback: Seq[Feedback]) -> None:
        """Learn what the target computed. Called once a step for the sequences that ran."""
        ...

    def forget(self, seq_id: str) -> None:
        """A sequence ended (or was preempted): drop what is kept for it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterContext:
    """What a drafter may need while it is made.

    ``load_draft`` loads a model by name or path; it raises ConfigError unless the model's
    vocabulary is the target's. ``stream``: number of this drafter among several that serve one
    tree, so that what they draw by chance is independent. ``target``: the model it drafts for,
    with the ``fingerprint`` of its weights and the ``tokenizer``; None where a drafter that does
    not need them is made alone.
    """

    vocab_size: int
    load_draft: Callable[[str], Model]
    stream: int = 0
    target: Model | None = None
    fingerprint: str | None = None
    tokenizer: Tokenizer | None = None
