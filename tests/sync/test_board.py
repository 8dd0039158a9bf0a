"""What the threads of a rank tell each other."""

import threading
import time

from offbeat.phase import phase
from offbeat.sync.board import Board, Wait
from offbeat.sync.verdict import SyncVerdict


def test_the_first_failure_stays_and_reaches_who_waits():
    board = Board(0)
    board.wait = Wait(1, "save", 5.0, None, threading.get_ident())
    board.fail(SyncVerdict("failed", "first"))
    board.fail(SyncVerdict("failed", "second"))
    assert board.failure == SyncVerdict("failed", "first")
    assert board.wait.messages.get(timeout=30) == SyncVerdict("failed", "first")


def test_a_status_tells_the_phase_outside_of_points_and_the_point_inside():
    board = Board(2)
    with phase("load"):
        outside = board.status()
    assert (outside.rank, outside.phase, outside.point, outside.n) == (2, "load", "", 0)
    assert outside.stack
    board.wait = Wait(7, "save", 5.0, None, threading.get_ident())
    time.sleep(0.05)
    inside = board.status()
    assert (inside.point, inside.n) == ("save", 7)
    assert inside.waited_s >= 0.05
    assert inside.beat_age_s >= 0.05
