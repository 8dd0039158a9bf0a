"""Answers to a few held-out prompts in the first evaluation of a run and in its last, side by side."""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

from offbeat.dashboard.samples import answer_card, cut, played_html
from offbeat.evaluation.samples import EvaluatedPrompt, EvaluatedSample, EvaluatedSet

_MOST_ANSWER = 800
_NUM_RISEN, _NUM_FALLEN, _NUM_SAME = 3, 1, 1


@dataclass(frozen=True)
class Pair:
    """The first answer to one prompt at the first evaluation, and at the last."""

    prompt: EvaluatedPrompt
    before: EvaluatedSample
    after: EvaluatedSample

    @property
    def change(self) -> float:
        """Rise of the reward; an answer without a reward counts as 0."""
        return (self.after.reward or 0.0) - (self.before.reward or 0.0)

    @property
    def outcome(self) -> str:
        """Change of the reward in words: "gained", "lost", "right before and after" or "still wrong"."""
        if self.change:
            return "gained" if self.change > 0 else "lost"
        return "right before and after" if self.after.is_right else "still wrong"


def choose_pairs(first: EvaluatedSet, last: EvaluatedSet) -> list[Pair]:
    """Return prompts that both evaluations asked: three that gained most, the one that lost most, one still wrong, one right in both.

    Prompts are matched by `EvaluatedPrompt.key`. Of equal changes the first in the set comes first.
    """
    later = {prompt.key: prompt for prompt in last.prompts}
    pairs = []
    for prompt in first.prompts:
        other = later.get(prompt.key)
        if other is not None and prompt.samples and other.samples:
            pairs.append(Pair(prompt, prompt.samples[0], other.samples[0]))
    pairs.sort(key=lambda pair: -pair.change)
    risen = [pair for pair in pairs if pair.outcome == "gained"]
    fallen = sorted((pair for pair in pairs if pair.outcome == "lost"), key=lambda pair: pair.change)
    wrong, right = ([pair for pair in pairs if pair.outcome == name] for name in ("still wrong", "right before and after"))
    return [*risen[:_NUM_RISEN], *fallen[:_NUM_FALLEN], *wrong[:_NUM_SAME], *right[:_NUM_SAME]]


def answers_html(answers: Mapping[int, EvaluatedSet]) -> str:
    """Draw the chosen prompts of two evaluations of one set, by global step such as 0 and 60, as cards; nothing of fewer evaluations."""
    if len(answers) < 2:
        return ""
    (start, first), (end, last) = sorted(answers.items())
    cards = "".join(_card(pair, start, end) for pair in choose_pairs(first, last))
    what = f"Answers to {escape(last.name)}" if last.name else "Held-out answers"
    return f'<section><h2>{what}, before and after</h2><div class="cards">{cards}</div></section>' if cards else ""


def _card(pair: Pair, start: int, end: int) -> str:
    row = pair.prompt.row
    before = _said(pair.before, "before" if start == 0 else f"after step {start}", "given")
    after = _said(pair.after, f"after step {end}", "written")
    return answer_card(pair.outcome, prompt=row.prompt_text, played=before + after, answer=row.answer)


def _said(sample: EvaluatedSample, when: str, css: str) -> str:
    reward = f"reward {sample.reward:.4g}" if sample.reward is not None else f"no reward: {sample.reason}"
    facts = f"{when} · {reward}" + (f" · {sample.reason}" if sample.reward is not None and sample.reason != "stop" else "")
    return f'<div class="when">{escape(facts)}</div>' + played_html([(css, cut(sample.text, _MOST_ANSWER) or "(nothing)")])
