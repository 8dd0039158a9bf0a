"""Append-only files of JSON lines."""

import math
from pathlib import Path

import pytest

from offbeat.errors import StorageError
from offbeat.telemetry.jsonl import JsonLinesFile, read_json_lines


def test_rows_are_on_disk_as_soon_as_they_are_written_and_a_second_opening_appends(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    first = JsonLinesFile(path)
    first.write({"a": 1, "text": "é\n"})
    assert read_json_lines(path) == [{"a": 1, "text": "é\n"}]
    first.close()
    second = JsonLinesFile(path)
    second.write({"a": 2})
    second.close()
    assert [row["a"] for row in read_json_lines(path)] == [1, 2]


def test_a_line_torn_by_a_crash_is_passed_over_and_then_dropped(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": ')
    assert read_json_lines(path) == [{"a": 1}]
    file = JsonLinesFile(path)
    file.write({"a": 2})
    file.close()
    assert path.read_bytes() == b'{"a": 1}\n{"a": 2}\n'


def test_numbers_without_a_json_word_become_null(tmp_path):
    file = JsonLinesFile(tmp_path / "rows.jsonl")
    file.write({"a": math.nan, "b": -math.inf, "c": 0.5})
    file.close()
    assert read_json_lines(file.path) == [{"a": None, "b": None, "c": 0.5}]


def test_keep_drops_rows_and_goes_on_appending(tmp_path):
    file = JsonLinesFile(tmp_path / "rows.jsonl")
    for i in range(5):
        file.write({"i": i})
    file.keep(lambda row: row["i"] % 2 == 0)
    file.write({"i": 9})
    file.close()
    assert [row["i"] for row in read_json_lines(file.path)] == [0, 2, 4, 9]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_folder_that_cannot_be_made_is_the_users_to_mend(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot write .*rows\.jsonl: .*run\.dir"):
        JsonLinesFile(tmp_path / "file" / "rows.jsonl")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_says_so(tmp_path):
    (tmp_path / "rows.jsonl").symlink_to("/dev/full")
    with pytest.raises(StorageError, match="No space left on device"):
        JsonLinesFile(tmp_path / "rows.jsonl").write({"a": 1})
