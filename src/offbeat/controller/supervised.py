"""Supervised fine-tuning on the same ranks, with the same evaluation: `offbeat sft`, and the quick start's warm-up."""

import time
from dataclasses import dataclass

from offbeat.aio import run_beside
from offbeat.cluster.messages import Objective
from offbeat.cluster.session import Session
from offbeat.controller.checkpoints import Checkpoints
from offbeat.controller.evaluate import Evaluation, Evaluator
from offbeat.controller.state import RunState
from offbeat.data.dataset import PromptStream

_RECORDED = ("train/loss", "train/grad_norm", "step/total_s")


@dataclass(frozen=True)
class SftResult:
    """What supervised fine-tuning came to.

    Attributes:
        steps: optimizer steps done.
        accuracy: held-out accuracy at the end; None without held-out prompts.
        stopped_early: the user asked to stop.
    """

    steps: int
    accuracy: float | None
    stopped_early: bool


async def fine_tune(session: Session, state: RunState, *, standalone: bool) -> SftResult:
    """Imitate the dataset's answers until `sft.total_steps`, or until held-out accuracy reaches `sft.stop_at_accuracy`.

    Evaluations publish the weights first, so `state.version` rises with each. A `standalone` run keeps its metrics and exports the model;
    a warm-up leaves both to the reinforcement learning that follows.
    """
    return await run_beside(_fine_tune(session, state, standalone=standalone), session.watch())


async def _fine_tune(session: Session, state: RunState, *, standalone: bool) -> SftResult:
    config, sft, material = session.config, session.config.sft, session.material
    stream = PromptStream(material.train, seed=config.run.seed + 1, shuffle=config.data.shuffle)
    rollouts = session.stage.rollouts(stream, version=state.version, last_version=state.version)
    evaluator = Evaluator(rollouts, material.heldout, config.timed_evaluate, session.peers)
    await session.trainers.set_objective(Objective("sft", sft.total_steps))
    session.record.console.start(f"{config.run.name} · supervised", sft.total_steps)
    accuracy, step, reached = None, 0, False
    await state.agree(session.peers)
    while step < sft.total_steps and not state.stopping:
        step += 1
        start = time.monotonic()
        with session.record.tracer.span("train", "controller", step=step):
            stats = await session.trainers.train_step(session.stage.sft_batch(stream, sft.batch_size))
        await state.agree(session.peers)
        last = step == sft.total_steps or state.stopping
        if last or (sft.evaluate_every_steps and step % sft.evaluate_every_steps == 0):
            evaluation = await _evaluate(session, state, evaluator)
            if evaluation is not None:
                accuracy = evaluation.accuracy
                stats |= evaluation.metrics()
                session.record.console.note(f"held-out accuracy {accuracy:.3f} after {step} supervised steps")
        stats["step/total_s"] = time.monotonic() - start
        session.record.console.update(step, stats)
        if standalone:
            session.record.stats.commit(stream.state().epoch, step, step, stats)
        session.record.events.record("sft_step", step=step, **{name: stats[name] for name in _RECORDED})
        await session.peers.meet("commit_stats")
        if reached := accuracy is not None and accuracy >= sft.stop_at_accuracy:
            break
    if standalone:
        await Checkpoints(session).export()
    return SftResult(step, accuracy, stopped_early=state.stopping and not reached and step < sft.total_steps)


async def _evaluate(session: Session, state: RunState, evaluator: Evaluator) -> Evaluation | None:
    if not evaluator.due(0, last=True):
        return None
    state.version += 1
    with session.record.tracer.span("publish", "controller", version=state.version):
        await session.publisher.publish(state.version, on_served=lambda _report: None)
        await session.publisher.settle()
    with session.record.tracer.span("evaluate", "controller"):
        return await evaluator.run()
