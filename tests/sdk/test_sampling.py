"""Sampling through the SDK: versions, seeds, stops and log-probabilities."""

import math
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from server import MODEL_NAME
from small_model import EOS, build_tokenizer
from tinker import types
from transformers import AutoModelForCausalLM
from work import DEADLINE_S, datum, logprobs, random_tokens, ready, reference_logprobs, step, train_client

from conftest import Clients

PROMPT = [10, 20, 30, 40]


def params(**settings: object) -> types.SamplingParams:
    return types.SamplingParams(**({"max_tokens": 12, "temperature": 1.0} | settings))


def sample(client: tinker.SamplingClient, prompt: list[int] = PROMPT, *, n: int = 1, more: dict | None = None, **settings: object):
    found = client.sample(types.ModelInput.from_ints(prompt), n, params(**settings), **(more or {}))
    return found.result(DEADLINE_S)


def base_client(service: tinker.ServiceClient) -> tinker.SamplingClient:
    return ready(service.create_sampling_client(base_model=MODEL_NAME))


def test_a_trained_model_samples_with_the_trainers_log_probabilities(connect: Clients) -> None:
    client = train_client(connect())
    for _ in range(4):
        step(client, [datum(random_tokens(np.random.default_rng(0), 30))])
    sampler = ready(client.save_weights_and_get_sampling_client())
    for sequence in sample(sampler, n=4).sequences:
        whole = PROMPT + sequence.tokens
        scored = logprobs(client, [datum(whole)])[0][len(PROMPT) - 1:]
        np.testing.assert_allclose(sequence.logprobs, scored, atol=1e-4)
        asked = sampler.compute_logprobs(types.ModelInput.from_ints(whole)).result(DEADLINE_S)
        assert asked[0] is None
        np.testing.assert_allclose(asked[len(PROMPT):], scored, atol=1e-4)


def test_the_base_model_can_be_sampled(connect: Clients, model_dir: Path) -> None:
    found = sample(base_client(connect())).sequences[0]
    np.testing.assert_allclose(found.logprobs, reference_logprobs(model_dir, PROMPT + found.tokens)[len(PROMPT) - 1:], atol=1e-4)


def test_a_seed_repeats_a_call_and_differs_within_it(connect: Clients) -> None:
    client = base_client(connect())
    first, again, other = (sample(client, n=4, seed=seed) for seed in (7, 7, 8))
    tokens = [[sequence.tokens for sequence in found.sequences] for found in (first, again, other)]
    assert tokens[0] == tokens[1]
    assert tokens[0] != tokens[2]
    assert len({tuple(each) for each in tokens[0]}) == 4


def test_temperature_zero_is_greedy(connect: Clients, model_dir: Path) -> None:
    found = sample(base_client(connect()), n=2, temperature=0.0, max_tokens=6)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    expected = list(PROMPT)
    for _ in range(6):
        with torch.no_grad():
            expected.append(int(model(torch.tensor([expected])).logits[0, -1].argmax()))
    assert [sequence.tokens for sequence in found.sequences] == [expected[len(PROMPT):]] * 2


def test_log_probabilities_are_those_of_the_scaled_distribution(connect: Clients, model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for settings in ({"temperature": 0.7}, {"temperature": 1.3, "top_p": 0.6, "top_k": 8}):
        found = sample(base_client(connect()), **settings, max_tokens=8).sequences[0]
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT + found.tokens])).logits[0, len(PROMPT) - 1:-1] / settings["temperature"]
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(found.tokens)[:, None])[:, 0]
        np.testing.assert_allclose(found.logprobs, expected.numpy(), atol=1e-4)


def test_stops(connect: Clients) -> None:
    """Greedily, so that what comes is known: a string, an id, the end token, and nothing."""
    client, tokenizer = base_client(connect()), build_tokenizer()
    free = sample(client, temperature=0.0, max_tokens=20, stop=[]).sequences[0]
    assert (len(free.tokens), free.stop_reason) == (20, "length")
    text = tokenizer.decode(free.tokens[3:5])
    first = next(i for i in range(1, 20) if text in tokenizer.decode(free.tokens[: i + 1]))
    for stop in ([text], text):
        found = sample(client, temperature=0.0, max_tokens=20, stop=stop).sequences[0]
        assert (found.tokens, found.stop_reason) == (free.tokens[: first + 1], "stop")
    by_id = sample(client, temperature=0.0, max_tokens=20, stop=[free.tokens[4]]).sequences[0]
    assert (by_id.tokens, by_id.stop_reason) == (free.tokens[: free.tokens.index(free.tokens[4]) + 1], "stop")


def test_the_end_token_ends_a_sample_unless_nothing_may(connect: Clients) -> None:
    client = train_client(connect())
    data = [datum([*PROMPT, EOS, EOS, EOS])]
    for _ in range(15):
        step(client, data, lr=3e-2)
    sampler = ready(client.save_weights_and_get_sampling_client())
    ended = sample(sampler, temperature=0.0).sequences[0]
    assert (ended.tokens, ended.stop_reason) == ([EOS], "stop")
    with_string = sample(sampler, temperature=0.0, stop=["zz"]).sequences[0]
    assert (with_string.tokens, with_string.stop_reason) == ([EOS], "stop")
    assert len(sample(sampler, temperature=0.0, stop=[]).sequences[0].tokens) == 12


def test_prompt_log_probabilities_and_the_likeliest_tokens(connect: Clients, model_dir: Path) -> None:
    prompt = random_tokens(np.random.default_rng(1), 15)
    found = sample(
        base_client(connect()), prompt, max_tokens=3,
        more={"include_prompt_logprobs": True, "topk_prompt_logprobs": 3, "topk_sample_logprobs": 2})
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    sequence = found.sequences[0]
    with torch.no_grad():
        table = torch.log_softmax(model(torch.tensor([prompt + sequence.tokens])).logits[0], -1)
    assert found.prompt_logprobs[0] is None
    np.testing.assert_allclose(found.prompt_logprobs[1:], reference_logprobs(model_dir, prompt), atol=1e-4)
    assert not found.topk_prompt_logprobs[0]
    for position in (1, 7, 14):
        values, ids = table[position - 1].topk(3)
        assert [token for token, _ in found.topk_prompt_logprobs[position]] == ids.tolist()
        np.testing.assert_allclose([value for _, value in found.topk_prompt_logprobs[position]], values.numpy(), atol=1e-4)
    for position, row in enumerate(sequence.topk_logprobs):
        assert [token for token, _ in row] == table[len(prompt) - 1 + position].topk(2).indices.tolist()


def test_target_log_probabilities_of_a_prompt(connect: Clients, model_dir: Path) -> None:
    prompt = random_tokens(np.random.default_rng(2), 8)
    targets = np.full((7, 2), -1, np.int64)  # row i asks for the position after it
    targets[3:, 0], targets[5, 1] = 17, 33
    found = sample(base_client(connect()), prompt, max_tokens=1, more={"target_prompt_logprobs": types.TensorData.from_numpy(targets)})
    values = found.target_prompt_logprobs
    values = np.asarray(getattr(values, "data", values)).reshape(7, 2)
    assert values[targets < 0].tolist() == [0.0] * int((targets < 0).sum())
    for position, column in zip(*np.nonzero(targets >= 0), strict=True):
        expected = reference_logprobs(model_dir, [*prompt[: position + 1], int(targets[position, column])])[-1]
        assert values[position, column] == pytest.approx(expected, abs=1e-4)


def test_a_sampler_never_drifts_and_never_changes_training(connect: Clients) -> None:
    service = connect()
    client, twin = train_client(service), train_client(service)
    data = [datum(random_tokens(np.random.default_rng(3), 25))]
    for each in (client, twin):
        step(each, data)
    named = client.save_weights_for_sampler("one").result(DEADLINE_S).path
    samplers = [ready(client.save_weights_and_get_sampling_client()), ready(service.create_sampling_client(model_path=named))]
    before = [sample(sampler, seed=5, n=2).sequences for sampler in samplers]
    for _ in range(5):
        assert step(client, data) == step(twin, data)
        ready(client.save_weights_and_get_sampling_client())
        again = [sample(sampler, seed=5, n=2).sequences for sampler in samplers]
        for old, new in zip(before, again, strict=True):
            assert [each.tokens for each in old] == [each.tokens for each in new]
            np.testing.assert_allclose([each.logprobs for each in old], [each.logprobs for each in new], atol=1e-6)


def test_reinforcement_learning_raises_a_reward(connect: Clients) -> None:
    """The reward is the share of sampled digits."""
    client = train_client(connect())
    digits = set(range(3, 13))
    rewards = []
    for _ in range(10):
        sampler = ready(client.save_weights_and_get_sampling_client())
        sequences = sample(sampler, n=24, max_tokens=8, stop=[]).sequences
        reward = np.array([np.mean([token in digits for token in sequence.tokens]) for sequence in sequences])
        rewards.append(float(reward.mean()))
        data = []
        for sequence, advantage in zip(sequences, reward - reward.mean(), strict=True):
            prompt = [0.0] * (len(PROMPT) - 1)
            data.append(datum(
                PROMPT + sequence.tokens, logprobs=[*prompt, *sequence.logprobs],
                advantages=[*prompt, *[float(advantage)] * len(sequence.tokens)]))
        step(client, data, "importance_sampling", lr=2e-2)
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.15, rewards
    assert all(map(math.isfinite, rewards))
