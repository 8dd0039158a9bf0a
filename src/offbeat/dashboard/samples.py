"""A few rollouts of a run's newest step for the report: prompt, completion and reward; and the card that shows an answer to a prompt."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from offbeat.dashboard.conversation import messages_of
from offbeat.data.stored_rollouts import KeptGroup, KeptTrajectory

_MOST_PROMPT, _MOST_WRITTEN = 600, 1500
_NUM_EACH = 3

Sample = tuple[str, KeptGroup, KeptTrajectory]


def choose_samples(groups: Sequence[KeptGroup]) -> list[Sample]:
    """Return up to three of the best and of the worst rollouts by reward, the longest and one that was left out, each with its name.

    Best and worst take turns, and each comes from another prompt. A rollout is not shown twice, and of a step of equal rewards only one is.
    """
    everyone = [(group, t) for group in groups for t in group.trajectories]
    scored = sorted(((t.reward, group, t) for group, t in everyone if t.reward is not None), key=lambda each: -each[0])
    found: list[Sample] = []
    if scored:
        highest, lowest = scored[0][0], scored[-1][0]
        best = _of_other_prompts([(group, t) for reward, group, t in scored if reward > lowest or highest == lowest])
        worst = _of_other_prompts([(group, t) for reward, group, t in reversed(scored) if reward < highest])
        if highest == lowest:
            del best[1:]
        for place in range(_NUM_EACH):
            found += [("best" if place == 0 else "another of the best", *each) for each in best[place : place + 1]]
            found += [("worst" if place == 0 else "another of the worst", *each) for each in worst[place : place + 1]]
        found.append(("longest", *max(((group, t) for _, group, t in scored), key=lambda each: each[1].num_generated)))
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


def _of_other_prompts(rollouts: Sequence[tuple[KeptGroup, KeptTrajectory]]) -> list[tuple[KeptGroup, KeptTrajectory]]:
    """Return the first rollout of each prompt, the first few of them."""
    first: dict[str, tuple[KeptGroup, KeptTrajectory]] = {}
    for group, t in rollouts:
        first.setdefault(group.prompt_id, (group, t))
    return list(first.values())[:_NUM_EACH]


def _card(name: str, group: KeptGroup, t: KeptTrajectory) -> str:
    named = [f"{part} {value:.4g}" for part, value in t.named_rewards.items() if value is not None] if len(t.named_rewards) > 1 else []
    facts = [
        f"reward {t.reward:.4g}" if t.reward is not None else "no reward", *named,
        f"advantage {t.advantage:+.3g}" if t.advantage else "",
        f"{t.num_generated} token{'' if t.num_generated == 1 else 's'}", "" if t.reason == "stop" else t.reason, f"row {group.prompt_id}"]
    return answer_card(name, " · ".join(filter(None, facts)), prompt=group.prompt, played=played_html(_played(t)), answer=group.answer)


def answer_card(title: str, facts: str = "", *, prompt: str, played: str, answer: str) -> str:
    """Draw a prompt, what was played from it, and the right answer, if there is one.

    `facts` are a remark beside the title, such as "reward 1 · 7 tokens"; `played` is one or more `played_html`, with headings between them.
    """
    beside = f" <small>{escape(facts)}</small>" if facts else ""
    expected = f'<div class="expected">answer: {escape(cut(answer, _MOST_PROMPT))}</div>' if answer else ""
    return (
        f'<figure class="card rollout"><h3>{escape(title.capitalize())}{beside}</h3>'
        f'<div class="asked">{escape(cut(prompt, _MOST_PROMPT))}</div>{played}{expected}</figure>')


def played_html(messages: Iterable[tuple[str, str]]) -> str:
    """Draw messages, each of a CSS class, "written" by the policy or "given" to it, and a text."""
    drawn = "".join(f'<div class="{css}">{escape(text)}</div>' for css, text in messages)
    return f'<div class="played">{drawn}</div>'


def _played(t: KeptTrajectory) -> Iterator[tuple[str, str]]:
    """Yield the CSS class and text of each message after the prompt: "written" by the policy, or "given" to it between its turns."""
    pieces, left = t.pieces, _MOST_WRITTEN
    for message in messages_of(t):
        if message.turn == 0 or left <= 0:  # the prompt, or too much
            continue
        text = "".join(pieces[message.start : message.end])
        yield ("written" if message.role == "policy" else "given", cut(text, left))
        left -= len(text)


def cut(text: str, most: int) -> str:
    """Return a text of at most `most` characters, with a mark where it goes on."""
    return text if len(text) <= most else f"{text[:most]} …"
