"""A server, a trainer or an engine that is killed: what was acknowledged is there afterwards, and what was not ends with an error."""

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import tinker
from server import Server
from tinker import types
from work import DEADLINE_S, REFUSED, datum, logprobs, random_tokens, ready, step, train_client

PROMPT = types.ModelInput.from_ints([10, 20, 30])


@pytest.fixture
def own_server(model_dir: Path, tmp_path: Path) -> Iterator[Server]:
    with Server(model_dir, tmp_path) as running:
        yield running


@pytest.fixture
def data() -> list[types.Datum]:
    return [datum(random_tokens(np.random.default_rng(0), 20))]


def sample(sampler: tinker.SamplingClient) -> list[int]:
    return sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=8, seed=3, stop=[])).result(DEADLINE_S).sequences[0].tokens


def workers(server: Server, kind: str) -> list[psutil.Process]:
    return [child for child in server.children() if any(kind in part for part in child.cmdline())]


def test_a_killed_server_comes_back_with_all_that_it_acknowledged(own_server: Server, data: list[types.Datum]) -> None:
    service = tinker.ServiceClient(base_url=own_server.url, api_key="tml-alice")
    client = train_client(service)
    step(client, data)
    path = client.save_state("kept").result(DEADLINE_S).path
    sampler = ready(client.save_weights_and_get_sampling_client())
    named = ready(service.create_sampling_client(model_path=client.save_weights_for_sampler("named").result(DEADLINE_S).path))
    tokens, kept = sample(sampler), logprobs(client, data)
    children = own_server.children()
    own_server.kill()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive, f"left behind: {alive}"
    own_server.start()
    assert sample(sampler) == tokens == sample(named)
    assert all(np.array_equal(one, other) for one, other in zip(kept, logprobs(client, data), strict=True)), "nothing was lost"
    resumed = ready(service.create_training_client_from_state_with_optimizer(path))
    assert step(resumed, data) == step(client, data)


def test_steps_that_were_not_saved_are_lost_with_an_error_and_not_in_silence(own_server: Server, data: list[types.Datum]) -> None:
    service = tinker.ServiceClient(base_url=own_server.url, api_key="tml-alice")
    client = train_client(service)
    step(client, data)
    client.save_state("kept").result(DEADLINE_S)
    kept = logprobs(client, data)
    step(client, data)
    own_server.kill()
    own_server.start()
    with pytest.raises(REFUSED, match="checkpoint"):
        logprobs(client, data)
    assert all(np.array_equal(one, other) for one, other in zip(kept, logprobs(client, data), strict=True))


def test_a_stopped_server_loses_nothing(own_server: Server, data: list[types.Datum]) -> None:
    service = tinker.ServiceClient(base_url=own_server.url, api_key="tml-alice")
    client = train_client(service)
    step(client, data)
    now = logprobs(client, data)
    own_server.stop()
    own_server.start()
    assert all(np.array_equal(one, other) for one, other in zip(now, logprobs(client, data), strict=True))


def test_a_killed_trainer_and_a_killed_engine_are_replaced(own_server: Server, data: list[types.Datum]) -> None:
    service = tinker.ServiceClient(base_url=own_server.url, api_key="tml-alice")
    client = train_client(service)
    step(client, data)
    client.save_state("kept").result(DEADLINE_S)
    sampler = ready(client.save_weights_and_get_sampling_client())
    kept, tokens = logprobs(client, data), sample(sampler)
    for child in own_server.children():
        if child.is_running() and not child.children():
            child.send_signal(signal.SIGKILL)
    found = None
    for _ in range(5):
        try:
            found = logprobs(client, data)
            break
        except tinker.TinkerError:
            continue
    assert found is not None
    assert all(np.array_equal(one, other) for one, other in zip(kept, found, strict=True))
    assert sample(sampler) == tokens
