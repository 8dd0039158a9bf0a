"""The small random model."""

from pathlib import Path

import pytest
import torch

from offbeat.model.load import load_causal_lm
from offbeat.model.tiny import build_tiny
from small_run import TINY


def build(folder: Path, *, seed: int = 3, pad: int | None = 1) -> bytes:
    build_tiny(folder, tiny=TINY, vocab_size=20, eos_token_id=0, pad_token_id=pad, seed=seed)
    return (folder / "model.safetensors").read_bytes()


def test_equal_seeds_give_equal_files_and_leave_the_random_state_alone(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    assert build(tmp_path / "a") == build(tmp_path / "b") != build(tmp_path / "c", seed=4)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("pad", [1, None])
def test_the_model_loads_with_its_sizes_and_special_tokens(tmp_path: Path, pad: int | None) -> None:
    build(tmp_path, pad=pad)
    model = load_causal_lm(str(tmp_path), attention="sdpa")
    config = model.config
    assert (config.model_type, config.vocab_size, config.hidden_size, config.num_hidden_layers) == ("qwen3", 20, 32, 1)
    assert (config.eos_token_id, config.pad_token_id, config.max_position_embeddings) == (0, pad, 64)
    assert model.generation_config.eos_token_id == 0
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert next(model.parameters()).dtype == torch.float32
