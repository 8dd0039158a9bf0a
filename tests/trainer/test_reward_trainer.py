"""The trainer of a reward model: it learns to prefer, resumes exactly, and transformers gives the same rewards with its export."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from offbeat.algorithms.reward_model import compare_rewards, reward_batch
from offbeat.config.train import OptimizerConfig
from offbeat.data.packing import plan_microbatches
from offbeat.data.pairs import EncodedPair
from offbeat.data.tokenizer import character_tokenizer
from offbeat.errors import ConfigError
from offbeat.trainer.messages import ExportRequest, ScoreShare
from offbeat.trainer.reward_trainer import RewardTrainer
from ranks import run_alone, run_ranks
from train_samples import MESHES, VOCAB, build_model, configure, take_step, train_and_resume

OPTIMIZER = OptimizerConfig(lr=1e-2)
EOS = 0  # of the character tokenizer, whose padding token is 1


def pairs():
    """Answers that go up are better than those that go down."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(8):
        prompt, answer = rng.integers(3, VOCAB, 3), np.sort(rng.choice(np.arange(3, VOCAB), 2 + number % 3, replace=False))
        texts = [np.array([*prompt, *digits, EOS], np.int32) for digits in (answer, answer[::-1])]
        found.append(EncodedPair(tuple((text, np.arange(len(text)) == len(text) - 1) for text in texts), (True, False), 0.0, 3))
    return found


BATCH = reward_batch(pairs(), centring=0.01)


def _micros(*, rank, world):
    plan = plan_microbatches(BATCH, num_ranks=world, max_tokens=40, share_prefix=True, whole_groups=True)
    return plan.microbatches[rank]


def _steps(trainer, count):
    micros = _micros(rank=trainer.groups.batch_index, world=trainer.groups.batch_ranks)
    return [take_step(trainer, BATCH, [micros], optimizer=OPTIMIZER) for _ in range(count)]


def _train(groups, folder):
    found = {}
    for mesh in MESHES[groups.world]:
        trainer, found[mesh] = train_and_resume(RewardTrainer, groups, folder, mesh, _steps, num_steps=4)
        trainer.export(ExportRequest(f"{folder}-export-{mesh}-{groups.world}", f"{folder}-tokenizer", "float32"))
        everything = ScoreShare(BATCH, np.arange(len(BATCH)), tuple(_micros(rank=0, world=1)), "policy", with_entropy=False)
        rewards = trainer.score(everything).scores.columns["values"]
        np.save(f"{folder}-{mesh}-{groups.world}-{groups.rank}.npy", rewards)
    return found


def _check_export(folder: str, rewards: np.ndarray) -> None:
    """Compare with transformers on batches that are padded at either side."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert (type(model).__name__, model.config.num_labels, model.config.pad_token_id) == ("Qwen3ForSequenceClassification", 1, 1)
    texts = [BATCH.tokens[low:high] for low, high in zip(BATCH.offsets, BATCH.offsets[1:], strict=False)]
    longest = max(map(len, texts)) + 2
    for right in (True, False):
        blanks = [np.full(longest - len(text), model.config.pad_token_id) for text in texts]
        rows = [np.concatenate([text, blank] if right else [blank, text]) for text, blank in zip(texts, blanks, strict=True)]
        marks = [np.concatenate([np.ones(len(text)), np.zeros(len(blank))][:: 1 if right else -1])
                 for text, blank in zip(texts, blanks, strict=True)]
        with torch.no_grad():
            found = model(input_ids=torch.tensor(np.stack(rows)), attention_mask=torch.tensor(np.stack(marks)).long()).logits
        np.testing.assert_allclose(found[:, 0].numpy(), rewards, atol=1e-4)


@pytest.mark.drill
def test_it_learns_and_exports_the_same_on_any_number_of_ranks_and_resumes_exactly(tmp_path: Path) -> None:
    folder = build_model(tmp_path / "model")
    character_tokenizer().save(f"{folder}-tokenizer")
    alone = run_alone(_train, argument=folder)
    first, last = alone["ddp"][0], alone["ddp"][-1]
    assert first["train/loss"] == pytest.approx(np.log(2)) and first["reward_model/accuracy"] == 0, "rewards begin at 0"
    assert last["train/loss"] < first["train/loss"] and last["reward_model/margin_mean"] > 0
    assert first["train/tokens"] == 16 and "train/entropy" not in first and "preference/accuracy" not in first
    for both in run_ranks(_train, world=2, argument=folder):
        for mesh, steps in both.items():
            for one, other in zip(alone["ddp"], steps, strict=True):
                assert other == pytest.approx(one, abs=2e-3), mesh
    for mesh, world in (("ddp", 1), *((mesh, 2) for mesh in MESHES[2])):
        rewards = np.load(f"{folder}-{mesh}-{world}-0.npy")
        assert compare_rewards(rewards).margin > 0
        _check_export(f"{folder}-export-{mesh}-{world}", rewards)


def test_an_export_has_no_files_of_a_language_model(tmp_path: Path) -> None:
    folder = build_model(tmp_path / "model")
    character_tokenizer().save(folder)
    character_tokenizer(chat_template=None).save(f"{folder}-tokenizer")

    def export(groups, _):
        trainer = RewardTrainer.build(folder, config=configure(folder), groups=groups)
        trainer.export(ExportRequest(f"{folder}-export", f"{folder}-tokenizer", "bfloat16"))

    run_alone(export)
    names = sorted(path.name for path in Path(f"{folder}-export").iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert AutoModelForSequenceClassification.from_pretrained(f"{folder}-export").dtype == torch.bfloat16


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    folder = build_model(tmp_path / "model")

    def build(groups, _):
        with pytest.raises(ConfigError, match="model.lora.rank must be 0 to train a reward model, got 4"):
            RewardTrainer.build(folder, config=configure(folder, lora={"rank": 4}), groups=groups)

    run_alone(build)
