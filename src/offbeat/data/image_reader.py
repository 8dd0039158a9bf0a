"""Reads the images of rows into the tokens of prompts. Holds a model's image process and a run's image store. Called by `data.prompt`.

An image is decoded and processed once: afterwards it is found by the hash of its file, also by a run that goes on.
"""

import atexit
import hashlib
import select
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np

from offbeat.data import wire
from offbeat.data.image_edges import EDGE, Edges
from offbeat.data.image_sources import ImageLimits, ImageSource
from offbeat.data.image_store import ImageStore, StoredImage
from offbeat.data.model_folder import read_model_config
from offbeat.errors import DataError, ModelError
from offbeat.extras import require

FAMILIES = ("gemma3", "idefics3", "internvl", "llava_onevision", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm")
"""Model types, as in config.json, whose images can be read."""

_PROMPT_TOKENS = {"gemma3": ("boi_token_index", 255_999)}
"""Keys of config.json, with their defaults, of tokens that stand for an image in a prompt, where they differ from its placeholders'."""
_EDGES = {"gemma3": "\n\n"}
"""Text that surrounds an image in a prompt, by model type."""

_CHANNELS, _PATCH_SIDE = 3, 14
"""Channels of a tower's pixels, and the side of its patches if config.json has none."""

HEADER = struct.Struct("<Q")
_START_TIMEOUT_S, _TIMEOUT_S = 600.0, 120.0
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True, eq=False)
class MadeImage:
    """Answer to the bytes of an image's file: what it becomes, or why it cannot be used.

    Attributes:
        fault: the end of a sentence about the image, such as "is animated, ..."; empty if it can be used.
        tokens: [P] int32, what stands in a prompt, -1 at its placeholders.
        picture: a small PNG of it for people, before the processor's changes but upright and in RGB.
    """

    fault: str
    tokens: np.ndarray
    arrays: dict[str, np.ndarray]
    grid: tuple[int, int] = (0, 0)
    size: tuple[int, int] = (0, 0)
    picture: bytes = b""


class ImageReader:
    """Reads images for a model, and stores what it makes of them. Prompts have `token_id` once for each image before it is expanded."""

    def __init__(self, model: str, store: ImageStore, limits: ImageLimits) -> None:
        """Nothing is started before an image is read; `images_for` checks that the model reads images."""
        config = read_model_config(model)
        self.store = store
        self._model = model
        self._model_type = config["model_type"]
        self._placeholder = placeholder_of(config)
        self._patch_side = _patch_side(config)
        key, default = _PROMPT_TOKENS.get(self._model_type, ("", self._placeholder))
        self.token_id: int = config.get(key, default)
        self.limits = limits
        self._child: subprocess.Popen[bytes] | None = None
        self._known: dict[str, tuple[object, StoredImage]] = {}
        self._reading = threading.Lock()

    def read(self, source: ImageSource, where: str) -> StoredImage:
        """Return the image of a source, on any thread; raises DataError, which names it by `where`, if it cannot be used."""
        with self._reading:
            stamp = _stamp(source)
            if source.path in self._known and self._known[source.path][0] == stamp:
                return self._known[source.path][1]
            try:
                image = self._stored(source.read(self.limits))
            except DataError as exc:
                raise DataError(f"{where} {exc}") from exc
            if source.path:
                self._known[source.path] = stamp, image
            return image

    def _stored(self, data: bytes) -> StoredImage:
        key = hashlib.sha256(data + repr((self._files, self.limits)).encode()).hexdigest()
        image = self.store.find_source(key)
        if image is None:
            image = self._make(data)
            self.store.note_source(key, image)
        return image

    def num_patches(self, image: StoredImage) -> int:
        """Return the number of patches that the model's tower computes of an image."""
        if (grid := image.arrays.get("image_grid_thw")) is not None:
            return int(np.prod(grid, axis=1).sum())
        return image.arrays["pixel_values"].size // (_CHANNELS * self._patch_side**2)

    def read_all(self, sources: Sequence[ImageSource], *, where: str) -> list[StoredImage]:
        """Return the images of a row; raises DataError if there are too many, or one cannot be used."""
        if len(sources) > self.limits.max_images:
            raise DataError(f"{where} has {len(sources)} images, allowed are {self.limits.told('max_images')}")
        return [self.read(source, f"{where}: image {number}") for number, source in enumerate(sources, start=1)]

    def expand(
        self, tokens: Sequence[int] | np.ndarray, images: Sequence[ImageSource], *, where: str = "a row",
    ) -> tuple[np.ndarray, np.ndarray]:
        """Put images in the places of the model's image tokens, of which the tokens [L] have one for each image.

        Returns tokens [K] int32, and [K] int64, the index among the L tokens that each of them came from. Raises DataError if the numbers
        differ, there are too many images, or one cannot be used.
        """
        given = np.asarray(tokens, np.int64)
        places = np.flatnonzero(given == self.token_id)
        if len(places) != len(images):
            raise DataError(
                f"the prompt of {where} has {len(places)} image tokens for its {len(images)} images; its text must not spell the token out,"
                " and the chat template must write one for each image")
        parts, origins, done = [], [], 0
        for place, image in zip(places.tolist(), self.read_all(images, where=where), strict=True):
            own = image.tokens if self._edges is None else np.array([EDGE, *image.tokens, EDGE])
            parts += [given[done:place], own]
            origins += [np.arange(done, place), np.full(len(own), place)]
            done = place + 1
        origins.append(np.arange(done, len(given)))
        whole, origin = np.concatenate([*parts, given[done:]]).astype(np.int32), np.concatenate(origins).astype(np.int64)
        return (whole, origin) if self._edges is None else self._edges.write(whole, origin)

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            atexit.unregister(self.close)
            child.kill()
            child.communicate()

    def _make(self, data: bytes) -> StoredImage:
        made = wire.decode(MadeImage, self._ask(data))
        if made.fault:
            raise DataError(made.fault)
        return self.store.add(
            made.tokens, made.arrays, grid=made.grid, size=made.size, source=hashlib.sha256(data).hexdigest(), picture=made.picture)

    def _ask(self, data: bytes) -> bytes:
        child = self._child or self._begin_process()
        assert child.stdin is not None and child.stdout is not None, "both are pipes"
        try:
            write_frame(child.stdin, wire.encode(self.limits))
            write_frame(child.stdin, data)
            answer = _wait_for(child, _TIMEOUT_S)
        except OSError:
            answer = b""
        if not answer:
            self.close()
            raise DataError("ends the image process, or takes it too long; its file is damaged, so write it anew or leave it out")
        return answer

    def _begin_process(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "offbeat.data.image_process", self._model, self._model_type, str(self._placeholder)]
        log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._child = child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        atexit.register(self.close)
        if not _wait_for(child, _START_TIMEOUT_S):
            self.close()
            log.seek(0)
            said = log.read().decode(errors="replace").strip()
            raise ModelError(
                f"the image processor of {self._model} cannot be opened: {said.splitlines()[-1] if said else 'its process ended'}")
        return child

    @cached_property
    def _edges(self) -> Edges | None:
        text = _EDGES.get(self._model_type)
        return None if text is None else Edges(self._model, text)

    @cached_property
    def _files(self) -> tuple[str, ...]:
        return processor_files(self._model)


def read_frame(file: IO[bytes]) -> bytes:
    """Return the next frame; empty at the end of the stream."""
    head = file.read(HEADER.size)
    return file.read(HEADER.unpack(head)[0]) if len(head) == HEADER.size else b""


def write_frame(file: IO[bytes], data: bytes) -> None:
    """Write a frame: its length, and the bytes."""
    file.write(HEADER.pack(len(data)) + data)
    file.flush()


def reads_images(config: dict[str, Any]) -> bool:
    """Whether images are read for models with this config.json."""
    return config["model_type"] in FAMILIES and placeholder_of(config) >= 0


def placeholder_of(config: dict[str, Any]) -> int:
    """Return the id of an image's placeholders in the vocabulary that a config.json states; -1 if it states none."""
    found = config.get("image_token_id", config.get("image_token_index"))
    return found if isinstance(found, int) else -1


def _patch_side(config: dict[str, Any]) -> int:
    found = (config.get("vision_config") or {}).get("patch_size", _PATCH_SIDE)
    return found[0] if isinstance(found, list) else found


def images_for(model: str, store: ImageStore, limits: ImageLimits) -> ImageReader | None:
    """Return the reader of a model folder's images; None if they are not read for it. Raises MissingExtraError if Pillow is missing."""
    if not reads_images(read_model_config(model)) or not any((Path(model) / name).is_file() for name in _PROCESSOR_FILES):
        return None
    require("images", ["PIL"], wanted_by="a model that reads images")
    return ImageReader(model, store, limits)


def same_images(model: str, other: str) -> bool:
    """Whether two model folders make the same of an image, so that each reads what was made for the other."""
    first, second = read_model_config(model), read_model_config(other)
    return first["model_type"] == second["model_type"] and placeholder_of(first) == placeholder_of(second) and (
        processor_files(model) == processor_files(other))


def processor_files(model: str) -> tuple[str, ...]:
    """Return the contents of the processor's files of a model folder, which decide what an image becomes."""
    return tuple(file.read_text() for name in _PROCESSOR_FILES if (file := Path(model) / name).is_file())


def _stamp(source: ImageSource) -> object:
    try:
        return (stat := Path(source.path).stat()).st_mtime_ns, stat.st_size
    except OSError:
        return None


def _wait_for(child: "subprocess.Popen[bytes]", timeout_s: float) -> bytes:
    """Return the next frame of the process; empty if it ends or none begins in time."""
    assert child.stdout is not None, "it is a pipe"
    ready, _, _ = select.select([child.stdout], [], [], timeout_s)
    return read_frame(child.stdout) if ready else b""


