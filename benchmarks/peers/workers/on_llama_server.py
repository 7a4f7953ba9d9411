"""llama-server of the same sources: plain, n-grams or a draft model, fixed when it starts."""

from __future__ import annotations

import atexit
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from typing import Any

from protocol import serve

START_SECONDS = 300


class LlamaServer:
    def load(self, options: dict[str, Any]) -> dict[str, Any]:
        (mode,) = options["modes"]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        threads = str(options["threads"])
        command = [options["binary"], "--model", options["gguf"], "--port", str(port)]
        command += ["--threads", threads, "--threads-batch", threads, "--parallel", "1"]
        command += ["--ctx-size", str(options["context"]), "--cache-ram", "0"]
        if mode["name"] == "lookup":
            command += ["--spec-type", "ngram-simple"]
            command += ["--spec-ngram-simple-size-n", str(mode["n"])]
            command += ["--spec-ngram-simple-size-m", str(mode["k"])]
        if mode["name"] == "draft":
            command += ["--spec-type", "draft-simple", "--spec-draft-n-max", str(mode["k"])]
            command += ["--spec-draft-model", options["draft_gguf"]]
            command += ["--spec-draft-threads", threads]
        self._url = f"http://127.0.0.1:{port}"
        self._server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        atexit.register(self._server.kill)
        self._wait()
        return {
            "versions": {"llama-server": f"{options['version']}, {self._build()}"},
            "dtype": options["gguf_dtype"],
            "notes": ["EOS is given no chance instead of being ignored"],
        }

    def _wait(self) -> None:
        """Until the model is loaded."""
        for _ in range(START_SECONDS * 5):
            if self._server.poll() is not None:
                raise RuntimeError(f"llama-server ended with code {self._server.returncode}")
            try:
                with urllib.request.urlopen(f"{self._url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise TimeoutError(f"llama-server is not ready after {START_SECONDS} s")

    def _build(self) -> str:
        with urllib.request.urlopen(f"{self._url}/props", timeout=5) as reply:
            return str(json.load(reply).get("build_info", "build unknown"))

    def generate(self, ids: list[int], num_tokens: int, mode: dict[str, Any]) -> list[int]:
        body = {
            "prompt": ids,
            "n_predict": num_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        request = urllib.request.Request(
            f"{self._url}/completion",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=3600) as reply:
            tokens: list[int] = json.load(reply)["tokens"]
        return tokens

    def logits(self, ids: list[int], positions: list[int]) -> None:
        return None


if __name__ == "__main__":
    serve(LlamaServer)
