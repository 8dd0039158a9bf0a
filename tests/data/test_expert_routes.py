"""Routes as arrays: their types, their bytes, and what stands for unknown ones."""

import io
from dataclasses import replace

import numpy as np
import pytest

from offbeat.data.batch import Batch, SharedPrompts
from offbeat.data.expert_routes import check_routes, join_routes, pack_routes, route_dtype, unknown_id, unknown_routes, unpack_routes
from offbeat.data.packing import pack_row
from offbeat.data.trajectory import Group, Trajectory
from offbeat.errors import DataError
from offbeat.inference.sampling import Sample
from offbeat.journal.records import pack, unpack
from offbeat.rollout.builder import TrajectoryBuilder


def routes(length: int, first: int = 0) -> np.ndarray:
    """Routes [length, 2] in which every number is different."""
    return (first + np.arange(2 * length).reshape(length, 2)).astype(np.uint8)


def test_an_id_takes_one_byte_up_to_255_experts_and_two_beyond():
    assert route_dtype(255) == np.uint8 and route_dtype(256) == np.int16
    assert unknown_id(route_dtype(8)) == 255
    with pytest.raises(DataError, match="at most 32767 experts"):
        route_dtype(40_000)


def test_routes_come_back_from_their_bytes_which_are_fewer():
    for given in (routes(100), routes(3).astype(np.int16), routes(0)):
        found = unpack_routes(pack_routes(given))
        assert found.dtype == given.dtype and np.array_equal(found, given)
    assert len(pack_routes(np.zeros((500, 16), np.uint8))) < 500
    for bytes_ in (b"", b"nothing", pack_routes(np.zeros((2, 2), np.float32)), npy(np.zeros((2, 2))), npy(np.full((1, 1, 1), -1))):
        with pytest.raises(DataError, match="these bytes are not routes"):
            unpack_routes(bytes_)


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_vllms_arrays_by_layer_are_read_and_255_is_an_expert_in_them():
    given = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    assert np.array_equal(unpack_routes(npy(given)), given.reshape(3, 4))
    given[1, 1, 1] = 255
    wide = unpack_routes(npy(given))
    assert wide.dtype == np.int16 and wide[1, 3] == 255
    joined = join_routes([wide, unpack_routes(npy(given[:1])), None], [3, 1, 1])
    assert joined is not None and joined.dtype == np.int16 and joined[3].tolist() == [0, 1, 2, 3] and (joined[4] == 32767).all()


def test_sequences_without_routes_are_unknown_beside_others_with_some():
    joined = join_routes([routes(2), None], [2, 3])
    assert joined is not None and np.array_equal(joined, np.concatenate([routes(2), unknown_routes(3, routes(1))]))
    assert join_routes([None, None], [2, 3]) is None
    with pytest.raises(DataError, match="of one model"):
        join_routes([routes(2), np.zeros((3, 4), np.uint8)], [2, 3])


def test_routes_that_do_not_fit_a_trajectory_cost_its_sample():
    four = np.arange(4)
    for wrong, why in ((routes(3), r"\(4, K\), got \(3, 2\)"), (routes(4).astype(np.float32), "uint8 or int16"), (four, r"\(4, K\)")):
        with pytest.raises(DataError, match=why):
            check_routes(wrong, four)
        assert "routes must" in Trajectory(four, four > 1, four * 0.0, four, 0.0, routes=wrong).reason


def sample(length: int, given: np.ndarray | None) -> Sample:
    return Sample(np.arange(length), np.zeros(length), np.zeros(length), "", "stop", routes=given)


def test_a_token_keeps_the_experts_of_the_turn_that_used_it_first():
    # 2 tokens of a prompt and 3 sampled ones; the second turn comes after one more token, and computes all 6 again, and 1 of its own 2.
    built = TrajectoryBuilder([7, 8]).generated(sample(3, routes(4))).given([9]).generated(sample(2, routes(7, first=100))).finish(1.0)
    assert built.routes is not None and len(built) == 8
    assert np.array_equal(built.routes[:4], routes(4)) and np.array_equal(built.routes[4:7], routes(7, first=100)[4:])
    assert (built.routes[7] == 255).all()
    assert TrajectoryBuilder([7, 8]).generated(sample(3, None)).finish(1.0).routes is None


def test_routes_survive_the_journal():
    built = [TrajectoryBuilder([7, 8]).generated(sample(3, given)).finish(1.0) for given in (routes(4), None)]
    first, second = unpack(pack(Group("0:1", 0, tuple(built)))).trajectories
    assert np.array_equal(first.routes, built[0].routes) and second.routes is None


def test_a_row_has_each_tokens_own_experts_and_a_shared_prompt_those_of_one_sequence():
    tokens = np.array([1, 2, 3, 4, 1, 2, 5, 6], np.int32)
    batch = Batch.of_next_tokens(
        tokens, np.tile([False, False, True, True], 2), lengths=[4, 4], columns={"loss_weights": np.ones(8)}, losses=(),
        shared=SharedPrompts(np.zeros(2, np.int64), np.full(2, 2)))
    batch = replace(batch, routes=routes(8))
    row = pack_row(batch, share_prefix=True)
    assert row.tokens.tolist() == [1, 2, 3, 5] and np.array_equal(row.routes, routes(8)[[0, 1, 2, 6]])
    picked = Batch.concatenate([batch.select([1]), batch.select([0])])
    assert np.array_equal(picked.routes, routes(8)[[4, 5, 6, 7, 0, 1, 2, 3]])
    with pytest.raises(DataError, match="routes of a batch must have 8 entries, got 3"):
        replace(batch, routes=routes(3))
