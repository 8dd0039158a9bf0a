"""`offbeat init [FOLDER]`: writes a first task (data, reward, configuration and notes) and trains nothing."""

import argparse
import json
import random
import re
import shlex
from pathlib import Path

from offbeat.errors import ConfigError, StorageError

_RUN = "my-task"
"""Placeholder for the name of the run in the texts below, and the default folder."""
_NUM_ROWS = 4000
_NUM_DIGITS = 8

DESCRIPTION = """\
Write a folder with a task to start from: data.jsonl, reward.py, task.toml and README.md. As written, they train a small model from random
weights to sort digits, in about a minute; replace each file by your own. No existing file is overwritten.
"""

EXAMPLES = """\
examples:
  offbeat init my-task && cd my-task && offbeat train task.toml
"""

_REWARD = '''\
"""The reward of this task: called with each completion and its row, in a process of its own."""

from offbeat import Row


def digits_in_place(completion: str, row: Row) -> float:
    """The share of digits that stand where they should; 1.0, which counts as right in evaluations, only for the whole answer."""
    if completion == row.answer:
        return 1.0
    right = sum(a == b for a, b in zip(completion, row.answer, strict=False))
    return 0.5 * right / max(len(completion), len(row.answer))
'''

_CONFIG = """\
# Settings that differ from their defaults; `offbeat config docs` explains all of them, `offbeat config check task.toml` checks this file.
# Paths are relative to the folder in which the command is run.

[run]
name = "my-task"
total_steps = 60
warm_up = true                    # a small model from random weights has to imitate a little first; false for a pretrained model

# [model]
# path = "HuggingFaceTB/SmolLM2-135M-Instruct"    # a folder or a hub id; without it, a model of 0.6M parameters is made. It knows only
#                                                 # digits, lower-case letters, space, line break, and + - * / = ( ) > , . ? # :

[data]
path = "data.jsonl"               # one JSON object per line, with `prompt` and `answer`; other fields reach the reward as row.extra
heldout_size = 128                # the last rows, never trained on

[rollout]
reward = "reward.py:digits_in_place"
group_size = 8                    # samples of each prompt, which are compared with each other
consumer_batch_size = 32          # prompts in a step
max_concurrent_rollouts = 64
max_new_tokens = 10

[sft]                             # the warm-up
total_steps = 150
batch_size = 128
evaluate_every_steps = 10
stop_at_accuracy = 0.60           # of greedy answers; samples are right less often, and learning from them needs some that are

[sft.optimizer]
lr = 2e-3
warmup_steps = 30

[train.optimizer]
lr = 2e-4                         # "auto" for a pretrained model
warmup_steps = 5

[evaluate]
every_steps = 20
"""

_README = """\
# A task for Offbeat

| file | holds | replace it by |
|---|---|---|
| `data.jsonl` | rows with `prompt` and `answer` | your own rows |
| `reward.py` | a function that scores one completion between 0 and 1 | what you want more of |
| `task.toml` | settings | your model, lengths, number of steps |

Check it, train it, and look at what came of it:

```
offbeat config check task.toml
offbeat train task.toml
```

That trains a small model from random weights to sort digits. It knows only digits, lower-case letters, space, line break, and
`+-*/=()>,.?#:`, so rows with capital letters, for example, need a pretrained model.

The report is `runs/my-task/report.html`, the model `runs/my-task/export`.

With a pretrained model, which needs no warm-up, learns more slowly and reads chats (any folder or hub id of a causal language model). This
trains an adapter, in steps that a CPU can do:

```
offbeat train task.toml --run.name real --model.path HuggingFaceTB/SmolLM2-135M-Instruct --run.warm_up false \\
  --rollout.max_new_tokens 64 --rollout.consumer_batch_size 16 --model.lora.rank 16 --train.optimizer.lr auto
```

Then put your own rows, reward and lengths in the place of these. Any setting can be given on the command line as here, or in `task.toml`.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", nargs="?", default=_RUN, metavar="FOLDER", help="where to write it; the run gets its name (default: my-task)")


def run(args: argparse.Namespace) -> int:
    """Write the folder; raises ConfigError if a file is there already or settings were given, StorageError if it cannot be written."""
    folder = Path(args.folder)
    name = _run_name(folder)
    files = {"data.jsonl": _rows(), "reward.py": _REWARD} | {
        file: text.replace(_RUN, name) for file, text in (("task.toml", _CONFIG), ("README.md", _README))}
    if there := [name for name in files if (folder / name).exists()]:
        raise ConfigError(f"{folder / there[0]} exists already, and nothing is overwritten; give a new folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as exc:
        raise StorageError(f"{folder} cannot be written: {exc.strerror}; give another folder") from exc
    print(f"wrote {', '.join(files)} into {folder}\ntry: cd {shlex.quote(str(folder))} && offbeat train task.toml")
    return 0


def _run_name(folder: Path) -> str:
    """Return the name of a folder with other signs than a run's name may have replaced, e.g. "my-task" for "my task"."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).lstrip("._-") or _RUN


def _rows() -> str:
    """Rows that ask to sort digits, always the same."""
    rng = random.Random(0)
    lines = []
    for _ in range(_NUM_ROWS):
        digits = [str(rng.randint(0, 9)) for _ in range(_NUM_DIGITS)]
        lines.append(json.dumps({"prompt": f"{''.join(digits)}>", "answer": "".join(sorted(digits))}) + "\n")
    return "".join(lines)
