"""vLLM's processes find Offbeat's files by PYTHONPATH, as they have no package."""

from pathlib import Path

import pytest

from offbeat.engine import inside


@pytest.fixture(autouse=True)
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(inside.__file__).parent))
