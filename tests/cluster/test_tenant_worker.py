"""A rank of tenants, as a service in this process, alone in its group."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from datum_samples import make_datums
from offbeat.algorithms.adam import AdamParams
from offbeat.cluster.group import Nothing
from offbeat.cluster.messages import JoinRequest, StoreAddress
from offbeat.cluster.tenant_messages import (
    DatumShard,
    TenantFolder,
    TenantName,
    TenantPass,
    TenantPublish,
    TenantPublished,
    TenantRestore,
    TenantRestored,
    TenantsDiscard,
    TenantShard,
    TenantStart,
    TenantsUpdate,
    TenantsUpdated,
)
from offbeat.cluster.tenant_worker import TenantWorker
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.data import wire
from offbeat.dist.mesh import leave
from offbeat.errors import ConfigError
from offbeat.model.peft_io import read_adapter
from offbeat.trainer.adapter_types import DatumPass
from small_run import small_config
from train_samples import make_batch

CANARY = (5, 6, 7, 8)
MODULES = ("attn", "mlp")


@pytest.fixture
def rank(model_dir: str, tmp_path: Path) -> Iterator[TenantWorker]:
    worker = TenantWorker()
    store = call(worker, "host_store", StoreAddress("127.0.0.1", 0), StoreAddress)
    config = small_config(tmp_path, model_dir, model__lora__rank="4").model_dump_json()
    call(worker, "join", JoinRequest(0, 1, store, config, model_dir), Nothing)
    call(worker, "load_model", Nothing(), Nothing)
    yield worker
    leave()


def call(worker: TenantWorker, method: str, request: object, reply: type) -> object:
    return wire.decode(reply, worker.handle(method, wire.encode(request)))


def shard(*, learn: bool) -> TenantShard:
    batch = make_batch(2, 1)
    return TenantShard(batch, ("alice", "bob"), "sft", AlgorithmConfig().model_dump_json(), learn)


def test_a_rank_trains_publishes_saves_and_goes_on_from_a_folder(rank: TenantWorker, tmp_path: Path) -> None:
    for seed, name in enumerate(("alice", "bob")):
        call(rank, "add", TenantStart(name, 4, 8.0, seed, MODULES), Nothing)
    learnt = call(rank, "run", shard(learn=True), TenantPass)
    scored = call(rank, "run", shard(learn=False), TenantPass)
    np.testing.assert_allclose(learnt.logprobs, scored.logprobs, atol=1e-6)
    assert learnt.stats.keys() == {"alice", "bob"} and not scored.stats
    call(rank, "discard", TenantsDiscard(("bob",)), Nothing)
    updated = call(rank, "update", TenantsUpdate(dict.fromkeys(("alice", "bob"), AdamParams(lr=1e-2))), TenantsUpdated)
    assert updated.grad_norms["alice"] > 0 == updated.grad_norms["bob"] and updated.steps == {"alice": 1, "bob": 1}
    published = call(rank, "publish", TenantPublish("alice", str(tmp_path / "v0"), CANARY), TenantPublished)
    assert published.fingerprint == read_adapter(tmp_path / "v0").fingerprint() and published.num_bytes > 0
    call(rank, "add", TenantStart("carol", 4, 8.0, 7, MODULES, str(tmp_path / "v0")), Nothing)
    again = call(rank, "publish", TenantPublish("carol", str(tmp_path / "carol"), CANARY), TenantPublished)
    assert (again.fingerprint, again.canary_logprobs) == (published.fingerprint, published.canary_logprobs)
    call(rank, "save", TenantFolder("alice", str(tmp_path / "saved")), Nothing)
    assert call(rank, "restore", TenantRestore("eve", str(tmp_path / "saved"), optimizer=False), TenantRestored).step == 0
    assert call(rank, "restore", TenantRestore("dave", str(tmp_path / "saved"), optimizer=True), TenantRestored).step == 1
    same = call(rank, "publish", TenantPublish("dave", str(tmp_path / "dave"), CANARY), TenantPublished)
    assert same.fingerprint == published.fingerprint
    call(rank, "remove", TenantName("alice"), Nothing)
    with pytest.raises(ConfigError, match="there is no adapter 'alice'"):
        call(rank, "publish", TenantPublish("alice", str(tmp_path / "v1"), CANARY), TenantPublished)


def test_a_rank_scores_datums_and_learns_from_them(rank: TenantWorker) -> None:
    for seed, name in enumerate(("alice", "bob")):
        call(rank, "add", TenantStart(name, 4, 8.0, seed, MODULES), Nothing)
    batch = make_datums(4, dense=True)
    names = ("alice", "bob", "bob", "alice")
    scored = call(rank, "run_datums", DatumShard(batch, names, learn=False), DatumPass)
    norms = call(rank, "update", TenantsUpdate({"alice": AdamParams(lr=1e-2)}), TenantsUpdated).grad_norms
    learnt = call(rank, "run_datums", DatumShard(batch, names, learn=True), DatumPass)
    assert norms == {"alice": 0.0} and np.array_equal(learnt.logprobs, scored.logprobs) and np.array_equal(learnt.losses, scored.losses)
    assert learnt.logprobs.shape == (batch.num_targets,) and learnt.losses.shape == (4,)
    assert call(rank, "update", TenantsUpdate({"alice": AdamParams(lr=1e-2)}), TenantsUpdated).grad_norms["alice"] > 0
