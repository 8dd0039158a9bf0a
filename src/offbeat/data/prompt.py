"""A row's prompt as a chat and as tokens: rendered for engines, and with its answer for fine-tuning; and checks of its length."""

import numpy as np

from offbeat.config.data import DataConfig
from offbeat.data.chat import check_shown
from offbeat.data.dataset import PromptDataset
from offbeat.data.image_reader import FAMILIES
from offbeat.data.image_sources import MARK
from offbeat.data.messages import Message, with_system
from offbeat.data.row import Row, chat_of
from offbeat.data.tokenizer import Tokenizer
from offbeat.errors import DataError, TooLongError


def render(row: Row, tokenizer: Tokenizer, config: DataConfig) -> list[int]:
    """Return the token ids of a row's prompt.

    The prompt is rendered as text, after the tokenizer's BOS token if it adds one, or as a chat, with the row's tools, if the row is one or
    `data.chat_template` is on. In a chat, the template writes the BOS token where there is to be one.

    Raises:
        DataError: the template does not write all of the chat.
        ModelError: a chat is needed and the tokenizer has no template for it.
    """
    check_reads(row, tokenizer)
    messages = messages_of(row, config)
    if messages is None:
        text = str(row.prompt)
        if tokenizer.images is not None and row.images:
            text = text.replace(MARK, str(tokenizer.hf.convert_ids_to_tokens(tokenizer.images.token_id)))
        ids = tokenizer.prompt(text)
    else:
        tokenizer = tokenizer.giving(row.template_kwargs)
        check_shown(messages, tokenizer, row.tools)
        ids = tokenizer.chat(messages, tools=row.tools)
    return ids if tokenizer.images is None else tokenizer.images.expand(ids, row.images)[0].tolist()


def check_images(row: Row, tokenizer: Tokenizer, where: str) -> None:
    """Read the images of a row, which are kept then; raises DataError if one cannot be used, they are too many, or the model reads none."""
    check_reads(row, tokenizer, where)
    if tokenizer.images is not None:
        tokenizer.images.read_all(row.images, where=where)


def check_reads(row: Row, tokenizer: Tokenizer, where: str = "the row") -> None:
    """Raise DataError if a row has images and they are not read for the model."""
    if row.images and tokenizer.images is None:
        raise DataError(
            f"{where} has {len(row.images)} images, which are not read for {tokenizer.name!r}: they are for models of the types"
            f" {', '.join(FAMILIES)} in a folder with their processor, on engines that know the run's images; leave them out, or"
            " change model.path or inference.engine")


def messages_of(row: Row, config: DataConfig) -> tuple[Message, ...] | None:
    """Return a row's prompt as a chat if it is one or `data.chat_template` is on; None where it is plain text.

    `data.system_prompt` comes before a chat that has no system message of its own.
    """
    if isinstance(row.prompt, str) and not config.wraps:
        return None
    return with_system(chat_of(row.prompt), config.system_prompt)


def check_length(num_tokens: int, config: DataConfig, *, name: str, context: int, max_new_tokens: int) -> None:
    """Refuse a prompt that is empty or leaves no room for its answer in a context of so many tokens; messages call it `name`.

    Raises:
        DataError: `num_tokens` is 0.
        TooLongError: it is above `data.max_prompt_tokens` if that is set, or above context - max_new_tokens.
    """
    if not num_tokens:
        raise DataError(f"prompt {name} has no tokens; a prompt needs at least one")
    if 0 < config.max_prompt_tokens < num_tokens:
        raise TooLongError(
            f"prompt {name} has {num_tokens} tokens, allowed are data.max_prompt_tokens = {config.max_prompt_tokens};"
            " raise it, or remove the row")
    if max_new_tokens >= context:
        raise TooLongError(
            f"rollout.max_new_tokens = {max_new_tokens} leaves no room for prompt {name} of {num_tokens} tokens in a context of {context};"
            " lower it to what an answer needs")
    if num_tokens > context - max_new_tokens:
        raise TooLongError(
            f"prompt {name} has {num_tokens} tokens, allowed are {context - max_new_tokens} (a context of {context} less"
            f" rollout.max_new_tokens = {max_new_tokens}); lower rollout.max_new_tokens, raise inference.max_context where it is set, or"
            " remove rows that are so long")


def check_lengths(
    dataset: PromptDataset, tokenizer: Tokenizer, config: DataConfig, *, context: int, max_new_tokens: int, max_rows: int = 1000) -> int:
    """Render the first `max_rows` rows and refuse a prompt that is too long, before a run begins; raises as `check_length`.

    Returns the number of tokens in the longest of them; 0 for an empty dataset.
    """
    longest = 0
    for index in range(max_rows if dataset.num_rows is None else min(max_rows, dataset.num_rows)):
        num_tokens = len(render(dataset.row(index), tokenizer, config))
        check_length(num_tokens, config, name=f"of {dataset.where(index)}", context=context, max_new_tokens=max_new_tokens)
        longest = max(longest, num_tokens)
    return longest


def sft_sequence(row: Row, tokenizer: Tokenizer, config: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """Encode prompt, solution (or answer) and end token, which is the chat template's end of turn for a chat, else the tokenizer's.

    The two parts are encoded separately, as in generation. Returns tokens [L] int32, and loss_mask [L] bool, True on the answer and the end
    token, e.g. [3, 1, 9, 4, 0] and [F, F, F, T, T].
    """
    prompt = render(row, tokenizer, config)
    is_chat = config.wraps or not isinstance(row.prompt, str)
    end = tokenizer.end_of_turn_id if is_chat and tokenizer.end_of_turn_id is not None else tokenizer.eos_token_id
    answer = [*tokenizer.encode_continuation(row.solution or row.answer), end]
    return np.array(prompt + answer, dtype=np.int32), np.repeat([False, True], [len(prompt), len(answer)])
