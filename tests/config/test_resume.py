"""What a change of each setting means on resuming."""

from offbeat.config.load import load_config, settings
from offbeat.config.resume import CHANGES, Change, changes, listed, remembered


def test_every_setting_says_what_its_change_means() -> None:
    unanswered = [key for key, _ in settings() if key not in CHANGES]
    assert not unanswered, "give the field on_resume=Change..., or its section on_resume"


def test_parts_of_a_run_read_what_they_read() -> None:
    def readers(key: str) -> list[str]:
        return [part for part in ("rl", "sft", "preference", "reward_model") if changes({key: 1}, {key: 2}, part=part)[CHANGES[key]]]

    assert readers("run.seed") == readers("model.path") == ["rl", "sft", "preference", "reward_model"]
    assert readers("run.total_steps") == readers("train.optimizer.lr") == readers("algorithm.clip_low") == ["rl"]
    assert readers("sft.optimizer.lr") == ["sft"] and readers("preference.optimizer.lr") == ["preference"]
    assert readers("sft.too_long") == ["sft", "preference", "reward_model"]
    assert readers("inference.engine") == readers("rollout.top_k") == readers("evaluate.temperature") == ["rl", "sft"]


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
