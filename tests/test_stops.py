"""Every end, at every place inside an accepted run; text, log-probabilities and parameters there.

The drafts of the oracle are always right, so one step accepts a whole block, and what lies behind
the end was computed and accepted by the target as well.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from harness import (
    END,
    VOCAB,
    Harness,
    Scripted,
    fake,
    make_engine,
    oracle,
    plain,
    prompt_of,
    request,
    text_of,
)
from outrider.errors import ConfigError, UserError
from outrider.request import FinishReason, Request, SamplingParams, TokenLogprob
from outrider.tree import TokenTree

K = 5
VERIFIERS = ["coupled", "rejection", "block", "traversal"]
DRAFTERS = ["none", "ngram:k=4,n=2", "draft:good,k=4", "draft:good,k=6,width=3", "oracle", "random"]


def with_oracle(num_draft: int = K, **options: Any) -> Harness:
    target = fake()
    return make_engine(
        target, drafters={"right": lambda: oracle(target, num_draft=num_draft)}, **options
    )


def distinct_start(num_tokens: int = K + 3, **params: Any) -> Request:
    """A request whose first ``num_tokens`` plain tokens are all different."""
    for seed in count():
        one = request(prompt_of(12, seed), max_tokens=40, ignore_eos=True, **params)
        start = plain(one)[0].tokens[:num_tokens]
        if len(set(start)) == num_tokens:
            return one
    raise AssertionError


def changed(one: Request, **values: Any) -> Request:
    return replace(one, params=replace(one.params, **values))


# An end token at every offset of the block (text after it; ends hidden by the block).


@pytest.mark.parametrize("offset", range(K + 1))
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_an_end_token_inside_the_block_ends_the_answer(offset: int, verifier: str) -> None:
    one = distinct_start()
    tokens = plain(one)[0].tokens
    one = replace(changed(one, ignore_eos=False), drafter="right", verifier=verifier)
    (answer,) = with_oracle(end_tokens=[tokens[offset]]).run(one)
    assert answer.tokens == tokens[: offset + 1]
    assert answer.text == text_of(tokens[:offset])
    assert answer.finish is FinishReason.STOP
    stats = answer.seq.stats
    assert (stats.tokens, stats.target_forwards) == (offset + 1, 1)
    assert (stats.drafted, stats.accepted) == (K, min(offset + 1, K))


@pytest.mark.parametrize("offset", range(K + 1))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_ignored_end_token_ends_nothing(offset: int, temperature: float) -> None:
    one = distinct_start(temperature=temperature)
    tokens = plain(one)[0].tokens
    engine = with_oracle(end_tokens=[tokens[offset]])
    (answer,) = engine.run(replace(one, drafter="right"))
    assert answer.tokens == tokens
    assert answer.text == text_of(tokens)
    assert answer.finish is FinishReason.LENGTH
    # A stop token of the request is obeyed all the same.
    stopped = changed(one, stop_token_ids=(tokens[offset],))
    (answer,) = with_oracle().run(replace(stopped, drafter="right"))
    assert answer.tokens == tokens[: offset + 1]
    assert answer.finish is FinishReason.STOP


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_an_end_token_ends_every_later_block(drafter: str) -> None:
    one = request(prompt_of(12, 4), max_tokens=40, ignore_eos=True, temperature=1.0)
    tokens = plain(one)[0].tokens
    for token in dict.fromkeys(tokens):
        stop_at = changed(one, ignore_eos=False)
        (answer,) = make_engine(end_tokens=[token]).run(replace(stop_at, drafter=drafter))
        assert answer.tokens == tokens[: tokens.index(token) + 1]
        assert answer.finish is FinishReason.STOP


# The earliest event wins (a length limit that hides an earlier stop, leaked tokens).


@pytest.mark.parametrize("max_tokens", range(1, K + 3))
@pytest.mark.parametrize("offset", range(K + 1))
def test_the_earliest_end_wins(max_tokens: int, offset: int) -> None:
    one = distinct_start()
    tokens = plain(one)[0].tokens
    one = changed(one, max_tokens=max_tokens, stop_token_ids=(tokens[offset],))
    (answer,) = with_oracle().run(replace(one, drafter="right"))
    stops = offset + 1 <= max_tokens
    assert answer.tokens == tokens[: offset + 1 if stops else max_tokens]
    assert answer.finish is (FinishReason.STOP if stops else FinishReason.LENGTH)


@pytest.mark.parametrize("offset", range(K))
def test_a_stop_string_before_an_end_token_and_the_limit_wins(offset: int) -> None:
    """All three lie in one block: the first in the text decides."""
    for seed in count():
        one = request(prompt_of(12, seed), max_tokens=40, ignore_eos=True)
        tokens = plain(one)[0].tokens
        piece = text_of([tokens[offset]])
        usable = piece and "\ufffd" not in piece and piece not in text_of(tokens[:offset])
        if usable and tokens[offset + 1] not in tokens[: offset + 1]:
            break
    one = changed(one, stop=(piece,), stop_token_ids=(tokens[offset + 1],), max_tokens=offset + 3)
    (answer,) = with_oracle().run(replace(one, drafter="right"))
    assert answer.tokens == tokens[: offset + 1]
    assert answer.text == text_of(tokens[: offset + 1])[: -len(piece)]
    assert answer.finish is FinishReason.STOP


# Stop strings over tokens and steps (unsupported, or the text behind them kept).


def first_stop(tokens: list[int], stop: str) -> int:
    """Tokens until ``stop`` is complete."""
    return next(n for n in range(1, len(tokens) + 1) if stop in text_of(tokens[:n]))


@pytest.mark.parametrize("num_draft", [0, 1, 2, 3, K])
def test_a_stop_string_split_over_tokens_and_steps(num_draft: int) -> None:
    one = request(prompt_of(12, 2), max_tokens=40, ignore_eos=True)
    tokens = plain(one)[0].tokens
    whole = text_of(tokens)
    starts = [i for i in range(len(whole) - 4) if "\ufffd" not in whole[i : i + 4]]
    assert len(starts) > 8
    for start in starts:
        stop = whole[start : start + 4]
        (answer,) = with_oracle(num_draft).run(replace(changed(one, stop=(stop,)), drafter="right"))
        length = first_stop(tokens, stop)
        assert answer.tokens == tokens[:length]
        assert answer.text == whole[: whole.find(stop)]
        assert answer.finish is FinishReason.STOP
        assert answer.seq.stats.tokens == length


@pytest.mark.parametrize("offset", range(K + 1))
def test_keys_and_prefix_index_end_with_the_kept_tokens(offset: int) -> None:
    """What was accepted behind the end is not in the prefix index, though its keys were right."""
    for num_prompt in range(11, 17):
        one = replace(distinct_start(), prompt=prompt_of(num_prompt, 3))
        tokens = plain(one)[0].tokens
        last = tokens.index(tokens[offset])
        one = changed(one, stop_token_ids=(tokens[offset],))
        harness = with_oracle()
        (answer,) = harness.add(replace(one, drafter="right"))
        while harness.engine.has_work:
            harness.step()
        assert answer.tokens == tokens[: last + 1]
        assert answer.seq.stats.target_forwards == 1
        num_kept = num_prompt + (last + 1 if last < K else last)  # the bonus token has no keys yet
        assert harness.target.kv.open("probe", [*one.prompt, *tokens]) == num_kept // 16 * 16
        harness.target.kv.close("probe")
        harness.check_empty()


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_an_end_token_in_a_draft_ends_nothing(verifier: str) -> None:
    """The draft says END at every place; the target never does."""
    one = request(max_tokens=20, logit_bias={END: -100.0})
    drafters = {
        "ends": lambda: Scripted(lambda seq, budget: TokenTree.chain([END] * 3), is_chain=True),
        "ends after a right token": lambda: Scripted(
            lambda seq, budget: TokenTree.chain(
                [plain(one)[0].tokens[seq.num_output], END, END][: budget.depth]
            ),
            is_chain=True,
        ),
    }
    for name in drafters:
        (answer,) = make_engine(drafters=drafters).run(
            replace(one, drafter=name, verifier=verifier)
        )
        assert answer.essence == plain(one)[0].essence
        assert answer.finish is FinishReason.LENGTH
        assert answer.seq.stats.drafted > 19


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_min_tokens_counts_tokens_and_not_steps(drafter: str) -> None:
    """At temperature 2 almost every token is an end: the answer ends right behind min_tokens."""
    ends = tuple(range(VOCAB - 2))
    for min_tokens in range(9):
        one = request(temperature=2.0, min_tokens=min_tokens, stop_token_ids=ends, drafter=drafter)
        (answer,) = make_engine().run(one)
        assert answer.essence == plain(one)[0].essence
        assert not set(answer.tokens[:min_tokens]) & set(ends)
        assert answer.tokens[-1] in ends


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_penalties_see_the_tokens_before_them_in_the_block(drafter: str) -> None:
    """A presence penalty that forbids every token already said, also within one block."""
    for temperature in (0.0, 1.0):
        one = request(
            temperature=temperature, presence_penalty=1000.0, ignore_eos=True, drafter=drafter
        )
        (answer,) = make_engine().run(one)
        assert len(set(answer.tokens)) == len(answer.tokens) == 24
        assert answer.essence == plain(one)[0].essence


# Text is complete at the end (a last piece that was held back is lost).


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_held_back_text_is_flushed_at_the_end(drafter: str) -> None:
    for max_tokens in range(1, 12):
        one = request(prompt_of(12, 2), max_tokens=max_tokens, ignore_eos=True, drafter=drafter)
        whole = text_of(plain(one)[0].tokens)
        for length in (1, 2, len(whole)):  # tails that might have become the stop string
            held = changed(one, stop=(whole[-length:] + "zzz",)) if whole else one
            (answer,) = make_engine().run(held)
            assert answer.text == whole
            assert answer.finish is FinishReason.LENGTH


# Log-probabilities (0.0 for every token; those of another row).


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_top", [0, 3])
def test_logprobs_are_those_of_plain_decoding(
    drafter: str, temperature: float, num_top: int
) -> None:
    one = request(temperature=temperature, logprobs=num_top, drafter=drafter, presence_penalty=0.5)
    (answer,), (expected,) = make_engine().run(one), plain(one)
    assert answer.tokens == expected.tokens
    assert len(answer.logprobs) == len(answer.tokens)
    for mine, other in zip(answer.logprobs, expected.logprobs, strict=True):
        assert_close(mine, other)
    target = fake()
    for i, mine in enumerate(answer.logprobs):
        law = torch.log_softmax(target.plain_logits([*one.prompt, *answer.tokens[:i]]), 0)
        best = law.topk(num_top)
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        assert_close(
            mine, TokenLogprob(token=answer.tokens[i], logprob=float(law[mine.token]), top=top)
        )


def assert_close(one: TokenLogprob, other: TokenLogprob) -> None:
    assert one.token == other.token
    assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
    assert [token for token, _ in one.top] == [token for token, _ in other.top]
    for (_, a), (_, b) in zip(one.top, other.top, strict=True):
        assert a == pytest.approx(b, abs=1e-5)


def test_no_logprobs_unless_wanted() -> None:
    (answer,) = make_engine().run(request(drafter="oracle"))
    assert answer.logprobs == []


# Everything that cannot be honoured is refused before the first token (silently ignored).


@pytest.mark.parametrize(
    "bad",
    [
        {"prompt": ()},
        {"prompt": (VOCAB,)},
        {"prompt": (3, -1)},
        {"prompt": (3,) * 256},
        {"logit_bias": {VOCAB: 1.0}},
        {"stop_token_ids": (VOCAB,)},
        {"logprobs": VOCAB + 1},
        {"num_draft": -1},
        {"num_draft": 65},
        {"drafter": "nothing"},
        {"drafter": "draft:missing"},
        {"drafter": "ngram:size=3"},
        {"verifier": "magic"},
        {"verifier": "block", "drafter": "suffix:width=2"},
        {"verifier": "block", "drafter": "ensemble:[ngram,suffix]"},
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_before_anything_is_computed(
    bad: dict[str, Any],
) -> None:
    harness = make_engine()
    with pytest.raises(UserError) as caught:
        harness.engine.add(request(**bad))
    assert "\n" not in str(caught.value)
    assert not harness.engine.has_work
    assert harness.target.num_forwards == 0
    # The engine goes on as if nothing had been asked.
    assert harness.run(request())[0].essence == plain(request())[0].essence


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"presence_penalty": math.inf},
        {"frequency_penalty": math.nan},
        {"logit_bias": {3: math.inf}},
        {"logit_bias": {-3: 1.0}},
        {"min_tokens": -1},
        {"max_tokens": 0},
        {"min_tokens": 9, "max_tokens": 8},
        {"stop": "text"},
        {"stop": ("",)},
        {"stop_token_ids": (-1,)},
        {"seed": -1},
        {"seed": 2**63},
        {"n": 0},
        {"logprobs": -1},
        {"logprobs": True},
    ],
    ids=str,
)
def test_parameters_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**bad)
    assert "\n" not in str(caught.value)
    assert next(iter(bad)).split("_")[0] in str(caught.value)


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        make_engine(tokenizer=False).engine.add(request(stop=("a",)))
