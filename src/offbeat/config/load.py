"""Loads a `Config` from a TOML file and command-line overrides; `config.dump` writes it back.

Called by the commands. Every error in a file or an override becomes one `ConfigError` sentence that names the setting, the value, the
allowed values and a remedy.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from offbeat.config.base import NUMBER_OR_AUTO, Section, declared
from offbeat.config.evaluation_sets import setting_of
from offbeat.config.relative_paths import found_beside
from offbeat.config.root import Config
from offbeat.config.toml_file import read_toml
from offbeat.errors import ConfigError

Override = tuple[str, str]

_OVERRIDE = re.compile(r"--([A-Za-z_]\w*(?:\.\w+)+)(?:=(.*))?", re.DOTALL)

# Advice about a refused value, where the bound alone does not suffice.
HINTS = {
    "run.name": "use letters, digits, '.', '_' and '-', starting with a letter or digit",
    "run.total_steps": "use 1 for a single step",
    "data.task": "use sort_digits, addition, countdown or reasoning_gym:NAME, or leave it out and give data.path",
    "rollout.max_head_offpolicyness": "use 0 for synchronous training",
    "rollout.temperature": "greedy samples of a prompt are all equal, so nothing is learnt; evaluate.temperature may be 0",
    "rollout.top_k": "use 0 to sample from all tokens",
    "rollout.top_p": "use 1 to sample from all tokens",
    "train.optimizer.clip_norm": "use 0 to turn clipping off",
    "checkpoint.every_steps": "use 0 to save by time alone",
    "checkpoint.every_minutes": "use 0 to save by steps alone",
    "evaluate.every_steps": "use 0 to evaluate only before the first and after the last step, or data.heldout_size = 0 to hold no"
    " prompts out and evaluate none",
    "telemetry.rollouts_every_steps": "use 0 to write no rollouts",
    "telemetry.rollouts_max_bytes": "use 0 to keep all rollouts",
    "telemetry.sample_tables_every_steps": "use 0 to send no tables",
}

REPLACED = {
    "cluster.devices_per_worker": "give train.devices_per_rank and inference.devices_per_engine, or leave both out to use what is there",
    "train.strategy": "set train.parallel.shard: 1 replicates the model as 'ddp' did, and train.num_ranks shards it over all ranks as"
    " 'fsdp' did",
}
"""Settings of earlier versions, and their replacements."""

ALIASES = {
    "rollout.max_staleness": "rollout.max_head_offpolicyness",
    "rollout.num_generations": "rollout.group_size",
    "rollout.reward_funcs": "rollout.reward",
    "train.optimizer.learning_rate": "train.optimizer.lr",
}
"""Names of settings in other projects, and their names here; only these are documented and written."""

COUNTERPARTS = {
    "beta": "algorithm.kl_coefficient",
    "epochs": "run.total_steps",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "eval_dataset": "data.heldout_path",
    "eval_steps": "evaluate.every_steps",
    "kl_coef": "algorithm.kl_coefficient",
    "learning_rate": "train.optimizer.lr",
    "lora_alpha": "model.lora.alpha",
    "lora_r": "model.lora.rank",
    "loss_type": "algorithm.preset",
    "lr_scheduler_type": "train.optimizer.schedule",
    "max_completion_length": "rollout.max_new_tokens",
    "max_grad_norm": "train.optimizer.clip_norm",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_staleness": "rollout.max_head_offpolicyness",
    "max_steps": "run.total_steps",
    "model_name_or_path": "model.path",
    "num_generations": "rollout.group_size",
    "num_train_epochs": "run.total_steps",
    "output_dir": "run.dir",
    "peft_config": "model.lora.rank",
    "per_device_train_batch_size": "rollout.consumer_batch_size",
    "processing_class": "model.path",
    "report_to": "telemetry.sinks",
    "resume_from_checkpoint": "run.resume",
    "reward_funcs": "rollout.reward",
    "reward_weights": "rollout.rewards",
    "run_name": "run.name",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    "scale_rewards": "algorithm.scale",
    "train_dataset": "data.path",
    "use_vllm": "inference.engine",
}
"""Arguments of TRL's trainers, and the setting here that is nearest to each. They are suggested and not accepted, because values differ."""

_ACTS_WITH = {"algorithm.kl_coefficient": ("algorithm.kl_loss", "k3")}
"""By suggested setting: the other setting that it needs in order to act, and its value."""

_TYPES = {"bool": "true or false", "int": "an integer", "float": "a number", "string": "text", "tuple": 'a list, such as ["a", "b"]'}
_BOUNDS = {"greater_than_equal": (">=", "ge"), "greater_than": (">", "gt"), "less_than_equal": ("<=", "le"), "less_than": ("<", "lt")}


def load_config(path: str | None, overrides: Sequence[Override] = (), *, values: Mapping[str, Any] = MappingProxyType({})) -> Config:
    """Read a TOML file, apply overrides in order and then values, and validate the result.

    Args:
        path: a TOML file; None starts from the defaults. Relative paths in it may be of its own folder, see `relative_paths`.
        overrides: ("section.key", value) as typed. A value is parsed as TOML; if that fails, or the setting is text, it is used as is.
        values: settings as Python values, each by "section.key".

    Raises:
        ConfigError: the file cannot be read, or settings are unknown, of the wrong type or out of range, and it names all of them, a line
            each. Or a setting is given by two names.
    """
    given = found_beside(read_toml(Path(path)), Path(path).parent) if path is not None else {}
    typed = {key for key, _ in overrides}
    for alias, name in ALIASES.items():
        _rename(given, alias, name)
        if {alias, name} <= typed:
            raise ConfigError(_given_twice(alias, name))
    for typed_key, text in overrides:
        key = ALIASES.get(typed_key, typed_key)
        _set(given, key, _parse_value(key, text))
    for key, value in values.items():
        _set(given, ALIASES.get(key, key), _plain(value))
    try:
        return Config.model_validate(_merge(_inherited(Config()), given))
    except ValidationError as exc:
        raise ConfigError(listed_errors([_explain(error) for error in exc.errors(include_url=False)])) from exc


def listed_errors(sentences: Sequence[str]) -> str:
    """Return one error as it is, and several as a line with their number and a line for each."""
    return sentences[0] if len(sentences) == 1 else "\n  ".join([f"{len(sentences)} things are wrong:", *sentences])


def split_overrides(argv: Sequence[str]) -> tuple[list[Override], list[str]]:
    """Separate `--section.key value`, `--section.key=value` and, for true-or-false settings, `--section.key` from the other arguments.

    Returns:
        The overrides in order, such as [("train.num_ranks", "2")], and the other arguments for argparse, which include everything from a
        bare `--` onwards. Options that name no setting are among them, with their value as one word.

    Raises:
        ConfigError: an override has no value.
    """
    overrides: list[Override] = []
    rest: list[str] = []
    i = 0
    while i < len(argv):
        if argv[i] == "--":
            rest.extend(argv[i:])
            break
        match = _OVERRIDE.fullmatch(argv[i])
        i += 1
        if match is None:
            rest.append(argv[i - 1])
            continue
        key, value = match.groups()
        if not _names_setting(key):
            if value is None and i < len(argv) and not argv[i].startswith("--"):
                value, i = argv[i], i + 1
            rest.append(f"--{key}" if value is None else f"--{key}={value}")
            continue
        if value is None:
            value = _following_value(key, argv[i] if i < len(argv) else None)
            i += value is not None
        overrides.append((key, "true" if value is None else value))
    return overrides, rest


def settings() -> Iterator[tuple[str, FieldInfo]]:
    """Yield every leaf setting as ("section.key", field), in the order of the files."""
    return ((setting.key, setting.info) for setting in declared(Config))


@cache
def _fields() -> Mapping[str, FieldInfo]:
    """Return all leaf settings by name, which are looked up for every override."""
    return dict(settings())


def _names_setting(key: str) -> bool:
    """Whether this is a setting's name, or lies in a table of data or evaluation sets, which are checked when they are loaded."""
    key = ALIASES.get(key, key)
    return key in _fields() or setting_of(key) != key


def _following_value(key: str, following: str | None) -> str | None:
    """Return the argument after `--key` if it is the key's value, or None if the key stands alone and means true."""
    key = ALIASES.get(key, key)
    info = _fields().get(setting_of(key))
    if info is not None and info.annotation is bool:
        return following if following is not None and following.lower() in {"true", "false"} else None
    if following is None or following.startswith("--"):
        if info is not None and info.annotation == (bool | str):
            return None
        raise ConfigError(f"--{key} has no value; write --{key} VALUE, or --{key}=VALUE if it starts with '--'")
    return following


def _parse_value(key: str, text: str) -> Any:
    """Parse `text` as TOML; return it unchanged if it is not TOML, or if a text setting's TOML value is not text (a run named 12)."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    info = _fields().get(setting_of(key))
    is_text = info is not None and (info.annotation is str or get_origin(info.annotation) is Literal)
    if setting_of(key) == "rollout.reward" and isinstance(parsed.get("value"), list | dict):  # several
        is_text = False
    if parsed.keys() != {"value"} or (is_text and not isinstance(parsed["value"], str)):
        return text
    return parsed["value"]


def _plain(value: Any) -> Any:
    """Return a Python value as TOML would give it: paths as text, and copies of tables and lists."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, PurePath) else value


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *tables, last = key.split(".")
    for depth, name in enumerate(tables, start=1):
        values = values.setdefault(name, {})
        if not isinstance(values, dict):
            raise ConfigError(_not_a_table(".".join(tables[:depth]), values))
    values[last] = value


def _rename(values: dict[str, Any], alias: str, name: str) -> None:
    """Rename settings that a file gives under another project's name."""
    *tables, old = alias.split(".")
    for table in tables:
        values = values.get(table, {})
        if not isinstance(values, dict):
            return  # which is refused with everything else
    if old in values:
        new = name.rpartition(".")[2]
        if new in values:
            raise ConfigError(_given_twice(alias, name))
        values[new] = values.pop(old)


def _given_twice(alias: str, name: str) -> str:
    return f"{alias} and {name} are two names of one setting; give {name} alone"


def _inherited(section: Section) -> dict[str, Any]:
    """Return where nested defaults, as sft.optimizer.warmup_steps, differ from their class's, so that a table of other keys keeps them."""
    values: dict[str, Any] = {}
    for name, info in type(section).model_fields.items():
        default = getattr(section, name)
        if isinstance(default, Section):
            values[name] = _inherited(default)
        elif default != info.default:
            values[name] = default
    return values


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in over.items():
        below = merged.get(name)
        merged[name] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _number(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _explain(error: Any) -> str:
    """Turn one pydantic error into a sentence in this project's form."""
    key, kind, got = ".".join(map(str, error["loc"])), error["type"], error["input"]
    if kind == "extra_forbidden":
        return unknown_setting(key)
    if kind == "value_error":
        text = str(error["ctx"]["error"])
        return f"{key}: {text}" if key else text
    if kind == "missing":
        return f"{key} is missing; give it"
    if kind in {"model_type", "model_attributes_type", "dict_type"}:
        return _not_a_table(key, got)
    hint = f"; {HINTS[setting_of(key)]}" if setting_of(key) in HINTS else ""
    if kind in _BOUNDS:
        sign, name = _BOUNDS[kind]
        return f"{key} must be {sign} {_number(error['ctx'][name])}, got {got!r}{hint}"
    if kind == "literal_error":
        return _not_a_choice(".".join(part for part in error["loc"] if isinstance(part, str)), got)
    if kind == "string_pattern_mismatch":
        return f"{key} is not allowed to be {got!r}{hint}"
    if kind == "finite_number":
        return f"{key} must be a finite number, got {got!r}"
    expected = _TYPES.get(kind.partition("_")[0])
    info = _fields().get(setting_of(key))
    if info is not None and info.annotation == NUMBER_OR_AUTO:
        expected = 'a number or "auto"'
    return f"{key} must be {expected}, got {got!r}" if expected else f"{key}: {error['msg']}, got {got!r}"


def near_settings(name: str) -> list[str]:
    """Return the settings that a name without its section may mean; empty if none is near.

    A misspelt name is first replaced by the nearest. They are then the counterpart of TRL's argument, and settings with this last part.
    """
    known = [key for key, _ in settings()]
    name = name.replace("-", "_")
    named = {key.rpartition(".")[2] for key in known}
    if name not in named | COUNTERPARTS.keys():
        name = next(iter(get_close_matches(name, sorted(named | COUNTERPARTS.keys()), n=1, cutoff=0.8)), name)
    counterpart = [COUNTERPARTS[name]] if name in COUNTERPARTS else []
    return [*counterpart, *(key for key in known if key.rpartition(".")[2] == name)]


def suggestion(near: Sequence[str], *, prefix: str = "") -> str:
    """Ask whether one of these settings was meant; name the setting that one needs in order to act."""
    asked = f"did you mean {' or '.join(f'{prefix}{key}' for key in near)}?"
    others = {key: f"{prefix}{other} {value}" if prefix else f"{other} = {value!r}" for key, (other, value) in _ACTS_WITH.items()}
    return asked + "".join(f" {prefix}{key} acts with {others[key]}" for key in near if key in others)


def unknown_setting(key: str) -> str:
    """Name a setting's replacement, or suggest the nearest: in its section, then the same name elsewhere, then the nearest of all."""
    if key in REPLACED:
        return f"{key} is not a setting any more; {REPLACED[key]}"
    known = [name for name, _ in settings()]
    section, _, name = key.rpartition(".")
    if not section or section.split(".")[0] not in Config.model_fields:
        tables = get_close_matches(key.split(".")[0], Config.model_fields, n=1)
        corrected = [".".join([tables[0], *key.split(".")[1:]])] if tables else []
        near = [k for k in corrected if k in known or k in Config.model_fields]
    else:
        siblings = [k.removeprefix(f"{section}.") for k in known if k.startswith(f"{section}.")]
        near = [f"{section}.{k}" for k in get_close_matches(name, siblings, n=1)]
    near = near or [k for k in known if k.rpartition(".")[2] == name]
    near = near or ([COUNTERPARTS[name]] if name in COUNTERPARTS else get_close_matches(key, known, n=1, cutoff=0.75))
    advice = suggestion(near[:1]) if near else "'offbeat config docs' lists them all"
    return f"{key} is not a setting; {advice}"


def _not_a_table(key: str, got: Any) -> str:
    return f"{key} must be a table of settings, got {got!r}; write [{key}] and its settings below"


def _not_a_choice(key: str, got: Any) -> str:
    annotation = _annotation(setting_of(key))
    if get_origin(annotation) is tuple:
        key, annotation = f"each of {key}", get_args(annotation)[0]
    allowed = [str(choice) for choice in get_args(annotation)]
    listed = " or ".join(repr(choice) for choice in allowed) if len(allowed) < 3 else "one of " + ", ".join(map(repr, allowed))
    near = get_close_matches(str(got), [choice for choice in allowed if choice], n=1)
    return f"{key} must be {listed}, got {got!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _annotation(key: str) -> Any:
    """Return the type of a setting, or of a key in the tables that a setting lists (algorithm.filters.metric)."""
    section, annotation = Config, None
    for name in key.split("."):
        annotation = section.model_fields[name].annotation
        below = get_args(annotation)[0] if get_origin(annotation) is tuple else annotation
        section = below if isinstance(below, type) and issubclass(below, Section) else section
    return annotation
