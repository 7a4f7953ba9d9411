"""Results are written whole or not at all, and never over a device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.files import check_output, write_whole


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")

    def fail(file: Path) -> None:
        file.write_text("half")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_whole(path, fail)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.json"]


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_output("--json", pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, lambda file: [file.write_text("all")])
    assert os.read(reader, 10) == b"all"
    os.close(reader)
    assert not pipe.is_file()
    assert os.listdir(tmp_path) == ["pipe"]


def test_what_the_system_refuses_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be written: No such file"):
        write_whole(tmp_path / "gone" / "out.json", lambda file: None)
    check_output("--json", None)
    check_output("--json", tmp_path / "new.json")
    assert os.listdir(tmp_path) == []
