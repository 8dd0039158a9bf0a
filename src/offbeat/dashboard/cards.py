"""Cards of a run: each is a chart with the sentence below it. Drawn by the report, the live page and the comparison of runs."""

import re
from collections.abc import Sequence
from html import escape
from typing import Any

from offbeat.dashboard.charts import ANY_RANGE, Chart, Point, Range, Series, draw, smoothed
from offbeat.dashboard.run_files import RunFiles

Card = tuple[Chart, str]

_OF_SET = re.compile(r"eval/([a-z0-9_]+)/accuracy")
_PASS = re.compile(r"eval/(?:([a-z0-9_]+)/)?pass_at_(\d+)")

COMPARED = (
    ("Held-out accuracy", "", ("eval/accuracy",), "On prompts that are never trained on."),
    ("Reward", "", ("reward/mean",), "Mean over a step's samples, and over 8 steps."),
    ("Response length", "tokens", ("rollout/response_mean_tokens",), "Generated per episode."),
    ("Entropy", "nats", ("train/entropy",), "Per token."),
    ("KL of the rollout's policy from the trainer's", "nats", ("policy/kl_rollout_to_current_k3_mean", "policy/kl_mean"), "k3 estimate."),
    ("Staleness", "versions", ("rollout/staleness_mean_versions",), "Mean over a step's trajectories."),
    ("Gradient norm", "", ("train/grad_norm",), "Before clipping."),
    ("Throughput", "tokens/s", ("throughput/generated_tokens_per_s",), "Generated tokens per second."),
    ("Time of a step", "s", ("step/total_s",), "Evaluation included."),
)
"""Charts of a comparison of runs: title, unit, metrics (the first that a run has is drawn), and a sentence."""


def main_cards(run: RunFiles) -> list[Card]:
    """Return the charts of a run's metrics; some may have no points."""
    bound = run.bound("rollout", "max_head_offpolicyness")
    return [
        (Chart("Held-out accuracy", "", _accuracies(run), y_range=(0, 1)), "On prompts that are never trained on."),
        (Chart("Pass at K", "share", _passes(run), y_range=(0, 1)),
         "Held-out prompts of which one of K answers is right; an estimate from all answers, without bias."),
        (Chart("Reward", "", _with_mean(run.points("reward/mean"))), "Mean over a step's samples; the strong line is the mean of 8 steps."),
        (Chart("Rewards by name", "", _named_rewards(run)), "Mean of each named reward over a step's samples; the reward is their sum."),
        _of_metrics(
            run, "Staleness", "versions", "Versions between the policy that sampled a token and the one that trains on it.",
            ("max", "rollout/staleness_max_versions", "c2"), ("mean", "rollout/staleness_mean_versions", "c1"),
            bound=bound, bound_label="max_head_offpolicyness"),
        _of_metrics(
            run, "Trainer-engine log-probability gap", "nats, log scale",
            "|trainer − engine|: per trained token, mostly from staleness; and of the canary under the same weights, from numerics alone.",
            ("max", "policy/logprob_gap_max", "c2"), ("mean", "policy/logprob_gap_mean", "c1"), ("same weights", "policy/canary_gap", "c3"),
            y_range=ANY_RANGE, log=True),
        _of_metrics(
            run, "Throughput", "tokens/s", "Tokens that engines wrote, and tokens that the trainer consumed, per second.",
            ("generated", "throughput/generated_tokens_per_s", "c3"), ("trained", "throughput/trained_tokens_per_s", "c1")),
        _of_metrics(
            run, "Where a step's time goes", "s", "A short wait for rollouts means that the engines keep up.",
            ("whole step", "step/total_s", "c4"), ("train", "step/train_s", "c1"), ("wait for rollouts", "step/rollout_wait_s", "c2"),
            ("publish", "step/publish_s", "c3")),
        _of_metrics(
            run, "Use of the train ranks' devices", "",
            "Share of training steps in which ranks computed; and the model's operations by what the devices could have done, where known.",
            ("busy", "train/busy_share", "c1"), ("MFU", "train/mfu", "c2"), y_range=(0, 1)),
        (Chart("Loss", "", _with_mean(run.points("train/loss"))), "The policy objective; its sign and size say little by themselves."),
        _of_metrics(run, "Gradient norm", "", "Before clipping.", ("norm", "train/grad_norm", "c1")),
        _of_metrics(
            run, "Entropy", "nats", "Per token; a fall to zero is a policy that stopped exploring.", ("entropy", "train/entropy", "c1")),
        _of_metrics(
            run, "KL divergence", "nats",
            "k3 estimates: how far the policy is from the one that sampled, and from the reference where the loss compares with it.",
            ("rollout to current", "policy/kl_rollout_to_current_k3_mean", "c1"),
            ("current to reference", "policy/kl_current_to_ref_k3_mean", "c2")),
        _of_metrics(
            run, "Response length", "tokens", "Generated per episode; right ones have a reward of at least 1.",
            ("all", "rollout/response_mean_tokens", "c1"), ("right", "rollout/right_response_mean_tokens", "c3"),
            ("wrong", "rollout/wrong_response_mean_tokens", "c2")),
        _of_metrics(
            run, "Clipped and masked tokens", "share",
            "Tokens whose gradient a clip removed at its lower or upper bound, and tokens that a filter dropped.",
            ("clipped low", "train/clip_low_fraction", "c1"), ("clipped high", "train/clip_high_fraction", "c2"),
            ("masked", "policy/masked_fraction", "c3")),
        _of_metrics(
            run, "Samples that teach nothing", "share",
            "Truncated samples, groups without an advantage, rejected prompts, and samples left out of their group.",
            ("truncated", "rollout/truncated_share", "c4"), ("equal rewards", "reward/zero_advantage_group_share", "c1"),
            ("rejected", "rollout/rejected_share", "c2"), ("left out", "rollout/unusable_share", "c3")),
        _of_metrics(
            run, "Pairs ranked rightly", "share",
            "Pairs of a step, before its update; between this and the accuracy on held-out pairs is overfitting.",
            ("preferences", "preference/accuracy", "c1"), ("reward model", "reward_model/accuracy", "c1"), y_range=(0, 1)),
        _of_metrics(
            run, "Log-ratio of answers", "nats",
            "Against the reference, or without one the log-probability itself; where both fall, chosen answers become less likely, too.",
            ("chosen", "preference/chosen_logratio_mean", "c3"), ("rejected", "preference/rejected_logratio_mean", "c2"),
            ("chosen, by token", "preference/chosen_logprob_mean", "c3"), ("rejected, by token", "preference/rejected_logprob_mean", "c2"),
            y_range=ANY_RANGE),
        _of_metrics(
            run, "Margin", "", "By how much the chosen answer leads.", ("preferences", "preference/margin_mean", "c1"),
            ("reward model", "reward_model/margin_mean", "c1"), ("held out", "eval/margin_mean", "c3"), y_range=ANY_RANGE),
        _of_metrics(run, "Learning rate", "", "Peak, warm-up and decay as configured.", ("rate", "train/lr", "c1")),
    ]


def episode_cards(run: RunFiles) -> list[Card]:
    """Return charts of time and turns of episodes of several turns; without points for a run without turns."""
    seconds = dict(run.points("rollout/episode_mean_s"))
    parts = [
        Series(label, [(step, share * seconds[step]) for step, share in run.points(f"rollout/{name}_share") if step in seconds], colour)
        for name, label, colour in (("model", "model calls", "c3"), ("tool", "tools and environments", "c1"), ("queue", "queue", "c4"))]
    return [
        (Chart("Where an episode's time goes", "s", parts, y_range=(0, None), stacked=True),
         "Mean over the episodes that ended in a step: calls of the model, what lies between them, and the wait for a place to play in."),
        _of_metrics(run, "Turns", "", "Mean over a step's episodes.", ("turns", "rollout/turns_mean", "c1"))]


def compared_cards(runs: Sequence[RunFiles]) -> list[Card]:
    """Return charts with a line for each run; colours repeat after four."""
    found = []
    for title, unit, metrics, text in COMPARED:
        series = []
        for number, run in enumerate(runs):
            points = next(filter(None, map(run.points, metrics)), [])
            colour = f"c{1 + number % 4}"
            if metrics[0] == "reward/mean":
                series.append(Series(f"{run.name}, each step", points, colour, "faint"))
                points = smoothed(points, window=8)
            series.append(Series(run.name, points, colour, "dots" if metrics[0].startswith("eval/") else "line"))
        found.append((Chart(title, unit, series), text))
    return found


def cards_html(cards: Sequence[Card]) -> str:
    """Draw the cards that have points; empty if none has."""
    return "".join(_card(chart, text) for chart, text in cards if chart.points())


def evaluation_sets(run: RunFiles) -> list[str]:
    """Return the names of the evaluation sets that were evaluated."""
    found = (_OF_SET.fullmatch(name) for row in run.metrics for name in row)
    return list(dict.fromkeys(match[1] for match in found if match is not None))


def _of_metrics(
    run: RunFiles, title: str, unit: str, text: str, *lines: tuple[str, str, str], y_range: Range = (0, None), **form: Any,
) -> Card:
    """Return a card of metrics, each with its label and colour; `form` are further fields of `Chart`."""
    series = [Series(label, run.points(metric), colour) for label, metric, colour in lines]
    return Chart(title, unit, series, y_range=y_range, **form), text


def _with_mean(points: Sequence[Point]) -> list[Series]:
    return [Series("this step", points, style="faint"), Series("mean of 8 steps", smoothed(points, window=8))]


def _accuracies(run: RunFiles) -> list[Series]:
    names = evaluation_sets(run)
    held_out = Series("held-out prompts" if names else "accuracy", run.points("eval/accuracy"), style="dots")
    sets = (
        Series(name, run.points(f"eval/{name}/accuracy"), f"c{1 + number % 4}", style="dots") for number, name in enumerate(names, start=1))
    return [held_out, *sets]


def _passes(run: RunFiles) -> list[Series]:
    matches = {name: match for row in run.metrics for name in row if (match := _PASS.fullmatch(name))}
    return [
        Series(f"pass@{match[2]}{f' on {match[1]}' if match[1] else ''}", run.points(name), f"c{1 + number % 4}", style="dots")
        for number, (name, match) in enumerate(sorted(matches.items(), key=lambda item: (len(item[0]), item[0])))]


def _named_rewards(run: RunFiles) -> list[Series]:
    names = dict.fromkeys(name for row in run.metrics for name in row if name.startswith("reward/") and name.endswith("_mean"))
    return [
        Series(name.removeprefix("reward/").removesuffix("_mean"), run.points(name), f"c{1 + number % 4}")
        for number, name in enumerate(names)]


def _card(chart: Chart, text: str) -> str:
    strong = [series for series in chart.series if series.style != "faint" and series.points]
    keys = [f'<span class="key"><i class="{series.colour}"></i>{escape(series.label)}</span>' for series in strong]
    if chart.bound is not None:
        keys.append(f'<span class="key"><i class="dash"></i>{escape(chart.bound_label)} = {chart.bound:g}</span>')
    shown = "".join(keys) if len(keys) > 1 else ""
    unit = f" <small>{escape(chart.unit)}</small>" if chart.unit else ""
    head = f'<h3>{escape(chart.title)}{unit}</h3><div class="keys">{shown}</div>'
    return f'<figure class="card">{head}{draw(chart)}<p>{escape(text)}</p></figure>'
