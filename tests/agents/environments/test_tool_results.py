"""Results of tools as text and images."""

from types import SimpleNamespace

import numpy as np

from image_models import file_of, picture
from offbeat.agents.environments.tool_results import image_of_mcp, shown_result
from offbeat.chat.image_parts import Shown
from offbeat.data.image_sources import MARK, ImageSource


def test_text_stays_and_other_values_are_json() -> None:
    assert shown_result("a\nb") == Shown("a\nb")
    assert shown_result({"a": 1}) == Shown('{"a": 1}') and shown_result([1, "é"]) == Shown('[1, "é"]')
    assert shown_result(None) == Shown("null") and shown_result(b"bytes") == Shown('"b\'bytes\'"')
    assert shown_result(np.zeros((2, 2), np.uint8)).images == ()


def test_images_of_each_kind_are_shown() -> None:
    image, file = picture(3), file_of(picture(3))
    assert shown_result(file) == Shown(MARK, (ImageSource(data=file),))
    for value in (image, np.asarray(image), ImageSource(data=file), file):
        shown = shown_result(["before", value, {"x": 1}, "after", f"a{MARK}"])
        assert shown.text == f'before{MARK}{{"x": 1}}\nafter\na' and len(shown.images) == 1
        assert shown.images[0].data.startswith(b"\x89PNG")


def test_an_image_of_an_mcp_server_is_shown() -> None:
    assert image_of_mcp(SimpleNamespace(type="image", data="AAAA", mimeType="image/png")) == ImageSource(data=bytes(3))
    assert image_of_mcp(SimpleNamespace(type="audio", data="AAAA")) is None and image_of_mcp(SimpleNamespace(type="text", text="x")) is None
