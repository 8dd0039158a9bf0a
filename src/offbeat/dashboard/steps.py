"""One step of a run for the live page, which steps through a recorded run: its metrics beside those of the step before, and its groups.

Called by `site`. Groups are those that the run has kept, with each token's text and the version that sampled it.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offbeat.dashboard.run_files import RunFiles
from offbeat.data.stored_rollouts import Address, KeptFile, KeptGroup, KeptTrajectory, kept_files, read_groups
from offbeat.errors import DataError

_NOT_SHOWN = frozenset({"global_step", "time_s"})


def step_facts(run: RunFiles, folder: Path, *, step: int | None, first: int, most: int) -> dict[str, Any]:
    """Return what is known of a step.

    Args:
        step: the step; None for the newest.
        first, most: the groups to return: so many, from this one on.

    Returns:
        `steps` in order, the `step`, its `metrics` (name, value, value before), `groups` with samples, `num_groups`, and `kept`, which is
        false if the step has no file of rollouts.

    Raises:
        DataError: the run has no such step, or its rollouts cannot be read.
    """
    rows = {int(row["global_step"]): row for row in run.metrics if isinstance(row.get("global_step"), int)}
    files = {file.step: file for file in kept_files(folder) if not file.is_rejected}
    steps = sorted({*rows, *files})
    if not steps:
        return {"steps": [], "step": None, "metrics": [], "groups": [], "num_groups": 0, "kept": False}
    step = steps[-1] if step is None else step
    if step not in steps:
        raise DataError(f"the run has no step {step}; it has {len(steps)} from {steps[0]} to {steps[-1]}")
    before = max((each for each in rows if each < step), default=None)
    groups = list(read_groups(files[step])) if step in files else []
    return {
        "steps": steps, "step": step, "metrics": _metrics(rows.get(step, {}), rows[before] if before is not None else {}),
        "groups": [_group_facts(group, files[step], first + place) for place, group in enumerate(groups[first : first + most])],
        "num_groups": len(groups), "kept": step in files}


def _metrics(row: Mapping[str, Any], before: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"name": name, "value": _finite(value), "before": _finite(before.get(name))}
        for name, value in sorted(row.items()) if name not in _NOT_SHOWN]


def _finite(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _group_facts(group: KeptGroup, file: KeptFile, number: int) -> dict[str, Any]:
    return {
        "prompt_id": group.prompt_id, "prompt": group.prompt, "answer": group.answer, "admitted_version": group.admitted_version,
        "samples": [
            _sample_facts(t, str(Address(file.step, file.is_rejected, number, place))) for place, t in enumerate(group.trajectories)]}


def _sample_facts(t: KeptTrajectory, address: str) -> dict[str, Any]:
    """Return a sample from its first generated token on; versions of tokens that it was given are null."""
    start = t.loss_mask.index(True) if True in t.loss_mask else len(t.tokens)
    versions = [version if own else None for version, own in zip(t.versions, t.loss_mask, strict=True)]
    return {
        "address": address, "reward": t.reward, "advantage": t.advantage, "reason": t.reason, "trained": t.trained, "agent": t.agent,
        "pieces": t.pieces[start:], "versions": versions[start:]}
