"""`offbeat dpo`: a real run of the command learns what was preferred, exports a model, and says that it is finished."""

import json
from pathlib import Path

from offbeat.cli import main as cli
from offbeat.data.tokenizer import load_tokenizer
from offbeat.model.load import load_causal_lm
from small_run import SmallRun


def test_training_on_pairs_ranks_held_out_ones_exports_and_reports(tmp_path: Path, model_dir: str, capsys) -> None:
    run = SmallRun(tmp_path, model_dir)
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(
        json.dumps({"prompt": f"{i}=", "chosen": f"{i % 7}{i % 5}", "rejected": f"a{i % 7}b"}) + "\n" for i in range(40)))
    words = run.arguments(
        data__task="", data__path=str(path), data__heldout_size="8", rollout__reward="", preference__total_steps="12",
        preference__batch_size="8", preference__optimizer__lr="5e-3", preference__optimizer__warmup_steps="0")
    assert cli.main(["dpo", *words, "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    result = json.loads((run.folder / "result.json").read_text())
    assert events[-1] == {"event": "finish"} | result
    assert (result["steps"], result["stopped_early"]) == (12, False)
    assert result["accuracy"] == 1.0 == run.metrics()[-1]["eval/accuracy"]
    first, last = run.metrics()[0], run.metrics()[-1]
    assert first["train/loss"] > last["train/loss"] and last["preference/accuracy"] == 1.0
    assert last["preference/chosen_logratio_mean"] > last["preference/rejected_logratio_mean"]
    assert [event["step"] for event in run.events("preference_step")] == list(range(1, 13))
    assert load_causal_lm(str(run.folder / "export"), attention="sdpa").config.hidden_size == 32
    assert load_tokenizer(run.folder / "export").eos_token_id == load_tokenizer(model_dir).eos_token_id
    assert (run.folder / "report.html").exists() and not list((run.folder / "logs").glob("engine*")), "no engine is started"
    assert cli.main(["dpo", *words]) == 2
    assert "is already complete (12 preference steps); raise preference.total_steps to continue" in capsys.readouterr().err
