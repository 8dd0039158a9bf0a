"""Every message of tenants comes back as it went."""

import dataclasses
import inspect

import numpy as np
import pytest

from datum_samples import make_datums
from offbeat.algorithms.adam import AdamParams
from offbeat.cluster import tenant_messages
from offbeat.cluster.tenant_messages import (
    BaseCanary,
    BaseCanaryScored,
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
from offbeat.data import wire
from offbeat.telemetry.tracker import StatsPart
from train_samples import make_batch

EXAMPLES = [
    TenantStart("alice", 8, 16.0, 1, ("attn", "mlp"), "folder"), TenantName("alice"), TenantsUpdate({"alice": AdamParams(lr=1e-3)}),
    TenantsUpdated({"alice": 0.5}, {"alice": 3}), TenantsDiscard(("alice", "bob")), TenantFolder("alice", "folder"),
    TenantRestore("alice", "folder", optimizer=False), TenantRestored(3),
    TenantPublish("alice", "folder", (1, 2)), TenantPublished("abc", (-1.5, -2.0), 512), BaseCanary((1, 2)), BaseCanaryScored((-1.5,))]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_equal(message: object) -> None:
    assert wire.decode(type(message), wire.encode(message)) == message


def test_arrays_come_back() -> None:
    shard = TenantShard(make_batch(2, 1), ("alice", "bob"), "sft", "{}", learn=True)
    back = wire.decode(TenantShard, wire.encode(shard))
    np.testing.assert_array_equal(back.batch.tokens, shard.batch.tokens)
    assert (back.tenants, back.objective, back.learn) == (("alice", "bob"), "sft", True)
    datums = DatumShard(make_datums(3), ("alice", "bob", "alice"), learn=False)
    back = wire.decode(DatumShard, wire.encode(datums))
    np.testing.assert_array_equal(back.batch.targets, datums.batch.targets)
    assert (back.batch.losses, back.tenants, back.learn) == (datums.batch.losses, datums.tenants, False)
    part = StatsPart(sums={"train/tokens": 3.0}, means={"train/entropy": (1.5, 3.0)}, maxima={})
    passed = wire.decode(TenantPass, wire.encode(TenantPass(np.array([0.0, -1.5], np.float32), {"alice": part})))
    assert passed.logprobs.tolist() == [0.0, -1.5] and passed.stats["alice"].sums == {"train/tokens": 3.0}


def test_every_message_is_tested_and_frozen() -> None:
    own = {cls for _, cls in inspect.getmembers(tenant_messages, dataclasses.is_dataclass) if cls.__module__ == tenant_messages.__name__}
    assert own == {type(example) for example in EXAMPLES} | {TenantShard, TenantPass, DatumShard}
    assert all(cls.__dataclass_params__.frozen for cls in own)
