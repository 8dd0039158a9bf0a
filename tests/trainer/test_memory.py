"""Estimates of memory against what a step on real tensors takes, and the advice that follows."""

import io
import json
import sys

import pytest
from transformers import Qwen3Config, Qwen3MoeConfig

from offbeat.config.root import Config
from offbeat.errors import ConfigError
from offbeat.model.load import load_causal_lm
from offbeat.model.logprobs import UnpackedError, token_logprobs
from offbeat.trainer import memory
from offbeat.trainer.memory import LiveBytes, MemoryEstimate, advise, check_memory, estimate_memory
from ranks import run_alone, run_ranks
from train_samples import build_model

SIZES = Qwen3Config(
    vocab_size=1000, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32, intermediate_size=256,
    max_position_embeddings=2048, tie_word_embeddings=True)
COUNT = 1000 * 128 + 2 * (128 * 32 * (4 + 2 + 2 + 4) + 3 * 128 * 256 + 2 * 128 + 2 * 32) + 128


def configured(*, model=None, algorithm=None, teacher="", shares=False, turns=False, **train):
    return Config.model_validate({
        "train": {"max_tokens_per_microbatch": 2048, **train}, "model": model or {}, "algorithm": algorithm or {},
        "teacher": {"path": teacher}, "cluster": {"share_devices": shares, "take_turns": turns}})


def test_an_estimate_is_what_a_pass_over_real_tensors_takes(tmp_path):
    folder = build_model(tmp_path)
    model, live = load_causal_lm(folder), LiveBytes()
    for tensor in (*model.parameters(), *model.buffers()):
        live.ignore(tensor)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    with live:
        logprobs, _ = token_logprobs(model, memory.packed_tokens(64, 23), with_entropy=True)
        logprobs.sum().backward()
    estimated = estimate_memory(model.config, configured(max_tokens_per_microbatch=64), num_ranks=1, on_cpu=True)
    # Norms have a kernel of our own on real tensors of a CPU.
    assert estimated.activations == pytest.approx(live.peak, rel=0.35)


def test_what_is_kept_for_long_is_counted_by_its_format():
    plain = estimate_memory(SIZES, configured(), num_ranks=4)
    assert (plain.weights, plain.gradients, plain.optimizer, plain.gathered, plain.reference) == (4 * COUNT, 4 * COUNT, 8 * COUNT, 0, 0)
    sharded = estimate_memory(SIZES, configured(num_ranks=4, parallel={"shard": 4}, algorithm={"kl_loss": "k3"}), num_ranks=4)
    assert (sharded.weights, sharded.gradients, sharded.optimizer, sharded.reference) == (COUNT, COUNT, 2 * COUNT, COUNT)
    assert sharded.gathered == 4 * COUNT, "both layers, the embeddings and the norm"
    adapted = estimate_memory(SIZES, configured(model={"lora": {"rank": 4}, "dtype": "bfloat16"}), num_ranks=1)
    trained = 4 * 2 * ((128 + 128) + 2 * (128 + 64) + (128 + 128) + 2 * (128 + 256) + (256 + 128))
    assert (adapted.weights, adapted.gradients) == (2 * COUNT + 4 * trained, 4 * trained)
    rounded = estimate_memory(SIZES, configured(model={"lora": {"rank": 4}, "quantization": "nf4"}), num_ranks=1)
    linear = 2 * (128 * 32 * (4 + 2 + 2 + 4) + 3 * 128 * 256)
    assert rounded.weights == 4 * (COUNT - linear) + linear * 9 // 16 + 4 * trained
    assert rounded.gathered == 4 * 128 * 256, "one matrix, while it is multiplied"
    mixed = estimate_memory(
        SIZES, configured(model={"lora": {"rank": 4}, "quantization": "int8"}, precision="bf16_mixed"), num_ranks=1)
    assert mixed.weights == 4 * (COUNT - linear) + linear + 4 * trained
    assert mixed.gathered == 2 * (COUNT - linear) + 6 * 128 * 256, "autocast copies what is whole, and the matrix that is multiplied"
    parts = estimate_memory(
        SIZES, configured(model={"lora": {"rank": 4}}, num_ranks=4, parallel={"shard": 4}, algorithm={"kl_loss": "k3"}), num_ranks=4)
    assert (parts.weights, parts.gradients, parts.optimizer, parts.reference) == (COUNT + 4 * trained, 4 * trained, 8 * trained, 0)
    assert parts.gathered == sharded.gathered, "the model is in shards, and every rank has the whole adapter"


def test_moments_that_are_offloaded_are_counted_on_the_host(monkeypatch):
    plain = estimate_memory(SIZES, configured(algorithm={"preset": "ppo"}), num_ranks=1)
    monkeypatch.setattr(memory, "PART_SIZE", 1000)
    found = estimate_memory(SIZES, configured(algorithm={"preset": "ppo"}, offload_optimizer=True), num_ranks=1)
    assert (found.optimizer, found.critic, found.host) == (8000, 8 * COUNT + 8000, 16 * COUNT)
    assert found.total == plain.total - 16 * COUNT + 16000
    config = configured(precision="bf16_mixed", gradient_checkpointing="full", max_tokens_per_microbatch=64)
    needed = estimate_memory(SIZES, config, num_ranks=1)
    reason = advise(SIZES, config, num_ranks=1, available=needed.total - 6 * COUNT)
    assert reason.endswith('use train.gradient_checkpointing = "full" and train.offload_optimizer = true')


def test_a_mesh_divides_what_is_kept_and_what_a_pass_takes():
    alone, context = (estimate_memory(SIZES, configured(num_ranks=4, parallel=parallel), num_ranks=4) for parallel in ({}, {"cp": 2}))
    assert (context.weights, context.optimizer) == (alone.weights, alone.optimizer), "replicas are not in shards"
    assert context.activations < 0.6 * alone.activations
    both = estimate_memory(SIZES, configured(num_ranks=4, parallel={"cp": 2, "tp": 2}), num_ranks=4)
    assert (both.weights, both.gradients, both.optimizer, both.gathered) == (COUNT, COUNT, 2 * COUNT, 2 * COUNT)
    assert both.activations == context.activations // 2
    tensor = estimate_memory(SIZES, configured(num_ranks=2, parallel={"tp": 2}), num_ranks=2)
    assert (tensor.weights, tensor.gathered) == (2 * COUNT, 0)


def test_experts_that_are_dealt_to_ranks_are_counted_once_for_all_of_them():
    sizes = Qwen3MoeConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=64, tie_word_embeddings=True)
    whole = estimate_memory(sizes, configured(precision="bf16_mixed"), num_ranks=4)
    experts = 4 * 2 * 8 * 3 * 32 * 64
    for parallel, parts, expert_parts in (({"ep": 4}, 1, 4), ({"ep": 2}, 1, 2), ({"shard": 4, "ep": 2}, 4, 4)):
        found = estimate_memory(sizes, configured(precision="bf16_mixed", num_ranks=4, parallel=parallel), num_ranks=4)
        assert found.weights == found.gradients == (whole.weights - experts) // parts + experts // expert_parts
        assert 2 * found.gathered == whole.weights - experts + experts // parallel["ep"], "both layers, with this rank's experts"


def test_models_beside_the_policy_and_copies_of_autocast_are_counted(tmp_path, monkeypatch):
    shards, one = (estimate_memory(SIZES, configured(
        precision="bf16_mixed", num_ranks=ranks, parallel={"shard": ranks}), num_ranks=ranks) for ranks in (2, 1))
    assert one.activations == shards.activations and one.gathered == 2 * COUNT
    monkeypatch.setattr(memory, "use_fast_norms", lambda _: 0)
    slow = estimate_memory(SIZES, configured(precision="bf16_mixed"), num_ranks=1)
    assert slow.activations == int(memory._AUTOCAST * one.activations)
    critic = estimate_memory(SIZES, configured(algorithm={"preset": "ppo"}), num_ranks=1)
    assert critic.critic == 16 * COUNT
    small = build_model(tmp_path)
    taught = [estimate_memory(SIZES, configured(algorithm={"preset": "opd"}, teacher=path), num_ranks=1).teacher
              for path in ("someone/unknown", small)]
    assert taught == [4 * COUNT, 4 * sum(parameter.numel() for parameter in load_causal_lm(small).parameters())]


def test_bfloat16_and_recomputing_take_less():
    found = [estimate_memory(SIZES, configured(precision=precision, gradient_checkpointing=recompute), num_ranks=1).activations
             for precision, recompute in (("float32", "off"), ("bf16_mixed", "off"), ("bf16_mixed", "selective"), ("bf16_mixed", "full"))]
    assert found == sorted(found, reverse=True)
    assert found[-1] < found[0] / 2


def test_a_run_that_cannot_fit_is_refused_with_a_setting_that_would(tmp_path):
    needed = estimate_memory(SIZES, configured(), num_ranks=1)
    assert advise(SIZES, configured(), num_ranks=1, available=2 * needed.total) == ""
    reason = advise(SIZES, configured(), num_ranks=1, available=needed.total)
    assert reason.startswith("a training step needs about 0.1 GiB on each device, of which")
    assert reason.endswith('use train.precision = "bf16_mixed"')


def test_advice_says_all_that_it_changes_and_leaves_room_for_other_parts_of_the_mesh():
    compiled = configured(precision="bf16_mixed", compile=True)
    reason = advise(SIZES, compiled, num_ranks=1, available=estimate_memory(SIZES, compiled, num_ranks=1).total)
    assert reason.endswith('use train.gradient_checkpointing = "full" and train.compile = false')
    small = {"num_ranks": 8, "precision": "bf16_mixed", "gradient_checkpointing": "full", "max_tokens_per_microbatch": 64}
    layered, both = (configured(**small, parallel={"tp": 2, "shard": shard}) for shard in (1, 4))
    needed = estimate_memory(SIZES, both, num_ranks=8).total
    assert advise(SIZES, layered, num_ranks=8, available=needed * 10 // 9).endswith("use train.parallel.shard = 4")


def _check(groups, folder):
    """What a rank is told of a large device, where that of rank 1 is small."""
    config = configured(max_tokens_per_microbatch=64)
    try:
        check_memory(folder, config, groups=groups, device=(2**40, 2**10)[groups.rank])
    except ConfigError as exc:
        return str(exc)


def test_all_ranks_decide_alike_by_the_smallest_device(tmp_path):
    first, second = run_ranks(_check, world=2, argument=build_model(tmp_path))
    assert first == second and first.startswith("a training step needs about 0.0 GiB on each device")


def test_engines_on_the_same_device_take_their_part(tmp_path):
    folder, config = build_model(tmp_path), configured(max_tokens_per_microbatch=64)
    needed = estimate_memory(memory._config_of(folder), config, num_ranks=1).total
    run_alone(lambda groups, _: check_memory(folder, config, groups=groups, device=int(1.2 * needed)))
    alone = configured(max_tokens_per_microbatch=64, shares=True, turns=True)  # engines sleep while it trains
    run_alone(lambda groups, _: check_memory(folder, alone, groups=groups, device=int(1.2 * needed)))
    with pytest.raises(ConfigError, match="a training step needs about"):
        run_alone(lambda groups, _: check_memory(
            folder, configured(max_tokens_per_microbatch=64, shares=True), groups=groups, device=int(1.2 * needed)))


def test_a_model_that_cannot_be_estimated_is_let_through(tmp_path, monkeypatch, caplog):
    folder = build_model(tmp_path)

    def unpacked(*_args):
        raise UnpackedError("layers ignore the plan", num_calls=1, num_layers=2)

    monkeypatch.setattr(memory, "_peak", unpacked)
    run_alone(lambda groups, _: check_memory(folder, configured(), groups=groups, device=1))
    assert "the memory of a training step was not estimated" in caplog.text


def test_as_a_program_it_reads_a_configuration_and_prints_an_estimate(tmp_path, monkeypatch, capsys):
    config = configured(model={"path": build_model(tmp_path)}, max_tokens_per_microbatch=32)
    monkeypatch.setattr(sys, "stdin", io.StringIO(config.for_ranks.model_dump_json()))
    memory.main()
    assert MemoryEstimate(**json.loads(capsys.readouterr().out)).total > 0
