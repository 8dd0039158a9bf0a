"""The loop of the workflows "tool_loop" and "gym": the model answers, the environment answers it, until one of them has done.

It runs in the process that calls the engines, so prompts and answers stay the token ids that they were (`Recorder`). The environment runs
in a process of its own (`PlayPool`). Each player of an episode has a conversation of its own.
"""

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from offbeat.agents.environment import View
from offbeat.agents.group import play_group, seed_of
from offbeat.agents.pool import PlayPool, Seat
from offbeat.agents.recorder import Recorder
from offbeat.agents.worker import CloseRequest, OpenRequest, StepRequest
from offbeat.chat.image_parts import without_images
from offbeat.chat.messages import ChatRequest, Message, Reply
from offbeat.config.agent import AgentConfig
from offbeat.data.image_sources import MARK
from offbeat.data.reward import NamedReward
from offbeat.data.tokenizer import Tokenizer
from offbeat.data.trajectory import Trajectory
from offbeat.errors import CodeError, DataError, RefusedError
from offbeat.rollout.clock import AgentClock, requests_off
from offbeat.rollout.episode import Episode

_GRACE_S = 10.0
"""Seconds beyond `step_timeout_s`, in which the process itself can report that a tool was too slow."""

MakeRecorder = Callable[[Episode], Recorder]


@dataclass
class _Player:
    """A player's conversation, and the rewards of its turns by the order of its calls, such as {0: 0.0, 1: 1.0}."""

    recorder: Recorder
    messages: list[Message]
    rewards: dict[int, float] = field(default_factory=dict)
    states: dict[int, str] = field(default_factory=dict)
    orders: dict[int, int] = field(default_factory=dict)
    last: int = 0
    text: str = ""


@dataclass(frozen=True)
class PlayedWorkflow:
    """Plays environments; a workflow.

    Attributes:
        make_recorder: returns a recorder for one player of an episode.
        system_prompt: put before the first message of each player; empty for none.
    """

    pool: PlayPool
    config: AgentConfig
    make_recorder: MakeRecorder
    system_prompt: str = ""

    async def __call__(self, episode: Episode) -> list[Trajectory]:
        return await play_group(episode, self)

    async def play_episode(self, episode: Episode, index: int) -> list[Trajectory]:
        players: dict[str, _Player] = {}
        clock = AgentClock(self.config.timeout_s, episode)
        async with self.pool.seat(episode.off_the_clock) as seat, clock:
            end = await self._converse(requests_off(clock, episode), seat, players, session=f"{id(episode)}-{index}")
        trajectories: list[Trajectory] = []
        for name, player in players.items():
            outcome = end.outcome.get(name)
            reward = NamedReward(end.named) if end.named else outcome
            if reward is None:
                [reward] = await episode.score([player.text], episode.row)
            chains = player.recorder.chains(reward, episode=index, agent=name)
            trajectories += [_with_turns(chain, player) for chain in chains]
        return trajectories

    async def _converse(self, episode: Episode, seat: Seat, players: dict[str, _Player], *, session: str) -> View:
        """Play to the end, and return the environment's last view."""
        timeout_s = self.config.step_timeout_s + _GRACE_S
        request = OpenRequest(seat.number, episode.row, seed_of(episode.row))
        view = await seat.call("open", request, View, timeout_s=timeout_s)
        for order in range(self.config.max_turns):
            player = players.get(view.player)
            if player is None:
                has_system = any(message.role == "system" for message in view.messages)
                first = [Message("system", self.system_prompt)] if self.system_prompt and not has_system else []
                player = players[view.player] = _Player(self.make_recorder(episode), first)
            if not view.messages:
                raise CodeError("an environment that has not ended must return a message for the next player; it returned none")
            player.messages += [await readable(self._shortened(message), episode.tokenizer) for message in view.messages]
            reply = await self._sample_reply(episode, player, order, view.state, session=f"{session}-{view.player}")
            if reply is None:
                break
            step = StepRequest(seat.number, reply.message)
            view = await seat.call("step", step, View, timeout_s=timeout_s)
            player.rewards[player.last] = view.reward
            if view.done:
                return view
        return await seat.call("end", CloseRequest(seat.number), View, timeout_s=timeout_s)

    async def _sample_reply(self, episode: Episode, player: _Player, order: int, state: str, *, session: str) -> Reply | None:
        """Let the model answer; None if there is no room for another answer."""
        recorder = player.recorder
        try:
            turn = recorder.open(ChatRequest(tuple(player.messages), self.pool.tools))
        except RefusedError:
            if not player.orders:
                raise  # not even the first prompt fits
            return None
        [sample] = await episode.generate(turn.prompt, turn.sampling, n=1, session=session)
        reply = recorder.commit(turn, sample)
        recorder.mark_read(turn)
        player.messages.append(reply.message)
        player.last, player.text = turn.order, reply.message.content
        player.orders[turn.order] = order
        if state:
            player.states[turn.order] = hashlib.blake2b(state.encode(errors="replace"), digest_size=8).hexdigest()
        return reply

    def _shortened(self, message: Message) -> Message:
        """Leave out the middle of a message longer than `max_result_chars`."""
        most, text = self.config.max_result_chars, message.content
        if message.role == "system" or len(text) <= most:
            return message
        half = most // 2
        images = MARK * text[half : len(text) - half].count(MARK) if message.images else ""
        left_out = f"\n[{len(text) - 2 * half} characters left out]\n{images}"
        return replace(message, content=f"{text[:half]}{left_out}{text[len(text) - half:]}")


async def readable(message: Message, tokenizer: Tokenizer) -> Message:
    """Return a message of an environment with images that the model can read.

    A model that reads none gets "[image]" in their places, and the model is told of an image in a tool's result that cannot be used; for
    one in another message this raises DataError.
    """
    if not message.images or tokenizer.images is None:
        return without_images(message)
    try:
        await asyncio.to_thread(tokenizer.images.read_all, message.images, where="the result")
    except DataError as exc:
        if message.role != "tool":
            raise
        return replace(message, content=f"Error: {exc}", images=())
    return message


def _with_turns(chain: Trajectory, player: _Player) -> Trajectory:
    """Add the reward of each turn, and put the calls of all players into one order."""
    return replace(chain, turns=tuple(
        replace(
            turn, reward=player.rewards.get(turn.order, 0.0), order=player.orders.get(turn.order, turn.order),
            state=player.states.get(turn.order) or turn.state)
        for turn in chain.turns))
