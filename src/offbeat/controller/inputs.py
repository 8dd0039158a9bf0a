"""The inputs of a run: model folder, tokenizer and data, read before any process is started so that mistakes show at once. Torch-free."""

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from offbeat.config.agent import PLAYS
from offbeat.config.data_sets import weight_of
from offbeat.config.resume import remembered
from offbeat.config.rollout import REWARD_MODEL, REWARDS
from offbeat.config.root import Config
from offbeat.controller.reward_choice import choose_rewards
from offbeat.controller.row_checks import blind_engine, blind_part, check_of_pairs, check_of_rows
from offbeat.data.dataset import Dataset, ListDataset, PromptDataset, open_datasets
from offbeat.data.ends import Ends, find_ends
from offbeat.data.evaluation_set import open_set
from offbeat.data.identity import Identity, code_digest, command_digest, digest_of, model_digest
from offbeat.data.image_reader import ImageReader, images_for
from offbeat.data.image_sources import ImageLimits
from offbeat.data.image_store import ImageStore, images_folder, is_image
from offbeat.data.mixture import Mixture, RowsOfSet
from offbeat.data.model_folder import check_model_folder, read_context_length, read_end_token_ids, read_vocab_size
from offbeat.data.pairs import PairEncoder, Preference, open_pairs
from offbeat.data.prompt import check_lengths, messages_of, sft_sequence
from offbeat.data.reward_model import JudgedPairEncoder, choose_padding, open_reward_folder, plain, reads_chats
from offbeat.data.row import Row
from offbeat.data.supervised import Supervision
from offbeat.data.tokenizer import Tokenizer, character_tokenizer, load_tokenizer
from offbeat.data.unknown_text import unwritable_answers
from offbeat.data.vocabulary import fit_vocabulary
from offbeat.errors import ConfigError, DataError, ModelError
from offbeat.inference.sampling import Sampling
from offbeat.trainer.messages import BuildRequest, Trainee

_MAX_CANARY_TOKENS = 64
_PROBE_TEXT = f"{string.printable} Offbeat goes on where it stopped: 3.14159 * 2 = 6.28318?\n\tÄpfel, 你好, naïve, don't, return x[0]"
"""Covers differences of tokenizers; its encoding stands for the tokenizer in a run's identity."""
_COMPARING = (REWARDS["exact_match"], REWARDS["math"])
"""Rewards that compare with the row's answer."""


@dataclass(frozen=True)
class Base:
    """The model that is trained or adapted.

    Attributes:
        model: folder of the initial model.
        build: how rank 0 must first create that folder's weights; None where they exist.
        context: longest sequence, in tokens: of the model, and of a run the engines'.
    """

    model: str
    build: BuildRequest | None
    tokenizer_folder: str
    tokenizer: Tokenizer
    context: int


@dataclass(frozen=True)
class PairInputs:
    """Preferences to train on and held-out ones, and how they become tokens."""

    train: Dataset[Preference]
    heldout: Dataset[Preference]
    encoder: PairEncoder


@dataclass(frozen=True)
class RunInputs(Base):
    """The inputs of a run, read before any process is started so that mistakes show at once.

    Attributes:
        sampling: settings as configured, with everything that ends a sample.
        supervision: how rows are imitated.
        num_dropped: number of training rows dropped because they are too long to imitate; of an endless dataset, among its first rows.
        identity: digests of these inputs and their settings, which checkpoints store.
        pairs: preferences, if the run trains on them; `train` and `heldout` are then empty.
        trains: the kind of model that the run trains, such as "policy".
        sets: inputs of the evaluation sets by name, with their rows as `heldout` and as `train`; empty where no prompts are trained on.
        unusable: why each row that cannot be used is left out, as `data.max_unusable_rows` allows.
        unwritable: a sentence on answers that the model can never write; "" if there are none.
    """

    sampling: Sampling
    train: PromptDataset
    heldout: PromptDataset
    supervision: Supervision
    num_dropped: int
    identity: Identity
    pairs: PairInputs | None = None
    trains: Trainee = "policy"
    sets: Mapping[str, "RunInputs"] = field(default_factory=dict)
    unusable: tuple[str, ...] = ()
    unwritable: str = ""

    @property
    def plays(self) -> bool:
        """Whether prompts are answered, so that the run needs engines."""
        return self.pairs is None

    @property
    def vocab_size(self) -> int:
        """Exclusive upper bound of token ids: the number of rows of the model's embedding."""
        return self.build.vocab_size if self.build is not None else read_vocab_size(self.model) or self.tokenizer.vocab_size


def read_inputs(config: Config, *, trains: bool = True, supervised: bool = False) -> RunInputs:
    """Read model configuration, tokenizer and data; writes nothing.

    Args:
        trains: whether rollouts must fit into micro-batches.
        supervised: whether training rows are only imitated and held-out ones answered; otherwise all are answered.

    Raises:
        ModelError: the folder holds no model or tokenizer, the tokenizer has no template for a chat, or there is no reward model that
            `rollout.reward` names.
        DataError: the data cannot be used, or a row is too long for the model.
        ConfigError: lengths contradict each other, an end of samples is impossible, a system prompt is unseen, or the teacher does not fit.
    """
    base = read_base(config)
    context = min(base.context, config.inference.max_context or base.context)
    sampling = _choose_sampling(base, config)
    refused: list[str] = []
    train, heldout = open_mixed(config, base, supervised=supervised, refused=refused)
    check_prompts(config, base.tokenizer, (heldout,) if supervised else (train, heldout), context=context, trains=trains and not supervised)
    if trains and not supervised and config.teacher.path:
        _check_teacher(config, base, context=context)
    supervision = Supervision(base.tokenizer, config.data, config.sft, base.context, config.train.max_tokens_per_microbatch)
    num_dropped = supervision.check(train) if supervised or config.run.warm_up else 0
    inputs = RunInputs(
        base.model, base.build, base.tokenizer_folder, base.tokenizer, context, sampling, train, heldout, supervision, num_dropped,
        _identify(config, base, train))
    sets = {} if supervised else {name: _read_set(name, config, base, inputs) for name in config.evaluate.sets}
    unusable = (*refused, *(reason for of_set in sets.values() for reason in of_set.unusable))
    return replace(inputs, sets=sets, unusable=unusable, unwritable=unwritable_answers(base.tokenizer, train))


def open_mixed(config: Config, base: Base, *, supervised: bool, refused: list[str]) -> tuple[PromptDataset, PromptDataset]:
    """Open the prompts that [data] names, or its sets as a mixture; `refused` is as in `open_datasets`.

    Returns:
        Rows to train on, and held-out ones; held-out rows of sets follow each other in the sets' order.

    Raises:
        DataError, MissingExtraError: as `open_datasets`; of a set, with its name.
        ConfigError, ModelError: as `check_system_prompt`.
    """
    if not config.data.sets:
        answered = needs_answer(config, supervised=supervised)
        opened = open_datasets(
            config.data, seed=config.run.seed, needs_answer=answered, refused=refused,
            check=row_check(config, base.tokenizer, answered=answered, taught=not supervised))
        if supervised or config.rollout.workflow not in PLAYS:
            check_system_prompt(config, base, opened[0].row(0))
        return opened
    train: dict[str, PromptDataset] = {}
    heldout: list[Row] = []
    for name in config.data.sets:
        own = config.data_set(name)
        try:
            of_set = open_mixed(own, base, supervised=supervised, refused=refused)
        except (ConfigError, DataError, ModelError) as exc:
            raise type(exc)(f"data.sets.{name}: {exc}") from exc
        train[name], held = (RowsOfSet(each, name, own.data) for each in of_set)
        heldout.extend(held.row(index) for index in range(held.num_rows or 0))
    weights = {name: weight_of(name, table) for name, table in config.data.sets.items()}
    return Mixture(train, weights, config.run.seed, config.data.shuffle), ListDataset(tuple(heldout))


def row_check(config: Config, tokenizer: Tokenizer | None, *, answered: bool, taught: bool) -> Callable[[Row, str], None]:
    """Return the check of a configuration's rows; see `check_of_rows`. `taught` says whether a teacher scores answers to them."""
    teacher = config.teacher if taught and tokenizer is not None and config.algorithm.teacher == "model" else None
    blind = blind_images(config, config.model.path) or blind_part(
        choose_rewards(config), config.rollout, teacher, environment=config.agent.environment, model=config.model.path)
    return check_of_rows(tokenizer, config.data, answered=answered, blind=blind)


def needs_answer(config: Config, *, supervised: bool) -> bool:
    """Whether a row without an answer cannot be used: its answer is imitated, shown to a teacher, or compared with the policy's."""
    shown = supervised or config.run.warm_up or config.algorithm.teaches_itself
    return shown or any(name in _COMPARING for name in choose_rewards(config))


def check_system_prompt(config: Config, base: Base, row: Row) -> None:
    """Refuse a system prompt that a row's prompt would be rendered without.

    Raises:
        ConfigError: the prompt is plain text, or the chat template writes no system messages.
        ModelError: there is no chat template, or it refuses system messages.
    """
    text = config.data.system_prompt
    if not text:
        return
    messages = messages_of(row, config.data)
    if messages is None:
        remedy = (
            "set data.chat_template = true" if base.tokenizer.has_chat_template else
            f"and tokenizer {base.tokenizer.name!r} has no chat template that could carry it; leave it out, or write it into data.prompt")
        raise ConfigError(f"data.system_prompt would not be seen, because the prompts are plain text and no chats; {remedy}")
    own = any(message["role"] == "system" and message["content"] != text for message in messages)
    if not own and text.strip() not in base.tokenizer.chat_text(messages, tools=row.tools):
        raise ConfigError(
            f"data.system_prompt would not be seen, because the chat template of tokenizer {base.tokenizer.name!r} writes no system"
            " messages; leave it out, or write it into data.prompt")


def _read_set(name: str, config: Config, base: Base, run: RunInputs) -> RunInputs:
    own = config.evaluation_set(name)
    try:
        sampling = _choose_sampling(base, own)
        refused: list[str] = []
        answered = needs_answer(own, supervised=False)
        rows = open_set(
            own.data, of_run=config.data, heldout=run.heldout, most=own.evaluate.num_prompts, seed=config.run.seed, needs_answer=answered,
            refused=refused, check=row_check(own, base.tokenizer, answered=answered, taught=False))
        base = replace(base, tokenizer=give_template(base.tokenizer, own))
        if own.rollout.workflow not in PLAYS:
            check_system_prompt(own, base, rows.row(0))
        longest = check_lengths(
            rows, base.tokenizer, own.data, context=run.context, max_new_tokens=sampling.max_new_tokens, max_rows=own.evaluate.num_prompts)
        _check_limits(own, context=run.context, longest=longest, trains=False)
    except (ConfigError, DataError, ModelError) as exc:
        raise type(exc)(f"evaluate.sets.{name}: {exc}") from exc
    return replace(run, sampling=sampling, train=rows, heldout=rows, tokenizer=base.tokenizer, unusable=tuple(refused))


def read_pair_inputs(config: Config, *, unpaired: bool = False, rewards: bool = False) -> RunInputs:
    """Read model configuration, tokenizer and preferences; writes nothing.

    Args:
        unpaired: whether single answers with a label are allowed.
        rewards: whether a reward model is trained on them, which reads them as `data.reward_model` says.

    Raises:
        ModelError, DataError: as `read_inputs`.
        ConfigError: `rollout.single_rank_load` is off, so that each rank would draw data.
    """
    if not config.rollout.single_rank_load:
        raise ConfigError(
            "rollout.single_rank_load must be true to train on preferences, got false; rank 0 keeps what belongs to each pair")
    base = read_base(config)
    refused: list[str] = []
    train, heldout = open_pairs(config.data, unpaired=unpaired, refused=refused, check=check_of_pairs(base.tokenizer, config.data))
    check_system_prompt(config, base, train.row(0).row())
    tokenizer = base.tokenizer
    if rewards:
        choose_padding(tokenizer)  # else the export could not be written
        if not (config.data.wraps or reads_chats(train) or reads_chats(heldout)):
            tokenizer = plain(tokenizer)
    encoder = (JudgedPairEncoder if rewards else PairEncoder)(
        tokenizer, config.data, config.sft.too_long, base.context, config.train.max_tokens_per_microbatch, config.train.share_prefix)
    num_dropped = encoder.check(train)
    encoder.check(heldout)
    supervision = Supervision(base.tokenizer, config.data, config.sft, base.context, config.train.max_tokens_per_microbatch)
    return RunInputs(
        base.model, base.build, base.tokenizer_folder, base.tokenizer, base.context, _choose_sampling(base, config), ListDataset(()),
        ListDataset(()), supervision, num_dropped, _identify(config, base, train), PairInputs(train, heldout, encoder),
        "rewards" if rewards else "policy", unusable=tuple(refused))


def _identify(config: Config, base: Base, train: Dataset[Any]) -> Identity:
    rewards = choose_rewards(config)
    code = {"rollout.workflow": config.rollout.workflow, "rollout.reward": "" if config.rollout.rewards else next(iter(rewards)),
            "rollout.should_accept": config.rollout.should_accept, "algorithm.objective": config.algorithm.objective,
            "algorithm.credit": config.algorithm.credit, "agent.program": config.agent.program,
            "agent.environment": _module_of(config.agent.environment)}
    digests = {setting: _digest_of_code(name) for setting, name in code.items()}
    several = [[_digest_of_code(name), weight] for name, weight in rewards.items()] if config.rollout.rewards else []
    digests["rollout.rewards"] = digest_of(several) if several else ""
    sets = [choose_rewards(own) | {own.rollout.workflow: 0.0} for own in map(config.data_set, config.data.sets)]
    digests["data.sets"] = digest_of([_digest_of_code(name) for name in names] for names in sets) if sets else ""
    digests["agent.command"] = command_digest(config.agent.command)
    digests["agent.tools"] = digest_of([_digest_of_tool(tool) for tool in config.agent.tools]) if config.agent.tools else ""
    return Identity(
        remembered(config), train.digest, train.num_rows, digest_of([base.build.origin]) if base.build else model_digest(Path(base.model)),
        digest_of([base.tokenizer.vocab_size, base.tokenizer.eos_token_id, base.tokenizer.encode(_PROBE_TEXT)]), digests)


def _module_of(environment: str) -> str:
    """Return the name of an environment's code; for verifiers the whole module, such as "my_env:" for "verifiers:my_env"."""
    return f"{environment.removeprefix('verifiers:')}:" if environment.startswith("verifiers:") else environment


def _digest_of_tool(name: str) -> str:
    """Return the digest of a tool's function or class, or of the script of an MCP server."""
    return command_digest(name.removeprefix("mcp:").split()) if name.startswith("mcp:") else code_digest(name)


def _digest_of_code(name: str) -> str:
    """Return the digest of a user's function, or of the reward model that a reward names."""
    return model_digest(open_reward_folder(name.removeprefix(REWARD_MODEL)).path) if name.startswith(REWARD_MODEL) else code_digest(name)


def _choose_sampling(base: Base, config: Config) -> Sampling:
    rollout = config.rollout
    ends = base_ends(base, stop=rollout.stop, stop_token_ids=rollout.stop_token_ids)
    return Sampling(
        rollout.max_new_tokens, rollout.temperature, rollout.top_p, rollout.top_k, ends.strings, stop_token_ids=ends.token_ids,
        routes=config.model.route_replay == "rollout", supports=config.replays_supports)


def base_ends(base: Base, *, stop: Sequence[str] = (), stop_token_ids: Sequence[int] = ()) -> Ends:
    """Return everything that ends a sample of a model; see `find_ends`."""
    model_end_ids = read_end_token_ids(base.model) if base.build is None else ()
    return find_ends(base.tokenizer, model_end_ids=model_end_ids, stop=stop, stop_token_ids=stop_token_ids)


def check_prompts(config: Config, tokenizer: Tokenizer, datasets: Sequence[PromptDataset], *, context: int, trains: bool) -> None:
    """Refuse prompts that are too long, and limits that they, or prompts of the allowed length, would break during a run.

    `context` is the engines' longest sequence, in tokens; `trains` says whether rollouts must fit into micro-batches.

    Raises:
        DataError: a prompt is too long for the context.
        ConfigError: a limit is too low.
    """
    longest = max(
        check_lengths(rows, tokenizer, config.data, context=context, max_new_tokens=config.rollout.max_new_tokens) for rows in datasets)
    _check_limits(config, context=context, longest=longest, trains=trains)


def _check_limits(config: Config, *, context: int, longest: int, trains: bool) -> None:
    """Refuse limits that prompts of `longest` tokens, or of the allowed length, would break during a run."""
    allowed, answer, row = config.data.max_prompt_tokens, config.rollout.max_new_tokens, config.train.max_tokens_per_microbatch
    if allowed + answer > context:
        raise ConfigError(
            f"data.max_prompt_tokens = {allowed} and rollout.max_new_tokens = {answer} are together more than the context of {context};"
            " lower one of them")
    # Samples share their prompt, so it counts once; the last token of an answer is predicted, not run.
    most = max(longest, allowed) + answer - 1
    if trains and most > row:
        raise ConfigError(
            f"train.max_tokens_per_microbatch must be at least {most}, for a prompt of {max(longest, allowed)} tokens and"
            f" rollout.max_new_tokens = {answer}, got {row}; raise it, or lower rollout.max_new_tokens")


def _check_teacher(config: Config, base: Base, *, context: int) -> None:
    """Refuse a teacher folder whose token ids mean something else than the policy's, or which cannot take its samples."""
    path = config.teacher.path
    folder = check_model_folder(path)
    ours, theirs = base.tokenizer, load_tokenizer(str(folder))
    ids = theirs.hf.get_vocab()
    differing = min((index for token, index in ours.hf.get_vocab().items() if ids.get(token) != index), default=None)
    if differing is not None or ours.encode(_PROBE_TEXT) != theirs.encode(_PROBE_TEXT):
        which = "" if differing is None else f", as the token {ours.hf.convert_ids_to_tokens(differing)!r} shows"
        raise ConfigError(
            f"teacher.path = {path!r} has another tokenizer than the policy{which}; log-probabilities are compared token by token, so give"
            " a model of the policy's family")
    if (longest := read_context_length(str(folder))) < context:
        raise ConfigError(
            f"teacher.path = {path!r} has a context of {longest} tokens, and samples may have {context}; set inference.max_context to"
            f" {longest} or less, or give another model")


def read_base(config: Config) -> Base:
    """Read model configuration and tokenizer; writes nothing.

    Raises:
        ModelError: the folder holds no model or tokenizer, or the tokenizer has tokens that the model needs and lacks.
    """
    if config.model.path:
        model = str(check_model_folder(config.model.path))
        tokenizer_folder = config.model.tokenizer or model
        tokenizer = fit_vocabulary(give_template(load_tokenizer(tokenizer_folder), config), read_vocab_size(model), model=model)
        images = image_reader(config, model, ImageStore(images_folder(config.run_dir), run=config.run.name))
        return Base(model, None, tokenizer_folder, replace(tokenizer, images=images), read_context_length(model))
    model = str(config.run_dir / "model")
    tokenizer = give_template(load_tokenizer(config.model.tokenizer) if config.model.tokenizer else character_tokenizer(), config)
    tiny = config.model.tiny
    build = BuildRequest(
        model, tiny.model_dump_json(), tokenizer.vocab_size, tokenizer.eos_token_id, tokenizer.pad_token_id, config.run.seed)
    return Base(model, build, model, tokenizer, tiny.max_positions)


def blind_images(config: Config, model: str) -> str:
    """Return why the run's engines would not see images for a model folder, as the end of a sentence; see `blind_engine`."""
    return blind_engine(config.inference, model=model, rank=config.model.lora.rank, interrupt=config.weights.interrupt)


def image_reader(config: Config, model: str, store: ImageStore) -> ImageReader | None:
    """Return what reads images of rows for a model folder; None if the model or the engines read none. Raises as `images_for`."""
    kind = config.inference.kind
    if not kind.reads_images or (config.inference.urls and kind.inside) or blind_images(config, model):
        return None
    return images_for(model, store, ImageLimits(config.data.max_image_bytes, config.data.max_image_pixels, config.data.max_images))


def write_tokenizer(inputs: "RunInputs", run_dir: Path, *, writes: bool = True) -> str:
    """Return the folder of the tokenizer to export: the model's, or one of the run's with the template of `data.chat_template`.

    It is written if `writes`: of ranks that run the loop together, the one that exports does.
    """
    if not inputs.tokenizer.has_own_template:
        return inputs.tokenizer_folder
    folder = run_dir / "tokenizer"
    if writes:
        inputs.tokenizer.save(folder)
    return str(folder)


def give_template(tokenizer: Tokenizer, config: Config) -> Tokenizer:
    """Give a tokenizer the template of `data.chat_template`, and the variables of its template.

    Raises:
        ConfigError: data sets have templates of their own that differ.
        ModelError: the template is no Jinja.
    """
    sets = [config.data_set(name) for name in config.data.sets]
    given = [own.data.chat_template for own in (config, *sets) if isinstance(own.data.chat_template, str) and own.data.wraps]
    if len(set(given)) > 1:
        raise ConfigError(
            "data.sets name chat templates that differ, and a run has one tokenizer with one template; give all of them the same")
    if given:
        tokenizer = tokenizer.with_template(given[0])
    return replace(tokenizer, template_kwargs=config.data.chat_template_kwargs)


def choose_canary(inputs: RunInputs, config: Config) -> tuple[int, ...]:
    """Return the tokens whose log-probabilities every publish compares: a prompt with its answer, as the model will see them."""
    tokens, _ = sft_sequence(inputs.train.row(0), inputs.tokenizer, config.data)
    most = len(tokens) if is_image(tokens).any() else _MAX_CANARY_TOKENS  # an image is seen whole, so that its tower is compared, too
    return tuple(int(token) for token in tokens[:most])
