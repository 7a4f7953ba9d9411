"""vLLM on the CPU: how it speculates is fixed when it is loaded, so a process has one mode."""

from __future__ import annotations

import os
from typing import Any

# vLLM reads these when they are needed. Its logits are read in this process.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import numpy as np
import torch
import vllm
from protocol import serve
from vllm import LLM, SamplingParams


class Vllm:
    def load(self, options: dict[str, Any]) -> dict[str, Any]:
        (mode,) = options["modes"]
        cores = sorted(os.sched_getaffinity(0))[: options["threads"]]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        more = {}
        if mode["name"] == "lookup":
            more["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": mode["k"],
                "prompt_lookup_max": mode["n"],
                "prompt_lookup_min": 1,
            }
        if mode["name"] == "draft":
            more["speculative_config"] = {
                "method": "draft_model",
                "model": options["draft_folder"],
                "num_speculative_tokens": mode["k"],
            }
        self._llm = LLM(
            options["folder"],
            dtype="bfloat16",
            max_model_len=options["context"],
            max_num_batched_tokens=max(2048, options["context"]),
            max_num_seqs=1,
            enable_prefix_caching=False,
            **more,
        )
        return {
            "versions": {"vllm-cpu": vllm.__version__, "torch": torch.__version__},
            "dtype": "bfloat16",
            "notes": [],
        }

    def generate(self, ids: list[int], num_tokens: int, mode: dict[str, Any]) -> list[int]:
        params = SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        answers = self._llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        return list(answers[0].outputs[0].token_ids)

    def logits(self, ids: list[int], positions: list[int]) -> Any:
        """Its answer to a request for log-probabilities is a dictionary per token: the rows are
        taken where they are computed instead, all of the prompt's in one call."""
        seen: list[torch.Tensor] = []
        self._llm.apply_model(lambda model: _record(model, seen))
        try:
            params = SamplingParams(
                temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False
            )
            # One more token, since there are no rows for what follows the prompt.
            prompt = {"prompt_token_ids": [*ids, ids[-1]]}
            self._llm.generate([prompt], params, use_tqdm=False)
        finally:
            self._llm.apply_model(_forget)
        (rows,) = (rows for rows in seen if len(rows) == len(ids))
        return np.ascontiguousarray(rows[positions].float().numpy())


def _record(model: Any, seen: list[torch.Tensor]) -> None:
    compute = model.compute_logits

    def recording(*args: Any, **options: Any) -> Any:
        logits = compute(*args, **options)
        seen.append(logits.detach().clone())
        return logits

    model.compute_logits = recording


def _forget(model: Any) -> None:
    del model.compute_logits  # the class's own is behind it


if __name__ == "__main__":
    serve(Vllm)
