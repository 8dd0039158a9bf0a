"""The best model of a run, by the metric that `evaluate.keep_best` names: which step had it, its export, and the end of a run without gain.

Called by the loop and by `evaluate.RunEvaluations`. In SPMD mode every rank calls it.
"""

from offbeat.config.evaluate import EvaluateConfig
from offbeat.controller.checkpoints import RunCheckpoints
from offbeat.controller.state import RunState
from offbeat.errors import ConfigError
from offbeat.evaluation.scores import Evaluation
from offbeat.telemetry.record import RunRecord


class BestModel:
    """The evaluation with the largest value so far; the highlights of `state` hold it."""

    def __init__(self, state: RunState, config: EvaluateConfig, checkpoints: RunCheckpoints, record: RunRecord) -> None:
        self._state = state
        self._config = config
        self._checkpoints = checkpoints
        self._record = record

    def compare(self, evaluation: Evaluation, global_step: int) -> None:
        """Compare an evaluation after a step with the best one; raises as `check_known`."""
        check_known(evaluation, self._config.keep_best)
        if (value := evaluation.metrics().get(self._config.keep_best)) is not None:
            self._state.highlights = self._state.highlights.measured(self._config.keep_best, value, global_step=global_step)

    def is_of(self, global_step: int) -> bool:
        """Whether the model after this step is the best one so far; the initial model, which is not exported, is never."""
        best = self._state.highlights.best
        return best is not None and best.metric == self._config.keep_best and best.global_step == global_step > 0

    async def export_if_best(self, global_step: int) -> None:
        """Write the model after this step, if it is the best one."""
        if self.is_of(global_step):
            await self._checkpoints.export_best()

    def end_without_gain(self, global_step: int) -> None:
        """Let this step be the last, if `evaluate.stop_after_no_gain` evaluations have not had a larger value."""
        best = self._state.highlights.best
        if best is not None and best.is_final(self._config):
            self._record.note("no_gain", f"{best.metric} has not risen above {best.value:.3f}, of step {best.global_step}, in"
                              f" {best.num_since} evaluations, so step {global_step} is the last")
            self._state.total_steps = global_step


def check_known(evaluation: Evaluation, metric: str) -> None:
    """Raise ConfigError, with the set's metrics, if `evaluate.keep_best` names a value that this set's own metric does not return."""
    if evaluation.own and metric.rpartition("/")[0] == evaluation.folder and metric not in evaluation.metrics():
        raise ConfigError(f"evaluate.keep_best names {metric}, which is not measured; there is {', '.join(sorted(evaluation.metrics()))}")
