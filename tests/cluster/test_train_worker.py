"""A rank's process, as a service in this one, alone in its group."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from offbeat.cluster.group import Nothing
from offbeat.cluster.messages import (
    BuildRequest,
    ExportRequest,
    Folder,
    JoinRequest,
    Loaded,
    Objective,
    Published,
    PublishRequest,
    Shard,
    StoreAddress,
    Trained,
)
from offbeat.cluster.train_worker import TrainWorker
from offbeat.data import wire
from offbeat.data.tokenizer import character_tokenizer, load_tokenizer
from offbeat.dist.mesh import leave
from offbeat.model.load import load_causal_lm
from small_run import TINY, small_config
from train_samples import make_batch


@pytest.fixture
def rank(model_dir: str, tmp_path: Path) -> Iterator[TrainWorker]:
    worker = TrainWorker()
    store = call(worker, "host_store", StoreAddress("127.0.0.1", 0), StoreAddress)
    config = small_config(tmp_path, model_dir).model_dump_json()
    call(worker, "join", JoinRequest(0, 1, store, config, model_dir), Nothing)
    call(worker, "load_model", Nothing(), Nothing)
    yield worker
    leave()


def call(worker: TrainWorker, method: str, request: object, reply: type) -> object:
    return wire.decode(reply, worker.handle(method, wire.encode(request)))


def shard(seed: int) -> Shard:
    batch = make_batch(2, 2, seed=seed)
    return Shard(batch, ((np.arange(4),),))


def test_a_rank_trains_saves_goes_on_and_exports(rank: TrainWorker, tmp_path: Path, model_dir: str) -> None:
    call(rank, "set_objective", Objective("ppo", 10), Nothing)
    trained = call(rank, "train_step", shard(1), Trained)
    assert trained.metrics["train/grad_norm"] > 0 and trained.start_s < trained.end_s
    assert 0 < trained.busy_s <= trained.end_s - trained.start_s + 0.1
    call(rank, "save", Folder(str(tmp_path / "saved")), Nothing)
    publish = PublishRequest(1, str(tmp_path / "v1"), "float32", (5, 6, 7))
    before = call(rank, "publish", publish, Published)
    call(rank, "train_step", shard(2), Trained)
    assert call(rank, "load", Folder(str(tmp_path / "saved")), Loaded) == Loaded(1)
    assert call(rank, "publish", PublishRequest(2, str(tmp_path / "v2"), "float32", (5, 6, 7)), Published) == before
    call(rank, "export", ExportRequest(str(tmp_path / "export"), model_dir), Nothing)
    with torch.inference_mode():
        logits = load_causal_lm(str(tmp_path / "export"), attention="sdpa")(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False).logits[0]
    expected = logits[:-1].log_softmax(-1).gather(1, torch.tensor([[6], [7]]))[:, 0].tolist()
    assert before.canary_logprobs == pytest.approx(expected, abs=1e-5)
    assert load_tokenizer(tmp_path / "export").encode("12>") == load_tokenizer(model_dir).encode("12>")


def test_another_objective_starts_with_a_fresh_optimizer_and_the_same_weights(rank: TrainWorker, tmp_path: Path) -> None:
    call(rank, "set_objective", Objective("sft", 10), Nothing)
    call(rank, "train_step", shard(1), Trained)
    before = call(rank, "publish", PublishRequest(1, str(tmp_path / "v1"), "float32", (5, 6)), Published)
    call(rank, "set_objective", Objective("ppo", 10), Nothing)
    assert call(rank, "publish", PublishRequest(2, str(tmp_path / "v2"), "float32", (5, 6)), Published) == before
    assert call(rank, "train_step", shard(1), Trained).metrics["train/lr"] == pytest.approx(1e-3)


def test_a_model_is_built_beside_its_tokenizer(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    request = [
        BuildRequest(str(tmp_path / name), TINY.model_dump_json(), tokenizer.vocab_size, tokenizer.eos_token_id, None, seed)
        for name, seed in (("a", 3), ("b", 3), ("c", 4))]
    for each in request:
        call(TrainWorker(), "build_model", each, Nothing)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert weights[0] == weights[1] != weights[2]


def test_a_rank_that_has_not_joined_says_so() -> None:
    with pytest.raises(AssertionError, match="before it joined"):
        TrainWorker().handle("train_step", wire.encode(shard(0)))
