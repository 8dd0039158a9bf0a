"""Defines which settings may change when a run is resumed, and compares a checkpoint's settings with the current ones.

A checkpoint stores the settings that matter for continuing. The controller compares them before it starts anything. Data, models and user
code are compared by their contents (`data.identity`), because a path says little about them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from offbeat.config.load import settings, toml_value
from offbeat.config.root import Config


class Change(Enum):
    """What it means if a setting differs from its value at the checkpoint."""

    FREE = "nothing: where and how fast things are done, never what is learnt"
    TOLD = "the run continues with the new value, which is said in a line"
    REFUSED = "the run is refused: the checkpoint does not fit, or the data would be drawn in another order"
    CONTENT = "the run is refused if it now stands for other data or another model"
    ROWS = "the run is refused if other rows are trained on now, or in another order, and goes on otherwise, which is said in a line"
    CODE = "the run continues with the other code, which is said in a line, also where only its source is another"


Part = Literal["rl", "sft", "preference", "reward_model"]
"""Reinforcement learning, supervised fine-tuning by `offbeat sft` or as a warm-up, preference training, or training of a reward model."""

_OPTIMIZER = ("lr", "beta1", "beta2", "eps", "weight_decay", "warmup_steps", "schedule", "min_lr_ratio", "clip_norm")


def _of(section: str, names: str) -> list[str]:
    return [f"{section}.{name}" for name in names.split()]


_ALGORITHM_CODE = _of("algorithm", "objective credit")
_TABLE: dict[Change, list[str]] = {
    Change.FREE: [
        *_of("run", "name dir private mode warm_up resume"),
        *_of("train", "num_ranks devices_per_rank max_tokens_per_microbatch share_prefix gradient_checkpointing offload_optimizer compile"
             " threads step_timeout_s"),
        *_of("train.parallel", "shard tp ep cp"),
        *(f"{section}.evaluate_every_steps" for section in ("sft", "preference", "reward_model")),
        # For single_rank_load, what matters is the number of processes that draw data, which is compared separately.
        *_of("rollout", "max_concurrent_rollouts single_rank_load balance_batch reward_workers reward_timeout_s reward_memory_bytes"
             " reward_env episode_timeout_s max_retries max_failures_in_a_row batch_timeout_s"),
        *_of("agent", "host told_host model timeout_s step_timeout_s"),
        *_of("agent", "processes episodes_per_process blocked_timeout_s memory_bytes env python"),
        *_of("inference", "num_engines devices_per_engine min_engines urls python arguments max_running max_queued max_cache_bytes"
             " prefix_caching threads max_adapters max_adapter_rank start_timeout_s probe_interval_s probe_timeout_s stall_timeout_s"
             " heal_timeout_s request_timeout_s token_timeout_s"),
        *_of("weights", "channel dir keep whole_every_versions stage_timeout_s switch_timeout_s proof_tolerance"),
        *_of("checkpoint", "every_steps every_minutes keep export export_every_steps timeout_s"),
        *_of("evaluate", "every_steps timeout_s metric_timeout_s keep_samples"),
        *_of("cluster", "launcher ray_address share_devices take_turns start_timeout_s stop_timeout_s scratch_dir"),
        *_of("dist", "init_timeout_s sync_timeout_s answer_timeout_s collective_timeout_s"),
        *_of("teacher", "max_concurrent timeout_s max_retries"),
        *_of("telemetry", "console rollouts_every_steps rollouts_max_bytes trace peak_tflop_per_s sinks sample_tables_every_steps"),
        *_of("telemetry.wandb", "mode project entity name id resume"),
        *(key for key, _ in settings() if key.startswith("serve.")),  # no run reads these
    ],
    Change.TOLD: [
        "run.total_steps",
        *_of("model", "dtype lora.dropout"),
        *_of("data", "chat_template chat_template_kwargs system_prompt max_prompt_tokens"),
        *(key for key, _ in settings() if key.startswith(("algorithm.", "critic.", "curriculum.")) and key not in _ALGORITHM_CODE),
        "train.precision", "train.router_aux_loss_coefficient", *(f"train.optimizer.{name}" for name in _OPTIMIZER),
        *_of("sft", "total_steps batch_size assistant_turns too_long stop_at_accuracy"), *(f"sft.optimizer.{name}" for name in _OPTIMIZER),
        *_of("reward_model", "centring total_steps batch_size"), *(f"reward_model.optimizer.{name}" for name in _OPTIMIZER),
        *_of("preference", "total_steps batch_size beta label_smoothing gamma desirable_weight undesirable_weight"),
        *(f"preference.optimizer.{name}" for name in _OPTIMIZER),
        *_of("rollout", "group_size consumer_batch_size max_head_offpolicyness on_stale max_new_tokens temperature top_p top_k stop"
             " stop_token_ids"),
        *_of("agent", "options max_turns max_result_chars keep_reasoning tool_format"),
        *_of("inference", "engine forward max_context"),
        "weights.interrupt",
        *_of("teacher", "path url engine top_k template"),
        *_of("evaluate", "num_prompts samples_per_prompt pass_at temperature metric keep_best stop_after_no_gain sets"),
    ],
    Change.REFUSED: ["run.seed", "data.shuffle", "preference.loss", "preference.mix", *_of("model.lora", "rank alpha targets")],
    Change.CONTENT: [
        *_of("model", "path tokenizer"),
        *_of("model.tiny", "hidden_size num_layers num_heads num_kv_heads head_dim intermediate_size max_positions"),
        *_of("data", "task task_size task_options path split format prompt prompt_field answer_field system_field max_unusable_rows"),
    ],
    Change.ROWS: _of("data", "heldout_path heldout_split heldout_size sets"),
    Change.CODE: [
        *_of("rollout", "workflow reward rewards should_accept"), *_of("agent", "program command environment tools"), *_ALGORITHM_CODE],
}

CHANGES: dict[str, Change] = {key: change for change, keys in _TABLE.items() for key in keys}
"""What a change of each setting means."""

_RL_ALONE = (
    "run.total_steps", "agent.", "algorithm.", "critic.", "curriculum.", "teacher.", "train.optimizer.", "rollout.group_size",
    "rollout.consumer_batch_size", "rollout.max_head", "rollout.on_stale", "rollout.temperature",
    "rollout.workflow", "rollout.reward", "rollout.should_accept", "weights.interrupt",
    "evaluate.sets", "evaluate.keep_best", "evaluate.stop_after_no_gain")
_MOST_SHOWN = 200
"""Characters of a value in messages; a chat template has thousands."""
_ON_PAIRS = ("preference.", "reward_model.")
_NOT_ON_PAIRS = (
    *_RL_ALONE, *(key for key, _ in settings() if key.startswith("sft.") and key != "sft.too_long"), "rollout.", "inference.",
    "evaluate.temperature")
# Settings that only other parts of a run read.
_NOT_OF: dict[Part, tuple[str, ...]] = {
    "rl": ("sft.", *_ON_PAIRS),
    "sft": (*_RL_ALONE, *_ON_PAIRS),
    "preference": (*_NOT_ON_PAIRS, "reward_model."),
    "reward_model": (*_NOT_ON_PAIRS, "preference."),
}


@dataclass(frozen=True)
class Changed:
    """A setting whose value has changed."""

    key: str
    now: Any
    was: Any

    def __str__(self) -> str:
        return f"{self.key} = {_shortened(toml_value(self.now))}, was {_shortened(toml_value(self.was))}"


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}… ({len(text)} characters)"


def remembered(config: Config) -> dict[str, Any]:
    """Return the settings that a checkpoint stores, by "section.key": all but those that may change freely, some of which are secret."""
    values = config.model_dump(mode="json")
    return {key: _value(values, key) for key, _ in settings() if CHANGES[key] is not Change.FREE}


def changes(now: Mapping[str, Any], was: Mapping[str, Any], *, part: Part) -> dict[Change, list[Changed]]:
    """Return the differences between `remembered` settings, by what they mean, as far as this part of a run reads them.

    A setting that is missing on either side, because another version of Offbeat wrote it, does not count as different.
    """
    found: dict[Change, list[Changed]] = {change: [] for change in Change}
    for key, change in CHANGES.items():
        if key in now and key in was and now[key] != was[key] and not key.startswith(_NOT_OF[part]):
            found[change].append(Changed(key, now[key], was[key]))
    return found


def listed(changed: Iterable[Changed]) -> str:
    """Format changed settings in one line."""
    return "; ".join(map(str, changed))


def _value(values: Mapping[str, Any], key: str) -> Any:
    for name in key.split("."):
        values = values[name]
    return values
