"""What tenants do in these tests, and the slow way to compute what the server should answer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import torch
from safetensors.torch import load_file
from server import MODEL_NAME
from tinker import types
from transformers import AutoModelForCausalLM

RANK = 8
DEADLINE_S = 60
REFUSED = (tinker.TinkerError, ValueError)
"""What the SDK raises for what the server refuses."""


def train_client(service: tinker.ServiceClient, *, rank: int = RANK, seed: int = 1) -> tinker.TrainingClient:
    return ready(service.create_lora_training_client(base_model=MODEL_NAME, rank=rank, seed=seed))


def ready(client: Any) -> Any:
    """The client itself; newer versions of the SDK give a future of it."""
    return client.result(DEADLINE_S) if hasattr(client, "result") else client


def datum(tokens: Sequence[int], **inputs: Sequence[float]) -> types.Datum:
    """Predict each next token; weights are 1 unless given."""
    targets = list(tokens[1:])
    fields = {name: np.asarray(values, np.float32) for name, values in (inputs or {"weights": [1.0] * len(targets)}).items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.asarray(targets, np.int64)),
            **{name: types.TensorData.from_numpy(values) for name, values in fields.items()}})


def random_tokens(rng: np.random.Generator, length: int, vocab_size: int = 90) -> list[int]:
    return rng.integers(3, vocab_size, length).tolist()


def adam(lr: float = 1e-2, **settings: float) -> types.AdamParams:
    return types.AdamParams(learning_rate=lr, **settings)


def step(
    client: tinker.TrainingClient, data: list[types.Datum], loss: str = "cross_entropy", *, lr: float = 1e-2, **settings: float,
) -> float:
    """One training step; the loss before it."""
    passed, updated = client.forward_backward(data, loss), client.optim_step(adam(lr, **settings))
    updated.result(DEADLINE_S)
    return passed.result(DEADLINE_S).metrics["loss:sum"]


def logprobs(client: tinker.TrainingClient, data: list[types.Datum]) -> list[np.ndarray]:
    """Of the targets, as the trainer has them now."""
    passed = client.forward(data, "cross_entropy").result(DEADLINE_S)
    return [np.asarray(output["logprobs"].data, np.float32) for output in passed.loss_fn_outputs]


def reference_logprobs(model_dir: Path, tokens: Sequence[int], adapter: Path | None = None) -> np.ndarray:
    """Log-probabilities of tokens[1:] by Hugging Face, with a PEFT folder merged into the weights by hand."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    if adapter is not None:
        merge(model, adapter)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()


def merge(model: torch.nn.Module, folder: Path) -> None:
    """W + alpha / rank * B A, for every pair in the folder."""
    about = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, a in tensors.items():
        if ".lora_A." not in name:
            continue
        layer = model.get_submodule(name.removeprefix("base_model.model.").split(".lora_A.")[0])
        with torch.no_grad():
            layer.weight += about["lora_alpha"] / about["r"] * tensors[name.replace(".lora_A.", ".lora_B.")] @ a

