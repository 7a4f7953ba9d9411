"""transformers: ``generate``, plain, with prompt lookup and with a draft model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from protocol import serve
from transformers import AutoModelForCausalLM


class Transformers:
    def load(self, options: dict[str, Any]) -> dict[str, Any]:
        torch.set_num_threads(options["threads"])
        self._model = _load(options["folder"])
        self._draft = _load(options["draft_folder"]) if options["draft_folder"] else None
        return {
            "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
            "dtype": "bfloat16",
            "notes": [],
        }

    @torch.inference_mode()
    def generate(self, ids: list[int], num_tokens: int, mode: dict[str, Any]) -> list[int]:
        inputs = torch.tensor([ids])
        output = self._model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            **self._assistance(mode),
        )
        tokens: list[int] = output[0, len(ids) :].tolist()
        return tokens

    def _assistance(self, mode: dict[str, Any]) -> dict[str, Any]:
        if mode["name"] == "lookup":
            return {"prompt_lookup_num_tokens": mode["k"], "max_matching_ngram_size": mode["n"]}
        if mode["name"] == "draft":
            settings = self._draft.generation_config
            settings.num_assistant_tokens = mode["k"]
            settings.num_assistant_tokens_schedule = "constant"
            settings.assistant_confidence_threshold = 0.0
            return {"assistant_model": self._draft}
        return {}

    @torch.inference_mode()
    def logits(self, ids: list[int], positions: list[int]) -> Any:
        rows = self._model(torch.tensor([ids])).logits[0]
        return np.ascontiguousarray(rows[positions].float().numpy())


def _load(folder: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, local_files_only=True
    ).eval()
    model.generation_config.eos_token_id = None  # every answer has the full number of tokens
    return model


if __name__ == "__main__":
    serve(Transformers)
