"""Opens the workflow that `rollout.workflow` names, with the processes and the proxy that it needs. Called by `runs.run_code`."""

from contextlib import AsyncExitStack
from pathlib import Path

from offbeat.agents.agent import AgentWorkflow, Player, ProgramPlayer
from offbeat.agents.bridge import BridgePlayer
from offbeat.agents.command import CommandPlayer
from offbeat.agents.played import PlayedWorkflow
from offbeat.agents.pool import PlayPool
from offbeat.agents.proxy import Proxy, ProxyAddress
from offbeat.agents.recorder import EpisodeLimits, Recorder
from offbeat.agents.worker import PlayLoadRequest
from offbeat.chat.parsing import AnswerParser
from offbeat.chat.rendering import Renderer
from offbeat.config.agent import PLAYS
from offbeat.config.root import Config
from offbeat.data.tokenizer import Tokenizer
from offbeat.hosts import is_loopback
from offbeat.rollout.episode import Episode, Workflow
from offbeat.types import Notes
from offbeat.user_code.functions import resolve

SHORT_NAMES = {"single_turn": "offbeat.rollout.workflows.single_turn:single_turn"}


async def open_workflow(stack: AsyncExitStack, config: Config, *, tokenizer: Tokenizer, log_dir: Path | None, notes: Notes) -> Workflow:
    """Return the workflow; its processes and its proxy end with `stack`.

    `notes` takes a note when a process of user code had to be replaced, or when the proxy is exposed.

    Raises:
        CodeError: there is no such workflow, or its agent, environment or tools cannot be found or loaded.
        MissingExtraError: a library is not installed.
        ModelError: the tokenizer has no chat template, or writes no tools in the given format.
    """
    name, agent = config.rollout.workflow, config.agent
    if name not in PLAYS:
        return resolve(SHORT_NAMES.get(name, name), kind="workflow")
    renderer = Renderer(tokenizer, tool_format=agent.tool_format)
    parser = AnswerParser(renderer)
    # A row is run up to its last generated token.
    max_tokens = config.train.max_tokens_per_microbatch + 1
    if name == "agent":
        player = await _open_player(stack, config, log_dir=log_dir, notes=notes)
        proxy = await stack.enter_async_context(Proxy(
            renderer, parser, model=agent.model, address=ProxyAddress(agent.host, told_host=agent.told_host)))
        if not is_loopback(agent.host):
            notes.note("user_code", f"{proxy.exposed}; see `offbeat docs security`")
        return AgentWorkflow(proxy, player, agent, max_tokens)

    def make_recorder(episode: Episode) -> Recorder:
        limits = EpisodeLimits(agent.max_turns, min(episode.context, max_tokens))
        return Recorder(renderer, parser, sampling=episode.sampling, limits=limits, keep_reasoning=agent.keep_reasoning)

    request = PlayLoadRequest(
        stage=agent.tools or (agent.environment,), tools=bool(agent.tools), options=agent.options, step_timeout_s=agent.step_timeout_s)
    pool = await stack.enter_async_context(PlayPool(request, agent, log_dir=log_dir, notes=notes))
    return PlayedWorkflow(pool, agent, make_recorder, config.data.system_prompt)


async def _open_player(stack: AsyncExitStack, config: Config, *, log_dir: Path | None, notes: Notes) -> Player:
    agent = config.agent
    if agent.command:
        return await stack.enter_async_context(CommandPlayer(
            agent.command, num_episodes=agent.processes * agent.episodes_per_process, log_dir=log_dir, memory_bytes=agent.memory_bytes,
            allowed=agent.env, host=agent.reached_at))
    if agent.environment:
        return await stack.enter_async_context(BridgePlayer(agent, log_dir=log_dir))
    request = PlayLoadRequest(program=agent.program)
    return ProgramPlayer(await stack.enter_async_context(PlayPool(request, agent, log_dir=log_dir, notes=notes)))


async def load_program(config: Config) -> None:
    """Load `agent.program` in a process of its own, as a run does, and end it.

    Raises:
        CodeError: it cannot be found, imported, or called with a task.
        WorkerError, DeadlineError: the process does not start.
    """
    one = config.agent.model_copy(update={"processes": 1})
    async with PlayPool(PlayLoadRequest(program=one.program), one, log_dir=None):
        pass
