"""`offbeat init`: a folder to begin with, which is valid and trains."""

import json
from pathlib import Path

import pytest

from offbeat.cli.main import main
from offbeat.config.load import load_config
from offbeat.config.rates import choose_rate
from small_run import SETTINGS, offbeat

FILES = ["README.md", "data.jsonl", "reward.py", "task.toml"]


def test_the_folder_is_valid_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine"]) == 0
    assert capsys.readouterr().out.endswith("try: cd mine && offbeat train task.toml\n")
    assert sorted(path.name for path in Path("mine").iterdir()) == FILES
    monkeypatch.chdir("mine")
    assert main(["config", "check", "task.toml"]) == 0
    assert capsys.readouterr().out.startswith("task.toml is valid; its run goes to runs/mine")
    rows = [json.loads(line) for line in Path("data.jsonl").read_text().splitlines()]
    assert all(row["answer"] == "".join(sorted(row["prompt"][:-1])) for row in rows) and len(rows) > 1000
    assert len({row["prompt"] for row in rows}) > 0.9 * len(rows)
    assert load_config("task.toml").data.heldout_size < len(rows)


@pytest.mark.parametrize(
    ("folder", "name"), [("sort3", "sort3"), ("a task/of Mine!", "of-Mine-"), ("_x", "x"), ("..b", "b"), ("+", "my-task"), (".", "here")])
def test_the_run_is_named_after_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, name: str) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["init", folder]) == 0
    assert load_config(Path(folder, "task.toml")).run.name == name
    assert f"`runs/{name}/report.html`" in Path(folder, "README.md").read_text()


def test_a_pretrained_model_is_trained_at_the_rate_that_is_chosen_for_it(tmp_path: Path) -> None:
    assert main(["init", str(tmp_path / "mine")]) == 0
    docs = Path(__file__).parents[2] / "docs"
    assert '# "auto" for a pretrained model' in (tmp_path / "mine" / "task.toml").read_text()
    assert "--model.lora.rank 16 --train.optimizer.lr auto" in (tmp_path / "mine" / "README.md").read_text()
    assert "1e-4 is the rate to begin with for an adapter" in (docs / "tutorial.md").read_text()
    assert choose_rate("rl", width=576, adapter=True) == 1e-4


def test_the_warm_up_goes_on_until_most_greedy_answers_are_right(tmp_path: Path) -> None:
    assert main(["init", str(tmp_path / "mine")]) == 0
    assert load_config(str(tmp_path / "mine" / "task.toml")).sft.stop_at_accuracy >= 0.6


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "reward.py").write_text("mine")
    assert main(["init", str(tmp_path)]) == 2
    assert "reward.py exists already, and nothing is overwritten" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["reward.py"]
    assert main(["init", str(tmp_path / "reward.py" / "x")]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.drill
def test_it_trains(tmp_path: Path) -> None:
    """With fewer samples and steps, so that the test is short; everything else is as it is written, the warm-up and the model included."""
    folder = tmp_path / "mine"
    assert main(["init", str(folder)]) == 0
    small = {name: value for name, value in SETTINGS.items() if name.startswith(("rollout.group", "rollout.consumer", "rollout.max_con"))}
    given = {
        **small, "run.total_steps": "2", "sft.total_steps": "2", "sft.batch_size": "8", "sft.evaluate_every_steps": "0",
        "data.path": str(folder / "data.jsonl"),
        "rollout.reward": f"{folder / 'reward.py'}:digits_in_place", "run.dir": str(tmp_path / "runs"), "data.heldout_size": "4",
        "train.threads": "1", "inference.threads": "1", "cluster.stop_timeout_s": "3"}
    done = offbeat(
        "train", str(folder / "task.toml"), *(word for name, value in given.items() for word in (f"--{name}", value)), "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "runs" / "mine" / "result.json").read_text())
    assert (result["steps"], result["warm_up_steps"]) == (2, 2)
