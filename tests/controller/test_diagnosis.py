"""What a run is told of its own figures: one sentence with its remedy for each finding."""

import pytest

from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.load import load_config
from offbeat.config.rollout import RolloutConfig
from offbeat.controller import diagnosis
from offbeat.controller.diagnosis import FINDINGS, Diagnosis, idle_engines, slow_first_step, waits_besides, ways_to_publish_less
from offbeat.cpu import Cpu
from offbeat.rollout.idle import WaitingMinute

NO_REWARD = {"eval/accuracy": 0.0, "eval/reward_mean": 0.0}


def advice(*overrides: tuple[str, str], warm_up_steps: int = 0) -> Diagnosis:
    return Diagnosis(load_config(None, [("rollout.max_new_tokens", "64"), *overrides]), warm_up_steps=warm_up_steps)


def step(*, flat: float = 1.0, mean: float = 0.0, std: float = 0.0, truncated: float = 0.0, right: float = 0.0) -> dict[str, float]:
    return {
        "reward/zero_advantage_group_share": flat, "reward/mean": mean, "reward/std": std, "reward/right_share": right,
        "rollout/truncated_share": truncated, "step/total_s": 1.0}


def told(looker: Diagnosis, *stats: dict[str, float]) -> list[str]:
    return ["; ".join(looker.read(each)) for each in stats]


def test_five_steps_in_which_all_groups_have_equal_rewards_are_told_once_with_what_to_do() -> None:
    looker = advice(("rollout.group_size", "4"))
    assert told(looker, *[step()] * 4) == [""] * 4
    assert "".join(looker.read(step())) == (
        "all groups of the last 5 steps had equal rewards (0 in each), so there was nothing to learn from: make the task easier or the"
        " reward finer, or raise rollout.group_size = 4; see `offbeat docs debugging`")
    assert told(looker, *[step()] * 40) == [""] * 40


@pytest.mark.parametrize(("steps", "amount", "remedy"), [
    ([step(mean=0.1, std=1e-9)] * 5, "(0.1 in each)", "make the task easier or the reward finer"),
    ([step(mean=400.0, std=1e-5)] * 5, "(400 in each)", "every sample counts as right"),
    ([step(mean=1.0)] * 5, "(1 in each)", "every sample counts as right"),
    ([step(mean=0.25, std=0.4), *[step(mean=0.5, std=0.5)] * 4], "(0.45 on average)", "neither always nor never solved"),
    ([step(mean=0.25), *[step(mean=0.5)] * 4], "(0.45 on average)", "neither always nor never solved"),
])
def test_what_the_equal_rewards_are_decides_what_is_advised(steps, amount: str, remedy: str) -> None:
    text = told(advice(), *steps)[-1]
    assert amount in text and remedy in text


def test_known_causes_are_named() -> None:
    text = told(advice(), *[step(truncated=0.95)] * 5)[-1]
    assert "; 95% of the samples were cut off at rollout.max_new_tokens = 64, so there" in text
    text = told(advice(("rollout.temperature", "0.2")), *[step()] * 5)[-1]
    assert "; rollout.temperature = 0.2 makes the samples of a prompt alike, so there" in text


def test_nearly_all_groups_of_ten_steps_are_told_and_again_only_when_it_becomes_worse_or_comes_back() -> None:
    looker, nearly = advice(), step(flat=0.95, mean=0.02, std=0.1)
    lines = told(looker, *[nearly] * 12)
    assert [bool(line) for line in lines] == [False] * 9 + [True] + [False] * 2
    assert lines[9].startswith("95% of the groups of the last 10 steps had equal rewards (0.02 on average), so there was next to nothing")
    worse = told(looker, *[step()] * 6)
    assert [bool(line) for line in worse] == [False] * 4 + [True, False] and worse[4].startswith("all groups of the last 5 steps")
    assert not any(told(looker, *[step(flat=0.4, mean=0.3, std=0.4)] * 10))
    assert [bool(line) for line in told(looker, *[step()] * 5)] == [False] * 4 + [True]


def test_groups_that_mostly_differ_are_told_nothing() -> None:
    assert not any(told(advice(), {"eval/accuracy": 0.3, "eval/reward_mean": 0.4}, *[step(flat=0.8, mean=0.3, std=0.4)] * 30))
    steps = ([step(mean=0.5)] * 4 + [step(flat=0.25, mean=0.5, std=0.5)]) * 6
    assert not any(told(advice(), *steps)), "four of five steps are neither five in a row nor nearly all of ten"


def test_a_run_without_any_reward_is_warned_after_its_first_step() -> None:
    looker = advice()
    first = told(looker, NO_REWARD, step(truncated=1.0))
    assert first[0] == "" and first[1].startswith(
        "every answer of the first evaluation and every sample of the first step had a reward of 0; 100% of the samples were cut off")
    assert "run.warm_up = true" in first[1] and first[1].endswith("see `offbeat docs debugging`")
    assert [bool(line) for line in told(looker, *[step()] * 4)] == [False] * 3 + [True]
    assert "sft.total_steps" in told(advice(warm_up_steps=9), NO_REWARD, step())[1]


@pytest.mark.parametrize("evaluation", [{}, {"eval/accuracy": 0.0, "eval/reward_mean": 0.01}, {"eval/hard/accuracy": 0.0}])
def test_an_evaluation_that_is_missing_or_found_a_reward_leaves_it_to_the_steps(evaluation: dict[str, float]) -> None:
    assert told(advice(), evaluation, step()) == ["", ""]
    assert told(advice(), NO_REWARD, step(flat=0.9, mean=0.01, std=0.1)) == ["", ""]


@pytest.mark.parametrize(("settings", "learns"), [
    ({}, True), ({"preset": "dr_grpo"}, True), ({"kl_loss": "k3"}, True), ({"preset": "ppo"}, False), ({"centre": "none"}, False),
    ({"imitation_coefficient": 0.1}, False), ({"length_penalty": 0.5}, False), ({"teacher": "policy"}, False),
])
def test_only_algorithms_that_compare_the_samples_of_a_group_are_warned(settings, learns: bool) -> None:
    assert AlgorithmConfig(**settings).learns_from_differences is learns


def test_an_algorithm_with_another_baseline_is_not_warned() -> None:
    assert not any(told(advice(("algorithm.centre", "none"), ("algorithm.scale", "none")), *[step(mean=0.5)] * 12))


def test_a_warm_up_that_is_lost_because_few_samples_were_right_names_the_setting_that_ended_it() -> None:
    after = {"eval/accuracy": 0.32, "eval/accuracy_low": 0.27, "eval/accuracy_high": 0.38, "eval/reward_mean": 0.6}
    first, later = (step(flat=0.1, mean=0.4, std=0.2, right=right) for right in (2 / 256, 0.1))
    lost = later | {"eval/accuracy": 0.13, "eval/accuracy_low": 0.1, "eval/accuracy_high": 0.18}
    settings = (("sft.stop_at_accuracy", "0.3"), ("rollout.group_size", "8"), ("rollout.consumer_batch_size", "32"))
    assert told(advice(*settings, warm_up_steps=30), after, first, later, lost, lost) == ["", "", "", (
        "held-out accuracy fell from 0.320 after the warm-up to 0.130: only 0.8% of the samples of the first step were right, so what was"
        " learnt from partial credit undid what was imitated; let the warm-up go on, to sft.stop_at_accuracy = 0.66 (it is 0.3), and"
        " start over"), ""]
    assert "go on, with sft.total_steps above 30, and" in told(advice(*settings[1:], warm_up_steps=30), after, first, lost)[2]
    held = lost | {"eval/accuracy": 0.25, "eval/accuracy_high": 0.31}
    assert not any(told(advice(*settings, warm_up_steps=30), after, first, held)), "that may be chance"
    assert not any(told(advice(*settings, warm_up_steps=30), after, first | {"reward/right_share": 0.12}, lost))
    assert not any(told(advice(*settings), after, first, lost)), "there was no warm-up"
    small = advice(*settings[:2], ("rollout.consumer_batch_size", "4"), warm_up_steps=30)
    assert not any(told(small, after, first, lost)), "ten right ones of 32 samples are too few to compare"


SLOW = {"step/publish_s": 6.0, "step/total_s": 20.0}


def test_a_run_that_publishes_for_long_is_told_once_what_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "this_cpu", lambda: Cpu("Server", "AMX", has_bf16=True))
    lines = told(advice(("run.name", "mine")), {"eval/accuracy": 0.5}, *[SLOW] * 7)
    assert lines[:2] == ["", ""], "the first step may be slow for any reason"
    assert lines[2] == (
        "publishing takes 6.0 of 20.0 s a step; model.lora.rank = 16 (an adapter is a hundredth of the model) or model.dtype = \"bfloat16\""
        " (half the bytes) or weights.dir = \"/dev/shm/mine\" (memory instead of a disk) or weights.interrupt = \"keep\" (the cache is not"
        " computed anew) would shorten it")
    assert lines[3:] == [""] * 5


def test_a_run_that_publishes_fast_is_told_nothing() -> None:
    times = ((0.9, 1.0), (0.9, 1.0), (6.0, 60.0), (6.0, 60.0), (6.0, 20.0), (6.0, 60.0), (6.0, 20.0))
    assert not any(told(advice(), *({"step/publish_s": publish_s, "step/total_s": total_s} for publish_s, total_s in times)))


def test_nothing_is_advised_that_a_run_does_already_or_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def ways(*overrides: tuple[str, str]) -> list[str]:
        return ways_to_publish_less(load_config(None, [("run.name", "mine"), *overrides]))

    assert ways(("model.lora.rank", "8")) == []
    done = [("weights.dir", "/dev/shm/x"), ("model.dtype", "bfloat16"), ("weights.interrupt", "keep")]
    assert [way.split(" =")[0] for way in ways(*done)] == ["model.lora.rank"]
    monkeypatch.setattr(diagnosis, "this_cpu", lambda: Cpu("Laptop", "AVX2", has_bf16=False))
    assert not any("bfloat16" in way for way in ways()), "it would be slow there"
    assert not any("weights.dir" in way for way in ways(("cluster.launcher", "ray")))


def test_a_slow_first_step_on_cpus_names_what_makes_it_smaller() -> None:
    text = slow_first_step(load_config(None, [("rollout.max_new_tokens", "256")]))
    assert "it has 64 prompts of 8 samples with up to 256 new tokens each; a smaller rollout.consumer_batch_size (16 to begin" in text
    assert "rollout.max_new_tokens or rollout.group_size" in text
    assert "to begin with" not in slow_first_step(load_config(None, [("rollout.consumer_batch_size", "16")]))


def test_devices_and_engines_elsewhere_are_not_told_to_take_smaller_steps() -> None:
    for setting in (("train.devices_per_rank", "1"), ("inference.devices_per_engine", "1"), ("inference.urls", '["http://127.0.0.1:9"]')):
        assert slow_first_step(load_config(None, [setting])) == ""


def idle(minute: WaitingMinute, *overrides: tuple[str, str]) -> str:
    return idle_engines(minute, load_config(None, [("rollout.workflow", "gym"), ("agent.environment", "word_guess"), *overrides]))


def test_engines_that_idle_are_told_with_the_setting_the_factor_and_what_to_set() -> None:
    few = (("rollout.max_concurrent_rollouts", "4"), ("rollout.consumer_batch_size", "8"))
    assert idle(WaitingMinute("running", 60, 45), *few) == (
        "engines had nothing to do for 75% of the last minute in which groups ran, as all groups waited for their environments;"
        " rollout.max_concurrent_rollouts = 4 keeps out more, and 4.0 times as many groups would keep the engines busy; set"
        " rollout.max_concurrent_rollouts = 16")
    assert idle(WaitingMinute("running", 60, 59), *few).endswith(
        "and 20 times or more as many groups would keep the engines busy; set rollout.max_concurrent_rollouts = 80; above 16,"
        " rollout.max_head_offpolicyness or rollout.consumer_batch_size has to grow, too")
    assert idle(WaitingMinute("running", 60, 18), *few) == "", "they are busy enough"


def test_episodes_that_wait_for_a_place_are_told_of_the_places() -> None:
    assert idle(WaitingMinute("places", 60, 45), ("agent.processes", "2"), ("agent.episodes_per_process", "16")) == (
        "engines had nothing to do for 75% of the last minute in which groups ran, as all episodes that have a place waited for their"
        " environments; agent.processes = 2 times agent.episodes_per_process = 16 are all the places there are, others wait for one, and"
        " 4.0 times as many places would keep the engines busy; set agent.episodes_per_process = 64, or as many times as many"
        " agent.processes if your code computes rather than waits")


def test_groups_that_wait_for_their_rewards_are_not_said_to_wait_for_environments() -> None:
    settings = (("rollout.max_head_offpolicyness", "1"), ("rollout.reward_workers", "2"))
    assert idle(WaitingMinute("staleness", 60, 45, 45, 90), *settings) == (
        "engines had nothing to do for 75% of the last minute in which groups ran, as all groups waited for their rewards; make the reward"
        " faster; or else, rollout.max_head_offpolicyness = 1 keeps out more, and 4.0 times as many groups would keep the engines busy")
    assert idle(WaitingMinute("staleness", 60, 45, 45, 270), *settings) == (
        "engines had nothing to do for 75% of the last minute in which groups ran, as all groups waited for their rewards, which 6 of them"
        " on average asked for at the same time; make the reward faster, or raise rollout.reward_workers = 2")


@pytest.mark.parametrize(("workflow", "besides"), [
    ("tool_loop", "their tools"), ("agent", "their tools and environments"), ("mine.py:play", "what mine.py:play does besides"),
    ("single_turn", ""), (RolloutConfig().workflow, ""),
])
def test_each_workflow_waits_for_something_of_its_own(workflow: str, besides: str) -> None:
    assert waits_besides(workflow) == besides


def test_one_turn_waits_for_rewards_alone() -> None:
    assert idle_engines(WaitingMinute("running", 60, 45), load_config(None, [])) == ""
    assert idle_engines(WaitingMinute("running", 60, 45, 45, 45), load_config(None, [])).startswith("engines had nothing to do for 75%")


def test_findings_that_are_said_with_another_one_are_in_the_table() -> None:
    names = [finding.name for finding in FINDINGS]
    assert len(set(names)) == len(names)
    for place, finding in enumerate(FINDINGS):
        assert set(finding.milder) <= set(names[place + 1:]), "the worse one is asked first"
