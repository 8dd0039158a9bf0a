"""Tries the data, rewards and workflows of a configuration before a run needs them. `offbeat config check` calls it. Torch-free.

It reads the first rows of the data. Rewards and an agent's program are loaded by the processes that run them, as in a run, but not called.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from offbeat.agents.opening import load_program
from offbeat.config.agent import PLAYS
from offbeat.config.data import DataConfig
from offbeat.config.load import listed_errors
from offbeat.config.root import Config
from offbeat.controller.inputs import check_prompts, give_template, image_reader, needs_answer, row_check
from offbeat.controller.reward_choice import choose_rewards, reward_model_of
from offbeat.controller.row_checks import check_of_pairs
from offbeat.controller.template_choice import choose_templates, needs_hub
from offbeat.data.dataset import PromptDataset, open_datasets
from offbeat.data.evaluation_set import has_own_rows
from offbeat.data.files import Sieve
from offbeat.data.image_store import ImageStore
from offbeat.data.model_folder import read_context_length, read_vocab_size, router_loss_note
from offbeat.data.pairs import holds_pairs, open_pairs
from offbeat.data.reward_model import open_reward_folder
from offbeat.data.sources import open_source
from offbeat.data.template_use import replaced_forms, unused_template
from offbeat.data.tokenizer import Tokenizer, character_tokenizer, load_tokenizer
from offbeat.data.unknown_text import unwritable_answers
from offbeat.data.vocabulary import fit_vocabulary
from offbeat.errors import ConfigError, DeadlineError, UserError, WorkerError
from offbeat.rollout.reward_pool import RewardPool
from offbeat.user_code.functions import check_takes, resolve

FIRST_ROWS = 100
"""Rows of each source that are read."""
_PLAYED = {"agent": "agent", "gym": "environment", "tool_loop": "class of tools"}
"""Words for the source of the reward in each workflow that plays something."""


def check_named(config: Config) -> list[str]:
    """Try data, rewards and workflow of a run and of its evaluation sets; return a line on each, such as "agent: agents.py:play".

    Raises:
        ConfigError: lists everything that cannot be used, with the reasons.
    """
    wrong: list[str] = []
    config, lines = _choose_templates(config, wrong)
    tried: set[str] = set()
    trained = [(f"data.sets.{name}: ", config.data_set(name)) for name in config.data.sets] or [("", config)]
    evaluated = [(f"evaluate.sets.{name}: ", _evaluated(config, name)) for name in config.evaluate.sets]
    for number, (prefix, own) in enumerate((*trained, *evaluated)):
        for what, names, check in (
            ("data", _source_of(own.data), partial(_check_data, trains=number < len(trained))),
            ("rewards", [*_chosen(own), own.rollout.workflow], _check_rewards),
            ("workflow", [own.rollout.workflow, own.rollout.should_accept], _check_workflow),
            ("agent", [own.rollout.workflow, own.agent], _check_agent),
        ):
            if (key := f"{what} {names}") in tried:
                continue
            tried.add(key)
            try:
                lines.extend(f"{prefix}{line}" for line in check(own))
            except (UserError, WorkerError, DeadlineError) as exc:
                wrong.append(f"{prefix}{exc}")
    note = ""
    if config.model.path and (Path(config.model.path) / "config.json").is_file():
        try:
            note = router_loss_note(config.model.path, coefficient=config.train.router_aux_loss_coefficient)
        except UserError as exc:
            wrong.append(str(exc))
    if wrong:
        raise ConfigError(listed_errors(wrong))
    return lines + ([f"note: {note}"] if note else [])


def _choose_templates(config: Config, wrong: list[str]) -> tuple[Config, list[str]]:
    if needs_hub(config):
        return config, [
            f'data.chat_template = "auto": chosen at the start, by the tokenizer of {config.model.tokenizer or config.model.path}, which is'
            " no folder here"]
    try:
        return choose_templates(config)
    except UserError as exc:
        wrong.append(str(exc))
        return config, []


def pairs_in(config: DataConfig) -> bool:
    """Whether the first record of `data.path` is a preference. Raises as `open_source`."""
    if not config.path:
        return False
    return holds_pairs(open_source(config.path, split=config.split, sieve=Sieve(lambda _record, _where: None, limit=1)).record(0))


def _chosen(config: Config) -> dict[str, float]:
    """Return the rewards of a configuration; none where its task cannot be found, which `_check_data` reports."""
    try:
        return choose_rewards(config)
    except UserError:
        return {}


def _source_of(data: DataConfig) -> list[Any]:
    return [value for name, value in data.model_dump().items() if name not in ("heldout_size", "shuffle")]


def _check_data(config: Config, *, trains: bool) -> Iterator[str]:
    data = config.data
    if data.sets:  # of an evaluation set, whose rows are the run's
        return
    if not (data.task or data.path):
        yield "data: data.task and data.path are both empty, and a run needs one of them"
        return
    with TemporaryDirectory(prefix="offbeat-images-") as folder:  # images are looked at, and not kept
        tokenizer = _tokenizer_here(config, Path(folder))
        try:
            yield from _check_rows(config, tokenizer, trains=trains)
        finally:
            if tokenizer is not None and tokenizer.images is not None:
                tokenizer.images.close()


def _check_rows(config: Config, tokenizer: Tokenizer | None, *, trains: bool) -> Iterator[str]:
    data = config.data
    refused: list[str] = []
    unwritable = too_long = ""
    if pairs_in(data):
        known = None if tokenizer is None else check_of_pairs(tokenizer, data)
        train, heldout = open_pairs(data, unpaired=True, limit=FIRST_ROWS, refused=refused, check=known)
        what = "preferences"
    else:
        answered = needs_answer(config, supervised=False)
        train, heldout = open_datasets(
            data, seed=config.run.seed, needs_answer=answered, limit=FIRST_ROWS, refused=refused,
            check=row_check(config, tokenizer, answered=answered, taught=trains))
        what = "prompts" if answered else "prompts, which need no answer"
        if tokenizer is not None:
            unwritable = unwritable_answers(tokenizer, train)
            too_long = _too_long(config, tokenizer, (train, heldout)) if trains else ""
    prompt = train.row(0).prompt
    left_out = f"; {len(refused)} of them cannot be used, the first: {refused[0]}" if refused else ""
    if train.num_rows is None:
        count = "makes its rows"
    else:
        own_rows = data.heldout_size and not (data.heldout_path or data.heldout_split)
        looked_at = train.num_rows + len(refused) + (heldout.num_rows or 0 if own_rows else 0)
        held = "the last fifth of all, at most 256," if data.heldout_size == "auto" else f"the last {data.heldout_size} of all"
        count = f"the first {looked_at} rows are {what}" + (f"; {held} are held out" if own_rows else "")
    yield f"data: {data.task or data.path}: {count}{left_out}"
    if unwritable:
        yield f"data: {unwritable}"
    if tokenizer and config.rollout.workflow not in PLAYS:
        told = unused_template(tokenizer, prompt, data, model=config.model.path), replaced_forms(tokenizer, train, data, imitated=True)
        yield from (f"data: {advice}" for advice in filter(None, told))
    if too_long:
        yield f"note: offbeat train would refuse this: {too_long}"


def _evaluated(config: Config, name: str) -> Config:
    """Return the configuration of an evaluation set, without held-out rows among its own."""
    own = config.evaluation_set(name)
    if own.data.task or not has_own_rows(own.data, of_run=config.data):
        return own
    return own.model_copy(update={"data": own.data.model_copy(update={"heldout_size": 0})})


def _too_long(config: Config, tokenizer: Tokenizer, datasets: Sequence[PromptDataset]) -> str:
    """Return why reinforcement learning refuses the lengths of prompts and answers; "" if it does not, or the context is not known here.

    Fine-tuning samples no answers, so it may go on.
    """
    model = config.model.path
    if model and not (Path(model).expanduser() / "config.json").is_file():
        return ""
    try:
        context = read_context_length(model) if model else config.model.tiny.max_positions
        check_prompts(config, tokenizer, datasets, context=min(context, config.inference.max_context or context), trains=True)
    except UserError as exc:
        return str(exc)
    return ""


def _tokenizer_here(config: Config, images: Path) -> Tokenizer | None:
    """Return the tokenizer of the run, whose images are stored in a folder; None if it would have to be fetched from the hub."""
    name = config.model.tokenizer or config.model.path
    folder = Path(name).expanduser()
    if name and not folder.is_dir():
        return None
    model, tokenizer = config.model.path, give_template(load_tokenizer(folder) if name else character_tokenizer(), config)
    if not (model and Path(model).expanduser().is_dir()):
        return tokenizer
    reader = image_reader(config, model, ImageStore(images))
    return replace(fit_vocabulary(tokenizer, read_vocab_size(model), model=model), images=reader)


def _check_rewards(config: Config) -> Iterator[str]:
    weights, rollout = _chosen(config), config.rollout
    if not weights or not (rollout.reward or rollout.rewards or config.data.task or config.data.path):
        return
    if model := reward_model_of(config):
        open_reward_folder(model)
    elif own := {name: weight for name, weight in weights.items() if not name.startswith("offbeat.")}:
        asyncio.run(_load(own, config))
    rewards = " + ".join(name if weight == 1 else f"{weight:g} * {name}" for name, weight in weights.items())
    played = f"what the {_PLAYED[rollout.workflow]} gives; where that is None, " if rollout.workflow in PLAYS else ""
    yield f"reward: {played}{rewards}"


async def _load(weights: dict[str, float], config: Config) -> None:
    rollout = config.rollout
    async with RewardPool(
        weights, num_workers=1, timeout_s=rollout.reward_timeout_s, log_dir=None, memory_bytes=rollout.reward_memory_bytes,
        allowed=rollout.reward_env,
    ):
        pass


def _check_workflow(config: Config) -> Iterator[str]:
    rollout = config.rollout
    named: dict[str, str] = {"should_accept": rollout.should_accept}
    if rollout.workflow not in PLAYS and ":" in rollout.workflow:
        named["workflow"] = rollout.workflow
    for kind, name in named.items():
        if name:
            check_takes(resolve(name, kind=kind), name, ("group" if kind == "should_accept" else "episode",), kind=kind)
            if not name.startswith("offbeat."):
                yield f"{kind}: {name}"


def _check_agent(config: Config) -> Iterator[str]:
    if config.rollout.workflow == "agent" and config.agent.program:
        asyncio.run(load_program(config))
        yield f"agent: {config.agent.program}"
