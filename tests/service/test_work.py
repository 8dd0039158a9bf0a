"""Parts of requests, cut and put together again."""

import numpy as np

from offbeat.algorithms.adam import AdamParams
from offbeat.data.batch import Batch
from offbeat.errors import DataError, DeathError, ModelError, PublishError, StorageError
from offbeat.service.checkpoints import CheckpointError
from offbeat.service.cost import FOLDER_TOKENS, REQUEST_BYTES, STEP_TOKENS
from offbeat.service.futures import Future
from offbeat.service.models import Model
from offbeat.service.schedule import Lane, Schedule
from offbeat.service.tables import ModelRow
from offbeat.service.types import Failed, Layout, SparseArray, TrainingData
from offbeat.service.work import Leave, OptimizerStep, Pass, Work, datums_of, explain, params_of, pass_done, split
from offbeat.trainer.messages import Scores
from small_service import LORA, training_data

MODEL = Model(ModelRow("m", "s", "alice", 0.0, 0.0, "base", LORA), counted=True)
NOBODY: Future | None = None


def fake_pass(batch: Batch) -> Scores:
    """Numbers that tell where they belong."""
    return Scores(batch.targets.astype(np.float32) / 100, np.diff(batch.target_offsets).astype(np.float32))


def test_a_request_that_is_cut_into_turns_gives_the_same_outcome_as_in_one() -> None:
    data = training_data(3, num=7, length=5)
    works = [Work(0, MODEL, 1, Pass(data, learn=True), NOBODY) for _ in range(2)]
    for work, budget in zip(works, (1000, 11), strict=True):
        schedule: Schedule[Work] = Schedule(max_tokens=budget)
        schedule.add(work.job())
        for turn in iter(schedule.next, None):
            assert turn.lane is Lane.LEARN
            batches = [datums_of(part) for part in turn.parts]
            work.passes += split(fake_pass(Batch.concatenate(batches)), batches)
    whole, cut = map(pass_done, works)
    assert len(works[0].passes) == 1 and len(works[1].passes) == 4
    np.testing.assert_array_equal(whole.losses, cut.losses)
    for one, other in zip(whole.logprobs, cut.logprobs, strict=True):
        np.testing.assert_array_equal(one, other)  # pyright: ignore[reportArgumentType]
    np.testing.assert_array_equal(np.concatenate(whole.logprobs), fake_pass(data.batch).logprobs)  # pyright: ignore
    assert whole.metrics == cut.metrics == {"loss:sum": 35.0}


def test_a_pass_over_several_requests_is_split_into_theirs() -> None:
    batches = [training_data(seed, num=seed + 1).batch for seed in range(3)]
    parts = split(fake_pass(Batch.concatenate(batches)), batches)
    for part, batch in zip(parts, batches, strict=True):
        np.testing.assert_array_equal(part.logprobs, fake_pass(batch).logprobs)
        assert len(part.losses) == len(batch)


def test_sparse_targets_get_their_logprobs_back_in_their_cells() -> None:
    batch = Batch(
        tokens=np.array([1, 2]), offsets=np.array([0, 2]), positions=np.array([0, 0, 1]), targets=np.array([5, 6, 7]),
        columns={"loss_weights": np.zeros(3)}, sequences={"group_ids": [0], "prefix_lens": [0]}, losses=training_data(0).batch.losses)
    work = Work(0, MODEL, 1, Pass(TrainingData(batch, (Layout((2, 3), np.array([0, 2, 4])),)), learn=False), NOBODY)
    work.passes = [fake_pass(batch)]
    (told,) = pass_done(work).logprobs
    assert isinstance(told, SparseArray) and len(told.values) == 3, "nothing is laid out before the answer is written"
    np.testing.assert_allclose(told.dense(), [[0.05, 0, 0.06], [0, 0.07, 0]])


def test_a_step_takes_turns_with_other_steps() -> None:
    work = Work(0, MODEL, 1, OptimizerStep(AdamParams(lr=0.5)), NOBODY)
    assert work.job().lane is Lane.STEP and params_of(work).lr == 0.5


def test_what_trains_nothing_has_a_price_all_the_same() -> None:
    step, leave, learn = (Work(0, MODEL, 1, request, NOBODY) for request in (
        OptimizerStep(AdamParams(lr=0.5)), Leave(ends=False), Pass(training_data(3), learn=True)))
    assert [work.job().left for work in (step, leave, learn)] == [STEP_TOKENS, FOLDER_TOKENS, 24]
    assert [work.charge["queued_tokens"] for work in (step, leave, learn)] == [0, 0, 24]
    assert all(work.charge["queued_bytes"] >= REQUEST_BYTES for work in (step, leave, learn))


def test_an_error_is_the_users_or_the_servers_and_tells_no_more_than_it_should() -> None:
    refused, taken = explain(ModelError("/srv/secrets is no adapter"), name="m:1"), explain(PublishError("secrets"), name="m:1")
    assert (refused.category, taken.category) == ("user", "server") and "secrets" not in refused.message + taken.message
    mine, damaged, disk, died, bug = (explain(error, name="m:1") for error in (
        DataError("too long; cut it"), CheckpointError("it is damaged"), StorageError("secrets: the disk is full"),
        DeathError("rank 0: secrets of others"), KeyError("secrets")))
    assert (mine, damaged) == (Failed("too long; cut it", "user"), Failed("it is damaged", "server"))
    assert {disk.category, died.category, bug.category} == {"server"} and "secrets" not in disk.message + died.message + bug.message
    assert all(failed.message.endswith("its log has the reason under m:1") for failed in (disk, bug))
