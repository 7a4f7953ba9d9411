"""The GPU benchmark, whole, with tiny shapes on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu" / "run.sh"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The script, started in ``folder`` with this environment's python and without a device."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        cwd=folder,
        env={**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_part_runs(tmp_path: Path) -> None:
    done = run(tmp_path, "--smoke", "--out", "gpu.json")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert result.keys() == {"environment", "left_out", "parts", "seconds"}
    assert result["environment"]["smoke"]
    parts = result["parts"]
    assert not [name for name, part in parts.items() if "failed" in part]
    needs_cuda = ("does not wait", "waits once", "int8", "fp8", "int4")
    for reason in result["left_out"]:
        assert any(word in reason for word in needs_cuda), reason
    checks = parts["checks"]["checks"]
    ran = [check for check in checks.values() if check["ok"] is not None]
    assert all(check["ok"] for check in ran), checks
    assert len(ran) >= 17
    assert len(checks) == 22
    assert parts["bandwidth"]["copy_gb_s"] > 0
    assert parts["bandwidth"]["read_gb_s"] > 0
    contexts = parts["forward tiny"]["contexts"]
    assert set(contexts) == {"64", "256"}
    for row in contexts.values():
        assert set(row["seconds"]) == set(row["back_to_back"]) == {"1", "2", "8"}
        assert row["gb_s"] > 0
        assert row["eager"] > 0
    assert "fp8" in parts["forward tiny fp8"]["format"]
    decoding = parts["decoding tiny"]["batches"]
    assert set(decoding) == {"1", "4"}
    for row in decoding.values():
        assert row["plain"]["acceptance_length"] == 1.0
        assert {one["same"] for one in row.values()} == {1.0}
        often, seldom = (row[f"oracle, error {error}"] for error in (0.4, 0.1))
        assert 1.5 < often["acceptance_length"] < seldom["acceptance_length"] <= 8.0
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]  # no temporary files


def test_what_a_part_saved_outlives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that is killed, one that dies and one that never starts."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    # By its file: other benchmarks have a module called "run" too.
    spec = importlib.util.spec_from_file_location("gpu_run", SCRIPT.with_name("run.py"))
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    saved = {"contexts": {"64": {}}}
    folders = []

    def killed(command: list[str], timeout: float, **_: object) -> None:
        out = Path(command[command.index("--out") + 1])
        folders.append(out.parent)
        out.write_text(json.dumps(saved))
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(script.subprocess, "run", killed)
    part = script._in_own_process("forward tiny", smoke=True, seconds=3.0)
    assert part == saved | {"failed": "still running after 3 s"}
    assert not any(folder.exists() for folder in folders)
    died = SimpleNamespace(returncode=-9, stderr="")
    monkeypatch.setattr(script.subprocess, "run", lambda *_, **__: died)
    part = script._in_own_process("forward tiny", smoke=True, seconds=3.0)
    assert part == {"failed": "exit code -9: no message"}


def test_what_the_time_does_not_allow_is_said(tmp_path: Path) -> None:
    done = run(tmp_path, "--smoke", "--out", "gpu.json", "--minutes", "0.1")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert result["left_out"] == [f"{name}: out of time" for name in result["parts"]]
    assert "left out  decoding tiny: out of time" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no CUDA device is here; --smoke runs on the CPU"),
        (["--smoke", "--quick"], "unrecognized arguments: --quick"),
        (["--smoke", "--minutes", "9"], "--minutes is 9, expected above 0, at most 8"),
        (["--smoke", "--out", "none/a.json"], "--out none/a.json: the folder none does not exist"),
    ],
)
def test_arguments_that_cannot_be_honoured(tmp_path: Path, arguments: list[str], said: str) -> None:
    done = run(tmp_path, *arguments)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [said]
    assert not list(tmp_path.iterdir())
