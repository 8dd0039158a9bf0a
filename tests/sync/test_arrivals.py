"""Arrivals leave little behind in the store."""

from meeting import meeting, together
from waiting import wait_until


def test_points_that_are_passed_are_forgotten():
    def come(sync):
        for i in range(50):
            sync.arrive(f"point {i}", timeout_s=60)

    with meeting(3) as (syncs, store):
        come_once = together(syncs, lambda sync: sync.arrive("first", timeout_s=60))
        before = store.num_keys()
        assert together(syncs, come) == come_once == [None] * 3
        wait_until(lambda: store.num_keys() <= before + 4, timeout_s=30)


def test_a_missed_point_is_forgotten_too():
    with meeting(2) as (syncs, store):
        before = store.num_keys()
        for _ in range(2):
            together(syncs, lambda sync: sync.arrive(f"rank {sync.rank}", timeout_s=60))
        for _ in range(3):
            assert together(syncs, lambda sync: sync.arrive("together", timeout_s=60)) == [None, None]
        wait_until(lambda: store.num_keys() <= before + 4, timeout_s=30)
