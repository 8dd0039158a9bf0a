"""Chats with images in tokens: as rows with them, in one prompt and over turns."""

from dataclasses import replace

import pytest

from image_models import file_of, make_folder, picture
from offbeat.chat.messages import ChatRequest, Message
from offbeat.chat.rendering import Renderer
from offbeat.chat.size import check_chat_size
from offbeat.config.data import DataConfig
from offbeat.data.image_sources import MARK, ImageSource
from offbeat.data.image_store import FIRST_ID
from offbeat.data.prompt import render
from offbeat.data.row import parse_record
from offbeat.data.tokenizer import Tokenizer, load_tokenizer
from offbeat.errors import RefusedError
from shared_image_reader import reader_in_process

ONE, OTHER = (ImageSource(data=file_of(picture(seed))) for seed in (0, 1))
ASKED = Message("user", f"{MARK}how many?", images=(ONE,))


@pytest.fixture(scope="module", params=["gemma3", "qwen2_5_vl"])
def folder(request, tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.fixture
def tokenizer(folder, tmp_path) -> Tokenizer:
    return replace(load_tokenizer(folder), images=reader_in_process(folder, tmp_path / "images"))


def ids_of(tokens: list[int]) -> list[int]:
    return list(dict.fromkeys(token for token in tokens if token >= FIRST_ID))


def test_a_chat_has_the_tokens_of_the_row_with_the_same_images(tokenizer) -> None:
    parts = [{"type": "image", "image": ONE.data}, {"type": "text", "text": "how many?"}]
    record = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "3"}]}
    assert Renderer(tokenizer).prompt([ASKED]) == render(parse_record(record, DataConfig(), where="row"), tokenizer, DataConfig())


def test_an_image_in_several_turns_is_processed_once_and_what_follows_goes_on_in_the_tokens(tokenizer) -> None:
    renderer, said = Renderer(tokenizer), Message("assistant", "3")
    again = Message("user", f"and {MARK}{MARK}?", images=(OTHER, ONE))
    first, following = renderer.prompt([ASKED]), renderer.following(said, [again])
    assert following is not None
    whole = renderer.prompt([ASKED, said, again])
    assert [*first, *tokenizer.encode("3"), tokenizer.eos_token_id, *following] == whole
    assert len(ids_of(whole)) == 2 and ids_of(following)[1] == ids_of(first)[0]
    assert tokenizer.images.num_made == 2


@pytest.mark.parametrize(("message", "told"), [
    (Message("user", f"{MARK}?"), "has 1 image tokens for its 0 images; its text must not spell the token out"),
    (Message("user", MARK, images=(ImageSource(data=b"no image"),)), "^the chat: image 1 is no image in one of the formats"),
    (Message("user", MARK, images=(ImageSource(data=ONE.data[:60]),)), "^the chat: image 1 cannot be decoded .*; its file is damaged"),
])
def test_an_image_that_cannot_be_used_is_refused_in_a_sentence(tokenizer, message: Message, told: str) -> None:
    renderer = Renderer(tokenizer)
    with pytest.raises(RefusedError, match=told):
        renderer.prompt([message])
    with pytest.raises(RefusedError, match=told):
        renderer.following(Message("assistant", "3"), [message])


def test_a_model_of_text_refuses_images(tokenizer) -> None:
    with pytest.raises(RefusedError, match="the chat has an image, and this model reads text alone here; send text"):
        Renderer(replace(tokenizer, images=None)).prompt([ASKED])


def test_too_many_images_are_refused_before_any_is_read(tokenizer) -> None:
    many = ChatRequest((Message("user", MARK * 3, images=(ONE,) * 3), Message("user", MARK * 2, images=(OTHER,) * 2)))
    with pytest.raises(RefusedError, match=r"^the chat has 5 images, allowed are data.max_images = 4; leave some out or raise the bound"):
        check_chat_size(many, tokenizer, context=100)
    assert tokenizer.images.num_made == 0
