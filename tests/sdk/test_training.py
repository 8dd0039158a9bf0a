"""Training through the SDK: losses, the optimizer, and what a step does."""

import json
import math
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from safetensors.torch import load_file
from server import MODEL_NAME
from tinker import types
from torch.func import functional_call
from transformers import AutoModelForCausalLM
from work import DEADLINE_S, adam, datum, logprobs, random_tokens, reference_logprobs, step, train_client

from conftest import Clients


def test_a_fresh_model_scores_as_its_base(connect: Clients, model_dir: Path) -> None:
    rng = np.random.default_rng(0)
    sequences = [random_tokens(rng, length) for length in (2, 17, 60)]
    found = logprobs(train_client(connect()), [datum(tokens) for tokens in sequences])
    for tokens, values in zip(sequences, found, strict=True):
        np.testing.assert_allclose(values, reference_logprobs(model_dir, tokens), atol=1e-4)


def test_supervised_fine_tuning_lowers_the_loss(connect: Clients) -> None:
    rng = np.random.default_rng(1)
    data = [datum(random_tokens(rng, 24)) for _ in range(4)]
    client = train_client(connect())
    losses = [step(client, data) for _ in range(12)]
    assert losses[-1] < 0.7 * losses[0], losses
    assert all(math.isfinite(loss) for loss in losses)


def sampled(rng: np.random.Generator, tokens: list[int], near: np.ndarray) -> types.Datum:
    """A datum of RL: a prompt that counts for nothing, then tokens with log-probabilities near the trainer's."""
    length = len(tokens) - 1
    mask = np.arange(length) >= 5
    drift = rng.normal(0, 0.4, length)
    return datum(
        tokens, logprobs=np.where(mask, near + drift, 0.0), advantages=np.where(mask, rng.normal(0, 1, length), 0.0), mask=mask)


def policy_loss(name: str, lp: torch.Tensor, fields: dict[str, torch.Tensor], config: dict[str, float]) -> torch.Tensor:
    """One datum's loss, written out."""
    q, adv = fields["logprobs"], fields["advantages"]
    ratio = torch.exp(lp - q)
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    match name:
        case "importance_sampling":
            return -(ratio * adv).sum()
        case "ppo":
            return -torch.minimum(ratio * adv, ratio.clamp(low, high) * adv).sum()
        case "cispo":
            low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 4.0)
            return -(ratio.clamp(low, high).detach() * lp * adv).sum()
        case "dro":
            return -(lp * adv - 0.5 * config["beta"] * (lp - q) ** 2)[fields["mask"] > 0].sum()
        case "gspo":
            mask = fields["mask"]
            s = torch.exp((mask * (lp - q)).sum() / mask.sum()).detach()
            s_t = s * torch.exp(lp - lp.detach())
            return -torch.minimum(s_t * adv, s_t.clamp(low, high) * adv).sum()
    raise AssertionError(name)


LOSSES = [
    ("importance_sampling", {}), ("ppo", {}), ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}), ("cispo", {}),
    ("cispo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}), ("dro", {"beta": 0.05}),
    ("gspo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1})]


@pytest.mark.parametrize(("name", "config"), LOSSES)
def test_a_loss_is_its_formula(connect: Clients, name: str, config: dict[str, float]) -> None:
    rng = np.random.default_rng(2)
    client = train_client(connect())
    sequences = [random_tokens(rng, length) for length in (12, 31)]
    near = logprobs(client, [datum(tokens) for tokens in sequences])
    rl = [sampled(rng, tokens, values) for tokens, values in zip(sequences, near, strict=True)]
    expected = 0.0
    for example, values in zip(rl, near, strict=True):
        inputs = example.loss_fn_inputs
        fields = {key: torch.tensor(inputs[key].data, dtype=torch.float64) for key in ("logprobs", "advantages", "mask")}
        expected += float(policy_loss(name, torch.from_numpy(values.astype(np.float64)), fields, config))
        mask = example.loss_fn_inputs.pop("mask")
        if name == "gspo":
            example.loss_fn_inputs["sequence_ratio_mask"] = mask
        if name == "dro":  # what counts is where the advantage is not zero; the prompt's log-probabilities are the trainer's own
            logprob = np.where(np.asarray(mask.data) > 0, example.loss_fn_inputs["logprobs"].data, values)
            example.loss_fn_inputs["logprobs"] = types.TensorData.from_numpy(logprob.astype(np.float32))
    passed = client.forward_backward(rl, name, config or None).result(DEADLINE_S)
    assert passed.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5, abs=1e-4)
    for output, values in zip(passed.loss_fn_outputs, near, strict=True):
        np.testing.assert_allclose(output["logprobs"].data, values, atol=1e-5)


def test_cross_entropy_takes_weights_of_any_sign_and_many_targets_at_a_position(connect: Clients, model_dir: Path) -> None:
    rng = np.random.default_rng(3)
    tokens, k = random_tokens(rng, 20), 4
    targets, weights = rng.integers(3, 90, (19, k)), rng.normal(0, 1, (19, k)).astype(np.float32)
    weights[:6] = 0.0
    example = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={
        "target_tokens": types.TensorData.from_torch(torch.from_numpy(np.where(weights == 0, 0, targets))),
        "weights": types.TensorData.from_torch(torch.from_numpy(weights))})
    passed = train_client(connect()).forward_backward([example, datum(tokens)], "cross_entropy").result(DEADLINE_S)
    of_each = np.stack([
        [reference_logprobs(model_dir, [*tokens[: i + 1], int(targets[i, j])])[-1] for j in range(k)] for i in range(6, 19)])
    expected = -(weights[6:] * of_each).sum() - reference_logprobs(model_dir, tokens).sum()
    assert passed.metrics["loss:sum"] == pytest.approx(float(expected), rel=1e-4)
    found = np.asarray(passed.loss_fn_outputs[0]["logprobs"].data).reshape(19, k)
    np.testing.assert_allclose(found[6:], of_each, atol=1e-4)


def test_a_custom_loss_has_the_gradient_of_its_formula(connect: Clients) -> None:
    rng = np.random.default_rng(4)
    data = [datum(random_tokens(rng, 16)) for _ in range(3)]
    service = connect()
    custom, plain = train_client(service), train_client(service)

    def square(_data: list[types.Datum], values: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return sum((value**2).sum() for value in values), {"squares": 1.0}

    passed = custom.forward_backward_custom(data, square).result(DEADLINE_S)
    before = logprobs(plain, data)
    assert passed.metrics["loss:sum"] == pytest.approx(float(sum((value**2).sum() for value in before)), rel=1e-5)
    weighted = [
        types.Datum(model_input=example.model_input, loss_fn_inputs={
            "target_tokens": example.loss_fn_inputs["target_tokens"],
            "weights": types.TensorData.from_numpy((-2 * value).astype(np.float32))})
        for example, value in zip(data, before, strict=True)]
    plain.forward_backward(weighted, "cross_entropy").result(DEADLINE_S)
    for client in (custom, plain):
        client.optim_step(adam()).result(DEADLINE_S)
    for one, other in zip(logprobs(custom, data), logprobs(plain, data), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_step_is_adamw_on_the_summed_gradient(connect: Clients, model_dir: Path, tmp_path: Path) -> None:
    """After two accumulated passes and a step, the exported adapter is what AdamW makes of the gradient that torch finds."""
    rng = np.random.default_rng(5)
    data = [datum(random_tokens(rng, 14)) for _ in range(2)]
    service = connect()
    client = train_client(service)
    start = export(service, client, "start", tmp_path / "start")
    for example in data:
        client.forward_backward([example], "cross_entropy")
    settings = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.1, "grad_clip_norm": 0.5}
    client.optim_step(adam(1e-2, **settings)).result(DEADLINE_S)
    end = export(service, client, "end", tmp_path / "end")
    before, after = read(start), read(end)
    expected = adamw_by_hand(model_dir, before, start, data, lr=1e-2, **settings)
    assert before.keys() == after.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(after[name], value, atol=2e-5, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")


def export(service: tinker.ServiceClient, client: tinker.TrainingClient, name: str, folder: Path) -> Path:
    """The adapter as PEFT has it, fetched as users fetch it."""
    if not hasattr(client, "save_weights_external"):
        pytest.skip("this version of the SDK exports nothing")
    path = client.save_weights_external(name).result(DEADLINE_S).path
    urls = service.create_rest_client().get_external_weights_urls(path).result(DEADLINE_S).urls
    folder.mkdir()
    for file, url in urls.items():
        with urllib.request.urlopen(url, timeout=30) as response:
            (folder / Path(file).name).write_bytes(response.read())
    return folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def adamw_by_hand(
    model_dir: Path, adapter: dict[str, torch.Tensor], folder: Path, data: list[types.Datum], *, lr: float, beta1: float, beta2: float,
    eps: float, weight_decay: float, grad_clip_norm: float,
) -> dict[str, torch.Tensor]:
    """Torch's gradient through W + s B A, its global clip, and one step from zero moments."""
    about = json.loads((folder / "adapter_config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    leaves = {name: value.clone().requires_grad_() for name, value in adapter.items()}
    weights = {}
    for name, a in leaves.items():
        if ".lora_A." in name:
            layer = name.removeprefix("base_model.model.").split(".lora_A.")[0]
            b = leaves[name.replace(".lora_A.", ".lora_B.")]
            weights[f"{layer}.weight"] = model.get_submodule(layer).weight.detach() + about["lora_alpha"] / about["r"] * b @ a
    loss = torch.zeros(())
    for example in data:
        tokens = torch.tensor([example.model_input.to_ints()])
        targets = torch.tensor(example.loss_fn_inputs["target_tokens"].data)[:, None]
        logits = functional_call(model, weights, (tokens,), {"use_cache": False}).logits[0]
        loss = loss - torch.log_softmax(logits, -1).gather(1, targets).sum()
    gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    norm = torch.sqrt(sum((gradient**2).sum() for gradient in gradients.values()))
    scale = min(1.0, grad_clip_norm / float(norm)) if grad_clip_norm else 1.0
    stepped = {}
    for name, value in adapter.items():
        gradient = gradients[name] * scale
        m, v = (1 - beta1) * gradient / (1 - beta1), (1 - beta2) * gradient**2 / (1 - beta2)
        stepped[name] = value * (1 - lr * weight_decay) - lr * m / (v.sqrt() + eps)
    return stepped


def test_an_exported_adapter_scores_as_the_trainer(connect: Clients, model_dir: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    tokens = random_tokens(rng, 30)
    service = connect()
    client = train_client(service)
    for _ in range(3):
        step(client, [datum(tokens)])
    folder = export(service, client, "trained", tmp_path / "trained")
    np.testing.assert_allclose(logprobs(client, [datum(tokens)])[0], reference_logprobs(model_dir, tokens, folder), atol=1e-4)
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == MODEL_NAME


def test_a_big_batch_is_the_sum_of_its_parts(connect: Clients) -> None:
    """Larger than one pass of the trainer and than one request of the SDK may be."""
    rng = np.random.default_rng(7)
    data = [datum(random_tokens(rng, int(length))) for length in rng.integers(20, 120, 400)]
    client = train_client(connect())
    passed = client.forward_backward(data, "cross_entropy").result(DEADLINE_S)
    parts = logprobs(client, data[:3] + data[-3:])
    for output, values in zip(passed.loss_fn_outputs[:3] + passed.loss_fn_outputs[-3:], parts, strict=True):
        np.testing.assert_allclose(output["logprobs"].data, values, atol=1e-5)
    total = -sum(float(np.sum(output["logprobs"].data)) for output in passed.loss_fn_outputs)
    assert passed.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
