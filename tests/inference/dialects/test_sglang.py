"""SGLang's dialect against a server that answers as SGLang's documentation says, over a real model; SGLang itself does not run on a CPU."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from offbeat.chat.shaping import Shaping
from offbeat.errors import DeadlineError, EngineError, RefusedError
from offbeat.inference.client import EngineClient, EngineSession
from offbeat.inference.dialects.sglang import SGLangDialect
from offbeat.inference.sampling import Draws, Sampling
from offbeat.model.load import load_causal_lm
from offbeat.model.peft_io import Adapter, write_adapter
from offbeat.weights.protocol import Manifest
from small_run import build_small_model
from support.sglang_server import SGLangServer, serve_sglang

CANARY = (13, 14, 15, 5, 6, 7, 0)
PROMPT = (13, 14, 15)
LONG = Sampling(50)
Body = Callable[[EngineClient, SGLangServer], Awaitable[None]]


NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""What a server may have been started with otherwise, and every request names."""


def using(engine_url: str, body: Body) -> None:
    async def main() -> None:
        async with serve_sglang(engine_url) as (server, url), EngineSession() as http:
            await body(EngineClient("engine 0", url, http.session, dialect=SGLangDialect()), server)

    asyncio.run(main())


@torch.inference_mode()
def reference_logprobs(folder: str, tokens: tuple[int, ...]) -> list[float]:
    """Log-probability of each token after the first, by Hugging Face's own modules."""
    logits = load_causal_lm(folder, attention="sdpa")(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
    return logits[:-1].log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1).tolist()


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = build_small_model(tmp_path_factory.mktemp("newer"), seed=2)
    logprobs = reference_logprobs(folder, CANARY)
    return Manifest(5, folder, "unknown to SGLang", CANARY, tuple(logprobs))


def test_samples_have_tokens_logprobs_and_a_version_each(start_engine, model_dir: str) -> None:
    async def body(client: EngineClient, server: SGLangServer) -> None:
        await client.check(timeout_s=60)
        sampling = Sampling(6, temperature=0.5, top_p=0.9, stop=("?",), seed=3)
        samples = await client.generate(PROMPT, sampling, n=3, timeout_s=60)
        for sample in samples:
            assert 1 <= len(sample.token_ids) <= 6 and set(sample.versions) == {3}
        plain = (await client.generate(PROMPT, Sampling(6), n=1, timeout_s=60))[0]
        assert plain.logprobs == pytest.approx(reference_logprobs(model_dir, PROMPT + plain.token_ids)[len(PROMPT) - 1 :], abs=1e-4)
        asked = [body["sampling_params"] for body in server.bodies("/generate")][1:]
        await client.generate(PROMPT, Sampling(1, seed=3, first_sample=32), n=2, timeout_s=60)
        assert [body["sampling_params"]["sampling_seed"] for body in server.bodies("/generate")[-2:]] == [35, 36]
        assert asked[0] == NEUTRAL | {
            "max_new_tokens": 6, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "stop": ["?"], "sampling_seed": 3}
        assert sorted(params.get("sampling_seed", 0) for params in asked) == [0, 3, 4, 5]
        assert (await client.health(timeout_s=60))["version"] == 3

    using(start_engine(version=3)[1], body)


def test_stop_tokens_and_the_likeliest_tokens_are_asked_for_only_where_they_are_wanted(start_engine) -> None:
    async def body(client: EngineClient, server: SGLangServer) -> None:
        await client.generate(PROMPT, Sampling(2), n=1, timeout_s=60)
        sampling = Sampling(30, stop_token_ids=(5, 6), ignore_eos=True, top_logprobs=3)
        (sample,) = await client.generate(PROMPT, sampling, n=1, timeout_s=60)
        plain, asked = server.bodies("/generate")
        assert not {"stop_token_ids", "ignore_eos"} & plain["sampling_params"].keys() and "top_logprobs_num" not in plain
        assert asked["sampling_params"]["stop_token_ids"] == [5, 6] and asked["sampling_params"]["ignore_eos"]
        assert (sample.token_ids[-1] in (5, 6)) == (sample.finish_reason == "stop")
        assert all(len(row) == 3 and row[0][1] >= row[2][1] for row in sample.top_logprobs)

    using(start_engine(version=3)[1], body)


def test_scores_are_read_and_targets_refused(start_engine, model_dir: str) -> None:
    async def body(client: EngineClient, server: SGLangServer) -> None:
        score = await client.score(CANARY, top_k=2, timeout_s=60)
        assert score.logprobs[1:] == pytest.approx(reference_logprobs(model_dir, CANARY), abs=1e-4) and math.isnan(score.logprobs[0])
        assert score.version == 3 and [len(row) for row in score.top] == [0, 2, 2, 2, 2, 2, 2]
        assert (await client.score(CANARY, timeout_s=60)).top == ()
        with pytest.raises(RefusedError, match="SGLang cannot score other targets at each position"):
            await client.score((1, 2), targets=((), (3,)), timeout_s=60)
        with pytest.raises(RefusedError, match="SGLang cannot draw alternatives to the tokens of a prompt"):
            await client.score((1, 2), draws=Draws(1, 1.0, 0), timeout_s=60)

    using(start_engine(version=3)[1], body)


@pytest.mark.parametrize("interrupt", ["recompute", "keep", "drain"])
def test_a_switch_in_the_middle_of_samples_shows_in_the_versions_of_their_tokens(start_engine, newer: Manifest, interrupt) -> None:
    async def body(client: EngineClient, server: SGLangServer) -> None:
        await client.generate(PROMPT, Sampling(1), n=1, timeout_s=60)
        running = asyncio.gather(*(client.generate(PROMPT, LONG, n=1, timeout_s=60) for _ in range(8)))
        await asyncio.sleep(0.02)
        await client.stage(newer, timeout_s=60)
        await client.switch(newer, interrupt=interrupt, timeout_s=60)
        proof = await client.prove(CANARY, timeout_s=60)
        assert (proof.version, proof.fingerprint) == (5, None)
        assert fmean(proof.canary_logprobs) == pytest.approx(fmean(newer.canary_logprobs), abs=1e-4)
        for (sample,) in await running:
            assert set(sample.versions) <= {-1, 5} and list(sample.versions) == sorted(sample.versions)
            assert interrupt != "drain" or len(set(sample.versions)) == 1
        (update,) = server.bodies("/update_weights_from_disk")
        assert update["weight_version"] == "5" and update["flush_cache"] == (interrupt != "keep")
        modes = {"recompute": [{"mode": "retract"}], "keep": [{"mode": "in_place"}], "drain": []}
        assert server.bodies("/pause_generation") == modes[interrupt]
        assert len(server.bodies("/continue_generation")) == len(modes[interrupt])
        # No prefix that the old weights computed is looked up under the new.
        assert [body.get("extra_key") for body in server.bodies("/generate")] == [None] * 9 + ["v5"]

    using(start_engine(version=-1)[1], body)


def test_generation_goes_on_after_an_update_that_is_refused_or_late(start_engine, newer: Manifest, tmp_path: Path) -> None:
    async def body(client: EngineClient, server: SGLangServer) -> None:
        with pytest.raises(RefusedError, match="holds no model.safetensors"):
            await client.switch(replace(newer, folder=str(tmp_path)), interrupt="recompute", timeout_s=60)
        assert set((await client.generate(PROMPT, Sampling(3), n=1, timeout_s=60))[0].versions) == {0}

        late = asyncio.Event()
        server.before_update = late.wait
        with pytest.raises(DeadlineError, match="switch on engine 0"):
            await client.switch(newer, interrupt="recompute", timeout_s=0.5)
        assert set((await client.generate(PROMPT, Sampling(3), n=1, timeout_s=60))[0].versions) == {0}
        assert (await client.prove(CANARY, timeout_s=60)).version == 0
        late.set()

    using(start_engine(version=0)[1], body)


def make_adapter(folder: str) -> Adapter:
    """An adapter of rank 2 on every linear layer, always the same, that moves every logit."""
    model = load_causal_lm(folder)
    generator = torch.Generator().manual_seed(0)
    pairs: dict[str, tuple[Tensor, Tensor]] = {
        name: (torch.randn(2, module.in_features, generator=generator), torch.randn(module.out_features, 2, generator=generator))
        for name, module in model.named_modules() if name.endswith("_proj") and isinstance(module, torch.nn.Linear)}
    return Adapter(2, 1.0, pairs)


def test_adapters_are_loaded_once_used_by_name_and_forgotten(start_engine, model_dir: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "alice")
    write_adapter(make_adapter(model_dir), tmp_path / "alice", base_model=model_dir, dropout=0.0)

    async def body(client: EngineClient, server: SGLangServer) -> None:
        for _ in range(2):
            await client.load_adapter("alice@7", folder, timeout_s=60)
        with pytest.raises(RefusedError, match="already exists"):
            await client.load_adapter("alice@7", str(tmp_path), timeout_s=60)
        (sample,) = await client.generate(PROMPT, Sampling(3), n=1, timeout_s=60, adapter="alice@7")
        assert set(sample.versions) == {7} and server.bodies("/generate")[-1]["lora_path"] == "alice@7"
        proof, base = [await client.prove(CANARY, timeout_s=60, adapter=adapter) for adapter in ("alice@7", "")]
        assert (proof.version, base.version) == (7, 0)
        moved = [abs(one - other) for one, other in zip(proof.canary_logprobs, base.canary_logprobs, strict=True)]
        assert max(moved) > 0.05, "of one token; in their mean, moves up and down may cancel"
        for _ in range(2):
            await client.unload_adapter("alice@7", timeout_s=60)
        with pytest.raises(RefusedError, match="not loaded: alice@7"):
            await client.generate(PROMPT, Sampling(3), n=1, timeout_s=60, adapter="alice@7")

    using(start_engine(version=0)[1], body)


def test_a_server_that_does_not_tell_versions_apart_is_refused(start_engine) -> None:
    async def body(client: EngineClient, server: SGLangServer) -> None:
        server.drops = ("weight_versions",)
        with pytest.raises(EngineError, match=r"without weight_versions, by which versions .* takes SGLang 0.5.23 or later"):
            await client.check(timeout_s=60)

    using(start_engine()[1], body)


def test_versions_with_gaps_and_a_canary_scored_in_part_are_errors(start_engine, newer: Manifest) -> None:
    async def body(client: EngineClient, server: SGLangServer) -> None:
        class Broken:
            name = "engine 0"

            async def call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
                return {"text": "", "meta_info": {
                    "output_token_logprobs": [[-1.0, 3, None]], "finish_reason": {"type": "stop"}, "weight_version": "1",
                    "weight_versions": [{"version": "1", "start": 1, "end": 2}], "input_token_logprobs": [[None, 3, None]]}}

            async def fetch(self, path: str, body: object, read: Callable[[bytes], Any]) -> Any:
                return read(msgspec.json.encode(await self.call("POST", path, body)))

        with pytest.raises(EngineError, match="with gaps"):
            await SGLangDialect().generate(Broken(), PROMPT, Sampling(3), n=1, adapter="")
        with pytest.raises(EngineError, match="scored 0 tokens of a canary of 7"):
            await SGLangDialect().prove(Broken(), CANARY, adapter="")
        with pytest.raises(EngineError, match="set weights.channel to disk"):
            await client.stage(replace(newer, broadcast="127.0.0.1:1"), timeout_s=60)

    using(start_engine()[1], body)


@pytest.mark.parametrize(("sampling", "told"), [
    (Sampling(2, scaled_logprobs=True, shaping=Shaping(presence_penalty=1.0)), "of logits as presence_penalty left them"),
    (Sampling(2, shaping=Shaping(bad_words=("no",))), "SGLang has no bad_words")])
def test_shaping_that_sglang_cannot_do_is_refused(sampling: Sampling, told: str) -> None:
    async def main() -> None:
        async with EngineSession() as http:
            await EngineClient("engine 0", "http://127.0.0.1:9", http.session, dialect=SGLangDialect()).generate(
                PROMPT, sampling, n=1, timeout_s=60)

    with pytest.raises(RefusedError, match=told):
        asyncio.run(main())
