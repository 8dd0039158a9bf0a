"""A controller saves, evaluates, recovers and logs without a device: the platform, the sync points and torch stay out of its process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from small_run import ENVIRONMENT, SmallRun

CONTROLLER = """
import sys, types


class Untouchable(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):  # the import system itself looks for these
            raise AttributeError(name)
        raise AssertionError(f"the controller touched {self.__name__}.{name}")


for name in ("offbeat.sync.platform", "offbeat.sync.mesh", "offbeat.sync.sync"):
    sys.modules[name] = Untouchable(name)

from offbeat.cli.main import main

code = main(sys.argv[1:])
assert "torch" not in sys.modules, "the controller imported torch"
sys.exit(code)
"""


def control(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CONTROLLER, *arguments], capture_output=True, text=True, timeout=200, check=False,
        env=os.environ | ENVIRONMENT)


def test_the_guard_itself_raises() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CONTROLLER.partition("from offbeat.cli")[0] + "\nfrom offbeat.sync.platform import current_platform"],
        capture_output=True, text=True, timeout=120, check=False)
    assert "the controller touched offbeat.sync.platform.current_platform" in done.stderr


@pytest.mark.drill
def test_a_whole_run_with_warm_up_evaluation_and_recovery_touches_no_device(tmp_path: Path, model_dir: str) -> None:
    run = SmallRun(tmp_path, model_dir)
    often = {"checkpoint__every_steps": "1", "evaluate__every_steps": "1", "train__num_ranks": "2"}
    first = control("train", *run.arguments(run__warm_up="true", sft__total_steps="2", sft__batch_size="4", **often), "--json")
    assert first.returncode == 0, first.stderr
    assert len(run.events("evaluation")) == 3 and len(run.events("checkpoint")) == 2 and len(run.events("sft_step")) == 2
    second = control("train", *run.arguments(run__total_steps="3", **often | {"train__num_ranks": "1"}), "--json")
    assert second.returncode == 0, second.stderr
    assert len(run.events("resumed")) == 1
    assert [row["global_step"] for row in run.metrics()] == [1, 2, 3]


@pytest.mark.drill
def test_supervised_fine_tuning_touches_no_device(tmp_path: Path, model_dir: str) -> None:
    run = SmallRun(tmp_path, model_dir)
    done = control("sft", *run.arguments(sft__total_steps="2", sft__batch_size="4", sft__evaluate_every_steps="1"), "--json")
    assert done.returncode == 0, done.stderr
    assert [row["global_step"] for row in run.metrics()] == [1, 2] and (run.folder / "export" / "model.safetensors").exists()
