"""Parameters as bytes."""

import numpy as np
import torch
from torch import nn

from offbeat.model.fingerprint import fingerprint
from offbeat.model.load import load_causal_lm
from offbeat.model.tensors import named_bytes


def test_each_parameter_comes_once_as_its_bytes(model_dir: str) -> None:
    model = load_causal_lm(model_dir, attention="sdpa")
    found = dict(named_bytes(model))
    assert set(found) == {name for name, _ in model.named_parameters()}  # tied weights once
    for name, parameter in model.named_parameters():
        assert found[name].dtype == np.uint8
        assert found[name].tobytes() == parameter.detach().numpy().tobytes()


def test_the_bytes_are_the_live_weights_and_a_wrapper_changes_nothing() -> None:
    model = nn.Linear(3, 2)
    wrapper = nn.Module()
    wrapper.module = model
    assert fingerprint(named_bytes(wrapper)) == fingerprint(named_bytes(model))
    live = dict(named_bytes(model))
    before = fingerprint(named_bytes(model))
    with torch.no_grad():
        model.bias.add_(1)
    assert live["bias"].tobytes() == model.bias.detach().numpy().tobytes()
    assert fingerprint(named_bytes(model)) != before


def test_numbers_of_two_bytes_are_two_bytes() -> None:
    assert dict(named_bytes(nn.Linear(3, 2).to(torch.bfloat16)))["weight"].shape == (12,)
