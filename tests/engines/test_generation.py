"""What every engine must do with a request, whoever made it: tokens, log-probabilities, stops, seeds, aborts, errors, pauses."""

import asyncio
import urllib.error
import urllib.request
from dataclasses import replace
from functools import partial
from statistics import fmean

import numpy as np
import pytest
import torch

from contract import CANARY, Engine, Models
from offbeat.data.tokenizer import load_tokenizer
from offbeat.errors import DeadlineError, EngineError, RefusedError
from offbeat.inference.client import EngineClient
from offbeat.inference.sampling import Sample, Sampling
from waiting import until

pytestmark = pytest.mark.timeout(400)  # the first test of a kind starts the servers
PROMPT = (13, 14, 15, 5, 6)
TIMEOUT_S = 60.0


def generate(engine: Engine, sampling: Sampling, *, prompt: tuple[int, ...] = PROMPT, n: int = 1) -> list[Sample]:
    return engine.run(lambda client: client.generate(prompt, sampling, n=n, timeout_s=TIMEOUT_S))


def largest_gap(sample: Sample, expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(sample.logprobs, expected, strict=True))


def test_an_engine_passes_its_check_and_tells_its_version(engine: Engine, models: Models) -> None:
    engine.serve(models.folder())
    engine.run(lambda client: client.check(timeout_s=TIMEOUT_S))
    assert engine.run(lambda client: client.health(timeout_s=TIMEOUT_S))["version"] == engine.version


def test_log_probabilities_of_sampled_tokens_are_hugging_faces(engine: Engine, models: Models) -> None:
    reference = models.reference(engine.serve(models.folder()).folder)
    tokenizer = load_tokenizer(models.folder())
    samples = generate(engine, Sampling(40), n=4)
    assert len({sample.token_ids for sample in samples}) == 4
    for sample in samples:
        assert largest_gap(sample, reference.logprobs(PROMPT, sample.token_ids)) < 1e-4
        assert set(sample.versions) == {engine.version}
        assert sample.finish_reason == ("stop" if sample.token_ids[-1] == tokenizer.eos_token_id else "length")
        assert len(sample.token_ids) == 40 or sample.finish_reason == "stop"
        assert sample.text == tokenizer.decode([token for token in sample.token_ids if token != tokenizer.eos_token_id])


def test_temperature_zero_takes_the_likeliest_tokens(engine: Engine, models: Models) -> None:
    reference = models.reference(engine.serve(models.folder()).folder)
    sample, same = generate(engine, Sampling(20, temperature=0.0), n=2)
    assert sample.token_ids == same.token_ids
    for end, token in enumerate(sample.token_ids):
        assert reference.logits((*PROMPT, *sample.token_ids[:end]))[-1].argmax() == token
    assert largest_gap(sample, reference.logprobs(PROMPT, sample.token_ids)) < 1e-4


@pytest.mark.parametrize("sampling", [
    Sampling(12, temperature=0.7), Sampling(12, top_k=3), Sampling(12, top_p=0.6), Sampling(12, temperature=1.3, top_k=8, top_p=0.8)])
def test_log_probabilities_are_of_the_distribution_that_was_sampled(engine: Engine, models: Models, sampling: Sampling) -> None:
    # vLLM's default gives those of temperature 1, of all tokens.
    reference = models.reference(engine.serve(models.folder()).folder)
    (sample,) = generate(engine, sampling)
    for end, token in enumerate(sample.token_ids):
        logits = reference.logits((*PROMPT, *sample.token_ids[:end]))[-1] / sampling.temperature
        if sampling.top_k:
            logits[logits < logits.topk(sampling.top_k).values[-1]] = -torch.inf
        ordered, order = logits.softmax(-1).sort(descending=True)
        logits[order[ordered.cumsum(-1) - ordered >= sampling.top_p]] = -torch.inf
        assert abs(logits.log_softmax(-1)[token] - sample.logprobs[end]) < 1e-4


def test_a_stop_string_ends_a_sample_and_is_not_in_its_text(engine: Engine, models: Models) -> None:
    engine.serve(models.folder())
    (whole,) = generate(engine, Sampling(30, temperature=0.0))
    stop = whole.text[4]
    (sample,) = generate(engine, Sampling(30, temperature=0.0, stop=(stop,)))
    assert sample.finish_reason == "stop"
    assert sample.text == whole.text[: whole.text.index(stop)]
    assert sample.token_ids == whole.token_ids[: len(sample.token_ids)]
    assert len(sample.text) < len(sample.token_ids) + 1


def test_seeds_repeat_samples(engine: Engine, models: Models) -> None:
    engine.serve(models.folder())
    one, same, other = (generate(engine, Sampling(20, seed=seed), n=2) for seed in (7, 7, 70))
    assert [sample.token_ids for sample in one] == [sample.token_ids for sample in same]
    assert len({sample.token_ids for sample in (*one, *other)}) == 4  # also the two of one request


def test_closing_the_connection_aborts(engine: Engine, models: Models) -> None:
    engine.serve(models.folder())

    async def body(client: EngineClient) -> None:
        calls = await engine.sampling(*(
            partial(client.generate, (5, 6, n), Sampling(480), n=8, timeout_s=TIMEOUT_S) for n in range(7, 15)))
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        await until(lambda: engine.num_running() == 0, timeout_s=30)
        with pytest.raises(DeadlineError, match="generate on engine 0"):
            await client.generate(PROMPT, Sampling(480), n=32, timeout_s=0.05)

    engine.run(body)


@pytest.mark.parametrize("prompt", [(1, 2, 10**6), tuple([5] * 600)])
def test_a_wrong_request_is_refused_and_disturbs_nobody(engine: Engine, models: Models, prompt: tuple[int, ...]) -> None:
    reference = models.reference(engine.serve(models.folder()).folder)

    async def body(client: EngineClient) -> Sample:
        other = asyncio.create_task(client.generate(PROMPT, Sampling(100), n=1, timeout_s=TIMEOUT_S))
        with pytest.raises(RefusedError):
            await client.generate(prompt, Sampling(5), n=1, timeout_s=TIMEOUT_S)
        with pytest.raises(RefusedError, match="nobody@3"):
            await client.generate(PROMPT, Sampling(5), n=1, timeout_s=TIMEOUT_S, adapter="nobody@3")
        return (await other)[0]

    sample = engine.run(body)
    assert largest_gap(sample, reference.logprobs(PROMPT, sample.token_ids)) < 1e-4


def test_a_proof_beside_generation_is_right_and_disturbs_nobody(engine: Engine, models: Models) -> None:
    # vLLM pads a batch in which a token's log-probability was asked for; and those of whole prompts end it, with adapters on CPUs.
    reference = models.reference(engine.serve(models.folder()).folder)

    async def body(client: EngineClient) -> list[Sample]:
        calls = [asyncio.create_task(client.generate((5, n), Sampling(60), n=4, timeout_s=TIMEOUT_S)) for n in range(6, 12)]
        while not all(call.done() for call in calls):
            proof = await client.prove(CANARY, timeout_s=TIMEOUT_S)
            assert proof.version == engine.version
            assert abs(fmean(proof.canary_logprobs) - reference.score(CANARY)) < 1e-4
        return [sample for call in calls for sample in call.result()]

    samples = engine.run(body)
    assert any(sample.token_ids[-1] == 0 for sample in samples), "token 0, which is padded with, is sampled in this test"
    for index, sample in enumerate(samples):
        assert largest_gap(sample, reference.logprobs((5, 6 + index // 4), sample.token_ids)) < 1e-4


def test_nobody_gets_in_without_the_key(engine: Engine) -> None:
    paths = ["/v1/completions", "/v1/load_lora_adapter", "/v1/weights/stage", "/pause", "/resume"]
    paths += [] if engine.kind == "embedded" else ["/invocations", "/tokenize", "/collective_rpc", "/health", "/metrics", "/nothing"]
    for path in paths:
        for key in ("", "another"):
            asked = urllib.request.Request(
                engine.url + path, b"{}", {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {}))
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(asked, timeout=TIMEOUT_S)
            assert refused.value.code == 401 and b"this engine wants its key" in refused.value.read(), path


def test_a_run_that_publishes_whole_weights_has_the_engine_for_itself(engine: Engine) -> None:
    async def body(client: EngineClient) -> None:
        async def asks(owner: str) -> str:
            client._headers = client._headers | {"X-Offbeat-Owner": owner}
            try:
                await client.health(timeout_s=TIMEOUT_S)
                await client.generate((5, 6), Sampling(2), n=1, timeout_s=TIMEOUT_S)
            except EngineError as exc:
                return str(exc)
            return ""

        assert not await asks("a 1 exclusive") and not await asks("a 2 exclusive")
        assert "409: this engine is used by start 2 of the run a, and start 1 is an earlier one of it" in await asks("a 1 exclusive")
        assert "cannot be shared with the run b" in await asks("b 1 shared")
        assert not await asks("a 2 leaves") and not await asks("b 1 shared") and not await asks("b 1 leaves")

    engine.run(body)


def test_a_pause_is_told_and_can_be_ended(engine: Engine) -> None:
    async def body(client: EngineClient) -> None:
        assert not (await client.health(timeout_s=TIMEOUT_S))["paused"]
        await client.call("POST", "/pause?mode=keep", {"mode": "keep"})
        assert (await client.health(timeout_s=TIMEOUT_S))["paused"]
        await client.resume(timeout_s=TIMEOUT_S)
        assert not (await client.health(timeout_s=TIMEOUT_S))["paused"]
        assert len(await client.generate((5, 6), Sampling(3), n=1, timeout_s=TIMEOUT_S)) == 1

    engine.run(body)


def test_what_comes_while_an_engine_is_paused_waits(engine: Engine, models: Models) -> None:
    reference = models.reference(engine.serve(models.folder()).folder)

    async def body(client: EngineClient) -> list[Sample]:
        (early,) = await engine.sampling(lambda: client.generate(PROMPT, Sampling(400, ignore_eos=True), n=1, timeout_s=TIMEOUT_S))
        await client.call("POST", "/pause?mode=keep", {"mode": "keep"})
        late = asyncio.create_task(client.generate((7, 8), Sampling(5), n=1, timeout_s=TIMEOUT_S))
        await asyncio.sleep(0.3)
        assert not late.done()
        await client.call("POST", "/resume", {})
        return [*await early, *await late]

    samples = engine.run(body)
    for prompt, sample in zip((PROMPT, (7, 8)), samples, strict=True):
        assert largest_gap(sample, reference.logprobs(prompt, sample.token_ids)) < 1e-4


def test_a_connection_that_idled_is_not_used_again_while_the_server_closes_it(engine: Engine, models: Models) -> None:
    if engine.kind == "embedded":
        pytest.skip("it keeps idle connections for longer")
    engine.serve(models.folder())

    async def body(client: EngineClient) -> None:
        for idle_s in (0.0, 4.98, 5.0):  # vLLM closes after 5 s
            await asyncio.sleep(idle_s)
            await client.generate(PROMPT, Sampling(1), n=1, timeout_s=TIMEOUT_S)

    engine.run(body)


def test_a_stop_token_ends_a_sample_is_part_of_it_and_is_not_in_its_text(engine: Engine, models: Models) -> None:
    engine.serve(models.folder())
    (whole,) = generate(engine, Sampling(30, temperature=0.0))
    stop = whole.token_ids[6]
    end = whole.token_ids.index(stop)
    (sample,) = generate(engine, Sampling(30, temperature=0.0, stop_token_ids=(50, stop)))
    assert (sample.token_ids, sample.finish_reason) == (whole.token_ids[: end + 1], "stop")
    assert sample.text == load_tokenizer(models.folder()).decode(list(whole.token_ids[:end]))


def test_the_end_token_ends_a_sample_whatever_else_stops_it_unless_it_is_ignored(engine: Engine, models: Models) -> None:
    engine.serve(models.folder())
    eos = load_tokenizer(models.folder()).eos_token_id
    for sampling in (Sampling(200), Sampling(200, stop=("never this",)), Sampling(200, stop_token_ids=(7,))):
        ends = {eos, *sampling.stop_token_ids}
        samples = generate(engine, replace(sampling, seed=1), n=8)
        for sample in samples:
            assert not ends.intersection(sample.token_ids[:-1])
            assert (sample.token_ids[-1] in ends) == (sample.finish_reason == "stop")
        assert any(sample.token_ids[-1] == eos for sample in samples)
    samples = generate(engine, Sampling(200, seed=1, ignore_eos=True), n=8)
    assert {(len(sample.token_ids), sample.finish_reason) for sample in samples} == {(200, "length")}
    assert any(eos in sample.token_ids[:-1] for sample in samples)
    samples = generate(engine, Sampling(200, seed=1, ignore_eos=True, stop_token_ids=(eos,)), n=8)
    assert all(eos not in sample.token_ids[:-1] for sample in samples)


def test_a_stop_string_ends_a_sample_with_the_tokens_that_complete_it(engine: Engine, models: Models) -> None:
    engine.serve(models.folder())
    (whole,) = generate(engine, Sampling(30, temperature=0.0))
    stop = whole.text[4:7]
    (sample,) = generate(engine, Sampling(30, temperature=0.0, stop=(stop,)))
    assert sample.finish_reason == "stop"
    assert load_tokenizer(models.folder()).decode(list(sample.token_ids)).endswith(stop)


@pytest.mark.parametrize("sampling", [
    Sampling(12, top_logprobs=4), Sampling(12, temperature=0.6, top_logprobs=3), Sampling(12, top_k=2, top_logprobs=5),
    Sampling(8, temperature=0.0, top_logprobs=1)])
def test_the_likeliest_tokens_at_each_position_are_hugging_faces(engine: Engine, models: Models, sampling: Sampling) -> None:
    reference = models.reference(engine.serve(models.folder()).folder)
    for sample in generate(engine, sampling, n=2):
        logits = reference.logits((*PROMPT, *sample.token_ids))[len(PROMPT) - 1 : -1] / (sampling.temperature or 1.0)
        if sampling.top_k:
            logits[logits < logits.topk(sampling.top_k).values[:, -1:]] = -torch.inf
        table = logits.log_softmax(-1)
        for row, token, logprob, top in zip(table, sample.token_ids, sample.logprobs, sample.top_logprobs, strict=True):
            expected = row.topk(min(sampling.top_logprobs, sampling.top_k or 99))
            assert [likely for likely, _ in top] == expected.indices.tolist()
            assert torch.allclose(torch.tensor([likely for _, likely in top]), expected.values, atol=1e-4)
            assert abs(dict(top).get(token, logprob) - logprob) < 1e-6


def test_log_probabilities_of_all_tokens_beside_limits_are_given_or_refused(engine: Engine, models: Models) -> None:
    reference = models.reference(engine.serve(models.folder()).folder)
    sampling = Sampling(12, temperature=0.7, top_k=3, top_p=0.9, scaled_logprobs=True, seed=2)
    if engine.kind == "vllm":
        with pytest.raises(RefusedError, match="vLLM returns log-probabilities only of the distribution that it draws from"):
            generate(engine, sampling)
        sampling = replace(sampling, top_k=0, top_p=1.0)
    (sample,) = generate(engine, sampling)
    logits = reference.logits((*PROMPT, *sample.token_ids))[len(PROMPT) - 1 : -1] / 0.7
    expected = logits.log_softmax(-1).gather(1, torch.tensor(sample.token_ids)[:, None]).squeeze(1)
    assert largest_gap(sample, expected.tolist()) < 1e-4
    if engine.kind == "embedded":
        (plain,) = generate(engine, replace(sampling, scaled_logprobs=False))
        assert plain.token_ids == sample.token_ids and max(plain.logprobs) > max(sample.logprobs)


def test_samples_have_the_tokens_that_they_were_drawn_among_where_the_engine_tells_them(engine: Engine, models: Models) -> None:
    reference = models.reference(engine.serve(models.folder()).folder)
    sampling = Sampling(12, temperature=0.7, top_k=3, seed=2, supports=True)
    if engine.kind != "embedded":
        with pytest.raises(EngineError, match="was asked for the supports of 12 tokens and gave none"):
            generate(engine, sampling, n=1)
        return
    for sample in generate(engine, sampling, n=2):
        logits = reference.logits((*PROMPT, *sample.token_ids))[len(PROMPT) - 1 : -1]
        assert sample.supports is not None and len(sample.supports) == len(sample.token_ids)
        for token in range(logits.shape[-1]):
            expected = (logits.topk(3).indices == token).any(dim=-1).tolist()
            assert sample.supports.hold(np.full(len(logits), token)).tolist() == expected
    assert all(sample.supports is None for sample in generate(engine, replace(sampling, top_k=0)))
