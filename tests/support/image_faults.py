"""Workflows that hurt the images of a run between sampling and training, and an engine that keeps its vision tower as it was.

The store is the folder that OFFBEAT_TEST_IMAGES names. The engine is that of `stale_tower`.
"""

import os
from dataclasses import replace

import numpy as np

from offbeat.data import wire
from offbeat.data.image_store import FIRST_ID, ImageStore, StoredImage
from offbeat.data.trajectory import Trajectory
from offbeat.rollout.builder import TrajectoryBuilder
from offbeat.rollout.episode import Episode


async def another_resize(episode: Episode) -> list[Trajectory]:
    """Afterwards, the image's file has the values of half the resolution."""
    trajectories = await _play(episode, episode.prompt)
    image = _image(episode)
    _write(replace(image, arrays=image.arrays | {
        "pixel_values": image.arrays["pixel_values"][..., ::2, ::2].repeat(2, axis=-1).repeat(2, axis=-2)}))
    return trajectories


async def swapped(episode: Episode) -> list[Trajectory]:
    """Afterwards, the image's file has the values of another image."""
    trajectories = await _play(episode, episode.prompt)
    image, store = _image(episode), _store()
    other = next(each for path in store.folder.glob("*.image") if (each := wire.decode(StoredImage, path.read_bytes())).id != image.id)
    _write(replace(image, arrays=other.arrays))
    return trajectories


async def too_few_in_training(episode: Episode) -> list[Trajectory]:
    """Samples are right, and their trajectories lack a placeholder."""
    return await _play(episode, episode.prompt, trained=_without_one(episode.prompt))


async def too_few_in_sampling(episode: Episode) -> list[Trajectory]:
    """The engine is asked without a placeholder."""
    return await _play(episode, _without_one(episode.prompt))


async def unhurt(episode: Episode) -> list[Trajectory]:
    """Nothing is wrong, and rewards differ."""
    return await _play(episode, episode.prompt)


async def _play(episode: Episode, prompt: np.ndarray, *, trained: np.ndarray | None = None) -> list[Trajectory]:
    samples = await episode.generate(prompt, episode.sampling, n=episode.group_size)
    return [
        TrajectoryBuilder(prompt if trained is None else trained).generated(sample).finish(float(place % 2))
        for place, sample in enumerate(samples)]


def _without_one(prompt: np.ndarray) -> np.ndarray:
    return np.delete(prompt, np.flatnonzero(np.asarray(prompt) >= FIRST_ID)[-1])


def _store() -> ImageStore:
    return ImageStore(os.environ["OFFBEAT_TEST_IMAGES"])


def _image(episode: Episode) -> StoredImage:
    image_id = int(next(token for token in episode.prompt if token >= FIRST_ID))
    return wire.decode(StoredImage, (_store().folder / f"{image_id}.image").read_bytes())


def _write(image: StoredImage) -> None:
    path = _store().folder / f"{image.id}.image"
    part = path.with_suffix(".part")
    part.write_bytes(wire.encode(image))
    part.replace(path)
