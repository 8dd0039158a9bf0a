"""Configuration files, overrides and the sentences that refuse them."""

from pathlib import Path

import pytest

from offbeat.config.dump import dump_toml
from offbeat.config.load import ALIASES, COUNTERPARTS, HINTS, load_config, settings, split_overrides, unknown_setting
from offbeat.config.root import Config
from offbeat.errors import ConfigError


def refusal(*overrides: tuple[str, str], path: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def written(folder: Path, text: str) -> str:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_nothing_given_is_the_default_configuration():
    assert load_config(None) == Config()


def test_an_override_wins_over_the_file_and_the_last_override_over_the_first(tmp_path):
    path = written(tmp_path, "[rollout]\ngroup_size = 4\nconsumer_batch_size = 3\n")
    config = load_config(path, [("rollout.group_size", "16"), ("rollout.group_size", "32")])
    assert (config.rollout.group_size, config.rollout.consumer_batch_size) == (32, 3)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("train.optimizer.lr", "3e-4", 3e-4),
        ("run.resume", "true", True),
        ("run.resume", "False", False),
        ("model.tiny.num_layers", "2", 2),
        ("rollout.stop", '["\\n", "END"]', ("\n", "END")),
        ("model.path", "models/some model", "models/some model"),
        ("model.path", '"quoted"', "quoted"),
        ("data.task", "", ""),
        ("run.name", "12", "12"),
        ("run.name", "2026-01-31", "2026-01-31"),
        ("data.system_prompt", "a\nb = 1", "a\nb = 1"),
    ],
)
def test_override_values_are_read_as_toml_or_taken_as_they_stand(key, text, value):
    found = load_config(None, [(key, text)])
    for name in key.split("."):
        found = getattr(found, name)
    assert found == value


@pytest.mark.parametrize(
    ("key", "text", "sentence"),
    [
        (
            "rollout.max_head_offpolicynes",
            "1",
            "rollout.max_head_offpolicynes is not a setting; did you mean rollout.max_head_offpolicyness?",
        ),
        ("rollout.lr", "1", "rollout.lr is not a setting; did you mean train.optimizer.lr?"),
        ("train.output_dir", "out", "train.output_dir is not a setting; did you mean run.dir?"),
        ("rolout.group_size", "1", "rolout is not a setting; did you mean rollout?"),
        ("zzz.qqq", "1", "zzz is not a setting; 'offbeat config docs' lists them all"),
        ("rollout.group_size", "eight", "rollout.group_size must be an integer, got 'eight'"),
        ("rollout.group_size", "2.5", "rollout.group_size must be an integer, got 2.5"),
        ("rollout.temperature", "hot", "rollout.temperature must be a number, got 'hot'"),
        ("rollout.temperature", "nan", "rollout.temperature must be a finite number, got nan"),
        ("telemetry.trace", "maybe", "telemetry.trace must be true or false, got 'maybe'"),
        ("rollout.stop", "END", "rollout.stop must be a list, such as [\"a\", \"b\"], got 'END'"),
        ("telemetry.sinks", '["wandb", "tensorbord"]',
         "each of telemetry.sinks must be one of 'tensorboard', 'wandb', 'trackio', 'mlflow', got 'tensorbord'; did you mean"
        " 'tensorboard'?"),
        (
            "rollout.max_head_offpolicyness",
            "-1",
            "rollout.max_head_offpolicyness must be >= 0, got -1; use 0 for synchronous training",
        ),
        ("train.optimizer.lr", "0", "train.optimizer.lr must be > 0, got 0"),
        ("train.optimizer.beta1", "1", "train.optimizer.beta1 must be < 1, got 1"),
        ("rollout.top_p", "1.5", "rollout.top_p must be <= 1, got 1.5; use 1 to sample from all tokens"),
        (
            "rollout.on_stale",
            "requeu",
            "rollout.on_stale must be one of 'wait', 'requeue', 'keep', got 'requeu'; did you mean 'requeue'?",
        ),
        (
            "train.strategy",
            "fsdp",
            "train.strategy is not a setting any more; set train.parallel.shard: 1 replicates the model as 'ddp' did, and train.num_ranks"
            " shards it over all ranks as 'fsdp' did",
        ),
        ("run.mode", "spdm", "run.mode must be 'controller' or 'spmd', got 'spdm'; did you mean 'spmd'?"),
        ("model.tiny", "3", "model.tiny must be a table of settings, got 3; write [model.tiny] and its settings below"),
        (
            "run.name",
            "a b",
            "run.name is not allowed to be 'a b'; use letters, digits, '.', '_' and '-', starting with a letter or digit",
        ),
        ("algorithm.filters", '[{metric = "k4"}]',
         "algorithm.filters.metric must be one of 'ratio', 'k1', 'k2', 'k3', 'binary_kl', 'tv', 'opsm', 'm2', got 'k4'"),
        ("algorithm.filters", "[{high = 2.0}]", "algorithm.filters.0.metric is missing; give it"),
        ("algorithm.filters", "[3]",
         "algorithm.filters.0 must be a table of settings, got 3; write [algorithm.filters.0] and its settings below"),
        ("inference.min_engines", "3", "inference.min_engines must be <= the 1 of inference.num_engines, got 3"),
    ],
)
def test_a_bad_value_is_refused_in_one_sentence(key, text, sentence):
    assert refusal((key, text)) == sentence


def test_of_several_errors_the_first_is_shown_and_the_others_counted():
    assert refusal(("run.seed", "-1"), ("rollout.top_k", "-2")) == (
        "2 things are wrong:\n  run.seed must be >= 0, got -1\n  rollout.top_k must be >= 0, got -2; use 0 to sample from all tokens")
    assert refusal(("run.seed", "-1"), ("rollout.top_k", "-2"), ("zz.a", "1")).startswith("3 things are wrong:\n  run.seed")


def test_a_missing_file_a_folder_and_a_binary_are_refused_by_name(tmp_path):
    assert refusal(path="no.toml") == "configuration file no.toml does not exist; give the path of a TOML file"
    assert "cannot be read: Is a directory" in refusal(path=str(tmp_path))
    (tmp_path / "weights").write_bytes(b"\xff\xfe\x00")
    assert "weights is not UTF-8 text" in refusal(path=str(tmp_path / "weights"))


def test_a_syntax_error_names_file_and_line(tmp_path):
    path = written(tmp_path, "[run]\nname = \n")
    assert refusal(path=path).startswith(f"{path} is not valid TOML at line 2, column 8: invalid value")


def test_a_file_of_an_editor_that_marks_its_byte_order_is_read(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[run]\nname = "marked"\n', encoding="utf-8-sig")
    assert load_config(str(path)).run.name == "marked"


@pytest.mark.parametrize(("text", "sentence"), [
    (f"[run]\nseed = {'9' * 5000}", "has a value that cannot be read: Exceeds the limit"),
    (f"[run]\nseed = {'[' * 3000}", "has lists or tables inside each other, more than Python reads"),
    (f"[run]\nseed = {2**80}", "run.seed must be <= 4294967295")])
def test_values_that_no_setting_can_have_are_refused_in_a_sentence(text, sentence, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        load_config(str(path))


def test_an_override_below_something_that_is_no_table_is_refused(tmp_path):
    path = written(tmp_path, "rollout = 3\n")
    assert refusal(("rollout.group_size", "4"), path=path).startswith("rollout must be a table of settings, got 3")


def test_giving_one_key_of_a_table_keeps_what_its_default_sets_beside_it():
    config = load_config(None, [("sft.optimizer.lr", "1e-3")])
    assert (config.sft.optimizer.lr, config.sft.optimizer.warmup_steps) == (1e-3, Config().sft.optimizer.warmup_steps)
    assert Config().sft.optimizer.warmup_steps > 0


def test_a_preset_fills_in_and_a_given_key_wins(tmp_path):
    assert load_config(None, [("algorithm.preset", "dr_grpo")]).algorithm.loss_aggregation == "fixed_length"
    path = written(tmp_path, '[algorithm]\npreset = "dr_grpo"\nloss_aggregation = "token_mean"\n')
    assert load_config(path).algorithm.loss_aggregation == "token_mean"


def test_overrides_are_split_from_other_arguments():
    argv = ["train", "a.toml", "--rollout.group_size", "4", "--json", "--run.name=--x", "--train.optimizer.lr", "1e-3", "./b.c"]
    overrides, rest = split_overrides(argv)
    assert overrides == [("rollout.group_size", "4"), ("run.name", "--x"), ("train.optimizer.lr", "1e-3")]
    assert rest == ["train", "a.toml", "--json", "./b.c"]


def test_a_true_or_false_setting_may_stand_alone():
    overrides, rest = split_overrides(["--train.share_prefix", "a.toml", "--telemetry.trace", "false", "--run.resume"])
    assert overrides == [("train.share_prefix", "true"), ("telemetry.trace", "false"), ("run.resume", "true")]
    assert rest == ["a.toml"]


def test_a_negative_number_is_a_value_and_arguments_after_two_dashes_are_left_alone():
    assert split_overrides(["--run.seed", "-1", "--", "--run.seed", "2"]) == ([("run.seed", "-1")], ["--", "--run.seed", "2"])


def test_an_override_without_value_is_refused():
    for argv in (["--run.seed"], ["--run.seed", "--json"]):
        with pytest.raises(ConfigError, match=r"^--run.seed has no value; write --run.seed VALUE"):
            split_overrides(argv)


def test_what_names_no_setting_is_left_to_the_parser_with_its_value_as_one_word():
    assert split_overrides(["--run.sed", "1", "--run.nam", "--json"]) == ([], ["--run.sed=1", "--run.nam", "--json"])
    assert unknown_setting("run.sed") == "run.sed is not a setting; did you mean run.seed?"


def test_every_hint_belongs_to_a_setting():
    assert HINTS.keys() <= {key for key, _ in settings()}


def test_a_setting_that_was_replaced_names_those_that_took_its_place(tmp_path):
    file = tmp_path / "old.toml"
    file.write_text("[cluster]\ndevices_per_worker = 1\n")
    said = "cluster.devices_per_worker is not a setting any more; give train.devices_per_rank and inference.devices_per_engine"
    with pytest.raises(ConfigError, match=said):
        load_config(str(file))
    assert unknown_setting("cluster.devices_per_worker").startswith(said)


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_familiar_names_stand_for_ours_and_are_written_as_ours(alias: str, name: str, tmp_path: Path) -> None:
    section, _, old = alias.rpartition(".")
    file = tmp_path / "run.toml"
    one, other = ("math", "countdown") if name == "rollout.reward" else (3, 4)
    file.write_text(f"[{section}]\n{old} = {one!r}\n")

    def value(config: Config) -> object:
        found: object = config
        for part in name.split("."):
            found = getattr(found, part)
        return found

    assert value(load_config(str(file))) == value(load_config(None, [(alias, str(one))])) == one
    assert value(load_config(str(file), [(name, str(other))])) == value(load_config(str(file), [(alias, str(other))])) == other
    assert split_overrides([f"--{alias}", str(one)]) == ([(alias, str(one))], [])
    assert old not in dump_toml(load_config(str(file)))
    for path, overrides in ((file, [(name, "4"), (alias, "4")]), (_both(tmp_path, section, old, name), [])):
        with pytest.raises(ConfigError, match=f"{alias} and {name} are two names of one setting; give {name} alone"):
            load_config(str(path), overrides)


def _both(folder: Path, section: str, old: str, name: str) -> Path:
    path = folder / "both.toml"
    path.write_text(f"[{section}]\n{old} = 3\n{name.rpartition('.')[2]} = 3\n")
    return path


def test_values_of_a_program_come_after_the_file_and_the_overrides(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[train]\nthreads = 2\n[train.optimizer]\nlr = 0.1\n")
    values = {"train.optimizer.lr": 0.3, "data.path": Path("a.jsonl"), "rollout.stop": ("\n",)}
    config = load_config(str(path), [("train.optimizer.lr", "0.2"), ("run.name", "x")], values=values)
    assert (config.train.threads, config.train.optimizer.lr, config.run.name) == (2, 0.3, "x")
    assert (config.data.path, config.rollout.stop) == ("a.jsonl", ("\n",))
    with pytest.raises(ConfigError, match="run.total_steps must be an integer, got 'many'"):
        load_config(None, values={"run.total_steps": "many"})


def test_every_counterpart_of_another_projects_argument_is_a_setting() -> None:
    assert set(COUNTERPARTS.values()) <= {key for key, _ in settings()}
    page = (Path(__file__).parents[2] / "docs" / "comparison.md").read_text()
    for name, key in COUNTERPARTS.items():
        assert any(line.startswith("|") and f"`{name}`" in line and f"`{key}`" in line for line in page.splitlines()), f"docs: {name}"
