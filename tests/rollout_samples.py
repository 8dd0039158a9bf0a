"""A run folder with made-up rollouts. Tests of readers, tools and benchmarks use it."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from offbeat.dashboard.rollout_filter import Filter
from offbeat.dashboard.rollout_index import RolloutIndex
from offbeat.telemetry.rollout_log import RolloutLog

Group = dict[str, Any]


def trajectory(prompt: str, written: str, reward: float | None, **fields: Any) -> dict[str, Any]:
    """A trajectory whose tokens are characters; every token of the answer has log-probability -0.5 and version 3."""
    text = prompt + written
    mask = [False] * len(prompt) + [True] * len(written)
    return {
        "tokens": [ord(letter) for letter in text], "loss_mask": mask, "rollout_logprobs": [-0.5 if wrote else 0 for wrote in mask],
        "versions": [3 if wrote else -1 for wrote in mask], "reward": reward, "text": text, "lengths": [1] * len(text), "trained": True,
        "advantages": [(reward or 0) - 0.5 if wrote else 0 for wrote in mask]} | fields


def group(prompt: str, *answers: tuple[str, float | None] | dict[str, Any], index: int = 0, **fields: Any) -> Group:
    """A group of a prompt's answers with their rewards."""
    made = [answer if isinstance(answer, dict) else trajectory(prompt, *answer) for answer in answers]
    return {"prompt_id": f"0:{index}", "admitted_version": 2, "prompt": prompt, "answer": "42", "trajectories": made} | fields


def write_rollouts(run_dir: Path, step: int, groups: Sequence[Group], rejected: Sequence[Group] = ()) -> None:
    """Write a step's groups, and make the folder a run's."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "metrics.jsonl").touch()
    RolloutLog(run_dir / "rollouts").write(step, _lines(groups, step), [_of_step(each) for each in rejected])


def _lines(groups: Sequence[Group], step: int) -> list[bytes]:
    return [json.dumps(each | {"step": step}).encode() for each in groups]


def _of_step(group: Group) -> Callable[[int], bytes]:
    return lambda step: _lines([group], step)[0]


def write_small_run(run_dir: Path) -> None:
    """Three steps: right and wrong answers, one left out, one rejected group and one that was never played."""
    write_rollouts(run_dir, 1, [
        group("What is 6 * 7? ", ("It is 42.", 1.0), ("Perhaps 41?", 0.0), index=0),
        group("Name a fruit. ", ("An apple, of course.", 0.5), trajectory("Name a fruit. ", "Pear", None, reason="too long: 999 tokens",
              trained=False, advantages=[]), index=1)])
    write_rollouts(run_dir, 2, [group("What is 6 * 7? ", ("forty-two is 42", 1.0), ("I cannot say", -1.0), index=0)], rejected=[
        group("Say 100% of it_ ", ("same", 0.0), ("same", 0.0), index=2, rejected="all rewards are 0", why="equal rewards"),
        group("Too hard", index=3, rejected="PromptError: too many tokens", why="prompt refused")])
    write_rollouts(run_dir, 3, [group("Name a fruit. ", ("Äpfel <script>alert(1)</script>", 2.0), ("Banana", 0.25, ), index=1)])


def addresses(index: RolloutIndex, order: str = "newest", **wanted: object) -> list[str]:
    """Addresses of the rollouts that a filter lets pass, which are as many as are counted."""
    found = [each.address for each in index.find_rollouts(Filter(**wanted), order=order)]
    assert len(found) == index.num_found(Filter(**wanted))
    return found
