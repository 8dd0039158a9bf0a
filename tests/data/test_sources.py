"""JSON-lines, Parquet and `datasets` sources: the same records back, and errors that name file, line and remedy."""

import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet
import pytest

from offbeat.data.sources import open_source
from offbeat.errors import DataError, MissingExtraError

RECORDS = [{"prompt": f"é{i}", "answer": "x" * i} for i in range(5)]


def write_lines(path, lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def open_any(path, *, split="train", seen=None):
    return open_source(str(path), split=split, check=lambda record, where: None if seen is None else seen.append((where, record)))


def test_json_lines_are_read_by_index_and_blank_lines_do_not_count(tmp_path):
    lines = [json.dumps(r, ensure_ascii=False) for r in RECORDS]
    path = write_lines(tmp_path / "d.jsonl", [lines[0], "", *lines[1:], "  "])
    seen = []
    source = open_any(path, seen=seen)
    assert [source.record(i) for i in (4, 0, 2, 1, 3)] == [RECORDS[i] for i in (4, 0, 2, 1, 3)]
    assert len(source) == 5
    assert [record for _, record in seen] == RECORDS
    assert seen[1][0] == f"{path!r}, line 3"


@pytest.mark.parametrize("text", ["", "[1]\n", '{"prompt": ', '{"a": "\xff'])
def test_a_file_that_is_changed_under_a_run_is_named(tmp_path, text):
    path = write_lines(tmp_path / "d.jsonl", [json.dumps(record) for record in RECORDS])
    source = open_any(path)
    (tmp_path / "d.jsonl").write_text(text, encoding="latin1")
    with pytest.raises(DataError, match="d.jsonl' was changed while the run reads it: its record 0 can no longer be read"):
        source.record(0)
    (tmp_path / "d.jsonl").unlink()
    with pytest.raises(DataError, match="No such file"):
        source.record(0)


def test_parquet_gives_the_same_records(tmp_path):
    path = tmp_path / "d.parquet"
    pa.parquet.write_table(pa.Table.from_pylist(RECORDS), path)
    seen = []
    source = open_any(path, seen=seen)
    assert [source.record(i) for i in range(len(source))] == RECORDS
    assert seen[2] == (f"{str(path)!r}, row 2", RECORDS[2])


def test_a_folder_is_read_through_datasets_as_a_hub_id_is(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "data"
    folder.mkdir()
    write_lines(folder / "test.jsonl", [json.dumps(r) for r in RECORDS])
    source = open_any(folder, split="test")
    assert [source.record(i) for i in range(len(source))] == RECORDS
    with pytest.raises(DataError, match=r'split \'val\', could not be loaded: Unknown split "val"'):
        open_any(folder, split="val")


@pytest.mark.parametrize(("line", "sentence"), [
    ('{"prompt": ', "line 2, is not JSON"),
    ("[1, 2]", "line 2, must be a JSON object, got list"),
])
def test_a_line_that_is_no_json_object_is_named(tmp_path, line, sentence):
    path = write_lines(tmp_path / "d.jsonl", ["{}", line])
    with pytest.raises(DataError, match=sentence):
        open_any(path)


def test_an_empty_file_a_missing_file_and_a_strange_suffix_are_errors(tmp_path):
    with pytest.raises(DataError, match="has no rows"):
        open_any(write_lines(tmp_path / "d.jsonl", [""]))
    with pytest.raises(DataError, match=r"nothing.jsonl' does not exist; give a .jsonl or .parquet file, or a hub id"):
        open_any(tmp_path / "nothing.jsonl")
    with pytest.raises(DataError, match=r"d.csv' must end in .jsonl"):
        open_any(write_lines(tmp_path / "d.csv", ["a,b"]))
    with pytest.raises(DataError, match="not readable as Parquet"):
        open_any(write_lines(tmp_path / "d.parquet", ["no parquet"]))


def test_an_optional_dependency_that_is_missing_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    path = write_lines(tmp_path / "d.parquet", [""])
    with pytest.raises(MissingExtraError, match=r"to read Parquet files, pyarrow must be installed: pip install 'offbeat\[hub\]'"):
        open_any(path)
    with pytest.raises(MissingExtraError, match="datasets must be installed"):
        open_any("org/name")


def test_an_unreachable_hub_is_one_clear_sentence(tmp_path):
    code = (
        "from offbeat.data.sources import open_source\nfrom offbeat.errors import DataError\n"
        "try: open_source('offbeat-tests/absent', split='train', check=print)\nexcept DataError as exc: print(exc)"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=100, check=False)
    assert "dataset 'offbeat-tests/absent', split 'train', could not be loaded" in done.stdout, done.stderr
    assert done.stdout.count("\n") == 1
