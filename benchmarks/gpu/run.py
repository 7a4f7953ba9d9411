"""Checks and measures the CUDA path on one GPU; writes one JSON file.

    benchmarks/gpu/run.sh --out gpu.json              on a GPU, at most 8 minutes, no downloads
    benchmarks/gpu/run.sh --out smoke.json --smoke    all parts on the CPU with tiny shapes

Every part runs in a process of its own with its own share of the time, and the file is written
after each: a part that fails or hangs costs its own numbers only. ``left_out`` says what is not in
the file and why. The exit code is 1 if a check failed or a part did not end well, 2 for arguments
that cannot be honoured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from checks import run_checks
from timings import Plan, bandwidth, decoding, t_of_m

from outrider.errors import ConfigError, UserError
from outrider.files import check_output, write_whole

Result = dict[str, Any]

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)

PARTS: dict[str, float] = {
    "checks": 70,
    "bandwidth": 25,
    "forward SmolLM2-135M": 60,
    "decoding SmolLM2-135M": 60,
    "forward Llama-3-8B": 75,
    "decoding Llama-3-8B": 85,
    "forward Llama-3-8B fp8": 35,
    "forward Llama-3-8B int8": 30,
    "forward Llama-3-8B int4": 30,
}
"""Seconds of each part, of its start too: 470 in all."""

SMOKE_PARTS = ("checks", "bandwidth", "forward tiny", "decoding tiny", "forward tiny fp8")
SMOKE_PROCESS = "bandwidth"
"""In the smoke run one part is enough to try a process of its own; each takes seconds to start."""

MOST_MINUTES = 8.0
GRACE = 15
"""Seconds before its end at which a part should begin to finish."""

Save = Callable[[Result], None]


def run_part(name: str, *, smoke: bool, seconds: float, save: Save) -> Result:
    """The numbers of one part; ``save`` gets what there is meanwhile."""
    torch.manual_seed(0)
    device = torch.device("cpu" if smoke else "cuda")
    plan = Plan(
        device=device,
        sizes=(1, 2, 8) if smoke else SIZES,
        contexts=(64, 256) if smoke else (1024, 16384),
        batches=(1, 4) if smoke else (1, 8, 32),
        repeats=2 if smoke else 15,
        tokens=16 if smoke else 128,
        prompt=16 if smoke else 128,
        deadline=time.monotonic() + seconds - (0 if smoke else GRACE),
        save=save,
    )
    try:
        return _measure(name, plan, smoke=smoke)
    except torch.OutOfMemoryError as error:
        return {"left_out": [f"does not fit on this card: {str(error).splitlines()[0]}"]}


def _measure(name: str, plan: Plan, *, smoke: bool) -> Result:
    kind, *rest = name.split()
    if kind == "checks":
        return _checks(plan, smoke=smoke)
    if kind == "bandwidth":
        return bandwidth(plan, (1 << 22) if smoke else (2 << 30))
    if kind == "decoding":
        return decoding(plan, rest[0])
    return t_of_m(plan, rest[0], format=rest[1] if len(rest) > 1 else "bfloat16")


def _checks(plan: Plan, *, smoke: bool) -> Result:
    def result(done: dict[str, Any]) -> Result:
        return {
            "ok": all(check["ok"] is not False for check in done.values()),
            "checks": done,
            "left_out": [f"{name}: {c['left_out']}" for name, c in done.items() if "left_out" in c],
        }

    shape, context = ("tiny", 600) if smoke else ("small", 16384)
    return result(run_checks(plan.device, shape, context, lambda done: plan.save(result(done))))


def _in_process(name: str, *, seconds: float) -> Result:
    try:
        return run_part(name, smoke=True, seconds=seconds, save=lambda _: None)
    except Exception as error:  # the other parts still tell something
        return {"failed": f"{type(error).__name__}: {error}"}


def _in_own_process(name: str, *, smoke: bool, seconds: float) -> Result:
    """Run a part by this script; what it had saved is kept if it dies or its time ends."""
    failed = None
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "part.json"
        command = [sys.executable, __file__, "--part", name, "--out", str(saved)]
        command += ["--seconds", str(seconds), *(["--smoke"] if smoke else [])]
        try:
            done = subprocess.run(
                command, timeout=seconds, capture_output=True, text=True, check=False
            )
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                failed = f"exit code {done.returncode}: {last}"
        except subprocess.TimeoutExpired:
            failed = f"still running after {seconds:.0f} s"
        result: Result = json.loads(saved.read_text()) if saved.is_file() else {}
    return result if failed is None else result | {"failed": failed}


def _environment(smoke: bool) -> Result:
    result: Result = {"torch": torch.__version__, "cuda": torch.version.cuda, "smoke": smoke}
    if not smoke:
        properties = torch.cuda.get_device_properties(0)
        result |= {
            "device": properties.name,
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
        }
    return result


def _write(path: Path, result: Result) -> None:
    def write(temporary: Path) -> None:
        temporary.write_text(json.dumps(result, indent=1) + "\n")

    write_whole(path, write)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _arguments() -> argparse.Namespace:
    parser = _Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="the JSON file")
    parser.add_argument("--minutes", type=float, default=7.9, help="time for everything")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--part", choices=[*PARTS, *SMOKE_PARTS], help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=60.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not 0 < args.minutes <= MOST_MINUTES:
        raise ConfigError(f"--minutes is {args.minutes:g}, expected above 0, at most 8")
    check_output("--out", args.out)
    if not args.smoke and not torch.cuda.is_available():
        raise ConfigError("no CUDA device is here; --smoke runs on the CPU")
    return args


def run_all(out: Path, *, minutes: float, smoke: bool) -> Result:
    """Every part, one after another; the file is written after each."""
    if smoke:
        torch.set_num_threads(1)  # threads cost more than they do on shapes as tiny as these
    start = time.monotonic()
    result: Result = {"environment": _environment(smoke), "left_out": [], "parts": {}}
    for name, share in (dict.fromkeys(SMOKE_PARTS, 60.0) if smoke else PARTS).items():
        left = 60 * minutes - (time.monotonic() - start)
        if left < 2 * GRACE:
            part: Result = {"left_out": ["out of time"]}
        elif smoke and name != SMOKE_PROCESS:
            part = _in_process(name, seconds=share)
        else:
            part = _in_own_process(name, smoke=smoke, seconds=min(share, left))
        result["parts"][name] = part
        result["left_out"] += [f"{name}: {reason}" for reason in part.pop("left_out", [])]
        result["seconds"] = round(time.monotonic() - start, 1)
        _write(out, result)
        print(f"{result['seconds']:6.1f} s  {name}", file=sys.stderr)
    return result


def run_one(name: str, seconds: float, out: Path, *, smoke: bool) -> None:
    """One part in this process, for :func:`run_all` in another."""

    def save(result: Result) -> None:
        _write(out, result)

    save(run_part(name, smoke=smoke, seconds=seconds, save=save))


def main() -> int:
    try:
        args = _arguments()
        if args.part:
            run_one(args.part, args.seconds, args.out, smoke=args.smoke)
            return 0
        result = run_all(args.out, minutes=args.minutes, smoke=args.smoke)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    for reason in result["left_out"]:
        print(f"left out  {reason}", file=sys.stderr)
    failed = {
        name: part.get("failed", "see its checks")
        for name, part in result["parts"].items()
        if "failed" in part or not part.get("ok", True)
    }
    for name, reason in failed.items():
        print(f"FAILED  {name}: {reason}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
