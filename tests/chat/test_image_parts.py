"""Images in bodies of the three dialects, and what of the disk and the web they reach, which is nothing but one folder."""

import base64
import json
from pathlib import Path

import pytest

from offbeat.chat.anthropic import Anthropic
from offbeat.chat.completions import Completions
from offbeat.chat.image_parts import ImageRules, check_detail, join_parts, messages_of, messages_to_send, without_images
from offbeat.chat.messages import ChatRequest, Message
from offbeat.chat.responses import Responses
from offbeat.data.image_sources import MARK, ImageSource
from offbeat.data.row import Row
from offbeat.errors import DataError, RefusedError

FILE = b"\x89PNG and the rest"
TEXT = base64.b64encode(FILE).decode()
URI = f"data:image/png;base64,{TEXT}"
IMAGE = ImageSource(data=FILE)
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def completions(*messages: object, **options: object) -> ChatRequest:
    return Completions(**options).read(json.dumps({"messages": messages}).encode())


def responses(*items: object, **options: object) -> ChatRequest:
    return Responses(**options).read(json.dumps({"input": items}).encode())


def anthropic(*messages: object, **options: object) -> ChatRequest:
    return Anthropic(**options).read(json.dumps({"messages": messages, "max_tokens": 5}).encode())


def user(*parts: object) -> dict:
    return {"role": "user", "content": list(parts)}


def image_url(address: object = URI, **more: object) -> dict:
    return {"type": "image_url", "image_url": {"url": address, **more}}


def block(**source: object) -> dict:
    return {"type": "image", "source": source}


BLOCK = block(type="base64", media_type="image/png", data=TEXT)


def test_images_of_users_are_read_in_each_dialect_in_their_places() -> None:
    wanted = (Message("user", f"{MARK}how many?\nsay it{MARK}", images=(IMAGE, IMAGE)),)
    texts = [{"type": "text", "text": text} for text in ("how many?", "say it")]
    assert completions(user(image_url(detail="auto"), *texts, image_url())).messages == wanted
    part = {"type": "input_image", "image_url": URI, "detail": "high"}
    assert responses(user(part, *({**text, "type": "input_text"} for text in texts), part)).messages == wanted
    assert anthropic(user(BLOCK, *texts, block(type="url", url=URI))).messages == wanted


def test_images_of_tools_are_read_in_each_dialect() -> None:
    wanted = Message("tool", f"here{MARK}", call_id="c", name="look", images=(IMAGE,))
    said = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "here"}, image_url()]}
    assert completions(user({"type": "text", "text": "?"}), said, result).messages[-1] == wanted
    output = [{"type": "input_text", "text": "here"}, {"type": "input_image", "image_url": URI}]
    items = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}, {
        "type": "function_call_output", "call_id": "c", "output": output}
    assert responses({"role": "user", "content": "?"}, *items).messages[-1] == wanted
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]}
    told = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "here"}, BLOCK]}
    assert anthropic({"role": "user", "content": "?"}, use, user(told)).messages[-1] == wanted


@pytest.mark.parametrize(("address", "told"), [
    ("https://example.org/a.png", "is the address 'https://example.org/a.png' \\(str\\), and nothing is fetched; send a data URI"),
    ("http://169.254.169.254/latest", "is the address"), ("ftp://there/a.png", "is the address"),
    ("/etc/passwd", "must be a data URI, got '/etc/passwd'"), ("file:///etc/passwd", "must be a data URI"), ("", "must be a data URI"),
    (None, "must be a data URI, got None"), (7, "must be a data URI, got 7"), ("data:image/png;base64,?", "is not in base64"),
    ("data:image/png", "is no data URI"),
])
def test_nothing_is_fetched_and_no_file_is_read(address: object, told: str) -> None:
    with pytest.raises(RefusedError, match=rf"^messages\[0\]\.content\[0\], a part of type 'image_url', {told}"):
        completions(user(image_url(address)))
    if isinstance(address, str):
        with pytest.raises(RefusedError, match=told):
            anthropic(user(block(type="url", url=address)))


def test_files_are_read_from_the_folder_that_is_named_alone(tmp_path: Path) -> None:
    folder, outside = tmp_path / "pictures", tmp_path / "secret.png"
    (folder / "in").mkdir(parents=True)
    for path in (outside, folder / "a.png", folder / "in" / "b.png"):
        path.write_bytes(FILE)
    (folder / "link.png").symlink_to(outside)
    (folder / "fine.png").symlink_to(folder / "a.png")
    rules = ImageRules(files=folder)
    for address in ("a.png", f"{folder}/a.png", f"file://{folder}/a.png", "in/../a.png", "fine.png"):
        assert rules.source_of(address, "it") == ImageSource(path=str(folder / "a.png"))
    others = ("../secret.png", str(outside), f"file://{outside}", "link.png", "in/../../secret.png", "in", "no.png", "a\0", "x" * 5000)
    for address in others:
        with pytest.raises(RefusedError, match=r"^it is .*, which is no file in the folder of images; send a data URI, or a path in it"):
            rules.source_of(address, "it")
    assert completions(user(image_url("in/b.png")), image_files=folder).messages[0].images[0].path == str(folder / "in" / "b.png")


@pytest.mark.parametrize(("read", "told"), [
    (lambda: completions({"role": "system", "content": [image_url()]}), "a part of type 'image_url', and only messages of users and tools"),
    (lambda: completions({"role": "assistant", "content": [image_url()]}), "only messages of users and tools have images"),
    (lambda: completions(user(image_url(detail="low"))), "has the detail 'low'.*, and only the model's own processor resizes images"),
    (lambda: responses(user({"type": "input_image", "file_id": "f"})), "must be a data URI, got None"),
    (lambda: anthropic(user(block(type="file", file_id="f"))), "must have a source of type 'base64' or 'url', got 'file'"),
    (lambda: anthropic(user(block(type="base64", data="?"))), r"is not in base64: '\?'"),
    (lambda: anthropic({"role": "user", "content": "?"}, {"role": "assistant", "content": [BLOCK]}, user(BLOCK)), "only messages of users"),
    (lambda: completions(user(image_url(), {"type": "text", "text": f"a {MARK}"})), r"a text with the character U\+FFFC, which stands for"),
])
def test_what_cannot_be_honoured_is_refused_in_a_sentence(read, told: str) -> None:
    with pytest.raises(RefusedError, match=told):
        read()


def test_a_character_that_marks_images_elsewhere_is_text_where_there_are_none() -> None:
    assert completions(user({"type": "text", "text": f"a {MARK}"})).messages == (Message("user", f"a {MARK}"),)
    assert join_parts(["a", "b"], "it").text == "a\nb"
    check_detail("original", "it")


def test_a_row_is_sent_with_its_images_as_parts(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"\xff\xd8\xffjpeg")
    row = Row(({"role": "system", "content": "look"}, {"role": "user", "content": f"{MARK}or{MARK}?"}), "1", images=(
        IMAGE, ImageSource(path=str(tmp_path / "a.jpg"))))
    sent = messages_to_send(row)
    assert sent == [{"role": "system", "content": "look"}, user(
        image_url(), {"type": "text", "text": "or"}, image_url("data:image/jpeg;base64,/9j/anBlZw=="), {"type": "text", "text": "?"})]
    assert [message.images[0].data for message in completions(*sent).messages[1:]] == [FILE]
    assert messages_of(row)[1] == Message("user", f"{MARK}or{MARK}?", images=row.images) and messages_of(row)[0].images == ()
    assert messages_to_send(Row("plain", "")) == [{"role": "user", "content": "plain"}]
    assert without_images(messages_of(row)[1]) == Message("user", "[image]or[image]?")
    with pytest.raises(DataError, match="cannot be read from"):
        messages_to_send(Row(MARK, "", images=(ImageSource(path=str(tmp_path / "gone.png")),)))
