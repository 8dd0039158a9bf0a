"""`offbeat completion`: scripts that shells can use."""

import shutil
import subprocess
from pathlib import Path

import pytest

from offbeat.cli import main as cli
from offbeat.cli.completion import fish_script, setting_options, words_of, zsh_script

BASH = shutil.which("bash")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "offbeat.bash"
    path.write_text(zsh_script().partition("bashcompinit && bashcompinit\n")[2])
    return path


def completed(script: Path, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    line = " ".join(f"'{word}'" for word in ("offbeat", *words))
    code = f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _offbeat; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run([BASH or "bash", "--norc", "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_commands_options_settings_and_values(script: Path) -> None:
    assert completed(script, "") == list(cli.COMMANDS)
    assert completed(script, "re") == ["reward-model", "replay", "report"]
    assert completed(script, "--v") == ["--version"]
    assert completed(script, "config", "c") == ["check"]
    assert completed(script, "engine", "--dt") == ["--dtype"]
    assert completed(script, "engine", "--dtype", "b") == ["bfloat16"]
    assert completed(script, "train", "run.toml", "--rollout.group") == ["--rollout.group_size"]
    assert completed(script, "train", "--json", "run.toml", "--on", "--rollout.on_stale", "re") == ["requeue"]
    assert completed(script, "train", "run.toml", "--run.warm_up", "") == ["true", "false"]
    for command in ("report", "compare", "rollouts", "watch", "diff", "replay", "push", "engine"):
        assert completed(script, command, "--rollout.") == [], "it takes no settings"
    assert completed(script, "train", "ru") == [], "bash itself completes files"


def test_every_command_and_every_setting_is_known(script: Path) -> None:
    for name in cli.COMMANDS:
        assert "--help" in {option.name for option in words_of(name).options}, name
        assert "--help" in completed(script, name, "--h")
    assert completed(script, "train", "--telemetry.") == [
        option.name for option in setting_options() if option.name.startswith("--telemetry.")]


def test_fish_and_zsh_have_the_same_words() -> None:
    lines = fish_script().splitlines()
    assert all(line.startswith("complete -c offbeat -n ") and line.count("'") % 2 == line.count("\\'") % 2 for line in lines)
    text = "\n".join(lines)
    assert "-a train -d 'train with reinforcement learning'" in text and "-l rollout.on_stale -x -a 'wait requeue keep'" in text
    assert zsh_script().startswith("#compdef offbeat\n")


def test_settings_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "bash", "--run.name", "x"]) == 2
    assert "takes no settings" in capsys.readouterr().err
