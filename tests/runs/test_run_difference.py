"""Two runs of three steps that differ by one thing, which is found at its first step. Their folders are written here, without a run."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.data.identity import Identity
from offbeat.data.stream import StreamState
from offbeat.data.trajectory import Group, Trajectory
from offbeat.data.wire import encode_json
from offbeat.errors import ConfigError
from offbeat.journal.records import BatchTaken, JournalHead, StepComputed, StepTrained
from offbeat.journal.run_journal import RunJournal
from offbeat.runs.plan import KeptPlan
from offbeat.runs.run_difference import compare_runs


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


def test_equal_runs_do_not_part_and_times_do_not_matter(tmp_path: Path) -> None:
    found = compare_runs(Recording().write(tmp_path / "a"), Recording().write(tmp_path / "other"))
    assert found.parting is None and not found.changed


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        compare_runs(tmp_path, tmp_path)
