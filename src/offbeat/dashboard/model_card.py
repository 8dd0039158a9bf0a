"""The model card that goes to a hub with a run's model: the README.md of its repository, made from the run's files.

A card is public, so it names no folder of this machine: of a path it has the last part alone.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.config.root import TRAINING_KINDS
from offbeat.config.training_kinds import TrainingKind
from offbeat.dashboard.evaluations import figures_of
from offbeat.dashboard.run_files import RunFiles

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_OF_FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".gz", ".zst", ".xz")
_GIVEN_ROWS = ".data"
"""Name of the folder of rows that a Python program has given."""


@dataclass(frozen=True)
class CardDetails:
    """Facts on a model card that are not in its run's files.

    Attributes:
        base: hub id of the model that was trained; empty if it is on no hub.
        step: step after which the model was exported; None is the last one.
        is_adapter: whether a LoRA adapter is sent without its base.
        is_classifier: whether the model answers with a score instead of text.
    """

    repo_id: str
    base: str
    step: int | None
    is_adapter: bool
    is_classifier: bool


def base_of(run: RunFiles, run_dir: Path) -> str:
    """Return the hub id of the model with which a run began; empty if it was a folder of its machine, or built by the run."""
    path = run.setting("model", "path")
    return path if isinstance(path, str) and _is_hub_id(path, run_dir) else ""


def card_text(run: RunFiles, run_dir: Path, card: CardDetails) -> str:
    """Return the card as Markdown with its metadata in front."""
    parts = [
        "---", *_metadata(run, run_dir, card), "---", "", f"# {card.repo_id.partition('/')[2]}", "", _summary(run, card), "",
        "## Training", "", "| | |", "|---|---|",
        *(f"| {name} | {_cell(value)} |" for name, value in _training(run, run_dir, card)), "", *_evaluation(run, card), "## Use", "",
        *_use(card), "", "This card was made from the run's files, which do not say what the model is for, where it fails, or under which"
        " licence it may be used.", ""]
    return "\n".join(parts)


def _metadata(run: RunFiles, run_dir: Path, card: CardDetails) -> Iterator[str]:
    """Yield lines of YAML; every text is quoted as in JSON, which YAML takes as well."""
    yield f"library_name: {'peft' if card.is_adapter else 'transformers'}"
    yield f"pipeline_tag: {'text-classification' if card.is_classifier else 'text-generation'}"
    if card.base:
        yield f"base_model: {json.dumps(card.base)}"
    if data := _datasets(run, run_dir):
        yield f"datasets: {json.dumps(data)}"
    yield f"tags: {json.dumps(['offbeat', _tag(run), *(['lora'] if _rank(run) else [])])}"


def _summary(run: RunFiles, card: CardDetails) -> str:
    base = f"`{card.base}`" if card.base else _base(run)
    what = f"A LoRA adapter for {base}" if card.is_adapter else base
    return f"{what[0].upper()}{what[1:]}, trained with Offbeat by {_method(run)}."


def _training(run: RunFiles, run_dir: Path, card: CardDetails) -> Iterator[tuple[str, str]]:
    yield "base model", card.base or _base(run)
    yield "algorithm", _method(run)
    if rank := _rank(run):
        yield "LoRA", f"rank {rank}{'' if card.is_adapter else ', merged into the weights'}"
    steps = [int(row["global_step"]) for row in run.metrics if "global_step" in row]
    if steps:
        yield "steps", str(max(steps) if card.step is None else card.step)
    yield "data", ", ".join(_data(run, run_dir)) or "not recorded"
    if not _kind(run).lesson and (reward := run.setting("rollout", "reward")):
        yield "reward", _last_part(str(reward))
    if (seed := run.setting("run", "seed")) is not None:
        yield "seed", str(seed)


def _evaluation(run: RunFiles, card: CardDetails) -> Iterator[str]:
    """Yield a table of the figures of evaluations before the training and of this model."""
    rows = []
    end = max((int(row["global_step"]) for row in run.metrics if "global_step" in row), default=0)
    for figure in figures_of(run):
        steps = [step for step in sorted(figure.values) if step > 0 and (card.step is None or step <= card.step)]
        if steps and (card.step is None or steps[-1] == card.step):
            before = figure.at(0) if 0 in figure.values else "–"
            when = f", after step {steps[-1]} of {end}" if card.step is None and steps[-1] < end else ""
            rows.append(f"| {_cell(figure.title)} | {before} | {figure.at(steps[-1])}{when} |")
    if rows:
        yield from ("## Evaluation", "", "| on held-out prompts | before training | this model |", "|---|---|---|", *rows, "")
        yield from ("In brackets stand 95 % intervals.", "")


def _use(card: CardDetails) -> Iterator[str]:
    if card.is_adapter:
        base = card.base or "PATH-OF-THE-BASE-MODEL"
        yield from ("```python", "from peft import PeftModel", "from transformers import AutoModelForCausalLM", "",
                    f'base = AutoModelForCausalLM.from_pretrained("{base}")',
                    f'model = PeftModel.from_pretrained(base, "{card.repo_id}")', "```")
    elif card.is_classifier:
        yield from ("```python", "from transformers import AutoModelForSequenceClassification, AutoTokenizer", "",
                    f'model = AutoModelForSequenceClassification.from_pretrained("{card.repo_id}")',
                    f'tokenizer = AutoTokenizer.from_pretrained("{card.repo_id}")', "```")
    else:
        yield from ("```", f"offbeat engine --model {card.repo_id}", "```", "", "or, in Python,", "", "```python",
                    "from transformers import AutoModelForCausalLM, AutoTokenizer", "",
                    f'model = AutoModelForCausalLM.from_pretrained("{card.repo_id}")',
                    f'tokenizer = AutoTokenizer.from_pretrained("{card.repo_id}")', "```")


def _kind(run: RunFiles) -> TrainingKind:
    """Return the kind of training, told by the metrics that it alone has, which supervised fine-tuning has none of."""
    folders = {name.partition("/")[0] for row in run.metrics for name in row}
    return next((kind for kind in TRAINING_KINDS.values() if not folders.isdisjoint(kind.metrics)), TRAINING_KINDS["sft"])


def _tag(run: RunFiles) -> str:
    """Return the tag of the algorithm, such as "simpo" or "reward-model"."""
    kind = _kind(run)
    section, _, name = kind.named_by.partition(".")
    return str((name and run.setting(section, name)) or kind.command)


def _method(run: RunFiles) -> str:
    """Say in words how it was trained."""
    kind = _kind(run)
    return f"{kind.method} ({_tag(run)})" if kind.named_by else kind.method


def _base(run: RunFiles) -> str:
    """Name a base model that is on no hub."""
    path = run.setting("model", "path")
    return f"the model {_last_part(str(path))}" if path else "a small model that began with random weights"


def _rank(run: RunFiles) -> int:
    lora = run.setting("model", "lora")
    rank = lora.get("rank") if isinstance(lora, Mapping) else 0
    return rank if isinstance(rank, int) else 0


def _sources(run: RunFiles) -> list[Mapping[str, Any]]:
    """Return the tables of the sources of training rows: [data.sets.NAME] for each set, or [data] itself."""
    sets = run.setting("data", "sets")
    tables = [each for each in sets.values() if isinstance(each, Mapping)] if isinstance(sets, Mapping) else []
    data = run.config.get("data")
    return tables or ([data] if isinstance(data, Mapping) else [])


def _data(run: RunFiles, run_dir: Path) -> Iterator[str]:
    for table in _sources(run):
        path = str(table.get("path") or "")
        if _is_hub_id(path.partition(":")[0], run_dir):
            yield path
        elif path:
            yield "rows that a Python program gave" if Path(path).parent.name == _GIVEN_ROWS else _last_part(path)
        elif table.get("task"):
            yield f"the task {table['task']}"


def _datasets(run: RunFiles, run_dir: Path) -> list[str]:
    """Return the hub ids of data sets, without the names of configurations."""
    paths = [str(table.get("path") or "").partition(":")[0] for table in _sources(run)]
    return [path for path in paths if _is_hub_id(path, run_dir)]


def _is_hub_id(path: str, run_dir: Path) -> bool:
    """Whether a path names something on a hub, and no folder or file here or beside the run."""
    if _HUB_ID.fullmatch(path) is None or Path(path).suffix in _OF_FILES:
        return False
    return not any((folder / path).exists() for folder in (Path(), *run_dir.resolve().parents))


def _last_part(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _cell(text: str) -> str:
    """Write a text into a cell of a table of Markdown."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")
