"""Rows of a comparison as a table, as JSON, and the environment they were measured in."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.bench.runner import Row
from outrider.files import write_whole

if TYPE_CHECKING:
    from outrider.bench.profile import Profile


def environment() -> dict[str, Any]:
    """What a reader needs to judge the numbers."""
    return {
        "outrider": version("outrider"),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "command": " ".join(["outrider", *sys.argv[1:]]),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def print_table(console: Console, rows: Sequence[Row], *, model: str, dtype: str) -> None:
    """One line per contender, in one section per workload."""
    several = len({row.verifier for row in rows}) > 1
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=f"{model}, {dtype}", title_justify="left")
    table.add_column("drafter", overflow="fold")
    if several:
        table.add_column("verifier")
    for name in ("tokens/s", "speed-up", "95 %", "length", "rate", "same tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for workload in dict.fromkeys(row.workload for row in rows):
        table.add_row(Text(workload, style="bold"))
        for row in (row for row in rows if row.workload == workload):
            table.add_row(
                Text(f"  {row.drafter}"),  # brackets are no markup here
                *([row.verifier] if several else []),
                f"{row.tokens_per_second:.1f}",
                f"{row.speedup:.2f}",
                _interval(row),
                f"{row.acceptance_length:.2f}",
                "-" if row.acceptance_rate is None else f"{row.acceptance_rate:.0%}",
                _same(row),
            )
        table.add_section()
    console.print(table)
    console.print(
        "length: tokens emitted per target forward. rate: accepted by drafted tokens. "
        "same tokens: as plain decoding."
    )
    ties = [d for row in rows for d in row.differences if d.near_tie]
    if ties:
        gap = max(d.gap or 0.0 for d in ties)
        console.print(
            f"near-tie: the first different token was within rounding of the expected one "
            f"(largest gap {gap:.3g} in the logits)."
        )


def print_profile(console: Console, result: Profile) -> None:
    """t(M) by context, and what follows from it."""
    table = Table(
        box=SIMPLE_HEAD, pad_edge=False, title=f"{result.model}, {result.dtype}: t(M) in ms"
    )
    table.add_column("M", justify="right")
    for context in result.t_by_context:
        table.add_column(f"context {context}", justify="right")
    table.add_column(f"t(M) / t(1) at {result.context}", justify="right")
    for size, seconds in result.t_of_m.items():
        times = [times[size] for times in result.t_by_context.values()]
        ratio = seconds / result.t_of_m["1"]
        table.add_row(size, *(f"{1e3 * t:.2f}" for t in times), f"{ratio:.2f}")
    console.print(table)
    if result.bandwidth is not None and result.limit is not None and result.read_rate is not None:
        console.print(
            f"one token: {1e3 * result.parts['whole']:.2f} ms, of it the linears "
            f"{1e3 * result.parts['linears']:.2f} and the rest {1e3 * result.parts['rest']:.2f}\n"
            f"weights: {(result.weight_bytes or 0) / 1e6:.0f} MB, read at "
            f"{result.read_rate / 1e9:.1f} GB/s; a plain read reaches "
            f"{result.bandwidth / 1e9:.1f} GB/s, the limit is {1e3 * result.limit:.2f} ms a token"
        )
    negative = result.parts.get("rest", 0.0) < -0.1 * result.parts["whole"]
    if negative or result.largest_speedup > result.largest_speedup_at:
        console.print("the times do not fit together: something else ran meanwhile; measure again")
    console.print(
        f"speculation could gain at most {result.largest_speedup:.2f}, with "
        f"{result.largest_speedup_at} tokens a forward, free drafts and all of them right"
    )


def _interval(row: Row) -> str:
    if row.speedup_low is None or row.speedup_high is None:
        return "-"
    return f"{row.speedup_low:.2f}-{row.speedup_high:.2f}"


def _same(row: Row) -> str:
    share = f"{row.token_match:.0%}"
    if row.exact is None:
        return "law only"
    if row.token_match == 1.0:
        return "yes"
    return f"{share}, near-tie" if row.exact else f"{share}, DIFFERS"


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write ``document`` as JSON, whole or not at all. Raises ConfigError."""
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"

    def write(file: Path) -> None:
        file.write_text(text, encoding="utf-8")

    write_whole(path, write)
