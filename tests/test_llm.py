"""The Python entry point: what it refuses, and that refusing leaves nothing behind."""

from __future__ import annotations

import pytest

from gguf_writer import TOKENS, make_hf, write_gguf
from outrider.bench.runner import Contender, check_all, compare
from outrider.bench.workloads import Prompt
from outrider.errors import ConfigError
from outrider.llm import LLM
from outrider.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = tmp_path_factory.mktemp("llm") / "llama.gguf"
    write_gguf(make_hf("llama"), path, "llama")
    return LLM(str(path), dtype="float32", num_slots=64)


def test_streams_have_one_answer(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="n is 2, a stream has 1 answer"):
        next(llm.stream("the heat", SamplingParams(n=2)))
    assert not llm.engine.has_work
    assert "".join(llm.stream("the heat", GREEDY)) == llm.generate("the heat", GREEDY).text


def test_a_refused_prompt_leaves_nothing_queued(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="at most 63 fit"):
        llm.generate_all(["the heat", "the heat " * 40], GREEDY)
    assert not llm.engine.has_work
    assert llm.target.model.kv.num_free == 64


def test_scope_reaches_the_request(llm: LLM) -> None:
    (seq,) = llm.submit([5, 6], GREEDY, scope="mine")
    assert seq.request.scope == "mine"
    llm.engine.cancel(seq.request.id)
    seen = []
    step = llm.engine.step
    llm.engine.step = lambda: (  # type: ignore[method-assign]
        seen.extend(s.request.scope for r in llm.engine._sequences.values() for s in r.values())
        or step()
    )
    try:
        llm.generate("the heat", GREEDY, scope="a")
        list(llm.stream("the heat", GREEDY, scope="b"))
        llm.generate("the heat", GREEDY)
    finally:
        del llm.engine.step
    assert list(dict.fromkeys(seen)) == ["a", "b", None]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"min_tokens": 63, "max_tokens": 63}, "min_tokens is 63; at most 62 fit"),
        ({"stop": ("<|im_end|>",)}, "is a special token.*--stop-token-id 2 "),
    ],
)
def test_what_could_not_be_honoured_is_refused(
    llm: LLM, params: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        llm.submit([5, 6], SamplingParams(**params))  # type: ignore[arg-type]
    assert not llm.engine.has_work
    llm.check([5, 6], SamplingParams(min_tokens=62, max_tokens=62, stop=("im_end",)))
    assert TOKENS[2] == "<|im_end|>"


def test_drafters_above_the_ceiling_are_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="drafts 200 tokens a step, expected at most 64"):
        llm.submit([5, 6], GREEDY, drafter="ngram:k=200")
    llm.check([5, 6], GREEDY, drafter="ngram:k=64")


def test_a_benchmark_is_checked_before_it_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    good = Prompt("good", "a", ("the heat",))
    monkeypatch.setattr(llm.engine, "step", lambda: pytest.fail("it ran"))
    for turns in (("the heat " * 40,), ("in a", "the heat " * 40)):
        with pytest.raises(ConfigError, match=r"prompt 'long': the prompt has .* at most 63 fit"):
            compare(llm, [], [good, Prompt("long", "a", turns)], GREEDY, repeats=1, seed=0)
    pair = Contender(drafter="suffix:width=3", verifier="block")
    with pytest.raises(ConfigError, match="verifier 'block' takes chains"):
        compare(llm, [pair], [good], GREEDY, repeats=1, seed=0)
    check_all(llm, [Contender(drafter="suffix:k=3")], [good], GREEDY)
