"""Arguments of public functions become the configuration that a command would load."""

from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat.api.settings import configured
from offbeat.config.data import DataConfig
from offbeat.config.dump import dump_toml
from offbeat.config.load import load_config
from offbeat.config.rollout import reward_name
from offbeat.config.root import Config
from offbeat.data.dataset import open_datasets
from offbeat.errors import CodeError, ConfigError, DataError
from offbeat.user_code.functions import resolve
from offbeat.user_code.given import find_given
from support import own_losses

HOMES = ("run", "rollout", "train", "train.optimizer", "algorithm")


def load(config: Any = None, settings: Any = None, given: Any = None, rows: Any = None, **keywords: Any) -> Config:
    with configured(config, settings, keywords, homes=HOMES, given=given or {}, rows=rows or {}) as found:
        return found


def test_settings_come_by_their_whole_name_by_section_or_by_their_last_part() -> None:
    found = load(settings={"train.optimizer.lr": 1e-5, "evaluate": {"every_steps": 3}}, total_steps=7, rollout={"top_k": 5}, group_size=4)
    assert (found.train.optimizer.lr, found.evaluate.every_steps, found.run.total_steps) == (1e-5, 3, 7)
    assert (found.rollout.top_k, found.rollout.group_size) == (5, 4)
    assert load(lr=2e-5).train.optimizer.lr == 2e-5, "the first home that has it"
    assert load(num_engines=3).inference.num_engines == 3, "the only one of its kind"
    assert load(**{"sft.optimizer.lr": 3e-5}).sft.optimizer.lr == 3e-5


def test_later_places_win_and_what_was_given_is_not_changed() -> None:
    section = {"optimizer": {"lr": 1e-3, "warmup_steps": 2}}
    found = load({"train": section, "run": {"name": "first"}}, {"run.name": "second"}, {"model.path": Path("a/b")}, lr=5e-4)
    assert (found.run.name, found.train.optimizer.lr, found.train.optimizer.warmup_steps) == ("second", 5e-4, 2)
    more = load(found.model_dump(), {"train": {"threads": 3}}, evaluate={"every_steps": 4})
    assert (more.train.optimizer.lr, more.train.threads, more.evaluate.every_steps) == (5e-4, 3, 4), "a section gives what it names"
    assert found.model.path == "a/b" and section == {"optimizer": {"lr": 1e-3, "warmup_steps": 2}}


def test_a_configuration_that_one_prints_is_accepted_by_the_other(tmp_path: Path) -> None:
    ours = load(settings={"rollout.stop": ("\n",), "evaluate.sets": {"hard": {"data": {"task": "addition"}}}}, total_steps=9)
    file = tmp_path / "config.toml"
    file.write_text(dump_toml(ours))
    assert load_config(str(file)) == ours == load(file) == load(str(file)) == load(ours.model_dump())


def test_rewards_with_weights_are_one_setting_however_their_names_look() -> None:
    weights = {"exact_match": 1.0, "my.py:short": 0.2}
    ours = load(settings={"rollout.rewards": weights, "evaluate.sets.hard": {"num_prompts": 3, "rollout": {"rewards": {"a.b:c": 2.0}}}})
    assert ours.rollout.rewards == load(rewards=weights).rollout.rewards == load(rollout={"rewards": weights}).rollout.rewards == weights
    assert ours.evaluation_set("hard").rollout.rewards == {"a.b:c": 2.0}
    assert load(ours.model_dump()) == ours
    assert load(ours.model_dump(), rewards={"math": 1.0}).rollout.rewards == {"math": 1.0}, "others replace them"
    template = {"enable_thinking": False, "a.b": 1}
    assert load(chat_template_kwargs=template).data.chat_template_kwargs == template


def test_functions_with_weights_are_named_and_known() -> None:
    with configured(None, {"rollout.rewards": {(lambda completion, row: 1.0): 0.5, own_losses.squared: 1.0}}, {}, homes=HOMES, given={},
                    rows={}) as found:
        (first, weight), (second, _) = found.rollout.rewards.items()
        assert first.startswith("python:") and weight == 0.5 and second.endswith(":squared")
        assert callable(find_given(first)) and find_given(second) is own_losses.squared
    assert find_given(second) is None


def test_a_keyword_may_be_the_name_that_other_projects_have() -> None:
    assert load(learning_rate=1e-4, num_generations=3, max_staleness=2) == load(lr=1e-4, group_size=3, max_head_offpolicyness=2)
    with configured(None, None, {"learning_rate": 0.5}, homes=("sft", "sft.optimizer"), given={}, rows={}) as found:
        assert found.sft.optimizer.lr == 0.5 != found.train.optimizer.lr
    assert load(load(group_size=8).model_dump(), {"rollout.num_generations": 3}, group_size=5).rollout.group_size == 5, "keywords win"


@pytest.mark.parametrize(("given", "told"), [
    ({"colour": 1}, "colour is not a setting; 'offbeat config docs' lists them all"),
    ({"learnt_rate": 1}, "learnt_rate is not a setting; did you mean train.optimizer.lr?"),
    ({"max_completion_length": 8}, "max_completion_length is not a setting; did you mean rollout.max_new_tokens?"),
    ({"lora_rank": 8}, "lora_rank is not a setting; did you mean model.lora.rank? Give it as rank=..."),
    ({"max_tokens": 8}, "max_tokens is not a setting; did you mean rollout.max_new_tokens? Give it as max_new_tokens=..."),
    ({"grup_size": 8}, "grup_size is not a setting; did you mean rollout.group_size?"),
    ({"lr": 1, "learning_rate": 2}, "lr and learning_rate are two names of one setting, train.optimizer.lr; give one of them"),
    ({"total_steps": 1, "run.total_steps": 2}, "total_steps and run.total_steps are two names of one setting, run.total_steps"),
    ({"beta1": 0.5, "settings": {"train.lr": 1}}, "train.lr is not a setting; did you mean train.optimizer.lr?"),
    ({"num_engines": 1, "total_steps": 0}, "run.total_steps must be >= 1, got 0; use 1 for a single step"),
    ({"batch_size": 4}, "batch_size may be sft.batch_size or preference.batch_size or reward_model.batch_size; give it by its whole name"),
    ({"beta": 0.5}, "beta is preference.beta of offbeat.dpo, which this call does not read; did you mean algorithm.kl_coefficient?"
     " algorithm.kl_coefficient acts with algorithm.kl_loss = 'k3'"),
    ({"label_smoothing": 0.1}, "label_smoothing is preference.label_smoothing of offbeat.dpo, which this call does not read; 'offbeat"),
    ({"kl_coef": 0.1}, "kl_coef is not a setting; did you mean algorithm.kl_coefficient? algorithm.kl_coefficient acts with algorithm"),
    ({"epochs": 3}, "epochs is not a setting; did you mean run.total_steps?"),
    ({"num_train_epochs": 3}, "num_train_epochs is not a setting; did you mean run.total_steps?"),
    ({"total_step": 3}, "total_step is not a setting; did you mean run.total_steps?"),
    ({"rewards": len}, "rewards takes several rewards with their weights, as in rewards={mine: 1.0, 'exact_match': 0.5}, got <built-in fu"),
    ({"rewards": "math"}, "rewards takes several rewards with their weights, as in rewards={mine: 1.0, 'exact_match': 0.5}, got 'math'"),
    ({"rollout": 3}, "rollout takes settings by name, as a mapping, got 3 (int)"),
    ({"settings": {"train": {"optimizer": 3}}}, "train.optimizer takes settings by name, as a mapping, got 3 (int)"),
    ({"config": 3}, "config must be a TOML file or a mapping of settings, got int"),
    ({"config": "gone.toml"}, "configuration file gone.toml does not exist"),
])
def test_a_mistake_is_told_as_on_the_command_line(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(**given)
    assert str(refused.value).startswith(told)


def test_a_name_of_one_section_is_its_own_where_that_is_read() -> None:
    homes = ("preference", "preference.optimizer", "run", "train", "data", "model")
    with configured(None, None, {"beta": 0.5, "loss": "ipo", "too_long": "drop"}, homes=homes, given={}, rows={}) as found:
        assert (found.preference.beta, found.preference.loss, found.sft.too_long) == (0.5, "ipo", "drop")
    with configured(None, {"preference.beta": 0.5}, {"stop_at_accuracy": 0.5}, homes=HOMES, given={}, rows={}) as found:
        assert found.preference.beta == 0.5, "by its whole name it may always be given"
        assert found.sft.stop_at_accuracy == 0.5, "the warm-up reads it"
    with pytest.raises(ConfigError, match=r"did you mean preference.total_steps\? Give it as total_steps=\.\.\.$"), configured(
            None, None, {"total_step": 3}, homes=homes, given={}, rows={}):
        pass
    with pytest.raises(ConfigError, match=r"did you mean preference.total_steps\? Give it as total_steps=\.\.\.$"), configured(
            None, None, {"epochs": 3}, homes=homes, given={}, rows={}):
        pass


def test_what_a_call_does_not_read_is_not_suggested_either() -> None:
    with pytest.raises(ConfigError, match="which this call does not read; 'offbeat config docs' lists them all$"), configured(
            None, None, {"beta": 0.5}, homes=("sft", "sft.optimizer", "run", "train", "data", "model"), given={}, rows={}):
        pass


def test_functions_are_known_under_their_names_for_as_long_as_the_run() -> None:
    def reward(completion: str, row: object) -> float:
        return 1.0

    def tool(x: int) -> int:
        return x

    given = {"rollout.reward": reward, "agent.tools": [tool, "tools.py:add"], "rollout.workflow": "tool_loop"}
    with configured(None, {"evaluate.sets": {"own": {"rollout": {"reward": reward}}}}, {}, homes=HOMES, given=given, rows={}) as found:
        assert found.rollout.reward == "python:reward" and found.agent.tools == ("python:tool", "tools.py:add")
        assert found.evaluate.sets["own"]["rollout"]["reward"] == "python:reward"
        assert resolve("python:reward", kind="reward") is reward and find_given("python:tool") is tool
    with pytest.raises(CodeError, match="gave to its run"):
        find_given("python:reward")


def test_a_run_inside_of_a_run_leaves_it_the_functions_that_both_were_given() -> None:
    def reward(completion: str, row: object) -> float:
        return 1.0

    given = {"rollout.reward": reward}
    with configured(None, {}, {}, homes=HOMES, given=given, rows={}):
        with configured(None, {}, {}, homes=HOMES, given=given, rows={}) as inner:
            assert inner.rollout.reward == "python:reward"
        assert find_given("python:reward") is reward
    with pytest.raises(CodeError, match="gave to its run"):
        find_given("python:reward")


def test_an_objective_must_be_importable_because_ranks_import_it() -> None:
    assert load(settings={"algorithm.objective": own_losses.geometric}).algorithm.objective == "support.own_losses:geometric"
    with pytest.raises(CodeError, match="algorithm.objective: an objective is called in the train ranks, which import it"):
        load(settings={"algorithm.objective": lambda tokens, constants: tokens})


def test_rows_in_memory_are_written_beside_the_runs(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}=", "answer": str(i)} for i in range(20)]
    found = load(settings={"run.dir": tmp_path}, rows={"data": rows})
    assert Path(found.data.path).parent == tmp_path / ".data" and found.data.heldout_size == "auto"
    assert load(settings={"run.dir": tmp_path, "data.heldout_size": 7}, rows={"data": rows}).data.heldout_size == 7
    once = iter(rows)
    both = load(settings={"run.dir": tmp_path}, rows={"data": once, "data.heldout_path": once})
    assert both.data.path == both.data.heldout_path == found.data.path
    chats = [{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}]
    sets = load(settings={"run.dir": tmp_path}, rows={"data": chats, "evaluate.sets.hard.data": rows})
    assert sets.data.format == "messages"
    assert sets.evaluate.sets["hard"]["data"] == {"task": "", "path": found.data.path}


def test_rows_in_memory_are_named_by_their_argument_in_messages(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}=", "answer": str(i)} for i in range(5)]
    bad = [*rows, {"prompt": 3, "answer": "3"}]
    given: dict[str, Any] = {"config": None, "settings": {"run.dir": tmp_path}, "keywords": {}, "homes": HOMES, "given": {}}
    with configured(**given, rows={"data": bad, "data.heldout_path": rows}) as config:
        path = config.data.path
        with pytest.raises(DataError, match="^data, row 6: field 'prompt' must be text"):
            open_datasets(config.data, seed=0)
    with configured(**given, rows={"data": rows, "data.heldout_path": bad}) as config, pytest.raises(DataError, match="^evaluate, row 6: "):
        open_datasets(config.data, seed=0)
    with configured(**given, rows={"data": rows}) as config:
        assert open_datasets(config.data, seed=0)[0].where(2) == "data, row 3"
    with pytest.raises(DataError, match=f"^'{path}', line 6: "):  # whoever goes on with the run has the file
        open_datasets(DataConfig(path=path), seed=0)


def test_text_names_a_task_a_file_or_a_hub_id(tmp_path: Path) -> None:
    assert load(rows={"data": "sort_digits"}).data.task == "sort_digits"
    assert load({"data": {"task": "addition"}}, rows={"data": tmp_path / "a.jsonl"}).data.path == str(tmp_path / "a.jsonl")
    assert load(rows={"data": "org/sort"}).data.path == "org/sort"


def longer(completions: list[str], **columns: object) -> list[float]:
    return [float(len(each)) for each in completions]


def shorter(completion: str, row: object) -> float:
    return -float(len(completion))


@pytest.mark.parametrize(("given", "keywords", "weights"), [
    ([longer, shorter], {}, [1.0, 1.0]), ({longer: 0.3, shorter: 1}, {}, [0.3, 1.0]),
    (None, {"reward_funcs": [longer, shorter]}, [1.0, 1.0]), (None, {"rewards": (longer, shorter)}, [1.0, 1.0]),
    (None, {"reward_funcs": {longer: 2, shorter: 1}}, [2.0, 1.0])])
def test_several_rewards_are_taken_as_a_list_or_with_weights_and_are_named_after_their_functions(
    given: Any, keywords: dict[str, Any], weights: list[float],
) -> None:
    with configured(None, {}, keywords, homes=HOMES, given={"rollout.reward": given}, rows={}) as found:
        assert [reward_name(name) for name in found.rollout.rewards] == ["longer", "shorter"]
        assert list(found.rollout.rewards.values()) == weights
        assert [resolve(name, kind="reward") for name in found.rollout.rewards] == [longer, shorter]


def test_one_reward_in_a_list_is_one_and_two_names_of_it_are_refused() -> None:
    with configured(None, {}, {"reward_funcs": [shorter]}, homes=HOMES, given={}, rows={}) as found:
        assert reward_name(found.rollout.reward) == "shorter" and not found.rollout.rewards
    with (
        pytest.raises(ConfigError, match="rollout.reward is given twice, by an argument of its own and by a keyword; give one of them"),
        configured(None, {}, {"reward_funcs": longer}, homes=HOMES, given={"rollout.reward": shorter}, rows={})):
        pass


@pytest.mark.parametrize(("key", "sentence"), [
    ("rollout.reward", r"reward got a Linear as an object, .*save_pretrained\('judge'\) and give reward='model:judge', or a function"),
    ("model.path", r"model.path got a Linear as an object, .*; save it and its tokenizer with save_pretrained\('folder'\) and give")])
def test_models_as_objects_are_refused_with_the_way_in(key: str, sentence: str) -> None:
    model = torch.nn.Linear(2, 2)
    for value in [model, *([[shorter, model], {model: 0.5}] if key == "rollout.reward" else [])]:
        with pytest.raises(ConfigError, match=sentence), configured(None, {}, {}, homes=HOMES, given={key: value}, rows={}):
            pass
