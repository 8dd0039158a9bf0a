"""Scores in shared passes are Hugging Face's own, whoever is in the pass, and take turns with decoding."""

import math

import pytest
import torch

from offbeat.engine.engine import EmbeddedEngine
from offbeat.engine.forward_direct import DirectForward
from offbeat.engine.loader import load_engine
from offbeat.engine.options import EngineOptions
from offbeat.engine.request import Event, Request, SamplingParams, Scored, ScoreJob
from offbeat.errors import BusyError, EngineError, RefusedError

TOKENS = [[5, 9, 20, 3, 8, 8, 41, 7, 7, 30, 12, 3], [17, 6, 5, 33], [4, 4], [9, 3, 5, 30, 8, 8, 7, 21]]


def make(model: str, **options) -> EmbeddedEngine:
    return load_engine(EngineOptions(model=model, **options))


def step_until_scored(engine: EmbeddedEngine, count: int) -> dict[str, Scored | EngineError]:
    """Results by id, of the fewest steps that give them all."""
    results: dict[str, Scored | EngineError] = {}
    for _ in range(10_000):
        for event in engine.step():
            if isinstance(event.result, Scored | EngineError):
                results[event.request_id] = event.result
        if len(results) >= count:
            return results
    raise AssertionError("not everything was scored")


def check(scored: Scored | EngineError, logits: torch.Tensor, job: ScoreJob) -> None:
    """`logits` [L, V] are a reference's."""
    assert isinstance(scored, Scored)
    table = logits[:-1].log_softmax(-1)
    expected = table.gather(1, torch.tensor(job.tokens[1:])[:, None]).squeeze(1)
    assert torch.allclose(torch.tensor(scored.logprobs), expected, atol=1e-4)
    if job.top_k:
        top = table.topk(job.top_k)
        assert scored.top is not None
        assert [[token for token, _ in row] for row in scored.top] == top.indices.tolist()
        assert torch.allclose(torch.tensor([[logprob for _, logprob in row] for row in scored.top]), top.values, atol=1e-4)
    else:
        assert scored.top is None
    if job.targets is None:
        assert scored.target_logprobs is None
    else:
        assert scored.target_logprobs is not None
        for row, ids, got in zip(table, job.targets[1:], scored.target_logprobs, strict=True):
            assert torch.allclose(torch.tensor(got), row[ids], atol=1e-4)


@pytest.mark.parametrize("forward", ["direct", "hf"])
def test_requests_of_all_kinds_and_adapters_share_passes_and_each_has_its_own_numbers(
    forward, model_folder, reference, adapter_folder, monkeypatch,
) -> None:
    monkeypatch.setattr("offbeat.engine.forward_direct.LOGITS_AT_ONCE", 5 * 54)  # blocks that cut across requests
    engine = make(model_folder("qwen3"), forward=forward, max_prefill_tokens=64)
    models = {"": reference("qwen3")}
    for seed in (1, 2):
        folder = adapter_folder("qwen3", seed)
        engine.adapters.add(f"a@{seed}", folder, engine.adapters.read(folder))
        models[f"a@{seed}"] = reference("qwen3").merged(folder)
    jobs = [
        ScoreJob(
            id=f"{adapter} {i} {top_k}", tokens=tokens, adapter=adapter, top_k=top_k,
            targets=[[(i + j) % 54, j % 54][: j % 3] for j in range(len(tokens))] if top_k != 2 else None)
        for adapter in models for i, tokens in enumerate(TOKENS) for top_k in (0, 2, 5)]
    for job in jobs:
        engine.submit(job)
    results = step_until_scored(engine, len(jobs))
    for job in jobs:
        check(results[job.id], models[job.adapter].logits(job.tokens), job)
    assert not engine.has_work


def test_a_pass_holds_the_oldest_request_and_others_of_about_its_length_within_its_budget(model_folder, monkeypatch) -> None:
    engine = make(model_folder("qwen3"), max_prefill_tokens=64)
    passes: list[tuple[int, int]] = []
    score = DirectForward.score

    def seen(self: DirectForward, tokens: torch.Tensor, **more) -> object:
        passes.append(tuple(tokens.shape))
        return score(self, tokens, **more)

    monkeypatch.setattr(DirectForward, "score", seen)
    for i, length in enumerate([10, 100, 12, 40, 8, 20, 15, 10, 9, 70]):
        engine.submit(ScoreJob(id=str(i), tokens=[5] * length))
    step_until_scored(engine, 10)
    assert passes == [(4, 15), (1, 100), (1, 40), (2, 20), (1, 9), (1, 70)]


def test_scores_beside_decoding_take_turns_with_it(model_folder, reference) -> None:
    engine = make(model_folder("qwen3"), max_prefill_tokens=32)
    engine.submit(Request(id="sample", prompt=[5, 6, 7], params=SamplingParams(max_new_tokens=60, ignore_eos=True)))
    for i in range(200):
        engine.submit(ScoreJob(id=str(i), tokens=TOKENS[0]))
    order: list[Event] = []
    while engine.has_work:
        order += engine.step()
    ends = [event.request_id for event in order]
    assert len(ends) == 201
    # 100 passes in half of the time of 60 steps: neither waits for the other's end.
    assert 0 < ends.index("sample") < 200
    assert all(math.isclose(event.result.logprobs[0], order[0].result.logprobs[0], abs_tol=1e-5)
               for event in order if isinstance(event.result, Scored))


def test_a_pause_holds_up_samples_and_not_scores(model_folder) -> None:
    engine = make(model_folder("qwen3"))
    engine.submit(Request(id="sample", prompt=[5], params=SamplingParams(max_new_tokens=5)))
    engine.step()
    engine.pause("keep")
    engine.submit(ScoreJob(id="score", tokens=[5, 6]))
    assert [event.request_id for event in engine.step()] == ["score"]
    assert engine.num_running == 1 and not engine.has_work


@pytest.mark.parametrize(("job", "reason"), [
    ({"tokens": [5]}, "takes 2 to 160 tokens, got 1"),
    ({"tokens": [5, 99]}, "vocabulary of 54"),
    ({"tokens": [5, 6], "targets": [[], [-1]]}, "vocabulary of 54"),
    ({"tokens": [5, 6], "targets": [[]]}, "one list for each of the 2 tokens, got 1"),
    ({"tokens": [5, 6], "top_k": 1025}, "0 to 1024, got 1025"),
    ({"tokens": [5, 6], "adapter": "a@1"}, "adapter 'a@1' is not loaded"),
])
def test_a_request_that_cannot_be_scored_is_refused(job, reason, model_folder) -> None:
    with pytest.raises(RefusedError, match=reason):
        make(model_folder("qwen3")).submit(ScoreJob(id="a", **job))


def test_a_full_queue_an_abort_and_a_failing_engine_leave_nobody_waiting(model_folder) -> None:
    engine = make(model_folder("qwen3"), max_queued=2)
    for name in "ab":
        engine.submit(ScoreJob(id=name, tokens=[5, 6]))
    with pytest.raises(BusyError, match="2 requests wait to be scored"):
        engine.submit(ScoreJob(id="c", tokens=[5, 6]))
    engine.submit(ScoreJob(id="urgent", tokens=[5, 6], urgent=True))
    engine.abort("a")
    assert [event.request_id for event in engine.fail(EngineError("it broke"))] == ["urgent", "b"]
    assert not engine.has_work


def test_an_adapter_that_diverged_fails_its_own_request_and_is_held_until_it_was_scored(
    model_folder, reference, adapter_folder,
) -> None:
    engine = make(model_folder("qwen3"), max_adapters=1)
    folder = adapter_folder("qwen3", 1)
    adapter = engine.adapters.read(folder)
    for a, _ in adapter.pairs.values():
        a.fill_(torch.nan)
    engine.adapters.add("a@1", folder, adapter)
    bad, good = ScoreJob(id="bad", tokens=TOKENS[1], adapter="a@1"), ScoreJob(id="good", tokens=TOKENS[1])
    engine.submit(bad)
    engine.submit(good)
    with pytest.raises(BusyError, match="requests use all 1 adapters"):
        engine.adapters.add("b@1", folder, adapter)
    engine.adapters.unload("a@1")
    results = step_until_scored(engine, 2)
    assert isinstance(results["bad"], EngineError) and "logits of adapter a@1 are not finite" in str(results["bad"])
    check(results["good"], reference("qwen3").logits(good.tokens), good)
    engine.adapters.add("b@1", folder, adapter)


def test_tokens_are_drawn_in_the_place_of_others_as_the_model_would_at_the_temperature(model_folder, reference, monkeypatch) -> None:
    monkeypatch.setattr("offbeat.engine.forward_direct.LOGITS_AT_ONCE", 5 * 54)
    engine, tokens, num = make(model_folder("qwen3")), TOKENS[1], 1024
    table = reference("qwen3").logits(tokens)[:-1].log_softmax(-1)
    jobs = [
        ScoreJob(id="hot", tokens=tokens, draws=num, temperature=1.5, seed=3), ScoreJob(id="plain", tokens=TOKENS[0]),
        ScoreJob(id="cold", tokens=tokens, draws=3, temperature=0.0), ScoreJob(id="few", tokens=tokens, draws=5, temperature=1.5, seed=3),
        ScoreJob(id="other", tokens=tokens, draws=num, temperature=1.5, seed=4)]
    for job in jobs:
        engine.submit(job)
    results = step_until_scored(engine, len(jobs))
    alone = engine._scorer.compute([jobs[0]], 0)[0].result
    assert isinstance(alone, Scored)
    for job in jobs:
        scored = results[job.id]
        assert isinstance(scored, Scored) and (scored.draws is None) == (job.id == "plain")
        for row, drawn in zip(table, scored.draws or (), strict=job.id != "plain"):
            ids = [token for token, _ in drawn]
            assert len(ids) == job.draws
            assert torch.allclose(torch.tensor([logprob for _, logprob in drawn]), row[ids], atol=1e-4), "at temperature 1"
            if job.id == "cold":
                assert set(ids) == {int(row.argmax())}
            if job.draws == num:
                share = torch.bincount(torch.tensor(ids), minlength=len(row)) / num
                expected = (row / 1.5).softmax(-1)
                assert (share - expected).abs().max() < 5 * math.sqrt(0.25 / num)
                assert 0.5 * abs(share - expected).sum() < 0.5 * math.sqrt(len(row) / num), "and as a whole"

    def drawn(scored: object) -> list[list[int]]:
        assert isinstance(scored, Scored) and scored.draws is not None
        return [[token for token, _ in row] for row in scored.draws]

    assert drawn(alone) == drawn(results["hot"]) != drawn(results["other"]), "by the seed alone, whoever is in the pass"
    assert drawn(results["few"]) == [row[:5] for row in drawn(alone)]


@pytest.mark.parametrize("fields", [
    {"draws": -1}, {"draws": 1025}, {"draws": 1, "temperature": -0.1}, {"draws": 1, "temperature": math.inf}])
def test_draws_that_cannot_be_made_are_refused(fields, model_folder) -> None:
    with pytest.raises(RefusedError, match="draws of a score must be 0 to 1024 at a finite temperature"):
        make(model_folder("qwen3")).submit(ScoreJob(id="a", tokens=TOKENS[1], **fields))
