"""Images encoded once for the samples of a group, against once for each sample: processor, engine, and a training step.

The model has the shapes of SmolVLM-256M with random weights: a SigLIP tower of 12 layers, 1,024 patches and 64 tokens for an image, and a
language part as SmolLM2-135M's, of fewer layers with `--layers`. Three things are timed by their CPU seconds, in turns, with one picture
for all samples of a group and with a picture for each:

- *process*: the run's reader decodes the files, and the model's processor resizes and cuts them,
- *generate*: the embedded engine answers a prompt of one picture and a short text, a few tokens for each sample,
- *train*: forward and backward pass of a row of the group's samples, whose prompt is shared where the picture is.

    python benchmarks/images.py [--samples 8] [--tokens 8] [--layers 30] [--rounds 3]
"""

import argparse
import io
import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import WORK, emit, take_turns
from PIL import Image
from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

from offbeat.config.train import TrainConfig
from offbeat.data.batch import Batch, SharedPrompts
from offbeat.data.image_reader import ImageReader
from offbeat.data.image_sources import ImageLimits, ImageSource
from offbeat.data.image_store import ImageStore
from offbeat.data.packing import pack_row
from offbeat.data.tokenizer import DEFAULT_ALPHABET, character_tokenizer
from offbeat.engine.engine import EmbeddedEngine
from offbeat.engine.loader import load_engine
from offbeat.engine.options import EngineOptions
from offbeat.engine.request import SamplingParams
from offbeat.model.images import images_of
from offbeat.model.logprobs import token_logprobs
from offbeat.trainer.policy import load_policy

SIDE, PATCH, SCALE = 512, 16, 4
"""Pixels along a side, pixels along a patch's, and patches along the square that one token stands for."""
TEXT = list(range(5, 25))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8, help="of a group (default: 8)")
    parser.add_argument("--tokens", type=int, default=8, help="of an answer (default: 8)")
    parser.add_argument("--layers", type=int, default=30, help="of the language part (default: 30)")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = WORK / f"images-{args.layers}"
    if not (folder / "config.json").exists():
        build(folder, num_layers=args.layers)
    store = ImageStore(WORK / "images-store")
    shutil.rmtree(store.folder, ignore_errors=True)
    reader = ImageReader(str(folder), store, ImageLimits(max_images=64))
    reader.read(ImageSource(data=picture(0)), "the first")  # the process has started
    seeds = iter(range(1, 1_000_000))

    def files(distinct: int) -> list[bytes]:
        made = [picture(next(seeds)) for _ in range(distinct)]
        return (made * args.samples)[: args.samples]

    def process(data: Sequence[bytes]) -> list[list[int]]:
        return [reader.read(ImageSource(data=one), "a row").tokens.tolist() for one in data]

    engine = load_engine(EngineOptions(model=str(folder), images=str(store.folder), max_running=args.samples, max_context=256))
    policy = load_policy(str(folder), config=TrainConfig(), images=store.folder)
    generate = lambda images: answer(engine, images, num_tokens=args.tokens)  # noqa: E731
    train = lambda images: learn(policy, images, num_tokens=args.tokens)  # noqa: E731
    for what, work, unit in (("process", None, "s"), ("generate", generate, "CPU s"), ("train", train, "CPU s")):
        sides = {
            name: lambda _, distinct=distinct, work=work: measured(files(distinct), process, work)
            for name, distinct in (("once", 1), ("each", args.samples))}
        found = take_turns(sides, repeats=args.rounds, what=what)
        emit("images", f"{what}: one image for {args.samples} samples, against {args.samples}", ours=found["once"]["seconds"],
             peer=found["each"]["seconds"], unit=unit, less_is_better=True)
    reader.close()


def measured(
    files: Sequence[bytes], process: Callable[[Sequence[bytes]], list[list[int]]], work: Callable[[list[list[int]]], None] | None,
) -> dict[str, float]:
    """Time the processing of files, in seconds, since a process of its own does it; or `work` on what they become, in CPU seconds."""
    start_s = time.monotonic()
    images = process(files)
    if work is None:
        return {"seconds": time.monotonic() - start_s}
    start_s = time.process_time()
    work(images)
    return {"seconds": time.process_time() - start_s}


def answer(engine: EmbeddedEngine, images: list[list[int]], *, num_tokens: int) -> None:
    """Sample an answer to each image; equal ones are the samples of one request, as those of a group are."""
    prompts = [[4, *image, *TEXT] for image in ({tuple(image) for image in images})]
    before = images_of(engine._forward._model).num_encoded  # pyright: ignore
    engine.generate(prompts, SamplingParams(max_new_tokens=num_tokens, ignore_eos=True), n=len(images) // len(prompts))
    assert images_of(engine._forward._model).num_encoded - before == len(prompts)  # pyright: ignore


def learn(policy: Any, images: list[list[int]], *, num_tokens: int) -> None:
    """One forward and backward pass of a row in which each sample has its image."""
    sequences = [np.array([4, *image, *TEXT, *range(30, 30 + num_tokens)], np.int32) for image in images]
    start = len(sequences[0]) - num_tokens
    groups = np.unique([sequence[:start].tobytes() for sequence in sequences], return_inverse=True)[1]
    batch = Batch.of_next_tokens(
        np.concatenate(sequences), np.concatenate([np.arange(len(each)) >= start for each in sequences]),
        lengths=[len(each) for each in sequences], columns={}, losses=(),
        shared=SharedPrompts(groups, np.full(len(sequences), start)))
    token_logprobs(policy, pack_row(batch, share_prefix=True)).sum().backward()
    policy.zero_grad()


def picture(seed: int) -> bytes:
    """The file of a picture, PNG, whose pixels no two seeds share."""
    random, file = np.random.default_rng(seed), io.BytesIO()
    Image.fromarray(random.integers(0, 256, (48, 64, 3), np.uint8)).resize((640, 480)).save(file, format="PNG")
    return file.getvalue()


def build(folder: Path, *, num_layers: int) -> None:
    """Write the model, its tokenizer and its processor's file."""
    tokenizer = character_tokenizer(DEFAULT_ALPHABET).hf
    special = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.save_pretrained(folder)
    config = SmolVLMConfig(
        text_config={
            "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": num_layers, "num_attention_heads": 9,
            "num_key_value_heads": 3, "vocab_size": 49280, "max_position_embeddings": 8192, "tie_word_embeddings": False,
            "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id},
        vision_config={
            "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "image_size": SIDE,
            "patch_size": PATCH}, scale_factor=SCALE, image_token_id=tokenizer.convert_tokens_to_ids("<image>"), tie_word_embeddings=False)
    config.pad_token_id = tokenizer.pad_token_id
    torch.manual_seed(0)
    SmolVLMForConditionalGeneration(config).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({
        "image_processor_type": "SmolVLMImageProcessor", "processor_class": "SmolVLMProcessor", "do_image_splitting": False,
        "size": {"longest_edge": SIDE}, "max_image_size": {"longest_edge": SIDE}, "image_seq_len": (SIDE // PATCH // SCALE) ** 2}))


if __name__ == "__main__":
    main()
