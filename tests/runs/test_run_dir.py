"""What becomes of the folder of a run when a run of its name begins."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from offbeat.checkpoint.recover import CheckpointIndex
from offbeat.config.root import TRAINING_KINDS
from offbeat.controller.state import HeadState, Highlights, SavedState
from offbeat.data.identity import Identity
from offbeat.data.stream import StreamState
from offbeat.data.wire import encode_json
from offbeat.errors import ConfigError, StorageError
from offbeat.journal.records import JournalHead
from offbeat.journal.run_journal import RunJournal, folder_of
from offbeat.runs.learning_rates import choose_rates
from offbeat.runs.run_dir import check_resumption, prepare_run_dir, remembered_settings
from offbeat.telemetry.run_lock import lock_run
from small_run import REWARDS, SmallRun, small_config


def test_a_run_that_got_somewhere_but_has_no_checkpoint_is_moved_aside(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    prepare_run_dir(config)
    for number in (1, 2):
        (config.run_dir / "weights").mkdir(parents=True)
        (config.run_dir / "config.toml").write_text(f"# {number}")
        prepare_run_dir(config)
        assert config.run_dir.exists()
        (config.run_dir / "metrics.jsonl").write_text('{"global_step": 1}\n')
        prepare_run_dir(config)
        assert not config.run_dir.exists()
        aside = tmp_path / f"small.{number}"
        assert (aside / "config.toml").read_text() == f"# {number}"
        assert not (aside / "weights").exists()


@pytest.mark.parametrize(("kind", "event"), [
    ("train", {"kind": "checkpoint", "global_step": 40}), ("sft", {"kind": "sft_checkpoint", "step": 40}),
    ("dpo", {"kind": "preference_checkpoint", "step": 40}), ("reward-model", {"kind": "reward_model_checkpoint", "step": 40})])
def test_a_run_whose_checkpoints_are_gone_is_refused(kind: str, event: dict[str, object], tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.run_dir.mkdir()
    (config.run_dir / "config.toml").touch()
    (config.run_dir / "events.jsonl").write_text(f'{{"kind": "publish", "version": 41}}\n{json.dumps(event)}\n')
    with pytest.raises(StorageError, match="has saved a checkpoint of step 40, and .* has none any more; put it back, or"):
        prepare_run_dir(config, kind=TRAINING_KINDS[kind])
    assert config.run_dir.exists()
    prepare_run_dir(config, kind=TRAINING_KINDS[kind], fresh=True)


def test_another_number_of_processes_that_draw_data_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    config = small_config(tmp_path, run__total_steps="9")
    head = HeadState(StreamState(0, 2), ())
    CheckpointIndex(config.run_dir / "checkpoints").complete(3, encode_json(SavedState(3, 3, (head, head))))
    identity = Identity({}, "rows", 10, "weights", "tokens", {})
    check_resumption(config, identity, num_heads=2)
    with pytest.raises(ConfigError, match="was written by 2 processes that draw data, and now there are 1; resume with the same"):
        check_resumption(config, identity, num_heads=1)


@pytest.mark.parametrize(("supervised", "warm_up", "kind", "goes_on"), [
    (True, "false", "sft", True), (True, "true", "warm-up", False), (True, "false", "step", False),
    (False, "true", "warm-up", True), (False, "false", "warm-up", False), (False, "true", "sft", False), (False, "false", "step", True),
])
def test_a_run_goes_on_only_from_checkpoints_of_its_own_kind(
    supervised: bool, warm_up: str, kind: str, goes_on: bool, tmp_path: Path,
) -> None:
    config = small_config(tmp_path, run__warm_up=warm_up, run__total_steps="9", sft__total_steps="9")
    index = CheckpointIndex(config.run_dir / "checkpoints", kind)
    index.complete(3, encode_json(SavedState(3, 3, ())))
    for name in ("config.toml", "metrics.jsonl"):
        (config.run_dir / name).touch()
    prepare_run_dir(config, kind=TRAINING_KINDS["sft" if supervised else "train"])
    assert config.run_dir.exists() is goes_on


def test_a_fine_tuning_that_has_reached_its_accuracy_says_so(tmp_path: Path) -> None:
    config = small_config(tmp_path, sft__total_steps="9", sft__stop_at_accuracy="0.5")
    index = CheckpointIndex(config.run_dir / "checkpoints", "sft")
    index.complete(3, encode_json(SavedState(3, 3, (), Highlights(heldout_after=0.625))))
    (config.run_dir / "config.toml").touch()
    with pytest.raises(ConfigError, match=r"reached a held-out accuracy of 0.625 after 3 supervised steps; set sft.stop_at"):
        prepare_run_dir(config, kind=TRAINING_KINDS["sft"])


def test_a_fresh_run_moves_an_older_one_aside_if_it_got_anywhere(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    for _ in range(2):
        (config.run_dir / "checkpoints").mkdir(parents=True)
        (config.run_dir / "config.toml").touch()
        prepare_run_dir(config, fresh=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.1", "small.2"]


@pytest.mark.parametrize("fresh", [False, True])
def test_starts_that_failed_before_anything_was_trained_use_one_folder(tmp_path: Path, fresh: bool) -> None:
    config = small_config(tmp_path, "no-such-model", rollout__reward=f"{REWARDS}:gives_text")
    config.run_dir.mkdir()
    for name in ("config.toml", "metrics.jsonl", "trace.json"):
        (config.run_dir / name).touch()
    events = config.run_dir / "events.jsonl"
    events.write_text('{"kind": "failed", "time_s": 1.0}\n')
    assert prepare_run_dir(config, fresh=fresh) is None
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
    events.write_text('{"kind": "sft_step", "time_s": 1.0, "step": 1}\n')
    assert prepare_run_dir(config, fresh=fresh) == tmp_path / "small.1"


def test_a_run_without_a_checkpoint_goes_on_by_its_journal_where_nothing_has_changed(tmp_path: Path) -> None:
    config, identity = small_config(tmp_path), Identity({"run.seed": 1}, "rows", 10, "weights", "tokens", {})
    folder = folder_of(config.run_dir)

    def begin_journal() -> None:
        (config.run_dir / "config.toml").touch()
        with RunJournal(folder, identity=encode_json(identity), tell=pytest.fail) as journal:
            journal.begin_segment(0, JournalHead(StreamState(), ()), held=[])
            journal.synced().result(10)

    config.run_dir.mkdir()
    begin_journal()
    (config.run_dir / "rollouts").mkdir()
    assert prepare_run_dir(config, identity=identity) is None and folder.exists()
    assert prepare_run_dir(config, identity=replace(identity, data="others")) == tmp_path / "small.1" and not config.run_dir.exists()
    config.run_dir.mkdir()
    (config.run_dir / "config.toml").touch()
    with RunJournal(folder, identity=b"of another version", tell=pytest.fail) as journal:
        journal.begin_segment(0, JournalHead(StreamState(), ()), held=[])
    assert prepare_run_dir(config, identity=identity) is None and not folder.exists()
    begin_journal()
    assert prepare_run_dir(config, identity=identity, num_heads=2) is None and not folder.exists()  # it had only begun


def test_a_run_that_another_process_runs_keeps_its_folder(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.run_dir.mkdir()
    for name in ("config.toml", "metrics.jsonl"):
        (config.run_dir / name).write_text("{}")
    with lock_run(config.run_dir), pytest.raises(ConfigError, match="is being run by another process"):
        prepare_run_dir(config)
    assert (config.run_dir / "config.toml").exists()


def test_an_existing_run_is_refused_where_resuming_is_off(tmp_path: Path) -> None:
    config = small_config(tmp_path, run__resume="false")
    prepare_run_dir(config)
    config.run_dir.mkdir()
    (config.run_dir / "config.toml").touch()
    with pytest.raises(ConfigError, match="exists and run.resume is false"):
        prepare_run_dir(config)


def test_a_run_that_has_done_its_steps_is_told_apart_from_one_that_goes_on(finished_run: SmallRun, model_dir: str) -> None:
    with pytest.raises(ConfigError, match=r"is already complete \(2 steps\); raise run.total_steps to continue"):
        prepare_run_dir(small_config(finished_run.root, model_dir))
    prepare_run_dir(small_config(finished_run.root, model_dir, run__total_steps="3"))
    assert finished_run.folder.exists()


def test_a_run_that_reads_from_its_own_folder_is_not_moved_from_under_itself(tmp_path: Path) -> None:
    config = small_config(tmp_path, str(tmp_path / "runs" / "small" / "export"))
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(config.run_dir / "export")})})
    (config.run_dir / "export").mkdir(parents=True)
    (config.run_dir / "config.toml").write_text("")
    (config.run_dir / "metrics.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match="model.path = .* lies in the folder of the run itself"):
        prepare_run_dir(config)
    assert (config.run_dir / "export").exists()


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl", "lock", "checkpoints/step-00000001/complete.json"])
def test_what_has_the_name_of_a_file_and_is_none_is_refused_and_not_waited_for(name: str, tmp_path: Path) -> None:
    config = small_config(tmp_path)
    path = config.run_dir / name
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    for read in (remembered_settings, prepare_run_dir):
        with pytest.raises(StorageError, match=f"{name} must be a regular file, and is not; remove it, or set run.name"):
            read(config)


OLD_SETTINGS = """
[run]
total_steps = 2
consumer_steps = 0

[train.optimizer]
lr = 1e-06

[sft.optimizer]
lr = 0.002

[data]
chat_template = false
"""
"""Some of the `config.toml` of a version whose checkpoints had no settings, with a setting that is none any more."""


@pytest.mark.parametrize(("written", "rate"), [(OLD_SETTINGS, 1e-06), (None, 2e-4)], ids=["config.toml", "no file"])
def test_a_run_whose_checkpoint_has_no_settings_keeps_the_rate_of_its_own_file(written: str | None, rate: float, tmp_path: Path) -> None:
    config = small_config(tmp_path, run__total_steps="9", train__optimizer__lr="auto")
    CheckpointIndex(config.run_dir / "checkpoints").complete(2, encode_json(SavedState(2, 2, (HeadState(StreamState(0, 4), ()),))))
    if written is not None:
        (config.run_dir / "config.toml").write_text(written)
    was = remembered_settings(config)
    sections, _ = choose_rates(config, "rl", was=was)
    assert sections["train"].optimizer.lr == rate
    assert was == ({} if written is None else {
        "run.total_steps": 2, "train.optimizer.lr": 1e-06, "sft.optimizer.lr": 0.002, "data.chat_template": False})


def test_a_damaged_file_of_settings_is_refused_only_where_it_is_needed(tmp_path: Path) -> None:
    config = small_config(tmp_path, run__total_steps="9")
    config.run_dir.mkdir()
    (config.run_dir / "config.toml").write_text("[train")
    assert remembered_settings(config) == {}
    CheckpointIndex(config.run_dir / "checkpoints").complete(2, encode_json(SavedState(2, 2, (HeadState(StreamState(0, 4), ()),))))
    with pytest.raises(ConfigError, match=r"small/config.toml is not valid TOML at "):
        remembered_settings(config)
