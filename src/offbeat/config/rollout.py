"""[rollout]: drawing prompts, generating and rewarding samples, and how far they may lag behind the trainer."""

from collections import Counter
from difflib import get_close_matches
from pathlib import PurePath
from typing import Any, Literal, Self

from pydantic import field_validator, model_validator

from offbeat.config.agent import PLAYS
from offbeat.config.base import Change, Section, field

REWARDS = {
    "exact_match": "offbeat.rollout.rewards.exact_match:exact_match",
    "math": "offbeat.rollout.rewards.math:math_reward",
    "countdown": "offbeat.rollout.rewards.countdown:countdown",
    "reasoning": "offbeat.rollout.rewards.reasoning:reasoning",
}
"""Dotted names of rewards by their short names."""

REWARD_MODEL = "model:"
"""Prefix of the name of a reward that is a model; the rest is its folder or hub id, such as "model:runs/judge/export"."""

_EXCLUDE = "rollout.reward and rollout.rewards exclude each other, got {} and {}; put all of them into rollout.rewards"


class RolloutConfig(Section):
    """Asynchronous rollouts. Counts are of groups (prompts) unless they say samples."""

    on_resume = Change.TOLD
    read_by = ("rl",)

    group_size: int = field(
        8, "Samples per prompt, G; their mean is the baseline, so a single sample learns nothing unless algorithm.centre = \"none\".", ge=1,
        basic=True)
    consumer_batch_size: int = field(64, "Groups per training step, B.", ge=1, basic=True)
    max_concurrent_rollouts: int = field(128, "Groups in flight at once, M.", ge=1, on_resume=Change.FREE)
    max_head_offpolicyness: int = field(
        1, "Maximum staleness, eta: how many versions a trained token may be behind the trainer; 0 is synchronous training.", ge=0)
    # A change of single_rank_load is free because the number of processes that draw data is compared separately.
    single_rank_load: bool = field(
        True, "SPMD mode: rank 0 alone draws data and rolls out, within the limits above, and gives each rank its share; false lets every"
        " data-parallel head roll out its own share, with the limits divided by the number of heads. A controller always does the former.",
        on_resume=Change.FREE)
    balance_batch: bool = field(
        True, "Distribute a step's sequences over the ranks by predicted cost, so that no rank waits long for another; false gives each"
        " rank the same number of whole groups, in order. Loss and gradient are the same.", on_resume=Change.FREE)
    on_stale: Literal["wait", "requeue", "keep"] = field(
        "wait", "What to do with a group that would exceed the staleness bound: wait for it, requeue its prompt (both enforce the bound),"
        " or keep it and train on it anyway.")
    workflow: str = field(
        "offbeat.rollout.workflows.single_turn:single_turn", "How an episode is played: single_turn; agent, tool_loop or gym, configured in"
        " [agent]; or an async function of your own, as module:function, which runs in the controller's process and must only wait"
        " (`offbeat docs rewards-and-workflows`).", on_resume=Change.CODE)
    reward: str = field(
        "", "Dotted name, module:function or file.py:function, of the reward; exact_match, math, countdown or reasoning; model:FOLDER for "
        "a reward model, or judge:FILE for a judge behind an endpoint. Empty takes the task's own, math for GSM8K, else exact_match. A "
        "list of names, or a table with weights, is taken as rollout.rewards.", on_resume=Change.CODE, basic=True)
    rewards: dict[str, float] = field(
        {}, "Several rewards instead of one, each with its weight in the sum, such as {exact_match = 1.0, \"my.py:short\" = 0.2}; metrics "
        "show each by the name of its function.", on_resume=Change.CODE)
    should_accept: str = field(
        "", "Dotted name, module:function, of a filter on finished groups; empty accepts all.", on_resume=Change.CODE)
    reward_workers: int = field(1, "Number of reward processes; with a reward model, each holds a copy of it.", ge=1, on_resume=Change.FREE)
    reward_timeout_s: float = field(
        15.0, "Seconds for one reward call; a call that passes them is killed, and its completion is not trained on. A reward model scores "
        "up to 64 completions in a call, and a reward of groups, such as a judge, all of one group.", gt=0, on_resume=Change.FREE)
    reward_memory_bytes: int = field(
        4 * 2**30, "Memory that a reward process may take; what needs more is not trained on. 0 sets no limit. The default has room for "
        "parsers and small models, and a reward that runs away does not take the machine along. A reward model has no limit.", ge=0,
        on_resume=Change.FREE)
    reward_env: tuple[str, ...] = field(
        (), "Environment variables passed to rewards although they look like secrets; all others that look like secrets are withheld.",
        on_resume=Change.FREE)
    episode_timeout_s: float = field(
        600.0, "Seconds for one group, the bound on each of its episodes: requests to engines count, also while they wait for busy ones;"
        " rewards, of which each call has reward_timeout_s, waits for a place, and times in which engines sleep do not. An episode of an"
        " agent, a game or tools has 0.9 of it from when it has its place, and fails alone. It is"
        " inference.token_timeout_s for each of max_new_tokens, in each of agent.max_turns where there are such, and reward_timeout_s, if"
        " that is more.", gt=0, on_resume=Change.FREE)
    blocked_timeout_s: float = field(
        120.0, "Seconds for which a workflow or should_accept may block the process without awaiting, during which nothing else goes on; it"
        " is interrupted then, and its group fails.", gt=0, on_resume=Change.FREE)
    max_retries: int = field(
        4, "How often a prompt is drawn again after its group failed or kept fewer than two usable samples, before it is rejected;"
        " occasional failures therefore lose no prompt. A prompt that cannot be asked is rejected at once.", ge=0, on_resume=Change.FREE)
    max_failures_in_a_row: int = field(64, "Stop the run when this many groups in a row failed.", ge=1, on_resume=Change.FREE)
    batch_timeout_s: float = field(
        1800.0, "Seconds without a finished and accepted group before the run stops; at least the time limit of one group.", gt=0,
        on_resume=Change.FREE)
    max_new_tokens: int = field(256, "Maximum number of tokens generated per sample.", ge=1, read_by=("rl", "sft"), basic=True)
    temperature: float = field(
        1.0, "Sampling temperature; greedy samples would all be equal, so nothing would be learned. Evaluations use"
        " evaluate.temperature.", gt=0)
    top_p: float = field(1.0, "Nucleus sampling mass.", gt=0, le=1, read_by=("rl", "sft"))
    top_k: int = field(0, "Sample from the k likeliest tokens; 0 from all.", ge=0, read_by=("rl", "sft"))
    stop: tuple[str, ...] = field(
        (), "Strings that end a sample; a special token such as <|im_end|> is taken as a token. The tokenizer's end token, those of the "
        "model's generation_config.json and the end of turn of its chat template end one anyway.", read_by=("rl", "sft"))
    stop_token_ids: tuple[int, ...] = field(
        (), "Token ids that end a sample besides those; the token is part of the sample.", read_by=("rl", "sft"))

    @field_validator("workflow")
    @classmethod
    def _check_workflow(cls, name: str) -> str:
        known = ("single_turn", *PLAYS)
        if ":" in name or name in known:
            return name
        near = get_close_matches(name, known, n=1)
        raise ValueError(
            f"there is no workflow {name!r}; use one of {', '.join(known)}, or 'path/to/file.py:function'"
            + (f"; did you mean {near[0]!r}?" if near else ""))

    @field_validator("reward")
    @classmethod
    def _check_reward(cls, name: str) -> str:
        return _known_reward(name) if name else name

    @field_validator("rewards")
    @classmethod
    def _check_rewards(cls, weights: dict[str, float]) -> dict[str, float]:
        names = Counter(reward_name(_known_reward(name)) for name in weights)
        if wrong := next((name for name in weights if name.startswith(REWARD_MODEL)), None):
            raise ValueError(f"a reward model cannot be one of several rewards, got {wrong!r}; give it as rollout.reward")
        if twice := next((name for name, count in names.items() if count > 1), None):
            raise ValueError(f"metrics are named after functions, and two are called {twice!r}; rename one of them")
        if none := next((name for name, weight in weights.items() if weight == 0), None):
            raise ValueError(f"the weight of {none!r} must not be 0, with which it would count for nothing; leave it out")
        return weights

    @model_validator(mode="before")
    @classmethod
    def _take_several(cls, given: Any) -> Any:
        """Take several rewards under either name: a table of their weights, or a list where each counts alike."""
        if not isinstance(given, dict):
            return given
        tables = {key: _weights(key, given[key]) for key in ("reward", "rewards") if isinstance(given.get(key), list | tuple | dict)}
        if "reward" not in tables:
            return {**given, **tables}
        if given.get("rewards"):
            raise ValueError(_EXCLUDE.format(", ".join(tables["reward"]), ", ".join(given["rewards"])))
        alone = next(iter(tables["reward"]), "") if set(tables["reward"].values()) <= {1.0} and len(tables["reward"]) < 2 else ""
        return {**given, "reward": alone, "rewards": {} if alone else tables["reward"]}

    @model_validator(mode="after")
    def _check_one_or_several(self) -> Self:
        if self.reward and self.rewards:
            raise ValueError(_EXCLUDE.format(repr(self.reward), ", ".join(self.rewards)))
        return self


def _weights(key: str, given: Any) -> Any:
    """Return rewards by their names with their weights; those of a list count alike."""
    if not given and key == "reward":
        raise ValueError(f"rollout.reward is {given!r} and names no reward; give one, or leave it out for the reward of the data")
    if isinstance(given, dict):
        return given
    if wrong := next((name for name in given if not isinstance(name, str)), None):
        raise ValueError(f"rollout.{key} must be a list of names of rewards, got {wrong!r} in it")
    if twice := next((name for name in given if list(given).count(name) > 1), None):
        raise ValueError(f"rollout.{key} names {twice!r} twice; give it once, or with its weight as in {{{twice!r}: 2.0}}")
    return dict.fromkeys(given, 1.0)


def reward_name(name: str) -> str:
    """Return the short name of a reward beside others: of its function, or of a judge's file without the suffix."""
    own = REWARDS.get(name, name).rpartition(":")[2]
    return PurePath(own).stem if name.startswith("judge:") else own


def _known_reward(name: str) -> str:
    """Return the name if it is one of `REWARDS`, or names a function, a model or a judge; raises ValueError otherwise."""
    if ":" in name or name in REWARDS:
        return name
    if name.endswith(".py"):
        raise ValueError(f"{name!r} names no function; write '{name}:score' for its function score")
    near = get_close_matches(name, REWARDS, n=1)
    raise ValueError(
        f"there is no reward {name!r}; use one of {', '.join(REWARDS)}, 'path/to/file.py:function', or 'model:' before the"
        " folder or hub id of a reward model" + (f"; did you mean {near[0]!r}?" if near else ""))
