"""Names of adapters become paths and model names, so they are checked."""

import pytest

from offbeat.config.model import LoraConfig
from offbeat.config.train import TrainConfig
from offbeat.errors import ConfigError
from offbeat.weights.adapters import (
    adapter_name,
    check_adapter,
    check_many,
    check_new,
    find_adapter,
    is_policy,
    policy_adapter,
    split_adapter_name,
)
from offbeat.weights.protocol import Manifest


def test_a_name_is_the_adapter_and_the_version() -> None:
    assert adapter_name("alice-1.a_b", 12) == "alice-1.a_b@12"
    assert split_adapter_name("alice-1.a_b@12") == ("alice-1.a_b", 12)
    assert Manifest(3, "/x", "f", (1, 2, 1), (-0.5,), adapter="bob").name == "bob@3"


@pytest.mark.parametrize("name", ["", "a/b", "../up", ".hidden", "a@b", "a b", "x" * 101, "ü"])
def test_an_adapter_that_could_leave_its_folder_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="an adapter's name is"):
        check_adapter(name)


@pytest.mark.parametrize("name", ["alice", "alice@", "@3", "alice@-1", "alice@x", "a/b@3", "alice@\u0663"])
def test_what_is_no_adapters_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        split_adapter_name(name)


def test_names_of_the_policy_are_told_from_other_adapters() -> None:
    assert policy_adapter("3fa9c1") == "policy.3fa9c1"
    assert all(map(is_policy, ("policy@3", "policy.3fa9c1@12"))) and not any(map(is_policy, ("policy", "policymaker@3", "alice@3")))


def test_a_new_adapter_has_a_name_of_its_own_and_a_known_one_is_found() -> None:
    check_new("bob", {"alice": 1})
    assert find_adapter("alice", {"alice": 1}) == 1
    with pytest.raises(ConfigError, match="there is an adapter 'alice' already; choose another name"):
        check_new("alice", {"alice": 1})
    with pytest.raises(ConfigError, match="there is no adapter 'bob', only alice; add it first"):
        find_adapter("bob", {"alice": 1})


@pytest.mark.parametrize(("lora", "train", "ranks", "sentence"), [
    ({}, {}, (1, 1, 1), "model.lora.rank must be at least 1 to train many adapters, got 0"),
    ({"rank": 4, "dropout": 0.1}, {}, (1, 1, 1), "model.lora.dropout must be 0 to train many adapters, got 0.1"),
    ({"rank": 4}, {"router_aux_loss_coefficient": 0.5}, (1, 1, 1), "train.router_aux_loss_coefficient must be 0 .*, got 0.5; the loss"),
    ({"rank": 4}, {}, (2, 1, 1), "train.parallel.shard must be 1 to train many adapters, got 2; each rank .* the whole model"),
    ({"rank": 4}, {}, (1, 2, 1), "train.parallel.tp must be 1 to train many adapters, got 2"),
    ({"rank": 4}, {}, (1, 1, 2), "train.parallel.ep must be 1 to train many adapters, got 2"),
])
def test_many_adapters_train_without_dropout_on_whole_models(lora, train, ranks, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_many(LoraConfig(**lora), TrainConfig(**train), shard=ranks[0], tp=ranks[1], ep=ranks[2])
