"""Sets up the peers, each in a virtual environment of its own with pinned versions.

    python benchmarks/peers/setup.py
    python benchmarks/peers/setup.py --only llama-cpp --only vllm

What was done is not done again. A peer that cannot be had is reported; the others go on. Every
peer writes a log beside its environment. Exit code 1 if any peer failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from catalog import PEERS, Peer, Step, peers_dir

from outrider.files import write_whole


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=sorted(PEERS), help="may be repeated")
    args = parser.parse_args(arguments)
    os.nice(19)  # hours of compiling and downloading should not be in the way
    peers_dir().mkdir(parents=True, exist_ok=True)
    names = args.only or list(PEERS)
    good = [set_up(PEERS[name]) for name in names]
    return 0 if all(good) else 1


def set_up(peer: Peer) -> bool:
    """Do the steps that are missing; whether the peer is ready."""
    done, marks = peer.done(), peer.marks()
    if done == marks:
        say(peer, "ready")
        return True
    if not done or done != marks[: len(done)]:
        say(peer, f"new environment in {peer.folder}")
        shutil.rmtree(peer.folder, ignore_errors=True)
        venv.create(peer.folder, with_pip=True)
        done = []
    log = peers_dir() / f"{peer.name}.log"
    for number, (step, mark) in enumerate(zip(peer.steps, marks, strict=True)):
        if number < len(done):
            continue
        say(peer, step.title)
        if not run_step(peer, step, log):
            say(peer, f"FAILED: {last_line(log)} (whole log: {log})")
            return False
        done = [*done, mark]
        _store(peer.state, json.dumps(done))
    say(peer, "ready")
    return True


def run_step(peer: Peer, step: Step, log: Path) -> bool:
    """Run one step, its output added to the log; whether it succeeded."""
    command = [part.format(python=peer.python) for part in step.command]
    path = os.pathsep.join([str(peer.python.parent), os.environ.get("PATH", os.defpath)])
    environment = {**os.environ, "PATH": path, **step.settings}
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        try:
            done = subprocess.run(
                command,
                cwd=peer.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                check=False,
            )
        except OSError as error:  # cmake is not installed, for one
            file.write(f"{error}\n")
            return False
    return done.returncode == 0


def last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "no message"


def say(peer: Peer, line: str) -> None:
    print(f"{peer.name}: {line}", flush=True)


def _store(path: Path, text: str) -> None:
    def write(file: Path) -> None:
        file.write_text(text, encoding="utf-8")

    write_whole(path, write)


if __name__ == "__main__":
    sys.exit(main())
