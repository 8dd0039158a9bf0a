"""What is said of settings that cannot act, and of learning rates of adapters."""

import pytest

from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.load import load_config
from offbeat.config.notes import _readers, correction_of, few_rows_note, notes, notes_of_check
from offbeat.config.presets import PRESETS


def said(part, *settings):
    return list(notes(load_config(None, settings), part))


def test_a_step_of_more_prompts_than_there_are_rows_is_told_of():
    rollout = load_config(None, []).rollout
    assert few_rows_note(rollout, num_rows=16).startswith(
        "a step takes rollout.consumer_batch_size = 64 prompts and there are 16 to train on, so each is drawn 4.0 times a step; with 16 or")
    assert [few_rows_note(rollout, num_rows=num_rows) for num_rows in (64, 1000, None, 0)] == [""] * 4


@pytest.mark.parametrize("preset", PRESETS)
def test_no_preset_has_a_setting_that_cannot_act(preset):
    needed = [("teacher.path", "big")] if preset == "opd" else []
    assert said("rl", ("algorithm.preset", preset), *needed) == []


@pytest.mark.parametrize(("settings", "sentence"), [
    ([("algorithm.clip_high", "0.3")], "so the clip range has no effect; algorithm.weight alone limits how far"),
    ([("algorithm.weight", "none")], "so the clip range has no effect; nothing limits how far samples"),
    ([("algorithm.objective", "importance_sampling"), ("algorithm.clip_high", "0.3"), ("algorithm.num_minibatches", "2")],
     "algorithm.clip_high has no effect with algorithm.objective = 'importance_sampling', which has no clip"),
    ([("algorithm.preset", "cispo"), ("algorithm.weight_low", "0.5"), ("algorithm.weight_high", "2")],
     "algorithm.weight_low and algorithm.weight_high have no effect with algorithm.weight = 'none', which has no bounds"),
    ([("algorithm.overlong_penalty", "2")], "algorithm.overlong_penalty has no effect without algorithm.overlong_buffer_share"),
    ([("algorithm.kl_coefficient", "0.1")], "algorithm.kl_coefficient has no effect with algorithm.kl_loss = 'none'"),
    ([("algorithm.gae_lambda", "0.9")], "algorithm.gae_lambda has no effect without algorithm.centre = 'critic'"),
    ([("algorithm.preset", "vapo"), ("algorithm.gae_lambda", "0.9")], "algorithm.gae_lambda has no effect with algorithm.gae_length_alpha"),
    ([("algorithm.imitate_above", "0.5")], "algorithm.imitate_above has no effect without"),
    ([("algorithm.reward_scale", "10")], "algorithm.reward_scale has no effect where rewards are divided by their own size"),
    ([("algorithm.reference_refresh_steps", "5")], "algorithm.reference_refresh_steps has no effect without a term that compares"),
    ([("critic.optimizer.lr", "1e-4")], "[critic] has no effect without algorithm.centre = 'critic'"),
    ([("model.lora.rank", "8"), ("train.optimizer.lr", "1e-6")],
     "train.optimizer.lr = 1e-06 suits the training of all weights, and an adapter (model.lora.rank = 8)"),
])
def test_a_setting_that_cannot_act_is_told_of_once(settings, sentence):
    found = said("rl", *settings)
    assert [sentence in note for note in found] == [True], found
    assert any(sentence in note for note in notes_of_check(load_config(None, settings))) or "clip range" in sentence  # which says it anyway


@pytest.mark.parametrize("settings", [
    [("algorithm.clip_high", "0.3"), ("algorithm.num_minibatches", "2")], [("algorithm.anchor", "rollout"), ("algorithm.weight", "none")],
    [("algorithm.reward_scale", "10"), ("algorithm.scale", "none")], [("algorithm.reward_scale", "10"), ("algorithm.reward_clip", "5")],
    [("model.lora.rank", "8"), ("train.optimizer.lr", "1e-5")],
    [("model.lora.rank", "8")], []])
def test_settings_that_act_are_not(settings):
    assert said("rl", *settings) == []


def test_an_adapter_of_preference_training_is_told_of_its_own_rate():
    lora = [("model.lora.rank", "8"), ("preference.optimizer.lr", "5e-7")]
    assert [note[:33] for note in said("preference", *lora)] == ["preference.optimizer.lr = 5e-07 s"]
    assert [note[:33] for note in notes_of_check(load_config(None, lora))] == ["preference.optimizer.lr = 5e-07 s"]
    assert said("preference", *lora, ("preference.optimizer.lr", "5e-6")) == said("sft", *lora) == []


def test_robust_without_wrong_labels_is_dpo():
    assert "with which the loss robust is dpo" in said("preference", ("preference.loss", "robust"))[0]


@pytest.mark.parametrize(("settings", "sentence"), [
    ([], "as policy/logprob_gap_mean shows; algorithm.weight = 'mask' (0 to 5) corrects for it"),
    ([("algorithm.preset", "tis")], "; algorithm.weight = 'clamp' (0 to 2) corrects for it"),
    ([("algorithm.weight", "ratio")], "; algorithm.weight = 'ratio' corrects for it"),
    ([("algorithm.preset", "dapo")], "; the ratio to the policy that sampled (algorithm.anchor = 'rollout') corrects for it"),
    ([("algorithm.preset", "kpop")], "; algorithm.filters corrects for it"),
    ([("algorithm.weight", "none"), ("algorithm.num_minibatches", "2")],
     "; nothing corrects for it: leave algorithm.weight at 'mask', or set it to 'clamp' and algorithm.weight_high to 2"),
    ([("weights.whole_every_versions", "5")], "could be applied to (weights.whole_every_versions), and reads the last whole version"),
    ([("weights.whole_every_versions", "5"), ("weights.channel", "collective")], "and receives whole weights"),
])
def test_engines_with_rounded_weights_are_told_of_with_what_corrects_for_it(settings, sentence):
    given = [("inference.quantization", "int8"), *settings]
    assert [sentence in note for note in said("rl", *given)].count(True) == 1
    assert any(sentence in note for note in notes_of_check(load_config(None, given)))
    assert not any("rounded" in note for note in [*said("rl", *settings), *said("sft", *given)])


def test_an_adapter_over_rounded_weights_is_told_of_with_what_corrects_for_it():
    given = [("model.lora.rank", "4"), ("model.quantization", "nf4")]
    (note,) = [note for note in said("rl", *given) if "rounded" in note]
    assert note.startswith("the adapter is trained over weights rounded to nf4 (model.quantization), and sampled over whole ones")
    assert "algorithm.weight = 'mask' (0 to 5) corrects for it" in note


def test_changes_are_applied_before_vllm_rounds():
    given = [("inference.engine", "vllm"), ("inference.quantization", "int8"), ("weights.whole_every_versions", "5")]
    assert any("weights rounded to int8" in note for note in said("rl", *given))
    assert not any("could be applied to" in note for note in said("rl", *given))


def test_every_preset_corrects_for_rounded_weights_but_that_which_imitates():
    assert [name for name, preset in PRESETS.items() if not correction_of(AlgorithmConfig(preset=name, **preset.settings))] == ["raft"]


def test_what_is_looked_at_are_settings():
    names = {name for group, _, _ in _readers(AlgorithmConfig()) for name in group}
    assert names < set(AlgorithmConfig.model_fields)


@pytest.mark.parametrize(("settings", "sentence"), [
    ([("rollout.top_p", "0.9"), ("inference.engine", "vllm")],
     "rollout.top_p = 0.9 leaves tokens out when engines sample, and the trainer normalises over all tokens, since vllm does not return"),
    ([("rollout.top_k", "5"), ("inference.engine", "sglang")], "rollout.top_k = 5 leaves tokens out when engines sample, and the trainer"),
    ([("rollout.top_p", "0.9"), ("model.support_replay", "off")],
     "since model.support_replay = 'off'; so each ratio to the policy that sampled is wrong by the probability of the tokens kept"),
    ([("rollout.top_p", "0.9"), ("algorithm.preset", "opd"), ("teacher.path", "big")], "since the teacher's log-probabilities are those"),
])
def test_sampling_that_leaves_tokens_out_is_told_of_where_the_trainer_does_not_follow(settings, sentence):
    [told] = said("rl", *settings)
    assert sentence in told and not load_config(None, settings).replays_supports
    assert not said("sft", *settings)


@pytest.mark.parametrize("settings", [
    [("rollout.top_p", "0.9")], [("rollout.top_p", "0.9"), ("model.support_replay", "rollout")], [("model.support_replay", "off")],
    [("inference.engine", "vllm")]])
def test_sampling_that_the_trainer_follows_is_not(settings):
    assert said("rl", *settings) == []
