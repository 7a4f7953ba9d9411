"""The comparison with peers, without any peer: workers, memory, laws, rows, options."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

import numpy as np
import pytest

PEERS = Path(__file__).parents[1] / "benchmarks" / "peers"
sys.path.insert(0, str(PEERS))

import catalog  # noqa: E402
import client  # noqa: E402
import measure  # noqa: E402
import plan  # noqa: E402
import reference  # noqa: E402
import run  # noqa: E402
import setup  # noqa: E402
import table  # noqa: E402

from outrider.errors import ConfigError  # noqa: E402

VOCAB = 7

FAKE = f"""
import sys
sys.path.insert(0, {str(PEERS / "workers")!r})
import numpy as np
from protocol import serve

class Fake:
    def load(self, options):
        print("an engine that prints")
        if options.get("broken"):
            raise OSError("no such weights")
        self.shift = options["shift"]
        return {{"versions": {{"fake": "1.5"}}, "dtype": "float32", "notes": ["a note"]}}

    def generate(self, ids, num_tokens, mode):
        if mode["name"] == "die":
            raise SystemExit(3)
        if mode["name"] == "short":
            num_tokens = max(1, num_tokens - 1)
        step = mode.get("k", 1)
        return [(ids[-1] + step * i) % {VOCAB} for i in range(num_tokens)]

    def logits(self, ids, positions):
        if self.shift is None:
            return None
        likely = [(ids[i] + self.shift) % {VOCAB} for i in positions]
        return 4 * np.eye({VOCAB}, dtype=np.float32)[likely]

serve(Fake)
"""


@pytest.fixture
def command(tmp_path: Path) -> tuple[str, ...]:
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    return sys.executable, str(script)


def spec(
    command: tuple[str, ...], *modes: str, engine: str = "fake", memory: int = 1, **options: object
) -> plan.Spec:
    made = tuple(catalog.Mode(mode, mode.split(":")[0]) for mode in modes)
    options = {"shift": 0, **options}
    return plan.Spec(
        engine=engine, dtype="float32", modes=made, command=command, options=options, memory=memory
    )


class Bar:
    """A progress bar that nobody sees."""

    def __init__(self) -> None:
        self.total = self.done = 0

    def add_task(self, description: str, total: int) -> int:
        self.total = total
        return 0

    def update(self, task: int, description: str) -> None:
        pass

    def advance(self, task: int) -> None:
        self.done += 1


def settings(folder: Path, **changes: object) -> measure.Settings:
    values = {
        "num_tokens": 3,
        "repeats": 2,
        "timeout": 60.0,
        "memory": 100,
        "logs": folder / "logs",
    }
    return measure.Settings(**{**values, **changes})  # type: ignore[arg-type]


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_worker_answers_and_stands_still_in_between(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    worker = client.Worker(command, tmp_path / "log")
    try:
        loaded = worker.call("load", options={"shift": 0}, timeout=60)
        assert loaded["versions"] == {"fake": "1.5"}
        for _ in range(10_000):  # a signal takes a moment
            if state(worker.pid) == "T":
                break
            time.sleep(0.001)
        else:
            pytest.fail("an idle worker is not stopped")
        reply = worker.call("generate", ids=[5], num_tokens=3, mode={"name": "plain"}, timeout=60)
        assert reply["ids"] == [5, 6, 0]
        assert reply["seconds"] > 0
        assert worker.memory() > 0
    finally:
        worker.close()
    assert not Path(f"/proc/{worker.pid}").exists()
    assert "an engine that prints" in (tmp_path / "log").read_text()


def test_an_error_of_an_engine_is_one_line_and_the_worker_lives(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    worker = client.Worker(command, tmp_path / "log")
    try:
        with pytest.raises(client.WorkerFailed, match=r"^load: OSError: no such weights$"):
            worker.call("load", options={"broken": True}, timeout=60)
        worker.call("load", options={"shift": 0}, timeout=60)
        assert "Traceback" in (tmp_path / "log").read_text()
        with pytest.raises(client.WorkerFailed, match=r"the worker ended"):
            worker.call("generate", ids=[1], num_tokens=1, mode={"name": "die"}, timeout=60)
    finally:
        worker.close()


def test_a_worker_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    worker = client.Worker(["sleep", "30"], tmp_path / "log")
    with pytest.raises(client.WorkerFailed, match="no reply within 0 s"):
        worker.call("load", timeout=0.05)
    assert not Path(f"/proc/{worker.pid}").exists()


def test_measurement_interleaves_and_judges(command: tuple[str, ...], tmp_path: Path) -> None:
    prompts = [("a", [1, 2]), ("b", [3, 4])]
    good = spec(command, "plain", "lookup:k=2,n=1")
    other = spec(command, "plain", engine="other", shift=1)
    mute = spec(command, "plain", engine="mute", shift=None)
    say: list[str] = []
    known = measure.reference_of(
        tmp_path, [[1, 2, 3], [4, 5]], good, settings(tmp_path), say.append
    )
    again = measure.reference_of(
        tmp_path, [[1, 2, 3], [4, 5]], spec(("/nowhere",)), settings(tmp_path), say.append
    )
    assert again == known
    assert known.columns == VOCAB
    bar = Bar()
    run_ = measure.Measurement(
        [good, other, mute], prompts, settings(tmp_path), known, bar, say.append
    )
    run_.run()
    assert bar.done == bar.total == 2 * 2 * 4
    order = [(s.engine, s.mode) for s in run_.samples if s.repeat == 0]
    assert sorted(order[:4]) == sorted(order[4:])  # all engines at the first prompt, then again
    assert order[:4] != order[4:]  # in another order
    assert run_.closeness["fake", "float32"].kl_mean == 0  # type: ignore[union-attr]
    assert run_.closeness["fake", "float32"].top1 == 1  # type: ignore[union-attr]
    assert run_.closeness["other", "float32"].kl_mean > 0.5  # type: ignore[union-attr]
    assert run_.closeness["other", "float32"].top1 == 0  # type: ignore[union-attr]
    assert run_.closeness["mute", "float32"] is None
    assert run_.reference_perplexity == run_.closeness["fake", "float32"].perplexity  # type: ignore[union-attr]
    assert [c.version for c in run_.contenders()] == ["1.5"] * 4


def test_a_broken_engine_leaves_the_others_alone(command: tuple[str, ...], tmp_path: Path) -> None:
    specs = [
        spec(command, "plain", engine="good"),
        spec(command, "plain", engine="broken", broken=True),
        spec(command, "short", engine="short"),
        spec(command, "die", engine="dead"),
    ]
    say: list[str] = []
    measured = measure.Measurement(specs, [("a", [1])], settings(tmp_path), None, Bar(), say.append)
    measured.run()
    assert {s.engine for s in measured.samples} == {"good"}
    failures = {c.engine: c.failure for c in measured.contenders()}
    assert failures["good"] is None
    assert failures["broken"] == "load: OSError: no such weights"
    assert failures["short"] == "2 tokens in place of 3 at a"
    assert "the worker ended" in str(failures["dead"])
    assert "FAILED: load: OSError" in table.markdown(table.make_rows(measured.contenders(), []))


def outrider(command: tuple[str, ...], memory: int, *modes: catalog.Mode) -> plan.Spec:
    """A process of Outrider's with plain decoding and ``modes``."""
    plain = catalog.Mode("plain", "none")
    made = spec(command, "plain", engine=table.OUTRIDER, memory=memory)
    return dataclasses.replace(made, modes=(plain, *modes))


def test_groups_come_one_by_one_when_memory_is_short(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    specs = [spec(command, "plain", engine=name, memory=60) for name in "ab"]
    specs.append(outrider(command, 20, catalog.Mode("suffix:k=8", "suffix:k=8")))
    say: list[str] = []
    bar = Bar()
    measured = measure.Measurement(
        specs, [("p", [1]), ("q", [2])], settings(tmp_path), None, bar, say.append
    )
    assert [[s.name.split()[0] for s in g] for g in measured.groups] == [
        ["a", "outrider"],
        ["b", "outrider"],
    ]
    measured.run()
    assert bar.done == bar.total == 2 * 2 * (3 + 2)
    assert [s.group for s in measured.taken] == [0] * 12 + [1] * 8
    assert {s.engine for s in measured.taken[:12]} == {"a", "outrider"}
    assert {s.engine for s in measured.taken[12:]} == {"b", "outrider"}
    assert say == ["not all engines fit in memory: 2 groups, one by one"]


def test_groups_are_compared_by_the_yardstick() -> None:
    def taken(engine: str, group: int, repeat: int, seconds: float) -> table.Sample:
        made = sample(engine, "plain", repeat, seconds, [1, 2, 3, 4])
        return dataclasses.replace(made, group=group)

    # The machine is half as fast while the second group runs.
    samples = [taken("outrider", 0, r, 1.0) for r in range(3)]
    samples += [taken("a", 0, r, 2.0) for r in range(3)]
    samples += [taken("outrider", 1, r, 2.0) for r in range(2)]
    samples += [taken("b", 1, r, 4.0) for r in range(2)]
    scaled = table.in_one_measure(samples, ("outrider", "x", "plain"))
    assert {s.seconds for s in scaled if s.engine == "outrider"} == {1.0}
    assert {s.seconds for s in scaled if s.engine in "ab"} == {2.0}
    assert {s.first_seconds for s in scaled if s.engine == "b"} == {1.0}
    rows = table.make_rows([contender(name, "plain") for name in ("outrider", "a", "b")], scaled)
    assert [row.rate for row in rows] == [4.0, 2.0, 2.0]
    assert table.in_one_measure(samples, ("nobody", "x", "plain")) == samples


def test_pack_keeps_to_the_limit(command: tuple[str, ...]) -> None:
    sizes = [3, 5, 2, 4, 9, 1]
    specs = [spec(command, "plain", engine=f"e{i}", memory=m) for i, m in enumerate(sizes)]
    groups = plan.pack(specs, 8)
    assert sorted(s.name for g in groups for s in g) == sorted(s.name for s in specs)
    assert all(sum(s.memory for s in g) <= 8 or len(g) == 1 for g in groups)
    assert len(groups) == 3


def test_pack_puts_the_yardstick_in_every_group(command: tuple[str, ...]) -> None:
    suffix = catalog.Mode("suffix:k=8", "suffix:k=8")
    big, small = outrider(command, 5, suffix), outrider(command, 3, suffix)
    small = dataclasses.replace(small, dtype="int4")
    specs = [spec(command, "plain", engine=f"e{m}", memory=m) for m in (6, 5, 4)]
    groups = plan.pack([*specs, big, small], 10)
    assert all(any((s.engine, s.dtype) == ("outrider", "int4") for s in g) for g in groups)
    assert all(sum(s.memory for s in g) <= 10 for g in groups)
    named = [s.name for g in groups for s in g]
    assert sorted(set(named)) == sorted(
        {s.name for s in [*specs, big, small]} | {"outrider int4 plain"}
    )
    assert named.count(small.name) == 1
    assert plan.pack([*specs, big, small], 23) == [[*specs, big, small]]


def test_compare_gives_the_divergence_of_the_definition() -> None:
    seed = 5
    print(f"seed {seed}")
    random = np.random.default_rng(seed)
    ours = random.normal(size=(40, 9)).astype(np.float32)
    theirs = random.normal(size=(40, 11)).astype(np.float32)  # two columns of padding
    following = [int(i) % 9 if i % 2 else -1 for i in range(40)]
    got = reference.compare(ours, theirs, following)
    p = np.exp(ours.astype(float))
    p /= p.sum(1, keepdims=True)
    q = np.exp(theirs[:, :9].astype(float))
    q /= q.sum(1, keepdims=True)
    kl = (p * np.log(p / q)).sum(1)
    told = [q[i, token] for i, token in enumerate(following) if token >= 0]
    assert got.positions == 40
    assert got.kl_mean == pytest.approx(kl.mean(), rel=1e-9)
    assert got.kl_p99 == pytest.approx(np.quantile(kl, 0.99), rel=1e-9)
    assert got.top1 == (p.argmax(1) == q.argmax(1)).mean()
    assert got.perplexity == pytest.approx(np.exp(-np.log(told).mean()), rel=1e-9)


def test_text_looks_at_prompts_and_answers() -> None:
    text = reference.make_text([list(range(100, 140))], [[1, 2, 3]])
    assert text.sequences == [[*range(100, 140), 1, 2, 3]]
    assert text.positions[0][-3:] == [39, 40, 41]  # after these come 1, 2 and 3
    assert text.following[0][-3:] == [-1, -1, -1]
    assert text.following[0][:-3] == [101 + i for i in text.positions[0][:-3]]
    assert text.num_positions == reference.SPREAD + 3


def sample(engine: str, mode: str, repeat: int, seconds: float, ids: list[int]) -> table.Sample:
    return table.Sample(
        engine=engine,
        dtype="x",
        mode=mode,
        prompt="p",
        repeat=repeat,
        group=0,
        ids=ids,
        seconds=seconds,
        first_seconds=seconds / 2,
    )


def contender(engine: str, mode: str) -> table.Contender:
    return table.Contender(engine=engine, version="1", dtype="x", mode=mode, plain=mode == "plain")


def test_rows_compare_with_the_best_peers() -> None:
    ids = [1, 2, 3, 4]
    samples = [sample("outrider", "plain", r, s, ids) for r, s in enumerate((1.0, 2.0, 4.0))]
    samples += [sample("slow", "plain", 0, 8.0, ids)]
    samples += [
        sample("fast", "plain", 0, 4.0, ids),
        sample("fast", "lookup", 0, 1.0, [1, 2, 3, 5]),
    ]
    names = [("outrider", "plain"), ("slow", "plain"), ("fast", "plain"), ("fast", "lookup")]
    rows = table.make_rows([contender(*name) for name in names], samples)
    ours, slow, fast, lookup = rows
    assert (ours.rate, ours.low, ours.high) == (2.0, 1.0, 4.0)
    assert ours.decode_rate == 3.0  # three tokens in one second, the median
    assert (ours.by_plain, ours.by_best) == (2.0, 0.5)
    assert (ours.decode_by_plain, ours.decode_by_best) == (2.0, 0.5)
    assert (slow.by_plain, fast.by_plain, lookup.by_best) == (0.5, 1.0, 1.0)
    assert lookup.same == (0, 1)
    lines = table.markdown(rows).splitlines()
    assert {line.count("|") for line in lines} == {len(table.HEAD) + 1}
    assert "0 of 1 as own plain" in lines[-1]


@pytest.mark.parametrize(
    "spec", ["", "lookup", "lookup:k=8", "draft:k=0", "plain:k=2", "draft:k=x"]
)
def test_modes_that_do_not_exist_are_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match="expected plain, lookup:k=8,n=3 or draft:k=4"):
        catalog.parse_mode(spec)


def test_every_engine_of_the_table_can_be_started() -> None:
    for engine in catalog.ENGINES.values():
        assert engine.environment in catalog.PEERS
        assert (plan.SCRIPTS / engine.script).is_file()
        assert [catalog.parse_mode(mode).spec for mode in engine.modes] == list(engine.modes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--limit", "0"], "--limit is 0, expected 1 or more"),
        (["--max-tokens", "1"], "--max-tokens is 1, expected 2 or more"),
        (["--mode", "none=plain"], "expected ENGINE=MODE"),
        (["--mode", "vllm=plain", "--engine", "outrider"], "which --engine leaves out"),
        (["--memory", "nan"], "--memory is nan, expected a number above 0"),
        (["--timeout", "-5"], "--timeout is -5.0, expected a number above 0"),
        (["--threads", "100000"], "--threads is 100000, expected 1 to"),
        (["--dtype", "int3"], "int3"),
        (["--drafter", "nonsense"], "nonsense"),
        (["--json", "/no/such/folder/x.json"], "the folder /no/such/folder does not exist"),
    ],
)
def test_options_that_cannot_be_honoured(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_setup_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(setup.venv, "create", lambda folder, with_pip: folder.mkdir(parents=True))
    first = catalog.Step("first", ("sh", "-c", "echo one >> ran"))
    second = catalog.Step("second", ("sh", "-c", "echo two >> ran; test -e allowed"))
    peer = catalog.Peer("fake", (first, second))
    assert not setup.set_up(peer)
    assert not peer.ready
    assert "fake: FAILED" in capsys.readouterr().out
    (peer.folder / "allowed").touch()
    assert setup.set_up(peer)
    assert peer.ready
    assert (peer.folder / "ran").read_text().split() == ["one", "two", "two"]
    assert setup.set_up(peer)
    changed = catalog.Peer("fake", (second, first))
    assert not changed.ready
    assert not setup.set_up(changed)  # made anew: nothing is allowed in it
    assert (peer.folder / "ran").read_text().split() == ["two"]
    assert changed.done() == []


def test_a_step_that_cannot_be_started_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    peer = catalog.Peer("fake", ())
    peer.folder.mkdir(parents=True)
    log = tmp_path / "log"
    assert not setup.run_step(peer, catalog.Step("nothing", ("/no/such/command",)), log)
    assert "No such file or directory: '/no/such/command'" in setup.last_line(log)
