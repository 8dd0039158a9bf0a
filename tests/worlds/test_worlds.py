"""A sample of `make worlds`, and that a failing world replays and shrinks. All runs are simulated, in virtual time."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from worlds.account import ended_late
from worlds.drawn import Fault, World, draw, draw_spmd
from worlds.explore import Lived, find_defect, shrink

RUN = Path(__file__).with_name("run.py")


def worlds(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(RUN), *arguments], capture_output=True, text=True, timeout=400, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"})


def ledger(folder: Path, seed: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"seed-{seed}" / "ledger.jsonl").read_text().splitlines()]


def test_runs_do_as_promised_in_the_first_worlds(tmp_path: Path) -> None:
    done = worlds("--count", "16", "--processes", "1", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["worlds"], told["failed"]) == (16, 0)
    again = worlds("--count", "16", "--processes", "1", "--folder", str(tmp_path))
    assert json.loads(again.stdout.splitlines()[-1])["lived_before"] == 16, "a call that was cut off is gone on with"


def test_runs_in_spmd_mode_do_as_promised_in_the_first_worlds(tmp_path: Path) -> None:
    done = worlds("--spmd", "--count", "3", "--processes", "1", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["worlds"], told["failed"]) == (3, 0)


@pytest.mark.drill
@pytest.mark.timeout(800)  # two starts of Python with torch take minutes on a machine that does much else
@pytest.mark.parametrize("mode", [[], ["--spmd"]])
def test_the_same_number_is_the_same_run_event_for_event(mode: list[str], tmp_path: Path) -> None:
    told = []
    for _ in range(2):  # in one folder, which some of the run's sentences name
        shown = worlds(*mode, "--seed", "3", "--folder", str(tmp_path))
        assert shown.returncode == 0, shown.stdout + shown.stderr
        told.append(ledger(tmp_path, 3))
    assert told[0] == told[1]


@pytest.mark.drill
def test_a_planted_defect_is_found_in_a_world_that_replays_exactly_and_shrinks(tmp_path: Path) -> None:
    found = worlds("--mutant", "newest_version_stamped", "--processes", "1", "--folder", str(tmp_path))
    assert found.returncode == 0, found.stdout + found.stderr
    seed = json.loads(found.stdout)["seed"]
    shown = worlds("--seed", str(seed), "--mutant", "newest_version_stamped", "--folder", str(tmp_path))
    assert shown.returncode == 1 and "shrunk to these faults:" in shown.stdout and "stamped with version" in shown.stdout
    first = ledger(tmp_path, seed)
    worlds("--seed", str(seed), "--mutant", "newest_version_stamped", "--folder", str(tmp_path))
    assert ledger(tmp_path, seed) == first


def test_a_world_that_fails_without_the_defect_does_not_find_it() -> None:
    def lived(seed: int, *wrong: str) -> Lived:
        return Lived(draw(seed), wrong, 1)

    with_defect = [lived(0), lived(1, "lost"), lived(2, "stale"), lived(3, "stale")]
    hunt = find_defect(iter(with_defect), lambda seed: lived(seed, *["lost"] * (seed == 1)))
    assert (hunt.num_lived, hunt.finds, hunt.unsound) == (3, with_defect[2], (lived(1, "lost"),))
    assert find_defect(iter(with_defect), lambda seed: lived(seed, "always")).finds is None


def test_ranks_have_to_be_told_of_a_failure_and_end_soon_after_it() -> None:
    world = replace(draw_spmd(0), apart=True)
    failed: list[dict[str, Any]] = [{"at": 0.0, "begins": 0}, {"at": 10.0, "failed": 1}, {"at": 10.5, "rank_end": 1, "how": "it was lost"}]

    def wrong(*rows: dict[str, Any]) -> list[str]:
        return ended_late(world, [*failed, *rows])

    assert not wrong({"at": 15.0, "rank_end": 0, "how": "PeerError: rank 1 failed: it was lost"})
    assert "was not told" in wrong({"at": 140.0, "rank_end": 0, "how": "SyncTimeout: sync point 'a' timed out after 120 s"})[0]
    assert "ended 490 s after" in wrong({"at": 500.0, "rank_end": 0, "how": "PeerError: rank 1 failed: it was lost"})[0]
    assert "did not end" in wrong({"at": 3610.5, "rank_end": 0, "how": "", "kills": True})[0]
    assert not wrong({"at": 11.0, "fault": "rank_hangs", "who": 0}, {"at": 3610.5, "rank_end": 0, "how": "", "kills": True})


@pytest.mark.drill
@pytest.mark.timeout(800)
def test_a_call_that_ends_or_was_killed_leaves_no_folder_in_memory(tmp_path: Path) -> None:
    def begin() -> "tuple[subprocess.Popen[bytes], Path]":
        call = subprocess.Popen(
            [sys.executable, str(RUN), "--count", "1000", "--folder", str(tmp_path)], stdout=subprocess.DEVNULL, start_new_session=True)
        folder = Path("/dev/shm") / f"offbeat-worlds-{call.pid}"
        give_up_s = time.monotonic() + 300
        while not folder.is_dir() and call.poll() is None:
            if time.monotonic() > give_up_s:
                os.killpg(call.pid, signal.SIGKILL)
            time.sleep(0.05)
        assert folder.is_dir(), "a call has a folder in memory"
        return call, folder

    killed, left = begin()
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    terminated, folder = begin()
    assert left.name != folder.name and not left.exists(), "the next call removes what a killed one has left"
    terminated.terminate()
    assert terminated.wait(120) == 143 and not folder.exists()


def test_a_world_shrinks_to_the_faults_that_it_needs() -> None:
    faults = tuple(Fault(0, float(at), "kill") for at in range(6))

    def fails(world: World) -> bool:
        return {2.0, 5.0} <= {fault.at_s for fault in world.faults}

    world = World(**{**vars(draw(0)), "faults": faults})
    assert [fault.at_s for fault in shrink(world, fails).faults] == [2.0, 5.0]
