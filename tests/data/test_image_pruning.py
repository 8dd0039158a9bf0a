"""Stored images go with the last run that used them, and no sooner."""

import os

import numpy as np

from offbeat.data.image_pruning import prune_images
from offbeat.data.image_store import ImageStore


def use(folder, run, *values):
    """Let a run store images, each also under its source, and return their ids."""
    store = ImageStore(folder, run=run)
    images = [
        store.add(np.array([-1]), {"values": np.full(3, value, np.float32)}, grid=(0, 0), size=(1, 1), source="ab", picture=b"PNG")
        for value in values]
    for image in images:
        store.note_source(f"file{image.id}", image)
    return [image.id for image in images]


def stored(folder):
    return {int(path.stem) for path in folder.glob("*.image")}


def test_images_of_a_run_that_is_gone_are_removed_and_those_of_others_kept(tmp_path):
    folder = tmp_path / ".images"
    one, shared = use(folder, "gone", 1.0, 2.0)
    (other,) = use(folder, "moved", 3.0)
    use(folder, "stays", 2.0)
    (unknown,) = use(folder, "", 4.0)
    for name in ("stays", "moved.1"):
        (tmp_path / name).mkdir()
    for path in folder.glob("*.run"):
        os.utime(path, (0, 0))
    pruned = prune_images(folder)
    assert (pruned.runs, pruned.num_removed, pruned.num_kept, pruned.num_unknown) == (("gone",), 1, 3, 1)
    assert pruned.removed_bytes > 0
    assert stored(folder) == {shared, other, unknown} == {int(path.stem) for path in folder.glob("*.png")}
    store = ImageStore(folder)
    assert store.find_source(f"file{one}") is None and store.find_source(f"file{shared}").id == shared
    assert prune_images(folder).runs == ()


def test_a_run_without_a_folder_yet_keeps_its_images(tmp_path):
    folder = tmp_path / ".images"
    images = use(folder, "starting", 1.0)
    assert prune_images(folder).num_removed == 0
    assert stored(folder) == set(images)


def test_an_image_that_is_found_by_its_source_is_noted_by_that_run(tmp_path):
    folder = tmp_path / ".images"
    (image,) = use(folder, "gone", 1.0)
    assert ImageStore(folder, run="stays").find_source(f"file{image}").id == image
    (tmp_path / "stays").mkdir()
    for path in folder.glob("*.run"):
        os.utime(path, (0, 0))
    assert prune_images(folder).num_removed == 0
    assert stored(folder) == {image}


def test_a_folder_without_images_is_pruned_of_nothing(tmp_path):
    assert prune_images(tmp_path / ".images").num_kept == 0
