"""`offbeat train`: what it prints. What it leaves behind is tested in `tests/runs/test_run.py`."""

import json
from pathlib import Path

from faults.workshop import Workshop
from offbeat.controller.inputs import read_inputs
from small_run import REWARDS, SmallRun, small_config


def printed(run: SmallRun) -> list[dict]:
    assert run.done is not None
    return [json.loads(line) for line in run.done.stdout.splitlines()]


def test_json_is_one_object_per_line_from_start_to_finish(finished_run: SmallRun) -> None:
    events = printed(finished_run)
    first = next(event for event in events if event["event"] != "note")
    assert first == {"event": "start", "title": "small · grpo", "total_steps": 2}
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2]
    assert events[-1]["event"] == "finish"
    assert {name: value for name, value in events[-1].items() if name != "event"} == json.loads(
        (finished_run.folder / "result.json").read_text())
    assert finished_run.done is not None and finished_run.done.stderr == ""
    assert (finished_run.folder / "report.html").exists()


def test_one_interrupt_ends_after_the_step_and_saves(stopped_run: SmallRun) -> None:
    assert stopped_run.done is not None
    assert (stopped_run.done.returncode, stopped_run.done.stderr) == (130, "")
    events = printed(stopped_run)
    assert {"event": "note", "text": "stopping after this step; press Ctrl-C again to stop at once"} in events
    assert events[-1]["stopped_early"] is True
    assert "to go on" not in stopped_run.done.stdout, "programs know how they have called it"
    last = stopped_run.metrics()[-1]["global_step"]
    assert (stopped_run.folder / "checkpoints" / f"step-{last:08d}" / "complete.json").exists()


OWN_REWARD = """
async def even(completions, digits, number, **columns):
    assert number == [int(text) for text in digits], columns
    return [None if each % 3 == 0 else float(len(text) % 2) for text, each in zip(completions, number)]
"""


def test_a_table_of_ones_own_with_a_template_and_several_rewards_is_trained_on_and_gone_on_with(
        shop: Workshop, tmp_path: Path, model_dir: str) -> None:
    (tmp_path / "own.py").write_text(OWN_REWARD)
    rows = [json.dumps({"digits": f"{number}", "number": number}) + "\n" for number in range(100, 120)]
    (tmp_path / "rows.jsonl").write_text("".join([*rows[:5], "no JSON\n", *rows[5:]]))
    run = SmallRun(tmp_path, model_dir)
    settings = {
        "data__task": "", "data__path": str(tmp_path / "row?.jsonl"), "data__prompt": "{digits}>", "data__max_unusable_rows": "1",
        "rollout__reward": "", "rollout__rewards": f'{{"{REWARDS}:random_looking" = 1.0, "{tmp_path}/own.py:even" = -0.5}}'}
    done = shop.train(run, **settings)
    assert (done.code, done.error) == (0, "")
    [said] = [line for line in done.said if "cannot be used" in line]
    assert said.startswith(
        f"rows that cannot be used and are left out: 1, with the reasons in events.jsonl; the first: '{tmp_path}/rows.jsonl', line 6,")
    assert [event["reason"].partition(" (")[0] for event in run.events("unusable_row")] == [
        f"'{tmp_path}/rows.jsonl', line 6, is not JSON"]
    trajectories = [each for step in (1, 2) for group in run.groups(step) for each in group["trajectories"]]
    assert all(each["named_rewards"].keys() - {"even"} == {"random_looking"} for each in trajectories)
    assert any("even" in each["named_rewards"] for each in trajectories)
    assert all(abs(sum(each["named_rewards"].values()) - each["reward"]) < 1e-6 for each in trajectories)
    assert all("reward/random_looking_mean" in row for row in run.metrics())
    other = settings | {"rollout__rewards": settings["rollout__rewards"].replace("-0.5", "-0.25")}
    resumed = shop.train(run, run__total_steps="3", **other)
    assert resumed.code == 0
    assert any("rollout.rewards = {" in line and "was {" in line for line in resumed.said), resumed.said
    refused = shop.train(run, run__total_steps="4", **(other | {"data__prompt": "{digits}="}))
    assert refused.code == 2 and 'other data: the rows to train on, or their order, are not those' in refused.error
    assert "data.prompt = " in refused.error


OWN_GAME = """
from dataclasses import replace
from offbeat.rollout.workflows.single_turn import single_turn

async def play(episode):
    assert episode.row.of_set == "digits" and episode.tokenizer.decode(episode.prompt).startswith("user: ")
    return [replace(each, reason="played") for each in await single_turn(episode)]

def quarter(completion, row):
    assert row.of_set == "digits"
    return 0.25
"""


def test_data_sets_are_mixed_and_each_is_played_and_judged_by_its_own(shop: Workshop, tmp_path: Path, model_dir: str) -> None:
    (tmp_path / "own.py").write_text(OWN_GAME)
    (tmp_path / "digits.csv").write_text("question,answer\n" + "".join(f"{number},{number}\n" for number in range(20)))
    run = SmallRun(tmp_path, model_dir)
    settings = {
        "data__task": "", "data__task_size": "8", "data__heldout_size": "2", "data__sets": (
            "{sums = {task = 'addition', task_size = 1, weight = 2},"
            f" digits = {{path = '{tmp_path}/digits.csv', prompt = '{{question}}', chat_template = true,"
            f" rollout = {{reward = '{tmp_path}/own.py:quarter', workflow = '{tmp_path}/own.py:play'}}}}}}"),
        "rollout__reward": f"{REWARDS}:right", "rollout__consumer_batch_size": "4"}
    done = shop.train(run, **settings)
    assert (done.code, done.error) == (0, "")
    resumed = shop.train(run, run__total_steps="4", **settings)
    assert resumed.code == 0 and not any("data.sets" in line for line in resumed.said)
    mixture = read_inputs(small_config(tmp_path, model_dir, **settings)).train
    groups = [group for step in range(1, 5) for group in run.groups(step)]
    names = [mixture.row(int(group["prompt_id"].partition(":")[2])).of_set for group in groups]
    assert set(names) == {"sums", "digits"}
    assert len({group["prompt_id"] for group in groups}) == 16
    for group, name in zip(groups, names, strict=True):
        for each in group["trajectories"]:
            assert (each["reward"], each["reason"] == "played") == ((0.25, True) if name == "digits" else (1.0, False))
    settings["data__sets"] = settings["data__sets"].replace("weight = 2", "weight = 3")
    refused = shop.train(run, run__total_steps="5", **settings)
    assert refused.code == 2 and "other data: the rows to train on, or their order" in refused.error
