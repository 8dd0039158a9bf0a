"""Many small runs in a row with the real command, on train ranks, an engine and a reward process that are started once.

All else is each run's own: its folder, its checks, its checkpoints, its fleet, its publisher, and a reward process if it has another
reward. So a row of the tables of damaged files and of changed settings takes a second and not ten.
"""

import asyncio
import contextlib
import io
import json
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from offbeat.aio import both
from offbeat.cli.main import main
from offbeat.config.root import Config
from offbeat.controller.inputs import RunInputs, read_inputs
from offbeat.controller.parts import RunParts, SingleProcess
from offbeat.controller.reward_choice import choose_rewards
from offbeat.fleet.engine_group import EngineGroup
from offbeat.fleet.fleet import UNPUBLISHED, open_fleet
from offbeat.ranks.ranks import WorkerRanks
from offbeat.ranks.trainers import Trainers
from offbeat.runs.assemble import open_policy
from offbeat.runs.rank_info import RankInfo
from offbeat.runs.rollouts import EngineRollouts
from offbeat.runs.run import RunResult, SupervisedResult, run_training
from offbeat.runs.run_code import open_user_code
from offbeat.telemetry.console import Console
from offbeat.telemetry.record import RunRecord
from offbeat.types import Version
from offbeat.weights.protocol import Manifest
from offbeat.workers.worker import make_launcher
from small_run import SmallRun, small_config

T = TypeVar("T")


@dataclass(frozen=True)
class Done:
    """What a command came to.

    Attributes:
        code: its exit code.
        error: what it wrote to stderr.
        said: the lines of its console, besides steps and results.
        first_weights: fingerprint of what it published first, which a resumed run has from its checkpoint; "" if it never came so far.
    """

    code: int
    error: str
    said: tuple[str, ...]
    first_weights: str


class Workshop:
    """The processes, and the commands that use them."""

    has_trained = True  # in another of its runs

    def __init__(self, root: Path, model: str, *, num_ranks: int = 1) -> None:
        self._loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()
        self._published: list[str] = []
        self._loop.run_until_complete(self._open(small_config(root, model, run__name="workshop", train__num_ranks=str(num_ranks))))

    async def _open(self, config: Config) -> None:
        inputs = read_inputs(config)
        record = self._stack.enter_context(RunRecord(config.run_dir, trace=False, console=Console("quiet")))
        launcher = self._launcher = await self._stack.enter_async_context(make_launcher(config.for_launcher))
        ranks, (engines, self._user_code) = await both(
            WorkerRanks.start(launcher, config.for_ranks, model=inputs.model, build=None, log_dir=record.log_dir),
            both(
                EngineGroup.start(launcher, config.for_engines, log_dir=record.log_dir),
                open_user_code(self._stack, inputs, config, record, launcher=launcher)))
        self._code = _code(config)
        self._trainers = Trainers(ranks, config.for_ranks)
        self._engines = engines
        self._addresses = await engines.serve(model=inputs.model, tokenizer=inputs.tokenizer_folder, version=UNPUBLISHED)

    def close(self) -> None:
        """End all processes."""
        self._loop.run_until_complete(self._stack.aclose())
        self._loop.close()

    def train(self, run: SmallRun, command: str = "train", **changes: str) -> Done:
        """`offbeat train` of a run."""
        return self.command(command, *run.arguments(**changes), "--json")

    def command(self, *arguments: str) -> Done:
        """Any command, in this process."""
        out, err = io.StringIO(), io.StringIO()
        with self._lending(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
        lines = [_line(line) for line in out.getvalue().splitlines()]
        said = tuple(line["text"] for line in lines if line.get("event") == "note")
        return Done(code, err.getvalue(), said, self._published[0] if self._published else "")

    def run(self, config: Config, console: Console | None = None) -> RunResult | SupervisedResult | None:
        """What `run_training` makes of a configuration, with its errors."""
        with self._lending():
            return run_training(config, console or Console("quiet", stream=io.StringIO()))

    def _play(self, main: Coroutine[Any, Any, T], *, tell: Callable[[str], None] = print) -> T:
        return self._loop.run_until_complete(main)

    @contextmanager
    def _lending(self) -> Iterator[None]:
        """Runs that begin in this process use the processes of the workshop."""
        self._published.clear()
        with patch("offbeat.runs.run.open_run", self._open_session), patch("offbeat.ending.run", self._play):
            try:
                yield
            finally:  # as the end of a loop of its own would
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                    self._loop.remove_signal_handler(number)

    async def write_weights(self, *args: Any, **kwargs: Any) -> Manifest:
        """See `VersionWriter.write_weights`."""
        manifest = await self._trainers.write_weights(*args, **kwargs)
        self._published.append(manifest.fingerprint)
        return manifest

    def holds(self, _version: Version) -> bool:
        """See `VersionWriter.holds`."""
        return False

    @asynccontextmanager
    async def _open_session(self, config: Config, _place: RankInfo, inputs: RunInputs, record: RunRecord) -> AsyncIterator[RunParts]:
        async with AsyncExitStack() as stack:
            fleet = await open_fleet(stack, self._engines, self._addresses, config.for_engines, record, model=inputs.model)
            policy = await open_policy(stack, fleet, inputs, config, writer=self)
            own = _code(config) != self._code
            user_code = await open_user_code(stack, inputs, config, record, launcher=self._launcher) if own else self._user_code
            source = EngineRollouts(config, record, inputs, policy.generate, user_code)
            yield RunParts(config, record, inputs, self._trainers, policy.publisher, source, SingleProcess(), policy.watch)


def _code(config: Config) -> tuple[Any, ...]:
    """What processes of user code are started for."""
    return choose_rewards(config), bool(config.rollout.rewards), config.rollout.workflow, config.agent, config.evaluate.sets


@contextmanager
def workshop(root: Path, model: str, *, num_ranks: int = 1) -> Iterator[Workshop]:
    """A workshop that is closed in the end."""
    shop = Workshop(root, model, num_ranks=num_ranks)
    try:
        yield shop
    finally:
        shop.close()


def _line(text: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return line if isinstance(line, dict) else {}
