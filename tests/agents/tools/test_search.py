"""Search over real files in a real index."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from offbeat.agents.tools.search import TextIndex
from offbeat.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    texts = tmp_path / "texts"
    (texts / "deep").mkdir(parents=True)
    (texts / "birds.md").write_text("# Birds\n\nThe swift sleeps while it is flying.\n\nThe kiwi lays large eggs and does not fly.\n")
    (texts / "deep" / "stones.txt").write_text("Stones\n\nGranite is made of quartz, feldspar and mica.\n")
    (texts / "facts.jsonl").write_text("\n".join(json.dumps(fact, ensure_ascii=False) for fact in (
        {"title": "Kettle", "text": "A kettle boils water.\u2028Steam is hot."}, {"text": "The moon has no air."})) + "\r\n")
    (texts / "picture.png").write_bytes(b"\xff\xfe kettle")
    return texts


def test_the_best_passage_comes_first_with_its_title_and_place(folder: Path) -> None:
    index = TextIndex(folder)
    [hit, *_] = index.hits("What is granite made of?")
    assert (hit.title, hit.path) == ("Stones", "deep/stones.txt")
    assert "quartz, feldspar" in hit.snippet
    assert index.search("water kettles").startswith("1. Kettle (facts.jsonl:1)\nA kettle boils water.")
    assert index.hits("moon")[0].title == "The moon has no air."
    assert [hit.path for hit in index.hits("flies flying")] == ["birds.md"]


def test_any_text_is_a_query(folder: Path) -> None:
    index = TextIndex(folder)
    for query in ("", "???", '"', "NOT AND OR NEAR(", "kettle OR *", "title:kettle", "a" * 100_000, "\ud800 kettle",
                  "kettle'; DROP TABLE passages"):
        assert isinstance(index.search(query), str)
    assert index.search("unicorn") == "Nothing was found for 'unicorn'."
    assert index.hits('"kettle" NOT water')[0].title == "Kettle"


def test_results_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "long.txt").write_text("word " * 100_000)
    index = TextIndex(tmp_path / "texts", num_hits=3)
    assert len(index.hits("word")) == 3
    assert len(index.search("word")) < 3 * 600


def test_an_index_is_built_once_for_the_same_texts(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / ".texts-index"
    TextIndex(folder)
    [first] = cache.iterdir()
    made = first.stat().st_mtime_ns
    TextIndex(folder)
    assert [file.stat().st_mtime_ns for file in cache.iterdir()] == [made]
    (folder / "birds.md").write_text("# Birds\n\nThe owl hears well.\n")
    assert TextIndex(folder, cache=cache).hits("owl")[0].title == "Birds"
    assert len(list(cache.iterdir())) == 2


def test_threads_and_several_builders_find_the_same(folder: Path) -> None:
    ready = threading.Barrier(6)

    def ask(_number: int) -> str:
        ready.wait()
        return TextIndex(folder).search("kettle")

    with ThreadPoolExecutor(6) as threads:
        assert len(set(threads.map(ask, range(6)))) == 1


def test_what_cannot_be_searched_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no folder 'nowhere'"):
        TextIndex("nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"has no text to search in; it takes files that end in \.txt, \.md, \.jsonl"):
        TextIndex(tmp_path / "empty")
    (folder / "bad.jsonl").write_text('{"title": "no text"}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl' cannot be searched: 'text'"):
        TextIndex(folder)
    assert not list((tmp_path / ".texts-index").iterdir())
