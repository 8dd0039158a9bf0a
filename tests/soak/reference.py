"""What an adapter's folder answers, by Hugging Face's modules with the adapter merged into the weights, without a cache."""

import threading
from pathlib import Path

import numpy as np
import torch
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from offbeat.model.peft_io import read_adapter
from soak.ledger import Expected

_TIE = 1e-4
"""Tokens this near to each other may come in either order."""


class Reference:
    """One base model."""

    def __init__(self, model: str, *, prompt: tuple[int, ...], length: int, eos_token_id: int) -> None:
        """The answer to `prompt` is at most `length` tokens long."""
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._prompt = prompt
        self._length = length
        self._eos_token_id = eos_token_id
        self._turn = threading.Lock()

    def expect(self, folder: Path, canary: tuple[int, ...]) -> Expected:
        """What that adapter has to answer, and to say of the canary. Any thread may ask."""
        with self._turn, torch.inference_mode():  # a functional call puts other weights into the one model
            return self._expect(folder, canary)

    def _expect(self, folder: Path, canary: tuple[int, ...]) -> Expected:
        adapter = read_adapter(folder)
        weights = dict(self._model.named_parameters())
        for module, (a, b) in adapter.pairs.items():
            weights[f"{module}.weight"] = weights[f"{module}.weight"] + adapter.scaling * b @ a
        tokens, logprobs, firsts = list(self._prompt), list[float](), list[np.ndarray]()
        while len(logprobs) < self._length:
            row = self._score(weights, tokens)[-1]
            best, second = row.topk(2).values.tolist()
            firsts.append(row.numpy())
            if best - second < _TIE:
                break
            tokens.append(int(row.argmax()))
            logprobs.append(best)
            if tokens[-1] == self._eos_token_id:
                break
        table = self._score(weights, canary)
        score = table[:-1].gather(1, torch.tensor(canary[1:])[:, None]).mean().item()
        return Expected(tuple(tokens[len(self._prompt) :]), tuple(logprobs), firsts[0], score)

    def _score(self, weights: dict[str, torch.Tensor], tokens: list[int] | tuple[int, ...]) -> torch.Tensor:
        """[L, V] log-probabilities."""
        inputs = {"input_ids": torch.tensor([tokens]), "use_cache": False}
        return functional_call(self._model, weights, kwargs=inputs).logits[0].log_softmax(-1)
