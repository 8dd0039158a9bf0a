"""Images of requests: read once by the model's own processor, each owner's in turn, within bounds, and by a service as a whole."""

import asyncio
import base64
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from http_serving import Client
from image_models import file_of, make_folder, picture
from image_world import score
from offbeat.config.data import DataConfig
from offbeat.config.train import TrainConfig
from offbeat.data.image_sources import MARK, ImageSource
from offbeat.data.image_store import FIRST_ID, ImageStore, images_folder
from offbeat.data.prompt import render
from offbeat.data.row import Row
from offbeat.data.tokenizer import load_tokenizer
from offbeat.errors import BusyError
from offbeat.service.app.request_images import RequestImages
from offbeat.service.errors import BadRequestError, OverLimitError
from offbeat.service.wire.chunks import ImageChunk
from offbeat.trainer.policy import load_policy
from protocol import PROTOBUF, base_sampler, finished, model_of, pass_body, sample_body, session_of
from shared_image_reader import ReaderInProcess, reader_in_process
from small_service import BASE, SmallCluster, small_cluster

from .conftest import serve_on

ONE, OTHER = file_of(picture(0)), file_of(picture(1, size=(28, 40)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "gemma3", "gemma3")


def chunk(data: bytes = ONE, name: str = "prompt.chunks[0]", expected_tokens: int | None = None) -> ImageChunk:
    return ImageChunk(name, data, expected_tokens)


def test_an_image_is_decoded_once_whoever_sends_it_and_however_often(folder: Path, tmp_path: Path) -> None:
    reader = reader_in_process(folder, tmp_path)
    images = RequestImages(reader)

    async def body() -> None:
        first, second, other = chunk(), chunk(memoryview(ONE)), chunk(OTHER)
        found = await images.read("alice", [first, second, other])
        assert reader.num_made == 2
        stored = reader.store.get(int(found[first].tokens.max()))
        assert found[first].tokens.tolist() == found[second].tokens.tolist() == stored.tokens.tolist() != found[other].tokens.tolist()
        assert found[first].num_patches == 16, "32 x 32 pixels in patches of 8"
        (again,) = (await images.read("bob", [chunk()])).values()
        assert again.tokens.tolist() == stored.tokens.tolist() and reader.num_made == 2
        for path in tmp_path.iterdir():
            path.unlink()
        reader.store._kept.clear()
        (anew,) = (await images.read("bob", [chunk()])).values()
        assert anew.tokens.tolist() == stored.tokens.tolist() and reader.num_made == 3, "what was removed is made anew"

    asyncio.run(body())


def test_an_image_that_is_not_what_its_client_says_is_refused_with_its_place(folder: Path, tmp_path: Path) -> None:
    images = RequestImages(reader_in_process(folder, tmp_path))

    async def refused(given: ImageChunk) -> str:
        with pytest.raises(BadRequestError) as caught:
            await images.read("alice", [chunk(), given])
        return str(caught.value)

    async def body() -> None:
        (read,) = (await images.read("alice", [chunk(expected_tokens=6)])).values()
        assert len(read.tokens) == 6
        assert (await refused(chunk(expected_tokens=7, name="data[3].model_input.chunks[1]"))).startswith(
            "data[3].model_input.chunks[1] has 6 tokens by the model's own processor, and its expected_tokens are 7; count")
        assert (await refused(chunk(ONE[:100]))).startswith("prompt.chunks[0] cannot be decoded")
        assert (await refused(chunk(b"GIF89a"))).startswith("prompt.chunks[0] is no image in one of the formats")

    asyncio.run(body())


def test_an_owner_who_stores_much_waits_and_others_do_not(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 4 * 3 * 32 * 32
    images = RequestImages(reader_in_process(folder, tmp_path), most_bytes=4 * 2 * size)

    async def body() -> None:
        for seed in range(2):
            await images.read("mallory", [chunk(file_of(picture(seed)))])
        with pytest.raises(OverLimitError, match=f"your images of the last hour take up {2 * size} bytes"):
            await images.read("mallory", [chunk(file_of(picture(2)))])
        await images.read("mallory", [chunk(file_of(picture(1)))])
        await images.read("alice", [chunk(file_of(picture(2)))])
        await images.read("mallory", [chunk(file_of(picture(2)))])  # it is there by now
        now = time.monotonic()
        monkeypatch.setattr("offbeat.service.app.request_images.time.monotonic", lambda: now + 3601)
        await images.read("mallory", [chunk(file_of(picture(3)))])
        await images.read("bob", [chunk(file_of(picture(3)))])
        assert set(images._shares) == {"mallory", "bob"}, "owners whose hour has passed are forgotten"

    asyncio.run(body())


def test_a_full_disk_is_said_to_pass(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = RequestImages(reader_in_process(folder, tmp_path))

    def full(*_: object, **__: object) -> None:
        raise BusyError("there is no room for another image")

    monkeypatch.setattr(ImageStore, "add", full)
    with pytest.raises(OverLimitError, match="there is no room for another image"):
        asyncio.run(images.read("alice", [chunk()]))


# -- over HTTP -----------------------------------------------------------------------------------------------------------------------------


class SlowReader(ReaderInProcess):
    """Takes longer for an image than a gap in the order of requests is waited for."""

    def _ask(self, data: bytes) -> bytes:
        time.sleep(1.0)
        return super()._ask(data)


@pytest.fixture(scope="module")
def seeing(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallCluster]:
    """A rank and an engine of a model that reads images."""
    with small_cluster(tmp_path_factory.mktemp("seeing"), str(folder), train__num_ranks="1") as cluster:
        yield cluster


@pytest.fixture
def reader(seeing: SmallCluster, folder: Path) -> SlowReader:
    reader = reader_in_process(folder, images_folder(seeing.config.run_dir))
    return SlowReader(str(folder), reader.store, reader.limits)


def image_piece(data: bytes = ONE) -> dict[str, Any]:
    return {"type": "image", "data": base64.b64encode(data).decode(), "format": "png"}


def datum_with(data: bytes, text: list[int]) -> dict[str, Any]:
    """An image of 6 tokens and a text after it, which is to be predicted."""
    targets = np.array([*[0] * 5, *text], "<i8")
    return {
        "model_input": [
            {"image": {"data": data, "format": "png", "expected_tokens": 6}},
            {"encoded_text": {"tokens": np.array(text[:-1], "<i4").tobytes()}}],
        "loss_fn_inputs": {"target_tokens": {"dense": targets.tobytes(), "dtype": 2, "shape": targets.shape}}}


def test_a_pass_whose_images_take_long_keeps_its_place_and_samples_share_its_image(
        seeing: SmallCluster, reader: SlowReader, tmp_path: Path) -> None:
    data = file_of(picture(11))

    async def body(client: Client) -> None:
        model = await model_of(client, await session_of(client))
        learn = asyncio.create_task(client.post(
            "forward_backward", pass_body(model, 1, [datum_with(data, [13, 14, 15])] * 2), headers=PROTOBUF))
        await asyncio.sleep(0.1)
        step = await client.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.05}})
        scored = await client.post(
            "forward_backward", pass_body(model, 3, [datum_with(data, [13, 14, 15])] * 2, forward_only=True), headers=PROTOBUF)
        before, stepped, after = [await finished(client, ack) for ack in (await learn, step, scored)]
        assert stepped["metrics"]["grad_norm"] > 0
        assert after["metrics"]["loss:sum"] < before["metrics"]["loss:sum"] - 0.01, "the step came after the pass"
        logprobs = np.frombuffer(before["loss_fn_outputs"][0]["fields"]["logprobs"]["data"], "<f4").reshape(2, -1)
        assert -logprobs[:, 5:].sum() == pytest.approx(before["metrics"]["loss:sum"], abs=1e-4), "the image's own tokens are not trained"
        sampler = await base_sampler(client)
        asked = sample_body(sampler, 0, [], num_samples=8, max_tokens=3) | {
            "prompt": {"chunks": [image_piece(data), {"type": "encoded_text", "tokens": [13, 14, 15]}]}, "prompt_logprobs": True}
        found = await finished(client, await client.post("asample", asked))
        assert len(found["sequences"]) == 8 and reader.num_made == 1
        prompt = np.frombuffer(found["prompt_logprobs"], "<f4")
        assert np.isnan(prompt).tolist() == [True, *[True] * 4, False, False, False, False], "but for the token that ends the image"
        np.testing.assert_allclose(prompt[6:], logprobs[0, 5:], atol=1e-4)

    serve_on(seeing, tmp_path, images=reader)(body, gap_patience_s=0.3)


def test_a_pass_with_a_bad_image_holds_nothing_up(seeing: SmallCluster, reader: SlowReader, tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        model = await model_of(client, await session_of(client))
        bad = asyncio.create_task(client.post(
            "forward_backward", pass_body(model, 1, [datum_with(ONE[:200], [13, 14])]), headers=PROTOBUF))
        await asyncio.sleep(0.1)
        good = await client.post("forward_backward", pass_body(model, 2, [datum_with(ONE, [13, 14])]), headers=PROTOBUF)
        refused = await bad
        assert refused.status == 422 and refused.detail.startswith("data[0].model_input.chunks[0] cannot be decoded")
        assert (await finished(client, good))["metrics"]["loss:sum"] > 0

    serve_on(seeing, tmp_path, images=reader)(body, gap_patience_s=60.0)


def test_a_prompt_with_images_may_be_larger_than_one_of_text(seeing: SmallCluster, reader: SlowReader, tmp_path: Path) -> None:
    large = file_of(picture(5, size=(1300, 1300)))
    assert len(large) > 4 << 20

    async def body(client: Client) -> None:
        asked = sample_body(await base_sampler(client), 0, [], max_tokens=1)
        found = await finished(client, await client.post("asample", asked | {"prompt": {"chunks": [image_piece(large)]}}))
        assert len(found["sequences"]) == 1
        text = await client.post("asample", asked | {"prompt": {"chunks": [{"tokens": [1] * (3 << 20)}]}})
        assert text.status == 413 and "beside its images" in text.detail

    serve_on(seeing, tmp_path, images=reader)(body, max_body_bytes=2**25)


def uri(data: bytes = ONE) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def chat_with(*images: str, **fields: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": image}} for image in images]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "how many?"}]}]
    return {"model": BASE, "messages": messages, "temperature": 0, "max_tokens": 4, "return_token_ids": True, "logprobs": True} | fields


def test_chats_of_three_apis_have_the_prompt_of_a_row_and_read_its_image_once(
        seeing: SmallCluster, reader: SlowReader, folder: Path, tmp_path: Path) -> None:
    data = file_of(picture(21))
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}}
    said = {"model": BASE, "max_tokens": 4, "temperature": 0, "messages": [
        {"role": "user", "content": [block, {"type": "text", "text": "how many?"}]}]}
    item = {"role": "user", "content": [{"type": "input_image", "image_url": uri(data)}, {"type": "input_text", "text": "how many?"}]}

    async def body(client: Client) -> None:
        chat = await client.ask("POST", "/v1/chat/completions", chat_with(uri(data)))
        assert chat.status == 200, chat.body
        (choice,), prompt = chat.json["choices"], chat.json["prompt_token_ids"]
        own = replace(load_tokenizer(str(folder)), images=reader_in_process(folder, tmp_path / "apart"))
        row = Row([{"role": "user", "content": f"{MARK}how many?"}], "", images=(ImageSource(data=data),))
        assert prompt == render(row, own, DataConfig()) and sum(token >= FIRST_ID for token in prompt) == 4
        policy = load_policy(str(folder), config=TrainConfig(), images=reader.store.folder)
        found = [token["logprob"] for token in choice["logprobs"]["content"]]
        assert found == pytest.approx(np.asarray(score(policy, prompt, choice["token_ids"])).tolist(), abs=1e-4)
        counted = await client.ask("POST", "/v1/messages/count_tokens", said)
        message = await client.ask("POST", "/v1/messages", said)
        response = await client.ask("POST", "/v1/responses", {"model": BASE, "input": [item], "max_output_tokens": 4, "temperature": 0})
        assert counted.json == {"input_tokens": len(prompt)} and message.json["usage"]["input_tokens"] == len(prompt)
        assert response.json["usage"]["input_tokens"] == len(prompt) and reader.num_made == 1
        assert message.json["content"][0]["text"] == response.json["output"][0]["content"][0]["text"]

    serve_on(seeing, tmp_path, images=reader)(body)


@pytest.mark.parametrize(("images", "told"), [
    ([uri(ONE[:80])], "the chat: image 1 cannot be decoded"), ([uri(), uri(b"no image")], "the chat: image 2 is no image in one of"),
    (["https://example.org/a.png"], "nothing is fetched"), (["/etc/hostname"], "must be a data URI"),
    ([uri()] * 5, "the chat has 5 images, allowed are 4 here; leave some out")])
def test_a_bad_image_of_a_chat_is_one_sentence(
        seeing: SmallCluster, reader: SlowReader, tmp_path: Path, images: list[str], told: str) -> None:
    async def body(client: Client) -> None:
        refused = await client.ask("POST", "/v1/chat/completions", chat_with(*images))
        message = refused.json["error"]["message"]
        assert refused.status in (400, 422) and told in message and "\n" not in message, refused.body

    reader.limits = replace(reader.limits, in_data=False)
    serve_on(seeing, tmp_path, images=reader)(body)


def test_the_text_of_a_chat_with_images_has_the_bounds_of_one_without(seeing: SmallCluster, reader: SlowReader, tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        many = await client.ask("POST", "/v1/chat/completions", {"model": BASE, "messages": [{"role": "user", "content": ""}] * 1_200_000})
        assert many.status == 413 and "beside its images" in many.json["error"]["message"]
        long = await client.ask("POST", "/v1/chat/completions", {"model": BASE, "messages": [{"role": "user", "content": "1" * (5 << 20)}]})
        assert long.status == 400 and "shorten it" in long.json["error"]["message"]

    serve_on(seeing, tmp_path, images=reader)(body, max_body_bytes=2**26)


def test_ids_of_images_are_made_here_alone(seeing: SmallCluster, reader: SlowReader, tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        asked = sample_body(await base_sampler(client), 0, [], max_tokens=1)
        await finished(client, await client.post("asample", asked | {"prompt": {"chunks": [image_piece()]}}))
        stored = next(int(path.stem) for path in reader.store.folder.glob("*.image"))
        assert stored >= FIRST_ID
        for path, given in (
            ("/api/v1/asample", asked | {"seq_id": 1, "prompt": {"chunks": [{"tokens": [5, stored]}]}}),
            ("/v1/completions", {"model": "org/small", "prompt": [5, stored], "max_tokens": 1})):
            refused = await client.ask("POST", path, given)
            assert 400 <= refused.status < 500 and b"token ids of 0 to" in refused.body

    serve_on(seeing, tmp_path, images=reader)(body)
