"""Which SDK asks."""

import pytest

from offbeat.service.app.sdk import knows_external, sdk_version


@pytest.mark.parametrize(("headers", "version", "external"), [
    ({"user-agent": "AsyncTinker/Python 0.38.0"}, (0, 38), True), ({"user-agent": "AsyncTinker/Python 0.30.4"}, (0, 30), True),
    ({"user-agent": "AsyncTinker/Python 0.28.0rc1"}, (0, 28), True), ({"user-agent": "AsyncTinker/Python 0.27.2"}, (0, 27), False),
    ({"user-agent": "AsyncTinker/Python 0.9.0"}, (0, 9), False), ({"user-agent": "AsyncTinker/Python 1.0"}, (1, 0), True),
    ({"user-agent": "curl/8.0", "x-sdk-version": "0.25.1"}, (0, 25), False),
    ({"user-agent": "curl/8.0"}, None, True), ({}, None, True), ({"x-sdk-version": "new"}, None, True),
    ({"user-agent": "AsyncTinker/Python " + "9" * 100}, None, True)])
def test_the_version_is_what_the_headers_say(headers: dict[str, str], version: tuple[int, int] | None, external: bool) -> None:
    assert sdk_version(headers) == version and knows_external(headers) is external
