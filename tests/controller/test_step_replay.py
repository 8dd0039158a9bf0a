from offbeat.controller.step_replay import compare_metrics

ROW = {
    "global_step": 3, "time_s": 5.0, "train/loss": 0.1, "train/busy_share": 0.5, "train/grad_norm": None, "policy/canary_gap": 1e-7,
    "rollout/drawn_again_prompts": 2.0, "rollout/generated_tokens": 20.0, "step/total_s": 0.5}
COMPUTED = {"train/loss": 0.1, "train/busy_share": 0.7, "train/grad_norm": float("nan"), "rollout/generated_tokens": 20.0}


def test_all_metrics_but_times_and_those_of_engines_are_compared() -> None:
    assert compare_metrics(COMPUTED, ROW) == ("", 3)


def test_the_first_metric_that_differs_is_named_with_both_values() -> None:
    told, _ = compare_metrics(COMPUTED | {"train/loss": 0.1 + 2**-56, "train/grad_norm": 1.0}, ROW)
    assert told == "train/loss is 0.10000000000000002, and was 0.1"
    assert compare_metrics(COMPUTED | {"train/grad_norm": 1.0}, ROW)[0] == "train/grad_norm is 1.0, and was None"


def test_a_metric_that_only_one_side_has_is_a_difference() -> None:
    assert compare_metrics(COMPUTED | {"reward/mean": 1.0}, ROW)[0] == "reward/mean is 1.0, and the run has no such metric"
    assert compare_metrics(COMPUTED, ROW | {"policy/weight_max": 1.5})[0] == "policy/weight_max was 1.5, and is not computed now"


def test_a_step_without_a_row_has_nothing_to_compare() -> None:
    assert compare_metrics(COMPUTED, {}) == ("", 0)
