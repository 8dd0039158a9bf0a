"""Rows in memory become a file of JSON lines, and what cannot is named with its number."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from datasets import Dataset, Features, Value

from offbeat.api.rows import is_named, sets_of, write_rows
from offbeat.config.data import DataConfig
from offbeat.data.dataset import open_datasets
from offbeat.data.row import Row, parse_record
from offbeat.errors import DataError, StorageError

RECORDS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("rows", [
    RECORDS, tuple(RECORDS), (each for each in RECORDS), [Row("1+1=", "2"), Row("2+2=", "4")], pandas.DataFrame(RECORDS),
    Dataset.from_list(RECORDS)], ids=["list", "tuple", "generator", "Row", "pandas", "datasets"])
def test_rows_of_every_kind_become_the_same_file(rows: Any, tmp_path: Path) -> None:
    file = write_rows(rows, tmp_path / "data", argument="data")
    assert read(file.path) == RECORDS
    assert (file.num_rows, file.fields) == (2, ("prompt", "answer"))
    assert file.path == write_rows(RECORDS, tmp_path / "data", argument="data").path
    assert [path.name for path in (tmp_path / "data").iterdir()] == [file.path.name], "nothing else is left"


def test_dates_and_times_are_written_as_iso_8601(tmp_path: Path) -> None:
    at = pandas.Timestamp("2026-11-27 08:30:00")
    frame = pandas.DataFrame([{**RECORDS[0], "seen": at}])
    for rows in (frame, [{**RECORDS[0], "seen": at.to_pydatetime()}]):
        assert read(write_rows(rows, tmp_path, argument="data").path) == [{**RECORDS[0], "seen": "2026-11-27T08:30:00"}]


def test_a_chat_as_a_row_is_a_record_of_messages(tmp_path: Path) -> None:
    asked = ({"role": "user", "content": "1+1"},)
    file = write_rows([Row(asked, "2", {"level": "easy"}, solution="It is 2.")], tmp_path, argument="data")
    assert read(file.path) == [{
        "level": "easy", "answer": "2", "messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "It is 2."}]}]


@pytest.mark.parametrize("record", [
    {"prompt": "1+1=", "answer": "2", "level": 3, "tests": ["a", {"b": None}], "hint": "[1]"},
    {"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "It is 2."}], "answer": "2", "tests": [1]},
    {"messages": [{"role": "user", "content": "Time?"}, {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}]}],
     "tools": [{"type": "function", "function": {"name": "clock", "parameters": {}}}]},
    {"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2", "reasoning_content": "one more"}]},
], ids=["text", "chat", "tools", "reasoning"])
def test_a_row_loses_nothing_on_its_way(record: dict[str, Any], tmp_path: Path) -> None:
    row = parse_record(record, DataConfig(), where="here")
    file = write_rows([row], tmp_path, argument="data")
    again = parse_record(read(file.path)[0], DataConfig(), where="there")
    assert (again.prompt, again.answer, again.tools, again.imitated) == (row.prompt, row.answer, row.tools, row.imitated)
    assert {name: again.extra[name] for name in row.extra} == row.extra and set(row.json_fields) <= set(again.json_fields)


CALLS = [{"name": "f", "arguments": {"city": "Paris"}}, {"name": "f", "arguments": {"limit": 3}}]
CALLED = [{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]} for call in CALLS]


@pytest.mark.parametrize("kind", ["pandas", "datasets", "Parquet"])
def test_keys_that_a_table_has_filled_in_with_null_are_gone_again(kind: str, tmp_path: Path) -> None:
    table = Dataset.from_list(CALLED)
    table.to_parquet(tmp_path / "rows.parquet")
    if kind == "Parquet":
        rows, _ = open_datasets(DataConfig(path=str(tmp_path / "rows.parquet"), heldout_size=0), seed=0)
        found = [rows.row(index).imitated["tool_calls"] for index in range(2)]
    else:
        rows = table if kind == "datasets" else pandas.read_parquet(tmp_path / "rows.parquet")
        written = read(write_rows(rows, tmp_path, argument="data").path)
        found = [parse_record(record, DataConfig(), where="here").imitated["tool_calls"] for record in written]
    assert found == [[call] for call in CALLS]


def test_a_null_that_a_program_gives_stays(tmp_path: Path) -> None:
    call = {"name": "f", "arguments": {"limit": None}}
    given = [{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]}]
    for rows in (given, pandas.DataFrame(given)):
        [record] = read(write_rows(rows, tmp_path, argument="data").path)
        assert parse_record(record, DataConfig(), where="here").imitated["tool_calls"] == [call]


@pytest.mark.parametrize("row", [
    Row("1+1=", "2", solution="One more than one is 2."), Row("1+1=", "2", tools=({"type": "function"},)),
    Row(({"role": "user", "content": "1+1"},), "2", template_kwargs={"enable_thinking": False})])
def test_a_row_with_something_that_has_no_place_is_refused(row: Row, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data, row 2, has .* no place for; "):
        write_rows([RECORDS[0], row], tmp_path, argument="data")


def test_values_of_other_libraries_are_written_as_json(tmp_path: Path) -> None:
    file = write_rows([{"prompt": "a", "answer": np.int64(3), "weights": np.ones(2), "file": Path("b")}], tmp_path, argument="data")
    assert read(file.path) == [{"prompt": "a", "answer": 3, "weights": [1.0, 1.0], "file": "b"}]


@pytest.mark.parametrize(("rows", "told"), [
    ([], "data has no rows; give at least one, such as {'prompt': '2+2=', 'answer': '4'}"),
    ([RECORDS[0], "1+1"], "data, row 2, must be a dict or an offbeat.Row, got '1+1' (str)"),
    ([{"prompt": "a", "answer": object}], "data, row 1, cannot be written as JSON: "),
    ({"train": RECORDS, "x": []}, "data must be rows, got a mapping of 'train', 'x'; give one of them, such as dataset['train']"),
    (3, "data must be a file, a hub id, or rows as a list of dicts, got 3 (int)"),
])
def test_what_cannot_be_a_row_is_named(rows: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as refused:
        write_rows(rows, tmp_path, argument="data")
    assert str(refused.value).startswith(told)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot write the rows of data to .*file: .*; free space or set run\.dir"):
        write_rows(RECORDS, tmp_path / "file", argument="data")


def test_text_and_paths_name_data() -> None:
    assert is_named("org/data") and is_named(Path("a.jsonl")) and not is_named([])


def test_sets_have_names_and_rows_alone_have_the_given_one() -> None:
    assert sets_of({"easy": RECORDS, "hard": "hard.jsonl"}, unnamed="heldout") == {"easy": RECORDS, "hard": "hard.jsonl"}
    assert sets_of(RECORDS, unnamed="heldout") == {"heldout": RECORDS}
    assert sets_of(None, unnamed="heldout") == {}


@pytest.mark.parametrize("rows", [
    [{"prompt": "?", "answer": np.float32(0.1)}], pandas.DataFrame({"prompt": ["?"], "answer": np.array([0.1], np.float32)}),
    Dataset.from_dict({"prompt": ["?"], "answer": [0.1]}, features=Features({"prompt": Value("string"), "answer": Value("float32")}))],
    ids=["numpy", "pandas", "datasets"])
def test_a_float32_is_written_as_the_decimal_that_was_meant(rows: Any, tmp_path: Path) -> None:
    assert read(write_rows(rows, tmp_path, argument="data").path) == [{"prompt": "?", "answer": 0.1}]


@pytest.mark.parametrize("name", ["features", "schema", "dtypes"])
def test_a_column_may_be_called_like_an_attribute_of_tables(name: str, tmp_path: Path) -> None:
    frame = pandas.DataFrame({"prompt": ["?", "!"], "answer": np.array([0.1, 0.2], np.float32), name: ["a", "b"]})
    assert read(write_rows(frame, tmp_path, argument="data").path) == [
        {"prompt": "?", "answer": 0.1, name: "a"}, {"prompt": "!", "answer": 0.2, name: "b"}]


def test_bytes_are_text_and_refused_where_they_are_none(tmp_path: Path) -> None:
    assert read(write_rows([{"prompt": b"caf\xc3\xa9", "answer": "4"}], tmp_path, argument="data").path)[0]["prompt"] == "café"
    with pytest.raises(DataError, match="data, row 1: field 'prompt' holds 2 bytes that are no text in UTF-8"):
        write_rows([{"prompt": b"\xff\xfe", "answer": "4"}], tmp_path, argument="data")


def test_a_row_goes_back_to_data_with_its_answer_as_it_was(tmp_path: Path) -> None:
    row = Row("?", '["12", "twelve"]', {"answer": '["12", "twelve"]'}, json_fields=("answer",))
    changed = Row("?", "12", {"answer": '["12", "twelve"]'}, json_fields=("answer",))
    assert [each["answer"] for each in read(write_rows([row, changed], tmp_path, argument="data").path)] == [["12", "twelve"], "12"]
