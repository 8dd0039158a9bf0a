"""Checkpoints through the SDK: save, load, resume, list, share, delete."""

import numpy as np
import pytest
import tinker
from server import MODEL_NAME
from work import DEADLINE_S, RANK, REFUSED, datum, logprobs, random_tokens, ready, step, train_client

from conftest import Clients


@pytest.fixture
def data() -> list:
    rng = np.random.default_rng(0)
    return [datum(random_tokens(rng, 20)) for _ in range(3)]


def test_a_resumed_model_has_the_same_next_losses(connect: Clients, data: list) -> None:
    service = connect()
    client = train_client(service)
    for _ in range(3):
        step(client, data, weight_decay=0.1)
    path = client.save_state("three").result(DEADLINE_S).path
    expected = [step(client, data, weight_decay=0.1) for _ in range(3)]
    resumed = ready(service.create_training_client_from_state_with_optimizer(path))
    assert [step(resumed, data, weight_decay=0.1) for _ in range(3)] == pytest.approx(expected, rel=1e-6)
    with pytest.raises(REFUSED, match="only as its first"):
        client.load_state_with_optimizer(path).result(DEADLINE_S)
    client = train_client(service)
    client.load_state_with_optimizer(path).result(DEADLINE_S)
    assert [step(client, data, weight_decay=0.1) for _ in range(3)] == pytest.approx(expected, rel=1e-6)
    fresh = ready(service.create_training_client_from_state(path))
    losses = [step(fresh, data) for _ in range(2)]
    assert losses[0] == pytest.approx(expected[0], rel=1e-6)
    assert losses[1] != pytest.approx(expected[1], rel=1e-6), "the moments should have been forgotten"


def test_what_is_saved_is_listed_and_described(connect: Clients, data: list) -> None:
    service = connect("lister")
    client = train_client(service)
    step(client, data)
    saved = client.save_state("first").result(DEADLINE_S).path
    sampler = client.save_weights_for_sampler("first").result(DEADLINE_S).path
    rest = service.create_rest_client()
    run = client.get_info().model_id if hasattr(client.get_info(), "model_id") else client.model_id
    found = rest.list_checkpoints(run).result(DEADLINE_S).checkpoints
    assert {each.tinker_path for each in found} == {saved, sampler}
    assert {each.checkpoint_type for each in found} == {"training", "sampler"}
    assert all(each.size_bytes > 0 for each in found)
    described = rest.get_training_run(run).result(DEADLINE_S)
    assert (described.base_model, described.is_lora, described.lora_rank) == (MODEL_NAME, True, RANK)
    info = rest.get_weights_info_by_tinker_path(saved).result(DEADLINE_S)
    assert (info.base_model, info.lora_rank) == (MODEL_NAME, RANK)
    assert [each.training_run_id for each in rest.list_training_runs().result(DEADLINE_S).training_runs] == [run]
    rest.delete_checkpoint_from_tinker_path(saved).result(DEADLINE_S)
    assert [each.tinker_path for each in rest.list_checkpoints(run).result(DEADLINE_S).checkpoints] == [sampler]
    with pytest.raises(REFUSED, match="first"):
        ready(service.create_training_client_from_state(saved))


def test_nobody_sees_anothers_unless_it_is_published(connect: Clients, data: list) -> None:
    alice, bob = connect("alice"), connect("bob")
    client = train_client(alice)
    step(client, data)
    path = client.save_state("mine").result(DEADLINE_S).path
    sampler = client.save_weights_for_sampler("mine").result(DEADLINE_S).path
    rest = bob.create_rest_client()
    run = path.split("/")[2]
    for attempt in (
        lambda: rest.get_training_run(run).result(DEADLINE_S), lambda: rest.list_checkpoints(run).result(DEADLINE_S),
        lambda: rest.delete_checkpoint_from_tinker_path(path).result(DEADLINE_S),
        lambda: ready(bob.create_training_client_from_state(path)),
        lambda: ready(bob.create_sampling_client(model_path=sampler))):
        with pytest.raises(REFUSED) as caught:
            attempt()
        assert "404" in str(caught.value) or "there is no" in str(caught.value), caught.value
    alice.create_rest_client().publish_checkpoint_from_tinker_path(path).result(DEADLINE_S)
    shared = ready(bob.create_training_client_from_state(path))
    assert np.array_equal(logprobs(shared, data)[0], logprobs(client, data)[0])
    with pytest.raises(tinker.APIStatusError):
        rest.delete_checkpoint_from_tinker_path(path).result(DEADLINE_S)
    assert path in {each.tinker_path for each in alice.create_rest_client().list_checkpoints(run).result(DEADLINE_S).checkpoints}


def test_a_name_is_taken_unless_it_may_be_overwritten(connect: Clients, data: list) -> None:
    client = train_client(connect())
    client.save_state("same").result(DEADLINE_S)
    step(client, data)
    with pytest.raises(REFUSED, match="same"):
        client.save_state("same").result(DEADLINE_S)
    path = client.save_state("same", overwrite=True).result(DEADLINE_S).path
    now = logprobs(client, data)
    step(client, data)
    other = train_client(connect())
    other.load_state(path).result(DEADLINE_S)
    assert all(np.array_equal(one, other) for one, other in zip(now, logprobs(other, data), strict=True))
