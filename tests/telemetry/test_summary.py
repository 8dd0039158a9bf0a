"""What a run came to, in words."""

from dataclasses import fields

from offbeat.runs.run import RunResult, SupervisedResult
from offbeat.telemetry.summary import in_words


def test_values_have_names_and_units_that_people_understand():
    summary = {
        "heldout_before": 0.38671875, "heldout_after": 1.0, "steps": 120, "train_wall_s": 185.2, "max_staleness_seen": 1,
        "max_logprob_gap": 4.9084e-07, "controller_memory_bytes": 151_000_000, "trained_tokens": 1_234_567}
    assert dict(in_words(summary)) == {
        "held-out accuracy before": "0.387", "held-out accuracy after": "1.000", "training steps": "120", "time to train": "3 min 5 s",
        "largest staleness": "1 version", "largest gap to the engines after a publish": "4.908e-07", "memory of the controller": "151 MB",
        "tokens trained on": "1,234,567"}


def test_what_is_missing_or_for_programs_alone_is_left_out():
    assert list(in_words({"heldout_before": None, "stopped_early": False, "torch_in_controller": True})) == []
    assert list(in_words({"stopped_early": True})) == [("stopped early", "yes, on request")]


def test_a_set_of_the_users_own_keeps_its_name():
    assert list(in_words({"sums_before": 0.25, "best": "eval/accuracy 0.5 after step 3"})) == [
        ("sums before", "0.25"), ("best", "eval/accuracy 0.5 after step 3")]


def test_everything_that_a_result_holds_has_a_name():
    values = {each.name for kind in (RunResult, SupervisedResult) for each in fields(kind)} - {"sets", "best"}
    for name in values:
        for shown, _ in in_words({name: 1}):
            assert shown != name.replace("_", " ") or name in ("seed", "stopped_early"), f"{name} is shown as it is written in result.json"
