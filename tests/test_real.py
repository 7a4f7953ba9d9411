"""Token identity on the published models: every answer equals plain decoding's, or first differs
at a near-tie whose gap is shown. Run with `make test-real`."""

from __future__ import annotations

import pytest
import torch

from outrider.bench.neartie import first_difference
from outrider.bench.workloads import load_prompts
from outrider.llm import LLM
from outrider.models.catalog import find
from outrider.models.fetch import cached
from outrider.request import SamplingParams

pytestmark = pytest.mark.real

SMALL = "smollm2-135m-instruct"
LARGE, DRAFT = "qwen2.5-coder-1.5b-instruct", "qwen2.5-coder-0.5b-instruct"


def require(*names: str) -> None:
    for name in names:
        model = find(name)
        if model is None or cached(model) is None:
            pytest.skip(f"{name} is not in the cache: outrider pull {name}")
    torch.set_num_threads(2)


def answers(llm: LLM, params: SamplingParams, prompts: str, limit: int, drafter: str) -> list:
    """(prompt, answer) of every prompt, several at once."""
    wanted = []
    for prompt in load_prompts(prompts, limit=limit):
        wanted += llm.submit(llm.encode(prompt.turns[0]), params, drafter=drafter)
    while llm.engine.has_work:
        llm.engine.step()
    return [(seq.request.prompt, seq.output, seq.stats) for seq in wanted]


def compare(
    llm: LLM,
    params: SamplingParams,
    prompts: str,
    limit: int,
    drafters: list[str],
    *,
    bit_exact: bool = False,
) -> None:
    plain = answers(llm, params, prompts, limit, "none")
    for drafter in drafters:
        accepted = 0
        for number, ((ids, expected, _), (_, got, stats)) in enumerate(
            zip(plain, answers(llm, params, prompts, limit, drafter), strict=True)
        ):
            accepted += stats.accepted
            if got == expected:
                continue
            difference = first_difference(llm.target.model, ids, expected, got, number)
            print(f"{drafter}, prompt {number}: {difference}")
            assert not bit_exact, (drafter, difference)
            assert difference.near_tie, (drafter, difference)
        assert accepted > 0, f"{drafter} never helped"


@pytest.mark.parametrize(
    ("dtype", "kernels"),
    [("float32", False), ("bfloat16", False), ("bfloat16", True), ("int8", True), ("int4", True)],
)
def test_small_model(dtype: str, kernels: bool) -> None:
    require(SMALL)
    llm = LLM(SMALL, dtype=dtype, num_slots=8192, prefix_cache=False, kernels=kernels)
    params = SamplingParams(temperature=0.0, max_tokens=48)
    drafters = [
        "ngram:n=3,k=8",
        "suffix:k=8",
        "suffix:k=8,width=3",
        f"draft:{SMALL},k=4",
        f"draft:{SMALL},k=6,width=3",
        f"ensemble:[ngram:k=4,draft:{SMALL},k=4]",
    ]
    compare(llm, params, "builtin", 8, drafters, bit_exact=kernels)


def test_small_model_sampled() -> None:
    require(SMALL)
    llm = LLM(SMALL, dtype="float32", num_slots=8192, prefix_cache=False)
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=3, max_tokens=48)
    plain = answers(llm, params, "builtin", 8, "none")
    for drafter in ("ngram:n=2,k=4", f"draft:{SMALL},k=4", f"draft:{SMALL},k=6,width=3"):
        drafted = answers(llm, params, "builtin", 8, drafter)
        assert [output for _, output, _ in drafted] == [output for _, output, _ in plain], drafter


def test_real_pair() -> None:
    require(LARGE, DRAFT)
    llm = LLM(LARGE, num_slots=4096, prefix_cache=False)
    params = SamplingParams(temperature=0.0, max_tokens=32)
    compare(llm, params, "builtin:code_completion,code_edit", 4, [f"draft:{DRAFT},k=4"])
