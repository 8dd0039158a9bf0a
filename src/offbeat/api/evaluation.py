"""`offbeat.evaluate`: `offbeat eval` from a Python program or a notebook."""

import os
from dataclasses import replace
from typing import Any

from offbeat.api.rows import Rows, Sets, sets_of
from offbeat.api.sentence import short_errors
from offbeat.api.session import run_alone
from offbeat.api.settings import Settings, Source, configured, is_task
from offbeat.api.training import Code, Several
from offbeat.controller.evaluate import Evaluation
from offbeat.runs.evaluation import evaluate_model

HELDOUT = "heldout"
"""Name of the evaluation of the held-out prompts."""

_ALL = 2**31
"""More than any number of rows."""

_HOMES = ("evaluate", "rollout", "run", "data", "model", "inference")


@short_errors
def evaluate(
    model: str | os.PathLike[str] | None = None, data: Sets | None = None, *, reward: Code | Several | None = None,
    workflow: Code | None = None, config: Source | None = None, settings: Settings | None = None, **keywords: Any,
) -> dict[str, Evaluation]:
    """Measure how often a model's answers are right, without training it, as `offbeat eval` does.

        found = offbeat.evaluate("runs/words/export", "words_test.jsonl", num_prompts=100)
        print(found["heldout"].accuracy, found["heldout"].interval)

    Args:
        model: folder or hub id.
        data: rows to answer, in any form that `train` takes; or evaluation sets by name. Without it, the held-out rows of `config`.
        reward, workflow, config, settings: as of `train`.
        keywords: further settings by the last part of their names, such as `max_new_tokens`; [evaluate] and [rollout] come first. Of each
            set the first `num_prompts` rows are asked, 256 by default.

    Returns:
        An evaluation for each set by its name, "heldout" for rows that have none: `accuracy`, `interval` (95 %), `reward_mean`, `pass_at`.

    Raises:
        UserError: an argument cannot work.
        RunError: engines or rewards failed.
        KeyboardInterrupt: it was interrupted.
    """
    sets = sets_of(data, unnamed=HELDOUT)
    first, *others = sets or (HELDOUT,)
    rows: dict[str, Rows] = {f"evaluate.sets.{name}.data": sets[name] for name in others}
    if sets:  # the first set stands where a run has its held-out rows
        rows["data"] = sets[first]
        if not is_task(sets[first]):
            rows["data.heldout_path"] = sets[first]
            settings = {"data.heldout_size": _ALL, **(settings or {})}
    given = {"model.path": model, "rollout.reward": reward, "rollout.workflow": workflow}
    with configured(config, settings, keywords, homes=_HOMES, given=given, rows=rows) as chosen:
        found = run_alone(lambda console: evaluate_model(chosen, console), chosen)
    return {each.name or first: replace(each, name=each.name or first) for each in found}
