"""Reward models without torch: their folders, and the text that they read. Called to train them, and to score rollouts with them.

Any Hugging Face folder for sequence classification with one label is a reward model: its label is the reward of the text. The text is the
prompt and the answer, rendered by its tokenizer's chat template; without one, it is the prompt, the answer and the end token.
"""

import copy
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from offbeat.data.chat import judged_text
from offbeat.data.dataset import Dataset
from offbeat.data.messages import Tool, with_system
from offbeat.data.model_folder import TOKENIZER_FILES, check_model_folder, read_context_length, read_model_config
from offbeat.data.pairs import Answer, EncodedPair, PairEncoder, Preference
from offbeat.data.prompt import check_reads
from offbeat.data.row import Prompt, chat_of
from offbeat.data.tokenizer import Tokenizer, load_tokenizer
from offbeat.errors import DataError, ModelError


@dataclass(frozen=True)
class RewardFolder:
    """A reward model on disk; `context` is its longest text in tokens, None if its configuration does not say."""

    path: Path
    tokenizer: Tokenizer
    context: int | None


def open_reward_folder(name: str) -> RewardFolder:
    """Read a folder or hub id, except for its weights.

    Raises ModelError if there is no such folder, it is no sequence classifier with one label, or it has no tokenizer.
    """
    try:
        path = check_model_folder(name)
        config = read_model_config(str(path))
    except ModelError as exc:
        raise ModelError(f"the reward model of rollout.reward cannot be used: {exc}") from exc
    made = [str(kind) for kind in config.get("architectures") or ()]
    if not any(kind.endswith("ForSequenceClassification") for kind in made):
        raise ModelError(
            f"the reward model {name!r} must be a model for sequence classification, got {', '.join(made) or 'no architecture'}; train one"
            " with `offbeat reward-model`")
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, dict) else int(config.get("num_labels", 2))  # transformers assumes 2
    if count != 1:
        raise ModelError(f"the reward model {name!r} must have one label, whose value is the reward, got {count}; give another model")
    try:
        tokenizer = load_tokenizer(path)
    except ModelError as exc:
        raise ModelError(f"the reward model {name!r} has no tokenizer that can be used: {exc}") from exc
    return RewardFolder(path, tokenizer, _context(path))


def judged_tokens(
    prompt: Prompt, answer: Answer, tokenizer: Tokenizer, *, system_prompt: str = "", tools: tuple[Tool, ...] = (),
) -> list[int]:
    """Return the token ids of the text that a reward model reads; see the module.

    The template puts `system_prompt` before a prompt that has no system message of its own.

    Raises:
        DataError: the template does not write all of it.
        ModelError: there is a chat and no chat template, or the template refuses it.
    """
    if isinstance(prompt, str) and isinstance(answer, str) and not tokenizer.has_chat_template:
        return [*tokenizer.prompt(prompt), *tokenizer.encode_continuation(answer), tokenizer.eos_token_id]
    said = ({"role": "assistant", "content": answer},) if isinstance(answer, str) else answer
    return tokenizer.encode(judged_text((*with_system(chat_of(prompt), system_prompt), *said), tokenizer, tools=tools))


def reads_chats(dataset: Dataset[Preference]) -> bool:
    """Whether a row of the dataset, which has an end, is a chat."""
    assert dataset.num_rows is not None, "preferences come from files, which have an end"
    rows = map(dataset.row, range(dataset.num_rows))
    return any(not isinstance(part, str) for row in rows for part in (row.prompt, *row.answers))


def plain(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy of the tokenizer without its chat template."""
    hf = copy.deepcopy(tokenizer.hf)
    hf.chat_template = None
    return replace(tokenizer, hf=hf)


@dataclass(frozen=True)
class JudgedPairEncoder(PairEncoder):
    """Makes texts of a reward model from preferences. Only the last token of a sequence is in its mask; its output is the reward."""

    def encode(self, preference: Preference, *, name: str) -> EncodedPair | None:
        """See `PairEncoder.encode`; the chat template is used if the tokenizer has one."""
        try:
            texts = [self._judged(preference, answer, name) for answer in preference.answers]
        except (DataError, ModelError) as exc:
            raise type(exc)(f"{name} cannot be encoded: {exc}") from exc
        shared = _common_length(texts)
        needed = sum(map(len, texts)) - (shared * (len(texts) - 1) if self.share_prefix else 0)
        sequences = tuple((np.array(text, np.int32), np.arange(len(text)) == len(text) - 1) for text in texts)
        pair = EncodedPair(sequences, preference.liked, preference.margin, shared)
        return pair if self.fits(pair, needed, "both of its answers", name=name) else None

    def _judged(self, preference: Preference, answer: Answer, name: str) -> list[int]:
        check_reads(preference.row(), self.tokenizer)
        if preference.images and isinstance(preference.prompt, str) and not self.tokenizer.has_chat_template:
            raise DataError("a prompt of text has images, and a reward model reads those of chats alone; set data.chat_template")
        tokens = judged_tokens(preference.prompt, answer, self.tokenizer, system_prompt=self.data.system_prompt, tools=preference.tools)
        images = self.tokenizer.images
        return tokens if images is None else images.expand(tokens, preference.images, where=name)[0].tolist()


def choose_padding(tokenizer: Tokenizer) -> str:
    """Return the special token that a reward model's texts are padded with; raises ModelError if there is none.

    Transformers takes the reward at the last token that is not padding, so padding may be no token that ends a text. It is the tokenizer's
    own unless that is one, else another special token.
    """
    ends = {tokenizer.eos_token_id, tokenizer.end_of_turn_id}
    own = tokenizer.hf.pad_token
    known = {str(own): tokenizer.hf.pad_token_id} if own is not None else {}
    for text, token in {**known, **tokenizer.special_tokens}.items():
        if token not in ends:
            return str(text)
    raise ModelError(
        f"tokenizer {tokenizer.name!r} has no special token to pad texts with besides those that end them; set pad_token in its"
        " tokenizer_config.json")


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files of a tokenizer, with `choose_padding` and its chat template if it has one, as exported reward models have them."""
    folder.mkdir(parents=True, exist_ok=True)
    keeps_template, source = tokenizer.has_chat_template, Path(tokenizer.name)
    if not source.is_dir() or tokenizer.has_own_template:  # from the hub, or made here
        tokenizer.save(folder)
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            if (keeps_template and not tokenizer.has_own_template) or not file.name.startswith("chat_template"):
                shutil.copyfile(file, folder / file.name)
    padding = choose_padding(tokenizer)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if not keeps_template:
        config.pop("chat_template", None)
    path.write_text(json.dumps(config | {"pad_token": padding}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    others = folder / "special_tokens_map.json"
    if others.exists():
        named = json.loads(others.read_text(encoding="utf-8"))
        others.write_text(json.dumps(named | {"pad_token": padding}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _context(path: Path) -> int | None:
    try:
        return read_context_length(str(path))
    except ModelError:  # its configuration names no limit
        return None


def _common_length(texts: Sequence[Sequence[int]]) -> int:
    """Return the number of leading tokens that all texts share; each has at least one more."""
    shortest = min(map(len, texts)) - 1
    different = (index for index in range(shortest) if len({text[index] for text in texts}) > 1)
    return next(different, shortest)
