"""Data files of every kind: the same records back, and errors that name file and line."""

import gzip
import json
import lzma

import pytest
import zstandard

from offbeat.data.files import Sieve, is_data_file, open_file
from offbeat.errors import DataError

RECORDS = [{"prompt": f"é{i}", "answer": "x" * i} for i in range(5)]


def opened(path, **options):
    return open_file(path, Sieve(lambda record, where: None, **options))


def records_of(source):
    return [source.record(index) for index in range(len(source))]


def zstd_of_two_frames(data):
    half = len(data) // 2
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:]))


@pytest.mark.parametrize(("suffix", "pack"), [
    ("", bytes), (".gz", gzip.compress), (".xz", lzma.compress), (".zst", zstandard.ZstdCompressor().compress),
    (".zst", zstd_of_two_frames),
])
def test_compressed_files_are_read_as_plain_ones(tmp_path, suffix, pack):
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS)
    table = "prompt,answer\n" + "".join(f"{record['prompt']},{record['answer']}\n" for record in RECORDS)
    for name, text in (("d.jsonl", lines), ("d.json", json.dumps(RECORDS)), ("d.json", lines), ("d.csv", table)):
        path = tmp_path / f"{name}{suffix}"
        path.write_bytes(pack(text.encode()))
        assert records_of(opened(path)) == RECORDS, (name, text)


def test_a_csv_file_may_have_line_breaks_and_separators_in_quotes(tmp_path):
    path = tmp_path / "d.csv"
    path.write_text('\ufeffQuestion text,answer\r\n"one, two\r\nand ""three""",4\r\n\r\nlast,5\r\n', encoding="utf-8", newline="")
    source = opened(path)
    assert records_of(source) == [{"Question text": 'one, two\r\nand "three"', "answer": "4"}, {"Question text": "last", "answer": "5"}]
    assert [source.where(index) for index in (0, 1)] == [f"{str(path)!r}, line 2", f"{str(path)!r}, line 5"]
    tabs = tmp_path / "d.TSV"
    tabs.write_text("prompt\tanswer\na,b\tc\n")
    assert records_of(opened(tabs)) == [{"prompt": "a,b", "answer": "c"}]
    long = tmp_path / "long.csv"
    long.write_text(f"prompt,answer\n{'x' * 200_000},1\n")
    assert len(opened(long).record(0)["prompt"]) == 200_000


@pytest.mark.parametrize(("name", "data", "sentence"), [
    ("d.csv", b"a,b\n1,2\n1,2,3\n", "line 3, has 3 fields where the first line names 2 columns"),
    ("d.csv", b"a,,b\n", "must begin with a line of column names, each once, got 'a,,b'"),
    ("d.csv", b"a,a\n", "must begin with a line of column names, each once"),
    ("d.csv", b"", "must begin with a line of column names"),
    ("d.csv", b'a,b\n"x"y,2\n', "cannot be read at line 2: "),
    ("d.csv", b"a,b\n\xff,2\n", "cannot be read at line "),
    ("d.json", b'[{"a": 1}, 7]', "row 1, must be a JSON object, got int"),
    ("d.json", b'[{"a": 1}, ', "is not a JSON array of objects"),
    ("d.jsonl.gz", b"no gzip", "cannot be read: Not a gzipped file"),
    ("d.jsonl.xz", b"no xz", "cannot be read: "),
    ("d.jsonl.zst", b"no zstd", "cannot be read: "),
    ("d.jsonl.gz", gzip.compress(b"{}\n" * 999, mtime=0)[:-10], "cannot be read: "),
    ("d.jsonl.gz", gzip.compress(b"{}\n", mtime=0)[:10] + b"\xff" * 20, "cannot be read: "),
    ("d.parquet.gz", b"", "must end in .jsonl"),
])
def test_a_file_that_cannot_be_read_says_where_and_why(tmp_path, name, data, sentence):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError) as caught:
        opened(tmp_path / name)
    assert sentence in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_rows_of_a_wrong_shape_may_be_left_out(tmp_path):
    (tmp_path / "d.csv").write_text("a,b\n1\n1,2\n")
    sieve = Sieve(lambda record, where: None, 1)
    source = open_file(tmp_path / "d.csv", sieve)
    assert records_of(source) == [{"a": "1", "b": "2"}]
    assert source.where(0).endswith("line 3")
    assert sieve.num_passed == len(sieve.refused) == 1


def test_data_files_are_known_by_their_names(tmp_path):
    assert all(is_data_file(tmp_path / name) for name in ("a.JSONL", "a.b.csv.gz", "a.parquet", "a.tsv.zst", "a.ndjson"))
    assert not any(is_data_file(tmp_path / name) for name in ("a.txt", "a.gz", "jsonl", "a.parquet.gz", "a.arrow"))
