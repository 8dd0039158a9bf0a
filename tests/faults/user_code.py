"""`python tests/faults/user_code.py`: every kind of wrong reward, workflow and filter in a real run, and the section in docs/faults.md.

Results go to build/user_code.jsonl, a line per kind; one that passed there is not done again, so the whole can be done in parts.

Train ranks, an engine and the publisher are started once; each kind then has reward processes and an executor of its own, and trains a few
steps on them. What a kind promises is checked: it is left out alone, no prompt is lost for good, the steps are done and finite, or the run
ends in one sentence before or while it trains.
"""

import argparse
import asyncio
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.sections import write_section
from offbeat.algorithms.experience import batch_metrics, batch_stats, make_batch
from offbeat.config.root import Config
from offbeat.controller.evaluate import Evaluator
from offbeat.controller.inputs import read_inputs
from offbeat.controller.parts import Rollouts, RunParts, SingleProcess
from offbeat.data.stream import PromptStream
from offbeat.data.trajectory import Group
from offbeat.errors import OffbeatError
from offbeat.runs.rank_info import read_rank_info
from offbeat.runs.rollouts import EngineRollouts
from offbeat.runs.run import open_run
from offbeat.runs.run_code import open_user_code
from offbeat.telemetry.console import Console
from offbeat.telemetry.jsonl import read_json_lines
from offbeat.telemetry.record import RunRecord
from offbeat.workers.local import LocalLauncher
from small_run import build_small_model, small_config
from support import wrong_code

ROOT = Path(__file__).parents[2]
CODE = Path(wrong_code.__file__)
RESULTS = ROOT / "build" / "user_code.jsonl"
HEADING = "Wrong user code"
STEPS = 5
_CASE_TIMEOUT_S = 120.0
_MAX_SAID = 200

Promise = Literal["alone", "again", "lost", "refused", "taken"]
"""A sample is left out alone; its group is drawn again; its prompt is lost after so many tries; the run ends in a sentence; all is well."""

SETTINGS = {
    "rollout.group_size": "4", "rollout.consumer_batch_size": "4", "rollout.max_concurrent_rollouts": "8",
    "rollout.reward_timeout_s": "0.5", "rollout.episode_timeout_s": "2", "rollout.blocked_timeout_s": "2",
    "rollout.batch_timeout_s": "60",
    "inference.token_timeout_s": "0", "data.heldout_size": "20",
    "evaluate.num_prompts": "20", "rollout.max_failures_in_a_row": "20"}


@dataclass(frozen=True)
class Case:
    """One kind.

    Attributes:
        what: what the code does, for people.
        said: part of what is said of it.
        settings: besides `SETTINGS`, with `wrong_code.py:NAME` for a name in it.
        evaluates: it is played in an evaluation.
    """

    part: str
    what: str
    promise: Promise
    said: str
    settings: Mapping[str, str]
    evaluates: bool = False


@dataclass
class Outcome:
    """What a kind showed.

    Attributes:
        samples, left_out: played, and those that were not trained on.
        drawn_again, lost: prompts that came again, and those rejected for good.
        said: the first reason, or the sentence with which the run ended.
        problems: what does not meet the promise.
    """

    steps: int = 0
    samples: int = 0
    left_out: int = 0
    drawn_again: int = 0
    lost: int = 0
    said: str = ""
    ended: str = ""
    accuracy: float | None = None
    failed_prompts: int = 0
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def _of(part: str, prefix: str, setting: str, rows: list[tuple[str, str, Promise, str]]) -> list[Case]:
    return [Case(part, what, promise, said, {setting: f"{CODE}:{prefix}_{name}"}) for name, what, promise, said in rows]


REWARD, FILTER = "A reward, on one completion in ten, or in twenty where that costs its process", "A filter, in one group in eight"
SAMPLE, GROUP = "A workflow, in one sample of a group in eight", "A workflow, in one group in eight"
ALWAYS, REST = "Code that is always wrong", "Evaluations"


def all_cases() -> list[Case]:
    """The table's rows."""
    reward = "rollout.reward"
    cases = _of(REWARD, "reward", reward, [
        ("raises", "raises", "alone", "raised ValueError"),
        ("raises_unspeakably", "raises an error whose text raises", "alone", "raised Unspeakable: it cannot say what is wrong"),
        ("raises_half_a_character", "raises with half a surrogate pair as the text", "alone", r"raised KeyError: '\ud800'"),
        ("exits", "calls `sys.exit`", "alone", "raised SystemExit: 3"),
        ("interrupts", "raises KeyboardInterrupt", "alone", "raised KeyboardInterrupt"),
        ("ends_its_process", "calls `os._exit`", "alone", "exited with code 3"),
        ("kills_its_process", "is killed by SIGKILL, as for memory", "alone", "was killed by SIGKILL"),
        ("crashes", "reads address 0 in native code", "alone", "was killed by SIGSEGV"),
        ("stops_its_process", "stops itself by SIGSTOP", "alone", "did not answer within rollout.reward_timeout_s"),
        ("hangs", "hangs", "alone", "did not answer within rollout.reward_timeout_s"),
        ("calls_itself", "calls itself without end", "alone", "raised RecursionError"),
        ("wants_a_petabyte", "allocates a petabyte", "alone", "it took more memory than rollout.reward_memory_bytes"),
        ("shouts", "prints 10 MB and raises with as much", "alone", "raised ValueError: xxx"),
        ("gives_none", "returns None", "alone", "None (NoneType) is not a number"),
        ("gives_text", "returns the text \"0.7\"", "alone", "'0.7' (str) is not a number"),
        ("gives_a_list", "returns a list of one number", "alone", "[1.0] (list) is not a number"),
        ("gives_an_array", "returns an array of one number", "alone", "(ndarray) is not a number"),
        ("gives_text_in_an_array", "returns text in an array without dimensions", "alone", "(ndarray) is not a number"),
        ("gives_a_complex_number", "returns a complex number", "alone", "1j (complex) is not a number"),
        ("gives_nan", "returns NaN", "alone", "nan is not a number within ±1e+12"),
        ("gives_inf", "returns infinity", "alone", "inf is not a number within ±1e+12"),
        ("gives_1e308", "returns 1e308", "alone", "1e+308 is not a number within ±1e+12"),
        ("gives_an_endless_integer", "returns an integer of 400 digits", "alone", "(int) is not a number"),
        ("gives_a_coroutine", "returns a coroutine, which is waited for", "taken", ""),
        ("gives_any_number", "returns True, 1, a numpy scalar or an array without dimensions", "taken", ""),
    ])
    cases += _of(SAMPLE, "sample", "rollout.workflow", [
        ("token_outside_the_vocabulary", "a token id that is the vocabulary's size", "alone", "wrong tokens: token"),
        ("negative_token", "a token id of -1", "alone", "has the id -1"),
        ("token_of_33_bits", "a token id of 2**32 + 5", "alone", "must hold numbers of type int32, got 4294967301"),
        ("prompt_outside_the_vocabulary", "a token id outside the vocabulary in the prompt", "alone", "token 0 has the id 1000000"),
        ("text_for_tokens", "text for tokens", "alone", "Trajectory.tokens must hold numbers"),
        ("fractions_for_tokens", "fractions for tokens", "alone", "Trajectory.tokens must hold numbers of type int32"),
        ("logprob_nan", "a log-probability of NaN", "alone", "has the log-probability nan"),
        ("logprob_minus_infinity", "a log-probability of minus infinity", "alone", "has the log-probability -inf"),
        ("probabilities_for_logprobs", "probabilities for log-probabilities", "alone", "wrong logprobs"),
        ("logprobs_all_0", "log-probabilities that are all 0", "alone", "all log-probabilities are 0"),
        ("logprobs_of_another_length", "fewer log-probabilities than tokens", "alone", "Trajectory.rollout_logprobs must have shape"),
        ("version_of_the_future", "a version of the future", "alone", "is of version 1000000"),
        ("version_of_long_ago", "versions of 38 steps before", "alone", "wrong versions"),
        ("version_of_a_prompt", "a version of -1 for a generated token", "alone", "is of version -1"),
        ("reward_text", "a text as the reward", "alone", "'good' (str) is not a number"),
        ("reward_none", "None as the reward", "alone", "None (NoneType) is not a number"),
        ("reward_1e308", "1e308 as the reward", "alone", "1e+308 is not a number"),
        ("reason_none", "None as the reason", "alone", "Trajectory.reason must be text"),
        ("no_prompt", "no prompt before the generated tokens", "alone", "it begins with a generated token"),
        ("no_tokens", "no tokens at all", "alone", "it has no tokens"),
        ("too_long", "more tokens than a micro-batch or the context takes", "alone", "too long: a row of"),
        ("text_for_a_trajectory", "a text in the place of a trajectory", "alone", "the workflow returned 'answer' (str)"),
        ("none_for_a_trajectory", "None in the place of a trajectory", "alone", "the workflow returned None"),
    ])
    cases += _of(GROUP, "group", "rollout.workflow", [
        ("raises", "raises", "again", "KeyError: 'turns'"),
        ("raises_unspeakably", "raises an error whose text raises", "again", "Unspeakable: it cannot say what is wrong"),
        ("raises_half_a_character", "raises with half a surrogate pair as the text", "again", r"KeyError: '\ud800'"),
        ("exits", "calls `sys.exit`", "again", "SystemExit: 3"),
        ("raises_in_a_task_group", "has an engine refuse a request in a task group", "again", "RefusedError"),
        ("cancels_itself", "cancels its own work", "again", "let a cancellation of its own escape"),
        ("hangs", "waits for ever", "again", "passed its deadline of 2 s"),
        ("blocks", "sleeps without awaiting", "again", "in block_here; await there, or use asyncio.to_thread"),
        ("blocks_once_more", "does so twice, and catches what ends it", "again", "must return 4 trajectories"),
        ("gives_none", "returns None", "again", "must return 4 trajectories, one for each sample, got None"),
        ("gives_text", "returns a text", "again", "got 'answer' (str)"),
        ("gives_an_empty_list", "returns an empty list", "again", "got 0"),
        ("gives_fewer", "returns fewer trajectories than samples", "again", "got 3"),
        ("gives_more", "returns more trajectories than samples", "again", "got more"),
        ("asks_for_nonsense", "asks the engine to go on from a token outside the vocabulary", "again", "outside the vocabulary"),
        ("asks_for_too_much", "asks for more than the context", "again", "are more than the context"),
        ("scores_nothing", "asks for the reward of None", "again", "score takes a list of texts"),
    ])
    cases += _of(FILTER, "filter", "rollout.should_accept", [
        ("raises", "raises", "again", "should_accept raised KeyError"),
        ("exits", "calls `sys.exit`", "again", "should_accept raised SystemExit"),
        ("gives_none", "returns None", "again", "must return True or False, got None"),
        ("gives_an_array", "returns an array", "again", "must return True or False, got array"),
        ("writes_into_tokens", "writes into the tokens it is shown", "again", "read-only"),
    ])
    here = f"{CODE}:"
    cases += [
        Case(ALWAYS, "a reward that raises on all of a prompt's samples", "lost", "a prompt with 1",
             {reward: f"{here}reward_raises_on_some_prompts"}),
        Case(ALWAYS, "a reward that raises on every sample", "refused", "groups of rollouts failed; the first with RewardError",
             {reward: f"{here}reward_always_raises"}),
        Case(ALWAYS, "a reward that raises on the data's own answer, too", "refused", "raised ValueError: no number in it",
             {reward: f"{here}reward_raises_at_once"}),
        Case(ALWAYS, "a reward's name with a typing error", "refused", "did you mean 'reward_raises'", {reward: f"{here}reward_raise"}),
        Case(ALWAYS, "a workflow that is not async", "refused", "must be an async function",
             {"rollout.workflow": f"{here}workflow_not_async"}),
        Case(ALWAYS, "a workflow that is an async generator", "refused", "must be an async function",
             {"rollout.workflow": f"{here}workflow_generator"}),
        Case(ALWAYS, "a workflow of two arguments", "refused", "missing 1 required positional argument",
             {"rollout.workflow": f"{here}workflow_of_two_arguments"}),
        Case(REST, "a reward that raises on one completion in ten of an evaluation", "taken", "raised ValueError",
             {reward: f"{here}reward_raises"}, evaluates=True),
        Case(REST, "a workflow that returns None for one prompt in eight of an evaluation", "taken", "got None",
             {"rollout.workflow": f"{here}group_gives_none"}, evaluates=True),
        Case(REST, "a workflow that returns a version of the future in an evaluation, which has no versions to compare with", "taken", "",
             {"rollout.workflow": f"{here}sample_version_of_the_future"}, evaluates=True),
    ]
    return cases


class Notes(Console):
    """A console that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__("quiet")
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


class Ring:
    """A run that trains case after case; versions go on from each to the next."""

    def __init__(self, root: Path, parts: RunParts) -> None:
        self._root = root
        self._parts = parts
        self._version = 0
        self._number = 0

    async def open(self) -> None:
        await self._parts.trainers.restart_optimizer(self._parts.config.train.optimizer, total_steps=10**6)
        await self._parts.publisher.publish(0, on_served=lambda _report: None)
        await self._parts.publisher.settle()

    async def play(self, case: Case) -> Outcome:
        """Train `STEPS` steps, or evaluate."""
        self._number += 1
        config = small_config(self._root, self._parts.inputs.model, **_settings(case))
        outcome, notes = Outcome(), Notes()
        stream = PromptStream(self._parts.inputs.train, seed=self._number)
        trained: list[str] = []
        folder = self._root / f"case-{self._number}"
        with RunRecord(folder, trace=False, console=notes) as record:
            try:
                async with asyncio.timeout(_CASE_TIMEOUT_S), AsyncExitStack() as stack:
                    user_code = await open_user_code(
                        stack, self._parts.inputs, config, record, launcher=LocalLauncher.from_config(config.for_launcher))
                    assert isinstance(self._parts.source, EngineRollouts), "a controller rolls out itself"
                    source = EngineRollouts(config, record, self._parts.inputs, self._parts.source.generate, user_code)
                    rollouts = source.rollouts(stream, version=self._version, last_version=self._version + STEPS)
                    if case.evaluates:
                        await self._evaluate(config, rollouts, outcome)
                    else:
                        await self._train(config, rollouts, outcome, trained)
                        self._check_prompts(stream, rollouts, trained, folder, outcome)
            except OffbeatError as exc:
                outcome.ended = str(exc)
            except Exception as exc:
                outcome.ended = f"unexpected {type(exc).__name__}: {exc}"
        outcome.notes = notes.texts
        self._read_events(folder, outcome)
        self._judge(case, outcome)
        return outcome

    async def _evaluate(self, config: Config, rollouts: Rollouts, outcome: Outcome) -> None:
        evaluation = await Evaluator(
            rollouts, self._parts.inputs.heldout, config.evaluate, SingleProcess(), tokenizer=self._parts.inputs.tokenizer).run()
        outcome.accuracy, outcome.failed_prompts = evaluation.accuracy, evaluation.num_failed
        groups = await rollouts.rollout_batch(
            [self._parts.inputs.heldout.row(i) for i in range(20)], group_size=1, sampling=rollouts.sampling)
        outcome.said = next((group.rejected for group in groups if group.rejected), "")

    async def _train(self, config: Config, rollouts: Rollouts, outcome: Outcome, trained: list[str]) -> None:
        parts = self._parts
        async with rollouts:
            for _ in range(STEPS):
                groups = await rollouts.prepare_batch()
                trained += [group.prompt_id for group in groups]
                batch = make_batch(groups, config=config.algorithm, max_new_tokens=config.rollout.max_new_tokens)
                stats = await parts.trainers.train_step(batch)
                stats |= batch_metrics([batch_stats(groups, version=self._version)])
                self._version += 1
                rollouts.advance(self._version)
                await parts.publisher.publish(self._version, on_served=lambda report: rollouts.serve(report.version))
                await parts.publisher.settle()
                outcome.steps += 1
                self._count(groups, outcome)
                wrong = [f"{name} is {value} in step {outcome.steps}" for name, value in stats.items() if not math.isfinite(value)]
                outcome.problems += wrong
                if stats.get("rollout/staleness_max_versions", 0) > config.rollout.max_head_offpolicyness:
                    outcome.problems.append(f"a token of {stats['rollout/staleness_max_versions']:g} versions before was trained on")

    def _count(self, groups: list[Group], outcome: Outcome) -> None:
        reasons = [t.reason for group in groups for t in group.trajectories if t.unusable is not None]
        outcome.samples += sum(len(group.trajectories) for group in groups)
        outcome.left_out += len(reasons)
        outcome.said = outcome.said or next(iter(reasons), "")

    def _check_prompts(self, stream: PromptStream, rollouts: Rollouts, trained: list[str], folder: Path, outcome: Outcome) -> None:
        state = stream.state()
        lost = [event["prompt_id"] for event in read_json_lines(folder / "events.jsonl") if event["kind"] == "rejected"]
        settled = Counter([*trained, *lost, *rollouts.in_flight, *state.returned])
        if settled != Counter(f"0:{i}" for i in range(state.position)):
            outcome.problems.append(f"of {state.position} prompts drawn {len(settled)} are accounted for")

    def _read_events(self, folder: Path, outcome: Outcome) -> None:
        events = list(read_json_lines(folder / "events.jsonl")) if (folder / "events.jsonl").exists() else []
        outcome.drawn_again = sum(event["kind"] == "drawn_again" for event in events)
        outcome.lost = sum(event["kind"] == "rejected" for event in events)
        reasons = [event["reason"] for event in events if event["kind"] in ("drawn_again", "rejected")]
        outcome.said = outcome.ended or outcome.said or next(iter(reasons), "")

    def _judge(self, case: Case, outcome: Outcome) -> None:
        refused, trains = case.promise == "refused", not case.evaluates
        checks = {
            f"it ended: {outcome.ended}": refused or not outcome.ended,
            "it did not end": not refused or bool(outcome.ended),
            "it ended in no sentence": "unexpected" not in outcome.ended,
            f"{outcome.steps} of {STEPS} steps were done": refused or not trains or outcome.steps == STEPS,
            f"{outcome.lost} prompts were lost for good": case.promise in ("lost", "refused") or outcome.lost == 0,
            "no prompt was recorded as lost": case.promise != "lost" or outcome.lost > 0,
            "nothing was left out": case.promise != "alone" or outcome.left_out > 0,
            "nothing was drawn again": case.promise != "again" or outcome.drawn_again > 0,
            f"{case.said!r} was not said": case.said in outcome.said,
            f"{outcome.left_out} samples were left out": case.promise != "taken" or outcome.left_out == 0,
        }
        outcome.problems += [problem for problem, fine in checks.items() if not fine]


def _settings(case: Case | None) -> dict[str, str]:
    settings = SETTINGS | {"rollout.reward": f"{CODE}:reward_fair"} | dict(case.settings if case else {})
    return {name.replace(".", "__"): value for name, value in settings.items()}


async def play_all(
    root: Path, cases: list[Case], on_played: Callable[[Case, Outcome], None] = lambda _case, _outcome: None,
) -> list[tuple[Case, Outcome]]:
    """Start what all cases share, and play them."""
    config = small_config(root, build_small_model(root / "model", seed=1), **_settings(None))
    played = []
    with RunRecord(root / "ring", trace=False, console=Console("quiet")) as record:
        async with open_run(config, read_rank_info(config.run, config.train), read_inputs(config), record) as parts:
            ring = Ring(root, parts)
            await ring.open()
            for case in cases:
                played.append((case, outcome := await ring.play(case)))
                print(f"{case.part}: {case.what}: {'; '.join(outcome.problems) or 'ok'}", flush=True)
                on_played(case, outcome)
    return played


def record_result(case: Case, outcome: Outcome) -> None:
    """Append to the results."""
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("ab") as file:
        file.write(msgspec.json.encode((case.part, case.what, outcome)) + b"\n")


def read_results() -> dict[tuple[str, str], Outcome]:
    """The newest outcome of each case, by part and description."""
    lines = RESULTS.read_bytes().splitlines() if RESULTS.exists() else []
    return {(part, what): outcome for part, what, outcome in (msgspec.json.decode(line, type=tuple[str, str, Outcome]) for line in lines)}


_HEAD = f"""\
What a run does with rewards, workflows and filters that go wrong. `python tests/faults/user_code.py` measures it and writes
this section, in about five minutes. Each row is {STEPS} training steps of four groups of four samples on a tiny model, with
reward processes, an engine, a train rank and the executor as in any run. *Left out* counts samples that alone were not
trained on, of those in the groups that were; *drawn again* counts groups that came again because fewer than two of their
samples could be trained on; *lost for good* counts prompts on which no step trains.

A row passes when all steps are done with finite metrics, every prompt drawn is trained on, in flight or recorded with its reason, and no
token is older than the bound; or, where code is wrong every time, when the run ends in one sentence."""


def render(played: list[tuple[Case, Outcome]]) -> str:
    """The section's text."""
    failed = [(case, outcome) for case, outcome in played if outcome.problems]
    lines = [_HEAD, "", f"{len(played) - len(failed)} of {len(all_cases())} rows pass."]
    for part in dict.fromkeys(case.part for case, _ in played):
        lines += ["", f"### {part}", "", "| it | left out | drawn again | lost for good | what is said, first |", "|---|---|---|---|---|"]
        lines += [_row(case, outcome) for case, outcome in played if case.part == part]
    if failed:
        lines += ["", "Rows that do not pass:", "", *(f"- {case.part}: {case.what}: {'; '.join(o.problems)}" for case, o in failed)]
    return "\n".join(lines)


def _row(case: Case, outcome: Outcome) -> str:
    said = outcome.said.replace(str(CODE), "mine.py").replace("|", "\\|").replace("\n", " ")
    said = said if len(said) <= _MAX_SAID else f"{said[:_MAX_SAID]}…"
    counts = [f"{outcome.left_out} of {outcome.samples}", outcome.drawn_again, outcome.lost]
    if case.evaluates:
        counts = [f"{outcome.failed_prompts} of 20 prompts count as wrong", "", ""]
    elif case.promise == "refused":
        counts = ["the run ends", "", ""]
    return "| " + " | ".join(map(str, [case.what, *counts, f"`{said}`" if said else ""])) + " |"


def main() -> int:
    """Play the cases that have not passed yet, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="cases whose description has one of these")
    parser.add_argument("--again", action="store_true", help="play cases that passed before once more")
    args = parser.parse_args()
    done = {} if args.again else {key for key, outcome in read_results().items() if not outcome.problems}
    cases = [
        case for case in all_cases()
        if (case.part, case.what) not in done and any(text in f"{case.part}: {case.what}" for text in args.only)]
    if cases:
        with tempfile.TemporaryDirectory(prefix="offbeat-user-code-") as folder:
            asyncio.run(play_all(Path(folder), cases, record_result))
    results = read_results()
    played = [(case, results[case.part, case.what]) for case in all_cases() if (case.part, case.what) in results]
    write_section(HEADING.lower(), f"## {HEADING}\n\n{render(played).strip()}\n")
    return 1 if len(played) < len(all_cases()) or any(outcome.problems for _, outcome in played) else 0


if __name__ == "__main__":
    sys.exit(main())
