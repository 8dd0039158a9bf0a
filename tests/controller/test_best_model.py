"""The best model of a run, as evaluations come in."""

import asyncio
from types import SimpleNamespace

import pytest

from offbeat.config.evaluate import EvaluateConfig
from offbeat.controller.best_model import BestModel
from offbeat.controller.state import RunState
from offbeat.errors import ConfigError
from offbeat.evaluation.scores import Evaluation


class Exports:
    def __init__(self) -> None:
        self.written: list[str] = []

    async def export_best(self) -> None:
        self.written.append("best")


def best_of(state: RunState, exports: Exports, said: list[str], **settings: object) -> BestModel:
    record = SimpleNamespace(note=lambda kind, text: said.append(f"{kind}: {text}"))
    config = EvaluateConfig.model_validate({"keep_best": "eval/accuracy", **settings})
    return BestModel(state, config, exports, record)  # pyright: ignore[reportArgumentType]


def measured(accuracy: float, **fields: object) -> Evaluation:
    return Evaluation(accuracy, accuracy, 8, 0, **fields)  # pyright: ignore[reportArgumentType]


def test_the_model_of_the_largest_value_is_exported_and_the_initial_one_never() -> None:
    state, exports = RunState(total_steps=9), Exports()
    best = best_of(state, exports, [])
    for step, accuracy in enumerate((0.5, 0.25, 0.75, 0.75)):
        best.compare(measured(accuracy), step)
        asyncio.run(best.export_if_best(step))
    assert [best.is_of(step) for step in range(4)] == [False, False, True, False]
    assert exports.written == ["best"]


def test_a_run_without_gain_ends_after_the_step_and_says_so() -> None:
    state, said = RunState(total_steps=9), []
    best = best_of(state, Exports(), said, stop_after_no_gain=2)
    for step, accuracy in enumerate((0.25, 0.5, 0.5, 0.25)):
        best.compare(measured(accuracy), step)
        best.end_without_gain(step)
    assert state.total_steps == 3
    assert said == ["no_gain: eval/accuracy has not risen above 0.500, of step 1, in 2 evaluations, so step 3 is the last"]


def test_a_metric_that_a_sets_own_metric_does_not_return_is_refused() -> None:
    best = best_of(RunState(total_steps=9), Exports(), [], keep_best="eval/own/f2")
    best.compare(measured(0.5), 1)
    with pytest.raises(ConfigError, match=r"evaluate.keep_best names eval/own/f2, which is not measured; there is eval/own/accuracy, .*f1"):
        best.compare(measured(0.5, name="own", own={"f1": 0.25}), 1)


def test_nothing_is_best_where_nothing_is_asked_for() -> None:
    exports = Exports()
    best = best_of(RunState(total_steps=9), exports, [], keep_best="")
    best.compare(measured(0.5), 1)
    asyncio.run(best.export_if_best(1))
    assert not best.is_of(1) and exports.written == []
