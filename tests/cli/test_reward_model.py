"""`offbeat reward-model`: a real training that stops and goes on, and a real run that is rewarded by its export."""

import json
from pathlib import Path

from offbeat.cli import main as cli
from offbeat.data.reward_model import open_reward_folder
from small_run import SmallRun


def record(number: int) -> str:
    """A number that is to be repeated."""
    return json.dumps({"prompt": f"{number}>", "chosen": f"{number}", "rejected": f"{number}{number}"})


def test_a_reward_model_is_trained_resumed_exported_and_rewards_a_run(tmp_path: Path, model_dir: str, capsys) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(record(number) + "\n" for number in range(40)))
    settings = {
        "data__task": "", "data__path": str(pairs), "data__heldout_size": "8", "rollout__reward": "", "reward_model__batch_size": "8",
        "reward_model__optimizer__lr": "3e-3", "checkpoint__every_steps": "2", "reward_model__evaluate_every_steps": "3"}
    through, halves = SmallRun(tmp_path / "through", model_dir), SmallRun(tmp_path / "halves", model_dir)
    for run, totals in ((through, ["4"]), (halves, ["2", "4"])):
        run.root.mkdir()
        for total in totals:
            assert cli.main(["reward-model", *run.arguments(**settings, reward_model__total_steps=total), "--json"]) == 0
    capsys.readouterr()
    losses = [[row["train/loss"] for row in run.metrics()] for run in (through, halves)]
    assert losses[0] == losses[1] and len(losses[0]) == 4, "a resumed run has the very losses that it would have had"
    last = through.metrics()[-1]
    result = json.loads((through.folder / "result.json").read_text())
    assert result["steps"] == 4 and result["accuracy"] == last["eval/accuracy"] and not result["torch_in_controller"]
    assert result["trained_tokens"] == 4 * 16, "the answers of the pairs"
    assert {"reward_model/accuracy", "reward_model/margin_mean", "reward_model/reward_mean", "eval/margin_mean"} <= last.keys()
    assert cli.main(["reward-model", *through.arguments(**settings, reward_model__total_steps="4")]) == 2
    assert "has done its 4 reward model steps; raise reward_model.total_steps to go on" in capsys.readouterr().err
    export = through.folder / "export"
    assert not open_reward_folder(str(export)).tokenizer.has_chat_template, "its pairs were plain text"

    rewarded = SmallRun(tmp_path / "rewarded", model_dir)
    rewarded.root.mkdir()
    assert cli.main(["train", *rewarded.arguments(rollout__reward=f"model:{export}"), "--json"]) == 0
    rewards = [sample["reward"] for step in (1, 2) for group in rewarded.groups(step) for sample in group["samples"]]
    assert len(set(rewards)) > 1 and all(abs(reward) < 100 for reward in rewards)
    assert not json.loads((rewarded.folder / "result.json").read_text())["torch_in_controller"]
    capsys.readouterr()
    assert cli.main(["train", *SmallRun(rewarded.root, model_dir).arguments(rollout__reward=f"model:{model_dir}", run__name="other")]) == 2
    assert "must be a model for sequence classification, got Qwen3ForCausalLM" in capsys.readouterr().err
