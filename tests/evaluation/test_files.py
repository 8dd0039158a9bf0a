"""Answers on disk: what is written is what is read."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from evaluation.played import played
from offbeat.data.image_sources import MARK, ImageSource
from offbeat.data.row import Row
from offbeat.errors import DataError, StorageError
from offbeat.evaluation.files import encode_lines, newest_evaluation, read_samples, write_lines
from offbeat.evaluation.samples import EpisodeTurn, EvaluatedPrompt, EvaluatedSample, EvaluatedSet
from offbeat.telemetry.evaluation_log import write_evaluation

CHAT = ({"role": "user", "content": "Grüße, 你好\n"}, {"role": "assistant", "content": "?"})
FULL = EvaluatedSet("games", 2, (
    EvaluatedPrompt(Row(CHAT, "1", {"level": "[1]"}, solution="because"), (
        EvaluatedSample("a\nb", 0.0, "length", 7, {"form": 0.5}, {"x": 1.0}, (EpisodeTurn("a", True, "x"), EpisodeTurn("b", False))),
        EvaluatedSample("", None, "reward failed: no"))),
    EvaluatedPrompt(Row("\ud800 is no character", "2"), (), "timed out")), (1, 2))
SEEN = Row(f"{MARK}how many?", "3", images=(ImageSource(data=b"file"),))


def test_what_is_written_is_what_is_read_plain_and_compressed(tmp_path: Path) -> None:
    write_lines(tmp_path / "a" / "x.samples.jsonl", encode_lines(FULL))
    assert read_samples(tmp_path / "a" / "x.samples.jsonl") == {"": {"games": FULL}}
    path = write_evaluation(tmp_path, step=3, name="games", lines=encode_lines(FULL))
    assert read_samples(path) == {"": {"games": FULL}}


def test_images_are_told_by_their_places_and_the_hashes_of_their_files(tmp_path: Path) -> None:
    prompt = EvaluatedPrompt(SEEN, (), "timed out", ("ab12",))
    write_lines(tmp_path / "x.samples.jsonl", encode_lines(EvaluatedSet("", 1, (prompt,), (1,))))
    [read] = read_samples(tmp_path / "x.samples.jsonl")[""][""].prompts
    assert (read.row.prompt, read.images, read.key) == ("<image>how many?", ("ab12",), prompt.key)


def test_a_line_can_be_read_by_people(tmp_path: Path) -> None:
    [line] = encode_lines(played([[1.0]], name="sums"), model="runs/a")
    assert json.loads(line) == {
        "model": "runs/a", "set": "sums", "index": 0, "key": played([[1.0]]).prompts[0].key, "num_samples": 1, "prompt": "0>",
        "answer": "0", "samples": [{"text": "answer 0", "reward": 1.0, "reason": "stop", "num_tokens": 0}]}


def test_a_file_may_hold_several_models_and_sets(tmp_path: Path) -> None:
    held_out, sums = played([[1.0], [0.0]]), played([[0.5]], name="sums")
    sets = {"a": {"": held_out, "sums": sums}, "b": {"": replace(held_out, prompts=held_out.prompts[:1])}}
    lines = [line for model, own in sets.items() for each in own.values() for line in encode_lines(each, model=model)]
    write_lines(tmp_path / "both.jsonl", reversed(lines))
    assert read_samples(tmp_path / "both.jsonl") == sets


@pytest.mark.parametrize(("text", "why"), [
    ("", "holds no answers"), ("[1]", "line 1, is not a prompt"), ('{"set": "a"}', "line 1, is not a prompt"),
    ("{", "line 1, is not a prompt")])
def test_what_is_no_file_of_answers_is_told(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=why):
        read_samples(path)


def test_a_file_that_is_not_there_or_is_damaged_or_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file"):
        read_samples(tmp_path / "gone.jsonl")
    (tmp_path / "x.zst").write_bytes(b"no frame")
    with pytest.raises(DataError, match="cannot be read"):
        read_samples(tmp_path / "x.zst")
    with pytest.raises(StorageError, match="--output"):
        write_lines(tmp_path / "x.zst" / "below.jsonl", [])


def test_the_newest_evaluation_of_each_set_is_found(tmp_path: Path) -> None:
    assert newest_evaluation(tmp_path) == {}
    for step, name in ((0, ""), (0, "hard"), (20, ""), (100, "")):
        write_evaluation(tmp_path, step=step, name=name, lines=[b"{}"])
    assert {name: path.name for name, path in newest_evaluation(tmp_path).items()} == {
        "": "step-000100.jsonl.zst", "hard": "step-000000-hard.jsonl.zst"}
