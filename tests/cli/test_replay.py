from pathlib import Path

import pytest

from offbeat.cli.main import main


@pytest.mark.parametrize(("words", "told"), [
    (("--from-step", "0"), "--from-step must be at least 1, got 0"),
    (("--from-step", "3", "--to-step", "2"), "--from-step 3 is after --to-step 2"),
    (("--groups", "2"), "--groups is for --live, which is not given"),
    (("--live", "--groups", "-1"), "--groups must be at least 0, got -1; 0 is for all groups"),
    (("--train.threads", "1"), "replay takes no settings, got --train.threads"),
    ((), "has no config.toml, so it is not the folder of a run"),
])
def test_what_cannot_be_replayed_is_refused_in_a_sentence(
    words: tuple[str, ...], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["replay", str(tmp_path), *words]) == 2
    assert told in capsys.readouterr().err
