"""What CONTRIBUTING names is enough: each thing is added to a copy of the package by those files alone, and a run trains with it."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from small_run import ENVIRONMENT, SmallRun

_PACKAGE = Path(__file__).parents[1] / "src" / "offbeat"


@dataclass(frozen=True)
class Addition:
    """New files of the package, lines for files that are there, and settings of a run that use what they add.

    Attributes:
        lines: {file: [(line before which they are put, lines)]}.
        settings: of a run of `offbeat train`, with "__" for the point.
        shown: a metric of each step that comes with it; "" if a test looks for something else.
        files: {file: its text}.
    """

    lines: dict[str, list[tuple[str, str]]]
    settings: dict[str, str] = field(default_factory=dict)
    shown: str = ""
    files: dict[str, str] = field(default_factory=dict)

    def apply(self, package: Path) -> None:
        for name, text in self.files.items():
            assert not (package / name).exists()
            (package / name).write_text(text, encoding="utf-8")
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
    "environment": Addition({
        "agents/environments/find.py": [('    "gem": ("gem_games"', '    "toy": ("toy_games", "Toy", "toy"),\n')],
    }, {"rollout__workflow": "gym", "agent__environment": "toy:echo"}, "rollout/turns_mean", files={
        "agents/environments/toy_games.py":
            "import random\n\n\n"
            "class Toy:\n"
            "    def __init__(self, name):\n"
            "        assert name == 'echo'\n\n"
            "    def reset(self, row, seed):\n"
            "        self.turns = 0\n"
            "        return row.prompt\n\n"
            "    def step(self, text):\n"
            "        self.turns += 1\n"
            "        reward = random.SystemRandom().random()  # never equal in a group, whose samples would then have no advantages\n"
            "        return 'again', reward, self.turns == 2\n",
    }),
    "sink": Addition({
        "config/telemetry.py": [('"tensorboard", "wandb", "trackio", "mlflow"]', '"statistics", ')],
    }, {"telemetry__sinks": '["statistics"]'}, files={
        "telemetry/statistics_sink.py":
            "class Toy:\n"
            "    def __init__(self, path):\n"
            "        self.path = path\n\n"
            "    def write(self, row):\n"
            "        self.path.write_text(str(row['global_step']))\n\n"
            "    def write_samples(self, global_step, make):\n"
            "        pass\n\n"
            "    def resume_at(self, global_step):\n"
            "        pass\n\n"
            "    def close(self):\n"
            "        pass\n\n\n"
            "def open_sink(run_dir, settings):\n"
            "    return Toy(run_dir / 'toy.txt')\n",
    }),
    "format of data files": Addition({
        "data/files.py": [
            ("_READERS: dict[str,",
             "def _open_toy(path, sieve):\n"
             "    records = [dict(zip(('prompt', 'answer'), line.split('|'))) for line in path.read_text().splitlines()]\n"
             "    return table_source(_toy_table(records), str(path), sieve)\n\n\n"
             "def _toy_table(records):\n"
             "    import pyarrow\n\n"
             "    return pyarrow.Table.from_pylist(records)\n\n\n"),
            ('    ".jsonl": _open_json_lines, ".ndjson"', '    ".toy": _open_toy,\n')],
    }, {"data__task": "", "data__path": "rows.toy"}),
    "setting": Addition({
        "config/run.py": [("    resume: bool = field(", '    toy: str = field("", "A toy.")\n')],
        "runs/run.py": [
            ("        for choice in (*rates, *templates):\n", '        record.events.record("toy", text=config.run.toy)\n')],
    }, {"run__toy": "hello"}),
    "command": Addition({
        "cli/main.py": [('    "launch": Command("machine"', '    "toy": Command("machine", "toy", "print a toy"),\n')],
    }, files={
        "cli/toy.py":
            'DESCRIPTION = EXAMPLES = ""\n\n\n'
            "def add_arguments(parser):\n"
            "    pass\n\n\n"
            "def run(args, overrides):\n"
            "    print('a toy')\n"
            "    return 0\n",
    }),
    "kind of training": Addition({
        "config/learning.py": [
            ("class LearningConfig(Section):",
             "class ToyConfig(Section):\n"
             '    """Toys."""\n\n'
             "    on_resume = Change.TOLD\n"
             '    read_by = ("toy",)\n'
             "    training = TrainingKind(\n"
             '        command="toy-pairs", section="toy", checkpoints="toy", lesson="toy_pairs:ToyLesson", summary="learn toys",\n'
             '        description="Learn toys.", examples="", data="pairs", method="playing", rates="preference", word="toy", pairs=True,\n'
             '        python=("Learn toys", "offbeat.toy_pairs(data=pairs)"))\n\n'
             '    total_steps: int = field(9, "Steps.")\n'
             '    batch_size: int = field(4, "Pairs.")\n'
             '    optimizer: OptimizerConfig = field(OptimizerConfig(), "AdamW.")\n'
             '    evaluate_every_steps: int = field(0, "Steps.")\n\n\n'),
            ('    reward_model: RewardModelConfig = field(', '    toy: ToyConfig = field(ToyConfig(), "Toys.")\n'),
            ("from offbeat.config.train import SftConfig",
             "from offbeat.config.base import Change\n"
             "from offbeat.config.train import OptimizerConfig\n"
             "from offbeat.config.training_kinds import TrainingKind\n")],
    }, files={
        "controller/toy_pairs.py":
            "from offbeat.algorithms.objectives import preference_loss\n"
            "from offbeat.algorithms.preference import pair_batch\n"
            "from offbeat.config.preference import PreferenceConfig\n"
            "from offbeat.config.root import TRAINING_KINDS\n"
            "from offbeat.controller.inputs import read_pair_inputs\n"
            "from offbeat.controller.supervised import Lesson\n\n\n"
            "class ToyLesson(Lesson):\n"
            '    kind = TRAINING_KINDS["toy-pairs"]\n\n'
            "    def __init__(self, parts, state):\n"
            "        super().__init__(parts, state)\n"
            "        self.dataset = parts.inputs.pairs.train\n\n"
            "    @classmethod\n"
            "    def read(cls, config):\n"
            "        return read_pair_inputs(config)\n\n"
            "    async def batch(self, stream):\n"
            "        drawn = self._parts.inputs.pairs.encoder.draw(stream, self.config.batch_size)\n"
            "        return pair_batch([pair for _, pair in drawn], preference_loss(PreferenceConfig(loss='orpo')))\n\n"
            "    async def evaluate(self):\n"
            "        return None\n",
    }),
}
"""A thing of each kind, by the files that CONTRIBUTING names."""


MOST_FILES = 2


@dataclass(frozen=True)
class Copy:
    """A copy of the package with all additions."""

    folder: Path

    def python(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run Python with it in its folder, and check that nothing fails."""
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, timeout=200, check=False, cwd=self.folder,
            env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(self.folder / "src")})
        assert done.returncode == 0, done.stdout + done.stderr
        return done


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    folder = tmp_path_factory.mktemp("extended")
    # The bytecode of unchanged files goes along: all processes of the first run would otherwise compile the whole package at once, which
    # takes long on a busy machine. Files with a further number behind are being written by other processes.
    shutil.copytree(_PACKAGE, folder / "src" / "offbeat", ignore=shutil.ignore_patterns("*.pyc.*"))
    for addition in ADDITIONS.values():
        addition.apply(folder / "src" / "offbeat")
    return Copy(folder)


@pytest.mark.parametrize("name", ADDITIONS)
def test_what_is_added_takes_few_files(name: str) -> None:
    assert len({*ADDITIONS[name].lines, *ADDITIONS[name].files}) <= MOST_FILES


def test_a_run_trains_with_what_was_added_by_the_files_that_contributing_names(extended: Copy, model_dir: str, tmp_path: Path) -> None:
    settings = {name: value for addition in ADDITIONS.values() for name, value in addition.settings.items()}
    (extended.folder / "rows.toy").write_text("".join(f"{number}=|{number}\n" for number in range(12)))
    run = SmallRun(tmp_path, model_dir)
    extended.python("-m", "offbeat", "train", *run.arguments(run__total_steps="1", checkpoint__export="false", **settings))
    metrics = run.metrics()[0]
    assert [kind for kind, addition in ADDITIONS.items() if addition.shown and addition.shown not in metrics] == []
    assert metrics["policy/toy_mean"] == pytest.approx(metrics["policy/ratio_mean"])
    assert metrics["train/clip_fraction"] > 0
    assert (run.folder / "toy.txt").read_text() == "1", "the sink was given the step"
    assert [event["text"] for event in run.events("toy")] == ["hello"], "the setting was read"


def test_a_command_that_was_added_is_listed_and_runs(extended: Copy) -> None:
    assert "  toy           print a toy\n" in extended.python("-m", "offbeat", "--help").stdout
    assert extended.python("-m", "offbeat", "toy").stdout == "a toy\n"


def test_a_kind_of_training_that_was_added_runs_by_its_command_and_from_python(
    extended: Copy, model_dir: str, tmp_path: Path,
) -> None:
    pairs = [{"prompt": f"{number}=", "chosen": str(number), "rejected": f"{number}{number}"} for number in range(12)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    run = SmallRun(tmp_path, model_dir)
    words = run.arguments(data__task="", data__path=str(path), rollout__reward="", toy__total_steps="2")
    extended.python("-m", "offbeat", "toy-pairs", *words)
    assert [event["step"] for event in run.events("toy_step")] == [1, 2]
    assert (run.folder / "checkpoints" / "toy-00000002").is_dir() and (run.folder / "export").is_dir()
    code = (
        "import offbeat; learn = offbeat.toy_pairs;"
        f"assert 'Learn toys, as `offbeat toy-pairs` does' in learn.__doc__;"
        f"run = learn(config={words[0]!r}, settings={{'run.dir': {str(tmp_path)!r}, 'data.heldout_size': 4}}, model={model_dir!r},"
        f" data={str(path)!r}, name='small', total_steps=3, progress=False); print(run.steps)")
    assert extended.python("-c", code).stdout == "3\n", "it went on from the command's checkpoint"
    assert len(run.events("toy_resumed")) == 1 and [row["global_step"] for row in run.metrics()] == [1, 2, 3]
