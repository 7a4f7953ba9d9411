import json

import pytest

from outrider.bench.workloads import CATEGORIES, Prompt, load_prompts
from outrider.errors import BadFile, ConfigError


def write(tmp_path, *rows):
    path = tmp_path / "prompts.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


GOOD = {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], "reference": []}


def test_builtin_prompts_are_complete():
    prompts = load_prompts("builtin")
    for category in CATEGORIES:
        assert 6 <= sum(p.category == category for p in prompts) <= 8
    assert {p.category for p in prompts} == set(CATEGORIES)
    assert len({p.id for p in prompts}) == len(prompts)
    assert len({p.turns for p in prompts}) == len(prompts)
    assert any(len(p.turns) > 1 for p in prompts)


def test_a_small_limit_covers_all_builtin_categories():
    assert {p.category for p in load_prompts("builtin", limit=8)} == set(CATEGORIES)


def test_summaries_and_edits_have_something_to_copy_from():
    for prompt in load_prompts("builtin:summarisation"):
        assert 150 <= len(prompt.turns[0].split()) <= 320, prompt.id
    for prompt in load_prompts("builtin:code_edit"):
        code = prompt.turns[0].split("```")[1].strip().split("\n")
        assert 20 <= len(code) - 1 <= 40, prompt.id


def test_tool_prompts_hold_a_schema_and_python_prompts_compile():
    for prompt in load_prompts("builtin:tool_calls"):
        blocks = prompt.turns[0].split("\n\n")
        [schema] = [json.loads(block) for block in blocks if block[0] in "[{"]
        for tool in schema if isinstance(schema, list) else [schema]:
            assert tool["name"]
            assert set(tool["parameters"]["required"]) <= set(tool["parameters"]["properties"])
    for prompt in load_prompts("builtin:code_edit"):
        language, _, code = prompt.turns[0].split("```")[1].partition("\n")
        if language == "python":
            compile(code, prompt.id, "exec")


def test_categories_can_be_chosen():
    prompts = load_prompts("builtin:code_edit, chat", limit=3)
    assert [p.category for p in prompts] == ["code_edit", "chat", "code_edit"]


def test_files_keep_order_and_ignore_other_keys(tmp_path):
    path = write(tmp_path, GOOD, "", {"id": "b", "category": "math", "turns": ["1\u20282"]})
    assert load_prompts(path) == [
        Prompt("81", "writing", ("Write.", "Again.")),
        Prompt("b", "math", ("1\u20282",)),
    ]
    assert [p.id for p in load_prompts(path, limit=1)] == ["81"]


def test_line_separators_inside_strings_do_not_split_lines(tmp_path):
    row = json.dumps(GOOD | {"turns": ["one\u2028two"]}, ensure_ascii=False)
    assert load_prompts(write(tmp_path, row))[0].turns == ("one\u2028two",)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 2: not valid JSON"),
        ("[1]", "line 2: expected a JSON object, found list"),
        ({"category": "x", "turns": ["a"]}, "line 2: the key 'id' is missing"),
        ({"id": 1, "turns": ["a"]}, "line 2: the key 'category' is missing"),
        ({"id": 1, "category": "x"}, "line 2: the key 'turns' is missing"),
        ({"id": None, "category": "x", "turns": ["a"]}, "line 2: the id is None"),
        ({"id": 1, "category": 5, "turns": ["a"]}, "line 2: category is 5"),
        ({"id": 1, "category": "x", "turns": []}, "line 2: 'turns' must be a list"),
        ({"id": 1, "category": "x", "turns": "a"}, "line 2: 'turns' must be a list"),
        ({"id": 1, "category": "x", "turns": ["a", " "]}, "line 2: every message"),
        (GOOD, "line 2: id '81' was used on line 1"),
    ],
)
def test_bad_lines_are_named(tmp_path, row, message):
    path = write(tmp_path, GOOD, row)
    with pytest.raises(BadFile, match=message) as caught:
        load_prompts(path)
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_without_prompts_are_refused(tmp_path):
    with pytest.raises(BadFile, match="holds no prompts"):
        load_prompts(write(tmp_path, "", " "))
    with pytest.raises(BadFile, match="no prompt file"):
        load_prompts(str(tmp_path / "missing.jsonl"))
    with pytest.raises(BadFile, match="cannot read"):
        load_prompts(str(tmp_path))
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadFile, match="cannot read"):
        load_prompts(str(binary))


@pytest.mark.parametrize("source", ["builtin:poetry", "builtin:chat,", "builtin:"])
def test_unknown_categories_are_refused(source):
    with pytest.raises(ConfigError, match=r"unknown category .* known: code_completion"):
        load_prompts(source)


@pytest.mark.parametrize("limit", [0, -1])
def test_bad_limits_are_refused(limit):
    with pytest.raises(ConfigError, match="expected 1 or more"):
        load_prompts("builtin", limit=limit)
