"""Outrider: one target of one dtype, any number of drafters."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from protocol import serve

from outrider.bench.logits import text_logits
from outrider.llm import LLM
from outrider.request import SamplingParams


class Outrider:
    def load(self, options: dict[str, Any]) -> dict[str, Any]:
        torch.set_num_threads(options["threads"])
        self._llm = LLM(
            options["model"],
            dtype=options["dtype"],
            num_slots=2 * options["context"],
            prefix_cache=False,
        )
        for mode in options["modes"]:
            self._llm.engine.drafter(mode["name"])
        return {
            "versions": {"outrider": version("outrider"), "torch": torch.__version__},
            "dtype": options["dtype"],
            "notes": [],
        }

    def generate(self, ids: list[int], num_tokens: int, mode: dict[str, Any]) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        (seq,) = self._llm.submit(ids, params, drafter=mode["name"])
        while seq.finish is None:
            self._llm.engine.step()
        return list(seq.output)

    def logits(self, ids: list[int], positions: list[int]) -> Any:
        rows = text_logits(self._llm.target.model, ids, everywhere=True)
        return np.ascontiguousarray(rows[positions].numpy())


if __name__ == "__main__":
    serve(Outrider)
