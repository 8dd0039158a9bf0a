"""Plans of runs: everything that depends on the machine is chosen once, and is in the run's folder with the reasons."""

import json
from pathlib import Path
from typing import Any

import pytest

from offbeat.config.for_processes import PlanConfig
from offbeat.config.root import Config
from offbeat.errors import DataError
from offbeat.runs import plan as module
from offbeat.runs.plan import KeptChoice, change_choice, choose_changes, make_plan, read_plan
from offbeat.runs.step_choice import Choice


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda: 8)
    monkeypatch.setattr(module, "usable_devices", lambda: 0)


def test_a_plan_has_the_chosen_settings_and_says_of_what_they_are(tmp_path: Path) -> None:
    given = Config.model_validate({
        "run": {"name": "a", "dir": str(tmp_path)}, "model": {"dtype": "auto"}, "inference": {"num_engines": 2, "threads": 1}})
    plan = make_plan(given).having([Choice("train.optimizer.lr", "0.001", "a rate")])
    assert (plan.sections.train.threads, plan.sections.inference.threads, plan.sections.train.precision) == (6, 1, "float32")
    assert plan.notes == ("CPU threads: 6 for each train rank, 1 for each engine, of 8 cores",)
    (tmp_path / "a").mkdir()
    plan.write(given.planned(plan.sections))
    found = json.loads((tmp_path / "a" / "plan.json").read_text())
    assert (found["devices"], found["cores"], tuple(found["notes"])) == (0, 8, plan.notes)
    assert found["settings"]["train.threads"] == {"value": 6, "why": "of 8 cores"}
    assert found["settings"]["train.precision"]["value"] == "float32"
    assert found["settings"]["model.dtype"]["why"] == "a tiny model gains nothing from bfloat16"
    assert found["settings"]["train.optimizer.lr"]["why"] == "a rate"
    kept = read_plan(tmp_path / "a")
    assert (kept.cores, kept.notes, kept.settings["train.threads"]) == (8, plan.notes, KeptChoice(6, "of 8 cores"))
    assert not {"inference.threads", "train.devices_per_rank", "attention"} & found["settings"].keys()  # given, unchanged, and no setting


def test_a_plan_of_a_plan_changes_nothing(tmp_path: Path) -> None:
    given = Config.model_validate({"run": {"name": "a", "dir": str(tmp_path)}})
    chosen = make_plan(given).sections
    again = make_plan(given.planned(chosen))
    assert again.sections == chosen
    assert (again.choices, again.notes) == ((), ())


def test_a_plan_has_changes_of_weights_where_the_number_format_that_it_chose_makes_them_few(tmp_path: Path) -> None:
    given = Config.model_validate({"run": {"name": "a", "dir": str(tmp_path)}, "model": {"dtype": "bfloat16"}})
    plan = make_plan(given)
    assert plan.sections.weights.whole_every_versions == 20
    assert Choice("weights.whole_every_versions", "20", "a step changes few weights in bfloat16") in plan.choices
    assert make_plan(given, trains=False).sections.weights.whole_every_versions == "auto"  # nothing is published


def test_without_ranks_a_plan_leaves_the_training_step_open() -> None:
    plan = make_plan(Config(), trains=False)
    assert (plan.sections.train.precision, plan.sections.train.threads, plan.sections.inference.threads) == ("auto", 0, 8)
    assert all(not choice.setting.startswith("train.") for choice in plan.choices)


def test_a_folder_without_a_plan_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"plan.json cannot be read: No such file or directory; give a run's folder, such as runs/my-run"):
        read_plan(tmp_path)
    (tmp_path / "config.toml").touch()
    with pytest.raises(DataError, match="made by a version that kept no plan; what it chose is among all other settings in .*/config.toml"):
        read_plan(tmp_path)
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(DataError, match="this JSON is not a KeptPlan"):
        read_plan(tmp_path)


def configured(*, dtype: str = "bfloat16", **sections: Any) -> PlanConfig:
    model = {"path": "some/model", "dtype": dtype} | sections.pop("model", {})
    return Config.model_validate({"model": model, **sections}).for_plan


VLLM = {"engine": "vllm"}


@pytest.mark.parametrize(("config", "number", "why"), [
    (configured(), 20, "a step changes few weights in bfloat16"),
    (configured(dtype="float32"), 1, "a step changes nearly every weight in float32"),
    (configured(model={"lora": {"rank": 4}}), 1, "adapters are small"),
    (configured(inference={"quantization": "int8"}), 1, "engines keep int8 weights alone, to which no changes can be applied"),
    (configured(inference=VLLM | {"quantization": "int8"}, weights={"channel": "collective"}), 20,
     "a step changes few weights in bfloat16"),
    (configured(inference={"engine": "sglang"}), 1, "sglang takes whole weights only"),
    (configured(inference=VLLM), 1, "vllm would keep a copy of the weights for it, and has whole folders on this machine"),
    (configured(inference=VLLM, weights={"channel": "collective"}), 20, "a step changes few weights in bfloat16"),
    (configured(inference=VLLM | {"urls": ["http://a:1"]}), 20, "a step changes few weights in bfloat16"),
    (configured(inference=VLLM, cluster={"launcher": "ray", "ray_address": "auto"}), 20, "a step changes few weights in bfloat16"),
    (configured(weights={"whole_every_versions": 3}), 3, "as configured"),
    (configured(inference={"engine": "sglang"}, weights={"whole_every_versions": 1}), 1, "as configured")])
def test_changes_are_sent_where_they_are_few_and_save_a_copy_or_a_link(config: PlanConfig, number: int, why: str) -> None:
    found = change_choice(config)
    assert (found.setting, found.value, found.why) == ("weights.whole_every_versions", str(number), why)
    chosen = choose_changes(config)
    assert (chosen.weights.whole_every_versions, chosen.weights.sends_changes) == (number, number > 1)


def test_until_it_is_chosen_every_version_is_whole() -> None:
    assert (configured().weights.longest_chain, configured().weights.sends_changes) == (1, False)
