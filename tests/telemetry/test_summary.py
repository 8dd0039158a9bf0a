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
    assert list(in_words({"warm_up_steps": 0})) == []
    assert list(in_words({"warm_up_steps": 50})) == [("supervised warm-up steps", "50")]
    assert list(in_words({"stopped_early": True})) == [("stopped early", "yes, on request")]


def test_a_held_out_accuracy_that_fell_is_remarked_with_where_to_read_on():
    [(name, said)] = in_words({"heldout_fell": True})
    assert name == "remark" and said.startswith("held-out accuracy is lower than before training")
    assert said.endswith("`offbeat docs debugging`")
    assert list(in_words({"heldout_fell": False})) == []


def test_a_run_says_how_many_versions_were_proven_by_which_means_and_how_many_were_not():
    assert list(in_words({"proofs": {}})) == []
    [(name, said)] = in_words({"proofs": {"by_weights": 12}})
    assert (name, said) == ("engines' weights", "12 of 12 versions taken by engines are proven: 12 by the weights in use")
    [(_, said)] = in_words({"proofs": {"by_weights": 2, "by_canary": 3, "not_proven": 4}})
    assert said.startswith("5 of 9 versions taken by engines are proven: 2 by the weights in use and 3 by the canary's moves; 4 NOT PROVEN")


def test_an_accuracy_says_after_which_step_it_was_measured_unless_that_was_the_last():
    marks = {"heldout_before": 0.8, "heldout_after": 0.9, "heldout_after_step": 5, "steps": 5}
    assert list(in_words(marks))[:2] == [("held-out accuracy before", "0.800"), ("held-out accuracy after", "0.900")]
    assert ("held-out accuracy after", "0.900 after step 5") in list(in_words(marks | {"steps": 9}))
    assert ("held-out accuracy", "0.700 after step 4") in list(in_words({"accuracy": 0.7, "accuracy_step": 4, "steps": 9}))
    of_sets = {"steps": 9, "hard_before": 0.25, "hard_after": 0.5, "hard_after_step": 5}
    assert list(in_words(of_sets)) == [("training steps", "9"), ("hard before", "0.25"), ("hard after", "0.5 after step 5")]


def test_an_accuracy_that_was_only_measured_before_is_not_measured_after():
    marks = {"heldout_before": 0.8, "heldout_after": None, "heldout_after_step": None, "hard_before": 0.5, "hard_after": None}
    assert dict(in_words(marks)) == {
        "held-out accuracy before": "0.800", "held-out accuracy after": "not measured", "hard before": "0.5", "hard after": "not measured"}
    assert list(in_words({"heldout_before": None, "heldout_after": None})) == []


def test_a_set_of_the_users_own_keeps_its_name():
    assert list(in_words({"sums_before": 0.25, "best": "eval/accuracy 0.5 after step 3"})) == [
        ("sums before", "0.25"), ("best", "eval/accuracy 0.5 after step 3")]


def test_everything_that_a_result_holds_has_a_name():
    values = {each.name for kind in (RunResult, SupervisedResult) for each in fields(kind)} - {"sets", "best", "proofs"}
    for name in values:
        for shown, _ in in_words({name: 1}):
            assert shown != name.replace("_", " ") or name in ("seed", "stopped_early"), f"{name} is shown as it is written in result.json"
