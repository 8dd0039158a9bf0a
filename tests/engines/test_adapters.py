"""Adapters in every engine, beside each other and beside the model alone, against PEFT's own modules."""

import asyncio
import shutil
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest

from contract import CANARY, MAX_ADAPTERS, MAX_RANK, WITH_VLLM, Engine, Models, run_in_vllm
from offbeat.errors import EngineError, RefusedError
from offbeat.inference.client import EngineClient
from offbeat.inference.sampling import Sample, Sampling

pytestmark = pytest.mark.timeout(400)  # the first test of a kind starts the servers
PROMPT = (13, 14, 15, 5, 6)
TIMEOUT_S = 60.0


def largest_gap(sample: Sample, expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(sample.logprobs, expected, strict=True))


async def with_adapters(client: EngineClient, folders: dict[str, str], num_tokens: int) -> dict[str, list[Sample]]:
    """Samples by each adapter, and by the model alone, all decoded together; the adapters are unloaded then."""
    for name, folder in folders.items():
        await client.load_adapter(name, folder, timeout_s=TIMEOUT_S)
    names = [*folders, ""]
    answers = await asyncio.gather(*(
        client.generate(PROMPT, Sampling(num_tokens), n=3, timeout_s=TIMEOUT_S, adapter=name) for name in names))
    for name in folders:
        await client.unload_adapter(name, timeout_s=TIMEOUT_S)
    return dict(zip(names, answers, strict=True))


def test_adapters_in_one_batch_are_pefts_and_the_model_alone_is_unchanged(engine: Engine, models: Models) -> None:
    engine.serve(models.folder())
    folders = {"alice@3": models.adapter(1), "bob@12": models.adapter(2, rank=8)}
    answers = engine.run(lambda client: with_adapters(client, folders, 40))
    for name, samples in answers.items():
        reference = models.reference(models.folder(), folders.get(name, ""))
        for sample in samples:
            assert largest_gap(sample, reference.logprobs(PROMPT, sample.token_ids)) < 1e-4
            assert set(sample.versions) == {{"alice@3": 3, "bob@12": 12, "": engine.version}[name]}


def test_an_adapter_proves_itself(engine: Engine, models: Models) -> None:
    engine.serve(models.folder())

    async def body(client: EngineClient) -> None:
        await client.load_adapter("alice@5", models.adapter(1), timeout_s=TIMEOUT_S)
        proof = await client.prove(CANARY, timeout_s=TIMEOUT_S, adapter="alice@5")
        assert proof.version == 5
        assert abs(fmean(proof.canary_logprobs) - models.reference(models.folder(), models.adapter(1)).score(CANARY)) < 1e-4
        await client.unload_adapter("alice@5", timeout_s=TIMEOUT_S)

    engine.run(body)


def test_the_same_name_and_folder_again_is_no_change_and_another_folder_is_refused(engine: Engine, models: Models) -> None:
    # Never loaded in place: vLLM's requests in flight would change adapters in mid-stream, and cached prefixes would be the old one's.
    engine.serve(models.folder())

    async def body(client: EngineClient) -> Sample:
        await client.load_adapter("alice@6", models.adapter(1), timeout_s=TIMEOUT_S)
        running = asyncio.create_task(client.generate(PROMPT, Sampling(100), n=1, timeout_s=TIMEOUT_S, adapter="alice@6"))
        await client.load_adapter("alice@6", models.adapter(1), timeout_s=TIMEOUT_S)
        with pytest.raises(RefusedError, match="alice@6"):
            await client.load_adapter("alice@6", models.adapter(2), timeout_s=TIMEOUT_S)
        (sample,) = await running
        await client.unload_adapter("alice@6", timeout_s=TIMEOUT_S)
        return sample

    sample = engine.run(body)
    assert largest_gap(sample, models.reference(models.folder(), models.adapter(1)).logprobs(PROMPT, sample.token_ids)) < 1e-4


def test_an_unloaded_adapter_is_unknown_but_what_runs_on_it_finishes(engine: Engine, models: Models) -> None:
    engine.serve(models.folder())

    async def body(client: EngineClient) -> Sample:
        await client.load_adapter("alice@7", models.adapter(1), timeout_s=TIMEOUT_S)
        (running,) = await engine.sampling(
            lambda: client.generate(PROMPT, Sampling(400, ignore_eos=True), n=1, timeout_s=TIMEOUT_S, adapter="alice@7"))
        for _ in range(2):  # unknown the second time, which is no error
            await client.unload_adapter("alice@7", timeout_s=TIMEOUT_S)
        with pytest.raises(RefusedError, match="alice@7"):
            await client.generate(PROMPT, Sampling(5), n=1, timeout_s=TIMEOUT_S, adapter="alice@7")
        return (await running)[0]

    sample = engine.run(body)
    assert largest_gap(sample, models.reference(models.folder(), models.adapter(1)).logprobs(PROMPT, sample.token_ids)) < 1e-4


def test_a_folder_that_is_no_adapter_of_this_engine_is_refused_and_disturbs_nobody(
    engine: Engine, models: Models, tmp_path: Path,
) -> None:
    reference = models.reference(engine.serve(models.folder()).folder)
    garbage = tmp_path / "garbage"
    garbage.mkdir()
    (garbage / "adapter_config.json").write_bytes((Path(models.adapter(1)) / "adapter_config.json").read_bytes())
    (garbage / "adapter_model.safetensors").write_bytes(b"no tensors in here")

    async def body(client: EngineClient) -> Sample:
        running = asyncio.create_task(client.generate(PROMPT, Sampling(100), n=1, timeout_s=TIMEOUT_S))
        for folder in (str(tmp_path / "nowhere"), str(tmp_path), str(garbage), models.adapter(3, rank=2 * MAX_RANK)):
            with pytest.raises(RefusedError):
                await client.load_adapter("mallory@1", folder, timeout_s=TIMEOUT_S)
        with pytest.raises(EngineError, match="mallory@1"):
            await client.generate(PROMPT, Sampling(5), n=1, timeout_s=TIMEOUT_S, adapter="mallory@1")
        return (await running)[0]

    sample = engine.run(body)
    assert largest_gap(sample, reference.logprobs(PROMPT, sample.token_ids)) < 1e-4


def test_as_many_adapters_as_an_engine_takes_at_once_and_more_one_after_the_other(engine: Engine, models: Models) -> None:
    # vLLM reads an adapter that made room from its folder again, so folders stay.
    engine.serve(models.folder())
    names = {f"tenant{index}@1": models.adapter(index) for index in range(MAX_ADAPTERS + 2)}

    async def body(client: EngineClient) -> None:
        for names_now in (list(names)[:MAX_ADAPTERS], list(names)[2:], list(names)[:MAX_ADAPTERS]):
            await client.call("GET", "/health")
            answers = await with_adapters(client, {name: names[name] for name in names_now}, 10)
            for name in names_now:
                reference = models.reference(models.folder(), names[name])
                assert max(largest_gap(s, reference.logprobs(PROMPT, s.token_ids)) for s in answers[name]) < 1e-4

    engine.run(body)


def test_the_model_alone_is_unchanged_beside_an_adapter_once_every_place_was_used(engine: Engine, models: Models) -> None:
    # vLLM for CPUs takes "no adapter" for the last place, in which there is nothing at first.
    engine.serve(models.folder())
    reference = models.reference(models.folder())

    async def body(client: EngineClient) -> list[Sample]:
        await with_adapters(client, {f"full{index}@1": models.adapter(index) for index in range(MAX_ADAPTERS)}, 3)
        answers = await with_adapters(client, {"alice@8": models.adapter(1)}, 40)
        return [*answers[""], *await client.generate(PROMPT, Sampling(40), n=1, timeout_s=TIMEOUT_S)]

    for sample in engine.run(body):
        assert largest_gap(sample, reference.logprobs(PROMPT, sample.token_ids)) < 1e-4


def test_requests_to_an_adapter_and_to_the_model_alone_go_on_rightly_after_a_switch(
    engine: Engine, models: Models, tmp_path: Path,
) -> None:
    # To the same weights: an adapter's tokens are stamped with its version, so that nothing tells those before from those after.
    engine.serve(models.folder())
    copy = str(shutil.copytree(models.folder(), tmp_path / "copy"))
    names = {"": "", **{f"crossing{index}@1": models.adapter(index) for index in range(MAX_ADAPTERS)}}

    async def body(client: EngineClient) -> list[list[Sample]]:
        for name, folder in names.items():
            if name:
                await client.load_adapter(name, folder, timeout_s=TIMEOUT_S)
        calls = await engine.sampling(*(
            partial(client.generate, PROMPT, Sampling(300, ignore_eos=True), n=2, timeout_s=TIMEOUT_S, adapter=name) for name in names))
        for _ in range(2):
            await engine.publish(client, models.folder(), folder=copy)
        answers = [await call for call in calls]
        for name in names:
            if name:
                await client.unload_adapter(name, timeout_s=TIMEOUT_S)
        return answers

    before = engine.version
    answers = dict(zip(names, engine.run(body), strict=True))
    for name, samples in answers.items():
        reference = models.reference(models.folder(), names[name])
        assert max(largest_gap(sample, reference.logprobs(PROMPT, sample.token_ids)) for sample in samples) < 1e-4, name
    assert any(len(set(sample.versions)) > 1 for sample in answers[""]), f"none was running when {before} was replaced"


@pytest.mark.skipif(not WITH_VLLM, reason="make test-vllm runs it")
def test_vllm_as_it_is_mixes_adapters_into_requests_without_one_and_does_not_as_it_is_started() -> None:
    program = """
import vllm_plain

for have in (lambda: None, vllm_plain.skip_plain_rows):
    have()
    try:
        vllm_plain.check_plain_rows()
        print("apart")
    except RuntimeError as exc:
        print(exc)
"""
    *_, mixes, apart = run_in_vllm("-c", program)
    assert mixes.startswith("this vLLM mixes adapters into requests without one") and apart == "apart"
