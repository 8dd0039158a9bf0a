"""A named wait says which point was missed, and leaves the group usable."""

import os
import time

import pytest

from offbeat.dist.collectives import sum_scalars
from offbeat.dist.sync import barrier
from offbeat.errors import DeadlineError, WorkerError
from ranks import run_alone, run_ranks


def _one_rank_late(groups, _argument):
    if groups.rank == 1:
        time.sleep(1.5)
        barrier("export", groups=groups, timeout_s=5)
        text = ""
    else:
        with pytest.raises(DeadlineError) as error:
            barrier("export", groups=groups, timeout_s=0.5)
        text = str(error.value)
    return [text, sum_scalars({"x": 1.0}, groups.cpu_group)["x"]]


def _one_rank_gone(groups, _argument):
    if groups.rank == 1:
        os._exit(0)
    with pytest.raises(WorkerError, match="lost a peer at 'export'"):
        barrier("export", groups=groups, timeout_s=30)
    return "named"


def test_a_missed_deadline_names_the_point_and_the_group_survives():
    (text, after), (_, after_late) = run_ranks(_one_rank_late, world=2)
    assert text.startswith("rank 0 of 2 waited 0.5 s at 'export'")
    assert after == after_late == 2.0


def test_a_dead_rank_is_told_apart_from_a_late_one():
    assert run_ranks(_one_rank_gone, world=2, check=False)[0] == "named"


def test_a_single_rank_does_not_wait():
    started = time.monotonic()
    run_alone(lambda groups, _: barrier("export", groups=groups, timeout_s=5))
    assert time.monotonic() - started < 5
