"""Experts that vLLM's routers have chosen, as its servers send them: read, compared with the embedded engine's, and replayed in training.

vLLM 0.32 refuses `--enable-return-routed-experts` on CPUs, so what notes and encodes the experts is run by itself (support/vllm_routes.py).
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from contract import CANARY, SUPPORT, WITH_VLLM, build_expert_model, embedded, run_in_vllm
from offbeat.config.model import ModelConfig
from offbeat.config.train import TrainConfig
from offbeat.data.batch import Batch
from offbeat.data.packing import pack_row
from offbeat.inference.client import EngineClient
from offbeat.inference.dialects.completions import read_samples
from offbeat.inference.sampling import Sample, Sampling
from offbeat.model.logprobs import token_logprobs
from offbeat.trainer.policy import let_replay, load_policy

pytestmark = [pytest.mark.timeout(400), pytest.mark.skipif(not WITH_VLLM, reason="make test-vllm runs it")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_expert_model(tmp_path_factory.mktemp("routes") / "model", seed=5, num_experts=8)


@pytest.fixture(scope="module")
def told(folder: str) -> dict[str, object]:
    return json.loads(run_in_vllm(str(SUPPORT / "vllm_routes.py"), folder, json.dumps(CANARY))[-1])


def routes_of(told: dict[str, object]) -> np.ndarray:
    """What is read of an answer with these experts."""
    choice = {
        "token_ids": [1], "logprobs": {"token_logprobs": [-1.0]}, "text": "", "finish_reason": "length",
        "routed_experts": told["routed_experts"]}
    (sample,) = read_samples(json.dumps({"choices": [choice]}).encode(), adapter="", num_top=0, unversioned=1)
    assert sample.routes is not None
    return sample.routes


def test_vllm_chooses_the_experts_that_the_embedded_engine_chooses(folder: str, told: dict[str, object]) -> None:
    async def body(client: EngineClient) -> Sample:
        (sample,) = await client.generate(CANARY, Sampling(1, routes=True), n=1, timeout_s=60)
        return sample

    with embedded(folder) as engine:
        sample = engine.run(body)
    assert sample.routes is not None and np.array_equal(routes_of(told), sample.routes)
    assert len(np.unique(sample.routes)) > 2


@torch.no_grad()
def test_the_trainer_agrees_with_vllm_on_every_token_when_it_replays_its_experts(folder: str, told: dict[str, object]) -> None:
    policy = let_replay(load_policy(folder, config=TrainConfig()), ModelConfig(route_replay="rollout"))
    routes = routes_of(told)

    def trained(given: np.ndarray) -> list[float]:
        batch = Batch.of_next_tokens(
            np.array(CANARY, np.int32), np.arange(len(CANARY)) > 0, lengths=[len(CANARY)], columns={}, losses=())
        return token_logprobs(policy, pack_row(replace(batch, routes=given), share_prefix=False)).tolist()

    assert trained(routes) == pytest.approx(told["logprobs"], abs=4e-6)
    assert max(abs(np.subtract(trained((routes + 1) % 8), told["logprobs"]))) > 0.1


def test_vllm_on_a_cpu_refuses_to_return_experts(folder: str) -> None:
    program = """
import sys
from vllm import LLM

try:
    LLM(sys.argv[1], enable_return_routed_experts=True)
    print("it returns them")
except ValueError as exc:
    print(str(exc).replace(chr(10), " "))
"""
    assert "AuxOutput Connector requires Model Runner V2" in run_in_vllm("-c", program, folder)[-1]
