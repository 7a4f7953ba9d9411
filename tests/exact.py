"""Exact laws by enumeration.

The chance that a drafter and a verifier use is replaced by an :class:`Oracle`, which takes every
outcome in turn and knows its probability. Running the project's own code under it gives the law
of the output without sampling error; a lossless verifier's equals the target's product law.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from outrider.sampling import Noise, Role
from outrider.tree import FIXED, ROOT, TokenTree
from outrider.verify import Verdict, Verifier

T = TypeVar("T")
Prefix = tuple[int, ...]
Table = dict[Prefix, torch.Tensor]
"""The law (float64 ``[V]``) of the token after each prefix."""

BASE = 5
"""Length of the imagined sequence at which the tree hangs."""

TOLERANCE = 1e-12


class Oracle:
    """A Chance whose outcomes are dictated by a script, which grows where it ends.

    Asking twice for the same piece of noise is an error: the second outcome would not be
    independent of the first, as the enumeration takes it to be.
    """

    def __init__(self, script: list[tuple[list[int], int]]) -> None:
        self._script = script
        self._next = 0
        self._used: set[tuple[str, int, int]] = set()
        self.probability = 1.0
        self.last_position: int | None = None

    def choose(self, probs: list[float], key: tuple[str, int, int]) -> int:
        """An index, of the given probabilities. ``key`` names the noise that decides it."""
        assert key not in self._used, f"noise {key} is used twice"
        assert abs(sum(probs) - 1.0) < 1e-9, f"probabilities sum to {sum(probs)}"
        assert min(probs) >= 0.0, f"negative probability in {probs}"
        self._used.add(key)
        if self._next == len(self._script):
            self._script.append(([i for i, p in enumerate(probs) if p > 0.0], 0))
        options, taken = self._script[self._next]
        self._next += 1
        self.probability *= probs[options[taken]]
        return options[taken]

    def draw(self, probs: torch.Tensor, position: int) -> int:
        self.last_position = position
        return self.choose(probs.tolist(), ("draw", position, 0))

    def accept(self, probability: float, base: int, test: int) -> bool:
        assert base == BASE
        assert -TOLERANCE <= probability <= 1.0 + TOLERANCE, f"accept with {probability}"
        probability = min(max(probability, 0.0), 1.0)  # rounding
        return self.choose([1.0 - probability, probability], ("accept", base, test)) == 1


def outcomes(run: Callable[[Oracle], T]) -> Iterator[tuple[T, float]]:
    """Everything ``run`` can return, with the probability of getting there."""
    script: list[tuple[list[int], int]] = []
    while True:
        oracle = Oracle(script)
        result = run(oracle)
        yield result, oracle.probability
        while script and script[-1][1] + 1 == len(script[-1][0]):
            script.pop()
        if not script:
            return
        options, taken = script[-1]
        script[-1] = (options, taken + 1)


@dataclass(frozen=True)
class Node:
    """One node of a proposal, before its token is known.

    ``source``: the draft table that its token is drawn from. FIXED: it is the token of that
    ``rank`` in table 0, chosen without chance.
    """

    source: int = 0
    rank: int = 0
    probe: bool = False
    children: tuple[Node, ...] = ()


def grid(*widths: int, source: int = 0) -> tuple[Node, ...]:
    """A tree in which every node of depth d has ``widths[d]`` children, ranks ascending."""
    if not widths:
        return ()
    below = grid(*widths[1:], source=source)
    return tuple(Node(source=source, rank=i, children=below) for i in range(widths[0]))


@dataclass(frozen=True)
class Drafts:
    """A drafter that draws the tokens of ``shape`` from ``tables``.

    Without replacement, a law may run out of tokens before its siblings are all drawn. The rest
    is then left out, or (``pad``) filled with tokens that the law cannot give, as a top-k over
    the exponential race would do.
    """

    shape: tuple[Node, ...]
    tables: tuple[Table, ...]
    replacement: bool = False
    pad: bool = False

    def propose(self, oracle: Oracle) -> TokenTree:
        tokens: list[int] = []
        parents: list[int] = []
        law: list[int] = []
        laws: list[torch.Tensor] = []
        probe: list[bool] = []

        def grow(parent: int, prefix: Prefix, nodes: tuple[Node, ...]) -> None:
            rows: dict[int, int] = {}
            rest: dict[int, list[float]] = {}
            given: set[int] = set()
            for node in nodes:
                if node.source == FIXED:
                    row = FIXED
                    token = int(self.tables[0][prefix].argsort(descending=True)[node.rank])
                else:
                    if node.source not in rows:
                        rows[node.source] = len(laws)
                        laws.append(self.tables[node.source][prefix])
                        rest[node.source] = laws[-1].tolist()
                    row, left = rows[node.source], rest[node.source]
                    mass = sum(left)
                    if mass > 0.0:
                        key = ("draft", len(tokens), 0)
                        token = oracle.choose([x / mass for x in left], key)
                        if not self.replacement:
                            left[token] = 0.0
                    elif self.pad:
                        token = next(x for x in range(len(left)) if x not in given)
                    else:
                        continue
                index = len(tokens)
                given.add(token)
                tokens.append(token)
                parents.append(parent)
                law.append(row)
                probe.append(node.probe)
                grow(index, (*prefix, token), node.children)

        grow(ROOT, (), self.shape)
        return TokenTree(
            tokens=np.asarray(tokens, np.int64),
            parents=np.asarray(parents, np.int64),
            law=np.asarray(law, np.int64) if laws else None,
            laws=torch.stack(laws) if laws else None,
            replacement=self.replacement,
            probe=np.asarray(probe, np.bool_) if any(probe) else None,
        )


class TableLaws:
    """The target's laws at the nodes of one tree, looked up by the path's tokens.

    ``greedy``: report point masses as the engine does at temperature 0.
    """

    def __init__(self, table: Table, tree: TokenTree, *, greedy: bool = False) -> None:
        self._table = table
        self._tree = tree
        self._greedy = greedy

    def __call__(self, node: int) -> torch.Tensor:
        return self._table[tuple(self._tree.path_tokens(node))]

    def greedy(self, node: int) -> int | None:
        return int(self(node).argmax()) if self._greedy else None


def verify(
    verifier: Verifier, tree: TokenTree, target: Table, oracle: Oracle, *, greedy: bool = False
) -> Verdict:
    """One verdict, checked for form: a path from the root, and a draw at the place after it."""
    verdict = verifier.verify(tree, TableLaws(target, tree, greedy=greedy), oracle, BASE)
    path = list(verdict.path)
    assert path == (tree.path(path[-1]) if path else []), f"{path} is no path from the root"
    assert not any(tree.is_probe(node) for node in path), f"{path} holds a probe node"
    if oracle.last_position is not None:
        assert oracle.last_position == BASE + len(path), "the last draw is for another position"
    return verdict


def product_law(target: Table, length: int) -> dict[Prefix, float]:
    """The target's law of the first ``length`` tokens."""
    return _extend({(): 1.0}, target, length)


def output_law(
    propose: Callable[[Oracle], TokenTree],
    verifier: Verifier,
    target: Table,
    length: int = 3,
    *,
    greedy: bool = False,
) -> tuple[dict[Prefix, float], float]:
    """Law of the first ``length`` tokens of one block followed by plain decoding, and the
    expected number of accepted nodes."""
    law: dict[Prefix, float] = defaultdict(float)
    accepted = 0.0
    for tree, weight in outcomes(propose):

        def run(oracle: Oracle, tree: TokenTree = tree) -> Verdict:
            return verify(verifier, tree, target, oracle, greedy=greedy)

        for verdict, probability in outcomes(run):
            tokens = tuple(int(tree.tokens[node]) for node in verdict.path)
            law[(*tokens, verdict.token)[:length]] += weight * probability
            accepted += weight * probability * len(tokens)
    return _extend(law, target, length), accepted


def distance(law: dict[Prefix, float], other: dict[Prefix, float]) -> float:
    """Largest difference of two laws at any one outcome."""
    return max(abs(law.get(key, 0.0) - other.get(key, 0.0)) for key in {*law, *other})


def decode_blocks(verifier: Verifier, target: Table, draft: Table, noise: Noise) -> tuple[int, ...]:
    """Three tokens by chains of two drafts, block after block, under real noise. The tables hold
    laws of the next token given the last one."""
    tokens: tuple[int, ...] = ()
    while len(tokens) < 3:
        base = len(tokens)
        drafted: tuple[int, ...] = ()
        laws = []
        for _ in range(2):
            laws.append(draft[(tokens + drafted)[-1:]])
            position = base + len(drafted)
            drafted += (int(noise.race(laws[-1], position, Role.DRAFT, base).argmax()),)
        tree = TokenTree.chain(drafted, torch.stack(laws))
        table = {drafted[:n]: target[(tokens + drafted[:n])[-1:]] for n in range(len(drafted) + 1)}
        verdict = verifier.verify(tree, TableLaws(table, tree), noise, base)
        tokens += (*(drafted[node] for node in verdict.path), verdict.token)
    return tokens[:3]


def _extend(law: dict[Prefix, float], target: Table, length: int) -> dict[Prefix, float]:
    full: dict[Prefix, float] = defaultdict(float)
    todo = list(law.items())
    while todo:
        prefix, probability = todo.pop()
        if len(prefix) == length:
            full[prefix] += probability
            continue
        for token, p in enumerate(target[prefix].tolist()):
            if p > 0.0:
                todo.append(((*prefix, token), probability * p))
    return full


def random_table(seed: int, vocab: int, depth: int, *, zeros: bool = False) -> Table:
    """Laws after all prefixes of at most ``depth`` tokens; ``zeros``: about a third of the tokens
    of each law are impossible."""
    rng = random.Random(seed)
    table: Table = {}
    for length in range(depth + 1):
        for prefix in itertools.product(range(vocab), repeat=length):
            weights = [float(rng.randint(1, 9)) for _ in range(vocab)]
            if zeros:
                kept = rng.randrange(vocab)
                weights = [
                    w if i == kept or rng.random() > 1 / 3 else 0.0 for i, w in enumerate(weights)
                ]
            law = torch.tensor(weights, dtype=torch.float64)
            table[prefix] = law / law.sum()
    return table


def reference_tables() -> tuple[Table, Table]:
    """Target and draft of the worked example whose acceptance lengths are known: three tokens,
    weights 1 to 9 from ``random.Random(3)``, drawn in turn for target and draft."""
    rng = random.Random(3)

    def weights() -> torch.Tensor:
        law = torch.tensor([float(rng.randint(1, 9)) for _ in range(3)], dtype=torch.float64)
        return law / law.sum()

    target: Table = {}
    draft: Table = {}
    for length in range(4):
        for prefix in itertools.product(range(3), repeat=length):
            target[prefix], draft[prefix] = weights(), weights()
    return target, draft
