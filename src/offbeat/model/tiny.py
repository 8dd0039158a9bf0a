"""A small random model for first runs and tests, in the architecture and file format of Qwen3, so that every engine can load it."""

from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from offbeat.config.model import TinyConfig
from offbeat.model.hf_io import write_safetensors


def build_tiny(folder: str | Path, *, tiny: TinyConfig, vocab_size: int, eos_token_id: int, pad_token_id: int | None, seed: int) -> None:
    """Write config.json, generation_config.json and model.safetensors into a folder, which may already hold a tokenizer.

    Embeddings are tied and weights are float32; the embedding of the padding token, if there is one, stays zero and untrained. Equal seeds
    and sizes give equal files. The global random state is not changed. Raises StorageError if the folder cannot be written.
    """
    config = Qwen3Config(
        vocab_size=vocab_size, hidden_size=tiny.hidden_size, num_hidden_layers=tiny.num_layers, num_attention_heads=tiny.num_heads,
        num_key_value_heads=tiny.num_kv_heads, head_dim=tiny.head_dim, intermediate_size=tiny.intermediate_size,
        max_position_embeddings=tiny.max_positions, tie_word_embeddings=True, bos_token_id=None, eos_token_id=eos_token_id,
        pad_token_id=pad_token_id, dtype="float32", architectures=["Qwen3ForCausalLM"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=eos_token_id, pad_token_id=pad_token_id)
    write_safetensors(model.state_dict(), folder, config_from=model)
