"""What a reward model reads, the folders that are accepted as one, and how a tokenizer is exported with it."""

import json
from pathlib import Path

import pytest

from chats import CHATML, words
from offbeat.config.data import DataConfig
from offbeat.data.dataset import ListDataset
from offbeat.data.pairs import Preference
from offbeat.data.reward_model import (
    JudgedPairEncoder,
    choose_padding,
    judged_tokens,
    open_reward_folder,
    plain,
    reads_chats,
    write_tokenizer,
)
from offbeat.data.tokenizer import Tokenizer, character_tokenizer, load_tokenizer
from offbeat.errors import DataError, ModelError

PLAIN = character_tokenizer(chat_template=None)
CHAT = ({"role": "user", "content": "7+5"},)
PAIR = Preference("7+5=", ("12", "130"), (True, False), 0.5)


def encoder(tokenizer: Tokenizer = PLAIN, *, too_long: str = "refuse", context: int = 200, max_row_tokens: int = 200,
            share_prefix: bool = True, **data: object) -> JudgedPairEncoder:
    return JudgedPairEncoder(tokenizer, DataConfig(**data), too_long, context, max_row_tokens, share_prefix)  # type: ignore[arg-type]


def text(tokens: list[int], tokenizer: Tokenizer) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=False)


def test_a_tokenizer_without_a_template_reads_prompt_answer_and_end() -> None:
    assert text(judged_tokens("7+5=", "12", PLAIN), PLAIN) == "7+5=12<eos>"
    with pytest.raises(ModelError, match="has no chat template"):
        judged_tokens(CHAT, "12", PLAIN)


def test_a_template_renders_everything_else() -> None:
    tokenizer = words(CHATML)
    whole = "<|im_start|>user\n7+5<|im_end|>\n<|im_start|>assistant\n12<|im_end|>\n"
    for prompt, answer in (("7+5", "12"), (CHAT, "12"), (CHAT, ({"role": "assistant", "content": "12"},))):
        assert text(judged_tokens(prompt, answer, tokenizer), tokenizer) == whole
    assert text(judged_tokens("7+5", "12", tokenizer, system_prompt="add"), tokenizer).startswith("<|im_start|>system\nadd")


def test_pairs_are_read_in_the_same_way_and_judged_at_the_last_token() -> None:
    pair = encoder().encode(PAIR, name="row 0")
    assert pair is not None and (pair.prefix_len, pair.margin, pair.liked) == (5, 0.5, (True, False)), "4 of the prompt, and a digit"
    for answer, (tokens, mask) in zip(PAIR.answers, pair.sequences, strict=True):
        assert tokens.tolist() == judged_tokens(PAIR.prompt, str(answer), PLAIN)
        assert mask.tolist() == [False] * (len(tokens) - 1) + [True]
    chat = encoder(character_tokenizer(), chat_template=True, system_prompt="add").encode(PAIR, name="row 0")
    assert chat is not None
    assert chat.sequences[0][0].tolist() == judged_tokens("7+5=", "12", character_tokenizer(), system_prompt="add")


def test_the_last_token_counts_against_every_limit() -> None:
    assert encoder(context=8, max_row_tokens=10).encode(PAIR, name="row 0") is not None, "7 and 8 tokens, 5 of them shared"
    with pytest.raises(DataError, match="row 0 needs a forward pass of 10 tokens for both of its answers, allowed are train.max_tokens"):
        encoder(max_row_tokens=9).encode(PAIR, name="row 0")
    with pytest.raises(DataError, match="row 0 has 8 tokens in its longest answer with the prompt, allowed are 7, the model's context"):
        encoder(context=7).encode(PAIR, name="row 0")
    assert encoder(max_row_tokens=14, share_prefix=False, too_long="drop").encode(PAIR, name="row 0") is None
    with pytest.raises(ModelError, match="row 3 cannot be encoded: .* has no chat template"):
        encoder().encode(Preference(CHAT, ("1", "2"), (True, False)), name="row 3")


def test_a_chat_among_the_rows_is_found() -> None:
    assert not reads_chats(ListDataset((PAIR,)))
    assert reads_chats(ListDataset((PAIR, Preference(CHAT, ("1", "2"), (True, False)))))


def test_padding_is_never_a_token_that_ends_a_text() -> None:
    assert choose_padding(PLAIN) == "<pad>"
    tokenizer = character_tokenizer()
    tokenizer.hf.pad_token = "<eos>"
    assert choose_padding(tokenizer) in ("<pad>", "<unk>")
    assert choose_padding(words(CHATML)) not in ("<|im_end|>", words(CHATML).hf.eos_token)


@pytest.mark.parametrize("from_folder", [True, False])
def test_a_written_tokenizer_has_the_padding_and_no_template_that_was_not_used(from_folder: bool, tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    tokenizer.hf.pad_token = "<eos>"
    if from_folder:
        tokenizer.save(tmp_path / "source")
        tokenizer = load_tokenizer(tmp_path / "source")
    write_tokenizer(plain(tokenizer), tmp_path / "plain")
    write_tokenizer(tokenizer, tmp_path / "chats")
    assert tokenizer.has_chat_template, "the original keeps it"
    for name, keeps in (("plain", False), ("chats", True)):
        written = load_tokenizer(tmp_path / name)
        assert written.has_chat_template is keeps
        assert written.hf.pad_token == choose_padding(tokenizer) and written.encode("12") == tokenizer.encode("12")


def folder(path: Path, **changes: object) -> str:
    """A folder of a reward model, without real weights."""
    PLAIN.save(path)
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}} | changes
    (path / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    (path / "model.safetensors").touch()
    return str(path)


def test_a_folder_with_one_label_is_a_reward_model(tmp_path: Path) -> None:
    assert open_reward_folder(folder(tmp_path / "own")).context is None
    assert open_reward_folder(folder(tmp_path / "numbered", id2label=None, num_labels=1, max_position_embeddings=64)).context == 64


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"id2label": {"0": "bad", "1": "good"}}, "must have one label, whose value is the reward, got 2; give another model"),
    ({"id2label": None}, "must have one label, whose value is the reward, got 2"),
    ({"architectures": ["Qwen3ForCausalLM"]}, "must be a model for sequence classification, got Qwen3ForCausalLM; train one with"),
    ({"model_type": None}, "the reward model of rollout.reward cannot be used: .* names no model_type"),
])
def test_other_folders_are_refused_in_one_sentence(changes: dict, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=sentence):
        open_reward_folder(folder(tmp_path / "other", **changes))


def test_a_missing_folder_or_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="the reward model of rollout.reward cannot be used: model folder '/nowhere' does not exist"):
        open_reward_folder("/nowhere")
    path = folder(tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="has no tokenizer that can be used: .*tokenizer.json"):
        open_reward_folder(path)
