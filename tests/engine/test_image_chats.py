"""Chats with images over HTTP: three dialects get what engine and trainer have for the same row, and bad images one sentence."""

import asyncio
import base64
import json
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from PIL import Image

from engine_http import fetch, serving
from image_models import file_of, make_folder, picture
from image_world import score
from offbeat.cli.main import main
from offbeat.config.train import TrainConfig
from offbeat.data.image_store import FIRST_ID
from offbeat.trainer.policy import load_policy

FILE, OTHER = file_of(picture(0)), file_of(picture(1))
TEXT = "how many?"


def uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def asked(*images: str) -> list[dict]:
    parts = [{"type": "image_url", "image_url": {"url": image}} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": TEXT}]}]


def chat(url: str, *images: str, **fields) -> dict:
    status, _, told = fetch(url, "/v1/chat/completions", {
        "messages": asked(*images), "temperature": 0, "max_tokens": 4, "return_token_ids": True, "logprobs": True, **fields})
    assert status == 200, told
    return told


@pytest.fixture(scope="module", params=["qwen3_vl", "smolvlm"])
def world(request, tmp_path_factory):
    """A served model, its folder, the folder of pictures, and the folder of stored images."""
    root: Path = tmp_path_factory.mktemp("served") / request.param
    folder, files, store = make_folder(root / "model", request.param), root / "files", root / "images"
    files.mkdir()
    (files / "a.png").write_bytes(FILE)
    (root / "secret.png").write_bytes(FILE)
    with serving(str(folder), images=str(store), image_files=str(files), max_stored_bytes=1 << 30) as (_, url):
        yield url, folder, files, store


def test_an_answer_to_a_chat_with_an_image_is_what_the_trainer_scores(world) -> None:
    url, folder, _, store = world
    told = chat(url, uri(FILE))
    (choice,) = told["choices"]
    prompt, ids = told["prompt_token_ids"], choice["token_ids"]
    assert sum(token >= FIRST_ID for token in prompt) >= 4
    policy = load_policy(str(folder), config=TrainConfig(), images=store)
    found = [token["logprob"] for token in choice["logprobs"]["content"]]
    assert found == pytest.approx(np.asarray(score(policy, prompt, ids)).tolist(), abs=1e-4)


def test_all_dialects_and_a_path_in_the_folder_make_the_same_prompt_and_the_image_once(world) -> None:
    url, _, files, store = world
    first = chat(url, uri(FILE))
    num_stored = len(list(store.glob("*.image")))
    assert chat(url, "a.png")["prompt_token_ids"] == chat(url, f"file://{files}/a.png")["prompt_token_ids"] == first["prompt_token_ids"]
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(FILE).decode()}}
    content = [block, {"type": "text", "text": TEXT}]
    _, _, counted = fetch(url, "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": content}], "max_tokens": 4})
    assert counted == {"input_tokens": len(first["prompt_token_ids"])}
    _, _, told = fetch(url, "/v1/messages", {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0})
    assert (told["usage"]["input_tokens"] + told["usage"]["cache_read_input_tokens"]) == len(first["prompt_token_ids"])
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": uri(FILE)}, {"type": "input_text", "text": TEXT}]}]
    _, _, response = fetch(url, "/v1/responses", {"input": items, "max_output_tokens": 4, "temperature": 0})
    assert response["usage"]["input_tokens"] == len(first["prompt_token_ids"])
    assert told["content"][0]["text"] == response["output"][0]["content"][0]["text"]
    assert len(list(store.glob("*.image"))) == num_stored
    assert chat(url, uri(OTHER))["prompt_token_ids"] != first["prompt_token_ids"]
    assert len(list(store.glob("*.image"))) == num_stored + 1


def test_a_chat_goes_on_with_images_in_later_turns(world) -> None:
    url, _, _, _ = world
    messages = [*asked(uri(FILE)), {"role": "assistant", "content": "3"}, *asked(uri(OTHER), uri(FILE))]
    status, _, told = fetch(url, "/v1/chat/completions", {"messages": messages, "max_tokens": 2, "return_token_ids": True})
    assert status == 200, told
    ids = [token for token in told["prompt_token_ids"] if token >= FIRST_ID]
    one, other, again = [key for number, key in enumerate(ids) if not number or ids[number - 1] != key]
    assert one == again != other


@pytest.mark.parametrize(("image", "told"), [
    (uri(b"no image"), "the chat: image 1 is no image in one of the formats"), (uri(FILE[:80]), "the chat: image 1 cannot be decoded"),
    (uri(file_of(picture(0), "GIF", save_all=True, append_images=[picture(1)])), "is animated or has several pages (2 of them)"),
    ("https://example.org/a.png", "nothing is fetched"), ("../secret.png", "no file in the folder of images"),
    ("/etc/hostname", "no file in the folder of images"), ("data:image/png;base64,!", "is not in base64"),
])
def test_a_bad_image_is_one_sentence_and_the_next_request_is_served(world, image: str, told: str) -> None:
    url, _, _, _ = world
    status, _, answer = fetch(url, "/v1/chat/completions", {"messages": asked(image), "max_tokens": 2})
    assert status == 400 and told in answer["error"]["message"], answer
    assert "\n" not in answer["error"]["message"] and "Traceback" not in answer["error"]["message"]
    assert chat(url, uri(FILE))["choices"]


def test_bounds_are_told_without_settings_of_a_run(world) -> None:
    url, _, _, _ = world
    status, _, answer = fetch(url, "/v1/chat/completions", {"messages": asked(*[uri(FILE)] * 17), "max_tokens": 2})
    assert (status, answer["error"]["message"]) == (400, "the chat has 17 images, allowed are 16 here; leave some out")
    large = file_of(Image.new("L", (5000, 4000)))
    status, _, answer = fetch(url, "/v1/chat/completions", {"messages": asked(uri(large)), "max_tokens": 2})
    assert status == 400 and answer["error"]["message"].endswith("has 5000 x 4000 pixels, allowed are 16777216 here; shrink it")


def test_requests_side_by_side_make_an_image_once(world) -> None:
    url, _, _, store = world
    before, new = len(list(store.glob("*.image"))), uri(file_of(picture(7)))

    async def ask(http: aiohttp.ClientSession) -> list[int]:
        body = {"messages": asked(new), "max_tokens": 2, "return_token_ids": True}
        async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
            return json.loads(await answer.read())["prompt_token_ids"]

    async def all_of_them() -> list[list[int]]:
        async with aiohttp.ClientSession() as http:
            return await asyncio.gather(*(ask(http) for _ in range(8)))

    prompts = asyncio.run(all_of_them())
    assert all(prompt == prompts[0] for prompt in prompts)
    assert len(list(store.glob("*.image"))) == before + 1


def test_the_command_refuses_a_folder_that_is_none_or_is_not_needed(world, tmp_path: Path, model_dir: str, capsys) -> None:
    _, folder, files, _ = world
    assert main(["engine", f"--model={folder}", "--port=0", f"--images={tmp_path}/none"]) == 2
    assert "--images must name a folder, got" in capsys.readouterr().err
    assert main(["engine", f"--model={model_dir}", "--port=0", f"--images={files}"]) == 2
    assert "--images is for a model that reads images" in capsys.readouterr().err
