"""A rank's process, as a service in this one, alone in its group; whole groups of them train in `test_trainers.py`."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import NoneType

import numpy as np
import pytest
import torch

from datum_samples import make_datums, of_adapters
from offbeat.algorithms.adam import AdamParams
from offbeat.config.root import Config
from offbeat.data import wire
from offbeat.data.batch import Batch
from offbeat.data.tokenizer import character_tokenizer, load_tokenizer
from offbeat.errors import ConfigError
from offbeat.model.hf_io import read_safetensors
from offbeat.model.load import load_causal_lm
from offbeat.model.peft_io import read_adapter
from offbeat.sync import broadcast
from offbeat.sync.mesh import leave
from offbeat.trainer.messages import (
    AdapterNames,
    BroadcastRequest,
    BuildRequest,
    ExportRequest,
    Folder,
    JoinRequest,
    LoadedStep,
    NewAdapter,
    OptimStep,
    Scores,
    Stepped,
    StoreAddress,
    Trained,
    Trainee,
    TrainStep,
    WriteRequest,
    Written,
)
from offbeat.trainer.worker import TrainWorker
from offbeat.workers.worker import Nothing
from small_run import TINY, small_config
from train_samples import make_batch

CANARY = (5, 6, 7, 8)
STEP = AdamParams(lr=1e-2)


def started(config: Config, model: str, *, trains: Trainee = "policy") -> Iterator[TrainWorker]:
    worker = TrainWorker()
    store = call(worker, "host_store", StoreAddress("127.0.0.1", 0), StoreAddress)
    call(worker, "join", JoinRequest(0, 1, store, config.for_ranks.model_dump_json(), model, trains), Nothing)
    call(worker, "load_model", Nothing(), Nothing)
    yield worker
    leave()


@pytest.fixture
def rank(model_dir: str, tmp_path: Path) -> Iterator[TrainWorker]:
    yield from started(small_config(tmp_path, model_dir), model_dir)


@pytest.fixture
def lora_rank(model_dir: str, tmp_path: Path) -> Iterator[TrainWorker]:
    config = small_config(tmp_path, model_dir, model__lora__rank="2", model__lora__targets='["q_proj"]')
    yield from started(config, model_dir)


@pytest.fixture
def rank_of_many(model_dir: str, tmp_path: Path) -> Iterator[TrainWorker]:
    yield from started(small_config(tmp_path, model_dir, model__lora__rank="4"), model_dir, trains="adapters")


def call(worker: TrainWorker, method: str, request: object, reply: type = NoneType) -> object:
    return wire.decode(reply, worker.handle(method, wire.encode(request)))


def step(seed: int) -> TrainStep:
    return TrainStep(make_batch(2, 2, seed=seed), ((np.arange(4),),), STEP)


def write(worker: TrainWorker, folder: Path, *, name: str = "", **changes: object) -> Written:
    return call(worker, "write_weights", WriteRequest(str(folder), "float32", CANARY, name, **changes), Written)


def test_a_rank_trains_saves_goes_on_and_exports(rank: TrainWorker, tmp_path: Path, model_dir: str) -> None:
    call(rank, "restart_optimizer", None)
    trained = call(rank, "train_step", step(1), Trained)
    assert trained.metrics["train/grad_norm"] > 0 and trained.metrics["train/lr"] == STEP.lr and trained.start_s < trained.end_s
    assert 0 < trained.busy_s <= trained.end_s - trained.start_s + 0.1
    call(rank, "save", Folder(str(tmp_path / "saved")))
    before = write(rank, tmp_path / "v1")
    assert len(before.fingerprint) == 32 and len(before.canary_logprobs) == 3 and before.num_bytes > 0
    call(rank, "train_step", step(2), Trained)
    assert call(rank, "load", Folder(str(tmp_path / "saved")), LoadedStep) == LoadedStep(1)
    assert write(rank, tmp_path / "v2") == before
    call(rank, "restart_optimizer", None)
    assert write(rank, tmp_path / "v3") == before
    call(rank, "export", ExportRequest(str(tmp_path / "export"), model_dir, "float32"))
    with torch.inference_mode():
        logits = load_causal_lm(str(tmp_path / "export"), attention="sdpa")(input_ids=torch.tensor([CANARY]), use_cache=False).logits[0]
    expected = logits[:-1].log_softmax(-1).gather(1, torch.tensor(CANARY[1:])[:, None])[:, 0].tolist()
    assert before.canary_logprobs == pytest.approx(expected, abs=1e-5)
    assert load_tokenizer(tmp_path / "export").encode("12>") == load_tokenizer(model_dir).encode("12>")


def test_weights_are_offered_until_the_next_are_written(rank: TrainWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = write(rank, tmp_path / "v1")
    offered = [write(rank, tmp_path / "v3", broadcast=BroadcastRequest("127.0.0.1", 1, 20)) for _ in range(2)]
    assert [replace(one, broadcast="") for one in offered] == [written] * 2
    with pytest.raises((OSError, RuntimeError)):
        broadcast.receive(offered[0].broadcast, device=torch.device("cpu"))
    received = broadcast.receive(offered[1].broadcast, device=torch.device("cpu"))
    on_disk = dict(read_safetensors(tmp_path / "v1"))
    assert received is not None and received.keys() == on_disk.keys() and not (tmp_path / "v3").exists()
    assert all(torch.equal(received[name], tensor) for name, tensor in on_disk.items())
    monkeypatch.setattr(broadcast, "count", lambda: iter([2]))  # a receiver that broke two rounds
    assert broadcast.receive(offered[1].broadcast, device=torch.device("cpu")) is None
    assert (tmp_path / "v3" / "model.safetensors").read_bytes() == (tmp_path / "v1" / "model.safetensors").read_bytes()
    write(rank, tmp_path / "v5")


def test_a_rank_trains_an_adapter_where_the_configuration_asks_for_one(lora_rank: TrainWorker, tmp_path: Path, model_dir: str) -> None:
    call(lora_rank, "train_step", step(1), Trained)
    written = write(lora_rank, tmp_path / "v1")
    assert written.fingerprint == read_adapter(tmp_path / "v1").fingerprint() and read_adapter(tmp_path / "v1").rank == 2
    call(lora_rank, "export", ExportRequest(str(tmp_path / "export"), model_dir, "float32"))
    exported, base = (dict(read_safetensors(folder)) for folder in (tmp_path / "export", model_dir))
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in base if not (exported[name] == base[name]).all()} == {"q_proj"}


def test_a_rank_trains_many_adapters_and_goes_on_from_folders(rank_of_many: TrainWorker, tmp_path: Path) -> None:
    rank, both = rank_of_many, ("alice", "bob")
    for seed, name in enumerate(both):
        call(rank, "add", NewAdapter(name, 4, 8.0, seed, ("attn", "mlp")))
    for batch in (of_adapters(make_batch(2, 1), both), of_adapters(make_datums(4, dense=True), ("alice", "bob", "bob", "alice"))):
        learnt, scored = (call(rank, method, batch, Scores) for method in ("forward_backward", "forward"))
        assert np.array_equal(learnt.logprobs, scored.logprobs) and np.array_equal(learnt.losses, scored.losses)
        assert learnt.logprobs.shape == (batch.num_targets,) and learnt.losses.shape == (len(batch),)
    call(rank, "discard", AdapterNames(("bob",)))
    stepped = call(rank, "optim_step", OptimStep(dict.fromkeys(both, STEP)), Stepped)
    assert stepped.grad_norms["alice"] > 0 == stepped.grad_norms["bob"] and stepped.steps == {"alice": 1, "bob": 1}
    written = write(rank, tmp_path / "v0", name="alice")
    assert written.fingerprint == read_adapter(tmp_path / "v0").fingerprint() and written.num_bytes > 0
    call(rank, "add", NewAdapter("carol", 4, 8.0, 7, (), str(tmp_path / "v0")))
    assert write(rank, tmp_path / "carol", name="carol") == written
    call(rank, "save", Folder(str(tmp_path / "saved"), "alice"))
    assert call(rank, "load", Folder(str(tmp_path / "saved"), "eve", optimizer=False), LoadedStep).step == 0
    assert call(rank, "load", Folder(str(tmp_path / "saved"), "dave"), LoadedStep).step == 1
    assert write(rank, tmp_path / "dave", name="dave").fingerprint == written.fingerprint
    call(rank, "remove", AdapterNames(("alice",)))
    with pytest.raises(ConfigError, match="there is no adapter 'alice'"):
        write(rank, tmp_path / "v1", name="alice")


def test_a_model_is_built_beside_its_tokenizer(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    request = [
        BuildRequest(str(tmp_path / name), TINY.model_dump_json(), tokenizer.vocab_size, tokenizer.eos_token_id, None, seed)
        for name, seed in (("a", 3), ("b", 3), ("c", 4))]
    for each in request:
        call(TrainWorker(), "build_model", each, Nothing)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert weights[0] == weights[1] != weights[2]


def test_only_public_methods_of_a_worker_or_its_trainer_can_be_called(rank: TrainWorker) -> None:
    for name in ("give_up", "beat", "handle", "_update", "nothing", "groups"):
        with pytest.raises(LookupError, match="has no method"):
            rank.handle(name, b"")


def test_a_rank_that_has_not_joined_says_so() -> None:
    with pytest.raises(AssertionError, match="joins before it loads"):
        TrainWorker().handle("load_model", wire.encode(Nothing()))
    with pytest.raises(LookupError, match="TrainWorker has no method 'forward'"):
        TrainWorker().handle("forward", wire.encode(Batch.concatenate([make_batch(1, 1)])))
