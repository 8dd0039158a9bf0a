"""A TOML file is read as it is, or refused in a sentence."""

from pathlib import Path

import pytest

from offbeat.config.toml_file import read_toml
from offbeat.errors import ConfigError


def test_settings_that_this_version_does_not_know_are_read_like_all_others(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(b"\xef\xbb\xbf[run]\nconsumer_steps = 0\n")  # with the mark that editors on Windows put first
    assert read_toml(file) == {"run": {"consumer_steps": 0}}


def test_a_missing_or_damaged_file_is_refused_with_the_place(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    with pytest.raises(ConfigError, match=r"config.toml does not exist; give the path of a TOML file"):
        read_toml(file)
    file.write_text("[run]\nname =\n")
    with pytest.raises(ConfigError, match=r"config.toml is not valid TOML at line 2, column 7: invalid value"):
        read_toml(file)
