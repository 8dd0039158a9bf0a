"""`offbeat sft`: a real fine-tuning whose result loads."""

import json
from pathlib import Path

from offbeat.cli import main as cli
from offbeat.data.tokenizer import load_tokenizer
from offbeat.model.load import load_causal_lm
from small_run import SmallRun


def test_fine_tuning_exports_a_model_and_reports(tmp_path: Path, model_dir: str, capsys) -> None:
    run = SmallRun(tmp_path, model_dir)
    words = run.arguments(sft__total_steps="3", sft__batch_size="8", data__heldout_size="0")
    assert cli.main(["sft", *words, "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert events[-1] == {"event": "finish", "steps": 3, "accuracy": None, "stopped_early": False}
    assert load_causal_lm(str(run.folder / "export"), attention="sdpa").config.hidden_size == 32
    assert load_tokenizer(run.folder / "export").eos_token_id == load_tokenizer(model_dir).eos_token_id
    assert (run.folder / "report.html").exists()
