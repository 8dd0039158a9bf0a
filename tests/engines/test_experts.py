"""Whole weights into a model with experts, whose packing for the kernels of CPUs vLLM leaves out when it loads them again."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from contract import CANARY, SIZES, WITH_VLLM, Engine, Reference, vllm_group
from offbeat.data.tokenizer import character_tokenizer
from offbeat.inference.client import EngineClient
from offbeat.inference.dialects.vllm import VllmDialect
from offbeat.inference.sampling import Sample, Sampling
from offbeat.weights.protocol import Proof

pytestmark = [pytest.mark.timeout(400), pytest.mark.skipif(not WITH_VLLM, reason="make test-vllm runs it")]


def build_expert_model(folder: Path, *, seed: int) -> str:
    tokenizer = character_tokenizer()
    tokenizer.save(folder)
    config = Qwen3MoeConfig(
        vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True, **SIZES)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two versions of the weights."""
    root = tmp_path_factory.mktemp("experts")
    return [build_expert_model(root / str(seed), seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def engine(folders: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with vllm_group(tmp_path_factory.mktemp("vllm"), (folders[0], {})) as ((url, key),):
        yield Engine("vllm", url, VllmDialect(model=folders[0], whole_weights=True, lora=False), folders[0], folders[0], key=key)


def test_experts_are_those_of_the_version_and_those_that_cannot_be_read_back_are_left_to_the_canary(
    engine: Engine, folders: list[str],
) -> None:
    async def body(client: EngineClient) -> tuple[Sample, Proof]:
        (sample,) = await client.generate(CANARY, Sampling(20), n=1, timeout_s=60)
        return sample, await client.prove(CANARY, timeout_s=60)

    for folder in (folders[1], folders[0], folders[1]):
        engine.serve(folder)
        (sample, proof), reference = engine.run(body), Reference(folder)
        assert set(sample.versions) == {engine.version} == {proof.version}
        assert sample.logprobs == pytest.approx(reference.logprobs(CANARY, sample.token_ids), abs=1e-4)
        assert proof.canary_logprobs == pytest.approx(reference.logprobs(CANARY[:1], CANARY[1:]), abs=1e-4)
        assert not proof.live
