"""Recorded answers are generated again by an engine on each version of the weights."""

from pathlib import Path

import pytest

from offbeat.config.load import load_config
from offbeat.errors import ConfigError
from offbeat.runs.live_engines import check_live
from small_run import SmallRun, offbeat, small_config
from support import playing

PLAYING = Path(playing.__file__)
SEEDED = {"inference__seeded_requests": "true", "inference__batch_invariant": "true", "rollout__max_head_offpolicyness": "1"}


@pytest.mark.parametrize(("settings", "told"), [
    ({"inference": {"urls": ("http://localhost:9",)}}, "this one had engines by URL; leave --live out"),
    ({"inference": {"engine": "vllm"}}, "this one had inference.engine = 'vllm'"),
])
def test_runs_of_other_engines_are_refused(tmp_path: Path, settings: dict[str, dict[str, object]], told: str) -> None:
    values = small_config(tmp_path, "model").model_dump()
    config = load_config(None, [], values=values | {name: values[name] | each for name, each in settings.items()})
    with pytest.raises(ConfigError, match=told):
        check_live(config)


@pytest.mark.drill
@pytest.mark.parametrize("settings", [
    SEEDED, SEEDED | {"model__lora__rank": "4", "train__optimizer__lr": "1e-2"},
    SEEDED | {
        "rollout__workflow": "gym", "agent__environment": f"{PLAYING}:Digits", "agent__processes": "1", "rollout__max_new_tokens": "8"},
], ids=["whole model", "adapter", "agents"])
def test_with_seeds_all_tokens_are_sampled_again_bit_for_bit(tmp_path: Path, model_dir: str, settings: dict[str, str]) -> None:
    run = SmallRun(tmp_path, model_dir)
    done = offbeat("train", *run.arguments(**settings, checkpoint__journal_keep="all", run__total_steps="4"))
    assert done.returncode == 0, done.stderr
    again = offbeat("replay", str(run.folder), "--live", "--groups", "0")
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count("2 groups generated again:") == 4 and again.stdout.count("their log-probabilities bit for bit") == 4


@pytest.mark.drill
def test_without_seeds_the_first_token_that_differs_is_named_with_the_reason(tmp_path: Path, model_dir: str) -> None:
    run = SmallRun(tmp_path, model_dir)
    assert offbeat("train", *run.arguments(checkpoint__journal_keep="all", run__total_steps="2")).returncode == 0
    again = offbeat("replay", str(run.folder), "--live", "--groups", "0")
    assert again.returncode == 1, again.stdout + again.stderr
    assert "engines drew random numbers that are not recorded, as inference.seeded_requests was off" in again.stdout
