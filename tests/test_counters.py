"""What is counted (rates above 1, means of ratios, cancelled requests left out)."""

from __future__ import annotations

import numpy as np

from harness import make_engine, plain, prompt_of, request
from outrider.metrics import Stats, total
from outrider.request import FinishReason
from outrider.tree import TokenTree
from outrider.verify import Verdict

DRAFTERS = ["ngram:k=4,n=2", "suffix:k=6,width=3", "draft:good,k=4", "draft:good,k=6,width=3"]


def test_counters_add_up_over_requests() -> None:
    harness = make_engine()
    requests = [
        request(prompt_of(6 + i, i), id=str(i), drafter=d, max_tokens=10 + i)
        for i, d in enumerate([*DRAFTERS, "oracle", "random", "none"])
    ]
    answers = harness.run(*requests)
    stats = total(a.seq.stats for a in answers)
    assert stats.tokens == sum(len(a.tokens) for a in answers)
    assert stats.drafted == sum(a.seq.stats.drafted for a in answers)
    assert stats.accepted == sum(a.seq.stats.accepted for a in answers)
    assert stats.acceptance_rate == stats.accepted / stats.drafted
    assert stats.acceptance_length == stats.tokens / stats.target_forwards
    # A forward emits its accepted drafts and one more token, or it is the last one.
    for answer in answers:
        one = answer.seq.stats
        assert one.target_forwards + one.accepted - 1 <= one.tokens
        assert one.tokens <= one.target_forwards + one.accepted
    by_position = stats.acceptance_by_position
    assert len(by_position) == len(stats.tried_at)
    assert all(0.0 <= rate <= 1.0 for rate in by_position)


def test_a_right_draft_is_counted_exactly() -> None:
    (answer,) = make_engine().run(request(drafter="oracle", max_tokens=24, ignore_eos=True))
    stats = answer.seq.stats
    # 4 full blocks of 4 drafts and a bonus, then 3 drafts and their bonus.
    assert (stats.tokens, stats.target_forwards, stats.drafted, stats.accepted) == (24, 5, 19, 19)
    assert (stats.tried_at, stats.accepted_at) == ([5, 5, 5, 4], [5, 5, 5, 4])
    assert (stats.acceptance_length, stats.acceptance_rate) == (24 / 5, 1.0)


def test_cancelled_requests_are_counted() -> None:
    harness = make_engine(max_batch=2)
    running, other, waiting = harness.add(
        request(id="running", drafter="oracle"),
        request(id="other"),
        request(id="waiting", drafter="draft:good"),
    )
    for _ in range(2):
        harness.step()
    harness.cancel("running")
    harness.cancel("waiting")
    harness.cancel("unknown")
    assert (running.finish, waiting.finish) == (FinishReason.CANCELLED, FinishReason.CANCELLED)
    assert running.tokens == plain(request())[0].tokens[:10]
    assert running.seq.stats.accepted == running.seq.stats.drafted == 8
    assert (waiting.tokens, waiting.text) == ([], "")
    assert waiting.seq.stats == Stats()
    while harness.engine.has_work:
        harness.step()
    assert other.essence == plain(request())[0].essence
    harness.check_empty()


def test_cancelling_some_of_several_answers_ends_all_of_them() -> None:
    harness = make_engine(max_batch=2)
    answers = harness.add(request(prompt_of(20), n=3, temperature=1.0, drafter="oracle"))
    harness.step()
    harness.cancel("r")
    assert [a.finish for a in answers] == [FinishReason.CANCELLED] * 3
    harness.check_empty()


def test_probe_nodes_are_no_drafts() -> None:
    stats = Stats()
    tree = TokenTree(
        tokens=np.array([3, 4, 5]),
        parents=np.array([-1, 0, 0]),
        probe=np.array([False, True, True]),
    )
    stats.record_step(tree, Verdict((0,), 9), emitted=2)
    assert (stats.drafted, stats.accepted, stats.tried_at, stats.accepted_at) == (1, 1, [1], [1])
