"""Images by their ids: stored once, checked when read, found in sequences, and their positions."""

import os

import numpy as np
import pytest

from offbeat.data import wire
from offbeat.data.image_store import FIRST_ID, ImageStore, find_images, find_pictures, image_positions, images_folder, link_images
from offbeat.errors import BusyError, DataError


def add(folder, value=0.0, *, grid=(0, 0), tokens=(7, -1, -1, 8, -1, -1, 9)):
    return ImageStore(folder).add(
        np.array(tokens), {"pixel_values": np.full((1, 3), value, np.float32)}, grid=grid, size=(40, 28), source="ab" * 32)


def test_an_image_is_stored_once_and_read_by_every_process(tmp_path):
    image, again = add(tmp_path), add(tmp_path)
    assert image.id == again.id >= FIRST_ID
    assert len(list(tmp_path.glob("*.image"))) == 1
    found = ImageStore(tmp_path).get(image.id)
    assert found.digest == image.digest
    assert found.tokens.tolist() == [7, *[image.id] * 2, 8, *[image.id] * 2, 9]
    assert found.label == "<image 40x28 abababab>"
    assert images_folder(tmp_path / "run") == tmp_path / ".images"


def test_pictures_are_found_by_the_ids_of_a_sequence(tmp_path):
    store = ImageStore(tmp_path / ".images")
    shown, without = (
        store.add(np.array([-1]), {"values": np.full(3, value, np.float32)}, grid=(0, 0), size=(1, 1), source="", picture=picture)
        for value, picture in ((0.0, b"PNG"), (1.0, b"")))
    found = find_pictures(tmp_path / "run", [5, shown.id, shown.id, 6, without.id, FIRST_ID])
    assert found == {shown.id: tmp_path / ".images" / f"{shown.id}.png"}
    assert found[shown.id].read_bytes() == b"PNG"


def test_a_store_of_links_has_the_images_of_another_and_adds_to_its_own_alone(tmp_path):
    image, store = add(tmp_path / "a"), ImageStore(tmp_path / "a", run="b")
    store.note_source("key", image)
    store.find_source("key")
    before = {path: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    link_images(tmp_path / "a", into=tmp_path / "b")
    linked = ImageStore(tmp_path / "b", run="b")
    assert linked.find_source("key").digest == add(tmp_path / "b").digest == image.digest
    other = add(tmp_path / "b", 1.0)
    linked.note_source("key", other)
    assert linked.find_source("key").id == other.id
    assert {path: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before
    link_images(tmp_path / "none", into=tmp_path / "c")
    assert not list((tmp_path / "c").iterdir())


def test_other_pixels_under_an_id_are_refused(tmp_path):
    one, other = add(tmp_path, 0.0), add(tmp_path, 1.0)
    assert one.id != other.id
    (tmp_path / f"{other.id}.image").rename(tmp_path / f"{one.id}.image")
    with pytest.raises(DataError, match="holds other pixel values"):
        ImageStore(tmp_path).get(one.id)


def test_a_resized_image_under_its_own_id_is_refused(tmp_path):
    image = add(tmp_path)
    path = tmp_path / f"{image.id}.image"
    data = wire.encode(type(image)(image.id, image.tokens, {"pixel_values": np.ones((1, 4), np.float32)}, (0, 0), (40, 28), image.source))
    path.write_bytes(data)
    with pytest.raises(DataError, match="holds other pixel values"):
        ImageStore(tmp_path).get(image.id)


def test_an_image_that_is_asked_for_counts_as_used(tmp_path):
    image = add(tmp_path)
    path = tmp_path / f"{image.id}.image"
    os.utime(path, (0, 0))
    store = ImageStore(tmp_path, most_bytes=1000)
    assert store.is_stored(image.id)
    assert path.stat().st_mtime > 0
    assert not store.is_stored(FIRST_ID + 5)


def test_an_image_that_is_not_here_is_named(tmp_path):
    with pytest.raises(DataError, match="is not in"):
        ImageStore(tmp_path).get(FIRST_ID + 5)


def test_images_are_found_in_a_sequence(tmp_path):
    one, other = add(tmp_path, 0.0), add(tmp_path, 1.0)
    tokens = np.array([5, *one.tokens, 5, *other.tokens, *one.tokens, 4])
    found = find_images(tokens, ImageStore(tmp_path))
    assert [image.id for image, _ in found] == [one.id, other.id, one.id]
    assert found[0][1].tolist() == [2, 3, 5, 6]


@pytest.mark.parametrize("change", [lambda t: np.delete(t, 2), lambda t: np.delete(t, 3), lambda t: np.where(t == 8, 6, t)])
def test_a_placeholder_too_few_or_another_token_between_them_is_refused(tmp_path, change):
    image = add(tmp_path)
    with pytest.raises(DataError, match="placeholders"):
        find_images(change(np.array([5, *image.tokens, 5])), ImageStore(tmp_path))


def test_a_sequence_may_end_within_an_image_where_it_is_computed_in_parts(tmp_path):
    image = add(tmp_path)
    [(found, places)] = find_images(image.tokens[:5], ImageStore(tmp_path), cut=True)
    assert (found.id, places.tolist()) == (image.id, [1, 2, 4])


def test_positions_count_rows_and_columns_of_an_image(tmp_path):
    image = add(tmp_path, grid=(2, 3), tokens=[-1] * 6)
    positions = image_positions(10, [(image, np.arange(2, 8))])
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6], [0, 1, 2, 2, 2, 3, 3, 3, 5, 6], [0, 1, 2, 3, 4, 2, 3, 4, 5, 6]]


def test_images_that_were_not_used_for_an_hour_make_room_for_others(tmp_path):
    store = ImageStore(tmp_path, most_bytes=20_000)
    pixels = [np.full((1500,), number, np.float32) for number in range(5)]  # 6,000 bytes each
    stored = [store.add(np.array([-1]), {"pixel_values": each}, grid=(0, 0), size=(1, 1), source=str(number))
              for number, each in enumerate(pixels[:3])]
    with pytest.raises(BusyError, match="there is no room for another image"):
        store.add(np.array([-1]), {"pixel_values": pixels[3]}, grid=(0, 0), size=(1, 1), source="3")
    paths = [tmp_path / f"{image.id}.image" for image in stored]
    for number, path in enumerate(paths):
        os.utime(path, (number, number))
    store.note_source("used", stored[0])
    assert store.find_source("used") is not None
    store.add(np.array([-1]), {"pixel_values": pixels[3]}, grid=(0, 0), size=(1, 1), source="3")
    assert [path.exists() for path in paths] == [True, False, True]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 20_000
