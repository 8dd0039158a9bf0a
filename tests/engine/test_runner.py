"""The logits of every running sample are those of a full forward, however its cache came to be."""

import pytest
import torch

from offbeat.engine.engine import EmbeddedEngine
from offbeat.engine.loader import load_engine
from offbeat.engine.options import EngineOptions
from offbeat.engine.request import Request, SamplingParams
from offbeat.engine.scheduler import RoundPrompts

PROMPTS = [[5, 9, 20, 3, 8, 8, 41, 7, 7, 30, 12, 3], [4], [17, 6, 5, 33], [9] * 18]


@pytest.fixture(params=["direct", "hf"])
def engine(request, model_folder) -> EmbeddedEngine:
    return load_engine(EngineOptions(model=model_folder("qwen3"), forward=request.param, max_prefill_tokens=20))


def admit(engine: EmbeddedEngine, prompts: list[list[int]], *, n: int = 1) -> RoundPrompts:
    for prompt in prompts:
        engine.submit(Request(id=str(prompt), prompt=prompt, params=SamplingParams(max_new_tokens=9, ignore_eos=True), n=n))
    return engine._schedule()


def check(engine: EmbeddedEngine, reference, logits: torch.Tensor) -> None:
    """Row for row the reference's of the prompt with what was sampled."""
    texts = [running.request.prompt + engine._rows.output(row, None).token_ids for row, running in enumerate(engine._rows.samples)]
    expected = torch.stack([reference("qwen3").logits(text)[-1] for text in texts])
    assert torch.allclose(logits, expected, atol=1e-4)


def test_old_rows_decode_beside_prompts_that_prefill_in_several_parts(engine, reference):
    logits = engine._runner.next_logits(admit(engine, PROMPTS[:3], n=2))
    check(engine, reference, logits)
    engine._postprocess(logits)
    logits = engine._runner.next_logits(admit(engine, PROMPTS[3:]))
    assert len(logits) == 7
    check(engine, reference, logits)


@torch.inference_mode()
def test_a_cache_that_is_recomputed_serves_as_the_one_before(engine, reference):
    for _ in range(2):
        engine._postprocess(engine._runner.next_logits(admit(engine, [] if engine.num_running else PROMPTS)))
    engine._cache.clear(list(range(engine.num_running)))
    engine._runner.recompute()
    check(engine, reference, engine._runner.next_logits(RoundPrompts()))


def test_there_may_be_nothing_to_recompute(engine):
    engine._runner.recompute()
    assert engine.cache_bytes == 0
