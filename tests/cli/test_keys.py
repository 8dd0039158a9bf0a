"""Where the key of a server comes from."""

from pathlib import Path

import pytest

from offbeat.cli.keys import read_key
from offbeat.errors import ConfigError


def test_a_key_comes_from_the_environment_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBEAT_API_KEY", "from-the-environment")
    (tmp_path / "key").write_text("from-a-file\n")
    (tmp_path / "empty").write_text(" \n")
    assert read_key(None) == "from-the-environment"
    assert read_key(str(tmp_path / "key")) == "from-a-file"
    with pytest.raises(ConfigError, match="--key-file .*empty is empty; write a long random key into it"):
        read_key(str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="--key-file .*none cannot be read: No such file"):
        read_key(str(tmp_path / "none"))
