"""Cards of metrics."""

import html
import json
import re

from offbeat.dashboard.cards import cards_html, compared_cards, episode_cards, evaluation_sets, main_cards
from offbeat.dashboard.run_files import RunFiles


def run(name: str = "a", **metrics: float) -> RunFiles:
    rows = [{"global_step": step} | {key.replace("__", "/"): value * step for key, value in metrics.items()} for step in (1, 2)]
    return RunFiles(name, "", {}, rows, [], [], {})


def titles(page: str) -> list[str]:
    return re.findall(r"<h3>(.*?)(?: <small>.*?)?</h3>", page)


def test_divergence_lengths_clip_shares_and_lost_samples_have_cards() -> None:
    found = run(
        policy__kl_rollout_to_current_k3_mean=0.1, rollout__response_mean_tokens=5, train__clip_low_fraction=0.1,
        rollout__rejected_share=0.1)
    assert titles(cards_html(main_cards(found))) == [
        "KL divergence", "Response length", "Clipped and masked tokens", "Samples that teach nothing"]


def test_pairs_have_cards_whether_they_teach_a_policy_or_a_reward_model() -> None:
    preferences = run(
        preference__accuracy=0.5, preference__margin_mean=0.5, eval__margin_mean=0.25, preference__chosen_logratio_mean=-0.5,
        preference__rejected_logratio_mean=-1.0)
    assert titles(cards_html(main_cards(preferences))) == ["Pairs ranked rightly", "Log-ratio of answers", "Margin"]
    rewards = run(reward_model__accuracy=0.5, reward_model__margin_mean=0.5)
    assert titles(cards_html(main_cards(rewards))) == ["Pairs ranked rightly", "Margin"]


def test_each_k_and_set_has_a_line_among_those_of_pass_at_k() -> None:
    passes = {"eval/pass_at_4": 0.5, "eval/pass_at_16": 0.75, "eval/hard/pass_at_4": 0.25, "eval/pass_at_4_low": 0.25}
    page = html.unescape(cards_html(main_cards(RunFiles("a", "", {}, [{"global_step": 0} | passes], [], [], {}))))
    assert titles(page) == ["Pass at K"]
    assert re.findall(r'"label":"([^"]*)"', page) == ["pass@4", "pass@16", "pass@4 on hard"]


def test_a_card_without_points_is_left_out() -> None:
    assert cards_html(main_cards(run())) == "" and cards_html(episode_cards(run())) == ""


def test_each_run_has_a_line_of_its_own_in_a_comparison() -> None:
    page = html.unescape(cards_html(compared_cards([run("one", reward__mean=1.0), run("<b>two</b>", reward__mean=2.0)])))
    assert titles(page) == ["Reward"]
    lines = {each["label"]: [point[2] for point in each["points"]] for each in json.loads(re.search(r'data-chart="(\[.*?\])">', page)[1])}
    assert lines == {"one, each step": [1, 2], "one": [1, 1.5], "<b>two</b>, each step": [2, 4], "<b>two</b>": [2, 3]}
    assert "<b>two" not in cards_html(compared_cards([run("<b>two</b>", reward__mean=2.0)]))


def test_evaluation_sets_are_those_of_the_metrics() -> None:
    assert evaluation_sets(run(eval__accuracy=1.0)) == []
    assert evaluation_sets(RunFiles("a", "", {}, [{"eval/hard/accuracy": 1.0, "eval/x/y/accuracy": 0.0}], [], [], {})) == ["hard"]
