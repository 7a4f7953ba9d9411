"""The law of the next token, and the checks of the parameters that make it."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.errors import ConfigError, UserError
from outrider.request import SEED_LIMIT, Request, SamplingParams, Sequence, sequence_seed
from outrider.sampling import NodeLaws, adjust, law, truncate
from outrider.tree import ROOT, TokenTree, walk

NO_END: frozenset[int] = frozenset()


def plain_law(logits: torch.Tensor, **params: Any) -> torch.Tensor:
    return law(logits, SamplingParams(**params), prompt=(), output=(), end_tokens=NO_END)


# The law against a slow one, written from the documentation in plain Python.


def slow_law(
    logits: list[float],
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    end_tokens: frozenset[int],
) -> list[float]:
    scores = list(logits)
    for token in range(len(scores)):
        if token in prompt or token in output:
            factor = params.repetition_penalty
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        if token in output:
            scores[token] -= params.presence_penalty
            scores[token] -= params.frequency_penalty * output.count(token)
        scores[token] += params.logit_bias.get(token, 0.0)
        if token in end_tokens and len(output) < params.min_tokens:
            scores[token] = -math.inf
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if params.temperature == 0.0:
        return [float(token == order[0]) for token in range(len(scores))]
    top = scores[order[0]]
    weights = [math.exp((score - top) / params.temperature) for score in scores]
    if params.top_k:
        for token in order[params.top_k :]:
            weights[token] = 0.0
    total, before = sum(weights), 0.0
    for token in order:
        share = weights[token] / total
        if before >= params.top_p:
            weights[token] = 0.0
        before += share
    most = max(weights)
    weights = [w if w >= params.min_p * most else 0.0 for w in weights]
    return [w / sum(weights) for w in weights]


def random_params(rng: random.Random, vocab: int) -> SamplingParams:
    def maybe(value: Any, off: Any) -> Any:
        return value if rng.random() < 0.5 else off

    return SamplingParams(
        temperature=maybe(rng.uniform(0.2, 2.0), rng.choice([0.0, 1.0])),
        top_k=maybe(rng.randint(1, vocab + 2), 0),
        top_p=maybe(rng.uniform(0.05, 1.0), 1.0),
        min_p=maybe(rng.uniform(0.0, 0.5), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2.0), 1.0),
        presence_penalty=maybe(rng.uniform(-2.0, 2.0), 0.0),
        frequency_penalty=maybe(rng.uniform(-2.0, 2.0), 0.0),
        logit_bias=maybe({rng.randrange(vocab): rng.uniform(-5, 5) for _ in range(3)}, {}),
        min_tokens=maybe(rng.randint(0, 8), 0),
    )


@pytest.mark.parametrize("seed", range(200))
def test_law_is_the_slow_law(seed: int) -> None:
    rng = random.Random(seed)
    vocab = rng.randint(2, 12)
    params = random_params(rng, vocab)
    logits = [rng.gauss(0.0, 2.0) for _ in range(vocab)]
    prompt = [rng.randrange(vocab) for _ in range(rng.randint(0, 5))]
    output = [rng.randrange(vocab) for _ in range(rng.randint(0, 5))]
    ends = frozenset({rng.randrange(vocab)})
    given = torch.tensor(logits)
    untouched = given.clone()
    got = law(given, params, prompt=prompt, output=output, end_tokens=ends)
    assert torch.equal(given, untouched)
    assert got.dtype == torch.float32
    expected = slow_law(given.tolist(), params, prompt, output, ends)
    assert got.tolist() == pytest.approx(expected, abs=2e-6), params
    counted = law(
        given, params, prompt=prompt, output=output, end_tokens=ends, counts=Counter(output)
    )
    assert torch.equal(got, counted)


@pytest.mark.parametrize("seed", range(50))
def test_law_is_that_of_transformers(seed: int) -> None:
    """Where the meanings are the same: no ties, repetition penalty over prompt and output."""
    rng = random.Random(seed)
    vocab = 40
    params = SamplingParams(
        temperature=rng.uniform(0.3, 2.0),
        top_k=rng.randint(1, vocab),
        top_p=rng.uniform(0.3, 0.99),
        min_p=rng.uniform(0.01, 0.3),
        repetition_penalty=rng.uniform(0.7, 1.8),
        min_tokens=rng.randint(0, 6),
    )
    prompt = [rng.randrange(vocab) for _ in range(5)]
    output = [rng.randrange(vocab) for _ in range(3)]
    end = rng.randrange(vocab)
    logits = torch.tensor([rng.gauss(0.0, 2.0) for _ in range(vocab)])
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
            MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, [end], "cpu"),
            TemperatureLogitsWarper(params.temperature),
            TopKLogitsWarper(params.top_k),
            TopPLogitsWarper(params.top_p),
            MinPLogitsWarper(params.min_p),
        ]
    )
    theirs = torch.softmax(processors(torch.tensor([prompt + output]), logits[None].clone()), -1)[0]
    ours = law(logits, params, prompt=prompt, output=output, end_tokens=frozenset({end}))
    assert ours.tolist() == pytest.approx(theirs.tolist(), abs=2e-6), params


def test_truncation_goes_top_k_then_top_p_then_min_p() -> None:
    probs = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])
    logits = probs.log()
    assert plain_law(logits, top_k=2).tolist() == pytest.approx([0, 4 / 7, 0, 3 / 7, 0])
    # 0.4 + 0.3 reaches 0.6 of the whole, but of the top three 0.4 / 0.85 is below it as well.
    assert plain_law(logits, top_p=0.6).tolist() == pytest.approx([0, 4 / 7, 0, 3 / 7, 0])
    assert plain_law(logits, top_p=0.45, top_k=3).count_nonzero() == 1  # 0.4 / 0.85 > 0.45
    assert plain_law(logits, top_p=0.45).count_nonzero() == 2  # 0.4 alone is not enough
    assert plain_law(logits, min_p=0.3).tolist() == pytest.approx(
        [0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85]
    )
    assert plain_law(logits, top_p=1e-9).tolist() == [0, 1, 0, 0, 0]
    assert torch.equal(plain_law(logits, top_k=9), plain_law(logits))
    assert plain_law(logits, min_p=1.0).tolist() == [0, 1, 0, 0, 0]


def test_ties_go_to_the_lower_token() -> None:
    logits = torch.tensor([0.0, 1.0, 1.0, 1.0])
    assert plain_law(logits, temperature=0.0).tolist() == [0, 1, 0, 0]
    assert plain_law(logits, top_k=2).tolist() == pytest.approx([0, 0.5, 0.5, 0])
    assert plain_law(logits, top_k=1).tolist() == [0, 1, 0, 0]
    assert plain_law(logits, top_p=0.5).tolist() == pytest.approx([0, 0.5, 0.5, 0])
    # In a long row as well: an unstable sort would mix up equals.
    equal = truncate(torch.full((5000,), 1 / 5000), SamplingParams(top_k=7))
    assert equal.nonzero().flatten().tolist() == list(range(7))


@pytest.mark.parametrize("temperature", [1e-3, 1e-40, 1e-300])
def test_tiny_temperatures_are_numbers(temperature: float) -> None:
    logits = torch.tensor([90.0, 100.0, -300.0, 100.0])
    got = plain_law(logits, temperature=temperature)
    assert got.tolist() == pytest.approx([0, 0.5, 0, 0.5])


def test_half_precision_and_impossible_tokens() -> None:
    logits = torch.tensor([1.0, -torch.inf, 2.0], dtype=torch.bfloat16)
    got = plain_law(logits)
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx([1 / (1 + math.e), 0, math.e / (1 + math.e)], abs=1e-6)


def test_an_end_token_is_impossible_until_min_tokens_whatever_its_bias() -> None:
    params = SamplingParams(min_tokens=2, logit_bias={1: 100.0}, temperature=0.0)
    logits = torch.zeros(3)
    ends = frozenset({1})
    early = law(logits, params, prompt=(), output=(0,), end_tokens=ends)
    assert early.tolist() == [1, 0, 0]
    late = law(logits, params, prompt=(), output=(0, 0), end_tokens=ends)
    assert late.tolist() == [0, 1, 0]


def test_presence_and_frequency_count_output_only() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    got = adjust(torch.zeros(4), params, prompt=(3, 3), output=(1, 2, 2), end_tokens=NO_END)
    assert got.tolist() == [0.0, -0.75, -1.0, 0.0]


# The law at the nodes of a tree.

TREE = TokenTree.from_paths([[1, 1, 2], [1, 3], [0, 2, 2, 2]])
NODE_PARAMS = {
    "plain": SamplingParams(),
    "greedy": SamplingParams(temperature=0.0),
    "greedy, bias": SamplingParams(temperature=0.0, logit_bias={2: 0.7}),
    "greedy, penalties": SamplingParams(temperature=0.0, frequency_penalty=1.5),
    "greedy, min_tokens": SamplingParams(temperature=0.0, min_tokens=5),
    "repetition": SamplingParams(repetition_penalty=1.7),
    "presence": SamplingParams(presence_penalty=1.1),
    "frequency": SamplingParams(frequency_penalty=0.9, top_k=3),
    "min_tokens": SamplingParams(min_tokens=5, top_p=0.9),
    "all": SamplingParams(
        temperature=0.8,
        top_k=4,
        min_p=0.05,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        logit_bias={0: 1.0},
        min_tokens=4,
    ),
}


@pytest.mark.parametrize("name", NODE_PARAMS)
def test_node_laws_are_the_laws_of_the_paths(
    name: str, make_sequence: Callable[..., Sequence]
) -> None:
    params = NODE_PARAMS[name]
    prompt, output, ends = [4, 5, 1], [2, 0, 2], frozenset({1})
    seq = make_sequence(prompt, output, params=params, end_tokens=ends)
    logits = torch.randn(1 + len(TREE), 6, generator=torch.Generator().manual_seed(3))
    before = Counter(seq.output_counts)
    laws = NodeLaws(logits, seq, TREE)
    for node in reversed(list(walk(TREE))):  # asked in any order
        path = [*output, *TREE.path_tokens(node)]
        expected = law(logits[node + 1], params, prompt=prompt, output=path, end_tokens=ends)
        assert torch.equal(laws(node), expected), f"node {node}"
        assert laws(node) is laws(node)
        greedy = int(expected.argmax()) if params.temperature == 0.0 else None
        assert laws.greedy(node) == greedy
        assert torch.equal(laws.logits(node), logits[node + 1])
    assert seq.output_counts == before
    assert seq.output == output


def test_min_tokens_is_reached_inside_a_tree(make_sequence: Callable[..., Sequence]) -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2)
    seq = make_sequence([0], [0], params=params, end_tokens=frozenset({1}))
    logits = torch.tensor([[0.0, 9.0, 1.0]]).repeat(3, 1)
    laws = NodeLaws(logits, seq, TokenTree.chain([2, 2]))
    assert [laws.greedy(node) for node in (ROOT, 0, 1)] == [2, 1, 1]


# Parameters that cannot be honoured.

BAD: list[tuple[str, Any]] = [
    *(
        (name, value)
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
        for value in (math.nan, math.inf, -math.inf, True, "1", None)
    ),
    *(
        (name, value)
        for name in ("top_k", "min_tokens", "max_tokens", "n", "logprobs", "seed")
        for value in (-1, 1.0, math.nan, True, "1")
    ),
    ("temperature", -0.1),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("max_tokens", 0),
    ("n", 0),
    ("seed", 2**63),
    ("stop", "end"),
    ("stop", ("",)),
    ("stop", (3,)),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", (True,)),
    ("stop_token_ids", ("3",)),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"3": 1.0}),
    ("logit_bias", {3: math.nan}),
    ("logit_bias", {3: math.inf}),
    ("logit_bias", {3: "1"}),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_parameters_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, UserError)
    assert "\n" not in str(caught.value)
    assert "expected" in str(caught.value)


def test_bounds_are_allowed() -> None:
    SamplingParams(
        temperature=0, top_p=1, min_p=1, seed=2**63 - 1, logprobs=0, min_tokens=3, max_tokens=3
    )
    with pytest.raises(ConfigError, match="min_tokens is 4, max_tokens 3"):
        SamplingParams(min_tokens=4, max_tokens=3)


def test_a_request_without_a_seed_gets_one_of_its_own() -> None:
    params = SamplingParams()
    seeds = {sequence_seed(params, 0) for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < SEED_LIMIT for seed in seeds)
    assert Request(id="a", prompt=(1,)).params == params


def test_derived_seeds_are_all_different() -> None:
    seeds = [
        sequence_seed(SamplingParams(seed=seed), index) for seed in range(50) for index in range(50)
    ]
    assert len(set(seeds)) == len(seeds)
    assert sequence_seed(SamplingParams(seed=7), 0) == 7
