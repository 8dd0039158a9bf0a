"""Each setting changed when a run is resumed, and what it was trained on: a table in docs/faults.md.

`python tests/faults/resume.py` makes it, in some minutes. Every row is the real command on a copy of a small run; what changes ranks or
engines has processes of its own, the rest shares some. Rows go to build/resume.jsonl, a line each; one that passed there is not done again,
so the whole can be done in parts. `--only TEXT` does the rows that have the text, and leaves those that stand in the table as they are.
"""

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import msgspec
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

sys.path.insert(0, str(Path(__file__).parents[1]))

from chats import TEXT_ALPHABET
from faults.sections import read_sections, write_section
from faults.workshop import Done, Workshop, workshop
from offbeat.config.load import load_config, settings
from offbeat.config.resume import CHANGES, Change
from offbeat.data.tokenizer import character_tokenizer
from small_run import REWARDS, SETTINGS, SmallRun, build_small_model, offbeat

RESULTS = Path(__file__).parents[2] / "build" / "resume.jsonl"

CODE = """\
from offbeat.rollout.workflows.single_turn import single_turn

def score(completion, row):
    return float(sum(map(ord, completion)) % 3) / 2

def accepts(group):
    return True

def credit(groups, constants):
    return groups.rewards - groups.mean(groups.rewards)

def mean_length(samples):
    return sum(len(sample.text) for sample in samples) / len(samples)

async def play(episode):
    return await single_turn(episode)
"""

GIVEN: Mapping[str, str] = {
    "data.chat_template": "true", "data.chat_template_kwargs": "{loud = true}", "rollout.rewards": '{"code.py:score" = 1.0}',
    "data.task": "addition", "data.max_prompt_tokens": "20", "data.system_prompt": "be brief",
    "algorithm.dual_clip": "3", "algorithm.gamma": "0.9", "algorithm.filters": '[{metric = "k2", high = 1.0}]',
    "rollout.reward": f"{REWARDS}:equal", "rollout.top_p": "0.9",
    "rollout.stop": '["z"]', "rollout.stop_token_ids": "[5]",
    "rollout.reward_env": '["JUDGE_API_KEY"]', "rollout.should_accept": "code.py:accepts",
    "rollout.workflow": "code.py:play", "train.optimizer.min_lr_ratio": "0.5", "sft.optimizer.min_lr_ratio": "0.5",
    "evaluate.num_prompts": "2", "evaluate.pass_at": "[1]", "evaluate.sets": "{few = {num_prompts = 2}}",
    "evaluate.keep_best": "eval/accuracy", "evaluate.metric": "code.py:mean_length",
    "inference.max_context": "32", "inference.batch_invariant": "true", "rollout.batch_timeout_s": "3000",
    "model.lora.targets": '["q_proj"]', "model.lora.dropout": "0.1", "inference.forward": "hf",
    "weights.dir": "WEIGHTS", "weights.whole_every_versions": "4",
    "inference.max_cache_bytes": "100000000",
    "algorithm.clip_low": "0.1", "rollout.top_k": "5", "train.optimizer.beta1": "0.8", "train.optimizer.beta2": "0.9",
    "algorithm.constants": "{tau_low = 1.2}", "algorithm.objective": "gspo", "algorithm.credit": "code.py:credit",
    "algorithm.gae_lambda": "0.9", "algorithm.critic_lambda": "0.9", "critic.optimizer.beta1": "0.8", "critic.optimizer.beta2": "0.9",
    "critic.optimizer.lr": "2e-05", "critic.optimizer.min_lr_ratio": "0.5",
    "algorithm.turn_gamma": "0.9", "train.precision": "bf16_mixed",
}
"""Values that mean something; other settings get the next value that is allowed."""

WITH: Mapping[str, Mapping[str, str]] = {
    "algorithm.anchor": {"algorithm.weight": "none"}, "algorithm.constants": {"algorithm.objective": "sapo"},
    "algorithm.cov_control": {"algorithm.objective": "ppo"}, "algorithm.turn_gamma": {"algorithm.turn_credit": "return"},
    "algorithm.state_weight": {"algorithm.turn_credit": "state"}, "evaluate.samples_per_prompt": {"evaluate.temperature": "1"},
    "data.system_prompt": {"data.chat_template": "true"}, "rollout.rewards": {"rollout.reward": ""},
    "evaluate.stop_after_no_gain": {"evaluate.keep_best": "eval/accuracy", "evaluate.every_steps": "1"},
}
"""What is changed along with a setting that cannot be changed alone."""

REFERRING = ("algorithm.kl_coefficient", "algorithm.reference_refresh_steps", "algorithm.kl_target")
"""Settings that mean something only to a run with a reference policy."""

LOADING = ("algorithm.kl_loss", "algorithm.reward_kl", *REFERRING)
"""Settings by which ranks load a reference policy when they start."""

ELSEWHERE = {
    "run.name": "names another run", "run.dir": "names another run", "run.resume": "says whether to resume at all",
    "run.private": "says who may read the files",
    "run.mode": "the fault tables above resume in both modes",
    "rollout.single_rank_load": "resumes with as many processes that draw data as the checkpoint has, and is refused otherwise",
    "cluster.launcher": "the fault tables above use both",
    "cluster.ray_address": "needs Ray", "cluster.scratch_dir": "needs Ray",
    "train.devices_per_rank": "needs accelerators",
    "inference.devices_per_engine": "needs accelerators", "cluster.share_devices": "needs accelerators",
    "cluster.take_turns": "is resumed in the tests of turns",
    "inference.engine": "needs another engine",
    "inference.urls": "needs engines by URL", "inference.python": "needs another engine", "inference.arguments": "needs another engine",
    "telemetry.sinks": "needs the packages of other projects", "data.task_options": "is for reasoning-gym's tasks",
    "algorithm.reference": "has one value", "algorithm.objective_reads": "is for an objective in a file",
    "train.router_aux_loss_coefficient": "needs a model with experts", "model.route_replay": "needs a model with experts",
    "train.freeze": "needs a model that reads images, or with experts",
    **{f"data.{key}": "is for rows with images" for key in ("max_images", "max_image_bytes", "max_image_pixels")},
    **{key: "acts only with the sink of another project" for key in CHANGES if key.startswith("telemetry.wandb.")},
    "algorithm.teacher": "needs a teacher", "critic.path": "needs a critic",
    **{key: "needs a teacher" for key in CHANGES if key.startswith("teacher.")},
    **{key: "needs episodes of several turns" for key in CHANGES if key.startswith("agent.")},
    "curriculum.pools": "needs rows that come again", "curriculum.leave_at": "needs rows that come again",
    **{key: "stands in docs/scaling.md" for key in CHANGES if key.startswith("train.parallel.")},
    "data.sets": "stands for other data", "data.heldout_path": "stands below",
    "data.system_field": "is for rows of files", "data.split": "is for hub ids", "data.heldout_split": "is for hub ids",
}
"""Settings without a row of their own, and why."""


@dataclass(frozen=True)
class Case:
    """What is changed: settings by name, or files, on a run that has others than the smallest run.

    Attributes:
        what: in the table.
        expected: what the setting's field says of it.
        settings: on resuming.
        base: the run that is copied.
        edit: changes files, given the copy's root.
        own: it needs ranks or engines of its own.
        told: what has to stand in what the command says.
    """

    what: str
    expected: Change
    settings: Mapping[str, str] = field(default_factory=dict)
    base: str = "task"
    edit: Callable[[Path], None] = lambda _root: None
    own: bool = False
    told: str = ""


@dataclass(frozen=True)
class Row:
    """One row of the table; `what` is that of its case."""

    what: str
    outcome: str
    problems: tuple[str, ...]


def another_value(key: str, now: Any) -> str:
    """A value that the setting may have and does not have."""
    if key in GIVEN:
        return GIVEN[key]
    info = dict(settings())[key]
    kind = info.annotation
    if isinstance(now, bool):
        return str(not now).lower()
    if get_origin(kind) is not None and isinstance(now, str):  # one of several words
        return next(choice for choice in get_args(kind) if choice != now)
    if isinstance(now, int | float):
        near = (now + 1, now - 1) if isinstance(now, int) else (now * 2 or 0.5, now / 2)
        return str(next(value for value in near if _within_bounds(info, value)))
    raise AssertionError(f"{key} has no other value here; give one")


def _within_bounds(info: FieldInfo, value: float) -> bool:
    """Whether the field alone allows a number; rules that span settings are not asked."""
    kind: Any = Annotated[info.annotation, info]
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return False
    return True


def cases() -> list[Case]:
    """Every row."""
    rows = []
    now = _values()
    for key, change in CHANGES.items():
        unread = key.startswith(("sft.", "preference.", "reward_model.", "serve.", "model."))
        if key in ELSEWHERE or unread or change is Change.FREE or key == "run.total_steps":
            continue
        if key.startswith("data.") and change is Change.CONTENT and key not in ("data.task", "data.task_size"):
            continue
        changed = {key: another_value(key, now[key]), **WITH.get(key, {})}
        what = "".join(f", with `{other} = {value}`" for other, value in WITH.get(key, {}).items())
        rows.append(Case(
            f"`{key}`{what}", change, changed, base="reference" if key in REFERRING else "task", own=key in LOADING, told=key))
    rows.append(Case("`run.total_steps`", Change.TOLD, told="run.total_steps"))
    for section in ("train", "rollout", "inference", "weights", "checkpoint", "evaluate", "cluster", "dist", "telemetry"):
        keys = [key for key, change in CHANGES.items() if change is Change.FREE and key.startswith(f"{section}.") and key not in ELSEWHERE]
        changed = {key: another_value(key, now[key]) for key in keys}
        names = ", ".join(f"`{key.removeprefix(f'{section}.')}`" for key in keys)
        rows.append(Case(f"`[{section}]`: {names}", Change.FREE, changed, own=True))
    return [*rows, *_model_cases(), *_file_cases()]


def _values() -> dict[str, Any]:
    config = load_config(None, list(SETTINGS.items())).model_dump(mode="json")
    values = {}
    for key, _ in settings():
        value: Any = config
        for name in key.split("."):
            value = value[name]
        values[key] = value
    return values


def _model_cases() -> Iterator[Case]:
    lora = {"model.lora.rank": "4"}
    yield Case("`model.lora.rank`, of a run that trains the whole model", Change.REFUSED, lora, told="model.lora.rank = 4, was 0")
    yield Case("`model.lora.rank`", Change.REFUSED, {"model.lora.rank": "8"}, base="lora", told="model.lora.rank = 8, was 4")
    yield Case("`model.lora.rank`, of a run that trains an adapter, to 0", Change.REFUSED, {"model.lora.rank": "0"}, base="lora",
               told="model.lora.rank = 0, was 4")
    for name, value in (("alpha", "8"), ("targets", '["q_proj"]')):
        yield Case(f"`model.lora.{name}`", Change.REFUSED, {f"model.lora.{name}": value}, base="lora", told=f"model.lora.{name}")
    yield Case("`model.lora.dropout`", Change.TOLD, {"model.lora.dropout": "0.1"}, base="lora", own=True, told="model.lora.dropout")
    yield Case("`model.quantization`, of an adapter", Change.TOLD, {"model.quantization": "int8"}, base="lora", own=True,
               told="model.quantization")
    yield Case("`model.support_replay`", Change.TOLD, {"model.support_replay": "off"}, told="model.support_replay")
    yield Case("`model.dtype`", Change.TOLD, {"model.dtype": "bfloat16"}, own=True, told="model.dtype")
    yield Case("`model.dtype`, of an adapter", Change.TOLD, {"model.dtype": "bfloat16"}, base="lora", own=True, told="model.dtype")
    yield Case("`model.path`: another model of the same shape", Change.CONTENT, {"model.path": "OTHER"}, told="model.path")
    yield Case("`model.path`: another one, of an adapter", Change.CONTENT, {"model.path": "OTHER"}, base="lora", told="model.path")
    yield Case("`model.path`: the same model in another folder", Change.FREE, {"model.path": "SAME"})
    yield Case("`model.path`: a model that is built instead", Change.CONTENT, {"model.path": ""}, told="model.path")
    yield Case("`model.tokenizer`: one with a larger alphabet", Change.CONTENT, {"model.tokenizer": "TOKENIZER"}, told="model.tokenizer")
    yield Case("all of `[train.optimizer]`", Change.TOLD, {
        key: another_value(key, value) for key, value in _values().items() if key.startswith("train.optimizer.")}, own=True,
        told="train.optimizer.lr")


def _file_cases() -> Iterator[Case]:
    def lines(change: Callable[[list[str]], Iterable[str]]) -> Callable[[Path], None]:
        def edit(root: Path) -> None:
            path = root / "rows.jsonl"
            path.write_text("".join(change(path.read_text().splitlines(keepends=True))))

        return edit

    def move(root: Path) -> None:
        (root / "rows.jsonl").rename(root / "moved.jsonl")

    def append_comment(root: Path) -> None:
        with (root / "code.py").open("a") as file:
            file.write("# another version\n")

    grown = lines(lambda rows: [*rows, json.dumps({"prompt": "9876>", "answer": "6789"}) + "\n"])
    yield Case("data: a row more at the end", Change.CONTENT, base="file", edit=grown, told="other data")
    yield Case("data: a row less", Change.CONTENT, base="file", edit=lines(lambda rows: rows[:-1]), told="other data")
    yield Case("data: reversed", Change.CONTENT, base="file", edit=lines(lambda rows: rows[::-1]), told="other data")
    yield Case("data: one answer is another", Change.CONTENT, base="file",
               edit=lines(lambda rows: [rows[0].replace('"answer": "', '"answer": "1'), *rows[1:]]), told="other data")
    yield Case("`data.path`: the same rows in another file", Change.FREE, {"data.path": "moved.jsonl"}, base="file", edit=move)
    yield Case("`data.prompt_field`", Change.CONTENT, {"data.prompt_field": "question"}, base="file", told="data.prompt_field")
    yield Case("`data.answer_field`", Change.CONTENT, {"data.answer_field": "result"}, base="file", told="data.answer_field")
    yield Case("`data.prompt`", Change.CONTENT, {"data.prompt": "{question}"}, base="file", told="data.prompt")
    yield Case("`data.max_unusable_rows`", Change.CONTENT, {"data.max_unusable_rows": "1"}, base="file", edit=lines(
        lambda rows: ["no JSON\n", *rows[1:]]), told="data.max_unusable_rows")
    yield Case("`data.max_unusable_rows`, of rows that can all be used", Change.FREE, {"data.max_unusable_rows": "1"}, base="file")
    yield Case("`data.format`", Change.CONTENT, {"data.format": "gsm8k"}, base="file", told="data.format")
    yield Case("`data.heldout_path`", Change.CONTENT, {"data.heldout_path": "rows.jsonl"}, base="file", told="other data")
    yield Case("`data.task` instead of `data.path`", Change.CONTENT, {"data.task": "addition", "data.path": ""}, base="file",
               told="data.task")
    yield Case("the file of `rollout.reward`", Change.CODE, base="file", edit=append_comment, told="rollout.reward")


class Bench:
    """The runs that are copied."""

    def __init__(self, shop: Workshop, root: Path, model: str) -> None:
        self._shop = shop
        self._root = root
        self._number = 0
        self._names = {
            "OTHER": build_small_model(root / "other", seed=2), "SAME": str(root / "same"), "TOKENIZER": _larger(root),
            "WEIGHTS": str(root / "weights")}
        shutil.copytree(model, root / "same")
        self._settings: dict[str, dict[str, str]] = {
            "task": {}, "lora": {"model.lora.rank": "4"}, "reference": {"algorithm.kl_loss": "k3"},
            "file": {"data.task": "", "data.path": "rows.jsonl", "rollout.reward": "code.py:score"}}
        self._bases: dict[str, SmallRun] = {}
        self._model = model

    def row(self, case: Case) -> Row:
        """Resume a copy of the case's run as it says."""
        base = self._base(case.base)
        self._number += 1
        run = SmallRun(self._root / str(self._number), self._model)
        shutil.copytree(base.root, run.root)
        case.edit(run.root)
        with contextlib.chdir(run.root):
            done = self._train(run, {**self._settings[case.base], "run.total_steps": "3", **case.settings}, own=case.own)
        shutil.rmtree(run.root)
        resumed = "resumed after step 2" in done.said
        lines = [line for line in done.said if line.startswith("continues with")]
        outcome = done.error.strip().removeprefix("offbeat: ") if done.code else "; ".join(lines) or "continues"
        return Row(case.what, self._without_paths(outcome, run), tuple(self._problems(case, done, lines, resumed=resumed)))

    def _problems(self, case: Case, done: Done, lines: list[str], *, resumed: bool) -> Iterator[str]:
        if "unexpected" in done.error or done.error.count("\n") > 1:
            yield done.error
        refused = case.expected in (Change.REFUSED, Change.CONTENT, Change.ROWS)
        if done.code != (2 if refused else 0):
            yield f"exit code {done.code}: {done.error}"
        if not refused and not resumed:
            yield "did not go on from its checkpoint"
        # The number of steps is told as well, because every row needs one more.
        others = [line for line in lines if line != f"continues with {_STEPS}"]
        if case.expected is Change.FREE and others:
            yield f"said {others}"
        if case.told not in (done.error if refused else " ".join(lines)):
            yield f"did not say {case.told}"

    def _base(self, name: str) -> SmallRun:
        if name not in self._bases:
            run = SmallRun(self._root / f"base-{name}", self._model)
            run.root.mkdir()
            digits = [f"{number:03d}" for number in range(100, 130)]
            rows = [{"prompt": f"{text}>", "answer": text, "question": f"{text[::-1]}>", "result": text[::-1]} for text in digits]
            (run.root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            (run.root / "code.py").write_text(CODE)
            with contextlib.chdir(run.root):
                done = self._train(run, self._settings[name], own=name in ("lora", "reference"))
            assert done.code == 0, done
            self._bases[name] = run
        return self._bases[name]

    def _train(self, run: SmallRun, changes: Mapping[str, str], *, own: bool) -> Done:
        given = {key: self._names.get(value, value) for key, value in changes.items()}
        arguments = run.arguments(**{key.replace(".", "__"): value for key, value in given.items()})
        if not own:
            return self._shop.command("train", *arguments, "--json")
        done = offbeat("train", *arguments, "--json", timeout_s=_TIMEOUT_S)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return Done(done.returncode, done.stderr, tuple(line["text"] for line in lines if line["event"] == "note"), "")

    def _without_paths(self, text: str, run: SmallRun) -> str:
        for path, name in ((run.root, "runs"), *((base.root, "runs") for base in self._bases.values()), (self._root, "models")):
            text = text.replace(f"{path}/", f"{name}/")
        return text.replace(f"{REWARDS.parent}/", "").replace(str(Path(self._model)), "models/first")


_STEPS = "run.total_steps = 3, was 2"

_TIMEOUT_S = 600
"""Compiling a model's blocks takes minutes on a busy machine."""


def _larger(root: Path) -> str:
    character_tokenizer(TEXT_ALPHABET).save(root / "tokenizer")
    return str(root / "tokenizer")


def render(found: list[Row]) -> str:
    """The section of docs/faults.md."""
    failed = [row for row in found if row.problems]
    lines = [
        "## Changed settings",
        "",
        "A run of two steps is resumed for a third with one thing changed. `python tests/faults/resume.py` makes this table, each row",
        "with the real command; what changes ranks or engines in processes of its own. What a change means is said by each",
        "setting's field in `src/offbeat/config`. A row passes when the run continues with exit code 0 and has said what is to be",
        "said (the number of steps, which every row changes, is left out here), or ends with exit code 2 and one sentence before any",
        "process is started. Settings that change freely are changed together, a section at a time; those of `[sft]`, `[preference]`,",
        "`[reward_model]` and `[serve]` are not read by a run of reinforcement learning.",
        "",
        f"{len(found) - len(failed)} of {len(found)} rows pass.",
        "",
    ]
    if failed:
        lines += ["Rows that do not pass:", "", *(f"- {row.what}: {'; '.join(row.problems)}" for row in failed), ""]
    lines += ["| what is changed | what the run does |", "|---|---|"]
    lines += [f"| {row.what} | {_cell(row.outcome)} |" for row in found]
    lines += ["", "Not in the table: " + "; ".join(f"`{key}` {why}" for key, why in ELSEWHERE.items()) + "."]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    whole = f"continues with {_STEPS}"
    for steps, rest in ((f"{whole}; continues", "continues"), (f"{_STEPS}; ", ""), (whole, "continues")):
        text = text.replace(steps, rest)
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> int:
    """Do the rows that are left, and make the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", help="do the rows with this text, whether or not they have passed before")
    only = parser.parse_args().only
    done = {row.what: row for row in (standing() if only else []) + read_rows() if not row.problems}
    todo = [case for case in cases() if (only in case.what if only else case.what not in done)]
    done |= {row.what: row for row in measure(todo)}
    if missing := [case.what for case in cases() if case.what not in done]:
        print(f"not done yet: {'; '.join(missing)}; the table stays as it is")
        return 1
    found = [done[case.what] for case in cases()]
    write_section("changed settings", render(found))
    return 1 if any(row.problems for row in found) else 0


def measure(todo: list[Case]) -> Iterator[Row]:
    """Do rows; each is recorded and yielded."""
    with tempfile.TemporaryDirectory(prefix="offbeat-resume-") as folder:
        root = Path(folder)
        model = build_small_model(root / "model", seed=1)
        with workshop(root / "shop", model) as shop:
            bench = Bench(shop, root, model)
            for case in todo:
                row = bench.row(case)
                RESULTS.parent.mkdir(exist_ok=True)
                with RESULTS.open("ab") as file:
                    file.write(msgspec.json.encode(row) + b"\n")
                print(f"{case.what}: {'; '.join(row.problems) or 'ok'}", flush=True)
                yield row


def read_rows() -> list[Row]:
    """The rows that were done."""
    lines = RESULTS.read_bytes().splitlines() if RESULTS.exists() else []
    return [msgspec.json.decode(line, type=Row) for line in lines]


def standing() -> list[Row]:
    """The rows of the table as it stands, which have passed."""
    lines = read_sections().get("changed settings", "").splitlines()
    cells = [line.removeprefix("| ").removesuffix(" |").partition(" | ") for line in lines if line.startswith("| ")]
    return [Row(what, outcome.replace("\\|", "|"), ()) for what, _, outcome in cells if what != "what is changed"]


if __name__ == "__main__":
    sys.exit(main())
