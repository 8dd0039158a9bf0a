"""The learning rates that runs choose where "auto" leaves them open."""

import json
from pathlib import Path
from typing import Any

import pytest

from offbeat.config.load import load_config
from offbeat.config.resume import Part
from offbeat.config.root import Config
from offbeat.errors import ModelError
from offbeat.runs.learning_rates import choose_rates, rates_of_check
from small_run import SmallRun, offbeat


@pytest.fixture
def smollm(tmp_path: Path) -> str:
    """Write the config.json of a model of SmolLM2-135M's width, without weights."""
    (tmp_path / "smollm").mkdir()
    (tmp_path / "smollm" / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 576}))
    return str(tmp_path / "smollm")


def configured(**changes: Any) -> Config:
    return load_config(None, values={name.replace("__", "."): value for name, value in changes.items()})


@pytest.mark.parametrize(("part", "changes", "chosen"), [
    ("rl", {}, ['train.optimizer.lr = 1e-05: "auto" for reinforcement learning of all weights, width 576']),
    ("rl", {"model__lora__rank": 8}, ['train.optimizer.lr = 0.0001: "auto" for reinforcement learning of an adapter, width 576']),
    ("rl", {"algorithm__preset": "opd", "teacher__path": "t"}, [
        'train.optimizer.lr = 5e-05: "auto" for distillation of all weights, width 576']),
    ("rl", {"algorithm__preset": "ppo", "model__lora__rank": 8, "run__warm_up": True}, [
        'train.optimizer.lr = 0.0001: "auto" for reinforcement learning of an adapter, width 576',
        'critic.optimizer.lr = 3e-05: "auto" for a critic, width 576',
        'sft.optimizer.lr = 0.0003: "auto" for supervised fine-tuning of an adapter, width 576']),
    ("sft", {}, ['sft.optimizer.lr = 3e-05: "auto" for supervised fine-tuning of all weights, width 576']),
    ("preference", {"model__lora__rank": 8}, ['preference.optimizer.lr = 5e-05: "auto" for preference training of an adapter, width 576']),
    ("reward_model", {}, ['reward_model.optimizer.lr = 3e-05: "auto" for a reward model of all weights, width 576']),
])
def test_a_part_of_a_run_chooses_the_rates_that_it_trains_with(
    part: Part, changes: dict[str, Any], chosen: list[str], smollm: str,
) -> None:
    given = configured(model__path=smollm, **changes)
    sections, choices = choose_rates(given, part)
    config = given.model_copy(update=sections)
    assert list(map(str, choices)) == chosen
    for choice in choices:
        assert getattr(config, choice.setting.partition(".")[0]).optimizer.peak == float(choice.value)
    read = {choice.setting.partition(".")[0] for choice in choices}
    assert all(getattr(config, name).optimizer.lr == "auto" for name in {"train", "sft", "critic", "preference"} - read)


@pytest.mark.parametrize("part", ["rl", "sft", "preference", "reward_model"])
def test_a_number_that_is_given_is_taken(part: Part, smollm: str) -> None:
    rates = {f"{name}__optimizer__lr": 3e-7 for name in ("train", "sft", "critic", "preference", "reward_model")}
    given = configured(model__path=smollm, model__lora__rank=8, algorithm__preset="ppo", run__warm_up=True, **rates)
    assert choose_rates(given, part, was={"train.optimizer.lr": 0.5, "sft.optimizer.lr": 0.5}) == ({}, [])


def test_a_model_to_be_built_has_the_width_that_is_configured() -> None:
    assert choose_rates(configured(model__tiny__hidden_size=512), "rl")[0]["train"].optimizer.lr == 1e-5
    assert choose_rates(configured(), "rl")[0]["train"].optimizer.lr == 2e-4


def test_a_critic_of_its_own_model_goes_by_that(smollm: str) -> None:
    sections, _ = choose_rates(configured(critic__path=smollm, algorithm__preset="ppo"), "rl")
    assert {name: section.optimizer.lr for name, section in sections.items()} == {"train": 2e-4, "critic": 3e-5}


def test_a_checkpoint_keeps_its_rates_also_those_that_this_part_does_not_read(smollm: str) -> None:
    was = {"train.optimizer.lr": 1e-6, "critic.optimizer.lr": 2e-5, "sft.optimizer.lr": "auto"}  # as older versions remember them
    sections, choices = choose_rates(configured(model__path=smollm), "rl", was=was)
    assert list(map(str, choices)) == ['train.optimizer.lr = 1e-06: "auto" keeps what the run had at its checkpoint']
    assert {name: section.optimizer.lr for name, section in sections.items()} == {"train": 1e-6, "critic": 2e-5}


def test_a_model_whose_width_is_unknown_needs_a_number(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelError, match="has no hidden_size, by which a learning rate would be chosen; give the rate as a number"):
        choose_rates(configured(model__path=str(tmp_path)), "rl")
    assert choose_rates(configured(model__path=str(tmp_path), train__optimizer__lr=1e-6), "rl")[1] == []


def test_check_says_the_rates_of_prompts_or_of_pairs_and_that_those_of_the_hub_come_later(smollm: str) -> None:
    def said(*, pairs: bool, **changes: Any) -> list[str]:
        return [line.split(":")[0] for line in rates_of_check(configured(**changes), pairs=pairs)]

    assert said(pairs=False, model__path=smollm) == ["train.optimizer.lr = 1e-05", "sft.optimizer.lr = 3e-05"]
    assert said(pairs=True, model__path=smollm) == ["preference.optimizer.lr = 5e-06", "reward_model.optimizer.lr = 3e-05"]
    assert next(rates_of_check(configured(model__path="org/model"), pairs=False)) == (
        'train.optimizer.lr = "auto": chosen at the start, by the config.json of org/model, which is no folder here')


def test_an_adapter_learns_from_preferences_at_the_rate_that_is_chosen_and_goes_on_with_it(tmp_path: Path, model_dir: str) -> None:
    rows = [{"prompt": f"{n}=", "chosen": "yes", "rejected": "no"} for n in range(10)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = SmallRun(tmp_path, model_dir)
    settings = {
        "data__task": "", "data__path": str(tmp_path / "pairs.jsonl"), "data__heldout_size": "2", "model__lora__rank": "4",
        "preference__batch_size": "8", "preference__evaluate_every_steps": "0", "checkpoint__export": "false"}
    first = offbeat("dpo", *run.arguments(**settings, preference__total_steps="8"))
    assert first.returncode == 0, first.stderr
    line = 'preference.optimizer.lr = 0.002: "auto" for preference training of an adapter, width 32'
    assert line in first.stdout + first.stderr
    assert load_config(str(run.folder / "config.toml")).preference.optimizer.lr == 2e-3
    losses = [row["train/loss"] for row in run.metrics()]
    assert losses[0] == pytest.approx(0.6931, abs=1e-4) and losses[-1] < 0.685
    again = offbeat("dpo", *run.arguments(**settings, preference__total_steps="9"))
    assert 'preference.optimizer.lr = 0.002: "auto" keeps what the run had at its checkpoint' in again.stdout + again.stderr
    assert run.metrics()[-1]["train/lr"] == pytest.approx(2e-3 * 9 / 10), "the ninth step of a warm-up of ten"
