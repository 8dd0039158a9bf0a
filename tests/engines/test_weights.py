"""Whole weights, into every engine, under running requests: which tokens are whose, and what is refused."""

import asyncio
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest
import torch
from safetensors.torch import save_file

from contract import CANARY, Engine, Models
from offbeat.errors import EngineError, RefusedError
from offbeat.inference.client import EngineClient
from offbeat.inference.sampling import Sample, Sampling
from offbeat.model.fingerprint import fingerprint
from offbeat.model.hf_io import read_safetensors
from offbeat.sync.weight_broadcast import WeightBroadcast
from offbeat.weights.protocol import Interrupt, Manifest

pytestmark = pytest.mark.timeout(400)  # the first test of a kind starts the servers
PROMPT = (13, 14, 15, 5, 6)
LONG_PROMPT = PROMPT * 40
TIMEOUT_S = 60.0


def gaps(sample: Sample, expected: list[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(sample.logprobs, expected, strict=True)]


async def switched_in_mid_stream(engine: Engine, client: EngineClient, folder: str, *, interrupt: Interrupt) -> list[Sample]:
    """Samples that were running when the engine switched."""
    calls = await engine.sampling(*(
        partial(client.generate, (*PROMPT, n), Sampling(400, ignore_eos=True), n=8, timeout_s=TIMEOUT_S) for n in range(7, 11)))
    await engine.publish(client, folder, interrupt=interrupt)
    return [sample for call in calls for sample in await call]


def test_tokens_before_a_switch_are_the_old_weights_and_those_after_it_the_new(engine: Engine, models: Models) -> None:
    # With tied heads: vLLM for CPUs goes on with the old head after every other way of loading.
    check_switch(engine.serve(models.folder(0)), models, models.folder(1))


def test_a_switch_with_untied_heads(untied: Engine, models: Models) -> None:
    check_switch(untied.serve(models.folder(0, tied=False)), models, models.folder(1, tied=False), interrupt="keep")


def check_switch(engine: Engine, models: Models, folder: str, *, interrupt: Interrupt = "recompute") -> None:
    old, new, before = models.reference(engine.folder), models.reference(folder), engine.version
    samples = engine.run(lambda client: switched_in_mid_stream(engine, client, folder, interrupt=interrupt))
    crossed = 0
    for index, sample in enumerate(samples):
        prompt = (*PROMPT, 7 + index // 8)
        num_old = sample.versions.count(before)
        assert sample.versions == (before,) * num_old + (engine.version,) * (len(sample.versions) - num_old)
        assert max(gaps(sample, old.logprobs(prompt, sample.token_ids))[:num_old], default=0.0) < 1e-4
        if interrupt == "recompute":  # with the old cache, tokens after the switch are neither's
            assert max(gaps(sample, new.logprobs(prompt, sample.token_ids))[num_old:], default=0.0) < 1e-4
        crossed += 0 < num_old < len(sample.versions)
    assert crossed, "no sample was running at the switch"
    (sample,) = engine.run(lambda client: client.generate(PROMPT, Sampling(20), n=1, timeout_s=TIMEOUT_S))
    assert max(gaps(sample, new.logprobs(PROMPT, sample.token_ids))) < 1e-4
    proof = engine.run(lambda client: client.prove(CANARY, timeout_s=TIMEOUT_S))
    assert proof.version == engine.version
    assert abs(fmean(proof.canary_logprobs) - new.score(CANARY)) < 1e-4


def test_weights_by_broadcast_are_switched_to_like_those_of_a_folder(engine: Engine, models: Models, tmp_path: Path) -> None:
    engine.serve(models.folder(0))
    new = models.reference(models.folder(1))
    state = {name: tensor.clone() for name, tensor in read_safetensors(models.folder(1))}
    offer = WeightBroadcast(state, host="127.0.0.1", num_receivers=1, timeout_s=TIMEOUT_S, write_folder=lambda _state: None)
    try:
        engine.run(lambda client: engine.publish(client, models.folder(1), folder=str(tmp_path / "nowhere"), broadcast=offer.address))
    finally:
        offer.close()
    (sample,) = engine.run(lambda client: client.generate(PROMPT, Sampling(20), n=1, timeout_s=TIMEOUT_S))
    assert set(sample.versions) == {engine.version}
    assert max(gaps(sample, new.logprobs(PROMPT, sample.token_ids))) < 1e-4


def test_a_broadcast_that_was_refused_can_be_offered_again(engine: Engine, models: Models, tmp_path: Path) -> None:
    engine.serve(models.folder(0))
    state = {name: tensor.clone() for name, tensor in read_safetensors(models.folder(1))}
    wrong = {name: tensor[:-1] for name, tensor in state.items()}
    version = engine.next_version  # of both: nobody has seen tokens of the first
    for tensors, error in ((wrong, "another model|shape"), (state, "")):
        offer = WeightBroadcast(tensors, host="127.0.0.1", num_receivers=1, timeout_s=TIMEOUT_S, write_folder=lambda _state: None)
        manifest = Manifest(version, str(tmp_path / "nowhere"), "", CANARY, (), offer.address)
        try:
            with pytest.raises(EngineError, match=error) if error else nullcontext():
                engine.run(lambda client, manifest=manifest: client.stage(manifest, timeout_s=TIMEOUT_S))
        finally:
            offer.close()
    engine.run(lambda client: client.switch(manifest, interrupt="recompute", timeout_s=TIMEOUT_S))
    engine.folder, engine.version, engine.next_version = models.folder(1), version, version + 1
    (sample,) = engine.run(lambda client: client.generate(PROMPT, Sampling(20), n=1, timeout_s=TIMEOUT_S))
    assert max(gaps(sample, models.reference(models.folder(1)).logprobs(PROMPT, sample.token_ids))) < 1e-4


def test_a_drain_lets_running_requests_finish_and_later_ones_wait(engine: Engine, models: Models) -> None:
    engine.serve(models.folder(0))
    old, new, before = models.reference(models.folder(0)), models.reference(models.folder(1)), engine.version

    async def body(client: EngineClient) -> tuple[Sample, Sample]:
        (early,) = await engine.sampling(
            lambda: client.generate(PROMPT, Sampling(300, seed=3, ignore_eos=True), n=8, timeout_s=TIMEOUT_S))
        switch = asyncio.create_task(engine.publish(client, models.folder(1), interrupt="drain"))
        await asyncio.sleep(0.1)
        late = asyncio.create_task(client.generate(PROMPT, Sampling(10), n=1, timeout_s=TIMEOUT_S))
        await switch
        return max(await early, key=lambda sample: len(sample.token_ids)), (await late)[0]

    early, late = engine.run(body)
    assert set(early.versions) == {before}
    assert max(gaps(early, old.logprobs(PROMPT, early.token_ids))) < 1e-4
    if set(late.versions) == {engine.version}:
        assert max(gaps(late, new.logprobs(PROMPT, late.token_ids))) < 1e-4
    else:  # it slipped in before the drain began
        assert set(late.versions) == {before}


def test_no_prefix_of_the_old_weights_is_used_again(engine: Engine, models: Models) -> None:
    engine.serve(models.folder(0))
    for seed in (1, 0):
        # Twice: the first fills the cache of prefixes.
        samples = [
            engine.run(lambda client: client.generate(LONG_PROMPT, Sampling(4), n=1, timeout_s=TIMEOUT_S))[0] for _ in range(2)]
        engine.serve(models.folder(seed))
        samples += engine.run(lambda client: client.generate(LONG_PROMPT, Sampling(4), n=1, timeout_s=TIMEOUT_S))
        for sample, reference in zip(samples, [1 - seed, 1 - seed, seed], strict=True):
            expected = models.reference(models.folder(reference)).logprobs(LONG_PROMPT, sample.token_ids)
            assert max(gaps(sample, expected)) < 1e-4


def test_the_live_version_again_is_no_change_and_an_unstaged_one_is_refused(engine: Engine, models: Models) -> None:
    engine.serve(models.folder(1)).serve(models.folder(0))
    live = Manifest(engine.version, models.folder(0), "", CANARY, ())

    async def body(client: EngineClient) -> None:
        await client.stage(live, timeout_s=TIMEOUT_S)
        await client.switch(live, interrupt="recompute", timeout_s=TIMEOUT_S)
        with pytest.raises(RefusedError, match="version 999 is not staged"):
            await client.switch(Manifest(999, "", "", (), ()), interrupt="recompute", timeout_s=TIMEOUT_S)

    engine.run(body)


def test_a_number_that_a_resumed_run_uses_again_brings_its_own_weights(engine: Engine, models: Models, tmp_path: Path) -> None:
    # Of the lost timeline: one version live, and a later one staged.
    engine.serve(models.folder(1)).serve(models.folder(0))
    old, new = models.reference(models.folder(0)), models.reference(models.folder(1))
    lost, again = (shutil.copytree(models.folder(seed), tmp_path / f"v-{seed}") for seed in (0, 1))

    async def body(client: EngineClient) -> None:
        await client.stage(Manifest(engine.version + 1, str(lost), "lost", CANARY, ()), timeout_s=TIMEOUT_S)
        for version in (engine.version, engine.version + 1):
            manifest = Manifest(version, str(again), "new", CANARY, ())
            await client.stage(manifest, timeout_s=TIMEOUT_S)
            await client.switch(manifest, interrupt="recompute", timeout_s=TIMEOUT_S)
            (sample,) = await client.generate(PROMPT, Sampling(20), n=1, timeout_s=TIMEOUT_S)
            assert set(sample.versions) == {version}
            assert max(gaps(sample, new.logprobs(PROMPT, sample.token_ids))) < 1e-4
            assert max(gaps(sample, old.logprobs(PROMPT, sample.token_ids))) > 1e-2

    engine.run(body)
    engine.folder, engine.version, engine.next_version = models.folder(1), engine.version + 1, engine.next_version + 1


def test_an_engine_shows_the_fingerprint_of_what_it_was_given_and_proves_it_ahead_of_what_waits(engine: Engine, models: Models) -> None:
    engine.serve(models.folder(1)).serve(models.folder(0))
    told = fingerprint(
        (name, tensor.contiguous().view(-1).view(torch.uint8).numpy()) for name, tensor in read_safetensors(models.folder(0)))

    async def body(client: EngineClient) -> None:
        sampling = Sampling(300, ignore_eos=True)
        waiting = [asyncio.create_task(client.generate(PROMPT, sampling, n=8, timeout_s=TIMEOUT_S)) for _ in range(24)]
        await asyncio.sleep(0.3)
        proof = await client.prove(CANARY, timeout_s=TIMEOUT_S)
        assert sum(call.done() for call in waiting) < len(waiting) // 2, "the proof waited for most of the others"
        assert (proof.version, proof.fingerprint, proof.live) == (engine.version, told, True)
        assert proof.canary_logprobs == pytest.approx(models.reference(models.folder(0)).logprobs(CANARY[:1], CANARY[1:]), abs=1e-4)
        await asyncio.gather(*waiting)

    engine.run(body)


def test_a_folder_that_is_not_this_model_is_refused_and_the_live_weights_go_on(engine: Engine, models: Models, tmp_path: Path) -> None:
    reference = models.reference(engine.serve(models.folder(0)).folder)
    cut = shutil.copytree(models.folder(1), tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-4096])
    for folder in (tmp_path, cut, Path(models.adapter(0))):
        with pytest.raises(EngineError, match=str(folder)):
            engine.run(lambda client, folder=folder: client.stage(Manifest(900, str(folder), "", (), ()), timeout_s=TIMEOUT_S))
    (sample,) = engine.run(lambda client: client.generate(PROMPT, Sampling(10), n=1, timeout_s=TIMEOUT_S))
    assert set(sample.versions) == {engine.version}
    assert max(gaps(sample, reference.logprobs(PROMPT, sample.token_ids))) < 1e-4


def test_vllm_refuses_to_keep_caches_that_new_requests_would_find(engine: Engine, models: Models) -> None:
    if engine.kind == "embedded":
        pytest.skip("it has no cache of prefixes")
    before, other = engine.version, models.folder(int(engine.folder == models.folder(0)))
    with pytest.raises(RefusedError, match="--no-enable-prefix-caching"):
        engine.run(lambda client: engine.publish(client, other, interrupt="keep"))
    assert engine.run(lambda client: client.health(timeout_s=TIMEOUT_S))["version"] == before


def half_readable(model: str, folder: Path) -> str:
    """Write a model in two files, of which the second turns out to be broken only when it is read; layers have parts in both."""
    shutil.copytree(model, folder)
    (folder / "model.safetensors").unlink()
    tensors = dict(read_safetensors(model))
    first = {name: tensor for name, tensor in tensors.items() if "q_proj" in name or "gate_proj" in name}
    save_file(first, folder / "model-1.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name not in first}, folder / "model-2.safetensors")
    data = (folder / "model-2.safetensors").read_bytes()
    (folder / "model-2.safetensors").write_bytes(data.replace(b'"F32"', b'"F16"', 1))
    return str(folder)


def test_a_load_that_fails_half_way_serves_nobody_until_the_next(untied: Engine, models: Models, tmp_path: Path) -> None:
    if untied.kind == "embedded":
        pytest.skip("it loads beside the live weights")
    untied.serve(models.folder(0, tied=False))
    broken = half_readable(models.folder(1, tied=False), tmp_path / "broken")

    async def body(client: EngineClient) -> None:
        (running,) = await untied.sampling(lambda: client.generate(PROMPT, Sampling(480, ignore_eos=True), n=16, timeout_s=TIMEOUT_S))
        with pytest.raises(EngineError, match="deserializing header"):
            await untied.publish(client, broken)
        with pytest.raises(EngineError, match="abort"):
            await running
        with pytest.raises(EngineError, match="nothing can be sampled before another one is switched to"):
            await client.health(timeout_s=TIMEOUT_S)

    untied.run(body)
    untied.serve(models.folder(1, tied=False))
    (sample,) = untied.run(lambda client: client.generate(PROMPT, Sampling(10), n=1, timeout_s=TIMEOUT_S))
    assert max(gaps(sample, models.reference(models.folder(1, tied=False)).logprobs(PROMPT, sample.token_ids))) < 1e-4
