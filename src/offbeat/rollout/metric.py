"""Metrics of the user's own for evaluation sets, in a process of their own: `metric(samples)` returns a number, or several by name.

Like a reward, the function cannot block, crash or leak into the process that evaluates, and does not see its secrets. Each call has a
process of its own, so that a call that hangs leaves nothing behind.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from offbeat.config.root import Config
from offbeat.data import wire
from offbeat.data.given import pack
from offbeat.errors import CodeError, DeadlineError, WorkerError
from offbeat.evaluation.samples import EvaluatedSet
from offbeat.process.child import Child, ChildSpec
from offbeat.rollout.metric_worker import MetricRequest, MetricValues
from offbeat.rollout.reward_pool import secret_variables

_STOP_TIMEOUT_S = 1.0


class Metric:
    """One metric of the user's own."""

    def __init__(
        self, dotted: str, *, timeout_s: float, log: Path | None, memory_bytes: int = 0, allowed: Iterable[str] = (),
    ) -> None:
        """Prepare it; nothing is started.

        Args:
            dotted: "module:function", or the name of a function that this process has been given as an object.
            timeout_s: limit for one call, with the start of its process.
            log: file for its output.
            memory_bytes: memory limit of its process; 0 for none.
            allowed: environment variables that it sees although they look like secrets.
        """
        self.dotted = dotted
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._given = pack([dotted])
        hidden = secret_variables(os.environ, allowed=frozenset(allowed))
        env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        self._spec = ChildSpec("the metric", "offbeat.rollout.metric_worker:MetricWorker", env, log, without=hidden)

    @classmethod
    def of(cls, config: Config, *, log_dir: Path) -> "Metric | None":
        """Return the metric that [evaluate] names; None without one."""
        evaluate, rollout = config.evaluate, config.rollout
        if not evaluate.metric:
            return None
        return cls(
            evaluate.metric, timeout_s=evaluate.metric_timeout_s, log=log_dir / "metric.log", memory_bytes=rollout.reward_memory_bytes,
            allowed=rollout.reward_env)

    async def check(self) -> None:
        """Load the function in its process, so that a mistake in its name or its module is found before anything is evaluated.

        Raises:
            CodeError: it cannot be loaded.
        """
        await self._call("load", MetricRequest(self.dotted, self._memory_bytes, self._given))

    async def measure(self, played: EvaluatedSet) -> dict[str, float]:
        """Return the metric's values for the answers to a set, by name; a number alone has the name of the function.

        Raises:
            CodeError: it raised, was late, ended its process, or its value is no metric.
        """
        request = MetricRequest(self.dotted, self._memory_bytes, self._given, played.samples)
        return wire.decode(MetricValues, await self._call("measure", request)).values

    async def _call(self, method: str, request: MetricRequest) -> bytes:
        try:
            child = await Child.start(self._spec, timeout_s=self._timeout_s)
            try:
                answer = await child.call(method, wire.encode(request), timeout_s=self._timeout_s)
            except BaseException:
                await child.kill()
                raise
            await child.stop(timeout_s=_STOP_TIMEOUT_S)
            return answer
        except DeadlineError as exc:
            raise CodeError(
                f"the metric {self.dotted} did not answer within evaluate.metric_timeout_s = {self._timeout_s:g} s; make it faster or"
                " raise the limit") from exc
        except WorkerError as exc:
            raise CodeError(f"the metric {self.dotted} ended its process: {exc}") from exc


async def check_metrics(configs: Iterable[Config], *, log_dir: Path) -> None:
    """Check each metric that these configurations name, once; see `Metric.check`."""
    metrics = {config.evaluate.metric: Metric.of(config, log_dir=log_dir) for config in configs}
    for metric in metrics.values():
        if metric is not None:
            await metric.check()
