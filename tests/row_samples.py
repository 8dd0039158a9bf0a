"""Small models and batches for tests of rows, and the scores of one forward per sequence."""

import numpy as np
import torch
from torch.nn.functional import log_softmax
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from offbeat.data.batch import Batch, SharedPrompts

SIZES = {
    "vocab_size": 49, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 128,
}


def build(name, attention="packed"):
    torch.manual_seed(0)
    if name == "qwen3":
        config = Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True, attn_implementation=attention)
        model = Qwen3ForCausalLM(config)
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, tie_word_embeddings=False, attn_implementation=attention))
    with torch.no_grad():  # large weights, so that a leak or a wrong position shows
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model


def make_batch(seed=0, *, even=False):
    """Groups of samples with shared prompts, one of them promised wrongly; a lone sequence; an answer of one token; an unscored tail."""
    rng = np.random.default_rng(seed)
    sequences, prefix_lens, group_ids = [], [], []
    for group, (prompt_len, answers) in enumerate([(9, [9, 9, 9]), (5, [1, 4, 12]), (9, [9, 9]), (0, [30]), (3, [2, 2])]):
        prompt = rng.integers(0, 49, 9 if even else prompt_len)
        for answer in answers:
            sequences.append(np.concatenate([prompt, rng.integers(0, 49, 9 if even else answer)]))
            prefix_lens.append(len(prompt))
            group_ids.append(group)
    if not even:
        sequences[-1][0] = (sequences[-1][0] + 1) % 49
    masks = [np.arange(len(s)) >= max(1, p) for s, p in zip(sequences, prefix_lens, strict=True)]
    if not even:
        masks[5][-2:] = False
    return Batch.of_next_tokens(
        np.concatenate(sequences), np.concatenate(masks), lengths=[len(s) for s in sequences], columns={}, losses=(),
        shared=SharedPrompts(np.array(group_ids), np.array(prefix_lens)))


def one_by_one(model, batch, temperature=1.0):
    """[M] log-probabilities and entropies, each sequence in its own forward with sdpa."""
    logprobs, entropies = [], []
    for i in range(len(batch)):
        one = batch.select([i])
        tokens = torch.from_numpy(one.tokens.astype(np.int64))
        table = log_softmax(model(input_ids=tokens[None], use_cache=False).logits[0] / temperature, dim=-1)
        source = torch.from_numpy(one.positions)
        logprobs.append(table[source, torch.from_numpy(one.targets.astype(np.int64))])
        entropies.append(-(table[source].exp() * table[source]).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def sampled_batch(prompts, outputs):
    """The batch of an engine's outputs of each prompt, with their tokens trained on and the prompts shared."""
    whole = [(number, prompts[number] + output.token_ids) for number, own in enumerate(outputs) for output in own]
    lengths, prompt_lens = [len(tokens) for _, tokens in whole], np.array([len(prompts[number]) for number, _ in whole])
    trained = np.concatenate([np.arange(length) >= start for length, start in zip(lengths, prompt_lens, strict=True)])
    return Batch.of_next_tokens(
        np.concatenate([tokens for _, tokens in whole]), trained, lengths=lengths, columns={}, losses=(),
        shared=SharedPrompts(np.array([number for number, _ in whole]), prompt_lens))
