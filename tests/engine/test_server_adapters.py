"""Adapters over HTTP: vLLM's endpoints and names, and what each refusal says."""

import asyncio
import contextlib
import json
from pathlib import Path
from statistics import fmean

import aiohttp
import pytest
import torch
from safetensors.torch import save_file

from offbeat.engine.options import EngineOptions
from offbeat.engine.server import EngineServer
from offbeat.inference.client import EngineClient, EngineSession
from offbeat.inference.sampling import Sampling
from offbeat.model.peft_io import read_adapter

RL = {"logprobs": 0, "return_token_ids": True, "ignore_eos": True}
PROMPT = [5, 9, 20, 3]
CODES = {400: "invalid_request", 404: "not_found", 429: "rate_limit_exceeded"}


@contextlib.contextmanager
def serving(folder: str, **options):
    server = EngineServer(EngineOptions(model=folder, **options))
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture
def url(model_folder):
    with serving(model_folder("qwen3"), max_adapters=2, max_adapter_rank=4) as url:
        yield url


def fetch(url: str, path: str, body: dict | None = None) -> tuple[int, dict]:
    """Status and answer of a POST with a body, or of a GET without."""

    async def call() -> tuple[int, dict]:
        async with aiohttp.ClientSession() as session:
            async with session.request("GET" if body is None else "POST", url + path, json=body) as response:
                return response.status, json.loads(await response.read())

    return asyncio.run(asyncio.wait_for(call(), 30))


def load(url: str, name: str, folder: str) -> tuple[int, dict]:
    return fetch(url, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})


def message(answer: tuple[int, dict]) -> tuple[int, str]:
    status, body = answer
    assert body["error"]["type"] == "invalid_request_error" and body["error"]["code"] == CODES[status]
    return status, body["error"]["message"]


def test_a_loaded_adapter_is_a_model(url, adapter_folder, reference, model_folder):
    folder, base = adapter_folder("qwen3", 0), Path(model_folder("qwen3")).name
    for name in ("a@1", "plain"):
        assert load(url, name, folder)[0] == 200
        assert load(url, name, folder)[0] == 200, "again is no change"
    assert [model["id"] for model in fetch(url, "/v1/models")[1]["data"]] == [base, "a@1", "plain"]
    own, theirs = reference("qwen3").merged(folder), reference("qwen3")
    for name, expected in {"a@1": own, "plain": own, "": theirs, base: theirs, None: theirs}.items():
        status, answer = fetch(url, "/v1/completions", {"prompt": PROMPT, "model": name, "max_tokens": 9, "seed": 1, **RL})
        (choice,) = answer["choices"]
        logprobs = expected.logprobs(PROMPT + choice["token_ids"])[len(PROMPT) - 1 :]
        assert status == 200 and answer["model"] == (name if expected is own else base)
        assert torch.allclose(torch.tensor(choice["logprobs"]["token_logprobs"]), logprobs, atol=1e-4)
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "seed": 1, "ignore_eos": True, "logprobs": True}
    assert fetch(url, "/v1/chat/completions", {**chat, "model": "a@1"})[1]["model"] == "a@1"


def test_an_adapter_that_is_not_loaded_is_answered_404(url, adapter_folder):
    load(url, "a@1", adapter_folder("qwen3", 0))
    fetch(url, "/v1/unload_lora_adapter", {"lora_name": "a@1"})
    for name in ("a@1", "b@1"):
        for body in ({"prompt": "a", "model": name}, {"prompt": "a", "model": name, "stream": True}):
            status, text = message(fetch(url, "/v1/completions", body))
            assert status == 404 and f"adapter '{name}' is not loaded in this engine; load it" in text
        assert fetch(url, "/v1/score", {"tokens": PROMPT, "adapter": name})[0] == 404
        assert fetch(url, f"/v1/weights/fingerprint?adapter={name}")[0] == 404
        assert fetch(url, "/v1/weights/prove", {"tokens": PROMPT, "adapter": name})[0] == 404
        assert fetch(url, "/v1/unload_lora_adapter", {"lora_name": name})[0] == 200, "unloading what is not there is no error"


@pytest.mark.parametrize(
    ("name", "folder", "text"),
    [
        ("", "fine", "1 to 200 characters"),
        ("BASE", "fine", "is the base model's name; give the adapter another"),
        ("held@1", "fine", "cannot become"),
        ("a@1", "nowhere", "nowhere is no adapter"),
        ("a@1", "large", "has rank 8; this engine takes at most max_adapter_rank = 4"),
        ("a@1", "foreign", "was trained on another model"),
        ("a@1", "strange", "is not a linear layer of this model's decoder"),
        ("a@1", "damaged", "cannot be read as safetensors"),
    ],
)
def test_what_cannot_be_loaded_is_answered_400_and_disturbs_nothing(name, folder, text, url, adapter_folder, model_folder, tmp_path):
    write_adapters(tmp_path, adapter_folder)
    load(url, "held@1", adapter_folder("qwen3", 0))
    name = Path(model_folder("qwen3")).name if name == "BASE" else name
    status, said = message(load(url, name, str(tmp_path / folder)))
    assert status == 400 and text in said and "\n" not in said
    assert [model["id"] for model in fetch(url, "/v1/models")[1]["data"]][1:] == ["held@1"]
    assert fetch(url, "/v1/completions", {"prompt": "a", "model": "held@1"})[0] == 200


def write_adapters(folder: Path, adapter_folder) -> None:
    """Good and bad ones, under the names of the test."""
    for name, source in {"fine": adapter_folder("qwen3", 0), "large": adapter_folder("qwen3", 0, rank=8)}.items():
        (folder / name).symlink_to(source)
    for name, (old, new) in {"strange": ("layers.1", "layers.9"), "foreign": ("q_proj", "o_proj"), "damaged": ("", "")}.items():
        (folder / name).mkdir()
        (folder / name / "adapter_config.json").write_bytes((folder / "fine" / "adapter_config.json").read_bytes())
        renamed = {key.replace(old, new): tensor for key, tensor in read_adapter(folder / "fine").named_tensors().items()}
        save_file({key: tensor.contiguous() for key, tensor in renamed.items()}, folder / name / "adapter_model.safetensors")
    (folder / "damaged" / "adapter_model.safetensors").write_bytes(b"not safetensors")


def test_an_engine_full_of_adapters_in_use_is_answered_429(url, adapter_folder):
    async def scenario() -> tuple[int, dict]:
        async with aiohttp.ClientSession() as session:

            async def post(path: str, body: dict) -> tuple[int, dict]:
                async with session.post(url + path, json=body) as response:
                    return response.status, json.loads(await response.read())

            await post("/pause", {})
            for name in ("a@1", "b@1"):
                await post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": adapter_folder("qwen3", 0)})
            waiting = [asyncio.create_task(post("/v1/completions", {"prompt": "a", "model": name})) for name in ("a@1", "b@1")]
            while (await (await session.get(url + "/health")).json())["waiting"] < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            refused = await post("/v1/load_lora_adapter", {"lora_name": "c@1", "lora_path": adapter_folder("qwen3", 0)})
            await post("/resume", {})
            assert [(await task)[0] for task in waiting] == [200, 200]
            return refused

    status, text = message(asyncio.run(asyncio.wait_for(scenario(), 120)))
    assert status == 429 and "requests use all 2 adapters" in text
    assert load(url, "c@1", adapter_folder("qwen3", 0))[0] == 200
    metrics = asyncio.run(text_of(url + "/metrics"))
    assert "offbeat_engine_adapters 2.0" in metrics and "offbeat_engine_adapter_evictions_total 1.0" in metrics


async def text_of(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return await response.text()


def test_the_client_loads_samples_and_proves(url, adapter_folder, reference):
    folder = adapter_folder("qwen3", 1)
    canary = (5, 9, 20, 3, 8)

    async def scenario():
        async with EngineSession() as http:
            client = EngineClient("e0", url, http.session)
            await client.load_adapter("a@7", folder, timeout_s=60)
            samples = await client.generate((5, 9), Sampling(max_new_tokens=6), n=2, timeout_s=60, adapter="a@7")
            proof = await client.prove(canary, timeout_s=60, adapter="a@7")
            await client.unload_adapter("a@7", timeout_s=60)
            return samples, proof

    samples, proof = asyncio.run(asyncio.wait_for(scenario(), 120))
    assert [sample.versions for sample in samples] == [(7,) * len(sample.versions) for sample in samples]
    expected = reference("qwen3").merged(folder).logprobs(list(canary)).mean().item()
    assert (proof.version, proof.fingerprint) == (7, read_adapter(folder).fingerprint())
    assert fmean(proof.canary_logprobs) == pytest.approx(expected, abs=1e-4)
