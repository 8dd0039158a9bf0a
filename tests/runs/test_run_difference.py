"""Two runs that differ by one thing, which is found at its first step.

Many are written here, three steps without a run. Those of the drill are real ones of four steps, synchronous, so that they do the same
until the difference.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from offbeat.checkpoint.recover import CheckpointIndex
from offbeat.data.identity import Identity
from offbeat.data.stream import StreamState
from offbeat.data.trajectory import Group, Trajectory
from offbeat.data.wire import encode_json
from offbeat.errors import ConfigError
from offbeat.journal.records import BatchTaken, JournalHead, StepComputed, StepTrained
from offbeat.journal.run_journal import RunJournal
from offbeat.ranks.trainers import Trainers
from offbeat.runs.plan import KeptPlan
from offbeat.runs.run import run_training
from offbeat.runs.run_difference import compare_runs
from offbeat.telemetry.console import Console
from offbeat.weights.protocol import Manifest
from small_run import SmallRun, offbeat, small_config


def group_of(number: int, place: int) -> Group:
    tokens = np.array([7, 8, number + 1, place + 1], np.int32)
    mask, versions = np.array([False, False, True, True]), np.array([-1, -1, number - 1, number - 1], np.int32)
    sample = Trajectory(tokens, mask, np.array([0, 0, -0.5, -0.25], np.float32), versions, 1.0, "stop")
    return Group(f"0:{2 * number + place}", number - 1, (sample, replace(sample, reward=0.0)))


@dataclass
class Recording:
    """A run's folder before it is written."""

    settings: str = "[run]\nseed = 0\n[train.optimizer]\nlr = 0.001\n"
    versions: dict[str, str] = field(default_factory=lambda: {"torch": "2.8.0", "cpu": "a CPU, AVX2"})
    identity: Identity = field(default_factory=lambda: Identity({}, "rows", 10, "model", "tokenizer", {"rollout.reward": "code"}))
    groups: dict[int, list[Group]] = field(default_factory=lambda: {step: [group_of(step, 0), group_of(step, 1)] for step in (1, 2, 3)})
    losses: dict[int, float] = field(default_factory=lambda: {1: 0.5, 2: 0.25, 3: 0.125})
    weights: dict[int, str] = field(default_factory=lambda: {1: "a1", 2: "a2", 3: "a3"})
    costs: dict[int, tuple[float, float, float]] = field(default_factory=lambda: dict.fromkeys((1, 2, 3), (1.0, 2.0, 0.0)))

    def write(self, folder: Path) -> Path:
        folder.mkdir()
        (folder / "config.toml").write_text(self.settings)
        (folder / "plan.json").write_bytes(encode_json(KeptPlan(0, 2, {}, (), self.versions)))
        rows = [{"global_step": step, "train/loss": loss, "train/mfu": len(folder.name)} for step, loss in self.losses.items()]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        with RunJournal(folder / "journal", identity=encode_json(self.identity), tell=print) as journal:
            journal.begin_segment(0, JournalHead(StreamState(), ()), held=[])
            for step, groups in self.groups.items():
                for group in groups:
                    journal.finished(group)
                journal.record(BatchTaken(step, tuple(group.prompt_id for group in groups)))
                journal.record(StepComputed(step, self.costs[step], self.weights[step]))
                journal.record(StepTrained(step, b""))
        return folder


def change_sample(run: Recording, step: int, sample: int = 1, **changes: Any) -> None:
    """Change one sample of the second group of a step."""
    group = run.groups[step][1]
    samples = list(group.trajectories)
    samples[sample] = replace(samples[sample], **changes)
    run.groups[step][1] = replace(group, trajectories=tuple(samples))


def a_seed(run: Recording) -> None:
    run.settings = run.settings.replace("seed = 0", "seed = 1")
    run.groups[1].reverse()


def a_reward(run: Recording) -> None:
    change_sample(run, 2, reward=0.5)


def a_row_of_data(run: Recording) -> None:
    run.identity = replace(run.identity, data="other rows")
    change_sample(run, 2, sample=0, tokens=np.array([7, 9, 3, 2], np.int32))


def a_librarys_version(run: Recording) -> None:
    run.versions["torch"] = "2.9.0"
    run.losses[2] += 2**-30


def a_bit_of_a_weight(run: Recording) -> None:
    run.weights[2] = "b2"


def a_setting(run: Recording) -> None:
    run.settings = run.settings.replace("0.001", "0.002")
    run.losses[2] += 0.1


def an_engines_stale_weights(run: Recording) -> None:
    change_sample(run, 3, versions=np.array([-1, -1, 2, 1], np.int32))


def an_engines_numbers(run: Recording) -> None:
    change_sample(run, 2, rollout_logprobs=np.array([0, 0, -0.5, np.nextafter(np.float32(-0.25), np.float32(0))], np.float32))


def a_file_of_code(run: Recording) -> None:
    run.identity = replace(run.identity, code={"rollout.reward": "another"})
    change_sample(run, 1, sample=0, reward=0.75)


def a_sampled_token(run: Recording) -> None:
    change_sample(run, 3, tokens=np.array([7, 8, 4, 9], np.int32))


def the_spreading_over_ranks(run: Recording) -> None:
    run.costs[2] = (1.0, 3.0, 0.0)
    run.losses[2] += 2**-30


def a_short_answer(run: Recording) -> None:
    kept = group_of(2, 1).trajectories[1]
    change_sample(run, 2, tokens=kept.tokens[:3], loss_mask=kept.loss_mask[:3], rollout_logprobs=kept.rollout_logprobs[:3],
                  versions=kept.versions[:3])


@pytest.mark.parametrize(("plant", "changed", "step", "where", "text"), [
    (a_seed, "run.seed is 0 in A and 1 in B", 1, ("0:2", None, None), "its group 0 is that of prompt 0:2 in A and of 0:3 in B (the same"),
    (a_reward, None, 2, ("0:5", 1, None), "the reward is 0.0 in A and 0.5 in B, for the same tokens"),
    (a_row_of_data, "the rows to train on differ", 2, ("0:5", 0, 1), "the model was given token 8 in A and 9 in B, so the prompt or"),
    (a_librarys_version, "torch is 2.8.0 in A and 2.9.0 in B", 2, "train/loss", "train/loss is 0.25 in A and 0.2500000009313226 in B"),
    (a_bit_of_a_weight, None, 2, ("", None, None), "the weights after it differ, with all metrics equal: their fingerprints are a2 in A"),
    (a_setting, "train.optimizer.lr is 0.001 in A and 0.002 in B", 2, "train/loss", "train/loss is 0.25 in A and 0.35 in B"),
    (an_engines_stale_weights, None, 3, ("0:7", 1, 3), "it was sampled by version 2 of the weights in A and by 1 in B"),
    (an_engines_numbers, None, 2, ("0:5", 1, 3), "the same token was sampled with log-probability -0.25 in A and -0.2499999"),
    (a_file_of_code, "the files of the code of rollout.reward differ", 1, ("0:3", 0, None), "the reward is 1.0 in A and 0.75 in B"),
    (a_sampled_token, None, 3, ("0:7", 1, 3), "the engine sampled token 2 in A and 9 in B, by version 2 of the weights in both"),
    (the_spreading_over_ranks, None, 2, "train/loss", "of the same groups, which were spread over the ranks in another way"),
    (a_short_answer, None, 2, ("0:5", 1, 3), "it has 4 tokens in A and 3 in B"),
])
def test_one_difference_is_found_at_its_first_step(
    plant: Callable[[Recording], None], changed: str | None, step: int, where: Any, text: str, tmp_path: Path,
) -> None:
    other = Recording()
    plant(other)
    found = compare_runs(Recording().write(tmp_path / "a"), other.write(tmp_path / "other"))
    assert list(found.changed) == ([changed] if changed else [])
    assert found.parting is not None and found.parting.global_step == step and text in found.parting.text
    at = found.parting
    assert (at.metric if isinstance(where, str) else (at.group, at.sample, at.token)) == where
    assert found.num_steps == found.num_with_groups == 3


def test_a_difference_is_not_put_down_to_the_spreading_over_ranks_where_there_is_one(tmp_path: Path) -> None:
    one, other = (Recording("[train]\nnum_ranks = 1\n[run]\nmode = 'controller'\n") for _ in range(2))
    the_spreading_over_ranks(other)
    found = compare_runs(one.write(tmp_path / "a"), other.write(tmp_path / "other")).parting
    assert found is not None and found.text == "train/loss is 0.25 in A and 0.2500000009313226 in B"


def test_equal_runs_do_not_part_and_times_do_not_matter(tmp_path: Path) -> None:
    found = compare_runs(Recording().write(tmp_path / "a"), Recording().write(tmp_path / "other"))
    assert found.parting is None and not found.changed


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        compare_runs(tmp_path, tmp_path)


REAL = {
    "run__total_steps": "4", "rollout__max_head_offpolicyness": "0", "inference__seeded_requests": "true", "checkpoint__every_steps": "2",
    "checkpoint__keep": "9", "checkpoint__journal_keep": "all", "data__task": "", "data__heldout_size": "0", "weights__keep": "9",
    "weights__whole_every_versions": "1", "cluster__start_timeout_s": "600", "inference__start_timeout_s": "600"}

ANOTHER_TORCH = """
import os

os.environ["ATEN_CPU_CAPABILITY"] = "default"  # torch's sums and functions then round in another way
"""


@dataclass
class RealRuns:
    """A run of four steps, and others like it but for one thing."""

    root: Path
    model: str
    rows: list[dict[str, str]] = field(default_factory=lambda: [
        {"prompt": f"{100 + 7 * number}>", "answer": f"{number}"} for number in range(12)])

    def make(self, name: str, **changes: str) -> SmallRun:
        """Train in a new folder, or go on in it."""
        run = SmallRun(self.root / name, self.model)
        done = offbeat("train", *run.arguments(**self.settings(name, changes)), timeout_s=900)
        assert done.returncode == 0, done.stderr
        return run

    def settings(self, name: str, changes: dict[str, str]) -> dict[str, str]:
        """Write the rows, which every run reads from the same file, and return the settings of a run."""
        (self.root / name).mkdir(exist_ok=True)
        path = self.root / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        return REAL | {"data__path": str(path)} | changes

    def prompts(self, step: int) -> list[str]:
        """The prompts of a step of the run that the others are like."""
        return [group["prompt"] for group in SmallRun(self.root / "a", self.model).groups(step)]


@pytest.fixture(scope="module")
def real_runs(tmp_path_factory: pytest.TempPathFactory, model_dir: str) -> RealRuns:
    root = tmp_path_factory.mktemp("real")
    runs = RealRuns(root, model_dir)
    runs.make("a")
    return runs


def flip_a_bit(run: SmallRun, tensor: str, *, byte: int, bit: int) -> None:
    """Flip a bit of the first number of a tensor in the newest checkpoint, which is then sealed again."""
    index = CheckpointIndex(run.folder / "checkpoints")
    newest = index.newest()
    assert newest is not None
    stored = FileSystemReader(newest.folder / "ranks").read_metadata().storage_data
    [place] = [place for key, place in stored.items() if key.fqn == tensor]
    path = newest.folder / "ranks" / place.relative_path
    data = bytearray(path.read_bytes())
    values = torch.load(BytesIO(data[place.offset : place.offset + place.length]), weights_only=True)
    at = data.index(values.numpy().tobytes(), place.offset, place.offset + place.length)
    data[at + byte] ^= 1 << bit
    path.write_bytes(data)
    state = json.loads((newest.folder / "complete.json").read_bytes())
    index.complete(newest.step, json.dumps({key: state[key] for key in state.keys() - {"checksum", "files", "format"}}).encode())


def going_on_with_a_flipped_bit(runs: RealRuns, name: str, tensor: str, *, byte: int, bit: int) -> SmallRun:
    flip_a_bit(runs.make(name, run__total_steps="2"), tensor, byte=byte, bit=bit)
    return runs.make(name)


def another_seed(runs: RealRuns) -> SmallRun:
    return runs.make("seed", run__seed="1")


def another_reward(runs: RealRuns) -> SmallRun:
    """A reward that is the same but for a prompt of the second step."""
    path = runs.root / "own_reward.py"
    path.write_text(
        f"def score(completion, row):\n    return float(sum(map(ord, completion)) % 3) / 2 + (row.prompt == {runs.prompts(2)[1]!r})\n")
    return runs.make("reward", rollout__reward=f"{path}:score")


def another_row(runs: RealRuns) -> SmallRun:
    """The data have another row at the place of one of the third step."""
    prompt = runs.prompts(3)[1]
    return replace(runs, rows=[row | {"prompt": "999>"} if row["prompt"] == prompt else row for row in runs.rows]).make("row")


def a_row_more(runs: RealRuns) -> SmallRun:
    return replace(runs, rows=[*runs.rows, {"prompt": "999>", "answer": "9"}]).make("more")


def another_torch(runs: RealRuns) -> SmallRun:
    """A version of torch that says so, and computes in another way."""
    folder = runs.root / "packages"
    other = version("torch").partition("+")[0] + "+other"
    about = folder / f"torch-{other}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {other}\n")
    (folder / "sitecustomize.py").write_text(ANOTHER_TORCH)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        return runs.make("torch")


def another_bit_of_a_weight(runs: RealRuns) -> SmallRun:
    return going_on_with_a_flipped_bit(runs, "weight", "model.model.layers.0.input_layernorm.weight", byte=1, bit=4)


def another_bit_of_the_optimizer(runs: RealRuns) -> SmallRun:
    return going_on_with_a_flipped_bit(
        runs, "optimizer", "optimizer.state.model.layers.0.input_layernorm.weight.exp_avg", byte=2, bit=6)


def another_learning_rate(runs: RealRuns) -> SmallRun:
    return runs.make("rate", train__optimizer__lr="2e-3")


def another_temperature(runs: RealRuns) -> SmallRun:
    return runs.make("temperature", rollout__temperature="0.9")


def stale_weights(runs: RealRuns) -> SmallRun:
    """Engines get the weights of version 1 as version 2."""
    write, last = Trainers.write_weights, {}

    async def write_stale(self: Trainers, *args: Any, **kwargs: Any) -> Manifest:
        manifest = await write(self, *args, **kwargs)
        last[manifest.version] = manifest
        if manifest.version != 2:
            return manifest
        shutil.copytree(last[1].folder, manifest.folder, dirs_exist_ok=True)
        return replace(manifest, fingerprint=last[1].fingerprint, canary_logprobs=last[1].canary_logprobs)

    with patch.object(Trainers, "write_weights", write_stale):
        run_training(small_config(runs.root / "stale", runs.model, **runs.settings("stale", {})), Console("quiet"))
    return SmallRun(runs.root / "stale", runs.model)


@pytest.mark.drill
@pytest.mark.parametrize(("plant", "changed", "step", "text"), [
    (another_seed, "run.seed is 0 in A and 1 in B", 1, "is that of prompt"),
    (another_reward, "rollout.reward is ", 2, "the reward is "),
    (another_row, "the rows to train on differ", 3, "the model was given token "),
    (a_row_more, "the rows to train on differ: 12 in A and 13 in B", 1, "is that of prompt"),
    (another_torch, "torch is ", 1, "sampled"),
    (another_bit_of_a_weight, "", 3, "sampled"),
    (another_bit_of_the_optimizer, "", 3, "the weights after it differ, with all metrics equal"),
    (another_learning_rate, "train.optimizer.lr is 0.001 in A and 0.002 in B", 1, " is "),
    (another_temperature, "rollout.temperature is 1.0 in A and 0.9 in B", 1, "sampled"),
    (stale_weights, "", 3, "sampled"),
])
def test_one_difference_of_real_runs_is_found_at_its_first_step(
    plant: Callable[[RealRuns], SmallRun], changed: str, step: int, text: str, real_runs: RealRuns,
) -> None:
    found = compare_runs(real_runs.root / "a" / "small", plant(real_runs).folder)
    assert found.parting is not None and (found.parting.global_step, found.num_with_groups) == (step, 4)
    assert text in found.parting.text and "spread" not in found.parting.text
    assert [each for each in found.changed if each.startswith(changed)] if changed else not found.changed
    assert len(found.changed) == (2 if plant is another_reward else bool(changed)) or plant is another_torch


@pytest.mark.drill
def test_real_runs_that_are_alike_do_not_part(real_runs: RealRuns) -> None:
    found = compare_runs(real_runs.root / "a" / "small", real_runs.make("same").folder)
    assert (found.parting, found.changed, found.num_with_groups) == (None, (), 4)
