"""What tells data, models and code by their contents."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from offbeat.config.data import DataConfig
from offbeat.data.dataset import open_datasets
from offbeat.data.identity import code_digest, command_digest, digest_of, model_digest
from offbeat.data.pairs import open_pairs

ROWS = [{"prompt": f"{number}>", "answer": str(number)} for number in range(20)]


def digest(path: Path, rows: list[dict], **config: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, _ = open_datasets(DataConfig(**{"path": str(path), "heldout_size": 4, **config}), seed=0)
    return train.digest


def test_the_same_rows_have_the_same_digest_wherever_they_lie_and_others_another(tmp_path: Path) -> None:
    same = digest(tmp_path / "a.jsonl", ROWS)
    assert digest(tmp_path / "b.jsonl", ROWS) == same
    changed = [{**ROWS[0], "answer": "1"}, *ROWS[1:]]
    others = [digest(tmp_path / "a.jsonl", rows) for rows in (ROWS[::-1], ROWS[:-1], [*ROWS, ROWS[0]], changed)]
    others += [digest(tmp_path / "a.jsonl", ROWS, **config) for config in ({"heldout_size": 5}, {"prompt_field": "answer"})]
    assert len({same, *others}) == 7


def test_a_task_is_told_by_what_makes_its_rows() -> None:
    def of(seed: int = 0, **config: object) -> str:
        return open_datasets(DataConfig(**{"task": "sort_digits", "heldout_size": 4, **config}), seed=seed)[0].digest

    assert of() == of()
    assert len({of(), of(1), of(task="addition"), of(task_size=7), of(heldout_size=5)}) == 5


def test_a_model_is_told_by_its_weights_and_configuration_and_not_by_its_place(model_dir: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model_dir, tmp_path / "copy"))
    assert model_digest(folder) == model_digest(Path(model_dir))
    (folder / "README.md").write_text("notes")
    assert model_digest(folder) == model_digest(Path(model_dir))
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for at in (100, len(whole) // 2, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        weights.write_bytes(damaged)
        assert model_digest(folder) != model_digest(Path(model_dir))
    weights.write_bytes(whole)
    (folder / "config.json").write_text("{}")
    assert model_digest(folder) != model_digest(Path(model_dir))


def test_code_is_told_by_its_file_and_never_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    for name in ("alone.py", "package/__init__.py", "package/inner.py"):
        (tmp_path / name).write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    of_file = code_digest(f"{tmp_path / 'alone.py'}:f")
    assert of_file and code_digest("package.inner:f") == code_digest("package:f") == of_file
    (tmp_path / "package" / "inner.py").write_text("x = 1\n")
    assert code_digest("package.inner:f") not in ("", of_file)
    (tmp_path / "judge.toml").write_text("model = 1\n")
    assert code_digest(f"judge:{tmp_path / 'judge.toml'}") not in ("", of_file)
    assert code_digest("judge:missing.toml") == ""
    assert code_digest("") == code_digest("no_such.module:f") == code_digest("offbeat.rollout.rewards.math:math_reward") == ""


def test_values_have_a_digest_in_their_order() -> None:
    assert digest_of([1, "a"]) == digest_of([1, "a"]) != digest_of(["a", 1])


def test_the_scripts_of_a_command_are_part_of_its_digest(tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text("print(1)")
    before = command_digest(["python", str(script), "--fast"])
    script.write_text("print(2)")
    assert before and command_digest(["python", str(script), "--fast"]) != before
    assert command_digest(["python", str(script)]) == command_digest(["node", str(script), "no/such/file"])
    assert command_digest(["my-agent", "--fast"]) == ""


def test_rows_without_images_have_the_digests_that_they_had_before_rows_could_have_images(tmp_path: Path) -> None:
    """Runs that began then go on: these are the lines of JSON that were digested of rows and pairs."""
    def digest_then(*lines: str) -> str:
        state = hashlib.blake2b(digest_size=16)
        for line in lines:
            state.update(line.encode() + b"\n")
        return state.hexdigest()

    row = '{"prompt":"1>","answer":"1","extra":{},"solution":"","tools":[],"said":null,"json_fields":[],"of_set":"","template_kwargs":{}}'
    rows = digest_then(row)
    assert digest(tmp_path / "rows.jsonl", [{"prompt": "1>", "answer": "1"}], heldout_size=0) == digest_then(f'"{rows}"', "0", "1")
    pair = '{"prompt":"1>","answers":["1","2"],"liked":[true,false],"margin":0.0,"tools":[]}'
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "1>", "chosen": "1", "rejected": "2"}) + "\n")
    pairs, _ = open_pairs(DataConfig(path=str(path), heldout_size=0))
    assert pairs.digest == digest_then(f'"{digest_then(pair)}"', "0", "1")
    with_image = {"prompt": "<image>1>", "images": ["data:image/png;base64,AAAA"], "answer": "1"}
    others = [{**with_image, "images": ["data:image/png;base64,BBBB"]}, {"prompt": "<image>1>", "answer": "1"}]
    assert len({digest(tmp_path / "rows.jsonl", [each], heldout_size=0) for each in (with_image, *others)}) == 3
