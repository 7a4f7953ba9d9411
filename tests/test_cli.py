"""The command line, in one process: what it prints, what it refuses, and its exit codes."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from gguf_writer import TOKENS, make_hf, tokenizer, write_gguf
from outrider.cli import main

PROMPT = "the heat in a thing"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("cli") / "llama.gguf"
    write_gguf(make_hf("llama"), path, "llama")
    return str(path)


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: object) -> Result:
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(int(stopped.value.code or 0), captured.out, captured.err)

    return call


def generate(run: Any, model: str, *options: object) -> dict[str, Any]:
    result = run(
        *("generate", PROMPT, "-m", model, "--dtype", "float32", "--max-tokens", 12),
        *("--ignore-eos", "--json", "--num-slots", 64),
        *options,
    )
    assert result.code == 0, result.err
    answer: dict[str, Any] = json.loads(result.out)
    return answer


def test_generate_json(run: Any, model: str) -> None:
    answer = generate(run, model)
    assert set(answer) == {"text", "token_ids", "finish_reason", "stats"}
    assert (len(answer["token_ids"]), answer["finish_reason"]) == (12, "length")
    stats = answer["stats"]
    assert {
        *("tokens", "target_forwards", "acceptance_length", "drafted", "accepted"),
        *("acceptance_rate", "seconds", "tokens_per_second"),
    } <= set(stats)
    assert stats["tokens"] == 12
    assert stats["acceptance_length"] * stats["target_forwards"] == pytest.approx(12)


@pytest.mark.parametrize("temperature", [0, 1])
def test_every_drafter_gives_the_same_tokens(run: Any, model: str, temperature: int) -> None:
    options = ("--temperature", temperature, "--seed", 5)
    plain = generate(run, model, *options)
    for drafter in (
        "ngram:n=2,k=4",
        "suffix:k=4,width=2",
        f"draft:{model},k=3",
        f"draft:{model},k=4,width=2",
        f"ensemble:[ngram:k=2,draft:{model},k=2]",
    ):
        answer = generate(run, model, *options, "--drafter", drafter)
        assert answer["token_ids"] == plain["token_ids"], drafter
        assert 0 <= answer["stats"]["accepted"] <= answer["stats"]["drafted"]
    assert answer["stats"]["accepted"] > 0


def test_several_answers_and_logprobs(run: Any, model: str) -> None:
    answer = generate(run, model, "-t", 1, "--seed", 1, "--n", 3, "--logprobs", 2)
    assert len(answer["samples"]) == 3
    assert answer["samples"][0]["token_ids"] == answer["token_ids"]
    assert answer["stats"]["tokens"] == 36
    assert [len(p["top"]) for p in answer["logprobs"]] == [2] * 12
    assert len({tuple(sample["token_ids"]) for sample in answer["samples"]}) > 1


def test_generate_streams_text(run: Any, model: str) -> None:
    options = ("--dtype", "float32", "--max-tokens", 12, "--ignore-eos", "--num-slots", 64)
    result = run("generate", PROMPT, "-m", model, *options)
    assert result.code == 0
    assert result.out.rstrip("\n") == generate(run, model)["text"].rstrip("\n")
    assert "12 tokens in" in result.err


def test_bench_json(run: Any, model: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [
        {"question_id": i, "category": name, "turns": turns}
        for i, (name, turns) in enumerate([("one", ["the heat"]), ("two", ["in a", "thing"])])
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out.json"
    result = run(
        *("bench", "-m", model, "--dtype", "float32", "--prompts", prompts, "--json", out),
        *("-d", "ngram:k=4", "-d", f"draft:{model},k=3", "--max-tokens", 6, "--repeats", 2),
        *("--verifier", "coupled", "--verifier", "rejection", "--num-slots", 64),
    )
    assert result.code == 0, result.err
    document = json.loads(out.read_text())
    rows = document["rows"]
    assert [row["workload"] for row in rows[:5]] == ["one"] * 5
    assert {row["workload"] for row in rows} == {"one", "two", "all"}
    assert {
        *("drafter", "verifier", "workload", "exact", "token_match", "tokens_per_second"),
        *("speedup", "speedup_low", "speedup_high", "acceptance_length", "acceptance_rate"),
        "acceptance_by_position",
    } <= set(rows[0])
    assert all(row["exact"] is True and row["token_match"] == 1.0 for row in rows)
    assert rows[0]["speedup"] == 1.0
    assert rows[0]["drafter"] == "none"
    assert document["environment"]["torch"]
    assert "same tokens" in result.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "x", "-m", "nothing-like-this"), "no model named 'nothing-like-this'"),
        (("generate", "x", "-d", "ngrm"), "unknown drafter 'ngrm'"),
        (("generate", "x", "-d", "ngram:q=1"), "unknown option 'q'"),
        (("generate", "x", "-d", "draft:k=1"), "expected MODEL before the options"),
        (("generate", "x", "--verifier", "hope"), "unknown verifier 'hope'"),
        (("generate", " "), "the prompt is empty"),
        (("generate", "x", "--prompt", "y"), "the prompt is given twice"),
        (("generate", "--prompt-file", "/nowhere"), "--prompt-file /nowhere"),
        (("generate", "x", "--temperature=-1"), "temperature is -1.0, expected 0 or more"),
        (("generate", "x", "--top-p", "nan"), "top_p is nan"),
        (("generate", "x", "--max-tokens", "0"), "max_tokens is 0, expected 1 or more"),
        (("generate", "x", "--logit-bias", "a=b"), "expected ID=BIAS"),
        (("generate", "x", "--logprobs", "2"), "add --json"),
        (("generate", "x", "--raw", "--system", "y"), "leave out --raw"),
        (("generate", "x", "--nonsense"), "No such option"),
        (("bench", "--prompts", "/nowhere.jsonl"), "/nowhere.jsonl"),
        (("bench", "--json", "/nowhere/out.json"), "the folder /nowhere does not exist"),
        (("profile", "--png", "/nowhere/out.png"), "the folder /nowhere does not exist"),
        (("bench", "--json", "/proc/out.json"), "--json /proc/out.json cannot be written"),
        (("bench", "--json", "/tmp"), "--json /tmp is a folder"),
        (("bench", "--json", ""), "names no file"),
        (("bench", "--json", "/tmp/" + "x" * 300), "cannot be written: File name too long"),
        (("generate", "x", "-m", "~no-such-user/x"), "no file or folder"),
        (("generate", "x", "-m", "a" * 5000), "no "),
        (("generate", "x", "--threads", "100000"), "--threads is 100000, expected 1 to"),
        (("generate", "x", "--n", "100000"), "n is 100000, expected 1 to 4096"),
        (("generate", "x", "-m", ""), "the model's name is empty"),
        (("generate", "half \ud800"), "the prompt is not valid UTF-8 text"),
        (("frobnicate",), "No such command"),
    ],
)
def test_mistakes_are_one_line(run: Any, arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.code == 2
    assert message in result.err
    assert result.err.startswith("outrider: ")
    assert result.err.count("\n") == 1
    assert result.out == ""


def test_too_long_a_prompt_and_foreign_drafts(run: Any, model: str, tmp_path: Path) -> None:
    options = ("-m", model, "--dtype", "float32", "--num-slots", 8)
    result = run("generate", PROMPT * 3, *options)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "at most 7 fit" in result.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--num-slots", 10**23), "take a smaller model or --num-slots"),
        (("--device", "meta"), "device is 'meta', possible: cpu, cuda"),
        (("--device", "tpu"), "device is 'tpu', possible: cpu, cuda"),
        (("--draft-dtype", "int5"), "dtype is 'int5', possible"),
        (("--draft-dtype", "float32", "--dtype", "float32"), "--draft-dtype is for draft models"),
        (("--dtype", "int3"), "dtype is 'int3', possible"),
    ],
)
def test_what_the_machine_cannot_do(
    run: Any, model: str, options: tuple[object, ...], message: str
) -> None:
    result = run("generate", PROMPT, "-m", model, *options)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert message in result.err


@pytest.mark.parametrize("line", ["[" * 100_000, '{"id": ' + "9" * 5000 + "}", '{"id": "\\ud800'])
def test_prompt_files_past_sense(run: Any, model: str, tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line + "\n")
    result = run("bench", "-m", model, "--prompts", path)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "line 1" in result.err


def test_half_a_character_is_no_prompt(run: Any, model: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": 1, "category": "a", "turns": ["\\ud800"]}\n')
    result = run("bench", "-m", model, "--prompts", path)
    assert result.code == 2
    assert "surrogate" in result.err


def test_a_draft_of_another_vocabulary(run: Any, model: str, tmp_path: Path) -> None:
    other = tmp_path / "folder"
    make_hf("qwen2").save_pretrained(other)
    tokenizer([token + "x" for token in TOKENS], []).save_pretrained(other)
    result = run("bench", "-m", model, "--dtype", "float32", "-d", f"draft:{other}")
    assert result.code == 2
    assert "have different tokenizers" in result.err.splitlines()[-1]


def test_an_interrupt_is_no_success(run: Any, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.generate.print_answers", interrupted)
    result = run("generate", PROMPT, "-m", model, "--dtype", "float32", "--num-slots", 64)
    assert (result.code, result.err.splitlines()[-1]) == (130, "outrider: interrupted")


def test_a_model_folder_runs_no_code(run: Any, tmp_path: Path) -> None:
    folder = tmp_path / "evil"
    folder.mkdir()
    ran = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass X: pass\n")
    config = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.X"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"\0" * 8)
    result = run("generate", PROMPT, "-m", folder)
    assert (result.code, result.out) == (2, "")
    assert result.err.count("\n") == 1
    assert not ran.exists()


def test_repeated_contenders_run_once(run: Any, model: str, tmp_path: Path) -> None:
    out, prompts = tmp_path / "out.json", tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": 1, "category": "a", "turns": ["the heat"]}\n')
    result = run(
        *("bench", "-m", model, "--dtype", "float32", "--json", out, "--num-slots", 64),
        *("--prompts", prompts, "--max-tokens", 2, "--repeats", 1),
        *("-d", "ngram", "-d", " ngram", "-d", "none:"),
    )
    assert result.code == 0, result.err
    rows = json.loads(out.read_text())["rows"]
    assert [row["drafter"] for row in rows] == ["none", "ngram"]
    assert out.stat().st_mode & 0o777 == 0o644


def test_warnings_are_one_line(
    run: Any, model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def warn(*_: object, **__: object) -> None:
        for _ in range(2):
            warnings.warn("careful", RuntimeWarning, stacklevel=1)

    monkeypatch.setattr("outrider.generate.print_answers", warn)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        result = run("generate", PROMPT, "-m", model, "--dtype", "float32", "--num-slots", 64)
    assert result.err == "outrider: warning: careful\n"


def test_exact_needs_the_kernels(run: Any, model: str) -> None:
    result = run("generate", PROMPT, "-m", model, "--dtype", "float32", "--exact")
    assert result.code == 2
    assert "needs the C++ kernels" in result.err


def test_lists(run: Any) -> None:
    assert "smollm2-135m-instruct" in run("models").out
    drafters = run("drafters").out
    assert "draft:MODEL,k=4,width=1,depth=0" in drafters
    assert "verifier coupled: bit-exact" in drafters
    assert run("--version").out.startswith("outrider 0.")


def test_no_arguments_print_the_help(run: Any) -> None:
    result = run()
    assert (result.code, result.out) == (2, "")
    assert len(result.err.splitlines()) > 10
    assert "generate" in result.err


def test_scope_is_an_option(run: Any, model: str) -> None:
    options = ("--drafter", "suffix:k=4")
    assert generate(run, model, *options, "--scope", "me")["text"] == generate(run, model)["text"]
