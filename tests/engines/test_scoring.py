"""What every engine that can says of given tokens, by the model and by adapters, against Hugging Face's and PEFT's own modules."""

import asyncio
import math

import pytest
import torch

from contract import Engine, Models
from offbeat.errors import RefusedError
from offbeat.inference.client import EngineClient
from offbeat.inference.sampling import PromptScore, Sampling

pytestmark = pytest.mark.timeout(400)  # the first test of a kind starts the servers
TIMEOUT_S = 60.0
TOKENS = (13, 14, 15, 5, 6, 0, 9, 21, 3, 3, 7)


def check(score: PromptScore, logits: torch.Tensor, tokens: tuple[int, ...], *, top_k: int = 0) -> None:
    """`logits` [L, V] are a reference's."""
    table = logits[:-1].log_softmax(-1)
    expected = table.gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)
    assert len(score.logprobs) == len(tokens) and math.isnan(score.logprobs[0])
    assert torch.allclose(torch.tensor(score.logprobs[1:]), expected, atol=1e-4)
    assert bool(score.top) == bool(top_k)
    for row, top in zip(table, score.top[1:], strict=bool(top_k)):
        likeliest = row.topk(top_k)
        assert [token for token, _ in top] == likeliest.indices.tolist()
        assert torch.allclose(torch.tensor([logprob for _, logprob in top]), likeliest.values, atol=1e-4)


@pytest.mark.parametrize("top_k", [0, 1, 5])
def test_scores_are_hugging_faces(untied: Engine, models: Models, top_k: int) -> None:
    reference = models.reference(untied.serve(models.folder(tied=False)).folder)
    score = untied.run(lambda client: client.score(TOKENS, top_k=top_k, timeout_s=TIMEOUT_S))
    assert score.version == untied.version and (not top_k or score.top[0] == ())
    check(score, reference.logits(TOKENS), TOKENS, top_k=top_k)


def test_targets_that_are_not_in_the_text_are_scored_or_refused(untied: Engine, models: Models) -> None:
    reference = models.reference(untied.serve(models.folder(tied=False)).folder)
    table = reference.logits(TOKENS).log_softmax(-1)
    targets = tuple(tuple(row.topk(i % 3).indices.tolist()) for i, row in enumerate(table.roll(1, 0)))
    targets = ((4, 5), *targets[1:])
    score = untied.run(lambda client: client.score(TOKENS, top_k=3, targets=targets, timeout_s=TIMEOUT_S))
    assert [len(row) for row in score.target_logprobs] == [len(row) for row in targets]
    assert all(map(math.isnan, score.target_logprobs[0]))
    for i, row in enumerate(targets[1:]):
        assert torch.allclose(torch.tensor(score.target_logprobs[i + 1]), table[i][list(row)], atol=1e-4)
    unlikely = ((), *((int(row.argmin()),) for row in table[:-1]))
    if untied.kind == "embedded":
        score = untied.run(lambda client: client.score(TOKENS, targets=unlikely, timeout_s=TIMEOUT_S))
        assert torch.allclose(torch.tensor(score.target_logprobs[1:]).squeeze(1), table[:-1].min(-1).values, atol=1e-4)
    else:
        with pytest.raises(RefusedError, match="of its top_k = 0 likeliest, and token .* is neither at position 1"):
            untied.run(lambda client: client.score(TOKENS, targets=unlikely, timeout_s=TIMEOUT_S))


def test_scores_of_adapters_and_the_model_run_beside_samples(engine: Engine, models: Models) -> None:
    if engine.kind == "vllm":
        with pytest.raises(RefusedError, match="vLLM on CPUs with adapters cannot return log-probabilities of prompts"):
            engine.run(lambda client: client.score(TOKENS, timeout_s=TIMEOUT_S))
        return
    engine.serve(models.folder())
    texts = [TOKENS[:end] for end in (2, 5, 11)] + [TOKENS[::-1], TOKENS * 20]
    folders = {"alice@3": models.adapter(1), "bob@12": models.adapter(2, rank=8)}

    async def body(client: EngineClient) -> dict[tuple[str, tuple[int, ...]], PromptScore]:
        for name, folder in folders.items():
            await client.load_adapter(name, folder, timeout_s=TIMEOUT_S)
        sampling = asyncio.create_task(client.generate((5, 6), Sampling(200), n=8, timeout_s=TIMEOUT_S, adapter="alice@3"))
        asked = [(name, text) for name in (*folders, "") for text in texts]
        scores = await asyncio.gather(*(client.score(text, adapter=name, top_k=2, timeout_s=TIMEOUT_S) for name, text in asked))
        await sampling
        for name in folders:
            await client.unload_adapter(name, timeout_s=TIMEOUT_S)
        return dict(zip(asked, scores, strict=True))

    for (name, text), score in engine.run(body).items():
        assert score.version == {"alice@3": 3, "bob@12": 12, "": engine.version}[name]
        check(score, models.reference(models.folder(), folders.get(name, "")).logits(text), text, top_k=2)


@pytest.mark.parametrize("tokens", [(1, 10**6), tuple([5] * 600)])
def test_tokens_that_cannot_be_scored_are_refused(untied: Engine, tokens: tuple[int, ...]) -> None:
    with pytest.raises(RefusedError):
        untied.run(lambda client: client.score(tokens, timeout_s=TIMEOUT_S))
