"""The file of `moetune check`: JSON or YAML, one configuration or many, where a fault stands, what is no such file."""

import json
import os
import time
from pathlib import Path

import pytest

from search_spaces.errors import InputError
from tests.tuner.check_cases import BAD, GOOD, case, judged, written
from tuner.cli import main
from tuner.commands.check import check
from tuner.sweep import load_sweep


@pytest.mark.parametrize("data", [GOOD, [GOOD], {"cases": [GOOD]}])
@pytest.mark.parametrize("name", ["cases.json", "cases.yaml", "cases"])
def test_one_a_list_or_cases_in_json_or_yaml(data: object, name: str, tmp_path: Path) -> None:
    result = judged(tmp_path, data, name)
    assert [(verdict.id, verdict.valid) for verdict in result.root] == [("good", True)]
    assert not result.faults


YAML = """\
# two
cases:
  - id: good
    world_size: 8
    model: qwen3-30b-a3b
    knobs: {expert_model_parallel_size: 8, recompute_granularity: selective, recompute_modules: [layernorm]}
  - id: bad
    world_size: 8
    model: qwen3-30b-a3b
    knobs:
      expert_model_paralel_size: 8
      fp8: 8
"""


@pytest.mark.parametrize("text", [YAML, YAML.replace("cases:\n", "").replace("\n  ", "\n")])
def test_yaml_names_the_line_of_a_fault(text: str, tmp_path: Path) -> None:
    path = tmp_path / "cases.yaml"
    path.write_text(text)
    result = check(path)
    assert [verdict.valid for verdict in result.root] == [True, False]
    rows = text.splitlines()
    assert [rows[fault.line - 1].strip() for fault in result.faults] == ["expert_model_paralel_size: 8", "fp8: 8"]


def test_json_names_the_line_of_a_fault(tmp_path: Path) -> None:
    wrong = case(id="wrong", knobs={"fp8": 8}, world_size=0)
    path = written(tmp_path, {"note": "cases", "cases": [GOOD, wrong, [], BAD]})
    result = check(path)
    rows = path.read_text().splitlines()
    assert [rows[fault.line - 1].strip() for fault in result.faults] == ['"fp8": 8', '"world_size": 0,', "[],"]
    assert [verdict.rule for verdict in result.root] == [None, "UNK-00", "UNK-00", "PAR-02"]


def test_the_same_id_twice_is_a_warning(tmp_path: Path) -> None:
    first, second = judged(tmp_path, [GOOD, GOOD]).root
    assert not first.warnings
    assert second.warnings == ("another configuration of this file has the id good",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "no configuration in it"),
        (b" \n", "no configuration in it"),
        (b"null", "no configuration in it"),
        (b"[]", "no configuration in it"),
        (b"{}", "no configuration in it"),
        (b'{"cases": []}', "no configuration in it"),
        (b'{"cases": 3}', "neither a configuration nor a list"),
        (b"3", "neither a configuration nor a list"),
        (b'{"world_size": 8', "not JSON"),
        (b'{"world_size": 8, "world_size": 16}', "key 'world_size' is given twice"),
        (b'{"world_size": ' + b"9" * 5000 + b"}", "a number of 5,000 digits"),
        (b'{"id": "\\ud800", "world_size": 8}', "no character"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"knobs": ' * 50_000, "nested too deeply"),
        (b"\xff\xfe\x00", "not UTF-8 text"),
        (b'{"id": "caf\xe9"}', "not UTF-8 text"),
        (b"\x00" * 1_000_000, "not JSON"),
        (b"x" * 1_000_000, "not JSON"),
    ],
)
def test_a_file_that_holds_no_configurations(text: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "cases.json"
    path.write_bytes(text)
    began = time.monotonic()
    with pytest.raises(InputError, match=words) as caught:
        check(path)
    assert str(path) in str(caught.value)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "text",
    [
        b"a: [", b"a: b: c", b"\t- a", b"!!python/object:os.system {}", b"a: &a [*a]", b"a: 1\na: 2", b"? [1]\n: 2",
        b"<<: {a: 1}", b"a: .inf", b"- " * 3000, b"[" * 5000, b"\x01" * 1_000_000, b"x" * 1_000_000, b"%" * 1_000_000,
        b"a: " + b"9" * 5000, b"&a a: *b",
    ],
)  # fmt: skip
def test_yaml_that_holds_no_configurations(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cases.yaml"
    path.write_bytes(text)
    with pytest.raises(InputError):
        check(path)


def test_an_alias_bomb_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cases.yaml"
    path.write_text("a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 8)))
    with pytest.raises(InputError, match="values"):
        check(path)


def test_a_mark_of_byte_order_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "cases.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    assert check(path).root[0].valid


@pytest.mark.parametrize("name", ["missing.json", ""])
def test_a_file_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read it"):
        check(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('{"a": "}\\"{",\n"knobs": {\n"tp": 1,\n"pp": {"tp": 2},\n"t\\u0070": 3}}', 5, r"'tp' .*first on line 3"),
        ('[{"a": 1},\n{"a": 1}, {"b": 1,\n"b": 2}]', 3, r"'b' .*first on line 2"),
        ('{"id": "\\ud83d\\ude00 \\\\ud800",\n"x": "\\ud83dx"}', 2, "half a surrogate"),
        ('{"id": "\\ude00"}', 1, "half a surrogate"),
        ('{"id": 1,\n"world_size": ' + "9" * 5000 + "}", 2, "a number of 5,000 digits"),
    ],
)
def test_what_json_allows_and_we_do_not_names_its_line(text: str, line: int, words: str, tmp_path: Path) -> None:
    path = tmp_path / "cases.json"
    path.write_text(text)
    with pytest.raises(InputError, match=words) as caught:
        check(path)
    assert [fault.line for fault in caught.value.faults] == [line]
    assert caught.value.next_step


def test_half_a_character_in_yaml_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "cases.yaml"
    path.write_text('id: "\\u00e9"\nworld_size: 8\nmodel: "\\ud800"\n')
    with pytest.raises(InputError, match="half a surrogate") as caught:
        check(path)
    assert caught.value.faults[0].line == 3


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "cases.json")
    with pytest.raises(InputError, match="not a regular file"):
        check(tmp_path / "cases.json")
    with pytest.raises(InputError, match="not a regular file"):
        load_sweep(tmp_path / "cases.json")


def test_a_large_file_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "cases.yaml"
    with path.open("wb") as stream:
        stream.truncate(20_000_001)
    with pytest.raises(InputError, match="larger than 20000000 bytes"):
        check(path)


def test_reading_ends_at_the_first_value_too_many(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "cases.yaml"
    path.write_text("\n".join(f"k{number}: 1" for number in range(200)) + "\n}")
    monkeypatch.setattr("tuner.check_file.MOST_VALUES", 100)
    with pytest.raises(InputError, match="more than 100 values") as caught:  # and not the brace behind them
        check(path)
    assert caught.value.faults[0].line == 100


def test_an_id_cannot_command_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, [case(id="\x1b[31mred\u202e"), case(id="\x1b[2J", world_size=0)])
    assert main(["check", str(path)]) == 2
    told = capsys.readouterr()
    assert "\x1b" not in told.out + told.err
    assert "\\x1b[31mred\\u202e" in told.out
    assert "\\x1b[2J: " in told.err
