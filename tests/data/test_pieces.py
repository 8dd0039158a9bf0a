"""Texts of single tokens."""

from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from offbeat.data.pieces import Pieces
from offbeat.data.tokenizer import Tokenizer, character_tokenizer, load_tokenizer


def byte_tokenizer() -> Tokenizer:
    """Each byte is a token, as in the rarest corners of a byte-level vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({"<eos>": 0, **{letter: i + 1 for i, letter in enumerate(alphabet)}}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>"), "bytes")


def word_tokenizer() -> Tokenizer:
    """A decoder that drops the space before the first word, as that of sentencepiece does."""
    backend = Backend(models.WordLevel({"<eos>": 0, "▁a": 1, "▁the": 2, "s": 3}, unk_token="<eos>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>"), "words")


def test_characters_and_special_tokens_are_pieces_of_their_own() -> None:
    tokenizer = character_tokenizer()
    assert Pieces(tokenizer).split([*tokenizer.encode("3 1>13"), 0]) == ["3", " ", "1", ">", "1", "3", "<eos>"]
    assert Pieces(tokenizer).split([]) == []


def test_a_character_of_several_bytes_belongs_to_its_last_token() -> None:
    tokenizer = byte_tokenizer()
    text = "aé你 ok🙂"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    pieces = Pieces(tokenizer).split([*ids, 0])
    assert "".join(pieces) == f"{text}<eos>"
    assert pieces == ["a", "", "é", "", "", "你", " ", "o", "k", "", "", "", "🙂", "<eos>"]


def test_bytes_that_are_no_character_are_shown_as_such_and_what_follows_is_read() -> None:
    tokenizer = byte_tokenizer()
    first_of_two, a = tokenizer.encode("é")[0], tokenizer.encode("a")[0]
    assert Pieces(tokenizer).split([first_of_two, a, first_of_two]) == ["\ufffd", "a", "\ufffd"]


def test_the_space_before_a_word_is_kept_where_a_decoder_would_drop_it() -> None:
    assert "".join(Pieces(word_tokenizer()).split([2, 1, 3, 2])) == " the as the"


def test_ids_that_are_no_tokens_are_written_out() -> None:
    tokenizer = character_tokenizer("ab")
    assert Pieces(tokenizer).split([3, -7, 99, 4]) == ["a", "<-7>", "<99>", "b"]


def test_the_pieces_of_a_saved_tokenizer_make_up_its_text(tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("naïve 3.14\n\tÄpfel")
    assert "".join(Pieces(tokenizer).split(ids)) == tokenizer.decode(ids) == "naïve 3.14\n\tÄpfel"
