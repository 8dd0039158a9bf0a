"""Engine and trainer give the same log-probabilities for what the engine sampled: the trainer's ratios start at 1."""

import numpy as np
import pytest
import torch

from offbeat.data.batch import Batch, SharedPrompts
from offbeat.data.packing import pack_row
from offbeat.engine.loader import load_engine
from offbeat.engine.options import EngineOptions
from offbeat.engine.request import Output, SamplingParams
from offbeat.model.load import load_causal_lm
from offbeat.model.logprobs import token_logprobs

PROMPTS = [[5, 9, 20, 3, 8, 8, 41, 7, 7, 30, 12, 3], [4], [17, 6, 5, 33], [9] * 25]


def to_batch(groups: list[list[Output]]) -> Batch:
    """Prompt and sample of each output, groups sharing their prompts."""
    sequences, logprobs, masks, group_ids = [], [], [], []
    for group, (prompt, outputs) in enumerate(zip(PROMPTS, groups, strict=True)):
        for output in outputs:
            sequences.append(prompt + output.token_ids)
            logprobs.append([0.0] * len(prompt) + output.logprobs)
            masks.append([False] * len(prompt) + [True] * len(output.token_ids))
            group_ids.append(group)
    return Batch.of_next_tokens(
        np.concatenate(sequences), np.concatenate(masks), lengths=[len(sequence) for sequence in sequences],
        columns={"rollout_logprobs": np.concatenate(logprobs)}, losses=(),
        shared=SharedPrompts(np.array(group_ids), np.array([len(PROMPTS[group]) for group in group_ids])))


@pytest.mark.parametrize(("path", "kind"), [("direct", "qwen3"), ("hf", "qwen3"), ("direct", "llama"), ("hf", "gpt2")])
@torch.no_grad()
def test_engine_and_trainer_agree_on_every_sampled_token(path, kind, model_folder):
    folder = model_folder(kind)
    engine = load_engine(EngineOptions(model=folder, forward=path, max_running=7, max_prefill_tokens=20))
    model = load_causal_lm(folder)
    for temperature in (1.0, 0.7):
        batch = to_batch(engine.generate(PROMPTS, SamplingParams(max_new_tokens=32, temperature=temperature, seed=1), n=4))
        assert len(np.unique(batch.lengths)) > 3, "samples end at different lengths"
        for share_prefix in (True, False):
            row = pack_row(batch, share_prefix=share_prefix)
            sampled = batch.columns["rollout_logprobs"][row.batch_index]
            assert len(sampled) == batch.num_targets and sampled.min() < -2
            assert np.abs(token_logprobs(model, row, temperature=temperature).numpy() - sampled).max() < 1e-4
            assert np.abs(token_logprobs(model, row, temperature=1.3).numpy() - sampled).max() > 0.1, "the temperature counts"
