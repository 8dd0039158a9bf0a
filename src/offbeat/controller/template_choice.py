"""Chooses whether plain prompts are asked in chats where `data.chat_template` is "auto", and gives the reason.

On for models that were taught chats: those whose answers end with the token with which their chat template ends an assistant's turn, by
their tokenizer or generation_config.json. A base model whose tokenizer merely has a template, as Qwen2.5's, ends its texts with another.
Rows that are chats are asked as such in any case, and rows that hold special tokens have been rendered already and stay as they are.

`runs` calls it at the start of a run and of an evaluation, and `offbeat config check` and `offbeat data show` do; a run that goes on keeps
its checkpoint's choice.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offbeat.config.agent import PLAYS
from offbeat.config.data import DataConfig
from offbeat.config.root import Config
from offbeat.data.dataset import Dataset, open_datasets
from offbeat.data.files import Sieve
from offbeat.data.model_folder import check_model_folder, read_end_token_ids, read_model_config
from offbeat.data.pairs import holds_pairs, open_pairs
from offbeat.data.sources import open_source
from offbeat.data.tokenizer import DEFAULT_CHAT_TEMPLATE, Tokenizer, load_tokenizer
from offbeat.errors import UserError

_NOTHING: Mapping[str, Any] = {}
_LOOKED_AT = 100


def choose_templates(config: Config, *, was: Mapping[str, Any] = _NOTHING) -> tuple[Config, list[str]]:
    """Return the configuration with true or false in place of "auto", and a line on each choice that has a reason.

    The table of a set whose prompts stay plain is not changed.

    `was` has the settings of the checkpoint that a run goes on from, by "section.key", if there is one.

    Raises:
        ModelError: the model or its tokenizer cannot be read.
    """
    model = config.model.path
    if not model:  # to be built, and taught nothing
        return _with(config, chat_template=False) if config.data.chat_template == "auto" and not config.data.sets else config, []
    tokenizer = _Taught(config)
    lines: list[str] = []

    def choose(of: Config, key: str, kept: object) -> bool:
        value, why = tokenizer.choose(of)
        if kept is not None and kept != "auto" and bool(kept) != value:
            lines.append(f'{key} = {str(bool(kept)).lower()}: "auto" keeps what the run had at its checkpoint')
            return bool(kept)
        if why:
            lines.append(f"{key} = {str(value).lower()}: {why}")
        return value

    if config.data.sets:
        before = was.get("data.sets", {})
        sets = dict(config.data.sets)
        for name, table in config.data.sets.items():
            own = config.data_set(name)
            kept = before[name].get("chat_template", False) if name in before else None
            if own.data.chat_template == "auto" and choose(own, f"data.sets.{name}.chat_template", kept):
                sets[name] = {**table, "chat_template": True}
        config = _with(config, sets=sets)
    elif config.data.chat_template == "auto":
        config = _with(config, chat_template=choose(config, "data.chat_template", was.get("data.chat_template")))
    evaluated = dict(config.evaluate.sets)
    for name, table in config.evaluate.sets.items():  # the others have the run's choice
        own = config.evaluation_set(name)
        if own.data.chat_template == "auto" and choose(own, f"evaluate.sets.{name}.data.chat_template", False if was else None):
            evaluated[name] = {**table, "data": {**table.get("data", {}), "chat_template": True}}
    if evaluated != config.evaluate.sets:
        config = config.model_copy(update={"evaluate": config.evaluate.model_copy(update={"sets": evaluated})})
    return config, lines


def _with(config: Config, **data: Any) -> Config:
    return config.model_copy(update={"data": config.data.model_copy(update=data)})


class _Taught:
    """A model's tokenizer, read when it is needed, and whether the model was taught chats."""

    def __init__(self, config: Config) -> None:
        self._model, self._name = config.model.path, config.model.tokenizer
        self._ends: tuple[Tokenizer, str] | None = None

    def choose(self, config: Config) -> tuple[bool, str]:
        """Return whether plain prompts of a configuration's rows are asked in chats, and why; no reason where nothing speaks for it."""
        if config.rollout.workflow in PLAYS or not (config.data.path or config.data.task):
            return False, ""
        prompts = [prompt for prompt in _first_prompts(config) if isinstance(prompt, str)]
        if not prompts:
            return False, ""
        tokenizer, end = self._read_tokenizer()
        if not end:
            return False, ""
        if rendered := next(filter(None, map(tokenizer.special_text_in, prompts)), ""):
            return False, f'"auto" leaves prompts as they are that hold special tokens, such as {rendered}'
        return True, f'"auto" asks plain prompts in chats, as {self._model} ends answers with {end} like its chat template'

    def _read_tokenizer(self) -> tuple[Tokenizer, str]:
        """Return the tokenizer, and the token that ends the model's answers and its template's turns, such as "<|im_end|>"; "" for none."""
        if self._ends is None:
            read_model_config(self._model)
            folder = Path(self._model).expanduser()
            folder = folder if folder.is_dir() else check_model_folder(self._model)
            tokenizer = load_tokenizer(self._name or str(folder))
            end = None if tokenizer.hf.chat_template == DEFAULT_CHAT_TEMPLATE else tokenizer.end_of_turn_id
            if end is None or end not in (tokenizer.eos_token_id, *read_end_token_ids(str(folder))):
                self._ends = tokenizer, ""
            else:
                self._ends = tokenizer, str(tokenizer.hf.convert_ids_to_tokens(end))
        return self._ends


def needs_hub(config: Config) -> bool:
    """Whether a choice is open for which a model or tokenizer would have to be fetched first."""
    names = [name for name in (config.model.path, config.model.tokenizer) if name]
    return config.data.chat_template == "auto" and not all(Path(name).expanduser().is_dir() for name in names)


def _first_prompts(config: Config) -> list[object]:
    """Return the prompts of the first rows; none where they cannot be read, which `read_inputs` reports."""
    data = config.data.model_copy(update={"chat_template": False, "max_unusable_rows": 2**31})
    try:
        train, _ = _open_rows(data, seed=config.run.seed)
    except UserError:
        return []
    return [train.row(index).prompt for index in range(_LOOKED_AT if train.num_rows is None else min(train.num_rows, _LOOKED_AT))]


def _open_rows(data: DataConfig, *, seed: int) -> tuple[Dataset[Any], Dataset[Any]]:
    if data.path and holds_pairs(open_source(data.path, split=data.split, sieve=Sieve(lambda _record, _where: None, limit=1)).record(0)):
        return open_pairs(data, unpaired=True, limit=_LOOKED_AT, refused=[])
    return open_datasets(data, seed=seed, needs_answer=False, limit=_LOOKED_AT, refused=[])
