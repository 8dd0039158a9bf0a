"""The process of a reward model, as a service in this one: scores what can be scored, and says why the rest cannot."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from offbeat.data.reward_model import judged_tokens
from offbeat.data.tokenizer import Tokenizer, character_tokenizer
from offbeat.engine.reward_options import RewardModelOptions, TextsToScore
from offbeat.engine.reward_worker import RewardModelWorker
from offbeat.errors import ModelError

CHAT = ({"role": "user", "content": "7+5"},)


def save(folder: Path, tokenizer: Tokenizer, *, broken: bool = False) -> LlamaForSequenceClassification:
    """Write a reward model of another make, without a padding token in its configuration."""
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=40, num_labels=1))
    with torch.no_grad():
        model.score.weight.mul_(torch.nan if broken else 1)
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return model.eval()


def load(folder: Path, *, system_prompt: str = "") -> RewardModelWorker:
    worker = RewardModelWorker()
    worker.load(RewardModelOptions(str(folder), "float32", system_prompt, max_tokens=64))
    return worker


@pytest.mark.parametrize("system_prompt", ["", "add"])
def test_it_gives_the_rewards_of_transformers(system_prompt: str, tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    model = save(tmp_path, tokenizer)
    request = TextsToScore(("7", CHAT, CHAT), ("1", "2", "31"))
    found = load(tmp_path, system_prompt=system_prompt).score(request)
    with torch.no_grad():
        expected = [
            float(model(torch.tensor([judged_tokens(prompt, answer, tokenizer, system_prompt=system_prompt)])).logits)
            for prompt, answer in zip(request.prompts, request.answers, strict=True)]
    assert found.rewards == pytest.approx(expected, abs=1e-6) and found.failures == ("", "", "")


def test_a_text_that_cannot_be_scored_fails_alone(tmp_path: Path) -> None:
    save(tmp_path, character_tokenizer(chat_template=None))
    found = load(tmp_path).score(TextsToScore(("7", CHAT, "7"), ("1", "1", "1" * 39)))
    assert abs(found.rewards[0]) < 10 and found.failures[0] == ""
    assert "has no chat template" in found.failures[1]
    assert found.failures[2] == "the text of 41 tokens is longer than the reward model's context of 40"
    assert str(found.rewards[1:]) == "(nan, nan)"


def test_a_reward_that_is_no_number_is_a_failure(tmp_path: Path) -> None:
    save(tmp_path, character_tokenizer(), broken=True)
    assert load(tmp_path).score(TextsToScore(("7",), ("1",))).failures == ("the reward model gave nan",)


def test_a_folder_that_is_no_reward_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be used"):
        load(tmp_path / "nothing")
