"""The teacher on train ranks: it scores as a trainer of the same weights does, on any number of ranks, and beside it."""

import numpy as np
import pytest
import torch

from offbeat.algorithms.distillation import TeacherScores, with_teacher
from offbeat.algorithms.objectives import policy_loss
from offbeat.config.model import TinyConfig
from offbeat.config.root import Config
from offbeat.data.packing import plan_microbatches
from offbeat.model.load import load_causal_lm
from offbeat.model.tiny import build_tiny
from offbeat.trainer.bank_trainer import BankTrainer
from offbeat.trainer.frozen import TeacherModel
from offbeat.trainer.messages import ScoreShare
from offbeat.trainer.model_trainer import ModelTrainer
from offbeat.trainer.worker import build_trainers, find_trainer
from ranks import run_alone, run_ranks
from train_samples import MESHES, VOCAB, arranged, build_model, make_batch, score, train

BATCH = make_batch(3, 2)
LARGER = TinyConfig(hidden_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=64, max_positions=64)


def build_teacher(folder):
    build_tiny(folder, tiny=LARGER, vocab_size=VOCAB, eos_token_id=1, pad_token_id=0, seed=3)


def config_of(folder, *, top_k=0, rank=0, temperature=0.8):
    objective = {"objective": "forward_kl", "filters": []} if top_k else {}
    return Config.model_validate({
        "model": {"path": f"{folder}/model", "lora": {"rank": rank}}, "rollout": {"temperature": temperature},
        "algorithm": {"preset": "opd", **objective},
        "teacher": {"path": f"{folder}/teacher", "top_k": top_k}})


def taught(teacher, *, max_tokens=64):
    """The teacher's columns for all targets; those of other ranks are 0."""
    plan = plan_microbatches(BATCH, num_ranks=teacher.groups.batch_ranks, max_tokens=max_tokens, share_prefix=True)
    micros = tuple(plan.microbatches[teacher.groups.batch_index])
    return teacher.score(ScoreShare(BATCH, np.arange(len(BATCH)), micros, "policy", False)).scores.columns


def _score(groups, folder):
    found = {}
    for mesh in MESHES[groups.world]:
        teacher = TeacherModel(config_of(folder, top_k=3), arranged(groups, mesh))
        found[mesh] = {name: values.tolist() for name, values in taught(teacher).items()}
        plain = TeacherModel(config_of(folder), arranged(groups, mesh))
        np.testing.assert_allclose(taught(plain)["logprobs"], found[mesh]["logprobs"], atol=1e-5)
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
    for mesh in MESHES[2]:
        for name, values in alone["ddp"].items():
            together = sum(np.array(rank[mesh][name]) for rank in (both[:1] if mesh in ("tp2", "cp2") else both))
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
        assert list(build_trainers(str(tmp_path / "model"), many, groups, trains="adapters")) == [""]

    run_alone(check)


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl"])
def test_the_likeliest_tokens_teach_the_same_in_any_split_as_their_formula_says(name, tmp_path):
    build_model(tmp_path / "model")
    build_teacher(tmp_path / "teacher")
    config = config_of(tmp_path, top_k=3, temperature=1.0)
    algorithm = config.algorithm.model_copy(update={"objective": name})

    def check(groups, _):
        found = taught(TeacherModel(config, groups))
        tokens, logs = (np.stack([found[f"top_{what}_{i}"] for i in range(3)], axis=1) for what in ("tokens", "logprobs"))
        plain = make_batch(3, 2, loss=policy_loss(algorithm))
        batch = with_teacher(plain, TeacherScores(found["logprobs"], np.zeros(6, bool), tokens.astype(np.int32), logs), algorithm)
        assert batch.num_targets == 3 * plain.num_targets
        results = []
        for settings in ({"max_tokens": 10_000}, {"max_tokens": 20}, {"max_tokens": 64, "share_prefix": False}):
            trainer = ModelTrainer.build(f"{tmp_path}/model", config=config.for_ranks, groups=groups)
            results.append(train(trainer, [batch], **settings)[0])
        model = load_causal_lm(f"{tmp_path}/model", attention="sdpa").double()
        total = torch.zeros(()).double()
        for i in range(len(plain)):
            one, own = plain.select([i]), slice(plain.target_offsets[i], plain.target_offsets[i + 1])
            every = model(input_ids=torch.from_numpy(one.tokens.astype(np.int64))[None], use_cache=False).logits[0].log_softmax(-1)
            for m, at in zip(range(own.start, own.stop), one.positions, strict=True):
                q = torch.from_numpy(logs[m].astype(np.float64)).softmax(0)
                lp = every[at][tokens[m].astype(np.int64)]
                outside = (1 - lp.exp().sum()) * (1 - q.min().log())
                kl = (q * (q.log() - lp)).sum() if name == "forward_kl" else (lp.exp() * (lp - q.log())).sum() + outside
                total = total + float(plain.columns["loss_weights"][m]) * kl
        total.backward()
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(p.grad) for p in model.parameters()])).item()
        for result in results:
            assert result == pytest.approx([total.item(), norm], rel=1e-4)

    run_alone(check)
