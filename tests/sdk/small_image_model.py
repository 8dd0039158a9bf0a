"""A small model that reads images, pictures for it, and what a run's trainer gives for sequences with them. Runs in Offbeat's environment.

    .venv/bin/python tests/sdk/small_image_model.py make FOLDER
    .venv/bin/python tests/sdk/small_image_model.py score FOLDER '[[5, "one.png", 7, 9]]'
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from PIL import Image

from image_models import file_of, make_folder, picture
from offbeat.config.train import TrainConfig
from offbeat.data.batch import Batch
from offbeat.data.image_sources import ImageSource
from offbeat.data.packing import pack_row
from offbeat.model.logprobs import token_logprobs
from offbeat.trainer.policy import load_policy
from shared_image_reader import reader_in_process

FAMILY = "qwen3_vl"


def make(folder: Path) -> None:
    """Write the model, and pictures of which some cannot be used; say how many tokens each of the others has."""
    make_folder(folder / "model", FAMILY)
    good = {
        "one.png": file_of(picture(0)), "other.png": file_of(picture(1, size=(28, 40))), "photo.jpeg": file_of(picture(2), "JPEG"),
        "turned.jpeg": file_of(picture(3, size=(60, 28)), "JPEG", exif=_turned())}
    bad = {
        "cut.png": file_of(picture(4, size=(200, 200)))[:3000], "wide.png": file_of(Image.new("L", (20_000, 2))),
        "bomb.png": file_of(Image.new("1", (16_000, 16_000))), "empty.png": b"", "text.png": b"no image at all",
        "noise.png": b"\x89PNG\r\n\x1a\n" + bytes(range(200))}
    for name, data in {**good, **bad}.items():
        (folder / name).write_bytes(data)
    print(json.dumps({name: len(_tokens(folder, name)) for name in good}))


def score(folder: Path, sequences: list[list[int | str]]) -> None:
    """Print the log-probability of each token but the first of sequences, in which a name stands for a picture's tokens; null for those."""
    policy = load_policy(str(folder / "model"), config=TrainConfig(), images=folder / "images")
    found = []
    for sequence in sequences:
        parts = [_tokens(folder, part) if isinstance(part, str) else np.array([part], np.int32) for part in sequence]
        tokens = np.concatenate(parts)
        of_text = np.concatenate([np.full(len(each), isinstance(part, int)) for part, each in zip(sequence, parts, strict=True)])[1:]
        batch = Batch.of_next_tokens(
            tokens, np.append(False, of_text), lengths=[len(tokens)], columns={}, losses=())
        logprobs = np.full(len(of_text), np.nan)
        with torch.no_grad():
            logprobs[of_text] = token_logprobs(policy, pack_row(batch, share_prefix=False)).numpy()
        found.append([None if np.isnan(each) else each for each in logprobs.tolist()])
    print(json.dumps(found))


def _tokens(folder: Path, name: str) -> np.ndarray:
    reader = reader_in_process(folder / "model", folder / "images")
    return reader.read(ImageSource(data=(folder / name).read_bytes()), name).tokens


def _turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    else:
        score(Path(sys.argv[2]), json.loads(sys.argv[3]))
