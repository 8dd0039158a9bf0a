"""Replay of experts: engine and trainer agree whatever an engine's routers chose, gradients reach the router, others are refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from family_table import FAMILIES, SIZES
from offbeat.config.model import ModelConfig
from offbeat.config.train import TrainConfig
from offbeat.data.expert_routes import join_routes, unknown_routes
from offbeat.data.packing import PackedRow, pack_row
from offbeat.data.tokenizer import character_tokenizer
from offbeat.engine.loader import load_engine
from offbeat.engine.options import EngineOptions
from offbeat.engine.request import Output, Request, SamplingParams
from offbeat.errors import ModelError, RefusedError
from offbeat.model.logprobs import token_logprobs
from offbeat.model.route_replay import find_routers
from offbeat.trainer.policy import let_replay, load_policy
from router_noise import plant_noise
from row_samples import sampled_batch

BY_TYPE = {family.model_type: family for family in FAMILIES}
REPLAYED = ["mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3", "glm4_moe"]
PROMPTS = [[5, 9, 20, 3, 8, 8, 41, 7, 30], [17, 6, 5, 33]]
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True, seed=3, routes=True)


def build(folder, model_type: str, **more) -> str:
    """A random model with moderate weights, whose routers are far from even."""
    tokenizer = character_tokenizer()
    tokenizer.save(folder)
    settings = {**SIZES, **BY_TYPE[model_type].settings, "vocab_size": tokenizer.vocab_size, "eos_token_id": tokenizer.eos_token_id, **more}
    kept = {name: value for name, value in settings.items() if value is not None or name in ("bos_token_id", "sliding_window")}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**kept))
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name
            parameter.data.normal_(1.0 if is_norm else 0.0, 0.1)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    folders: dict[str, str] = {}

    def folder(model_type: str) -> str:
        if model_type not in folders:
            folders[model_type] = build(tmp_path_factory.mktemp(model_type), model_type)
        return folders[model_type]

    return folder


def load_replaying(folder: str, **settings):
    return let_replay(load_policy(folder, config=TrainConfig(**settings)), ModelConfig(route_replay="rollout"))


def row_of(outputs: list[list[Output]], *, known: bool = True, share_prefix: bool = True) -> PackedRow:
    """The row of samples of `PROMPTS`, with the routes that the engine gave."""
    batch, samples = sampled_batch(PROMPTS, outputs), [output for own in outputs for output in own]
    parts = [np.concatenate([each.routes, unknown_routes(1, each.routes)]) for each in samples if each.routes is not None]
    return pack_row(replace(batch, routes=join_routes(parts, batch.lengths) if known else None), share_prefix=share_prefix)


def gap(model, row: PackedRow, outputs: list[list[Output]]) -> float:
    """The largest difference of a token's log-probability between trainer and engine."""
    wanted = np.concatenate([output.logprobs for own in outputs for output in own])
    found = np.empty(len(wanted))
    found[row.batch_index] = token_logprobs(model, row).detach().numpy()
    return float(np.abs(found - wanted).max())


@pytest.mark.parametrize("model_type", REPLAYED)
def test_trainer_and_engine_agree_to_1e6_whatever_the_engines_routers_chose(model_type, folder_of):
    engine = load_engine(EngineOptions(model=folder_of(model_type)))
    plant_noise(engine)
    outputs = engine.generate(PROMPTS, PARAMS, n=2)
    model = load_replaying(folder_of(model_type), gradient_checkpointing="full")
    for share_prefix in (True, False):
        assert gap(model, row_of(outputs, share_prefix=share_prefix), outputs) < 1e-6
    assert gap(model, row_of(outputs, known=False), outputs) > 1e-4


LARGER = {"hidden_size": 64, "num_hidden_layers": 3, "head_dim": 16, "max_position_embeddings": 256}


@pytest.mark.parametrize(("model_type", "sizes", "noise", "times"), [
    ("qwen3_moe", {**LARGER, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32}, 0.0, 3),
    ("qwen3_moe", {**LARGER, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32}, 0.5, 50),
    ("mixtral", {**LARGER, "num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 32}, 0.5, 50),
    ("deepseek_v3", {"moe_intermediate_size": 32, "intermediate_size": 64}, 0.5, 50),
    ("gpt_oss", {"intermediate_size": 32}, 0.5, 50)])
def test_the_mismatch_of_a_bfloat16_engine_falls_several_times(model_type, sizes, noise, times, tmp_path):
    folder = build(tmp_path, model_type, **sizes)
    engine = load_engine(EngineOptions(model=folder, dtype="bfloat16"))
    if noise:
        plant_noise(engine, share=noise)
    outputs = engine.generate(PROMPTS, replace(PARAMS, max_new_tokens=20 if noise else 60), n=8)
    model = load_replaying(folder)
    wanted, kl = np.concatenate([output.logprobs for own in outputs for output in own]), []
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
        for known in (True, False):
            row = row_of(outputs, known=known)
            off = token_logprobs(model, row).numpy() - wanted[row.batch_index]
            kl.append(np.mean(np.exp(off) - 1 - off))
    assert 0 < times * kl[0] < kl[1]


def test_the_gradient_of_a_routers_weights_is_that_of_the_replayed_experts(folder_of):
    engine = load_engine(EngineOptions(model=folder_of("qwen3_moe")))
    plant_noise(engine)
    row = row_of(engine.generate(PROMPTS, PARAMS, n=2))
    for recompute in ("off", "full"):
        model = load_replaying(folder_of("qwen3_moe"), gradient_checkpointing=recompute).double()
        model.set_experts_implementation("eager")  # grouped products have no float64
        weight = find_routers(model)[0].weight
        token_logprobs(model, row).sum().backward()
        direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        slope = (weight.grad * direction).sum().item()
        assert abs(slope) > 1e-2
        with torch.no_grad():
            ends = []
            for step in (0.01, -0.01):
                weight += step * direction
                ends.append(token_logprobs(model, row).double().sum().item())
                weight -= step * direction
        assert slope == pytest.approx((ends[0] - ends[1]) / 0.02, rel=1e-2)  # log-probabilities are float32


def test_interrupted_samples_keep_the_experts_of_each_version_and_cached_prompts_have_theirs(folder_of):
    engine = load_engine(EngineOptions(model=folder_of("mixtral")))
    engine.submit(Request(id="a", prompt=PROMPTS[0], params=PARAMS))
    for _ in range(5):
        engine.step()
    before = engine._runner.routes_of(0)
    state = {name: tensor.clone() for name, tensor in engine._forward.tensors().items()}
    for name in state:
        if "gate" in name:
            state[name] = state[name].flip(0)
    engine.stage(1, ("changed", ""), engine._forward.prepare(state))  # pyright: ignore
    engine.switch(1, "recompute")
    events = []
    while engine.has_work:
        events += engine.step()
    routes = events[0].result.routes
    assert before is not None and len(routes) == len(PROMPTS[0]) + 11 and np.array_equal(routes[: len(before)], before)
    # Another sample computes the same tokens under the new version alone, with other experts where the first one has kept its own.
    tokens = PROMPTS[0] + events[0].result.token_ids[:-1]
    [[again]] = engine.generate([tokens], replace(PARAMS, max_new_tokens=1))
    assert not np.array_equal(again.routes[: len(before)], before)
    [[cached]] = engine.generate([tokens], replace(PARAMS, max_new_tokens=1))
    assert cached.num_cached == 16 and np.array_equal(cached.routes, again.routes)


def test_models_without_experts_or_with_routers_of_another_kind_are_refused(tmp_path):
    for model_type, why in (
        ("qwen3", "has no routers of experts to replay"), ("phimoe", "PhimoeTopKRouter does not"),
        ("llama4_text", "its sequences run one by one"), ("qwen3_next", "its sequences run one by one"),
    ):
        folder = build(tmp_path / model_type, model_type)
        with pytest.raises(ModelError, match=f"ForCausalLM .*{why}.*set model.route_replay to .off."):
            load_replaying(folder, share_prefix=False)
    engine = load_engine(EngineOptions(model=str(tmp_path / "qwen3")))
    with pytest.raises(RefusedError, match="return_routed_experts needs a model whose routers"):
        engine.generate(PROMPTS, PARAMS)
    with pytest.raises(RefusedError, match="return_routed_experts must be false with stream"):
        Request(id="a", prompt=[1], params=PARAMS, stream=True)

