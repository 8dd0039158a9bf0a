"""Unpack a model in GGUF into a Hugging Face folder in float32. Used by `tools/smollm2.py` and `tools/qwen.py`."""

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def write_model(file: Path, folder: Path) -> None:
    """Write the model in a GGUF file as a folder; a folder that is there already is complete, for it is renamed when it is.

    Args:
        file: alone in a folder of its own, within one that becomes `folder`.
    """
    logging.disable_progress_bar()
    partial = file.parents[1]
    quantised = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # A model that was read from GGUF refuses to be saved, so its tensors move into a fresh one, which takes no memory of its own.
    settings = quantised.config.to_diff_dict()
    settings.pop("quantization_config", None)
    with torch.device("meta"):
        model = type(quantised)(type(quantised.config)(**settings))
    model.load_state_dict(quantised.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = quantised.generation_config
    shutil.rmtree(file.parent)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)
    size = sum(each.stat().st_size for each in folder.iterdir())
    print(f"wrote {folder} ({size / 1e6:.0f} MB)")
