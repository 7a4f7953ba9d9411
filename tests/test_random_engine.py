"""Random requests come, go and are cancelled in a small pool; after every step all is in order."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from harness import Answer, Harness, fake, make_engine, plain, prompt_of
from outrider.request import FinishReason, Request, SamplingParams

CHAINS = ["none", "ngram:k=3,n=2", "suffix", "draft:good", "draft:bad,k=2", "draft:small", "oracle"]
DRAFTERS = [
    *CHAINS,
    "liar",
    "draft:short,k=5,width=2",
    "draft:good,k=5,width=3",
    "suffix:k=5,width=2",
    "ensemble:[ngram:k=2,draft:good,k=2,suffix:k=2]",
    "random",
    "probing",
]

PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.0, 0.7, 1.0, 1.5]),
        "max_tokens": st.integers(1, 24),
        "seed": st.integers(0, 3),
    },
    optional={
        "top_k": st.sampled_from([1, 5]),
        "top_p": st.sampled_from([0.5, 0.9]),
        "min_p": st.sampled_from([0.1]),
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "presence_penalty": st.sampled_from([-1.0, 0.7]),
        "frequency_penalty": st.sampled_from([0.5]),
        "logit_bias": st.dictionaries(st.integers(0, 31), st.sampled_from([-9.0, 5.0]), max_size=2),
        "stop": st.sampled_from([("a",), ("st", "op"), ("\n\n", "bc")]),
        "stop_token_ids": st.sampled_from([(4,), (7, 19)]),
        "ignore_eos": st.booleans(),
        "n": st.integers(1, 3),
        "logprobs": st.integers(0, 2),
    },
)


class RandomEngine(RuleBasedStateMachine):
    """The harness checks tables, tokens, texts and counters after every step."""

    harness: Harness

    @initialize(
        num_slots=st.sampled_from([60, 80, 120, 400]),
        prefix_cache=st.booleans(),
        windows=st.sampled_from([(2,), (None,), (5, None)]),
        config=st.fixed_dictionaries(
            {
                "chunk": st.sampled_from([1, 3, 16, 512]),
                "max_batch": st.integers(1, 6),
                "max_step_tokens": st.sampled_from([1, 4, 20, 1024]),
                "max_draft": st.sampled_from([0, 2, 64]),
            }
        ),
    )
    def start(
        self,
        num_slots: int,
        prefix_cache: bool,
        windows: tuple[int | None, ...],
        config: dict[str, int],
    ) -> None:
        self.options: dict[str, Any] = {
            "num_slots": num_slots,
            "windows": windows,
            "absolute": windows != (2,),
        }
        target = fake(**self.options, prefix_cache=prefix_cache)
        self.harness = make_engine(target, **config)
        self.max_draft = config["max_draft"]
        self.requests: dict[str, tuple[Request, list[Answer]]] = {}

    @rule(
        params=PARAMS,
        length=st.integers(1, 35),
        text=st.integers(0, 2),
        drafter=st.sampled_from(DRAFTERS),
        verifier=st.sampled_from(["coupled", "coupled", "rejection", "traversal", "block"]),
        num_draft=st.none() | st.integers(0, 6),
        scope=st.sampled_from([None, "shared"]),
    )
    def add(
        self,
        params: dict[str, Any],
        length: int,
        text: int,
        drafter: str,
        verifier: str,
        num_draft: int | None,
        scope: str | None,
    ) -> None:
        one = Request(
            id=str(len(self.requests)),
            prompt=prompt_of(40, text)[:length],  # prompts share their beginnings
            params=SamplingParams(**params),
            drafter=drafter,
            verifier="coupled" if verifier == "block" and drafter not in CHAINS else verifier,
            num_draft=None if num_draft is None else min(num_draft, self.max_draft),
            scope=scope,
        )
        self.requests[one.id] = (one, self.harness.add(one))

    @precondition(lambda self: self.requests)
    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.harness.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.harness.cancel(data.draw(st.sampled_from(sorted(self.requests))))

    def teardown(self) -> None:
        if not hasattr(self, "requests"):
            return
        steps = 0
        while self.harness.engine.has_work:
            self.harness.step()
            steps += 1
            assert steps < 3000, "the engine makes no progress"
        self.harness.check_empty()
        for one, answers in self.requests.values():
            if one.params.temperature > 0.0 and one.verifier != "coupled":
                continue
            for answer, expected in zip(answers, plain(one, **self.options), strict=True):
                if answer.finish is FinishReason.CANCELLED:
                    assert answer.tokens == expected.tokens[: len(answer.tokens)]
                else:
                    assert answer.essence == expected.essence, one


TestRandomEngine = RandomEngine.TestCase
TestRandomEngine.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
