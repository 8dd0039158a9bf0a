"""Runs that the live page shows."""

import json
import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from offbeat.dashboard.library import RunLibrary
from offbeat.dashboard.rollout_filter import Filter
from offbeat.errors import DataError
from rollout_samples import group, write_rollouts, write_small_run


def write_run(folder: Path, *steps: int, at: float = 1000.0) -> None:
    folder.mkdir(parents=True)
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps({"global_step": step, "reward/mean": 0.5}) + "\n" for step in steps))
    os.utime(path, (at, at))


def test_runs_are_found_in_folders_and_as_themselves_and_those_that_begin_later_too(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", 1)
    write_run(tmp_path / "elsewhere" / "b", 1)
    write_run(tmp_path / "elsewhere" / "c", 1)
    (tmp_path / "runs" / "no-run").mkdir()
    library = RunLibrary([tmp_path / "runs", tmp_path / "elsewhere" / "b"])
    assert list(library.runs()) == ["a", "b"]
    write_run(tmp_path / "runs" / "d", 1)
    assert set(library.runs()) == {"a", "b", "d"}


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    for parent in ("x", "y", "z"):
        write_run(tmp_path / parent / "run", 1)
    library = RunLibrary([tmp_path / "x", tmp_path / "y", tmp_path / "z"])
    assert library.runs() == {
        "run": tmp_path / "x" / "run", "run (2)": tmp_path / "y" / "run", "run (3)": tmp_path / "z" / "run"}


@pytest.mark.parametrize("name", ["../secret", "/etc", "", ".", "..", "a/../../secret", "secret\0"])
def test_only_names_that_were_found_can_be_asked_for(name: str, tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", 1)
    write_run(tmp_path / "secret", 1)
    library = RunLibrary([tmp_path / "runs"])
    for ask in (library.folder, library.read, library.stamp, library.rollouts):
        with pytest.raises(DataError, match="there is no run"):
            ask(name)


def test_summaries_say_how_far_runs_are_and_the_newest_comes_first(tmp_path: Path) -> None:
    write_run(tmp_path / "old", 1, 2, 7, at=1000.0)
    write_run(tmp_path / "new", at=2000.0)
    with (tmp_path / "old" / "metrics.jsonl").open("a") as file:
        file.write('{"global_step": 8, "torn')
    os.utime(tmp_path / "old" / "metrics.jsonl", (1000.0, 1000.0))
    first, second = RunLibrary([tmp_path]).summaries()
    assert (first.name, first.last_step, first.changed_s, first.is_over) == ("new", None, 2000.0, False)
    assert (second.name, second.last_step, second.is_over) == ("old", 7, False)
    (tmp_path / "old" / "result.json").write_text("{}")
    assert RunLibrary([tmp_path]).summaries()[0].is_over


def test_a_run_that_was_copied_is_over_if_its_result_is_of_its_last_step(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 1, 2, 7)
    (tmp_path / "a" / "result.json").write_text('{"steps": 7}')
    os.utime(tmp_path / "a" / "result.json", (1000.0, 1000.0))  # a copy gives files other times, in any order
    library = RunLibrary([tmp_path])
    assert library.summaries()[0].is_over
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"global_step": 8}\n')
    os.utime(tmp_path / "a" / "metrics.jsonl", (900.0, 900.0))
    assert not library.summaries()[0].is_over, "it went on after that, and was interrupted"


def test_a_warm_up_says_its_step_until_the_metrics_begin(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    steps = [{"time_s": 1.0 + step, "kind": "sft_step", "step": step} for step in (1, 2, 3)]
    (tmp_path / "a" / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (*steps, {"time_s": 5.0, "kind": "publish"})))
    (summary,) = RunLibrary([tmp_path]).summaries()
    assert (summary.last_step, summary.warm_up_step) == (None, 3)
    (tmp_path / "a" / "metrics.jsonl").write_text('{"global_step": 0}\n')
    (summary,) = RunLibrary([tmp_path]).summaries()
    assert (summary.last_step, summary.warm_up_step) == (0, None)


def test_folders_of_evaluations_are_told_from_runs(tmp_path: Path) -> None:
    for name in ("run", "run-eval", "elsewhere", "named-eval"):
        write_run(tmp_path / name)
    for name in ("run", "named-eval"):
        (tmp_path / name / "config.toml").touch()
    (tmp_path / "elsewhere" / "evaluation.json").write_text("{}")
    found = {each.name: each for each in RunLibrary([tmp_path]).summaries()}
    assert {name for name, each in found.items() if each.is_evaluation} == {"run-eval", "elsewhere"}
    assert found["elsewhere"].is_over and not found["run-eval"].is_over


HOLDER = """
import sys
from pathlib import Path
from offbeat.telemetry.run_lock import lock_run
lock = lock_run(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_run_that_was_killed_is_not_live_although_it_has_just_written(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 1, at=time.time())
    library = RunLibrary([tmp_path])
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "a")], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        (tmp_path / "a" / "result.json").write_text("{}")  # of the part that it goes on from
        os.utime(tmp_path / "a" / "metrics.jsonl", (1000.0, 1000.0))
        (summary,) = library.summaries()
        assert summary.is_live and not summary.is_over
        (tmp_path / "a" / "result.json").unlink()
        os.utime(tmp_path / "a" / "metrics.jsonl")
        process.kill()
    (summary,) = library.summaries()
    assert not summary.is_live and not summary.is_over and time.time() - summary.changed_s < 600


def test_where_the_lock_says_nothing_a_run_is_live_while_it_writes(tmp_path: Path) -> None:
    write_run(tmp_path / "old", 1, at=time.time() - 700)
    write_run(tmp_path / "new", 1, at=time.time())
    for name in ("old", "new"):
        (tmp_path / name / "lock").write_text("another machine\n")
    assert {each.name: each.is_live for each in RunLibrary([tmp_path]).summaries()} == {"new": True, "old": False}


def test_a_run_is_read_again_when_it_has_grown_and_its_stamp_changes(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 1)
    library = RunLibrary([tmp_path])
    stamp, run = library.stamp("a"), library.read("a")
    assert library.read("a") is run and library.stamp("a") == stamp
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"global_step": 2}\n')
    assert library.stamp("a") != stamp and len(library.read("a").metrics) == 2
    stamp = library.stamp("a")
    write_rollouts(tmp_path / "a", 3, [group("p", ("x", 1.0))])
    assert library.stamp("a") != stamp


def test_the_index_is_built_on_beside_the_caller(tmp_path: Path) -> None:
    write_small_run(tmp_path / "a")
    library = RunLibrary([tmp_path])
    with closing(library):
        index, progress = library.rollouts("a")
        assert progress.num_indexed >= 2 and index.find_rollouts(Filter(), limit=1)[0].address == "3.0.0"
        assert library.rollouts("a")[0] is index
    assert index.progress().num_files == 4


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist; give a run's folder"):
        RunLibrary([tmp_path / "runs"])


def test_a_folder_that_is_gone_has_no_runs(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", 1)
    library = RunLibrary([tmp_path / "runs"])
    (tmp_path / "runs").rename(tmp_path / "moved")
    assert library.summaries() == []
    with pytest.raises(DataError, match="there is no run 'a' here; there is none yet"):
        library.stamp("a")


def test_a_run_that_begins_anew_is_shown_without_its_older_rollouts(tmp_path: Path) -> None:
    write_small_run(tmp_path / "run")
    with closing(RunLibrary([tmp_path])) as library:
        index, _ = library.rollouts("run")
        index.update()
        (tmp_path / "run").rename(tmp_path / "moved")
        write_rollouts(tmp_path / "run", 1, [group("Anew? ", ("yes", 1.0))])
        assert library.rollouts("run")[0].update().num_rollouts == 1
