"""Which forward an engine is built with."""

import pytest

from offbeat.engine import forward_direct
from offbeat.engine.forward_direct import DirectForward
from offbeat.engine.forward_hf import HFForward
from offbeat.engine.loader import load_engine, load_forward
from offbeat.engine.options import EngineOptions
from offbeat.errors import ModelError


@pytest.mark.parametrize(("kind", "forward", "expected"), [
    ("qwen3", "auto", DirectForward), ("qwen3", "direct", DirectForward), ("qwen3", "hf", HFForward), ("gpt2", "auto", HFForward),
])
def test_the_forward_is_the_one_asked_for_or_the_best(model_folder, kind, forward, expected) -> None:
    assert type(load_forward(EngineOptions(model=model_folder(kind), forward=forward))) is expected


def test_a_model_that_the_direct_forward_cannot_compute_is_refused(model_folder) -> None:
    with pytest.raises(ModelError, match=r"direct forward does not compute .* \(model type 'gpt2'\); use forward = auto or hf"):
        load_forward(EngineOptions(model=model_folder("gpt2"), forward="direct"))


def test_the_tokenizer_may_come_from_another_folder(model_folder, tmp_path) -> None:
    with pytest.raises(ModelError):
        load_engine(EngineOptions(model=model_folder("qwen3"), tokenizer=str(tmp_path)))
    other = model_folder("gpt2")
    assert load_engine(EngineOptions(model=model_folder("qwen3"), tokenizer=other)).tokenizer.name == other


@pytest.mark.parametrize("path", ["direct", "hf"])
def test_a_forward_that_disagrees_with_the_models_own_code_does_not_serve(model_folder, monkeypatch, path):
    """Decoding and scoring would agree with each other, so that nothing else would notice."""
    if path == "direct":
        right = forward_direct.DirectForward._rotary
        monkeypatch.setattr(forward_direct.DirectForward, "_rotary", lambda self, length: right(self, length)[::-1])
    else:
        run = HFForward._run
        monkeypatch.setattr(HFForward, "_run", lambda self, inputs, *args, **kwargs: run(
            self, {**inputs, "position_ids": inputs["position_ids"] * 3}, *args, **kwargs))
    with pytest.raises(ModelError, match=r"full forward differs from transformers' own by \S+ in log-probability"):
        load_forward(EngineOptions(model=model_folder("qwen3"), forward=path))
