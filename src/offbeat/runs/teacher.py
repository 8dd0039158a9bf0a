"""Chooses the teacher of a run, and connects to it if it is an engine. Torch-free."""

import os
from collections.abc import Callable
from contextlib import AsyncExitStack

from offbeat.config.data import DataConfig
from offbeat.config.for_processes import RankConfig
from offbeat.config.teacher import TeacherConfig
from offbeat.controller.inputs import RunInputs
from offbeat.controller.teaching import Contexts, EngineTeacher, RankTeacher, SelfTeacher, Teacher
from offbeat.data.prompt import render
from offbeat.fleet.kinds import MAKERS
from offbeat.inference.client import EngineClient, EngineSession
from offbeat.ranks.ranks import Ranks
from offbeat.ranks.trainers import OnSpan, Trainers

_KEY_VARIABLE = "OFFBEAT_TEACHER_API_KEY"

MakeTeacher = Callable[[Ranks, OnSpan], Teacher | None]


async def open_teacher(stack: AsyncExitStack, config: RankConfig, inputs: RunInputs, *, data: DataConfig) -> MakeTeacher:
    """Return a function that makes the run's teacher once there are ranks. An engine is tried at once, before anything is started.

    Raises:
        ConfigError: the engine at `teacher.url` does not answer, or has another tokenizer.
    """
    teacher = config.teacher
    engine = await _open_engine(stack, teacher, inputs, data) if config.algorithm.teacher == "model" and teacher.url else None

    def make(ranks: Ranks, on_span: OnSpan) -> Teacher | None:
        match config.algorithm.teacher:
            case "none":
                return None
            case "model":
                return engine or RankTeacher(Trainers(ranks, config, part="teacher", on_span=on_span), top_k=teacher.top_k)
            case of:
                max_tokens = min(inputs.supervision.context, config.train.max_tokens_per_microbatch + 1)
                contexts = Contexts(inputs.tokenizer, data, teacher.template, max_tokens)
                return SelfTeacher(Trainers(ranks, config, on_span=on_span), contexts, of=of)

    return make


async def _open_engine(stack: AsyncExitStack, teacher: TeacherConfig, inputs: RunInputs, data: DataConfig) -> EngineTeacher:
    http = await stack.enter_async_context(EngineSession())
    client = EngineClient(
        "the teacher", teacher.url, http.session, dialect=MAKERS[teacher.engine].reader(), api_key=os.environ.get(_KEY_VARIABLE, ""))
    engine = EngineTeacher(client, teacher)
    await engine.check(inputs.tokenizer, tuple(render(inputs.train.row(0), inputs.tokenizer, data)))
    return engine
