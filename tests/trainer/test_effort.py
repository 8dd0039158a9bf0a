"""What a step takes of a rank: operations against torch's own count, however rows are packed, shared and divided; and the metrics of it."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from offbeat.algorithms.adam import AdamParams
from offbeat.config.root import Config
from offbeat.data.cost import forward_flops, run_work
from offbeat.ranks.trainers import speed
from offbeat.trainer.messages import Trained, TrainStep
from ranks import run_alone, run_ranks
from train_samples import MESHES, arranged, build_model, build_trainer, make_batch, own_share, take_step

LENGTHS = [7, 12, 30]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_model(tmp_path_factory.mktemp("model"))


def counted(model, tokens, *, learns):
    counter = FlopCounterMode(display=False)
    with counter, torch.set_grad_enabled(learns):
        logits = model(torch.arange(tokens)[None] % 23).logits
        if learns:
            logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_operations_are_those_that_torch_counts(folder, tokens, learns):
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    work = run_work(tokens)
    work[1] *= 2  # the eager kernel computes pairs that are masked, too
    assert forward_flops(model.config.to_dict()).of_pass(work, learns=learns) == counted(model, tokens, learns=learns)


def test_frozen_weights_have_no_gradients_to_compute(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").requires_grad_(False)
    embeddings = model.get_input_embeddings()
    embeddings.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())
    work = run_work(9)
    work[1] *= 2
    assert forward_flops(model.config.to_dict()).of_pass(work, learns=True, frozen=True) == counted(model, 9, learns=True)


def test_a_row_that_shares_a_prompt_is_counted_as_it_is_run(folder):
    batch = make_batch(2, 3)

    def check(groups, _):
        found = []
        for share_prefix in (True, False):
            trainer = build_trainer(groups, folder, share_prefix=share_prefix)
            part, micros = own_share(trainer, batch, share_prefix=share_prefix)
            answer = trainer.train_step(TrainStep(part, (tuple(micros),), AdamParams(lr=1e-3)))
            flops = forward_flops(trainer._model.config.to_dict())
            rows = trainer._rows(part, micros)
            assert answer.tokens == sum(map(len, rows))
            assert answer.flops == pytest.approx(sum(flops.of_pass(row.work, learns=True) for row in rows))
            found.append(answer)
        shared, apart = found
        assert apart.tokens - shared.tokens == 2 * 2 * 5, "two of three copies of two prompts of 5 tokens"
        assert shared.flops < apart.flops

    run_alone(check)


def test_a_forward_pass_before_several_minibatches_counts_as_such(folder):
    batch = make_batch(4, 2)

    def check(groups, _):
        answers = []
        for minibatches in ([[np.arange(8)]], [[np.arange(4)], [np.arange(4, 8)]]):
            trainer = build_trainer(groups, folder)
            take_step(trainer, batch, [[np.arange(2)]])  # what was counted before a step is not its own
            answers.append(trainer.train_step(TrainStep(batch, tuple(map(tuple, minibatches)), AdamParams(lr=1e-3))))
        once, twice = answers
        assert twice.tokens == once.tokens and twice.flops == pytest.approx(once.flops * 4 / 3)
        assert 0 < once.busy_s <= once.end_s - once.start_s and once.memory_bytes > 2**20 and once.peak_flop_per_s == 0.0

    run_alone(check)


def _shares(groups, folder):
    found = []
    for mesh in MESHES[2]:
        trainer = build_trainer(groups, folder, mesh=mesh)
        part, micros = own_share(trainer, make_batch(3, 2), share_prefix=True)
        answer = trainer.train_step(TrainStep(part, (tuple(micros),), AdamParams(lr=1e-3)))
        found.append([answer.tokens, answer.flops, trainer.groups.shape == arranged(groups, mesh).shape])
    return found


def test_all_ranks_of_a_mesh_together_count_what_one_does(folder):
    def alone(groups, _):
        trainer = build_trainer(groups, folder)
        part, micros = own_share(trainer, make_batch(3, 2), share_prefix=True)
        answer = trainer.train_step(TrainStep(part, (tuple(micros),), AdamParams(lr=1e-3)))
        expected.extend([answer.tokens, answer.flops])

    expected: list[float] = []
    run_alone(alone)
    first, second = run_ranks(_shares, world=2, argument=folder)
    for mesh, mine, theirs in zip(MESHES[2], first, second, strict=True):
        assert mine[0] + theirs[0] == expected[0] and mine[1] + theirs[1] == pytest.approx(expected[1]), mesh


def test_the_metrics_of_a_step_are_over_all_its_ranks():
    answers = [Trained({}, 10.0, 12.0, 1.5, 300.0, 4e12, 2e12, 5), Trained({}, 10.5, 12.0, 1.0, 100.0, 2e12, 2e12, 7)]
    assert speed(answers) == {
        "train/tokens_per_s_per_device": 100.0, "train/mfu": 0.75, "train/busy_share": 0.625, "train/peak_memory_bytes": 7.0}
    assert "train/mfu" not in speed([answers[0], Trained({}, 1.0, 2.0, 0.5, 1.0, 1.0)]), "the peak of one device is unknown"


def test_the_peak_may_be_given(folder):
    def check(groups, _):
        trainer = build_trainer(groups, folder)
        trainer._run = Config.model_validate({"telemetry": {"peak_tflop_per_s": 2.5}})
        assert trainer.train_step(TrainStep(make_batch(1, 2), ((np.arange(2),),), AdamParams(lr=1e-3))).peak_flop_per_s == 2.5e12

    run_alone(check)
