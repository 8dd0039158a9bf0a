"""The examples of docs/python.md, of the public docstrings and of examples/five_lines.py run as they are written.

The functions, settings, rows, engine and run folders are real. What takes minutes is not done: in the place of training stands a run that
has been made before, and an engine answers in this process. `tests/api` has whole runs.
"""

import inspect
import json
import re
import shutil
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import offbeat
from offbeat.config.dump import dump_toml
from offbeat.config.root import Config
from offbeat.controller.evaluate import Evaluation
from offbeat.controller.reward_choice import choose_rewards
from offbeat.data.dataset import open_datasets
from offbeat.data.pairs import open_pairs
from offbeat.data.row import Row
from offbeat.data.tokenizer import load_tokenizer
from offbeat.telemetry.console import Console
from offbeat.user_code.functions import resolve
from small_run import SmallRun
from test_public_names import PLAIN

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
DOCSTRINGS = {name: inspect.getdoc(getattr(offbeat, name)) or "" for name in offbeat.__all__}
TRAINED: list[Config] = []


@pytest.fixture
def place(
    finished_run: SmallRun, model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_engine: Callable[..., Any],
) -> Iterator[Path]:
    """A working folder with the files that examples name, where training has been done before."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small").symlink_to(model_dir)
    rows = [{"prompt": f"reverse {word}: ", "answer": word[::-1]} for word in ("abcd", "bcde", "cdef")] * 100
    for name in ("words.jsonl", "words_test.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "task.toml").write_text('[data]\npath = "words.jsonl"\n')
    shutil.copytree(finished_run.folder, tmp_path / "runs" / "words")

    def trained(read: Callable[[Config], Row | None]) -> Callable[..., object]:
        def train(config: Config, console: Console, *, fresh: bool) -> object:
            if (row := read(config)) is not None and not config.rollout.reward.startswith("model:"):
                reward = resolve(next(iter(choose_rewards(config))), kind="reward")
                assert 0 <= reward(row.answer, row) <= 1
            TRAINED.append(config)
            shutil.copytree(finished_run.folder, config.run_dir, dirs_exist_ok=True)
            (config.run_dir / "config.toml").write_text(dump_toml(config))
            result = json.loads((config.run_dir / "result.json").read_text())
            sets = {name: {"before": 0.25, "after": 0.5} for name in config.evaluate.sets}
            (config.run_dir / "result.json").write_text(json.dumps(result | {"sets": sets}))
            console.start("training", 2)
            for step in (1, 2):
                console.update(step, {"reward/mean": 0.5 * step})
            return result

        return train

    def first_row(config: Config) -> Row:
        return open_datasets(config.data, seed=0)[0].row(0)

    def first_pair(config: Config) -> None:
        open_pairs(config.data, unpaired=False)[0].row(0)

    training = "offbeat.api.training"
    monkeypatch.setattr(f"{training}.run_training", trained(first_row))
    on_rows, on_pairs = trained(first_row), trained(first_pair)
    monkeypatch.setattr(
        f"{training}.run_lesson", lambda kind, *args, **settings: (on_pairs if kind.pairs else on_rows)(*args, **settings))

    def evaluated(config: Config, _console: Console) -> list[Evaluation]:
        num_rows = open_datasets(config.data, seed=0)[1].num_rows
        assert num_rows
        num_prompts = min(num_rows, config.evaluate.num_prompts)
        return [Evaluation(0.5, 0.5, num_prompts, 0, intervals={"accuracy": (0.4, 0.6)})]

    monkeypatch.setattr("offbeat.api.evaluation.evaluate_model", evaluated)

    @asynccontextmanager
    async def served_here(options: Any, **_where: Any) -> AsyncIterator[tuple[str, None]]:
        yield start_engine(model=options.model, api_key=options.api_key)[1], None

    monkeypatch.setattr("offbeat.api.engine.serve_one", served_here)
    service = SimpleNamespace(url="http://127.0.0.1:8000", wait=lambda: None)
    monkeypatch.setattr(offbeat, "serve", lambda *_args, **_settings: nullcontext(service))

    @asynccontextmanager
    async def opened(config: Config, _record: object) -> AsyncIterator[Any]:
        async def done(*_args: Any, **_named: Any) -> list[Any]:
            return [SimpleNamespace(text=config.run.name)]

        yield SimpleNamespace(add=done, publish=done, sample=done, tokenizer=load_tokenizer(config.model.path))

    monkeypatch.setattr("offbeat.api.tenants.open_adapters", opened)
    TRAINED.clear()
    yield tmp_path


def test_every_example_of_the_page_runs(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in BLOCKS:
        exec(compile(block, "docs/python.md", "exec"), names)
    by_name = {config.run.name: config for config in TRAINED}
    assert by_name["tools"].rollout.workflow == "tool_loop" and set(by_name["sets"].evaluate.sets) == {"short", "test"}
    first, pretrained = by_name["run"], by_name["pretrained"]
    assert (first.run.warm_up, first.train.optimizer.lr, first.model.path) == (True, 2e-4, "")
    assert (pretrained.train.optimizer.lr, pretrained.model.lora.rank, pretrained.rollout.consumer_batch_size) == ("auto", 16, 16)
    assert (by_name["settings"].train.num_ranks, by_name["settings"].algorithm.preset) == (2, "dapo")
    assert by_name["same"].data.path == "words.jsonl" and by_name["same"].run.seed == 1
    assert by_name["tuned"].sft.total_steps == 20 and by_name["preferred"].preference.beta == 0.1
    assert by_name["judged"].rollout.reward == "model:runs/judge/export"
    out = capsys.readouterr().out
    assert "2 of 2: 1.00" in out and "Run('runs/run', steps=2" in out and "report.html" in out


def examples(name: str) -> str:
    """The indented code of a public docstring, before its sections of arguments."""
    text = re.split(r"^(?:Args|Attributes|Raises|Returns):", DOCSTRINGS[name], flags=re.MULTILINE)[0]
    return textwrap.dedent("\n".join(re.findall(r"^(?: {4}.*|)$", text, re.MULTILINE)))


@pytest.mark.parametrize("name", [name for name in offbeat.__all__ if name not in PLAIN])
def test_the_example_of_a_docstring_runs(name: str, place: Path) -> None:
    code = examples(name)
    assert "offbeat." in code
    tinker = SimpleNamespace(ServiceClient=lambda: None)
    names: dict[str, Any] = {
        "__name__": "__main__", "offbeat": offbeat, "os": SimpleNamespace(environ={}), "tinker": tinker}
    if "rollouts(step=10)" in code:
        kept = place / "runs" / "words" / "rollouts"
        shutil.copy(kept / "step-000002.jsonl.zst", kept / "step-000010.jsonl.zst")
    if "async with" in code:
        code = f"import asyncio\nasync def main():\n{textwrap.indent(code, '    ')}\nasyncio.run(main())"
    exec(compile(code, f"docstring of {name}", "exec"), names)


def test_five_lines_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = ROOT / "examples" / "five_lines.py"
    exec(compile(file.read_text(), str(file), "exec"), {"__name__": "__main__"})
    [config] = TRAINED
    assert (config.run.warm_up, config.sft.stop_at_accuracy, config.evaluate.every_steps) == (True, 0.3, 20)
    assert "held-out accuracy: " in capsys.readouterr().out
    exec(compile(BLOCKS[0], "docs/python.md", "exec"), {"__name__": "__main__"})
    own = {"run": {"name", "dir"}, "data": {"path"}, "rollout": {"reward"}}
    shown = TRAINED[-1].model_dump(exclude=own)
    assert shown == config.model_dump(exclude=own), "the page's first example is this program"
