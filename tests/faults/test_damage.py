"""A representative part of the tables of damaged files and of changed settings; `damage.py` and `resume.py` make the whole ones."""

import json
import os
import shutil
from pathlib import Path

import pytest

from faults.damage import KINDS, STEPS, WHOLE_FOLDER, Bench, index_of, older_ranks, on_file
from faults.workshop import Workshop
from small_run import SmallRun

NEWEST = f"checkpoints/step-{STEPS:08d}"


@pytest.fixture(scope="module")
def bench(shop: Workshop, tmp_path_factory: pytest.TempPathFactory, model_dir: str) -> Bench:
    """A run with two checkpoints, copies of which are damaged."""
    return Bench(shop, tmp_path_factory.mktemp("damage"), model_dir)


@pytest.mark.parametrize(("name", "how", "told"), [
    (f"{NEWEST}/complete.json", "emptied", "complete.json is not as it was written, and kept as step-00000003.damaged"),
    (f"{NEWEST}/complete.json", "gone", "is not complete: it has no complete.json"),
    (f"{NEWEST}/ranks/.metadata", "flipped", "ranks/.metadata has other bytes than were written"),
    (f"{NEWEST}/ranks/__0_0.distcp", "truncated", "ranks/__0_0.distcp has"),
    (f"{NEWEST}/ranks/__1_0.distcp", "gone", "ranks/__1_0.distcp is gone"),
])
def test_a_damaged_newest_checkpoint_is_told_and_the_one_before_taken(name: str, how: str, told: str, bench: Bench) -> None:
    row = bench.row(name, how, on_file(name, KINDS[how]), newest=True)
    assert row.problems == () and row.went_on_from == STEPS - 1
    assert told in row.outcome and "the run continues from step-00000002" in row.outcome


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "trace.json", "config.toml", "result.json"])
def test_rubbish_in_the_records_of_a_run_stops_neither_its_report_nor_its_resumption(name: str, bench: Bench) -> None:
    row = bench.row(name, "rubbish", on_file(name, KINDS["rubbish"]))
    assert (row.problems, row.report.code, row.done.code, row.went_on_from) == ((), 0, 0, STEPS)
    assert (f"{name} had" in row.outcome) == name.startswith(("metrics", "events", "trace"))


def test_missing_rows_of_metrics_are_told(bench: Bench) -> None:
    row = bench.row("metrics.jsonl", "emptied", on_file("metrics.jsonl", KINDS["emptied"]))
    assert row.problems == () and "metrics.jsonl has no rows of 3 of the 3 steps that are done" in row.outcome


@pytest.mark.parametrize("what", WHOLE_FOLDER)
def test_a_checkpoint_of_another_step_is_never_taken_for_its_own(what: str, bench: Bench) -> None:
    change = WHOLE_FOLDER[what]
    row = bench.row(what, "", change, newest=change is older_ranks)
    assert row.problems == () and row.went_on_from == (STEPS - 1 if change is older_ranks else STEPS)


def test_a_run_all_of_whose_checkpoints_are_damaged_is_refused_as_often_as_it_is_tried(
    bench: Bench, shop: Workshop, tmp_path: Path,
) -> None:
    run = SmallRun(tmp_path / "copy", bench.whole.model)
    shutil.copytree(bench.whole.root, run.root)
    for step in (STEPS - 1, STEPS):
        os.truncate(index_of(run.folder).folder(step) / "ranks" / ".metadata", 10)
    for _ in range(2):
        done = shop.train(run, run__total_steps="4", train__num_ranks="2")
        assert (done.code, done.error.count("\n"), done.said) == (2, 1, ())
        assert "can be resumed from (step-00000003 is damaged: ranks/.metadata has 10 bytes" in done.error
    assert index_of(run.folder).folder(STEPS).exists()


def test_a_run_whose_only_save_was_cut_off_begins_anew_and_says_where_the_old_one_is(
    bench: Bench, shop: Workshop, tmp_path: Path,
) -> None:
    run = SmallRun(tmp_path / "copy", bench.whole.model)
    shutil.copytree(bench.whole.root, run.root)
    for step in (STEPS - 1, STEPS):
        (index_of(run.folder).folder(step) / "complete.json").unlink()
    refused = shop.train(run, run__total_steps="1", train__num_ranks="2")
    assert refused.code == 2 and f"has saved a checkpoint of step {STEPS}, and" in refused.error
    events = run.folder / "events.jsonl"
    events.write_text("".join(line for line in events.read_text().splitlines(True) if '"checkpoint"' not in line))
    done = shop.train(run, run__total_steps="1", train__num_ranks="2")
    assert done.code == 0 and any(line.startswith("there was no checkpoint to resume from, so the run starts over") for line in done.said)
    assert (run.root / "small.1" / NEWEST / "ranks").is_dir()


def test_the_result_of_a_resumed_run_remembers_its_warm_up(shop: Workshop, tmp_path: Path, model_dir: str) -> None:
    run = SmallRun(tmp_path, model_dir)
    settings = {"run__warm_up": "true", "sft__total_steps": "3", "sft__batch_size": "4", "train__num_ranks": "2"}
    for total in ("1", "2"):
        assert shop.train(run, run__total_steps=total, **settings).code == 0
        result = json.loads((run.folder / "result.json").read_text())
        assert (result["steps"], result["warm_up_steps"]) == (int(total), 3)
