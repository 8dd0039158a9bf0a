"""Which evaluation a name means."""

from pathlib import Path

import pytest

from evaluation.played import played
from offbeat.errors import DataError
from offbeat.evaluation.files import encode_lines, samples_beside, write_lines
from offbeat.evaluation.find import find_evaluation
from offbeat.telemetry.evaluation_log import write_evaluation

OLD, NEW, SUMS = played([[0.0]]), played([[1.0]]), played([[1.0]], name="sums")


def test_of_a_run_the_last_evaluation_of_each_set_is_meant(tmp_path: Path) -> None:
    for step, each in ((0, OLD), (0, SUMS), (5, NEW)):
        write_evaluation(tmp_path, step=step, name=each.name, lines=encode_lines(each))
    assert find_evaluation(str(tmp_path)) == {"": NEW, "sums": SUMS}
    assert find_evaluation(str(tmp_path / "evaluations" / "step-000000.jsonl.zst")) == {"": OLD}


def test_a_file_of_a_run_that_was_renamed_is_told(tmp_path: Path) -> None:
    write_evaluation(tmp_path, step=0, name="sums", lines=encode_lines(SUMS))
    file = tmp_path / "evaluations" / "step-000000-sums.jsonl.zst"
    file = file.rename(file.with_name("step-000000-products.jsonl.zst"))
    with pytest.raises(DataError, match="zst is named as answers to products and holds those to sums; give it back its name"):
        find_evaluation(str(tmp_path))
    file.rename(file.with_name("step-000000.jsonl.zst"))
    with pytest.raises(DataError, match="is named as answers to held-out prompts and holds those to sums"):
        find_evaluation(str(tmp_path))


def test_of_offbeat_eval_its_result_or_its_folder_is_meant(tmp_path: Path) -> None:
    result = tmp_path / "evaluation.json"
    result.write_text("{}")
    assert samples_beside(result) == tmp_path / "evaluation.samples.jsonl"
    write_lines(samples_beside(result), encode_lines(NEW, model="m"))
    for name in (tmp_path, result, samples_beside(result)):
        assert find_evaluation(str(name)) == {"": NEW}


def test_of_several_models_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "both.json"
    write_lines(samples_beside(path), [*encode_lines(OLD, model="runs/a"), *encode_lines(NEW, model="http://b:8001")])
    assert find_evaluation(f"{path}:runs/a") == {"": OLD} and find_evaluation(f"{path}:http://b:8001") == {"": NEW}
    with pytest.raises(DataError, match="holds answers of several models; name one of them, as .*both.json:runs/a"):
        find_evaluation(str(path))
    with pytest.raises(DataError, match="holds no answers of 'c'; it has runs/a, http://b:8001"):
        find_evaluation(f"{path}:c")


def test_what_has_no_evaluation_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no evaluation"):
        find_evaluation(str(tmp_path))
    with pytest.raises(DataError, match="there is no file"):
        find_evaluation(str(tmp_path / "gone"))
