"""What clients ask of models is carried out in order, once, together with others' work, and always comes to an outcome."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from offbeat.data.batch import Batch
from offbeat.errors import DataError, StorageError, WorkerError
from offbeat.service.errors import LostError, OverLimitError, TooLargeError
from offbeat.service.limits import Limits
from offbeat.service.models import Model
from offbeat.service.service import ServiceSettings
from offbeat.service.types import Caller, CheckpointSaved, Failed, Outcome, PassDone, Pending, StepDone, TrainingData
from small_service import ALICE, BOB, STEP, Client, SmallCluster, training_data


async def losses(model: Client, seed: int = 9) -> np.ndarray:
    """What tells two states of a model apart."""
    (outcome,) = await model.both(model.learn(training_data(seed), forward_only=True))
    assert isinstance(outcome, PassDone), outcome
    return outcome.losses



def test_requests_run_in_the_order_of_their_numbers_whatever_order_they_arrive_in(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path, settings=ServiceSettings(patience_s=30)) as running:
            straight, shuffled = await running.model(), await running.model()
            await straight.both(*(ask for seed in range(2) for ask in (straight.learn(training_data(seed)), straight.step())))
            requests = [(1, None, 0), (2, STEP, 0), (3, None, 1), (4, STEP, 0)]
            ids = []
            for seq, params, seed in (requests[i] for i in (3, 1, 2, 0)):
                shuffled.seq = seq - 1
                ids.append(await (shuffled.step(params) if params else shuffled.learn(training_data(seed))))
            for request_id in ids:
                await running.outcome(request_id)
            straight.seq = shuffled.seq = 4
            np.testing.assert_array_equal(await losses(straight), await losses(shuffled))

    cluster.run(body)


def test_a_request_that_is_sent_again_is_carried_out_once(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path) as running:
            once, often = await running.model(), await running.model()
            await once.both(once.learn(training_data(1)), once.step())
            first = await often.learn(training_data(1))
            often.seq = 0
            assert await often.learn(training_data(1)) == first
            before = await running.outcome(first)
            often.seq = 0
            assert await often.learn(training_data(1)) == first and await running.outcome(first) is before
            await often.both(often.step())
            np.testing.assert_array_equal(await losses(once), await losses(often))

    cluster.run(body)


def test_a_refused_or_missing_number_holds_nobody_up(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path, settings=ServiceSettings(patience_s=1000)) as running:
            model = await running.model()
            model.seq = 1
            request = await model.learn(training_data(1), forward_only=True)
            assert await running.service.retrieve(ALICE, request, timeout_s=0.2) == Pending()
            running.service.skip(BOB, model.model_id, 1)
            running.service.skip(ALICE, "nonsense", 1)
            assert isinstance(await running.service.retrieve(ALICE, request, timeout_s=0.1), Pending)
            running.service.skip(ALICE, model.model_id, 1)
            assert isinstance(await running.outcome(request), PassDone)
        async with cluster.open(tmp_path, settings=ServiceSettings(patience_s=0.3)) as running:
            model.open, model.seq = running, 7
            assert len(await losses(model)) == 3

    cluster.run(body)


def test_a_job_cut_into_slices_has_the_gradient_of_one_pass(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        outcomes: list[tuple[list[Outcome], np.ndarray]] = []
        for number, budget in enumerate((10_000, 20)):
            (tmp_path / str(number)).mkdir()
            async with cluster.open(tmp_path / str(number), settings=ServiceSettings(max_tokens_per_pass=budget)) as running:
                model = await running.model()
                outcomes.append((await model.both(model.learn(training_data(5, num=8)), model.step()), await losses(model)))
        (whole, after_whole), (cut, after_cut) = outcomes
        assert isinstance(whole[0], PassDone) and isinstance(cut[0], PassDone)
        np.testing.assert_allclose(np.stack(whole[0].logprobs), np.stack(cut[0].logprobs), atol=1e-5)
        assert isinstance(whole[1], StepDone) and isinstance(cut[1], StepDone)
        assert whole[1].metrics["grad_norm"] == pytest.approx(cut[1].metrics["grad_norm"], rel=1e-4)
        np.testing.assert_allclose(after_whole, after_cut, rtol=1e-4)

    cluster.run(body)


def test_what_one_owner_does_leaves_no_trace_in_anothers_model(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path) as running:
            model, other = await running.model(), await running.model(BOB)
            await model.both(model.learn(training_data(1)), model.step())
            before = await losses(model)
            for seed in range(3):
                await other.both(other.learn(training_data(seed)), other.step(replace(STEP, weight_decay=0.5)))
            huge = training_data(1, weight=3e38)
            out_of_vocabulary = TrainingData(replace(huge.batch, targets=np.full(24, 10_000, np.int32)), huge.layouts)
            too_long = training_data(1, num=1, length=65)
            refused, long, _, left_out = await other.both(
                other.learn(out_of_vocabulary), other.learn(too_long), other.learn(huge), other.step())
            assert isinstance(refused, Failed) and refused.category == "user" and "outside the vocabulary" in refused.message
            assert isinstance(long, Failed) and "65 tokens, more than the 64" in long.message
            assert isinstance(left_out, Failed) and "is not finite; the step was left out" in left_out.message
            assert np.isfinite(await losses(other)).all()
            np.testing.assert_array_equal(await losses(model), before)

    cluster.run(body)


def test_many_models_share_passes_and_each_gets_what_it_gets_alone(
    cluster: SmallCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path) as running:
            models, poison = [await running.model(caller) for caller in (ALICE, BOB, ALICE, BOB)], await running.model(BOB)
            calls = note_calls(cluster, monkeypatch)
            ids = [(model, await ask) for seed, model in enumerate(models) for ask in (model.learn(training_data(seed)), model.step())]
            ids += [(poison, await ask) for ask in (poison.learn(training_data(1, weight=3e38)), poison.step())]
            outcomes = [await model.outcome(request_id) for model, request_id in ids]
            assert calls == ["run_pass", "optim_step"]
            assert [isinstance(outcome, Failed) for outcome in outcomes] == [False] * 9 + [True]
            together = [await losses(model) for model in models]
            for seed, model in enumerate(models):
                alone = await running.model(model.caller)
                await alone.both(alone.learn(training_data(seed)), alone.step())
                np.testing.assert_allclose(await losses(alone), together[seed], rtol=1e-4)

    cluster.run(body)


def note_calls(cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the calls that trainers get from now on."""
    calls: list[str] = []

    def noted(name: str, call: Callable[..., object], *given: object, **options: object) -> object:
        calls.append(name)
        return call(*given, **options)

    for name in ("run_pass", "optim_step"):
        monkeypatch.setattr(cluster.adapters, name, partial(noted, name, getattr(cluster.adapters, name)))
    return calls


def test_an_owner_with_too_much_under_way_is_told_to_wait_and_others_are_not(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path, limits=Limits(max_queued_tokens=50), settings=ServiceSettings(patience_s=100)) as running:
            model, other = await running.model(), await running.model(BOB)
            with pytest.raises(TooLargeError, match="the request costs 64 tokens, but you may have at most 50"):
                await model.learn(training_data(1, num=8))
            running.service.skip(ALICE, model.model_id, 1)
            model.seq = 2
            late = await model.learn(training_data(1))
            model.seq = 3
            with pytest.raises(OverLimitError, match="you have 24 tokens under way"):
                await model.learn(training_data(2, num=4))
            assert (await losses(other)).shape == (3,)
            model.seq = 1
            first = await model.learn(training_data(2, num=4))  # the others wait for it
            assert isinstance(await running.outcome(first), PassDone) and isinstance(await running.outcome(late), PassDone)
            assert running.usage.of("alice").queued_tokens == 0

    cluster.run(body)


def kill_a_rank() -> None:
    children = psutil.Process().children(recursive=True)
    ranks = [child for child in children if "TrainWorker rank 1" in " ".join(child.cmdline())]
    assert ranks, "the cluster has two ranks"
    for rank in ranks:  # a cluster of other tests may be going down
        rank.kill()
    psutil.wait_procs(ranks, timeout=20)


@pytest.mark.drill
def test_a_client_that_waits_for_one_request_hears_in_its_failure_what_is_lost(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path) as running:
            model = await running.model()
            await model.both(model.learn(training_data(1)), model.step(), model.save("kept"))
            for seed in range(4):
                await model.both(model.learn(training_data(seed)), model.step())
            kill_a_rank()
            (only,) = await model.both(model.learn(training_data(5)))
            assert isinstance(only, Failed) and "went back to its last checkpoint (step 1, where it had come to step 5)" in only.message
            assert isinstance((await model.both(model.learn(training_data(5))))[0], PassDone), "once"

    cluster.run(body)


def test_a_number_is_used_once_whatever_has_become_of_its_answer(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path, settings=ServiceSettings(patience_s=0.1)) as running:
            model, futures = await running.model(), running.service._futures
            learned, stepped = await model.learn(training_data(1)), await model.step()
            await running.outcome(stepped)
            model.seq = 3
            before = await losses(model)  # number 4; 3 comes late
            futures._clock = lambda: time.time() + 4000
            await futures.sweep()
            for request_id in (learned, stepped):
                with pytest.raises(LostError, match=f"request {request_id} was carried out, and its answer is not kept any more; a number"):
                    await running.service.retrieve(ALICE, request_id, timeout_s=1)
            model.seq = 1
            with pytest.raises(LostError, match="was carried out"):
                await model.step()
            late = await model.learn(training_data(9), forward_only=True)
            assert isinstance(await running.outcome(late), PassDone), "it had not been carried out"
            model.seq = 4
            np.testing.assert_array_equal(await losses(model), before)
        async with cluster.open(tmp_path) as running:
            model.open, model.seq = running, 1
            with pytest.raises(LostError, match="was carried out"):
                await model.step()
            model.seq = 5
            np.testing.assert_array_equal(await losses(model), before)

    cluster.run(body)


@pytest.mark.drill
def test_when_a_train_rank_dies_its_work_fails_once_and_goes_on_from_the_last_checkpoint(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path) as running:
            model, clean = await running.model(), await running.model(BOB)
            await model.both(model.learn(training_data(1)), model.step())
            (saved,) = await model.both(model.save("kept"))
            assert isinstance(saved, CheckpointSaved)
            at_checkpoint, untouched = await losses(model), await losses(clean)
            await model.both(model.learn(training_data(2)), model.step())
            kill_a_rank()
            ids = [await ask for ask in (model.learn(training_data(3)), model.step(), model.save("lie"), model.sampler("lie"))]
            failed = [await running.outcome(request_id) for request_id in ids]
            assert all(isinstance(outcome, Failed) and outcome.category == "server" for outcome in failed)
            first, *others = [outcome.message for outcome in failed if isinstance(outcome, Failed)]
            told = f"the model {model.model_id} went back to its last checkpoint (step 1, where it had come to step 2) because the trainers"
            assert first.startswith(f"the trainers failed while they worked on this request; {told} failed; steps and gradients since")
            assert all(message.startswith(told) for message in others) and "send it again" not in first
            np.testing.assert_array_equal(await losses(model), at_checkpoint)
            np.testing.assert_array_equal(await losses(clean), untouched)
            again = await model.both(model.learn(training_data(2)), model.step(), model.save("kept", overwrite=True))
            assert not any(isinstance(outcome, Failed) for outcome in again)
            assert running.service.status().trainers_alive and len(running.service.status().failures) == 4
            assert running.incidents.counts.trainer_restarts == 1 and running.incidents.counts.rank_deaths >= 1
            assert [incident.who for incident in running.incidents.last] == ["trainers"] * 2 and "rank 1" in running.incidents.last[1].text

    cluster.run(body)


def test_what_has_not_begun_when_the_service_closes_is_lost_and_its_client_hears_so(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path, settings=ServiceSettings(patience_s=100)) as running:
            model = await running.model()
            await model.both(model.learn(training_data(1)), model.step())
            done = await losses(model)
            model.seq += 1
            waiting = await model.learn(training_data(2))
            poll = asyncio.create_task(running.service.retrieve(ALICE, waiting, timeout_s=0.5))
        assert isinstance(await poll, Pending)
        async with cluster.open(tmp_path, settings=ServiceSettings(patience_s=100)) as running:
            with pytest.raises(LostError, match="as after a restart"):
                await running.service.retrieve(ALICE, waiting, timeout_s=1)
            model.open, model.seq = running, 3
            running.service.skip(ALICE, model.model_id, 4)
            model.seq = 5
            np.testing.assert_array_equal(await losses(model), done)  # it was saved

    cluster.run(body)


def test_the_order_of_datums_is_the_order_of_outputs(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path, settings=ServiceSettings(max_tokens_per_pass=30)) as running:
            model = await running.model()
            parts = [training_data(seed, num=1, length=4 + seed) for seed in range(6)]
            joined = TrainingData(
                Batch.concatenate([part.batch for part in parts]), tuple(layout for part in parts for layout in part.layouts))
            (all_of_them,) = await model.both(model.learn(joined, forward_only=True))
            assert isinstance(all_of_them, PassDone)
            for part, logprobs in zip(parts, all_of_them.logprobs, strict=True):
                (alone,) = await model.both(model.learn(part, forward_only=True))
                assert isinstance(alone, PassDone)
                np.testing.assert_allclose(alone.logprobs[0], logprobs, atol=1e-5)

    cluster.run(body)


def test_a_gradient_that_is_told_to_be_lost_is_lost(cluster: SmallCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database fails between two passes; what the first has gathered must not be in the next step."""
    async def body() -> None:
        async with cluster.open(tmp_path) as running:
            model, straight = await running.model(), await running.model()
            await model.both(model.learn(training_data(1)))

            async def full(*_args: object) -> None:
                raise StorageError("the database postgresql://secret/x is full")

            with monkeypatch.context() as patch:
                patch.setattr(running.service._models, "mark", full)
                (failed,) = await model.both(model.learn(training_data(2)))
            assert isinstance(failed, Failed) and failed.category == "server" and "secret" not in failed.message
            await model.both(model.learn(training_data(3)), model.step())
            await straight.both(straight.learn(training_data(3)), straight.step())
            np.testing.assert_allclose(await losses(model), await losses(straight), rtol=1e-5)

    cluster.run(body)


def test_what_one_model_breaks_in_a_shared_pass_is_not_told_to_others(
    cluster: SmallCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path) as running:
            models = [await running.model(caller) for caller in (ALICE, BOB)]

            async def broken(batches: Mapping[str, Batch], *, learn: bool) -> None:
                raise DataError(f"a datum of {min(batches)} is wrong")

            with monkeypatch.context() as patch:
                patch.setattr(cluster.adapters, "run_pass", broken)
                ids = [(model, await ask) for model in models for ask in (model.learn(training_data(1)), model.step())]
                failed = [await model.outcome(request_id) for model, request_id in ids]
            for outcome in failed:
                assert isinstance(outcome, Failed) and outcome.category == "server" and "datum" not in outcome.message

    cluster.run(body)


def test_a_model_that_cannot_enter_the_trainers_fails_alone_whatever_the_error(
    cluster: SmallCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path) as running:
            models = [await running.model(caller) for caller in (ALICE, BOB)]
            held = running.service._models.get(models[0].model_id)
            first, entered = await running.model(), asyncio.Event()
            run_pass, add = cluster.adapters.run_pass, cluster.adapters.add

            async def wait_and_learn(batches: Mapping[str, Batch], *, learn: bool) -> object:
                await entered.wait()
                return await run_pass(batches, learn=learn)

            async def broken(name: str, **spec: Any) -> None:
                if held is not None and name == held.adapter:
                    raise KeyError("of a library")
                await add(name, **spec)

            with monkeypatch.context() as patch:
                patch.setattr(cluster.adapters, "run_pass", wait_and_learn)
                patch.setattr(cluster.adapters, "add", broken)
                ids = [(first, await first.learn(training_data(1)))]
                # Both wait for the turn after the first model's, and enter the trainers in it.
                ids += [(model, await model.learn(training_data(1))) for model in models]
                entered.set()
                outcomes = [await model.outcome(request_id) for model, request_id in ids]
            assert [type(outcome) for outcome in outcomes] == [PassDone, Failed, PassDone]
            assert isinstance(outcomes[1], Failed) and outcomes[1].category == "server" and "library" not in outcomes[1].message
            assert isinstance((await models[0].both(models[0].learn(training_data(1))))[0], PassDone)

    cluster.run(body)


def test_many_requests_behind_gaps_cost_little(cluster: SmallCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path, settings=ServiceSettings(patience_s=0.5)) as running:
            model, calls = await running.model(), 0
            advance = running.service._training._advance

            def counting(its: Model) -> None:
                nonlocal calls
                calls += 1
                advance(its)

            monkeypatch.setattr(running.service._training, "_advance", counting)
            ids = []
            for _ in range(50):
                model.seq += 1
                ids.append(await model.step())
                await asyncio.sleep(0.002)
            for request_id in ids:
                assert isinstance(await running.outcome(request_id), StepDone)
            assert calls <= 3 * len(ids), "one timer, however many wait"

    cluster.run(body)


def test_an_error_of_any_kind_in_a_turn_is_the_outcome_of_its_requests(
    cluster: SmallCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path) as running:
            model = await running.model()

            async def fail(_batches: object, *, learn: bool) -> None:
                raise KeyError("of a library")

            with monkeypatch.context() as patch:
                patch.setattr(cluster.adapters, "run_pass", fail)
                [failed] = await model.both(model.learn(training_data(1)))
            assert isinstance(failed, Failed) and failed.category == "server"

    cluster.run(body)


@pytest.mark.parametrize("error", [WorkerError("no memory is left"), KeyError("of a library")])
def test_if_the_trainers_cannot_be_started_again_requests_fail_rather_than_wait(
    error: Exception, cluster: SmallCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        async with cluster.open(tmp_path) as running:
            model = await running.model()

            async def fail() -> None:
                raise error

            with monkeypatch.context() as patch:
                patch.setattr(cluster.adapters, "restart_trainers", fail)
                patch.setattr(type(cluster.adapters), "trainers_alive", False)
                failed = await model.both(model.learn(training_data(1)), model.save("one"))
            assert [outcome.category for outcome in failed if isinstance(outcome, Failed)] == ["server"] * 2

    cluster.run(body)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_many_clients_do_at_once_each_gets_what_it_gets_alone(cluster: SmallCluster, tmp_path: Path, seed: int) -> None:
    """Random requests of six models, sent in random order and slices, against the same requests of each model one by one."""
    rng = np.random.default_rng(seed)
    plans = [
        [str(what) for what in (rng.choice(["load", "learn"]), *rng.choice(["learn", "learn", "score", "step", "save", "sampler"], 7))]
        for _ in range(6)]

    def send(model: Client, plan: list[str], place: int) -> Awaitable[str]:
        match plan[place]:
            case "learn" | "score" as what:
                return model.learn(training_data(place, num=1 + place), forward_only=what == "score")
            case "step":
                return model.step()
            case "sampler":
                return model.sampler(number=place + 100 * plans.index(plan))
            case "load":
                return model.load(begun[model.caller])
            case _:
                return model.save("it", overwrite=True)

    async def play(model: Client, plan: list[str], *, shuffled: bool) -> list[Outcome]:
        """Outcomes in the order of the plan."""
        ids: dict[int, str] = {}
        for place in rng.permutation(len(plan)) if shuffled else range(len(plan)):
            model.seq = int(place)
            ids[int(place)] = await send(model, plan, int(place))
            if shuffled:
                await asyncio.sleep(float(rng.random()) * 0.02)
            else:
                await model.outcome(ids[int(place)])
        return [await model.outcome(ids[place]) for place in range(len(plan))]

    begun: dict[Caller, str] = {}

    async def body() -> None:
        together, alone = [], []
        for folder, budget, found in (("a", 30, together), ("b", 10_000, alone)):
            (tmp_path / folder).mkdir()
            settings = ServiceSettings(patience_s=60, max_tokens_per_pass=budget)
            async with cluster.open(tmp_path / folder, settings=settings) as running:
                models = [await running.model(Caller(f"owner {i % 3}")) for i in range(len(plans))]
                for caller in {model.caller for model in models}:
                    first = await running.model(caller)
                    await first.both(first.learn(training_data(9)), first.step(), first.save("it"))
                    begun[caller] = f"tinker://{first.model_id}/weights/it"
                if folder == "a":
                    found += await asyncio.gather(*(play(model, plan, shuffled=True) for model, plan in zip(models, plans, strict=True)))
                else:
                    found += [await play(model, plan, shuffled=False) for model, plan in zip(models, plans, strict=True)]
        for plan, ours, theirs in zip(plans, together, alone, strict=True):
            for what, one, other in zip(plan, ours, theirs, strict=True):
                assert type(one) is type(other), (what, one, other)
                if isinstance(one, PassDone):
                    np.testing.assert_allclose(one.losses, other.losses, rtol=2e-3)
                elif isinstance(one, Failed):
                    assert one.message == other.message

    cluster.run(body)
