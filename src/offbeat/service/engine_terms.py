"""Converts requests for samples to the engines' types, and their answers to the service's. Used by `sampling`. No I/O."""

import secrets

import numpy as np

from offbeat.data.image_store import is_image
from offbeat.inference.sampling import Draws, PromptScore, Sample
from offbeat.inference.sampling import Sampling as EngineSampling
from offbeat.inference.sampling import TopTokens as EngineTopTokens
from offbeat.service.types import Sampled, SampledSequence, SampleRequest, SparseArray, TopTokens


def engine_sampling(request: SampleRequest, max_new_tokens: int, *, end_token_ids: tuple[int, ...]) -> EngineSampling:
    """Return the sampling parameters for engines, with the end tokens unless `ignore_eos` is set or `stop` is ()."""
    stop, endless = request.stop or (), request.ignore_eos or request.stop == ()
    ends = dict.fromkeys([*(() if endless else end_token_ids), *(s for s in stop if isinstance(s, int))])
    return EngineSampling(
        max_new_tokens, temperature=request.temperature, top_p=request.top_p, top_k=request.top_k, seed=request.seed,
        stop=tuple(s for s in stop if isinstance(s, str)), stop_token_ids=tuple(ends),
        ignore_eos=endless, scaled_logprobs=True, top_logprobs=request.topk_sample_logprobs, shaping=request.shaping)


def draws_of(request: SampleRequest) -> Draws | None:
    """Return the draws at each position of the prompt, if any are wanted; the seed is random if the request has none."""
    if not request.prompt_alt_tokens_k:
        return None
    seed = secrets.randbits(63) if request.seed is None else request.seed
    return Draws(request.prompt_alt_tokens_k, request.temperature, seed)


def sampled(request: SampleRequest, sequences: list[SampledSequence], score: PromptScore | None) -> Sampled:
    length, last_n = len(request.prompt), request.prompt_logprobs_last_n
    score = score or PromptScore((np.nan,), 0)
    unscored = 0 if last_n is None else max(length - last_n, 0)
    logprobs = np.array(score.logprobs, np.float32)
    logprobs[:unscored] = np.nan
    if len(logprobs) == length:
        logprobs[is_image(np.array(request.prompt))] = np.nan  # an image's tokens are given, and none is predicted in their places
    top = ((),) * unscored + (score.top or ((),) * length)[unscored:]
    return Sampled(
        tuple(sequences),
        prompt_logprobs=logprobs if request.prompt_logprobs else None,
        topk_prompt=top_tokens(top, request.topk_prompt_logprobs) if request.topk_prompt_logprobs else None,
        target_prompt_logprobs=_target_logprobs(request.target_prompt_logprobs, score),
        prompt_alt=top_tokens(score.draws or ((),) * length, request.prompt_alt_tokens_k) if request.prompt_alt_tokens_k else None)


def top_tokens(rows: tuple[EngineTopTokens, ...], k: int) -> TopTokens:
    """Convert rows to arrays of the k top tokens per position: ids [L, k] int32 and logprobs [L, k] float32; -1 marks missing tokens."""
    ids, logprobs = np.full((len(rows), k), -1, np.int32), np.zeros((len(rows), k), np.float32)
    for i, row in enumerate(rows):
        for j, (token, logprob) in enumerate(row[:k]):
            ids[i, j], logprobs[i, j] = token, logprob
    return TopTokens(ids, logprobs)


def top_rows(top: TopTokens) -> tuple[EngineTopTokens, ...]:
    """Convert the arrays of `top_tokens` back to rows, without the missing tokens."""
    return tuple(
        tuple((token, logprob) for token, logprob in zip(*row, strict=True) if token >= 0)
        for row in zip(top.ids.tolist(), top.logprobs.tolist(), strict=True))


def sequence_of(sample: Sample, top_k: int) -> SampledSequence:
    """Convert one sample, with at most `top_k` top tokens per position: tokens [L] int32, logprobs [L] float32."""
    return SampledSequence(
        sample.tokens, sample.token_logprobs, "stop" if sample.finish_reason == "stop" else "length",
        top_tokens(sample.top_logprobs, top_k) if top_k else None)


def _target_logprobs(targets: SparseArray | None, score: PromptScore) -> SparseArray | None:
    """Return the scores of the wanted tokens in their cells, float32; 0 where there is no score."""
    if targets is None:
        return None
    found = np.array([logprob for row in score.target_logprobs for logprob in row] or [0.0] * len(targets.cells), np.float32)
    return SparseArray(np.nan_to_num(found), targets.cells, targets.shape)


def target_rows(targets: SparseArray) -> tuple[tuple[int, ...], ...]:
    """Return the wanted tokens of each position, such as ((), (7, 12), (3,)) for three positions."""
    length, width = targets.shape
    starts = np.searchsorted(targets.cells, np.arange(1, length) * width)
    return tuple(tuple(row.tolist()) for row in np.split(targets.values, starts))
