"""`offbeat sft`: a real fine-tuning on chats, evaluated on held-out ones, whose result loads."""

import json
from pathlib import Path

import numpy as np
import pytest

from offbeat.cli import main as cli
from offbeat.data.tokenizer import load_tokenizer
from offbeat.model.load import load_causal_lm
from small_run import SmallRun, offbeat


def chat(number: int) -> str:
    """Two turns, and the number that a reward compares with."""
    said = [("user", f"{number}"), ("assistant", f"{number}"), ("user", "so?"), ("assistant", f"{number}")]
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in said], "answer": number})


def test_fine_tuning_on_chats_evaluates_exports_and_reports(tmp_path: Path, model_dir: str, capsys) -> None:
    run = SmallRun(tmp_path, model_dir)
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(chat(number % 10) + "\n" for number in range(20)))
    words = run.arguments(
        data__task="", data__path=str(path), data__format="messages", data__heldout_size="4", rollout__reward="",
        sft__total_steps="3", sft__batch_size="8", checkpoint__export_every_steps="2")
    assert cli.main(["sft", *words, "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    result = json.loads((run.folder / "result.json").read_text())
    assert events[-1] == {"event": "finish"} | result
    assert (result["steps"], result["seed"], result["stopped_early"]) == (3, 0, False) and 0 <= result["accuracy"] <= 1
    assert result["trained_tokens"] == 3 * 8 * 2 * 2 and result["final_loss"] == run.metrics()[-1]["train/loss"]
    assert result["train_wall_s"] > 0 and result["startup_wall_s"] > 0 and result["controller_memory_bytes"] > 0
    assert [row["train/tokens"] for row in run.metrics()] == [8 * 2 * 2] * 3, "one digit and the end token, in both turns"
    for export in ("export", "exports/step-00000002"):
        assert load_causal_lm(str(run.folder / export), attention="sdpa").config.hidden_size == 32
        assert load_tokenizer(run.folder / export).eos_token_id == load_tokenizer(model_dir).eos_token_id
    assert (run.folder / "report.html").exists()
    assert cli.main(["sft", *words]) == 2
    assert "is already complete (3 supervised steps); raise sft.total_steps to continue" in capsys.readouterr().err


@pytest.mark.whole_run
def test_two_ranks_that_divide_each_row_have_the_losses_of_one(tmp_path: Path, model_dir: str) -> None:
    found = []
    for name, changes in (("one", {}), ("two", {"train__num_ranks": "2", "train__parallel__cp": "2"})):
        run = SmallRun(tmp_path / name, model_dir)
        run.root.mkdir()
        done = offbeat("sft", *run.arguments(sft__total_steps="3", sft__batch_size="8", **changes))
        assert done.returncode == 0, done.stderr
        found.append([[row[f"train/{key}"] for key in ("loss", "grad_norm", "entropy", "tokens")] for row in run.metrics()])
    assert len(found[0]) == 3
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
