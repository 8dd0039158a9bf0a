"""`offbeat push`."""

import subprocess
import sys
from pathlib import Path

import pytest

from hub_serving import Hub, serving_hub
from offbeat.cli.main import main


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "digits"
    (folder / "export").mkdir(parents=True)
    (folder / "export" / "config.json").write_text('{"model_type": "llama"}')
    (folder / "export" / "model.safetensors").write_bytes(b"w" * 1234)
    (folder / "config.toml").write_text("[algorithm]\npreset = 'grpo'\n")
    return folder


def call(hub: Hub, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python in an environment where this hub is the only one."""
    return subprocess.run([sys.executable, *words], env=hub.environment(home / "hub"), capture_output=True, text=True, check=False)


def test_what_the_command_sends_to_the_hub_of_the_environment_is_fetched_by_its_hub_id(run_dir: Path, tmp_path: Path) -> None:
    with serving_hub() as hub:
        done = call(hub, tmp_path, "-m", "offbeat", "push", str(run_dir), "me/digits")
        assert (done.returncode, done.stdout) == (0, f"{hub.url}/me/digits\n"), done.stderr
        assert sorted(hub.commits[0][2]) == ["README.md", "config.json", "model.safetensors"]
        code = "from offbeat.data.model_folder import check_model_folder; print(check_model_folder('me/digits'))"
        done = call(hub, tmp_path, "-c", code)
        assert done.returncode == 0, done.stderr
        folder = Path(done.stdout.strip())
        assert folder.is_relative_to(tmp_path / "hub") and (folder / "model.safetensors").read_bytes() == b"w" * 1234


def test_a_dry_run_shows_files_and_card_and_needs_no_token(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert main(["push", str(run_dir), "me/digits", "--dry-run", "--message", "First"]) == 0
    said = capsys.readouterr().out
    assert "would send to me/digits, branch main: First\n" in said and "1,234  model.safetensors\n" in said
    assert "A new repository is public unless" in said and "\nREADME.md:\n\n---\nlibrary_name: transformers" in said


def test_what_cannot_be_pushed_is_one_sentence(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in {
            ("digits",): "must be named as OWNER/NAME", ("me/digits", "--run.seed", "3"): "push takes no settings, got --run.seed",
            ("me/digits", "--checkpoint", "newest"): "--checkpoint must be last, best or the number of a step",
            ("me/digits", "--revision", ""): "--revision must name a branch"}.items():
        assert main(["push", str(run_dir), *words]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
