"""`offbeat reward-model`: a real training that goes on where it stopped, and a real run that its export rewards."""

import json
from pathlib import Path

import pytest

from offbeat.cli import main as cli
from offbeat.data.reward_model import open_reward_folder
from small_run import SmallRun, read_rollouts


def record(number: int) -> str:
    """A number that is to be repeated."""
    return json.dumps({"prompt": f"{number}>", "chosen": f"{number}", "rejected": f"{number}{number}"})


@pytest.mark.whole_run
def test_a_reward_model_is_trained_resumed_exported_and_rewards_a_run(tmp_path: Path, model_dir: str, capsys) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(record(number) + "\n" for number in range(40)))
    settings = {
        "data__task": "", "data__path": str(pairs), "data__heldout_size": "8", "rollout__reward": "", "reward_model__batch_size": "8",
        "reward_model__optimizer__lr": "3e-3", "checkpoint__every_steps": "2", "reward_model__evaluate_every_steps": "3"}
    run = SmallRun(tmp_path, model_dir)
    for total in ("2", "4"):
        assert cli.main(["reward-model", *run.arguments(**settings, reward_model__total_steps=total), "--json"]) == 0
    capsys.readouterr()
    rows = run.metrics()
    result = json.loads((run.folder / "result.json").read_text())
    assert [row["global_step"] for row in rows] == [1, 2, 3, 4], "the second command went on"
    assert result["steps"] == 4 and result["accuracy"] == rows[-1]["eval/accuracy"]
    assert result["trained_tokens"] == 4 * 16, "the answers of the pairs"
    assert {"reward_model/accuracy", "reward_model/margin_mean", "reward_model/reward_mean", "eval/margin_mean"} <= rows[-1].keys()
    assert cli.main(["reward-model", *run.arguments(**settings, reward_model__total_steps="4")]) == 2
    assert "is already complete (4 reward model steps); raise reward_model.total_steps to continue" in capsys.readouterr().err
    export = run.folder / "export"
    assert not open_reward_folder(str(export)).tokenizer.has_chat_template, "its pairs were plain text"

    rewarded = {"rollout__reward": f"model:{export}", "run__name": "rewarded"}
    assert cli.main(["train", *run.arguments(**rewarded), "--json"]) == 0
    groups = [group for step in (1, 2) for group in read_rollouts(tmp_path / "rewarded" / "rollouts" / f"step-{step:06d}.jsonl.zst")]
    rewards = [trajectory["reward"] for group in groups for trajectory in group["trajectories"]]
    assert len(rewards) == 8 and len(set(rewards)) > 1 and all(abs(reward) < 100 for reward in rewards)
    capsys.readouterr()
    assert cli.main(["train", *run.arguments(rollout__reward=f"model:{model_dir}", run__name="other")]) == 2
    assert "must be a model for sequence classification, got Qwen3ForCausalLM" in capsys.readouterr().err
