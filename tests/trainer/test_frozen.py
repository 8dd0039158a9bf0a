"""The teacher on train ranks: it scores as a trainer of the same weights does, on any number of ranks, and beside it."""

import numpy as np

from offbeat.config.model import TinyConfig
from offbeat.config.root import Config
from offbeat.data.packing import plan_microbatches
from offbeat.model.tiny import build_tiny
from offbeat.trainer.bank_trainer import BankTrainer
from offbeat.trainer.frozen import Teacher
from offbeat.trainer.messages import ScoreShare
from offbeat.trainer.model_trainer import ModelTrainer
from offbeat.trainer.worker import build_trainers, find_trainer
from ranks import run_alone, run_ranks
from train_samples import VOCAB, build_model, make_batch, score

BATCH = make_batch(3, 2)
LARGER = TinyConfig(hidden_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=64, max_positions=64)


def build_teacher(folder):
    build_tiny(folder, tiny=LARGER, vocab_size=VOCAB, eos_token_id=1, pad_token_id=0, seed=3)


def config_of(folder, *, top_k=0, strategy="ddp", rank=0, temperature=0.8):
    objective = {"objective": "forward_kl", "filters": []} if top_k else {}
    return Config.model_validate({
        "model": {"path": f"{folder}/model", "lora": {"rank": rank}}, "rollout": {"temperature": temperature},
        "train": {"strategy": strategy}, "algorithm": {"preset": "opd", **objective},
        "teacher": {"path": f"{folder}/teacher", "top_k": top_k}})


def taught(teacher, *, max_tokens=64):
    """The teacher's columns for all targets; those of other ranks are 0."""
    plan = plan_microbatches(BATCH, num_ranks=teacher.groups.world, max_tokens=max_tokens, share_prefix=True)
    micros = tuple(plan.microbatches[teacher.groups.rank])
    return teacher.score(ScoreShare(BATCH, np.arange(len(BATCH)), micros, "policy", False)).scores.columns


def _score(groups, folder):
    found = {}
    for strategy in ("ddp", "fsdp"):
        teacher = Teacher(config_of(folder, top_k=3, strategy=strategy), groups)
        found[strategy] = {name: values.tolist() for name, values in taught(teacher).items()}
        plain = Teacher(config_of(folder, strategy=strategy), groups)
        np.testing.assert_allclose(taught(plain)["logprobs"], found[strategy]["logprobs"], atol=1e-5)
    if groups.world == 1:
        same = ModelTrainer.build(f"{folder}/teacher", config=config_of(folder), groups=groups)
        np.testing.assert_array_equal(taught(plain)["logprobs"], score(same, BATCH)["logprobs"])
        np.testing.assert_allclose(taught(plain, max_tokens=20)["logprobs"], score(same, BATCH)["logprobs"], atol=1e-5)
        assert list(taught(plain)) == ["logprobs"]
    return found


def test_it_scores_the_same_on_any_number_of_ranks_and_as_a_trainer_of_its_weights(tmp_path):
    build_model(tmp_path / "model")
    build_teacher(tmp_path / "teacher")
    alone = run_alone(_score, argument=str(tmp_path))
    assert list(alone["ddp"]) == ["logprobs", *(f"top_{what}_{i}" for what in ("tokens", "logprobs") for i in range(3))]
    both = run_ranks(_score, world=2, argument=str(tmp_path))
    for strategy, columns in alone.items():
        for name, values in columns.items():
            together = sum(np.array(rank[strategy][name]) for rank in both)
            np.testing.assert_allclose(together, values, atol=1e-4)


def test_it_stands_beside_a_whole_model_and_beside_an_adapter(tmp_path):
    build_model(tmp_path / "model")
    build_teacher(tmp_path / "teacher")

    def check(groups, _):
        for rank, kind in ((0, ModelTrainer), (4, BankTrainer)):
            parts = build_trainers(str(tmp_path / "model"), config_of(tmp_path, rank=rank), groups)
            assert type(parts[""]) is kind and list(parts) == ["", "teacher"]
            assert find_trainer(parts, "teacher.score") == (parts["teacher"], "score")
        many = config_of(tmp_path, rank=4)
        assert list(build_trainers(str(tmp_path / "model"), many, groups, many=True)) == [""]

    run_alone(check)
