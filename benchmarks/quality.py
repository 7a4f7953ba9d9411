"""What each type of weights costs in quality: perplexity, KL and top-1 against float32.

The text is the built-in prompts, in windows of 512 tokens; the reference is the same file in
float32 on PyTorch.

    python benchmarks/quality.py --model smollm2-135m-instruct
    python benchmarks/quality.py --model qwen2.5-coder-1.5b-instruct --dtype int8 --dtype int4
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from outrider.bench import quality
from outrider.bench.report import environment, write_json
from outrider.errors import UserError
from outrider.files import check_output
from outrider.models.load import locate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", help="repeatable; default SmolLM2")
    parser.add_argument("--dtype", action="append", help="repeatable; default bfloat16, int8, int4")
    parser.add_argument("--windows", type=int, default=quality.NUM_WINDOWS)
    parser.add_argument("--no-twin", action="store_true", help="only the kernels, not PyTorch")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    models = args.model or ["smollm2-135m-instruct"]
    dtypes = args.dtype or ["bfloat16", "int8", "int4"]
    kernels = (True,) if args.no_twin else (True, False)
    rows: list[quality.Quality] = []
    try:
        check_output("--json", args.json)
        for model in models:
            locate(model)
        for model in models:
            measured = quality.measure(model, dtypes, kernels=kernels, num_windows=args.windows)
            print(quality.markdown(measured), flush=True)
            rows += measured
        if args.json:
            command = " ".join(["python", *sys.argv])
            document = {
                "environment": environment() | {"command": command},
                "windows": args.windows,
                "rows": [asdict(row) for row in rows],
            }
            write_json(args.json, document)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
