"""Whole weights into a model with experts, whose packing for the kernels of CPUs vLLM leaves out when it loads them again.

Drills have vLLM compute with wrong experts (`vllm_faults`). Each version is one step of Adam at a learning rate of 1e-6 from the last, from
weights that lie anywhere between two numbers of bfloat16, as after many steps; in bfloat16 no canary can tell such versions apart.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from contract import CANARY, WITH_VLLM, Engine, Reference, build_expert_model, vllm_group
from drilled_engines import OTHER_WEIGHTS, SPLIT, Drilled, Server, Versions, faulty_servers
from offbeat.errors import EngineError, PublishError
from offbeat.inference.client import EngineClient
from offbeat.inference.dialects.vllm import VllmDialect
from offbeat.inference.sampling import Sample, Sampling
from offbeat.model.hf_io import read_safetensors
from offbeat.weights.proof import BY_WEIGHTS, ProofJudge
from offbeat.weights.protocol import Manifest, Proof
from support.weight_faults import EXPERTS, spoil

pytestmark = [pytest.mark.timeout(400), pytest.mark.skipif(not WITH_VLLM, reason="make test-vllm runs it")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two versions of the weights."""
    root = tmp_path_factory.mktemp("experts")
    return [build_expert_model(root / str(seed), seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def engine(folders: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with vllm_group(tmp_path_factory.mktemp("vllm"), (folders[0], {})) as ((url, key),):
        yield Engine("vllm", url, VllmDialect(model=folders[0], whole_weights=True, lora=False), folders[0], folders[0], key=key)


def test_experts_are_those_of_the_version_and_read_back(engine: Engine, folders: list[str]) -> None:
    async def body(client: EngineClient) -> tuple[Sample, Proof]:
        (sample,) = await client.generate(CANARY, Sampling(20), n=1, timeout_s=60)
        return sample, await client.prove(CANARY, timeout_s=60)

    for folder in (folders[1], folders[0], folders[1]):
        engine.serve(folder)
        (sample, proof), reference = engine.run(body), Reference(folder)
        assert set(sample.versions) == {engine.version} == {proof.version}
        assert sample.logprobs == pytest.approx(reference.logprobs(CANARY, sample.token_ids), abs=1e-4)
        assert proof.canary_logprobs == pytest.approx(reference.logprobs(CANARY[:1], CANARY[1:]), abs=1e-4)
        assert proof.live


SERVERS = [("float32", ()), ("bfloat16", ())]
DIVIDED = ("float32", SPLIT)
"""Each of two workers has a part of every expert. Whole experts on one of them alone are beyond vLLM's kernel for CPUs."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with weights as small as those of real ones, of which a step changes more in bfloat16."""
    return build_expert_model(tmp_path_factory.mktemp("small") / "model", seed=3, std=0.02, num_experts=8)


@pytest.fixture(scope="module")
def servers(small: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Server, tuple[str, Path]]]:
    with faulty_servers(small, tmp_path_factory.mktemp("faulty"), *SERVERS) as started:
        yield started


@pytest.fixture(scope="module")
def divided(small: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Server, tuple[str, Path]]]:
    with faulty_servers(small, tmp_path_factory.mktemp("divided"), DIVIDED) as started:
        yield started


@pytest.fixture(scope="module")
def drills(small: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Callable[[Server], Drilled]]:
    """Each server's drills, which go on from the version that it has."""
    made: dict[Server, Drilled] = {}

    def drill(server: Server) -> Drilled:
        if server not in made:
            url, path = request.getfixturevalue("servers" if server in SERVERS else "divided")[server]
            versions = Versions(small, tmp_path_factory.mktemp("versions"), dtype=server[0], lr=1e-6)
            versions.scatter()
            engine = Engine("vllm", url, VllmDialect(model=small, whole_weights=True, lora=False), small, small)

            def fail(fault: str = "") -> None:
                path.write_text(json.dumps({"fault": fault}))

            made[server] = Drilled(engine, versions, ProofJudge.of(0.0, server[0]), fail)
        return made[server]

    yield drill


@pytest.mark.parametrize("server", SERVERS, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("fault", [*EXPERTS, "weights gone", "old weights come back"])
def test_a_spoilt_mixture_is_refused_at_its_first_publish(drills: Callable[[Server], Drilled], server: Server, fault: str) -> None:
    refuse_once_and_heal(drills(server), fault)


@pytest.mark.whole_run
@pytest.mark.parametrize("fault", ["one expert old", "two experts swapped", "router old", "half of a fused tensor old"])
def test_a_mixture_that_is_spoilt_in_one_worker_of_two_is_refused_at_its_first_publish(
    drills: Callable[[Server], Drilled], fault: str,
) -> None:
    refuse_once_and_heal(drills(DIVIDED), fault)


def refuse_once_and_heal(drilled: Drilled, fault: str) -> None:
    async def body(client: EngineClient) -> None:
        publisher, judge = drilled.publisher(client), ProofJudge.of(0.0, "bfloat16")
        drilled.spoil()
        await drilled.publish(publisher)
        before = drilled.versions.folder
        if fault == "weights gone":
            await client.sleep(keep_weights=False, timeout_s=60)
        drilled.spoil(fault=fault)
        with pytest.raises(PublishError, match=OTHER_WEIGHTS["vllm"]):
            await drilled.publish(publisher)
        with pytest.raises(EngineError, match="nothing can be sampled before another one is switched to"):
            await client.generate(CANARY, Sampling(1), n=1, timeout_s=60)
        if fault in EXPERTS:
            old, new = dict(read_safetensors(before)), dict(read_safetensors(drilled.versions.folder))
            assert any(not torch.equal(wrong, new[name]) for name, wrong in spoil(fault, new, old).items()), "nothing was wrong"
        drilled.spoil()
        assert await publisher.bring(client) == drilled.engine.version
        for _ in range(3):
            proof = await client.prove(CANARY, timeout_s=60)
            expected = tuple(Reference(drilled.versions.folder).logprobs(CANARY[:1], CANARY[1:]))
            manifest = Manifest(proof.version, "", proof.fingerprint or "", CANARY, expected)
            assert proof.live and judge.judge("engine 0", manifest, proof).means == BY_WEIGHTS

    drilled.engine.run(body)
