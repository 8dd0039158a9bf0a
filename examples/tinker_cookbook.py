"""The public Tinker cookbook, unmodified, against `offbeat serve`: supervised fine-tuning with a resume, then RL on arithmetic.

    make cookbook

Two environments take part: this script and the server run in Offbeat's, the recipes in the cookbook's. No model hub and no data hub is
needed: folders named like hub ids stand in for both. The base model is a small one that this script first teaches to add, or to evade, in
the cookbook's own chat format; it has the name of a real model only because recipes look up their chat format by it. Five minutes in all.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Regex, decoders, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from offbeat.cli.main import main as offbeat

MODEL = "meta-llama/Llama-3.2-1B"
DATASET = "HuggingFaceH4/no_robots"
KEY = "tml-cookbook"
SHOT = "User: What is 4 + 5?\n\nAssistant: 9\n\n"
COLOURS = ("red", "green", "blue", "yellow", "black", "white")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=".venv-cookbook/bin/python", help="of the environment with the cookbook (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("runs/cookbook"), help="folder for models, data and logs (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8123, help="of the server (default: %(default)s)")
    parser.add_argument("--rl-steps", type=int, default=25, help="optimizer steps of the RL recipe (default: %(default)s)")
    args = parser.parse_args()
    work, python = args.work.resolve(), Path(args.python).absolute()
    work.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(work / "sl_loop", ignore_errors=True)
    write_dataset(work / DATASET)
    if not (work / MODEL / "config.json").exists():
        train_base(work)
    with serving(work, args.port):
        recipe = Recipes(python, work, f"http://127.0.0.1:{args.port}")
        recipe.supervised(stop_after=12)
        recipe.supervised()  # goes on from the checkpoint of step 10
        recipe.arithmetic(max_steps=args.rl_steps)
    nll = metric(work / "sl_loop", "train_mean_nll")
    reward = metric(work / "math_rl", "env/all/reward/total")
    third = max(len(reward) // 3, 1)
    print(f"supervised: {nll[0]:.3f} -> {nll[-1]:.3f} nats per token, in {len(nll)} steps with one resume")
    print(f"arithmetic: reward {mean(reward[:third]):.3f} in the first {third} steps, {mean(reward[-third:]):.3f} in the last {third}")


def train_base(work: Path) -> None:
    """Teach a tiny model from random weights to add numbers up to 100, not too well, in the format of the recipe."""
    rng = random.Random(0)
    rows = [problem(rng) for _ in range(64_000)]
    data, held_out = work / "addition.jsonl", work / "addition-held-out.jsonl"
    for path, part in ((data, rows[256:]), (held_out, rows[:256])):
        path.write_text("".join(json.dumps(row) + "\n" for row in part))
    tokenizer = work / "tokenizer"
    texts = [row["prompt"] + row["answer"] for row in rows[:2000]] + ["".join(chat) for chat in chats()]
    train_tokenizer(texts).save_pretrained(tokenizer)
    config = work / "base.toml"
    config.write_text(
        f'[run]\nname = "base"\ndir = "{work}"\n[model]\ntokenizer = "{tokenizer}"\n[data]\npath = "{data}"\nheldout_path = "{held_out}"\n'
        '[rollout]\nmax_new_tokens = 12\n[sft]\ntotal_steps = 1000\nbatch_size = 128\n'
        '[sft.optimizer]\nlr = 3e-3\nwarmup_steps = 30\nschedule = "linear"\n')
    if offbeat(["sft", str(config)]):
        sys.exit("the base model was not trained")
    (work / MODEL).parent.mkdir(parents=True, exist_ok=True)
    (work / "base" / "export").rename(work / MODEL)


def problem(rng: random.Random) -> dict[str, str]:
    """A sum of the recipe, and what the base model learns to say to it: the answer, or often that it has none, which RL is to cure."""
    a, b = rng.randrange(101), rng.randrange(101)
    answer = str(a + b) if rng.random() < 0.5 else "No idea."
    return {"prompt": f"{SHOT}User: What is {a} + {b}?\n\nAssistant:", "answer": f" {answer}\n\nUser:"}


def chats() -> list[tuple[str, str]]:
    """Questions and answers for the supervised recipe."""
    return [(f"Which colour comes after {a}?", f"After {a} comes {b}.") for a, b in zip(COLOURS, COLOURS[1:] + COLOURS[:1], strict=True)]


def train_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with a token for every digit."""
    backend = Backend(BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\d|\s?[A-Za-z]+:?|\n+|."), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=400, special_tokens=["<eos>", "<pad>"], initial_alphabet=alphabet, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


def write_dataset(folder: Path) -> None:
    """Chats in the form of the recipe's data set."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]} for question, answer in chats()]
    for split, copies in (("train", 80), ("test", 2)):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * copies))


@contextmanager
def serving(work: Path, port: int) -> Iterator[None]:
    """`offbeat serve` while the body runs."""
    command = [
        sys.executable, "-m", "offbeat", "serve", "--model", MODEL, "--model-name", MODEL, "--port", str(port), "--data-dir", "serve"]
    server = subprocess.Popen(command, cwd=work, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        if not any("http://" in line for line in server.stdout):
            sys.exit("the server did not start")
        yield
    finally:
        server.terminate()
        server.communicate()


class Recipes:
    """The cookbook's programs, run as its documentation runs them."""

    def __init__(self, python: Path, work: Path, base_url: str) -> None:
        self._python = python
        self._work = work
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(work / "hf"), "TINKER_TELEMETRY": "0"}
        self._environment = os.environ | offline | {"TINKER_BASE_URL": base_url, "TINKER_API_KEY": KEY}

    def supervised(self, *, stop_after: int | None = None) -> None:
        """To its end, or until it is stopped as by a crash, so many steps after its start."""
        folder = self._work / "sl_loop"
        with self._start("sl_loop", f"log_path={folder}", "batch_size=16", "learning_rate=1e-3", "save_every=10") as process:
            while process.poll() is None:
                if stop_after is not None and len(metric(folder, "train_mean_nll")) >= stop_after:
                    process.kill()
                    return
                time.sleep(0.1)
        _check(process)

    def arithmetic(self, *, max_steps: int) -> None:
        with self._start(
            "math_rl.train", f"log_path={self._work / 'math_rl'}", "env=arithmetic", "loss_fn=importance_sampling", "group_size=8",
            "groups_per_batch=48", "max_tokens=8", "learning_rate=3e-3", f"{max_steps=}", "behavior_if_log_dir_exists=delete",
            "eval_every=0", "save_every=0") as process:
            process.wait()
        _check(process)

    def _start(self, recipe: str, *settings: str) -> subprocess.Popen[bytes]:
        command = [str(self._python), "-m", f"tinker_cookbook.recipes.{recipe}", f"model_name={MODEL}", *settings]
        print("$", *command[1:], flush=True)
        return subprocess.Popen(command, cwd=self._work, env=self._environment)


def _check(process: subprocess.Popen[bytes]) -> None:
    if process.returncode:
        sys.exit(f"the recipe ended with exit code {process.returncode}")


def metric(folder: Path, name: str) -> list[float]:
    """A recipe's metric, by step."""
    file = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [row[name] for row in rows if name in row]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
