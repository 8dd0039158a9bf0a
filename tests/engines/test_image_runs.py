"""Runs on pictures whose engine is vLLM: versions are proven, and faults of images are caught before a step trains on them."""

import json
from pathlib import Path

import pytest

from contract import WITH_VLLM
from runs.test_image_faults import SUPPORT, play

pytestmark = [pytest.mark.whole_run, pytest.mark.timeout(400), pytest.mark.skipif(not WITH_VLLM, reason="make test-vllm runs it")]
VLLM = (
    "--inference.engine=vllm", "--inference.start_timeout_s=200", "--inference.max_running=16", "--weights.switch_timeout_s=60",
    "--inference.probe_timeout_s=60")


def test_a_run_trains_on_pictures_and_proves_each_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, steps = play(
        tmp_path, *VLLM, f"--rollout.workflow={SUPPORT / 'image_faults.py'}:unhurt", "--train.optimizer.lr=1e-3", head_dim=32)
    assert (code, steps) == (0, [1, 2, 3]), capsys.readouterr().err
    run = tmp_path / "runs" / "faulty"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    publishes = [event for event in events if event["kind"] == "publish"]
    assert [event["version"] for event in publishes] == [0, 1, 2, 3]
    assert all(event["canary_gap"] < 1e-4 and not event["quarantined"] for event in publishes)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(row["policy/logprob_gap_max"] < 1e-3 for row in metrics if "train/tokens" in row)


@pytest.mark.parametrize(("workflow", "sentence"), [
    ("another_resize", "holds other pixel values than those that its id stands for"),
    ("swapped", "holds other pixel values than those that its id stands for"),
    ("too_few_in_training", "has 3 placeholders in a row of image"),
    ("too_few_in_sampling", "has 3 placeholders in a row of image")])
def test_a_run_trains_on_no_image_that_was_hurt(
    workflow: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OFFBEAT_TEST_IMAGES", str(tmp_path / "runs" / ".images"))
    code, steps = play(tmp_path, *VLLM, f"--rollout.workflow={SUPPORT / 'image_faults.py'}:{workflow}", head_dim=32)
    assert code and not steps
    assert sentence in capsys.readouterr().err
