"""The engine end to end without HTTP: exact tokens and log-probabilities, endings, switches of weights in flight, pausing."""

import time

import pytest
import torch
from transformers import DynamicCache

from named_bytes import named_bytes
from offbeat.chat.shaping import PLAIN, Shaping
from offbeat.engine.engine import EmbeddedEngine
from offbeat.engine.loader import load_engine
from offbeat.engine.options import EngineOptions
from offbeat.engine.request import Output, Request, SamplingParams
from offbeat.engine.versions import VersionSource
from offbeat.errors import BusyError, EngineError, ModelError, RefusedError
from offbeat.model.fingerprint import fingerprint

from .conftest import params

PROMPTS = [[5, 9, 20, 3, 8, 8, 41, 7, 7, 30, 12, 3], [4], [17, 6, 5, 33], [9] * 25, [7, 8], [11, 12, 13], [50, 3, 40], [6, 6]]


def submit(engine: EmbeddedEngine, prompts, settings: SamplingParams, *, n: int = 1, stream: bool = False) -> None:
    for i, prompt in enumerate(prompts):
        engine.submit(Request(id=str(i), prompt=prompt, params=settings, n=n, stream=stream))


def drain(engine: EmbeddedEngine) -> dict[tuple[str, int], Output]:
    """Step to the end; (request, sample) -> its whole output."""
    done = {}
    while engine.has_work:
        done.update({(event.request_id, event.result.index): event.result for event in engine.step()})
    return done


def check_logprobs(reference, prompt, output, *, start: int = 0) -> None:
    """The output's log-probabilities from token `start` on are the reference's of the whole sequence."""
    expected = reference.logprobs(prompt + output.token_ids)[len(prompt) - 1 :]
    assert torch.allclose(torch.tensor(output.logprobs[start:]), expected[start:], atol=1e-4)


def test_greedy_tokens_and_logprobs_are_those_of_a_full_forward(make_engine, reference):
    engine = make_engine(max_running=3, max_prefill_tokens=20)
    for prompt, (output,) in zip(PROMPTS, engine.generate(PROMPTS, params(40, temperature=0)), strict=True):
        assert len(output.token_ids) == 40 and output.finish_reason == "length" and output.versions == [0] * 40
        check_logprobs(reference("qwen3"), prompt, output)
        logits = reference("qwen3").logits(prompt + output.token_ids)[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output.token_ids)[:, None]).squeeze(1)
        assert torch.allclose(chosen, logits.max(-1).values, atol=1e-4)


def test_sampled_logprobs_are_of_the_temperature_that_sampled(make_engine, reference):
    engine = make_engine()
    for temperature in (1.0, 0.6):
        for prompt, outputs in zip(PROMPTS, engine.generate(PROMPTS, params(12, temperature=temperature), n=3), strict=True):
            assert [o.index for o in outputs] == [0, 1, 2]
            for output in outputs:
                logits = reference("qwen3").logits(prompt + output.token_ids)[len(prompt) - 1 : -1]
                expected = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(output.token_ids)[:, None]).squeeze(1)
                assert torch.allclose(torch.tensor(output.logprobs), expected, atol=2e-4)


def test_requests_that_may_not_fit_the_cache_wait_and_get_the_same_answers(make_engine):
    requests = [Request(id=str(i), prompt=p, params=params(20 + 25 * (i % 3), seed=i), n=1 + i % 2) for i, p in enumerate(PROMPTS)]
    answers = []
    for max_cache_bytes in (0, 3 * 96 * 2 * 2 * 2 * 16 * 4):  # three samples of 96 positions
        engine = make_engine(max_cache_bytes=max_cache_bytes)
        most = 0
        for request in requests:
            engine.submit(request)
        done = {}
        while engine.has_work:
            done.update({(event.request_id, event.result.index): event.result.token_ids for event in engine.step()})
            most = max(most, engine.cache_bytes)
        answers.append(done)
        assert not max_cache_bytes or 0 < most <= max_cache_bytes
    assert answers[0] == answers[1] and len(answers[0]) == 12
    with pytest.raises(RefusedError, match=r"4 samples of up to 96 tokens take 384 places in the cache, which has 288; .*max_cache_bytes"):
        engine.submit(Request(id="never", prompt=[5] * 30, params=params(60), n=4))


def test_a_seed_fixes_its_samples_whatever_runs_beside_them(make_engine):
    alone = make_engine(seed=1).generate([PROMPTS[0]], params(20, seed=7), n=4)[0]
    assert len({tuple(o.token_ids) for o in alone}) == 4
    crowded = make_engine(seed=2, max_running=9)
    submit(crowded, PROMPTS, params(13), n=2)
    crowded.submit(Request(id="seeded", prompt=PROMPTS[0], params=params(20, seed=7), n=4))
    done = drain(crowded)
    assert [done["seeded", i].token_ids for i in range(4)] == [o.token_ids for o in alone]
    assert [o.token_ids for o in make_engine().generate([PROMPTS[0]], params(20, seed=8), n=4)[0]] != [o.token_ids for o in alone]


def test_requests_without_a_seed_differ_from_each_other_and_follow_the_engines_seed(make_engine):
    runs = [make_engine(seed=seed).generate([PROMPTS[0]] * 2, params(20)) for seed in (3, 3, 4)]
    tokens = [[outputs[0].token_ids for outputs in run] for run in runs]
    assert tokens[0] == tokens[1] != tokens[2]
    assert tokens[0][0] != tokens[0][1]


def test_stop_tokens_end_a_sample_and_are_part_of_it(make_engine):
    engine = make_engine()
    free = engine.generate([PROMPTS[0]], params(30, seed=1))[0][0]
    stop = free.token_ids[9]
    first = free.token_ids.index(stop)
    stopped = engine.generate([PROMPTS[0]], params(30, seed=1, stop_token_ids=(stop, 10**6)))[0][0]
    assert stopped.token_ids == free.token_ids[: first + 1] and stopped.finish_reason == "stop"
    assert stopped.logprobs == pytest.approx(free.logprobs[: first + 1], abs=1e-5)


def test_the_end_token_stops_unless_it_is_ignored(make_engine):
    engine = make_engine()
    eos = engine.tokenizer.eos_token_id
    outputs = engine.generate([[5, 6]], SamplingParams(max_new_tokens=120, seed=0), n=16)[0]
    ended = [o for o in outputs if o.finish_reason == "stop"]
    assert ended and all(o.token_ids.index(eos) == len(o.token_ids) - 1 for o in ended)
    going_on = engine.generate([[5, 6]], params(120, seed=0), n=16)[0]
    assert all(len(o.token_ids) == 120 for o in going_on)


def test_a_stop_string_ends_a_sample_with_the_token_that_completes_it(make_engine):
    engine = make_engine()
    free = engine.generate([PROMPTS[0]], params(30, seed=1))[0][0]
    text = engine.tokenizer.decode(free.token_ids)
    stop = text[6:8]
    stopped = engine.generate([PROMPTS[0]], params(30, seed=1, stop=("\0never", stop)))[0][0]
    assert stopped.finish_reason == "stop"
    assert engine.tokenizer.decode(stopped.token_ids) == text[: text.index(stop) + 2]


def test_streaming_outputs_add_up(make_engine):
    engine = make_engine()
    whole = engine.generate([PROMPTS[0]], params(9, seed=5), n=2)[0]
    submit(engine, [PROMPTS[0]], params(9, seed=5), n=2, stream=True)
    pieces = []
    while engine.has_work:
        pieces += [event.result for event in engine.step()]
    assert len(pieces) == 18
    for output in whole:
        mine = [p for p in pieces if p.index == output.index]
        assert [t for p in mine for t in p.token_ids] == output.token_ids
        assert [p.finish_reason for p in mine] == [None] * 8 + ["length"]


@pytest.mark.parametrize("interrupt", ["recompute", "keep", "drain"])
def test_a_switch_in_flight_changes_the_policy_from_the_next_token_on(interrupt, make_engine, model_folder, reference):
    engine = make_engine(max_running=5, max_prefill_tokens=30)
    old, new = reference("qwen3"), reference("qwen3", 1)
    folder = model_folder("qwen3", 1)
    submit(engine, PROMPTS[:6], params(20, temperature=0), n=1)
    for _ in range(8):
        engine.step()
    engine.stage(1, VersionSource(folder), engine.prepare(folder))
    done = engine.switch(1, interrupt)
    outputs = drain(engine)
    assert done.result(timeout=0) >= 0 and engine.version == 1
    # The prefill budget lets the first three start one step before the next two; the last waits for a slot.
    tokens_at_switch = [8, 8, 8, 7, 7, 0] if interrupt != "drain" else [20] * 5 + [0]
    for i, (prompt, changed) in enumerate(zip(PROMPTS, tokens_at_switch, strict=False)):
        output = outputs[str(i), 0]
        assert output.versions == [0] * changed + [1] * (20 - changed)
        before, after = output.token_ids[:changed], output.token_ids[changed:]
        if before:
            assert torch.allclose(torch.tensor(output.logprobs[:changed]), old.logprobs(prompt + before)[len(prompt) - 1 :], atol=1e-4)
        if interrupt == "keep" and before and after:
            expected = continued(old, new, prompt + before, after)
        else:
            expected = new.logprobs(prompt + output.token_ids)[len(prompt) - 1 + changed :]
        assert torch.allclose(torch.tensor(output.logprobs[changed:]), expected, atol=1e-4)


@torch.inference_mode()
def continued(old, new, before: list[int], after: list[int]) -> torch.Tensor:
    """Log-probabilities of `after` under the new weights, reading the old weights' cache of all but the last token before."""
    cache = DynamicCache()
    old.model(input_ids=torch.tensor([before[:-1]]), past_key_values=cache, use_cache=True)
    tokens = torch.tensor([before[-1:] + after])
    logits = new.model(input_ids=tokens[:, :-1], past_key_values=cache, use_cache=True).logits[0].float()
    return logits.log_softmax(-1).gather(1, tokens[0, 1:, None]).squeeze(1)


def test_the_two_test_models_differ(reference):
    assert (reference("qwen3").logprobs(PROMPTS[0]) - reference("qwen3", 1).logprobs(PROMPTS[0])).abs().max() > 0.5


def test_while_draining_nothing_starts_and_no_second_switch(make_engine, model_folder):
    engine = make_engine(max_running=2)
    for version in (1, 2):
        engine.stage(version, VersionSource(model_folder("qwen3", 1)), engine.prepare(model_folder("qwen3", 1)))
    submit(engine, PROMPTS[:1], params(5))
    engine.step()
    done = engine.switch(1, "drain")
    engine.submit(Request(id="late", prompt=[5], params=params(3)))
    engine.step()
    assert not done.done() and engine.num_waiting == 1
    with pytest.raises(EngineError, match="switch to version 1 is draining"):
        engine.switch(2, "keep")
    outputs = drain(engine)
    assert outputs["0", 0].versions == [0] * 5 and outputs["late", 0].versions == [1] * 3 and done.done()


def test_a_drain_ends_when_the_last_sample_is_aborted(make_engine, model_folder):
    engine = make_engine()
    engine.stage(1, VersionSource(model_folder("qwen3", 1)), engine.prepare(model_folder("qwen3", 1)))
    submit(engine, PROMPTS[:1], params(50))
    engine.step()
    done = engine.switch(1, "drain")
    engine.abort("0")
    assert done.done() and engine.version == 1


def test_staging_a_version_again_is_nothing_and_other_weights_of_its_number_take_its_place(make_engine, model_folder):
    engine = make_engine(version=3)
    folder, other = model_folder("qwen3", 1), model_folder("qwen3", 2)
    prepared = engine.prepare(folder)
    engine.stage(4, VersionSource(folder), prepared)
    engine.stage(4, VersionSource(folder), prepared)
    assert engine.is_staged(4, VersionSource(folder)) and engine.is_staged(3, VersionSource(model_folder("qwen3")))
    with pytest.raises(RefusedError, match=r"version 5 is not staged; staged are \[4\] and 3 is live"):
        engine.switch(5, "keep")
    assert engine.switch(3, "recompute").result(0) == 0.0
    engine.switch(4, "recompute").result(0)
    assert engine.is_staged(4, VersionSource(folder)) and engine.version == 4
    engine.stage(4, VersionSource(other), engine.prepare(other))
    before = engine.score(PROMPTS[0])
    assert engine.switch(4, "recompute").result(0) > 0.0
    assert engine.is_staged(4, VersionSource(other)) and engine.score(PROMPTS[0]) != before


def test_an_engine_goes_back_to_an_earlier_version(make_engine, model_folder, reference):
    engine = make_engine()
    for version, seed in ((1, 1), (0, 0)):
        folder = model_folder("qwen3", seed)
        engine.stage(version, VersionSource(folder), engine.prepare(folder))
        engine.switch(version, "recompute").result(0)
        (output,) = engine.generate([PROMPTS[0]], params(5))[0]
        assert output.versions == [version] * 5
        check_logprobs(reference("qwen3", seed), PROMPTS[0], output)


def test_a_failed_stage_leaves_the_old_weights_serving(make_engine, model_folder, reference):
    engine = make_engine()
    with pytest.raises(ModelError, match="lack the tensor"):
        engine.prepare(model_folder("llama"))
    (output,) = engine.generate([PROMPTS[0]], params(5))[0]
    check_logprobs(reference("qwen3"), PROMPTS[0], output)
    assert output.versions == [0] * 5


def test_fingerprint_and_score_prove_the_live_weights(make_engine, model_folder, reference):
    engine = make_engine()
    for version in (0, 1):
        if version:
            engine.stage(1, VersionSource(model_folder("qwen3", 1)), engine.prepare(model_folder("qwen3", 1)))
            engine.switch(1, "recompute")
        model = reference("qwen3", version)
        live, fingerprinter = engine.fingerprinter()
        assert (live, fingerprinter()) == (version, fingerprint(named_bytes(model.model)))
        scored, logprobs = engine.score(PROMPTS[0])
        assert scored == version and torch.allclose(torch.tensor(logprobs), model.logprobs(PROMPTS[0]), atol=1e-4)


def test_scoring_between_steps_leaves_generation_alone(make_engine, reference):
    engine = make_engine()
    submit(engine, PROMPTS[:3], params(15))
    for _ in range(5):
        engine.step()
        engine.score(PROMPTS[3])
    for (name, _), output in drain(engine).items():
        check_logprobs(reference("qwen3"), PROMPTS[int(name)], output)


@pytest.mark.parametrize("after_s", [0.0, 0.01])
def test_the_memory_of_samples_that_have_ended_is_returned_and_the_others_go_on(make_engine, reference, monkeypatch, after_s):
    monkeypatch.setattr("offbeat.engine.cache._SMALL_BYTES", 0)
    monkeypatch.setattr("offbeat.engine.cache.SHRINKS_AFTER_S", after_s)
    engine = make_engine(max_running=16)
    engine.submit(Request(id="long", prompt=PROMPTS[0], params=params(30, temperature=0), n=1))
    submit(engine, PROMPTS, params(3, temperature=0))
    sizes, done = [], {}
    while engine.has_work:
        done.update({event.request_id: event.result for event in engine.step()})
        sizes.append(engine._cache.size_bytes)
        time.sleep(after_s if len(done) == len(PROMPTS) else 0)
    assert 0 < sizes[-2] <= max(sizes) / 4
    assert (sizes[-1] == 0) == (after_s == 0), "what the last sample leaves is freed at once, or by whoever waits for the next"
    check_logprobs(reference("qwen3"), PROMPTS[0], done["long"])


def test_pause_keep_holds_samples_where_they_are(make_engine, reference):
    engine = make_engine()
    submit(engine, PROMPTS[:3], params(15))
    engine.step()
    assert engine.pause("keep") == []
    assert engine.step() == [] and not engine.has_work and engine.num_running == 3
    engine.resume()
    for (name, _), output in drain(engine).items():
        assert len(output.token_ids) == 15
        check_logprobs(reference("qwen3"), PROMPTS[int(name)], output)


def test_pause_abort_ends_everything_with_what_it_has(make_engine):
    engine = make_engine(max_running=2)
    submit(engine, PROMPTS[:2], params(15), n=2)
    for _ in range(3):
        engine.step()
    outputs = [(event.request_id, event.result) for event in engine.pause("abort")]
    assert [(name, o.finish_reason, len(o.token_ids)) for name, o in outputs] == [("0", "abort", 3)] * 2 + [("1", "abort", 0)] * 2
    assert (engine.num_running, engine.num_waiting, engine.finished["abort"]) == (0, 0, 4)
    engine.submit(Request(id="new", prompt=[5], params=params(2)))
    assert not engine.has_work
    engine.resume()
    assert len(drain(engine)["new", 0].token_ids) == 2


def test_aborting_frees_slots_and_leaves_the_others_exact(make_engine, reference):
    engine = make_engine(max_running=4)
    submit(engine, PROMPTS, params(15))
    for _ in range(3):
        engine.step()
    for name in ("1", "6", "unknown"):
        engine.abort(name)
    assert engine.num_running == 3 and engine.num_waiting == 3
    outputs = drain(engine)
    assert sorted(outputs) == [(str(i), 0) for i in (0, 2, 3, 4, 5, 7)]
    for (name, _), output in outputs.items():
        check_logprobs(reference("qwen3"), PROMPTS[int(name)], output)


@pytest.mark.parametrize(
    ("prompt", "settings", "n", "message"),
    [
        ([], {}, 1, "prompt is empty"),
        ([5, 54], {}, 1, "prompt token 54 is outside the vocabulary of 54"),
        ([-1], {}, 1, "prompt token -1"),
        ([5] * 100, {"max_new_tokens": 61}, 1, "100 tokens and max_tokens is 61, together more than the context of 160"),
        ([5], {}, 0, "n must be >= 1, got 0"),
        ([5], {}, 5, "n must be at most the engine's max_running of 4, got 5"),
    ],
)
def test_impossible_requests_are_refused_with_a_reason(prompt, settings, n, message, make_engine):
    engine = make_engine(max_running=4)
    with pytest.raises(RefusedError, match=message):
        engine.submit(Request(id="x", prompt=prompt, params=SamplingParams(**settings), n=n))


def test_a_request_may_fill_the_whole_context(make_engine, reference):
    (output,) = make_engine().generate([[5] * 30], params(130))[0]
    check_logprobs(reference("qwen3"), [5] * 30, output)


def test_a_full_queue_refuses(make_engine):
    engine = make_engine(max_running=1, max_queued=2)
    submit(engine, PROMPTS[:2], params(2))
    with pytest.raises(BusyError, match="2 requests wait"):
        engine.submit(Request(id="x", prompt=[5]))


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 0}, {"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -2},
        {"stop": ("",)},
    ],
)
def test_sampling_parameters_out_of_range_are_refused(settings):
    with pytest.raises(RefusedError, match="must"):
        SamplingParams(**settings)


def test_diverged_weights_fail_with_a_reason(make_engine):
    engine = make_engine()
    engine._forward.install(engine._forward.prepare({name: t * torch.nan for name, t in engine._forward.tensors().items()}))
    with pytest.raises(EngineError, match="version 0 are not finite"):
        engine.score([5, 6])
    with pytest.raises(EngineError, match="not finite"):
        engine.generate([[5]], params(2))


def test_a_bad_score_is_refused(make_engine):
    for tokens, message in (([5], "takes 2 to 160 tokens, got 1"), ([5, 99], "vocabulary of 54")):
        with pytest.raises(RefusedError, match=message):
            make_engine().score(tokens)


def test_shaped_samples_beside_plain_ones_keep_their_settings_over_many_steps_and_a_switch(model_folder) -> None:
    """Penalties and bans follow the tokens of their own sample, also where rows move and the cache is recomputed."""
    engine = load_engine(EngineOptions(model=model_folder("qwen3"), max_running=8))
    plain = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=12, seed=3, ignore_eos=True), n=2)[0]
    settings = {
        "few": Shaping(
            allowed_token_ids=tuple(range(8, 20)), logit_bias=tuple((token, 100.0) for token in range(8, 20)), repetition_penalty=1e3),
        "long": Shaping(min_tokens=12, logit_bias=((engine.tokenizer.eos_token_id, 100.0),)),
        "plain": PLAIN, "short": Shaping(logit_bias=((engine.tokenizer.eos_token_id, 100.0),)),
        "none": Shaping(allowed_token_ids=(8,), bad_words=(engine.tokenizer.decode([8]),)),
    }
    for name, shaping in settings.items():
        params = SamplingParams(max_new_tokens=12, seed=3, ignore_eos=name == "plain", shaping=shaping)
        engine.submit(Request(id=name, prompt=[5, 6, 7], params=params, n=2))
    told: dict[str, list] = {name: [] for name in settings}
    for step in range(14):
        if step == 5:
            engine.stage(1, VersionSource(model_folder("qwen3")), engine.prepare(model_folder("qwen3")))
            engine.switch(1, "recompute")
        for event in engine.step():
            told[event.request_id].append(event.result)
    assert [sorted(output.token_ids) for output in told["few"]] == [list(range(8, 20))] * 2, "each token once"
    assert [len(output.token_ids) for output in told["long"]] == [12, 12]
    assert all(engine.tokenizer.eos_token_id not in output.token_ids[:11] for output in told["long"])
    assert [output.token_ids for output in told["short"]] == [[engine.tokenizer.eos_token_id]] * 2
    assert [output.token_ids for output in sorted(told["plain"], key=lambda output: output.index)] == [o.token_ids for o in plain]
    assert len(told["none"]) == 1 and isinstance(told["none"][0], RefusedError) and "no token may follow" in str(told["none"][0])
    assert not engine.has_work
