"""Reward models in the form of transformers: batches score as single texts do, and other models are refused."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedModel

from offbeat.errors import ModelError
from offbeat.model.load import load_causal_lm
from offbeat.model.reward_model import Classifier, load_reward_model, score_texts, set_padding
from offbeat.model.values import put_value_head
from small_run import build_small_model

TEXTS = [[5, 6, 7], [5], [9, 8, 7, 6, 5, 4, 3], [5, 6, 7, 0, 8]]


@pytest.fixture
def model(tmp_path: Path) -> PreTrainedModel:
    """A reward model of another make, whose configuration names no padding token."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, max_position_embeddings=32,
        num_labels=1)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "rewards")
    return load_reward_model(str(tmp_path / "rewards"), dtype="float32")


@pytest.mark.parametrize("max_tokens", [1, 12, 1000])
def test_a_batch_scores_as_transformers_does_with_single_texts(model: PreTrainedModel, max_tokens: int) -> None:
    with torch.no_grad():
        alone = [float(model(input_ids=torch.tensor([text])).logits[0, 0]) for text in TEXTS]
    assert set_padding(model, 1) == 1 == set_padding(model, 2)
    assert score_texts(model, TEXTS, padding=1, max_tokens=max_tokens) == pytest.approx(alone, abs=1e-6)
    assert len(set(alone)) == len(TEXTS) and score_texts(model, [], padding=1, max_tokens=max_tokens) == []


def test_a_folder_without_a_head_is_refused(tmp_path: Path) -> None:
    folder = build_small_model(tmp_path / "model", seed=0)
    with pytest.raises(ModelError, match=r"lacks or misshapes 1 weights, 'score.weight' first"):
        load_reward_model(folder, dtype="float32")


def test_a_language_model_has_a_classifier_of_the_same_weights(tmp_path: Path) -> None:
    model = load_causal_lm(build_small_model(tmp_path / "model", seed=0), attention="sdpa")
    put_value_head(model, bias=False)
    classifier = Classifier(model)
    assert classifier.head == "lm_head.weight"
    assert classifier.settings(padding=3) == {
        "architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "pad_token_id": 3}


def test_models_that_transformers_could_not_load_again_are_refused(tmp_path: Path) -> None:
    model = load_causal_lm(build_small_model(tmp_path / "model", seed=0), attention="sdpa")
    with pytest.raises(ModelError, match="for Qwen3ForCausalLM has other weights, 'score.weight' first"):
        Classifier(model)  # its head is still that of a language model, of another shape
    model.config = type("NoConfig", (), {})()
    with pytest.raises(ModelError, match="transformers has no sequence classifier for Qwen3ForCausalLM"):
        Classifier(model)
