"""Tools and agents with images: what the model is given is what is trained on, and a bad image of a tool is told to the model."""

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from image_models import file_of, make_folder, picture
from offbeat.agents.opening import open_workflow
from offbeat.agents.played import readable
from offbeat.agents.task import AgentTask
from offbeat.chat.messages import Message
from offbeat.config.root import Config
from offbeat.data.image_sources import MARK, ImageSource
from offbeat.data.image_store import FIRST_ID
from offbeat.data.row import Row
from offbeat.data.tokenizer import Tokenizer, load_tokenizer
from offbeat.data.trajectory import Trajectory
from offbeat.errors import DataError
from offbeat.types import NoNotes
from scripted_model import ScriptedModel
from shared_image_reader import reader_in_process

TOOLS = """
import io
from PIL import Image

def look(seed: int):
    "Look at a picture."
    if seed < 0:
        return b"\\x89PNG and no more"
    return ["seen:", Image.new("RGB", (40, 28), (seed, 0, 0)), "again"]
"""
ROW = Row(({"role": "user", "content": f"{MARK}what?"},), "1", images=(ImageSource(data=file_of(picture(0))),))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """A tokenizer with capitals and braces, in which calls can be written, and the reader of its model's images."""
    root = tmp_path_factory.mktemp("model")
    alphabet = "".join(sorted({*map(chr, range(32, 127)), "\n"}))
    folder = make_folder(root / "smolvlm", "smolvlm", alphabet=alphabet)
    return replace(load_tokenizer(folder), images=reader_in_process(folder, root / "images"))


def call(seed: int) -> str:
    return '<tool_call>\n' + json.dumps({"name": "look", "arguments": {"seed": seed}}) + '\n</tool_call>'


def play(tokenizer: Tokenizer, folder: Path, *says: str) -> tuple[list[Trajectory], ScriptedModel]:
    (folder / "tools.py").write_text(TOOLS)
    config = Config.model_validate({
        "rollout": {"workflow": "tool_loop", "max_new_tokens": 200}, "agent": {"tools": [f"{folder}/tools.py:look"]},
        "train": {"max_tokens_per_microbatch": 100_000}})
    answers = iter(says)
    model = ScriptedModel(tokenizer, lambda _text: next(answers))

    async def main() -> list[Trajectory]:
        async with AsyncExitStack() as stack:
            plays = await open_workflow(stack, config, tokenizer=tokenizer, log_dir=None, notes=NoNotes())
            return list(await plays(model.episode(config, ROW, context=8192)))

    return asyncio.run(main()), model


def images_in(tokens) -> list[int]:
    return list(dict.fromkeys(int(token) for token in tokens if token >= FIRST_ID))


def test_images_of_rows_and_tools_are_in_the_tokens_that_are_trained_on(tokenizer: Tokenizer, tmp_path: Path) -> None:
    [t], model = play(tokenizer, tmp_path, call(3), call(3), "done")
    first, second, third = (prompt for prompt, _ in model.calls)
    assert len(images_in(first)) == 1 and len(images_in(second)) == 2 and images_in(third) == images_in(second)
    assert tuple(t.tokens[: len(third)]) == third, "turns go on in the tokens of those before"
    assert not t.loss_mask[t.tokens >= FIRST_ID].any()
    assert "seen:" in tokenizer.decode(second) and "again" in tokenizer.decode(second)


def test_a_bad_image_of_a_tool_is_told_to_the_model(tokenizer: Tokenizer, tmp_path: Path) -> None:
    [_], model = play(tokenizer, tmp_path, call(-1), "sorry")
    told = tokenizer.decode(model.calls[1][0])
    assert "Error: the result: image 1 is no image in one of the formats" in told and len(images_in(model.calls[1][0])) == 1


def test_a_model_of_text_is_told_that_there_is_an_image(tokenizer: Tokenizer) -> None:
    message = Message("tool", f"a{MARK}b", images=(ImageSource(data=b"x"),))
    assert asyncio.run(readable(message, replace(tokenizer, images=None))) == Message("tool", "a[image]b")
    with pytest.raises(DataError, match="the result: image 1 is no image"):
        asyncio.run(readable(replace(message, role="user"), tokenizer))


def test_an_agent_is_given_the_prompt_with_its_images_as_messages_to_send(tmp_path: Path) -> None:
    task = AgentTask(ROW, "http://127.0.0.1:1/v1", "http://127.0.0.1:1", "key", "policy", 0, 10.0)
    [message] = task.messages
    image, text = message["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,") and text == {"type": "text", "text": "what?"}
    assert json.loads(task.row_text())["prompt"] == [message]
