"""llama.cpp through llama-cpp-python: the GGUF file as it is, plain or with prompt lookup."""

from __future__ import annotations

from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from protocol import serve


class LlamaCpp:
    def load(self, options: dict[str, Any]) -> dict[str, Any]:
        (mode,) = options["modes"]
        self._settings = {
            "model_path": options["gguf"],
            "n_threads": options["threads"],
            "n_threads_batch": options["threads"],
            "n_ctx": options["context"],
            "n_batch": 512,
            "verbose": False,
        }
        more = {}
        if mode["name"] == "lookup":
            more["draft_model"] = LlamaPromptLookupDecoding(mode["n"], mode["k"])
        self._llm = llama_cpp.Llama(**self._settings, **more)
        self._exact: Any = None
        return {
            "versions": {"llama-cpp-python": llama_cpp.__version__},
            "dtype": options["gguf_dtype"],
            "notes": [],
        }

    def generate(self, ids: list[int], num_tokens: int, mode: dict[str, Any]) -> list[int]:
        self._llm.reset()  # nothing of the last prompt is kept
        answer: list[int] = []
        for token in self._llm.generate(ids, temp=0.0):
            answer.append(token)
            if len(answer) == num_tokens:
                break
        return answer

    def logits(self, ids: list[int], positions: list[int]) -> Any:
        if self._exact is None:  # another context: this one keeps the logits of every token
            self._exact = llama_cpp.Llama(**self._settings, logits_all=True)
        self._exact.reset()
        self._exact.eval(ids)
        return np.array(self._exact.scores[positions], dtype=np.float32)


if __name__ == "__main__":
    serve(LlamaCpp)
