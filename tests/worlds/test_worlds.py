"""A sample of `make worlds`, and that a failing world replays and shrinks. All runs are simulated, in virtual time."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from worlds.drawn import Fault, World, draw
from worlds.explore import shrink

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
@pytest.mark.parametrize("mode", [[], ["--spmd"]])
def test_the_same_number_is_the_same_run_event_for_event(mode: list[str], tmp_path: Path) -> None:
    for folder in ("one", "two"):
        shown = worlds(*mode, "--seed", "3", "--folder", str(tmp_path / folder))
        assert shown.returncode == 0, shown.stdout + shown.stderr
    assert ledger(tmp_path / "one", 3) == ledger(tmp_path / "two", 3)


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


def test_a_world_shrinks_to_the_faults_that_it_needs() -> None:
    faults = tuple(Fault(0, float(at), "kill") for at in range(6))

    def fails(world: World) -> bool:
        return {2.0, 5.0} <= {fault.at_s for fault in world.faults}

    world = World(**{**vars(draw(0)), "faults": faults})
    assert [fault.at_s for fault in shrink(world, fails).faults] == [2.0, 5.0]
