"""Metrics of the user's own for evaluation sets, in a process of their own: `metric(samples)` returns a number, or several by name.

Like a reward, the function cannot block, crash or leak into the process that evaluates, and does not see its secrets. Each call has a
process of its own, so that a call that hangs leaves nothing behind.
"""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from offbeat.config.evaluate import EvaluateConfig
from offbeat.config.rollout import RolloutConfig
from offbeat.data import wire
from offbeat.errors import CodeError, DeadlineError, WorkerError
from offbeat.evaluation.samples import EvaluatedSet
from offbeat.rollout.metric_worker import MetricLoadRequest, MetricRequest, MetricValues
from offbeat.user_code.pool import CodePool, CodeRole


class Metric:
    """One metric of the user's own."""

    def __init__(self, dotted: str, *, timeout_s: float, log_dir: Path | None, memory_bytes: int = 0, allowed: Iterable[str] = ()) -> None:
        """Prepare it; nothing is started.

        Args:
            dotted: "module:function", or the name of a function that this process has been given as an object.
            timeout_s: limit for one call, for the start of its process, and for loading it, each.
            log_dir: folder of metric.log, the file for its output.
            memory_bytes: memory limit of its process; 0 for none.
            allowed: environment variables that it sees although they look like secrets.
        """
        self.dotted = dotted
        self._timeout_s = timeout_s
        self._log_dir = log_dir
        self._role = CodeRole(
            "the metric", "offbeat.rollout.metric_worker:MetricWorker", log="metric.log", load=wire.encode(MetricLoadRequest(dotted)),
            functions=(dotted,), memory_bytes=memory_bytes, allowed=frozenset(allowed), start_timeout_s=timeout_s)

    @classmethod
    def of(cls, evaluate: EvaluateConfig, rollout: RolloutConfig, *, log_dir: Path) -> "Metric | None":
        """Return the metric that [evaluate] names, with the limits of [rollout] for user code; None without one."""
        if not evaluate.metric:
            return None
        return cls(
            evaluate.metric, timeout_s=evaluate.metric_timeout_s, log_dir=log_dir, memory_bytes=rollout.reward_memory_bytes,
            allowed=rollout.reward_env)

    async def check(self) -> None:
        """Load the function in its process, to find a mistake in its name or module, a CodeError, before anything is evaluated."""
        async with self._opened():
            pass

    async def measure(self, played: EvaluatedSet) -> dict[str, float]:
        """Return the metric's values for the answers to a set, by name; a number alone has the name of the function.

        Raises:
            CodeError: it raised, was late, ended its process, or its value is no metric.
        """
        request = wire.encode(MetricRequest(played.samples))
        async with self._opened() as pool:
            process = await pool.process(0)
            async with pool.ending_on_error(process):
                return wire.decode(MetricValues, await process.child.call("measure", request, timeout_s=self._timeout_s)).values

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[CodePool]:
        """Start its process, and end it after the body; a failure of either is told as the metric's."""
        try:
            async with CodePool(self._role, num_processes=1, log_dir=self._log_dir) as pool:
                yield pool
        except DeadlineError as exc:
            raise CodeError(
                f"the metric {self.dotted} did not answer within evaluate.metric_timeout_s = {self._timeout_s:g} s; make it faster or"
                " raise the limit") from exc
        except WorkerError as exc:
            raise CodeError(f"the metric {self.dotted} ended its process: {exc}") from exc


async def check_metrics(settings: Iterable[tuple[EvaluateConfig, RolloutConfig]], *, log_dir: Path) -> None:
    """Check each metric that these settings name, once; see `Metric.of` and `Metric.check`."""
    metrics = {evaluate.metric: Metric.of(evaluate, rollout, log_dir=log_dir) for evaluate, rollout in settings}
    for metric in metrics.values():
        if metric is not None:
            await metric.check()
