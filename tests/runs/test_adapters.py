"""Many adapters on real ranks and engines: what one does leaves no trace in another, and what is sampled is what was trained."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from datum_samples import LOSSES_OF_ALL, make_datums
from offbeat.algorithms.adam import AdamParams
from offbeat.algorithms.experience import sft_batch
from offbeat.algorithms.objectives import CROSS_ENTROPY
from offbeat.data.batch import Batch
from offbeat.errors import ConfigError, DataError, ModelError, RefusedError, StorageError, WorkerError
from offbeat.inference.sampling import Sampling
from offbeat.model.peft_io import read_adapter
from offbeat.runs.adapters import Adapters, open_adapters
from offbeat.telemetry.record import SilentRecord
from small_run import small_config
from waiting import until

PROMPT = (13, 14, 15)
STEP = AdamParams(lr=1e-2, weight_decay=0.1, clip_norm=1.0)
GREEDY = Sampling(6, temperature=0.0)
SETTINGS = {
    "model__lora__rank": "4", "inference__num_engines": "2", "train__num_ranks": "2", "inference__probe_interval_s": "0.3"}



Run = Callable[[Callable[[Adapters], Awaitable[None]]], None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_dir: str) -> Iterator[Run]:
    """Runs a test's body on one set of ranks and engines."""
    config = small_config(tmp_path_factory.mktemp("adapters"), model_dir, **SETTINGS)
    (config.run_dir / "logs").mkdir(parents=True)

    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        adapters = runner.run(stack.enter_async_context(open_adapters(config, SilentRecord(config.run_dir))))

        async def clean(body: Callable[[Adapters], Awaitable[None]]) -> None:
            try:
                await body(adapters)
            finally:
                for name in adapters.names:
                    await adapters.remove(name)

        yield lambda body: runner.run(clean(body))
        runner.run(stack.aclose())


def batch(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    return sft_batch([(rng.integers(5, 15, 8).astype(np.int32), np.arange(8) >= 3) for _ in range(3)])


async def train_step(adapters: Adapters, batches: dict[str, Batch]) -> dict[str, float]:
    """Learn from the batches, and take a step; norms of the gradients."""
    await adapters.forward_backward(batches)
    return await adapters.optim_step(dict.fromkeys(batches, STEP))


def saved(folder: Path) -> dict[str, np.ndarray]:
    """Weights and moments; the step count stands beside them."""
    (path,) = folder.glob("*.safetensors")
    with safe_open(path, framework="np") as file:
        return {"step": np.array(int(file.metadata()["step"])), **{name: file.get_tensor(name) for name in file.keys()}}  # noqa: SIM118


def test_adapters_train_together_and_sample_what_each_has_published(run: Run, model_dir: str) -> None:
    @torch.inference_mode()
    def reference(adapter: str, tokens: tuple[int, ...]) -> list[float]:
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir), adapter)
        logits = model(input_ids=torch.tensor([tokens])).logits[0].float()
        return logits[:-1].log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1).tolist()

    async def body(adapters: Adapters) -> None:
        for seed, name in enumerate(("alice", "bob", "idle")):
            await adapters.add(name, seed=seed, rank=2 + seed % 2)
        for name in adapters.names:
            await adapters.publish(name)
        (base,) = await adapters.sample("idle", PROMPT, GREEDY)
        for step in range(3):
            norms = await train_step(adapters, {"alice": batch(step), "bob": batch(10 + step)})
            assert norms["alice"] > 0 < norms["bob"]
        scores = await adapters.forward({"bob": batch(10), "alice": batch(0)})
        alone = await adapters.forward({"alice": batch(0)})
        np.testing.assert_allclose(scores["alice"].logprobs, alone["alice"].logprobs, atol=1e-5)
        reports = await asyncio.gather(*(adapters.publish(name) for name in ("alice", "bob")))
        assert all(report.serving for report in reports)
        samples = {name: (await adapters.sample(name, PROMPT, Sampling(6, seed=1)))[0] for name in ("alice", "bob")}
        for name, sample in samples.items():
            assert set(sample.versions) == {1}
            folder = adapters.fleet.config.weights_dir / name / "v00000001"
            expected = reference(str(folder), PROMPT + sample.token_ids)
            assert sample.logprobs == pytest.approx(expected[len(PROMPT) - 1 :], abs=1e-4)
        (old,) = await adapters.sample("alice", PROMPT, GREEDY, version=0)
        assert old.token_ids == base.token_ids and set(old.versions) == {0}
        await adapters.remove("bob")
        with pytest.raises(ConfigError, match="there is no adapter 'bob', only alice, idle"):
            await adapters.sample("bob", PROMPT, GREEDY)

    run(body)


def test_an_adapter_that_is_left_alone_keeps_every_bit_and_goes_on_exactly(run: Run, tmp_path: Path) -> None:
    async def body(adapters: Adapters) -> None:
        for seed, name in enumerate(("alice", "bob")):
            await adapters.add(name, seed=seed)
            await train_step(adapters, {name: batch(seed)})
        await adapters.save("bob", tmp_path / "before")
        for step in range(3):
            await train_step(adapters, {"alice": batch(step)})
        await adapters.publish("alice")
        await adapters.sample("alice", PROMPT, GREEDY)
        for _ in range(2):
            await adapters.publish("bob")
        newest = int(next(iter((await adapters.sample("bob", PROMPT, GREEDY))[0].versions)))
        (old,) = await adapters.sample("bob", PROMPT, GREEDY, version=newest - 1)
        assert set(old.versions) == {newest - 1}
        await adapters.save("bob", tmp_path / "after")
        before, after = saved(tmp_path / "before"), saved(tmp_path / "after")
        assert before.keys() == after.keys() and len(before) > 3
        assert all(before[name].tobytes() == after[name].tobytes() for name in before)
        await train_step(adapters, {"bob": batch(5)})
        await adapters.save("bob", tmp_path / "once")
        await adapters.load("bob", tmp_path / "before")
        await train_step(adapters, {"bob": batch(5), "alice": batch(6)})
        await adapters.save("bob", tmp_path / "again")
        once, again = saved(tmp_path / "once"), saved(tmp_path / "again")
        for name in once:
            np.testing.assert_allclose(again[name], once[name], atol=1e-5)

    run(body)


def test_adapters_with_other_losses_share_a_pass_of_datums(run: Run) -> None:
    batches = {"alice": make_datums(6, seed=1), "bob": make_datums(5, seed=2, losses=LOSSES_OF_ALL[2:]), "carol": make_datums(2).select([])}

    async def body(adapters: Adapters) -> None:
        for seed, name in enumerate(batches):
            await adapters.add(name, seed=seed)
        for run_pass in (adapters.forward, adapters.forward_backward):
            together = await run_pass(batches)
            assert together.keys() == batches.keys() and len(together["carol"].losses) == 0
            for name in ("alice", "bob"):
                alone = (await adapters.forward({name: batches[name]}))[name]
                np.testing.assert_allclose(together[name].logprobs, alone.logprobs, atol=1e-5)
                np.testing.assert_allclose(together[name].losses, alone.losses, rtol=1e-4, atol=1e-4)
        assert await adapters.forward_backward({}) == {}
        await adapters.discard(["bob"])
        norms = await adapters.optim_step(dict.fromkeys(batches, STEP))
        assert norms["alice"] > 0 == norms["bob"] == norms["carol"]
        assert [adapters.step_of(name) for name in batches] == [1, 1, 1]
        assert (await adapters.forward(batches))["alice"].losses.sum() != together["alice"].losses.sum()

    run(body)


def test_an_adapter_is_written_without_being_published_and_restored_with_a_fresh_optimizer(run: Run, tmp_path: Path) -> None:
    async def body(adapters: Adapters) -> None:
        await adapters.add("alice", train_attn=False)
        await train_step(adapters, {"alice": batch(0)})
        first = await adapters.write("alice", tmp_path / "first")
        assert set(read_adapter(tmp_path / "first").pairs) == {f"model.layers.0.mlp.{side}_proj" for side in ("gate", "up", "down")}
        with pytest.raises(RefusedError, match="no adapter 'alice'"):
            await adapters.sample("alice", PROMPT, GREEDY)
        assert (first.adapter, first.folder) == ("alice", str(tmp_path / "first"))
        assert first.fingerprint == read_adapter(first.folder).fingerprint()
        with pytest.raises(StorageError, match="a version is written once"):
            await adapters.write("alice", tmp_path / "first")
        later = await adapters.write("alice", tmp_path / "later", version=first.version + 10)
        await adapters.fleet.publisher.publish(later)
        assert set((await adapters.sample("alice", PROMPT, GREEDY))[0].versions) == {later.version}
        await adapters.publish("alice")
        assert set((await adapters.sample("alice", PROMPT, GREEDY))[0].versions) == {later.version + 1}
        await adapters.save("alice", tmp_path / "saved")
        await adapters.load("alice", tmp_path / "saved", optimizer=False)
        assert adapters.step_of("alice") == 0
        await adapters.load("alice", tmp_path / "saved")
        assert adapters.step_of("alice") == 1
        assert (await adapters.write("alice", tmp_path / "same")).fingerprint == first.fingerprint

    run(body)


@pytest.mark.drill
def test_trainers_that_die_are_restarted_and_adapters_go_on_from_what_was_saved(run: Run, tmp_path: Path) -> None:
    datums = make_datums(6, losses=(CROSS_ENTROPY,), dense=True)

    async def body(adapters: Adapters) -> None:
        for name in ("alice", "bob"):
            await adapters.add(name)
            await train_step(adapters, {name: batch(0)})
        await adapters.publish("alice")
        await adapters.save("alice", tmp_path / "alice")
        await adapters.forward_backward({"alice": datums})
        await adapters.optim_step({"alice": STEP})
        expected = (await adapters.forward({"alice": datums}))["alice"]
        victim = adapters._ranks._workers[1].pid
        os.kill(victim, signal.SIGSTOP)  # so that it dies in the middle of the call
        call = asyncio.create_task(adapters.forward_backward({"alice": datums}))
        await asyncio.sleep(0.2)
        assert adapters.trainers_alive and not call.done()
        os.kill(victim, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(WorkerError, match=r"rank 1 \(process \d+\) was killed by SIGKILL in forward_backward"):
            await call
        with pytest.raises(WorkerError, match="optim_step was not begun: the train ranks have failed before"):
            await adapters.optim_step({"alice": STEP})
        assert time.monotonic() - start < 60 and not adapters.trainers_alive and "rank 1" in adapters._ranks.dead
        assert len(await adapters.sample("alice", PROMPT, GREEDY)) == 1
        await asyncio.gather(adapters.restart_trainers(), adapters.restart_trainers())
        assert adapters.trainers_alive
        with pytest.raises(ConfigError, match="the adapter 'alice' was lost with the trainers"):
            await adapters.forward_backward({"alice": datums})
        await adapters.load("alice", tmp_path / "alice")
        assert adapters.step_of("alice") == 1
        await adapters.forward_backward({"alice": datums})
        await adapters.optim_step({"alice": STEP})
        again = (await adapters.forward({"alice": datums}))["alice"]
        np.testing.assert_allclose(again.losses, expected.losses, rtol=1e-5)
        np.testing.assert_allclose(again.logprobs, expected.logprobs, atol=1e-5)
        await adapters.add("bob")
        await adapters.publish("alice")
        assert set((await adapters.sample("alice", PROMPT, GREEDY))[0].versions) == {adapters._versions["alice"].newest}

    run(body)


def test_what_is_wrong_with_one_adapter_is_one_sentence_and_disturbs_nobody(run: Run, tmp_path: Path) -> None:
    async def body(adapters: Adapters) -> None:
        await adapters.add("alice")
        with pytest.raises(ConfigError, match="there is an adapter 'alice' already"):
            await adapters.add("alice")
        with pytest.raises(ModelError, match=r"an adapter's rank must be in 1..4, got 5; choose another, or raise model.lora.rank"):
            await adapters.add("bob", rank=5)
        with pytest.raises(ConfigError, match="an adapter's name is"):
            await adapters.add("../bob")
        with pytest.raises(ModelError, match="is no adapter"):
            await adapters.add("bob", folder=tmp_path)
        with pytest.raises(ConfigError, match="there is no adapter 'bob'"):
            await adapters.forward_backward({"bob": batch(1)})
        for bad, reason in ((1 + 10_000, "outside the vocabulary"), (-1, "outside the vocabulary")):
            with pytest.raises(DataError, match=f"adapter 'alice' cannot be used: a token is {reason}"):
                await adapters.forward_backward({"alice": replace(batch(1), tokens=np.full(24, bad, np.int32))})
        datums = make_datums(3)
        for changes, reason in (({"targets": np.full_like(datums.targets, 9999)}, "a target"), ({"tokens": -1 - datums.tokens}, "a token")):
            with pytest.raises(DataError, match=f"adapter 'alice' cannot be used: {reason} is outside the vocabulary"):
                await adapters.forward_backward({"alice": replace(datums, **changes)})
        with pytest.raises(DataError, match="adapter 'alice' cannot be used: a datum has .* tokens, more than the 64"):
            await adapters.forward_backward({"alice": make_datums(1, prompt_len=80)})
        with pytest.raises(ConfigError, match="there is no adapter 'bob'"):
            await adapters.forward_backward({"alice": datums, "bob": datums})
        with pytest.raises(ModelError, match="would train no layer"):
            await adapters.add("bob", train_attn=False, train_mlp=False)
        with pytest.raises(ConfigError, match="there is no adapter 'bob'"):
            await adapters.discard(["bob"])
        with pytest.raises(DataError, match="a token is outside the vocabulary of 54; use the tokenizer of org/small"):
            adapters.limits.check_batch(replace(batch(1), tokens=np.full(24, -1, np.int32)), model="org/small")
        seen = replace(batch(1), tokens=np.full(24, 2**30, np.int32))
        replace(adapters.limits, reads_images=True).check_batch(seen)
        with pytest.raises(DataError, match="a token is outside the vocabulary"):
            adapters.limits.check_batch(seen)
        assert await adapters.optim_step({"alice": STEP}) == {"alice": 0.0}
        long = sft_batch([(np.full(65, 5, np.int32), np.arange(65) >= 3)])
        with pytest.raises(DataError, match="adapter 'alice' cannot be used: a datum has 65 tokens, more than the 64"):
            await adapters.forward_backward({"alice": long})
        with pytest.raises(RefusedError, match="no adapter 'alice'"):
            await adapters.sample("alice", PROMPT, GREEDY)
        assert (await train_step(adapters, {"alice": batch(1)}))["alice"] > 0
        await adapters.publish("alice")
        with pytest.raises(RefusedError):
            await adapters.sample("alice", (9999,), GREEDY)
        assert len(await adapters.sample("alice", PROMPT, GREEDY, n=2)) == 2

    run(body)


@pytest.mark.parametrize(("changes", "sentence"), [
    ({}, r"model\.lora\.rank must be at least 1 to train many adapters, got 0"),
    ({"model__lora__rank": "4", "cluster__take_turns": "true"}, r"cluster\.take_turns must be false to train many adapters, got true"),
    ({"model__lora__rank": "4", "model__lora__dropout": "0.1"}, r"model\.lora\.dropout must be 0 to train many adapters, got 0\.1"),
    ({"model__lora__rank": "4", "train__router_aux_loss_coefficient": "0.01"},
     r"train\.router_aux_loss_coefficient must be 0 to train many adapters, got 0\.01; the loss of one would depend on the tokens"),
    ({"model__lora__rank": "4", "train__num_ranks": "2", "train__parallel__shard": "2"},
     r"train\.parallel\.shard must be 1 to train many adapters, got 2; each rank .* holds the whole model, so leave it out"),
])
def test_adapters_of_a_rank_without_dropout_on_whole_models_are_needed(changes: dict[str, str], sentence: str) -> None:
    async def main() -> None:
        async with open_adapters(small_config(Path("unused"), **changes), SilentRecord(Path("unused"))):
            pass

    with pytest.raises(ConfigError, match=sentence):
        asyncio.run(main())


@pytest.mark.drill
def test_adapters_go_on_while_an_engine_is_killed_and_comes_back(run: Run) -> None:
    async def body(adapters: Adapters) -> None:
        await adapters.add("alice")
        await adapters.publish("alice")
        (before,) = await adapters.sample("alice", PROMPT, GREEDY)
        serving = adapters.fleet
        await serving.engines.workers[0].stop(timeout_s=0.1)
        for _ in range(4):
            assert (await adapters.sample("alice", PROMPT, GREEDY))[0].token_ids == before.token_ids
        await until(lambda: len(serving.pool.healthy) == 2, timeout_s=60)
        await train_step(adapters, {"alice": batch(1)})
        report = await adapters.publish("alice")
        assert sorted(report.serving) == ["engine 0", "engine 1"]

    run(body)


def test_the_base_model_is_sampled_and_scored_beside_adapters_before_anything_is_published(run: Run, model_dir: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir)

    @torch.inference_mode()
    def reference(tokens: tuple[int, ...]) -> list[float]:
        logits = model(input_ids=torch.tensor([tokens])).logits[0].float().log_softmax(-1)
        return logits[:-1].gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1).tolist()

    async def body(adapters: Adapters) -> None:
        dispatcher = adapters.fleet.dispatcher
        (sample,) = await dispatcher.generate(PROMPT, Sampling(6), n=1)
        assert list(sample.logprobs) == pytest.approx(reference(PROMPT + sample.token_ids)[len(PROMPT) - 1 :], abs=1e-4)
        assert list((await dispatcher.score(PROMPT)).logprobs[1:]) == pytest.approx(reference(PROMPT), abs=1e-4)
        await adapters.add("alice")
        await train_step(adapters, {"alice": batch(0)})
        await adapters.publish("alice")
        changed, base = await asyncio.gather(dispatcher.score(PROMPT, adapter="alice"), dispatcher.score(PROMPT))
        assert list(base.logprobs[1:]) == pytest.approx(reference(PROMPT), abs=1e-4)
        assert list(changed.logprobs[1:]) != pytest.approx(reference(PROMPT), abs=1e-4)

    run(body)
