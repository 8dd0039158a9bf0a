"""`offbeat eval`: real evaluations of a trained model."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console as Terminal
from safetensors.torch import load_file, save_file

from evaluation.played import played
from offbeat.cli import main as cli
from offbeat.cli.evaluate import print_table, shown
from offbeat.evaluation.files import read_samples
from offbeat.evaluation.result import ModelResult, SetResult
from offbeat.evaluation.scores import Evaluation, score_set
from offbeat.model.peft_io import Adapter, write_adapter
from offbeat.runs.evaluation import Progress
from small_run import REWARDS, TINY, SmallRun, build_small_model

PLAYED = played([[1.0]])


def test_an_exported_model_has_the_accuracy_that_its_run_ended_with(finished_run: SmallRun, tmp_path: Path, capsys) -> None:
    arguments = SmallRun(tmp_path, str(finished_run.folder / "export")).arguments(
        evaluate__sets__two__num_prompts="2", evaluate__sets__two__rollout__reward=f"{REWARDS}:right")
    assert cli.main(["eval", *arguments, "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert metrics["model"] == str(finished_run.folder / "export")
    assert metrics["eval/accuracy"] == json.loads((finished_run.folder / "result.json").read_text())["heldout_after"]
    assert metrics["eval/reward_mean"] == pytest.approx(finished_run.events("evaluation")[-1]["eval/reward_mean"])
    assert (metrics["eval/prompts"], metrics["eval/failed_prompts"]) == (4, 0)
    assert (metrics["eval/two/prompts"], metrics["eval/two/accuracy"], metrics["eval/two/failed_prompts"]) == (2, 1, 0)
    assert (tmp_path / "small-eval").is_dir() and not (tmp_path / "small").exists()
    result = json.loads((tmp_path / "small-eval" / "evaluation.json").read_text())
    assert [each["metrics"] for each in result["models"]] == [{name: value for name, value in metrics.items() if name != "model"}]
    answers = read_samples(tmp_path / "small-eval" / result["samples"])[metrics["model"]]
    assert set(answers) == {"", "two"} and all(prompt.samples[0].num_tokens for prompt in answers[""].prompts)


def test_a_run_and_the_same_model_behind_a_url_answer_alike(
    finished_run: SmallRun, start_engine, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, url = start_engine(model=str(finished_run.folder / "export"), api_key="secret")
    monkeypatch.setenv("MY_KEY", "secret")
    output, run = tmp_path / "both.json", str(finished_run.folder)
    assert cli.main(["eval", run, url, "--run.dir", str(tmp_path), "--output", str(output), "--key-env", "MY_KEY"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["set", "model", "prompts", "accuracy", "95", "%", "interval", "mean", "reward", "failed"]
    assert [line.split()[:3] for line in lines[1:3]] == [["held-out", run, "4"], ["held-out", url, "4"]]
    assert f"answers: {tmp_path}/both.samples.jsonl" in lines
    found = read_samples(tmp_path / "both.samples.jsonl")
    texts = {name: [prompt.samples[0].text for prompt in found[name][""].prompts] for name in (run, url)}
    assert texts[run] == texts[url]
    assert cli.main(["compare", f"{output}:{run}", f"{output}:{url}", "--json"]) == 0
    [compared] = json.loads(capsys.readouterr().out)["sets"]
    assert [(each["difference"], each["p_value"]) for each in compared["differences"]] == [(0, 1)] * 2 and not compared["changes"]


@pytest.mark.drill
def test_an_adapter_answers_as_the_model_that_it_is_merged_into(tmp_path: Path, capsys) -> None:
    base = tmp_path / "base"
    base.mkdir()
    build_small_model(base, seed=3)
    random = np.random.default_rng(0)
    a, b = (torch.tensor(random.normal(size=shape), dtype=torch.float32) for shape in ((4, TINY.intermediate_size), (TINY.hidden_size, 4)))
    name = "model.layers.0.mlp.down_proj"
    write_adapter(Adapter(4, 8.0, {name: (a, b)}), tmp_path / "adapter", base_model=str(base))
    merged = tmp_path / "merged"
    merged.mkdir()
    build_small_model(merged, seed=3)
    weights = load_file(merged / "model.safetensors")
    weights[f"{name}.weight"] = weights[f"{name}.weight"] + 8.0 * (b @ a)
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    arguments = SmallRun(tmp_path, "").arguments(data__heldout_size="16")
    assert cli.main(["eval", *arguments[:1], str(tmp_path / "adapter"), str(merged), str(base), *arguments[1:], "--json"]) == 0
    assert [json.loads(line)["model"] for line in capsys.readouterr().out.splitlines()] == [
        str(tmp_path / "adapter"), str(merged), str(base)]
    answers = read_samples(tmp_path / "small-eval" / "evaluation.samples.jsonl")
    texts = {model: [prompt.samples[0].text for prompt in sets[""].prompts] for model, sets in answers.items()}
    assert texts[str(tmp_path / "adapter")] == texts[str(merged)] != texts[str(base)]


def test_a_missing_model_is_a_mistake(tmp_path: Path, capsys) -> None:
    assert cli.main(["eval", *SmallRun(tmp_path, "").arguments()]) == 2
    assert cli.main(["eval", *SmallRun(tmp_path, str(tmp_path / "gone")).arguments()]) == 2
    assert cli.main(["eval", *SmallRun(tmp_path, "").arguments(), "--output", "x.txt"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "model.path is empty" in lines[0] and "gone" in lines[1] and "--output must name a .json file, got x.txt" in lines[2]


def result(model: str, *evaluations: Evaluation) -> ModelResult:
    return ModelResult(model, tuple(SetResult(PLAYED, each) for each in evaluations))


def test_several_sets_are_a_table_with_the_columns_that_they_need(capsys) -> None:
    ends = {"accuracy": (0.215, 0.785)}
    print_table([result(
        "m", Evaluation(0.5, 0.625, 8, 0, intervals=ends), Evaluation(0.25, 0.25, 128, 3, {1: 0.25, 4: 0.5}, "aime", intervals=ends),
        Evaluation(0.5, 0.0, 8, 0, {}, "games", {"x": 0.75, "o": 0.25}, ends, {"f1": 0.125}))])
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "set       prompts  accuracy   95 % interval  mean reward  pass@1  pass@4      x      o     f1  failed",
        "held-out        8     0.500  0.215 to 0.785        0.625                                            0",
        "aime          128     0.250  0.215 to 0.785        0.250   0.250   0.500                            3",
        "games           8     0.500  0.215 to 0.785        0.000                  0.750  0.250  0.125       0"]


def test_progress_is_shown_on_a_terminal_alone() -> None:
    stream = io.StringIO()
    for terminal in (None, Terminal(file=stream, force_terminal=True, width=160)):
        with shown(terminal) as show:
            for progress in (Progress("m"), Progress("m", "held-out", 0, 2), Progress("m", "held-out", 1, 2, 0.5)):
                show(progress)
    assert "m · held-out" in stream.getvalue() and "1/2" in stream.getvalue() and "accuracy 0.500" in stream.getvalue()


def test_several_models_stand_below_each_other_set_by_set(capsys) -> None:
    held_out, sums = score_set(played([[1.0], [0.0]])), score_set(played([[1.0], [0.0]], name="sums"))
    print_table([result("runs/a", held_out, sums), result("b", held_out, sums)])
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["set", "model"], ["held-out", "runs/a"], ["held-out", "b"], ["sums", "runs/a"], ["sums", "b"]]
