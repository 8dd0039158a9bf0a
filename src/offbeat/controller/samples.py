"""Writes samples of a step for a person: for the console, which shows them when the user asks, and as a table for sinks. Torch-free."""

import math
from collections.abc import Sequence
from dataclasses import replace

from offbeat.data.pieces import Pieces
from offbeat.data.rollout_records import keep
from offbeat.data.row import Row
from offbeat.data.tokenizer import Tokenizer
from offbeat.data.trajectory import Group, Trajectory, episode_reward
from offbeat.telemetry.sample_table import SampleTable

_MOST_CHARACTERS = 1500
"""Characters of a prompt's end and of an answer's beginning; two of each fit on a terminal."""
_MOST_IN_TABLE = 16
_MOST_CELL_CHARACTERS = 4000


def best_and_worst(step: int, groups: Sequence[Group], tokenizer: Tokenizer) -> str:
    """Return a step's samples with the largest and the smallest reward, as text of some lines.

    Of an episode of several trajectories, the last is shown. Characters that would act on a terminal are written as "\\ufffd".
    """
    played = [(episode_reward(chains), group.prompt_id, chains) for group in groups for chains in group.usable_episodes]
    if not played:
        return f"step {step} had no samples that can be trained on"
    best, worst = max(played, key=lambda one: one[0]), min(played, key=lambda one: one[0])
    shown = [("best", best), *([("worst", worst)] if worst[0] < best[0] else [])]
    lines = []
    for word, (reward, prompt_id, chains) in shown:
        lines += [
            f"{word} of {len(played)} samples of step {step}: reward {reward:.4g}, prompt {prompt_id}, "
            f"{len(chains[-1])} tokens, ended by {chains[-1].reason}",
            *_text(chains[-1], tokenizer)]
    return "\n".join(lines)


def sample_table(groups: Sequence[Group], rows: Sequence[Row], pieces: Pieces) -> SampleTable:
    """Return 16 samples of a step, or all if there are fewer: the one with the largest reward, the one with the smallest, and others evenly
    between them, in this order; those without a reward come last. `rows` are those of the groups' prompts.
    """
    played = [(group, row, t) for group, row in zip(groups, rows, strict=True) for t in group.trajectories]
    played.sort(key=lambda one: one[2].reward if math.isfinite(one[2].reward) else -math.inf, reverse=True)
    count = min(len(played), _MOST_IN_TABLE)
    places = [round(place * (len(played) - 1) / max(count - 1, 1)) for place in range(count)]
    found = []
    for group, row, t in (played[place] for place in places):
        kept = keep(replace(group, trajectories=(t,)), row, pieces, step=0, columns={})
        [own] = kept.trajectories
        texts = (kept.prompt, own.completion, kept.answer)
        found.append((own.reward, *(text[:_MOST_CELL_CHARACTERS] for text in texts), own.reason, own.num_generated, kept.prompt_id))
    return SampleTable(found)


def _text(trajectory: Trajectory, tokenizer: Tokenizer) -> list[str]:
    """Return the end of the prompt and the beginning of the answer, each indented."""
    generated = trajectory.loss_mask.argmax() if trajectory.loss_mask.any() else len(trajectory)
    tokens = trajectory.tokens.tolist()
    prompt = tokenizer.decode(tokens[:generated], skip_special_tokens=False)
    answer = tokenizer.decode_continuation(tokens[generated:], skip_special_tokens=False)
    if len(prompt) > _MOST_CHARACTERS:
        prompt = f"… {prompt[-_MOST_CHARACTERS:]}"
    if len(answer) > _MOST_CHARACTERS:
        answer = f"{answer[:_MOST_CHARACTERS]} …"
    return [*_indented("given", prompt), *_indented("wrote", answer)]


def _indented(label: str, text: str) -> list[str]:
    safe = "".join(char if char.isprintable() or char == "\n" else " " if char == "\t" else "\ufffd" for char in text)
    return [f"  {label if number == 0 else '':<5} │ {line}" for number, line in enumerate(safe.split("\n"))]
