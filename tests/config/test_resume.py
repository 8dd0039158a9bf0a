"""What a change of each setting means on resuming."""

from collections import Counter

from offbeat.config.load import load_config, settings
from offbeat.config.resume import _TABLE, CHANGES, Change, changes, listed, remembered


def test_every_setting_is_classified_once() -> None:
    classified = Counter(key for keys in _TABLE.values() for key in keys)
    assert set(classified) == {key for key, _ in settings()}
    assert set(classified.values()) == {1}


def test_a_checkpoint_remembers_what_matters_and_nothing_secret() -> None:
    values = remembered(load_config(None, [("serve.database", "postgresql://secret@db/x"), ("train.optimizer.lr", "0.5")]))
    assert values["train.optimizer.lr"] == 0.5 and values["rollout.stop"] == []
    assert not any(key.startswith(("serve.", "cluster.", "telemetry.")) for key in values)
    assert not {"inference.urls", "inference.arguments"} & values.keys()
    assert "secret" not in str(values)


def test_changes_are_told_apart_by_what_they_mean() -> None:
    now = remembered(load_config(None, [("run.seed", "7"), ("train.optimizer.lr", "1e-5"), ("data.task", "addition")]))
    found = changes(now, remembered(load_config(None)), part="rl")
    assert listed(found[Change.REFUSED]) == "run.seed = 7, was 0"
    assert listed(found[Change.TOLD]) == 'train.optimizer.lr = 1e-05, was "auto"'
    assert listed(found[Change.CONTENT]) == 'data.task = "addition", was ""'
    assert not found[Change.FREE] and not found[Change.CODE]


def test_a_part_of_a_run_does_not_look_at_settings_of_the_other() -> None:
    now = remembered(load_config(None, [("sft.batch_size", "1"), ("algorithm.clip_low", "0.1")]))
    was = remembered(load_config(None))
    assert listed(changes(now, was, part="rl")[Change.TOLD]) == "algorithm.clip_low = 0.1, was 0.2"
    assert listed(changes(now, was, part="sft")[Change.TOLD]) == "sft.batch_size = 1, was 128"


def test_settings_of_another_version_are_not_compared() -> None:
    now = remembered(load_config(None))
    was = {key: value for key, value in now.items() if key != "run.seed"} | {"run.gone": 1}
    assert not any(changes(now, was, part="rl").values())
    assert CHANGES["run.seed"] is Change.REFUSED
