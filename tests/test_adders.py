"""What CONTRIBUTING names is enough: each thing is added to a copy of the package by those files alone, and a run trains with it."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from small_run import ENVIRONMENT, SmallRun, build_small_model

_PACKAGE = Path(__file__).parents[1] / "src" / "offbeat"


@dataclass(frozen=True)
class Addition:
    """Lines for files of the package, each put before a line that is there, and settings that use what they add.

    Attributes:
        lines: {file: [(line before which they are put, lines)]}.
        settings: of a run, with "__" for the point.
        shown: a metric of each step that comes with it.
    """

    lines: dict[str, list[tuple[str, str]]]
    settings: dict[str, str]
    shown: str

    def apply(self, package: Path) -> None:
        for name, insertions in self.lines.items():
            path = package / name
            text = path.read_text(encoding="utf-8")
            for before, added in insertions:
                assert text.count(before) == 1, f"{name} has {before!r} {text.count(before)} times"
                text = text.replace(before, added + before)
            path.write_text(text, encoding="utf-8")


ADDITIONS = {
    "objective": Addition({
        "config/objectives.py": [
            ('    "ppo": Objective(\n', '    "toy": Objective(_RUN, constants={"strength": Constant(1.0)}, bounds="distance"),\n')],
        "losses/objectives.py": [
            ("@dataclass(frozen=True)\nclass Formula:",
             "def toy(targets, trained):\n"
             '    return -targets.constants["strength"] * only(trained, targets.logprobs) * targets.advantages\n\n\n'
             "def toy_clips(targets):\n"
             "    return Clips.of(targets.advantages < 0, targets.advantages > 0)\n\n\n"),
            ('    "ppo": Formula(', '    "toy": Formula(toy, toy_clips, metrics={"toy": plain_ratios}),\n')],
    }, {"algorithm__objective": "toy", "algorithm__constants": "{strength = 2.0}"}, shown="policy/toy_mean"),
    "centre": Addition({
        "config/algorithms.py": [('Scale = Literal["none"', 'Centre = Literal[Centre, "best"]\n')],
        "algorithms/credit.py": [
            ('        case "critic" | "none":', '        case "best":\n            centred = rewards - highest[group]\n')],
    }, {"algorithm__centre": "best", "algorithm__scale": "none"}, shown="train/grad_norm"),
    "engine kind": Addition({
        "config/engine_kinds.py": [('    "sglang": EngineKind(', '    "toy_engine": EngineKind(inside=True),\n')],
        "fleet/kinds.py": [
            ("MAKERS: Mapping[str, Maker]", "class _Toy(_Embedded):\n    pass\n\n\n"),
            ('"sglang": _SGLang()', '"toy_engine": _Toy(), ')],
    }, {"inference__engine": "toy_engine"}, shown="rollout/generated_tokens"),
    "filter": Addition({
        "config/loss_terms.py": [('    "m2": (*_BOTH, "m2_mask")', '    "toy_gap": ("rollout_logprobs",),\n')],
        "losses/weights.py": [
            ("    logs = behave_log_ratio(targets.prox, targets.rollout)\n    match",
             '    if rule.metric == "toy_gap":\n        return targets.rollout > 0\n')],
    }, {"algorithm__filters": '[{metric = "toy_gap"}]'}, shown="policy/toy_gap_masked_fraction"),
}
"""A thing of each kind, by the files that CONTRIBUTING names."""


def test_a_run_trains_with_what_was_added_by_the_files_that_contributing_names(tmp_path: Path) -> None:
    shutil.copytree(_PACKAGE, tmp_path / "src" / "offbeat", ignore=shutil.ignore_patterns("__pycache__"))
    settings: dict[str, str] = {}
    for addition in ADDITIONS.values():
        addition.apply(tmp_path / "src" / "offbeat")
        settings |= addition.settings
    run = SmallRun(tmp_path / "runs", build_small_model(tmp_path / "model", seed=0))
    run.root.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "offbeat", "train", *run.arguments(run__total_steps="1", checkpoint__export="false", **settings)],
        capture_output=True, text=True, timeout=200, check=False,
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(tmp_path / "src")})
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = run.metrics()[0]
    assert [kind for kind, addition in ADDITIONS.items() if addition.shown not in metrics] == []
    assert metrics["policy/toy_mean"] == pytest.approx(metrics["policy/ratio_mean"])
    assert metrics["train/clip_fraction"] > 0
