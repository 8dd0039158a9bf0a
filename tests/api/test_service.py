"""A service that a program starts: it serves, refuses in its own words, and ends with all its processes."""

import json
import urllib.request
from pathlib import Path

import psutil
import pytest

import offbeat
from offbeat.api.service import _differing
from offbeat.config.load import load_config
from offbeat.errors import ConfigError
from waiting import wait_until


@pytest.mark.drill
def test_a_service_serves_until_it_is_closed(model_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(psutil.Process().children(recursive=True))
    with offbeat.serve(model_dir, name="org/small", data_dir=tmp_path / "data", settings={"model.lora.rank": 4}) as service:
        with urllib.request.urlopen(f"{service.url}/api/v1/healthz", timeout=60) as answer:
            assert json.loads(answer.read())["status"] == "ok"
        tree = set(psutil.Process().children(recursive=True)) - before
        assert len(tree) >= 3
        with pytest.raises(ConfigError, match="data"):
            offbeat.serve(model_dir, data_dir=tmp_path / "data", progress=False)
    wait_until(lambda: not any(process.is_running() for process in tree), timeout_s=60)
    out = capsys.readouterr().out
    assert f"serving org/small at {service.url}" in out and "ending: saving every model" in out
    service.close()


def test_what_differs_from_the_defaults_is_told_to_the_command() -> None:
    config = load_config(None, values={
        "model.path": "a", "serve.port": 0, "serve.aliases": ["b"], "train.optimizer.lr": 0.5, "evaluate.sets": {"x": {"num_prompts": 1}}})
    assert dict(_differing(config)) == {
        "serve.port": 0, "serve.aliases": ("b",), "train.optimizer.lr": 0.5, "evaluate.sets": {"x": {"num_prompts": 1}}}


def test_a_mistake_is_told_before_anything_is_started(model_dir: str) -> None:
    with pytest.raises(ConfigError, match="prot is not a setting"):
        offbeat.serve(model_dir, prot=1)
