"""Whole runs on images: fine-tuned, then improved by GRPO, resumed, and exported with the processor."""

import json
from pathlib import Path

import pytest
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from image_models import dots, make_folder
from offbeat.cli.main import main
from offbeat.data.image_store import FIRST_ID


def write_rows(folder: Path, count: int) -> Path:
    """Write rows of pictures with dots, and how many there are."""
    rows = []
    for number in range(count):
        dots(1 + number % 3, "red", number).save(folder / f"{number}.png")
        question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "how many?"}]}
        rows.append({"messages": [question], "images": [f"{number}.png"], "answer": str(1 + number % 3)})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.drill
@pytest.mark.parametrize("family", ["idefics3", "qwen2_5_vl"])
def test_a_model_that_reads_images_is_taught_improved_resumed_and_exported(tmp_path, family, capsys):
    model, rows = make_folder(tmp_path / "model", family), write_rows(tmp_path, 24)
    common = [f"--run.dir={tmp_path / 'runs'}", f"--data.path={rows}", "--data.heldout_size=4", "--evaluate.num_prompts=4",
              "--rollout.max_new_tokens=4", "--rollout.reward=exact_match", "--inference.max_context=128"]
    assert main(["sft", f"--model.path={model}", "--run.name=sft", "--sft.total_steps=3", "--sft.batch_size=8", *common]) == 0
    export = tmp_path / "runs" / "sft" / "export"
    grpo = ["train", f"--model.path={export}", "--run.name=grpo", "--rollout.group_size=4", "--rollout.consumer_batch_size=2",
            "--checkpoint.every_steps=1", *common]
    assert main([*grpo, "--run.total_steps=2"]) == 0
    assert main([*grpo, "--run.total_steps=3"]) == 0
    run = tmp_path / "runs" / "grpo"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps if "train/tokens" in step] == [1, 2, 3]
    reloaded = AutoModelForImageTextToText.from_pretrained(run / "export")
    assert reloaded.config.model_type == family
    AutoImageProcessor.from_pretrained(run / "export", backend="pil")
    stored = list((tmp_path / "runs" / ".images").glob("*.image"))
    assert 24 >= len(stored) > 3
    assert all(int(path.stem) >= FIRST_ID for path in stored)
    capsys.readouterr()
    assert main(["data", "show", f"--model.path={export}", "-n", "1", *common]) == 0
    shown = capsys.readouterr().out
    assert "<image 32x32 " in shown and f"picture: {tmp_path / 'runs' / '.images'}" in shown
    assert main(["rollouts", str(run), "--show", "3.0.0"]) == 0
    assert f"picture: {tmp_path / 'runs' / '.images'}" in capsys.readouterr().out


@pytest.mark.drill
def test_a_replay_reads_the_images_of_its_run_and_stores_none(tmp_path, capsys):
    model, rows = make_folder(tmp_path / "model", "idefics3"), write_rows(tmp_path, 24)
    arguments = [
        "train", f"--model.path={model}", "--run.name=replay", "--run.total_steps=2", f"--run.dir={tmp_path / 'runs'}",
        f"--data.path={rows}", "--data.heldout_size=4", "--evaluate.every_steps=0", "--rollout.max_new_tokens=4",
        "--rollout.reward=exact_match", "--inference.max_context=128", "--rollout.group_size=4", "--rollout.consumer_batch_size=2",
        "--checkpoint.journal_keep=all"]
    assert main(arguments) == 0, capsys.readouterr().err
    out = tmp_path / "out" / "again"
    before = times_of_changes(tmp_path)
    capsys.readouterr()
    assert main(["replay", str(tmp_path / "runs" / "replay"), "--out", str(out)]) == 0
    assert capsys.readouterr().out.count("equal (") == 2
    assert {path: at for path, at in times_of_changes(tmp_path).items() if not path.is_relative_to(out)} == before
    own = [path for path in (out / ".images").iterdir() if not path.is_symlink()]
    assert [path.name for path in own] == ["replay.run"]


def times_of_changes(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.drill
@pytest.mark.parametrize(("command", "family"), [("dpo", "qwen3_vl"), ("reward-model", "gemma3")])
def test_pairs_whose_prompts_have_images_are_learned_and_resumed(tmp_path, command, family, capsys):
    model, folder = make_folder(tmp_path / "model", family), tmp_path / "data"
    folder.mkdir()
    write_rows(folder, 12)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps({
        "prompt": row["messages"], "images": row["images"], "chosen": row["answer"], "rejected": "none"}) + "\n" for row in rows))
    section = {"dpo": "preference", "reward-model": "reward_model"}[command]
    arguments = [
        command, f"--model.path={model}", "--run.name=pairs", f"--run.dir={tmp_path / 'runs'}", f"--data.path={path}",
        "--data.heldout_size=2", f"--{section}.batch_size=4", f"--{section}.evaluate_every_steps=1", "--checkpoint.every_steps=1"]
    assert main([*arguments, f"--{section}.total_steps=2"]) == 0, capsys.readouterr().err
    assert main([*arguments, f"--{section}.total_steps=3"]) == 0, capsys.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "runs" / "pairs" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/tokens" in line] == [1, 2, 3]


AGENT = """
import base64, json, urllib.request

async def play(task):
    import asyncio
    return await asyncio.to_thread(ask, task)

def ask(task):
    messages = task.messages
    assert messages[0]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
    file = open(task.row.images[0].path, "rb").read()
    texts = []
    for again in ("look again", "once more"):
        body = {"messages": messages, "max_tokens": 4}
        request = urllib.request.Request(task.base_url + "/chat/completions", json.dumps(body).encode(), {
            "Authorization": "Bearer " + task.api_key, "Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            message = json.load(answer)["choices"][0]["message"]
        texts.append(message["content"])
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(file).decode()}}
        messages = [*messages, message, {"role": "user", "content": [image, {"type": "text", "text": again}]}]
    return (len(set(texts[0])) + len(texts[1])) / 8
"""


@pytest.mark.drill
def test_agents_are_trained_on_what_they_were_shown(tmp_path, capsys):
    model, rows = make_folder(tmp_path / "model", "smolvlm"), write_rows(tmp_path, 24)
    (tmp_path / "own.py").write_text(AGENT)
    assert main([
        "train", f"--model.path={model}", "--run.name=play", "--run.total_steps=2", f"--run.dir={tmp_path / 'runs'}", f"--data.path={rows}",
        "--data.heldout_size=4", "--evaluate.every_steps=0", "--rollout.max_new_tokens=4", "--inference.max_context=256",
        "--rollout.group_size=4", "--rollout.consumer_batch_size=2", "--rollout.max_head_offpolicyness=0",
        "--rollout.workflow=agent", f"--agent.program={tmp_path}/own.py:play"]) == 0, capsys.readouterr().err
    run = tmp_path / "runs" / "play"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [step for step in steps if "train/tokens" in step]
    assert [step["step"] for step in trained] == [1, 2]
    assert all(step["policy/logprob_gap_max"] < 1e-3 for step in trained)
    capsys.readouterr()
    assert main(["rollouts", str(run), "--show", "2.0.0"]) == 0
    assert capsys.readouterr().out.count("picture: ") == 1
