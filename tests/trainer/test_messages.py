"""Every message survives the wire, and can be read without torch."""

import dataclasses
import inspect
import subprocess
import sys

import numpy as np
import pytest

from offbeat.algorithms.adam import AdamParams
from offbeat.data import wire
from offbeat.trainer import messages
from offbeat.trainer.messages import (
    AdapterNames,
    BroadcastRequest,
    BuildRequest,
    CanaryScores,
    CanaryTokens,
    ExportRequest,
    Folder,
    JoinRequest,
    LoadedStep,
    NewAdapter,
    OptimStep,
    ScoredShare,
    Scores,
    ScoreShare,
    Stepped,
    StoreAddress,
    TargetScores,
    Trained,
    TrainStep,
    WriteRequest,
    Written,
)
from train_samples import make_batch

STORE = StoreAddress("10.0.0.1", 4321)
EXAMPLES = [
    STORE, BuildRequest("folder", "{}", 54, 0, None, 7), JoinRequest(1, 4, STORE, "{}", "folder"),
    JoinRequest(1, 4, STORE, "{}", "folder", trains="adapters"),
    Trained({"train/loss": 0.1, "train/tokens": 3.0}, 1.5, 2.5, 0.75, 40.0, 1e9, 1e12, 2**33), OptimStep({"alice": AdamParams(lr=1e-3)}),
    Stepped({"alice": 0.5}, {"alice": 3}), AdapterNames(("alice", "bob")), NewAdapter("alice", 8, 16.0, 1, ("attn", "mlp"), "folder"),
    Folder("x"), Folder("x", "alice", optimizer=False), LoadedStep(12), BroadcastRequest("10.0.0.1", 2, 60),
    WriteRequest("v3", "float32", (1, 2, 3)), WriteRequest("v3", "float32", (1, 2), "alice", BroadcastRequest("10.0.0.1", 2, 60)),
    Written("abc", (-1.25, -2.0)), Written("abc", (-1.25,), "10.0.0.1:99", 512), ExportRequest("x", "y", "bfloat16"), CanaryTokens((1, 2)),
    CanaryScores((-1.5,))]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_equal(message: object) -> None:
    assert wire.decode(type(message), wire.encode(message)) == message


def test_arrays_come_back() -> None:
    step = TrainStep(make_batch(2, 2), ((np.array([0, 2]), np.array([1, 3])), (np.array([], np.int64),)), AdamParams(lr=0.5))
    back = wire.decode(TrainStep, wire.encode(step))
    assert back.params == step.params and back.batch.losses == step.batch.losses
    for mine, theirs in zip((back.batch.columns, back.batch.sequences), (step.batch.columns, step.batch.sequences), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(np.array_equal(mine[name], values) and mine[name].dtype == values.dtype for name, values in theirs.items())
    assert [[m.tolist() for m in minibatch] for minibatch in back.minibatches] == [[[0, 2], [1, 3]], [[]]]
    scores = wire.decode(Scores, wire.encode(Scores(np.array([-1.5, -2.0], np.float32), np.zeros(0, np.float32))))
    assert scores.logprobs.tolist() == [-1.5, -2.0] and scores.losses.shape == (0,)
    share = wire.decode(ScoreShare, wire.encode(ScoreShare(step.batch, np.array([3, 1]), step.minibatches[0], "reference", True)))
    assert (share.sequences.tolist(), [micro.tolist() for micro in share.microbatches]) == ([3, 1], [[0, 2], [1, 3]])
    assert (share.of, share.with_entropy, len(share.batch)) == ("reference", True, 4)
    answer = wire.decode(ScoredShare, wire.encode(ScoredShare(
        np.array([1]), TargetScores({"logprobs": np.array([-0.5], np.float32)}), 1.5, 2.5)))
    assert (answer.sequences.tolist(), answer.scores.columns["logprobs"].tolist()) == ([1], [-0.5])
    nothing = answer.empty()
    assert (nothing.sequences.shape, nothing.scores.columns["logprobs"].shape, nothing.end_s) == ((0,), (0,), 2.5)


def test_every_message_is_tested_and_frozen() -> None:
    own = {cls for _, cls in inspect.getmembers(messages, dataclasses.is_dataclass) if cls.__module__ == messages.__name__}
    assert own == {type(example) for example in EXAMPLES} | {TrainStep, Scores, ScoreShare, ScoredShare, TargetScores}
    assert all(cls.__dataclass_params__.frozen for cls in own)


def test_they_can_be_read_without_torch() -> None:
    code = "import sys, offbeat.trainer.messages; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
