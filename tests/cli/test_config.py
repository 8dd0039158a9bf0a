"""`offbeat config`."""

import argparse
import tomllib

import pytest

from offbeat.cli import config
from offbeat.config.docs import render_docs
from offbeat.config.load import load_config, split_overrides
from offbeat.errors import ConfigError
from offbeat.runs.plan import make_plan
from train_samples import build_model


def call(*argv):
    parser = argparse.ArgumentParser()
    config.add_arguments(parser)
    overrides, rest = split_overrides(argv)
    return config.run(parser.parse_args(rest), overrides)


def test_show_prints_the_file_with_its_overrides_as_a_file_that_loads(tmp_path, capsys):
    path = tmp_path / "a.toml"
    path.write_text("[rollout]\ngroup_size = 4\n")
    assert call("show", str(path), "--rollout.top_k", "7") == 0
    shown = tmp_path / "b.toml"
    shown.write_text(capsys.readouterr().out)
    assert load_config(str(shown)) == load_config(str(path), [("rollout.top_k", "7")])


def test_show_basic_prints_the_settings_that_a_first_run_needs_with_their_values(capsys):
    assert call("show", "--basic", "--model.path", "some/model", "--rollout.top_k", "7") == 0
    text = capsys.readouterr().out
    shown = tomllib.loads(text)
    assert shown["run"] == {"name": "run", "total_steps": 100} and shown["model"] == {"path": "some/model", "lora": {"rank": 0}}
    assert shown["train"]["optimizer"] == {"lr": "auto"}
    assert "top_k" not in shown["rollout"] and "serve" not in shown and "critic" not in shown
    assert 20 <= text.count(" = ") <= 30, "the few that a first run needs"


def test_check_says_that_a_valid_configuration_is_valid(capsys, monkeypatch):
    monkeypatch.setattr(config, "usable_devices", lambda: 0)
    assert call("check", "--run.name", "first") == 0
    first, *about = capsys.readouterr().out.splitlines()
    assert first == "the default configuration with 1 override is valid; its run goes to runs/first"
    assert about == [
        "data: data.task and data.path are both empty, and a run needs one of them",
        'train.optimizer.lr = 0.0002: "auto" for reinforcement learning of all weights, width 128',
        'sft.optimizer.lr = 0.002: "auto" for supervised fine-tuning of all weights, width 128',
        "algorithm: grpo (arXiv:2402.03300)",
        "note: each step updates the model once from its samples (algorithm.num_minibatches = 1), so the clip range has no effect;"
        " algorithm.weight alone limits how far samples from an older version of the model can move it"]


def test_check_says_what_a_run_would_choose_where_there_are_devices(capsys, monkeypatch):
    monkeypatch.setattr(config, "usable_devices", lambda: 2)
    monkeypatch.setattr(config, "smallest_device", lambda: None)
    assert call("check") == 0
    *_, devices, precision, checkpointing, compiling, attention, dtype = capsys.readouterr().out.splitlines()
    assert devices == "on this machine, devices: 1 device for each train rank, 1 device for each engine, of 2 that are visible"
    assert [line.split(" = ")[0] for line in (precision, checkpointing, compiling, attention, dtype)] == [
        "  train.precision", "  train.gradient_checkpointing", "  train.compile", "  attention", "  model.dtype"]


@pytest.mark.drill
def test_check_estimates_memory_in_another_process(tmp_path, capsys):
    folder = build_model(tmp_path)
    assert call("check", "--memory", "--model.path", folder, "--train.num_ranks", "2", "--train.max_tokens_per_microbatch", "64") == 0
    table = capsys.readouterr().out.splitlines()[-10:]
    assert table[0] == "on a GPU, each of 2 train ranks takes about"
    assert [line.split()[0] for line in table[1:]] == [
        "weights", "gathered", "gradients", "optimizer", "reference", "critic", "teacher", "activations", "total"]
    assert call("check", "--memory", "--model.path", folder, "--train.offload_optimizer", "true") == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "  and 0.0 GiB of host memory, where train.offload_optimizer keeps the optimizer's moments")
    with pytest.raises(ConfigError, match="model.path must name a model for --memory"):
        call("check", "--memory")


STALE = "limits how far samples from an older version of the model can move it"


@pytest.mark.parametrize(("settings", "computed", "note"), [
    ((), "", f"algorithm.weight alone {STALE}"),
    (("--algorithm.num_minibatches", "2"), "log-probabilities before the first update", ""),
    (("--algorithm.preset", "prime_rl"), "", ""),
    (("--algorithm.preset", "raft"), "", ""),
    (("--algorithm.preset", "cispo"), "", ""),
    (("--algorithm.preset", "cispo", "--algorithm.anchor", "prox"), "", f"nothing {STALE}"),
    (("--algorithm.preset", "kpop"), "", f"algorithm.filters alone {STALE}"),
    (("--algorithm.preset", "deepseek_v32", "--algorithm.entropy_coefficient", "0.1", "--algorithm.num_minibatches", "2"),
     "log-probabilities under the reference policy and the entropy of each token", ""),
    (("--algorithm.preset", "sdft"), "log-probabilities under the reference with the answer in its context, a longer prompt", ""),
    (("--algorithm.preset", "opd", "--teacher.path", "big"), "log-probabilities under the teacher big on the train ranks",
     'the frozen teacher takes its weights\' memory on every train rank, or a shard of it with train.parallel.shard'),
    (("--algorithm.preset", "opd", "--algorithm.objective", "reverse_kl", "--algorithm.filters", "[]", "--teacher.url", "http://a",
      "--teacher.top_k", "20"), "log-probabilities and the 20 likeliest tokens under the teacher at http://a, one request for each sample",
     "renormalised over them; the reverse KL on them is biased; the engine sends as many numbers"),
])
def test_check_says_what_a_step_computes_and_which_settings_cannot_act(capsys, monkeypatch, settings, computed, note):
    monkeypatch.setattr(config, "usable_devices", lambda: 0)
    assert call("check", *settings) == 0
    about, *notes = capsys.readouterr().out.partition("\nalgorithm: ")[2].splitlines()
    assert about.endswith(f"; besides the update's own forward pass, a step computes {computed}") if computed else about.endswith(")")
    assert [line.endswith(note) for line in notes] == [True] * bool(note)


def test_check_refuses_an_invalid_one():
    with pytest.raises(ConfigError, match=r"rollout.group_size must be >= 1, got 0"):
        call("check", "--rollout.group_size=0")


def test_docs_prints_the_reference(capsys):
    assert call("docs") == 0
    assert capsys.readouterr().out == render_docs()


def test_plan_prints_what_a_run_chose_and_why(tmp_path, capsys):
    config = load_config(None, [("run.name", "a"), ("run.dir", str(tmp_path))])
    config.run_dir.mkdir()
    plan = make_plan(config)
    plan.write(config.planned(plan.sections))
    assert call("plan", str(config.run_dir)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("machine: ") and lines[0].endswith(" cores")
    assert 'train.gradient_checkpointing = "off": train ranks compute on CPUs, where memory is seldom what ends first' in lines
    for argv in (["plan"], ["plan", str(tmp_path), "--run.name", "b"]):
        with pytest.raises(ConfigError, match="config plan takes a run's folder and no settings, such as offbeat config plan runs/my-run"):
            call(*argv)
