"""OpenVINO GenAI: one pipeline, plain or with prompt lookup, on a converted model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from protocol import serve


class OpenVino:
    def load(self, options: dict[str, Any]) -> dict[str, Any]:
        (mode,) = options["modes"]
        self._folder = Path(options["ir_folder"])
        self._properties = {"INFERENCE_NUM_THREADS": options["threads"]}
        more = {"prompt_lookup": True} if mode["name"] == "lookup" else {}
        self._pipe = openvino_genai.LLMPipeline(
            str(self._folder), "CPU", **self._properties, **more, scheduler_config=_scheduler()
        )
        return {
            "versions": {
                "openvino-genai": openvino_genai.__version__,
                "openvino": openvino.__version__,
            },
            "dtype": "int8 weights",
            "notes": ["logits of the same file from the OpenVINO runtime"],
        }

    def generate(self, ids: list[int], num_tokens: int, mode: dict[str, Any]) -> list[int]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_tokens
        config.ignore_eos, config.do_sample = True, False
        config.apply_chat_template = False
        if mode["name"] == "lookup":
            config.num_assistant_tokens, config.max_ngram_size = mode["k"], mode["n"]
        inputs = openvino.Tensor(np.array([ids], dtype=np.int64))
        return list(self._pipe.generate(inputs, config).tokens[0])

    def logits(self, ids: list[int], positions: list[int]) -> Any:
        if not hasattr(self, "_request"):
            core = openvino.Core()
            model = core.compile_model(self._folder / "openvino_model.xml", "CPU", self._properties)
            self._request = model.create_infer_request()
        self._request.reset_state()
        outputs = self._request.infer(
            {
                "input_ids": np.array([ids], dtype=np.int64),
                "attention_mask": np.ones((1, len(ids)), dtype=np.int64),
                "position_ids": np.arange(len(ids), dtype=np.int64)[None],
                "beam_idx": np.zeros(1, dtype=np.int32),
            }
        )
        return np.ascontiguousarray(outputs["logits"][0][positions], dtype=np.float32)


def _scheduler() -> Any:
    """As the pipeline's own default, but without keeping prompts for later ones: it would answer
    the second time without computing the prompt."""
    config = openvino_genai.SchedulerConfig()
    config.enable_prefix_caching = False
    config.max_num_batched_tokens = 2**31 - 1  # a prompt in one piece
    return config


if __name__ == "__main__":
    serve(OpenVino)
