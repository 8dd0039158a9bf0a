"""A few rollouts of a run's newest step for the report: what the policy was asked, what it wrote, and what that earned."""

from collections.abc import Sequence
from html import escape

from offbeat.data.kept import KeptGroup, KeptTrajectory

_MOST_PROMPT, _MOST_WRITTEN = 600, 1500

Sample = tuple[str, KeptGroup, KeptTrajectory]


def choose_samples(groups: Sequence[KeptGroup]) -> list[Sample]:
    """Return the rollouts with the highest and the lowest reward, the longest and one that was left out, each with its name.

    A rollout is not shown twice, and of a step of equal rewards only one is.
    """
    everyone = [(group, t) for group in groups for t in group.trajectories]
    scored = [(group, t) for group, t in everyone if t.reward is not None]
    found: list[Sample] = []
    if scored:
        found.append(("highest reward", *max(scored, key=lambda each: each[1].reward or 0.0)))
        worst = min(scored, key=lambda each: each[1].reward or 0.0)
        if worst[1].reward != found[0][2].reward:
            found.append(("lowest reward", *worst))
        found.append(("longest", *max(scored, key=lambda each: each[1].num_generated)))
    found += [("left out", group, t) for group, t in everyone if ": " in t.reason][:1]
    shown: list[Sample] = []
    for name, group, t in found:
        if not any(t is other for _, _, other in shown):
            shown.append((name, group, t))
    return shown


def samples_html(groups: Sequence[KeptGroup]) -> str:
    """Draw the chosen rollouts as cards; empty without any."""
    cards = "".join(_card(*sample) for sample in choose_samples(groups))
    return f'<section><h2>Rollouts of step {groups[0].step}</h2><div class="cards">{cards}</div></section>' if cards else ""


def _card(name: str, group: KeptGroup, t: KeptTrajectory) -> str:
    facts = [
        f"reward {t.reward:.4g}" if t.reward is not None else "no reward",
        f"advantage {t.advantage:+.3g}" if t.advantage else "",
        f"{t.num_generated} token{'' if t.num_generated == 1 else 's'}", "" if t.reason == "stop" else t.reason, f"row {group.prompt_id}"]
    head = f"<h3>{escape(name.capitalize())} <small>{escape(' · '.join(filter(None, facts)))}</small></h3>"
    return (
        f'<figure class="card rollout">{head}<div class="asked">{escape(_cut(group.prompt, _MOST_PROMPT))}</div>'
        f'<div class="written">{escape(_cut(t.completion, _MOST_WRITTEN))}</div></figure>')


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} …"
