"""Images of a Python program as data URIs."""

import numpy as np
import pytest

from image_models import file_of, picture
from offbeat.data.image_memory import as_uris
from offbeat.data.image_sources import ImageSource
from offbeat.errors import DataError


def test_images_are_data_uris_at_any_depth_and_other_values_stay():
    pixels = np.asarray(picture())
    for image in (picture(), pixels, file_of(picture())):
        assert as_uris({"a": [{"image": image}]})["a"][0]["image"].startswith("data:image/")
    assert as_uris([1, "text", b"text", {"x": None}]) == [1, "text", b"text", {"x": None}]
    assert as_uris(ImageSource(path="a.png")) == "a.png"
    floats = np.zeros((2, 2), np.float32)
    assert as_uris(floats) is floats


def test_an_array_of_another_shape_is_refused():
    with pytest.raises(DataError, match="got \\(3, 4, 5\\)"):
        as_uris(np.zeros((3, 4, 5), np.uint8))
