"""Whatever one owner sends, others go on beside it: seen by what is done of that owner's work before theirs is.

Floods are sent at once, because a server would work most of them off meanwhile where a busy machine holds up who sends one after the other.
"""

import asyncio
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from http_serving import Answer, Client
from protocol import PROTOBUF, base_sampler, datum, finished, model_of, pass_body, sample_body, session_of
from sdk.server import MODEL_NAME, Server
from support.probing import Probe, run_probe

MALLORY, ALICE = "tml-mallory", "tml-alice"
TURN = 4096
"""Tokens of a turn on this server: many turns then take little work."""
SOON_S = 30.0
"""On a machine that does ten other things; what counts is how much of the others' work was done before."""


@pytest.fixture(scope="module")
def probe(served_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probe]:
    """Runs a body that is given a client of a server with short turns."""
    with Server(served_model, tmp_path_factory.mktemp("fair"), "--serve.max_tokens_per_pass", str(TURN)) as running:
        yield lambda body: run_probe(running, body)


def later(client: Client, ack: Answer) -> "asyncio.Task[Any]":
    """What a request comes to, waited for beside others."""
    return asyncio.create_task(finished(client, ack))


async def soon(done: Awaitable[Any]) -> Any:
    """The neighbour's, which must not take long."""
    async with asyncio.timeout(SOON_S):
        return await done


async def learn(client: Client, model: str, seq: int, data: list[dict[str, Any]], *, forward_only: bool = False) -> Answer:
    return await client.post("forward_backward", pass_body(model, seq, data, forward_only=forward_only), headers=PROTOBUF)


async def step(client: Client, model: str, seq: int) -> Answer:
    return await client.post("optim_step", {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 1e-3}})


def test_one_token_of_a_neighbour_waits_for_none_of_512_samples(probe: Probe) -> None:
    async def body(client: Client) -> None:
        mallory, alice = client.of(MALLORY), client.of(ALICE)
        theirs, ours = [await base_sampler(who, base_model=MODEL_NAME) for who in (mallory, alice)]
        flood = later(mallory, await mallory.post("asample", sample_body(theirs, 1, [5] * 20, num_samples=512, max_tokens=150, stop=[])))
        await asyncio.sleep(0.3)
        answer = await soon(finished(alice, await alice.post("asample", sample_body(ours, 1, [5, 6], max_tokens=1))))
        assert len(answer["sequences"]) == 1 and not flood.done()
        assert len((await flood)["sequences"]) == 512

    probe(body)


def test_a_neighbours_step_is_done_beside_a_flood_of_passes(probe: Probe) -> None:
    async def body(client: Client) -> None:
        mallory, alice = client.of(MALLORY), client.of(ALICE)
        theirs = await model_of(mallory, await session_of(mallory), base_model=MODEL_NAME)
        ours = await model_of(alice, await session_of(alice), base_model=MODEL_NAME)
        sent = await asyncio.gather(*(learn(mallory, theirs, seq, [datum([5] * 201)] * 10) for seq in range(1, 21)))
        flood = [later(mallory, ack) for ack in sent]
        acks = [await learn(alice, ours, 1, [datum([5, 6, 7])]), await step(alice, ours, 2)]
        for ack in acks:
            assert "metrics" in await soon(finished(alice, ack))
        assert sum(task.done() for task in flood) <= 10, "it takes ten turns"
        await asyncio.gather(*flood)

    probe(body)


def test_a_pass_over_many_targets_at_few_positions_holds_nobody_up(probe: Probe) -> None:
    async def body(client: Client) -> None:
        mallory, alice = client.of(MALLORY), client.of(ALICE)
        theirs = await model_of(mallory, await session_of(mallory), base_model=MODEL_NAME)
        ours = await model_of(alice, await session_of(alice), base_model=MODEL_NAME)
        dense = {"dense": np.full((8, 1024), 5, "<i8").tobytes(), "dtype": 2, "shape": [8, 1024]}
        wide = [datum([5] * 9) | {"loss_fn_inputs": {"target_tokens": dense}}] * 32  # 256 tokens, and 16 turns of cells
        flood = later(mallory, await learn(mallory, theirs, 1, wide, forward_only=True))
        queued = (await client.ask("GET", "/status.json")).json["status"]["training"]["tokens"]
        assert queued == 32 * 8 * 1024 // 4, "a quarter of the cells, and not 256 tokens"
        assert "metrics" in await soon(finished(alice, await learn(alice, ours, 1, [datum([5, 6, 7])], forward_only=True)))
        assert not flood.done()
        assert "metrics" in await flood

    probe(body)


def test_a_neighbours_passes_are_done_beside_a_flood_of_savings(probe: Probe) -> None:
    async def body(client: Client) -> None:
        mallory, alice = client.of(MALLORY), client.of(ALICE)
        theirs = await model_of(mallory, await session_of(mallory), base_model=MODEL_NAME)
        ours = await model_of(alice, await session_of(alice), base_model=MODEL_NAME)
        saves = await asyncio.gather(*(
            mallory.post("save_weights", {"model_id": theirs, "seq_id": seq, "path": f"s{seq}"}) for seq in range(1, 101)))
        flood = [later(mallory, ack) for ack in saves]
        acks = []
        for seq in range(1, 9, 2):
            acks += [await learn(alice, ours, seq, [datum([5, 6, 7])]), await step(alice, ours, seq + 1)]
        for ack in acks:
            assert "metrics" in await soon(finished(alice, ack))
        assert sum(task.done() for task in flood) <= 60, "the rest waits for its turn"
        await asyncio.gather(*flood)

    probe(body)
