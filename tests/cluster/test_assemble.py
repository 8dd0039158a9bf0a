"""Choices of modes and launchers. Whole sessions run in the tests of the controller and of SPMD mode."""

from pathlib import Path

from offbeat.cluster.assemble import make_launcher
from offbeat.cluster.local import LocalLauncher
from small_run import small_config


def test_the_launcher_is_the_configured_one(tmp_path: Path) -> None:
    assert isinstance(make_launcher(small_config(tmp_path)), LocalLauncher)
