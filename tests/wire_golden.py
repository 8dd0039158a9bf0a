"""What the public Tinker client writes and reads, as tests/service/wire/make_golden.py recorded it; for tests of the wire."""

import base64
import json
from pathlib import Path
from typing import Any

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "service/wire/golden.json").read_text())
REQUESTS: dict[str, dict[str, Any]] = {request["name"]: request for request in GOLDEN["requests"]}


def golden_bytes(recorded: dict[str, Any]) -> bytes:
    """The bytes of a request or a result."""
    return base64.b64decode(recorded["body"])
