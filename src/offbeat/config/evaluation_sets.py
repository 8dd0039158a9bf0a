"""[evaluate.sets.NAME]: evaluation sets, tables of settings that differ from the run's. `config.root` makes a `Config` of each.

A set's own keys are settings of [evaluate]; its tables `data`, `rollout` and `agent` hold settings of those sections. All others are as in
the run, so a set plays, samples and is judged by all the rules of a run.
"""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from offbeat.config.agent import AgentConfig
from offbeat.config.data_sets import replace_played, setting_of_set
from offbeat.config.evaluate import EvaluateConfig

_TABLES: dict[str, tuple[str, ...]] = {
    "evaluate": ("every_steps", "num_prompts", "samples_per_prompt", "pass_at", "temperature", "timeout_s", "metric", "metric_timeout_s"),
    "data": (
        "task", "task_size", "task_options", "path", "split", "format", "prompt", "prompt_field", "answer_field", "system_field",
        "max_unusable_rows", "chat_template", "chat_template_kwargs", "system_prompt", "max_prompt_tokens"),
    "rollout": (
        "workflow", "reward", "rewards", "reward_workers", "reward_timeout_s", "reward_memory_bytes", "reward_env",
        "max_concurrent_rollouts", "episode_timeout_s", "max_retries", "max_new_tokens", "top_p", "top_k", "stop", "stop_token_ids"),
    "agent": tuple(AgentConfig.model_fields),
}
_OF_RECORDS = ("prompt", "prompt_field", "answer_field", "system_field")
"""Settings of [data] that say how a record becomes a row, and that a task does not have."""
_OF_RUN = {"sets": {}, "keep_best": "", "stop_after_no_gain": 0}
"""Settings of [evaluate] that are about all sets."""
_KEYS = tuple(f"{section}.{name}".removeprefix("evaluate.") for section, names in _TABLES.items() for name in names)
_OF_SET = re.compile(r"evaluate\.sets\.[^.]+\.(.+)", re.DOTALL)


def setting_of(key: str) -> str:
    """Return the setting that a key of a set stands for, data.path for evaluate.sets.NAME.data.path; any other key as it is.

    Keys of data sets stand for settings, too; see `config.data_sets`.
    """
    match = _OF_SET.fullmatch(setting_of_set(key))
    return setting_of_set(key) if match is None else match[1] if "." in match[1] else f"evaluate.{match[1]}"


def values_of_set(name: str, table: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a whole configuration in which a set's settings replace the run's.

    The set's table is, for example, {"num_prompts": 64, "data": {"path": "hard.jsonl"}}. Raises ValueError if the name is not allowed, or
    the table is empty or holds something that no set has.
    """
    if re.fullmatch(r"[a-z0-9_]+", name) is None:
        raise ValueError(f"evaluate.sets must have names of lower case letters, digits and '_', got {name!r}; metrics are named after them")
    own = _by_section(name, table)
    _replace_source(own)
    replace_played(own, run)
    merged = {section: {**run[section], **own[section]} for section in _TABLES}
    # A curriculum is about drawing prompts to train on, and its requirements on [data] do not bind a set.
    return {**run, **merged, "curriculum": {}, "evaluate": {**merged["evaluate"], **_OF_RUN}}


def check_best(config: EvaluateConfig, *, holds_out: bool) -> None:
    """Raise ValueError if `evaluate.keep_best` names a metric that no evaluation measures."""
    if not config.keep_best:
        if config.stop_after_no_gain:
            raise ValueError(
                f"evaluate.keep_best must be given with evaluate.stop_after_no_gain = {config.stop_after_no_gain}; it names the metric that"
                " is to rise, such as eval/accuracy")
        return
    sets = {"eval": config.pass_at} if holds_out else {}
    sets |= {f"eval/{name}": table.get("pass_at", config.pass_at) for name, table in config.sets.items()}
    known = [f"{folder}/{name}" for folder, ks in sets.items() for name in ("accuracy", "reward_mean", *(f"pass_at_{k}" for k in ks))]
    # Only their workflow knows the roles of agents, and only a metric of the user's own knows the names of its values.
    of_roles = config.keep_best.startswith(tuple(f"{folder}/accuracy/" for folder in sets))
    if config.keep_best not in known and not of_roles and not _may_be_own(config, holds_out=holds_out):
        raise ValueError(
            f"evaluate.keep_best must be one of {', '.join(known) or 'the metrics of an evaluation'}, got {config.keep_best!r}; a set has"
            " pass_at_K for each K of its pass_at")
    name = next((name for name in config.sets if config.keep_best.startswith(f"eval/{name}/")), "")
    if config.stop_after_no_gain and not (config.sets[name].get("every_steps", config.every_steps) if name else config.every_steps):
        raise ValueError(
            f"evaluate.{f'sets.{name}.' if name else ''}every_steps must be at least 1 with evaluate.stop_after_no_gain ="
            f" {config.stop_after_no_gain}, got 0; {config.keep_best} is measured before the first step and after the last alone")


def _may_be_own(config: EvaluateConfig, *, holds_out: bool) -> bool:
    """Whether the metric of `keep_best` may be one that a set's own metric finds."""
    own = {f"eval/{name}": table.get("metric", config.metric) for name, table in config.sets.items()}
    folder = config.keep_best.rpartition("/")[0]
    return bool(own.get(folder) or (folder == "eval" and holds_out and config.metric))


def _by_section(name: str, table: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a set's settings by section, after a check of its keys."""
    path = f"evaluate.sets.{name}"
    own: dict[str, dict[str, Any]] = {section: {} for section in _TABLES}
    if not table:
        raise ValueError(f"{path} is empty, so it would be the run's held-out prompts once more; give what differs, or leave it out")
    for key, value in _flat(path, table):
        if key not in _KEYS:
            raise ValueError(_unknown(path, key))
        section, _, setting = key.rpartition(".")
        own[section or "evaluate"][setting] = value
    return own


def _flat(path: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if key not in _TABLES or key == "evaluate":
            yield key, value
            continue
        if not isinstance(value, Mapping):
            raise ValueError(f"{path}.{key} must be a table of settings, got {value!r}; write [{path}.{key}] and its settings below")
        if not value:
            raise ValueError(f"{path}.{key} is empty; give what differs from [{key}], or leave it out")
        yield from ((f"{key}.{setting}", below) for setting, below in value.items())


def _unknown(path: str, key: str) -> str:
    """Suggest the nearest setting of a set: the same name in another table, then the nearest of all."""
    if key == "rollout.temperature":
        near = ["temperature"]
    else:
        name = key.rpartition(".")[2]
        near = [known for known in _KEYS if known.rpartition(".")[2] == name] or get_close_matches(key, _KEYS, n=1)
    advice = f"did you mean {path}.{near[0]}?" if near else "it has settings of [evaluate], and of [data], [rollout] and [agent] in tables"
    return f"{path}.{key} is not a setting of an evaluation set; {advice}"


def _replace_source(own: dict[str, dict[str, Any]]) -> None:
    """Empty the run's settings that contradict another source of rows."""
    data = own["data"]
    if "task" in data or "path" in data:
        own["data"] = {"task": "", "path": "", "task_options": (), "heldout_path": "", "heldout_split": "", "sets": {}, **data}
        if data.get("task"):
            own["data"] = {**dict.fromkeys(_OF_RECORDS, ""), **own["data"]}
    elif "split" in data:
        own["data"] = {"heldout_path": "", "heldout_split": "", **data}
    for name, other in (("prompt", "prompt_field"), ("prompt_field", "prompt")):
        if own["data"].get(name):
            own["data"].setdefault(other, "")
