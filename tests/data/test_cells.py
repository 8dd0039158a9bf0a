"""Values of records: numbers with their text, floats at their shortest, bytes as text."""

import json

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from offbeat.config.data import DataConfig
from offbeat.data.cells import NumberText, decode_record, in_memory, json_text
from offbeat.data.files import Sieve, open_file
from offbeat.data.row import parse_record
from offbeat.errors import DataError


def answers(path):
    source = open_file(path, Sieve(lambda record, where: None))
    return [parse_record(source.record(index), DataConfig(), where="w", needs_answer=False) for index in range(len(source))]


@pytest.mark.parametrize("number", ["1e3", "0.10", "-5.0", "1E400", "12345678901234567890123", "3.14159265358979323846", "7"])
def test_a_number_of_json_is_the_answer_as_it_is_written(tmp_path, number):
    lines, array = tmp_path / "d.jsonl", tmp_path / "d.json"
    lines.write_text(f'{{"prompt": "?", "answer": {number}}}\n')
    array.write_text(f'[{{"prompt": "?", "answer": {number}}}]')
    for path in (lines, array):
        [row] = answers(path)
        assert (row.answer, row.extra["answer"]) == (number, number)


def test_numbers_deeper_in_a_record_are_plain_floats_that_every_codec_knows():
    record = decode_record(b'{"a": 1e3, "b": [1e3, {"c": 0.10}]}')
    assert type(record["a"]) is NumberText and json_text(record["a"]) == "1e3"
    assert msgspec.json.encode(record["b"]) == b'[1000.0,{"c":0.1}]'


def test_floats_of_narrow_columns_are_the_decimals_that_were_meant(tmp_path):
    path = tmp_path / "d.parquet"
    table = pa.table({
        "prompt": ["a", "b", "c"], "answer": pa.array([0.1, float("nan"), 3], pa.float32()),
        "scores": pa.array([[0.1, 0.7], [], None], pa.list_(pa.float32())), "half": pa.array(np.array([0.1, 1, 2], np.float16))})
    pyarrow.parquet.write_table(table, path)
    rows = answers(path)
    assert [row.answer for row in rows] == ["0.1", "", "3.0"]
    assert [json.loads(row.extra["scores"]) for row in rows] == [[0.1, 0.7], [], None]
    assert rows[0].extra["half"] == "0.1"


def test_columns_of_bytes_are_text_where_they_are_any(tmp_path):
    path = tmp_path / "d.parquet"
    table = pa.table({"prompt": pa.array(["é".encode()]), "answer": pa.array([b"4"]), "noise": pa.array([b"\xff\xd8"])})
    pyarrow.parquet.write_table(table, path)
    [row] = answers(path)
    assert (row.prompt, row.answer) == ("é", "4")


def test_values_of_a_program_become_what_json_knows():
    given = {"a": np.float32(0.1), "b": np.array([0.1, 1e10], np.float32), "c": (b"x", [bytearray(b"y")]), "d": 0.1, "e": np.float64(0.1)}
    assert in_memory(given, "w") == {"a": 0.1, "b": [0.1, 1e10], "c": ["x", ["y"]], "d": 0.1, "e": 0.1}
    with pytest.raises(DataError, match="data, row 1: field 'image' holds 2 bytes that are no text in UTF-8; give text, or leave"):
        in_memory({"x": [b"\xff\xd8"]}, "data, row 1: field 'image'")
