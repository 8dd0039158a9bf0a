"""The account of `make chaos` finds what is not as promised, and two kills of a run are as promised."""

import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from chaos.kills import MODES, Life, build_model, kill_all, num_rows
from chaos.ledger import Ledger, Seen
from chaos.report import document
from chaos.run import Row, kill_one, plan, read_rows, record, set_aside
from chaos.tokens import count, environment
from faults.command import Command
from offbeat.journal.run_journal import RunJournal, folder_of
from small_run import REWARDS, SmallRun
from waiting import wait_until

ROW = Row(7, 0, "local", ("engine",), "save", "any time", ("engine 0",), True, None, 9, {}, (), 100, 20, 3.0)


def test_the_kills_are_spread_over_the_modes_and_every_run_gets_ten_at_most() -> None:
    chains = plan(200, list(MODES))
    assert sum(num for *_, num in chains) == 200 and max(num for *_, num in chains) == 10
    assert {mode for mode, *_ in chains[:6]} == set(MODES) and len({chain[:2] for chain in chains}) == len(chains)


def test_the_account_finds_what_is_lost_doubled_or_of_a_wrong_version(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, eta=1, last=2)
    ledger.trained = {1: [(0, "0:1")], 2: [(0, "0:1")]}
    ledger.finished = {(0, "0:1"): "a", (0, "0:2"): "b", (0, "0:3"): "c"}
    ledger.waiting = {(0, "0:4"), (0, "0:5")}
    ledger._where({(0, "0:3")}, {(0, "0:5")})
    assert ledger.counts == {"doubled": 1, "lost": 2}
    ledger._step(2, [(0, "0:6")])
    ledger._groups(0, [Seen("0:3", 0, "c", ((0, 0),)), Seen("0:3", 0, "d", ())], None)
    ledger._groups(0, [Seen("0:7", 2, "e", ((1,),)), Seen("0:8", 0, "f", ((0,),)), Seen("0:9", 1, "g", ((2, 1),))], 3)
    assert ledger.counts == {"doubled": 2, "lost": 2, "tokens": 1, "versions": 3}


def test_rollouts_of_steps_that_a_checkpoint_has_must_be_stored(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, eta=1, last=3)
    ledger._stored(2)
    assert ledger.problems == ["the rollouts of step 1 are not stored", "the rollouts of step 2 are not stored"]


def test_a_token_that_was_sampled_twice_is_counted_by_its_sample_and_its_position(tmp_path: Path) -> None:
    assert environment(tmp_path / "tokens")["OFFBEAT_COUNT_TOKENS"] == str(tmp_path / "tokens")
    assert count(tmp_path / "tokens") == (0, 0)
    first, second = ([[7, 0], [8, 0], [7, 1]], [[7, 1], [7, 2], [9, 1], [7, 1]])
    for number, pairs in enumerate((first, second)):
        (tmp_path / "tokens" / str(number)).write_bytes(np.array(pairs, np.uint64).tobytes() + b"torn" * number)
    assert count(tmp_path / "tokens") == (7, 2)


def test_a_kill_of_a_whole_command_hits_processes_that_have_erased_their_environment_and_their_mark_with_it() -> None:
    sleep = "import time; time.sleep(60)"
    child = f"import os, sys, time; time.sleep(1); os.execve(sys.executable, [sys.executable, '-c', {sleep!r}, 'bare'], {{}})"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    command = Command([sys.executable, "-c", parent], env={}, logs=[], patterns={})
    running = threading.Thread(target=command.run, kwargs={"timeout_s": 60.0, "grace_s": 5.0})
    running.start()
    wait_until(lambda: any(each.cmdline()[-1:] == ["bare"] for each in command.processes()), timeout_s=50)
    assert kill_all(command) and not command.processes()
    running.join()
    assert command.left == [] and not kill_all(command)


@pytest.mark.drill
@pytest.mark.timeout(300)
def test_two_kills_of_a_run_are_as_promised_and_its_steps_are_replayed(tmp_path: Path) -> None:
    model = build_model(tmp_path / "model")
    rows = kill_one(tmp_path, model, mode="lora", number=0, num=2, seed=39, results=tmp_path / "rows.jsonl")
    assert [row.problems for row in rows] == [(), ()] and rows[-1].num_replayed > 3
    assert sum(row.num_tokens for row in rows) > 1000 > 100 > sum(row.num_again for row in rows)


@pytest.mark.drill
@pytest.mark.timeout(300)
def test_samples_that_were_generated_when_everything_was_killed_go_on_from_the_tokens_in_the_journal(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, build_model(tmp_path / "model"))
    settings = {
        "run.total_steps": "1000000", "rollout.group_size": "16", "rollout.max_concurrent_rollouts": "32",
        "rollout.max_head_offpolicyness": "8", "rollout.reward": f"{REWARDS}:random_looking"}

    def in_journal() -> int:
        if not folder_of(run.folder).exists():
            return 0
        with RunJournal(folder_of(run.folder), identity=b"", tell=print) as journal:
            found = journal.read(0)
        groups = {} if found is None else found[0].read_open()
        return sum(
            len(each.tokens) for group in groups.values() for call in group.calls for each in call.answers if not each.finish_reason)

    life = Life(run, "lora", **settings)
    wait_until(lambda: in_journal() > 100 or not life.alive, timeout_s=200)
    life.end_now()
    unfinished = in_journal()
    assert unfinished > 100
    Life(run, "lora", **settings).stop_after(num_rows(run.folder) + 2)
    assert sum(event["tokens_from_journal"] for event in run.events("played_again")) == unfinished


def test_the_page_says_how_many_kills_are_as_promised_and_names_the_others() -> None:
    page = document([ROW, replace(ROW, problems=("it did not go on",), counts={"other": 1})], wanted=2)
    assert "1 of 2 are as promised" in page and "- local, engine 0 at any time: it did not go on" in page and "40 of 200, 20.0%" in page
    assert "1 of 2 kills" in document([ROW], wanted=2)


def test_runs_that_were_not_as_promised_are_done_again_whole_and_the_page_names_them(tmp_path: Path) -> None:
    results, before = tmp_path / "chaos.jsonl", tmp_path / "before.jsonl"
    rows = [replace(ROW, chain=0), replace(ROW, chain=1), replace(ROW, chain=1, problems=("it did not go on",), counts={"other": 1})]
    for row in rows:
        record(row, results)
    set_aside(results, before)
    assert read_rows(results) == rows[:1] and read_rows(before) == rows[1:]
    page = document(rows[:1], wanted=1, before=rows[1:])
    assert "1 of 1 are as promised" in page and "Not counted above are 2 kills of 1 run, which" in page and "it did not go on" in page
