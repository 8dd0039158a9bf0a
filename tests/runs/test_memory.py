"""What a model takes: its parameters, a rank's states and activations, an engine's weights and cache, and the table in the docs."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from memory_tables import GIB, MODELS, adapter_table, cache_bytes_per_token, engine_weights, memory_table
from offbeat.runs.memory import ModelShape, TrainedAdapter, rank_memory

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_of_the_model(tied: bool) -> None:
    config = Qwen3Config(
        hidden_size=512, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4, head_dim=32, intermediate_size=1024,
        vocab_size=5000, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counted = sum(parameter.numel() for parameter in set(model.parameters()))
    assert ModelShape.of(config.to_dict()).num_parameters == counted - 3 * 2 * 32  # the norms of heads


@pytest.mark.parametrize(("name", "billions"), [("Qwen3-0.6B", 0.596), ("Qwen3-1.7B", 1.72), ("Qwen3-8B", 8.19), ("Llama-3.1-70B", 70.55)])
def test_shapes_in_the_table_have_the_published_sizes(name: str, billions: float) -> None:
    assert MODELS[name].num_parameters / 1e9 == pytest.approx(billions, rel=0.002)


def test_activations_are_near_what_was_counted_on_a_model() -> None:
    shape = MODELS["Qwen3-1.7B"]  # counted for 16,384 tokens, logits included: see docs/gpu.md
    assert rank_memory(shape, tokens=16384, mixed=False).activations / GIB == pytest.approx(92.5, rel=0.03)
    assert rank_memory(shape, tokens=16384).activations / GIB == pytest.approx(57.5, rel=0.03)


def test_states_are_sixteen_bytes_a_parameter_and_divided_among_shards() -> None:
    shape = MODELS["Qwen3-8B"]
    whole, sharded = rank_memory(shape, tokens=0), rank_memory(shape, tokens=0, num_shards=8)
    assert whole.total == 16 * shape.num_parameters and not whole.gathered
    offloading = rank_memory(shape, tokens=0, num_shards=8, offloads=True)
    assert (offloading.total, offloading.host) == (sharded.total - sharded.optimizer, sharded.optimizer)
    assert sharded.weights + sharded.gradients + sharded.optimizer == 2 * shape.num_parameters
    block = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 12288
    assert sharded.gathered == 4 * (2 * block + 151936 * 4096)


def test_an_adapter_has_states_of_its_own_and_the_model_under_it_none() -> None:
    shape = MODELS["Qwen3-1.7B"]
    # q, k, v, o, gate, up and down, of each the inputs and the outputs.
    widths = [(2048, 2048), (2048, 1024), (2048, 1024), (2048, 2048), (2048, 6144), (2048, 6144), (6144, 2048)]
    adapter = 28 * 16 * sum(map(sum, widths))
    plain, half = (rank_memory(shape, tokens=0, num_shards=4, adapter=TrainedAdapter(16, half=half)) for half in (False, True))
    assert (plain.weights, plain.gradients, plain.optimizer) == (shape.num_parameters + 4 * adapter, 4 * adapter, 8 * adapter)
    rounded = rank_memory(shape, tokens=0, adapter=TrainedAdapter(16, half=True, form="nf4"))
    linear = 28 * sum(inputs * outputs for inputs, outputs in widths)
    assert rounded.weights == 2 * (shape.num_parameters - linear) + linear * 9 // 16 + 4 * adapter
    assert plain.weights - half.weights == shape.num_parameters // 2 and plain.gathered == 2 * half.gathered


def test_an_engine_holds_two_bytes_a_parameter_and_keys_and_values_of_every_layer() -> None:
    shape = MODELS["Qwen3-32B"]
    assert engine_weights(shape, num_devices=4) * 4 == pytest.approx(2 * shape.num_parameters, abs=8)
    assert cache_bytes_per_token(shape) == 2 * 64 * 8 * 128 * 2


def test_the_table_in_the_docs_is_what_the_formulas_say() -> None:
    page = PAGE.read_text()
    assert memory_table() in page and adapter_table() in page, "put the output of python tests/memory_tables.py into docs/scaling.md"
