"""A run, read from its folder on demand: while it goes on, when it has ended, and after a crash."""

import importlib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import msgspec
import zstandard

from offbeat.api.push import Commit, plan_push, send
from offbeat.api.replayed import Replayed, replay_run
from offbeat.dashboard.report import cell_html, write_report
from offbeat.dashboard.run_files import check_run, read_run
from offbeat.errors import ConfigError, DataError, MissingExtraError
from offbeat.loading import load_module
from offbeat.telemetry.jsonl import read_json_lines

if TYPE_CHECKING:
    from offbeat.data.tokenizer import Tokenizer

_ROLLOUTS = re.compile(r"step-(\d+)\.jsonl\.zst")
_ACCURACY = "eval/accuracy"
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Rollout:
    """One sample that a step has trained on, or not, as `reason` says.

        for rollout in offbeat.Run("runs/words").rollouts(step=10):
            print(rollout.reward, rollout.prompt, rollout.completion)

    Attributes:
        step: the training step.
        prompt_id: "epoch:index", such as "0:17"; the same for all samples of a group.
        prompt: decoded prompt, special tokens included.
        completion: decoded rest: the model's answer, or in episodes of several turns its answers and the tokens given in between.
        reward: reward of the whole episode; NaN where there is none that can be trained on.
        reason: why it ended, "stop" or "length"; or why it is not trained on.
        named_rewards: the rewards by name that add up to `reward`, if it has several.
        tokens: all token ids, of prompt and completion.
        generated: for each token, whether the model wrote it.
        logprobs: for each token, the log-probability with which it was sampled; 0 for tokens that were not sampled.
        versions: for each token, the version of the weights that sampled it, such as [-1, -1, 3, 3]; -1 for tokens that were not sampled.
        episode: number of its episode within its group; None is an episode of its own.
        agent: role of the model that wrote it, where several play an episode.
    """

    step: int
    prompt_id: str
    prompt: str
    completion: str
    reward: float
    reason: str
    named_rewards: Mapping[str, float] = field(repr=False)
    tokens: Sequence[int] = field(repr=False)
    generated: Sequence[bool] = field(repr=False)
    logprobs: Sequence[float] = field(repr=False)
    versions: Sequence[int] = field(repr=False)
    episode: int | None = None
    agent: str = ""


class Run:
    """A run's folder.

        run = offbeat.Run("runs/words")
        print(run.heldout_before, run.heldout_after)
        print(run.metrics()[-1]["reward/mean"])

    Attributes:
        folder: the run's folder, as docs/run-directory.md describes it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Look at a run; raises DataError if there is no such folder, or it is not a run."""
        self.folder = Path(folder)
        check_run(self.folder)

    def __repr__(self) -> str:
        marks = ", ".join(
            f"{name}={value:.3f}" for name in ("heldout_before", "heldout_after") if (value := getattr(self, name)) is not None)
        return f"Run({str(self.folder)!r}, steps={self.steps}{', ' if marks else ''}{marks})"

    def _repr_html_(self) -> str:
        """Return figures, curves and samples, which a notebook shows where a cell ends with the run."""
        return cell_html(read_run(self.folder))

    @property
    def name(self) -> str:
        """The run's name, the same as its folder's."""
        return self.folder.resolve().name

    @property
    def config(self) -> dict[str, Any]:
        """Every setting of the run, by section; `offbeat.train(config=run.config)` takes it, and so does `offbeat train` its file."""
        file = self.folder / "config.toml"
        return tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    @property
    def result(self) -> dict[str, Any]:
        """The values of `result.json`, which is written when a run ends; empty before."""
        file = self.folder / "result.json"
        return json.loads(file.read_bytes()) if file.is_file() else {}

    @property
    def steps(self) -> int:
        """Training steps done."""
        return max((int(row["global_step"]) for row in self.metrics() if "global_step" in row), default=0)

    @property
    def stopped_early(self) -> bool:
        """Whether the run was asked to stop before its last step; it goes on when it is started again."""
        return bool(self.result.get("stopped_early"))

    @property
    def heldout_before(self) -> float | None:
        """Held-out accuracy before the first step; None where it was not measured."""
        return next((value for step, value in self._accuracies() if step == 0), None)

    @property
    def heldout_after(self) -> float | None:
        """Held-out accuracy at the last evaluation so far, after a step or more; None where there was none."""
        after = [value for step, value in self._accuracies() if step > 0]
        if after:
            return after[-1]
        found = self.result.get("heldout_after", self.result.get("accuracy"))
        return float(found) if isinstance(found, int | float) else None

    @property
    def model(self) -> Path:
        """Folder of the trained model, with its tokenizer, in Hugging Face's format.

        Raises:
            DataError: it has not been exported: the run goes on, has failed, or `checkpoint.export` is off.
        """
        return self._exported("export", "it is written when the run ends, unless checkpoint.export is false")

    @property
    def best_model(self) -> Path:
        """Folder of the best model by `evaluate.keep_best`; raises DataError if there is none."""
        return self._exported("best", "it is written where evaluate.keep_best names a metric, and a step has raised it")

    @overload
    def metrics(self) -> list[dict[str, float]]: ...
    @overload
    def metrics(self, frame: Literal["pandas", "polars"]) -> Any: ...
    def metrics(self, frame: Literal["", "pandas", "polars"] = "") -> Any:
        """Return the metrics, one row for each step; a row of step 0 is the evaluation before the first.

        Args:
            frame: "pandas" or "polars" for a data frame of that library, with a column for each metric.

        Raises:
            MissingExtraError: that library is not installed.
            ConfigError: `frame` is another one.
        """
        rows = [
            {name: value for name, value in row.items() if isinstance(value, int | float)}
            for row in read_json_lines(self.folder / "metrics.jsonl")]
        if not frame:
            return rows
        if frame not in ("pandas", "polars"):
            raise ConfigError(f"frame must be 'pandas' or 'polars', got {frame!r}; leave it out for a list of rows")
        try:
            library = importlib.import_module(frame)  # as an optional library, it is imported when it is needed
        except ImportError as exc:
            raise MissingExtraError(f"to make a data frame of {frame}, {frame} must be installed: pip install {frame}") from exc
        names = dict.fromkeys(name for row in rows for name in row)
        return library.DataFrame({name: [row.get(name) for row in rows] for name in names})

    def events(self) -> list[dict[str, Any]]:
        """Return publishes, evaluations, checkpoints, rejections and failures, in order, each with its `kind`."""
        return [dict(event) for event in read_json_lines(self.folder / "events.jsonl")]

    @property
    def rollout_steps(self) -> list[int]:
        """Steps of which samples are kept: every `telemetry.rollouts_every_steps`."""
        found = (_ROLLOUTS.fullmatch(path.name) for path in (self.folder / "rollouts").glob("*.zst"))
        return sorted(int(match[1]) for match in found if match)

    def rollouts(self, step: int | None = None) -> Iterator[Rollout]:
        """Iterate over the samples that were kept, of one step or of all, group by group.

        Raises:
            DataError: no samples of this step are kept, or a file of them is damaged.
            ModelError: the tokenizer that wrote them is gone.
        """
        steps = self.rollout_steps
        if step is not None and step not in steps:
            kept = ", ".join(map(str, steps[:8])) + (", …" if len(steps) > 8 else "")
            raise DataError(
                f"no rollouts of step {step} are kept in {self.folder}, but those of {kept or 'none'}; telemetry.rollouts_every_steps says"
                " of which steps they are")
        return (rollout for each in (steps if step is None else [step]) for rollout in self._rollouts_of(each))

    def report(self) -> Path:
        """Write the run's report, one HTML file that opens in any browser, and return its path."""
        return write_report(self.folder)

    def replay(self, *, from_step: int | None = None, to_step: int | None = None, live_groups: int | None = None) -> Replayed:
        """Train the steps of the run again from its journal and compare them, as `offbeat replay` does; docs/replay.md says what is equal.

            replayed = offbeat.Run("runs/words").replay(to_step=10)
            print(replayed.is_equal, [step.difference for step in replayed.steps])

        Nothing is written into the run's folder. It blocks, also in a notebook.

        Args:
            from_step, to_step: the steps to compare; by default all that can be replayed.
            live_groups: number of groups of each step to generate again with an engine, 0 for all; None starts no engine.

        Raises:
            UserError: the run cannot be replayed; says why.
            RunError: a process failed.
            KeyboardInterrupt: it was interrupted.
        """
        return replay_run(self.folder, from_step=from_step, to_step=to_step, live_groups=live_groups)

    def push(
        self, repo_id: str, *, checkpoint: str = "last", adapter: bool = False, base_model: str = "", revision: str = "main",
        message: str = "", private: bool = False,
    ) -> str:
        """Send the model with a model card to a Hugging Face hub, as `offbeat push` does, and return its address.

        Args:
            repo_id: the repository, as "OWNER/NAME"; one that does not exist is created, public unless `private` is set or the owner's
                settings on the hub say otherwise.
            checkpoint: which export: "last", "best", or the number of a step.
            adapter: whether the LoRA adapter goes by itself.
            base_model: hub id of the base model, where the run began with a local folder.
            revision: branch, which is created if necessary.
            message: message of the commit.

        Raises:
            UserError: there is nothing to send, the hub cannot be reached, or it refuses.
        """
        return send(plan_push(
            self.folder, repo_id, checkpoint=checkpoint, adapter=adapter, base_model=base_model,
            commit=Commit(revision, message), private=private))

    def _accuracies(self) -> list[tuple[float, float]]:
        return [(row["global_step"], row[_ACCURACY]) for row in self.metrics() if {"global_step", _ACCURACY} <= row.keys()]

    def _exported(self, name: str, when: str) -> Path:
        folder = self.folder / name
        if not (folder / "config.json").is_file():
            raise DataError(f"{self.folder} has no folder {name!r}; {when}")
        return folder

    @cached_property
    def _tokenizer(self) -> "Tokenizer":
        """The tokenizer of the run: an export's, or the initial model's."""
        model = self.config.get("model", {})
        places = [self.folder / "export", self.folder / "best", model.get("tokenizer"), self.folder / "model", model.get("path")]
        found = next((place for place in places if place and (Path(place) / "tokenizer.json").is_file()), None)
        load_tokenizer = load_module("offbeat.data.tokenizer").load_tokenizer  # of the extra `train`, which metrics and reports do not need
        return load_tokenizer(found or model.get("tokenizer") or model.get("path") or self.folder / "model")

    def _rollouts_of(self, step: int) -> Iterator[Rollout]:
        path, tokenizer = self.folder / "rollouts" / f"step-{step:06d}.jsonl.zst", self._tokenizer
        try:
            for line in _lines(path):
                group = msgspec.json.decode(line)
                for chain in group["trajectories"]:
                    yield _rollout(step, group["prompt_id"], chain, tokenizer)
        except (OSError, ValueError, KeyError, zstandard.ZstdError) as exc:
            raise DataError(f"{path} is damaged, so its rollouts cannot be read: {type(exc).__name__}: {exc}") from exc


def _rollout(step: int, prompt_id: str, chain: Mapping[str, Any], tokenizer: "Tokenizer") -> Rollout:
    tokens, generated = chain["tokens"], chain["loss_mask"]
    start = generated.index(True) if True in generated else len(tokens)
    whole = all(generated[start:])  # then only the token that ends it is special
    reward = chain.get("reward")
    return Rollout(
        step, prompt_id, tokenizer.decode(tokens[:start], skip_special_tokens=False),
        tokenizer.decode_continuation(tokens[start:], skip_special_tokens=whole), float("nan") if reward is None else float(reward),
        chain["reason"], chain.get("named_rewards") or {}, tuple(tokens), tuple(generated), tuple(chain["rollout_logprobs"]),
        tuple(chain["versions"]), chain.get("episode"), chain.get("agent") or "")


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a compressed file; raises ValueError if it was cut off."""
    unpacked, rest = zstandard.ZstdDecompressor().decompressobj(), b""
    with path.open("rb") as file:
        while packed := file.read(_READ_BYTES):
            *lines, rest = (rest + unpacked.decompress(packed)).split(b"\n")
            yield from lines
    if not unpacked.eof:
        raise ValueError("it was cut off")
