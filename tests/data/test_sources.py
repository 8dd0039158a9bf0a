"""JSON-lines, Parquet and `datasets` sources: the same records back, and errors that name file, line and remedy."""

import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet
import pytest

from hub_serving import serving_hub
from offbeat.data.files import Sieve
from offbeat.data.sources import open_source
from offbeat.errors import DataError, MissingExtraError

RECORDS = [{"prompt": f"é{i}", "answer": "x" * i} for i in range(5)]


def write_lines(path, lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def open_any(path, *, split="train", seen=None, most_refused=0, check=None, limit=None):
    def noted(record, where):
        if seen is not None:
            seen.append((where, record))
        if check is not None:
            check(record, where)

    return open_source(str(path), split=split, sieve=Sieve(noted, most_refused, limit))


def records_of(source):
    return [source.record(index) for index in range(len(source))]


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


def test_a_folder_gives_the_files_of_a_split_in_the_order_of_their_names(tmp_path):
    folder = tmp_path / "data"
    (folder / "test").mkdir(parents=True)
    (folder / "train").mkdir()
    write_lines(folder / "test" / "b.jsonl", [json.dumps(r) for r in RECORDS[3:]])
    write_lines(folder / "test" / "a.jsonl", [json.dumps(r) for r in RECORDS[:3]])
    write_lines(folder / "my_train-0.csv", ["prompt,answer", "p,a"])
    write_lines(folder / "README.md", ["no data"])
    write_lines(folder / "dataset_info.json", ["{}"])
    write_lines(folder / "train" / "test_cases.jsonl", [json.dumps({"prompt": "q", "answer": "b"})])
    source = open_any(folder, split="test")
    assert records_of(source) == RECORDS
    assert source.where(3) == f"{str(folder / 'test' / 'b.jsonl')!r}, line 1"
    assert records_of(open_any(folder)) == [{"prompt": "p", "answer": "a"}, {"prompt": "q", "answer": "b"}]
    with pytest.raises(DataError, match=r"split 'val'; it has my_train-0.csv, test/a.jsonl, test/b.jsonl, train/test_cases.jsonl\. Name"):
        open_any(folder, split="val")


def test_a_folder_whose_files_name_no_split_is_all_to_train_on(tmp_path):
    for index in range(2):
        write_lines(tmp_path / f"part-{index}.jsonl", [json.dumps({"n": index})])
    assert records_of(open_any(tmp_path)) == [{"n": 0}, {"n": 1}]
    with pytest.raises(DataError, match="has no files of split 'test'"):
        open_any(tmp_path, split="test")
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="has no data files"):
        open_any(tmp_path / "none")


def test_a_pattern_names_files_of_any_kind(tmp_path):
    write_lines(tmp_path / "b.csv", ["prompt,answer", "q,7"])
    write_lines(tmp_path / "a.jsonl", [json.dumps(r) for r in RECORDS])
    assert records_of(open_any(tmp_path / "[ab].*")) == [*RECORDS, {"prompt": "q", "answer": "7"}]
    with pytest.raises(DataError, match="no data file matches the pattern"):
        open_any(tmp_path / "c*.jsonl")


def test_what_save_to_disk_has_written_is_read_with_its_splits(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(RECORDS)
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": data, "dev": data.select([1])}).save_to_disk(tmp_path / "several")
    assert records_of(open_any(tmp_path / "one")) == RECORDS
    source = open_any(tmp_path / "several", split="dev")
    assert records_of(source) == RECORDS[1:2]
    assert source.where(0) == f"{str(tmp_path / 'several')!r}, row 0"
    with pytest.raises(DataError, match=r"has no split 'test'; it has train, dev; set data.split"):
        open_any(tmp_path / "several", split="test")
    (tmp_path / "one" / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(DataError, match="which `save_to_disk` has written, could not be loaded"):
        open_any(tmp_path / "one")


def test_rows_that_cannot_be_used_are_left_out_up_to_a_bound(tmp_path):
    def check(record, where):
        if "prompt" not in record:
            raise DataError(f"{where}, has no prompt")

    good = [json.dumps(r) for r in RECORDS]
    path = write_lines(tmp_path / "d.jsonl", [good[0], "{", good[1], "{}", *good[2:], "[]"])
    sieve = Sieve(check, 3)
    source = open_source(path, split="train", sieve=sieve)
    assert records_of(source) == RECORDS
    assert source.where(2) == f"{path!r}, line 5"
    assert [reason.split(",")[1] for reason in sieve.refused] == [" line 2", " line 4", " line 8"]
    with pytest.raises(DataError, match=r"3 rows cannot be used, allowed are data.max_unusable_rows = 2; .* The first: .*line 2, is not"):
        open_any(path, most_refused=2, check=check)
    with pytest.raises(DataError, match=r"line 2, is not JSON"):
        open_any(path, check=check)
    empty = write_lines(tmp_path / "e.jsonl", ["{}", "{}"])
    with pytest.raises(DataError, match=r"has no rows that can be used; the first: .*line 1, has no prompt"):
        open_any(empty, most_refused=5, check=check)


def test_a_quick_look_stops_after_some_rows(tmp_path):
    path = write_lines(tmp_path / "d.jsonl", [*(json.dumps(r) for r in RECORDS[:3]), "no JSON"])
    assert records_of(open_any(path, limit=3)) == RECORDS[:3]
    pa.parquet.write_table(pa.Table.from_pylist(RECORDS), tmp_path / "d.parquet")
    assert records_of(open_any(tmp_path / "d.parquet", limit=2)) == RECORDS[:2]
    assert records_of(open_any(tmp_path / "d.*", limit=3)) == RECORDS[:3]


@pytest.mark.parametrize(("line", "sentence"), [
    ('{"prompt": ', "line 2, is not JSON"),
    ("[1, 2]", "line 2, must be a JSON object, got list"),
])
def test_a_line_that_is_no_json_object_is_named(tmp_path, line, sentence):
    path = write_lines(tmp_path / "d.jsonl", ["{}", line])
    with pytest.raises(DataError, match=sentence):
        open_any(path)


def test_a_missing_file_is_answered_with_the_data_file_beside_it_whose_name_is_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}")
    (tmp_path / "rowz.txt.bak").write_text("")
    with pytest.raises(DataError) as caught:
        open_source("row.jsonl", split="train", sieve=Sieve(lambda _record, _where: None))
    assert str(caught.value) == (
        "data file 'row.jsonl' does not exist; did you mean 'rows.jsonl'? A path is relative to the working directory")
    with pytest.raises(DataError, match=r"'else/row.jsonl' does not exist; give .jsonl.*; a path is relative to the working directory$"):
        open_source("else/row.jsonl", split="train", sieve=Sieve(lambda _record, _where: None))


def test_an_empty_file_a_missing_file_and_a_strange_suffix_are_errors(tmp_path):
    with pytest.raises(DataError, match="has no rows"):
        open_any(write_lines(tmp_path / "d.jsonl", [""]))
    for name in ("nothing.jsonl", "nothing"):
        with pytest.raises(DataError, match=rf"{name}' does not exist; give .jsonl, .json, .csv, .tsv or .parquet, a pattern"):
            open_any(tmp_path / name)
    with pytest.raises(DataError, match=r"d.txt' must end in .jsonl, .ndjson, .json, .csv, .tsv, .parquet; all but .parquet also with .gz"):
        open_any(write_lines(tmp_path / "d.txt", ["a,b"]))
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
        "from offbeat.data.files import Sieve\nfrom offbeat.data.sources import open_source\nfrom offbeat.errors import DataError\n"
        "try: open_source('offbeat-tests/absent', split='train', sieve=Sieve(print))\nexcept DataError as exc: print(exc)"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=100, check=False)
    assert "dataset 'offbeat-tests/absent', split 'train', could not be loaded" in done.stdout, done.stderr
    assert done.stdout.count("\n") == 1


def test_a_data_set_of_a_hub_is_read_by_its_id(tmp_path):
    code = (
        "from offbeat.data.files import Sieve\nfrom offbeat.data.sources import open_source\n"
        "open_source('me/rows', split='test', sieve=Sieve(lambda record, where: print(where, record)))")
    with serving_hub() as hub:
        hub.commits.append(("main", "rows", {
            "train.jsonl": b'{"prompt": "a", "answer": "b"}\n', "test.jsonl": b'{"prompt": "1", "answer": "2"}\n' * 3}))
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=hub.environment(tmp_path), timeout=100, check=False)
    read = [f"me/rows (test), row {row} {{'prompt': '1', 'answer': '2'}}" for row in range(3)]
    assert done.stdout.replace("'me/rows (test)'", "me/rows (test)").splitlines() == read, done.stderr
