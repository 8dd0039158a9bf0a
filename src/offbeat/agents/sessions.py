"""Episodes that are played over HTTP: who may record where, and how calls are treated that are repeated, given up or late.

`ProxySessions` gives each episode a key that nobody can guess; whoever holds it records into that episode, and into no other. `Session`
answers the calls of one episode through `recorder`. Called by `proxy` and by workflows, on one event loop; of HTTP it knows only headers.
"""

import asyncio
import secrets
import time
import uuid
from collections import OrderedDict
from dataclasses import dataclass, field

from offbeat.agents.recorder import PendingTurn, Recorder, Rendered
from offbeat.chat.answering import answer_of
from offbeat.chat.messages import ChatAnswer, ChatRequest
from offbeat.data.trajectory import Trajectory
from offbeat.errors import RefusedError, RunError, describe
from offbeat.rollout.episode import Generate

MAX_NAMED = 1024
"""Largest number of sessions that share a key."""

_MAX_ANSWERS, _REMEMBERED_S = 64, 600.0
"""Number of answers that a session keeps for retries, and the seconds that it keeps them: SDKs give up within minutes."""

_MAX_SEALED = 4096
"""Number of keys of ended sessions that are remembered, so that late calls are told why they are refused."""


class UnknownKeyError(RunError):
    """A call has a key that no session has."""


class SealedError(RunError):
    """A call came after its episode had ended."""


@dataclass(frozen=True)
class Attempt:
    """The marks by which a call is recognised as a repetition of another.

    Attributes:
        body: digest of the request and its endpoint.
        idempotency: the client's name for the call, the same for each try; empty if it has none.
        is_retry: whether the client says that it has tried before.
    """

    body: bytes
    idempotency: str = ""
    is_retry: bool = False


@dataclass(eq=False)
class SharedCall:
    """A call that runs or has ended, and the clients that wait for it: more than one while it is tried again.

    Attributes:
        has_failed: whether it ended without an answer; it is kept for the try that follows.
        ended_s: when it ended, on the monotonic clock.
    """

    attempt: Attempt
    turn: PendingTurn
    task: "asyncio.Task[ChatAnswer]"
    num_clients: int = 0
    is_read: bool = False
    has_failed: bool = False
    ended_s: float = 0.0
    giving_up: asyncio.TimerHandle | None = None

    def repeats(self, attempt: Attempt) -> bool:
        """Whether `attempt` is another try of this call."""
        if attempt.body != self.attempt.body:
            return False
        if attempt.idempotency or self.attempt.idempotency:
            return attempt.idempotency == self.attempt.idempotency
        # If the client does not say so, a call that a client still waits for, or has read, is no repetition but an equal call.
        return attempt.is_retry or not (self.num_clients or self.is_read)


class Session:
    """One episode's calls. `id` names it in logs, and tells nothing about `key`, its clients' secret, such as "sk-" and 43 characters."""

    def __init__(self, recorder: Recorder, generate: Generate, *, key: str, linger_s: float) -> None:
        """`linger_s` is the seconds that a call runs on without a client, who may try again."""
        self.id, self.key = uuid.uuid4().hex, key
        self._recorder, self._generate, self._linger_s = recorder, generate, linger_s
        self._calls: OrderedDict[int, SharedCall] = OrderedDict()
        self._is_sealed = False
        self._receiving = asyncio.Lock()
        self._num_failed = 0
        self._last_error: BaseException | None = None

    @property
    def failures(self) -> str:
        """What failed, such as "; 3 of its requests failed, the last with DeadlineError: …", to be added to a sentence; or empty."""
        if self._last_error is None:
            return ""
        return f"; {self._num_failed} of its requests failed, the last with {describe(self._last_error)}"

    @property
    def num_turns(self) -> int:
        """Number of answers that were given or are being sampled."""
        return self._recorder.num_turns

    async def receive(self, request: ChatRequest, attempt: Attempt) -> SharedCall:
        """Do as `enter` does, but render and tokenize beside the event loop; the session's later calls wait for that."""
        async with self._receiving:
            self._check_open()
            before = self._tried_before(attempt)
            if before is not None and not before.has_failed:
                return self.enter(request, attempt)
            rendered = await asyncio.to_thread(self._recorder.render, self._recorder.find_continuation(request))
            return self.enter(request, attempt, rendered)

    def enter(self, request: ChatRequest, attempt: Attempt, rendered: Rendered | None = None) -> SharedCall:
        """Begin to answer a request, or join the call that it repeats; the caller waits for `task` and then calls `leave`.

        Args:
            rendered: the request as the recorder has rendered it; None renders it here if it begins a call.

        Raises:
            SealedError: the episode has ended.
            RefusedError, ModelError: see `Recorder.open`.
        """
        self._check_open()
        self._forget()
        call = self._tried_before(attempt)
        if call is not None and call.has_failed:
            del self._calls[id(call)]  # a failed call is tried once more
        if call is None or call.has_failed:
            turn = self._recorder.open(request) if rendered is None else self._recorder.begin_turn(rendered)
            call = SharedCall(attempt, turn, asyncio.create_task(self._answer(turn), name=f"answer in session {self.id}"))
            self._calls[id(call)] = call
            call.task.add_done_callback(lambda _task: self._ended(call))
        call.num_clients += 1
        if call.giving_up is not None:
            call.giving_up.cancel()
            call.giving_up = None
        return call

    def mark_read(self, call: SharedCall) -> None:
        """Note that a client has received the answer."""
        call.is_read = True
        self._recorder.mark_read(call.turn)

    def leave(self, call: SharedCall) -> None:
        """Note that a client waits no longer. A call without clients is given up a while later."""
        call.num_clients -= 1
        if not call.num_clients and not call.task.done():
            call.giving_up = asyncio.get_running_loop().call_later(self._linger_s, call.task.cancel)

    def seal(self) -> None:
        """End the episode: running calls are cancelled, and later ones are refused."""
        self._is_sealed = True
        for call in self._calls.values():
            call.task.cancel()

    def chains(self, reward: float, *, episode: int | None, agent: str = "") -> list[Trajectory]:
        """Seal the session and return its trajectories; see `Recorder.chains`."""
        self.seal()
        return self._recorder.chains(reward, episode=episode, agent=agent)

    def _tried_before(self, attempt: Attempt) -> SharedCall | None:
        """Return the call of which this is another try; among equal calls, the one whose client has the most reason to try again."""
        def reason(call: SharedCall) -> int:
            was_given_up = not (call.num_clients or call.is_read or call.has_failed)
            return 2 if was_given_up else 1 if call.has_failed else 0

        # Of those with the same reason the latest, which comes first here.
        return max((call for call in reversed(self._calls.values()) if call.repeats(attempt)), key=reason, default=None)

    async def _answer(self, turn: PendingTurn) -> ChatAnswer:
        request = turn.request
        try:
            samples = await self._generate(turn.prompt, turn.sampling, n=request.n, session=self.id)
            self._check_open()
            replies = tuple(self._recorder.commit(turn, sample) for sample in samples)
        except BaseException:
            self._recorder.drop(turn)
            raise
        cached = max(sample.num_cached_tokens for sample in samples)
        return answer_of(request, turn.prompt, replies, model=request.model, num_cached_tokens=cached)

    def _check_open(self) -> None:
        if self._is_sealed:
            raise SealedError("this episode has ended, so its key records nothing any more; begin another")

    def _ended(self, call: SharedCall) -> None:
        call.ended_s = time.monotonic()
        if call.giving_up is not None:
            call.giving_up.cancel()
        error = None if call.task.cancelled() else call.task.exception()
        call.has_failed = call.task.cancelled() or error is not None
        if error is not None:
            self._num_failed, self._last_error = self._num_failed + 1, error

    def _forget(self) -> None:
        """Forget old answers, oldest first, except where a client waits."""
        done = [call for call in self._calls.values() if call.task.done() and not call.num_clients]
        oldest_s = time.monotonic() - _REMEMBERED_S
        for call in done:
            if len(self._calls) > _MAX_ANSWERS or call.ended_s < oldest_s:
                del self._calls[id(call)]


class SessionGroup:
    """Several sessions behind one key, told apart by the X-Session-ID header. For programs that play many episodes with one key."""

    def __init__(self, recorder: Recorder, generate: Generate, *, key: str, linger_s: float) -> None:
        """`recorder` is one of those that the sessions record with; they begin anew."""
        self.key = key
        self._recorder = recorder
        self._generate = generate
        self._linger_s = linger_s
        self._named: dict[str, Session] = {}
        self._is_sealed = False

    def session(self, name: str) -> Session:
        """Return the session of that name, a new one if it has none yet.

        Raises SealedError if the group has ended, RefusedError if the name is not of 1 to 200 characters, or there are too many.
        """
        if name not in self._named:
            if self._is_sealed:
                raise SealedError("these episodes have ended, so their key records nothing any more; begin others")
            if not name or len(name) > 200:
                raise RefusedError("this key is shared by several episodes; name yours in an X-Session-ID header of 1 to 200 characters")
            if len(self._named) >= MAX_NAMED:
                raise RefusedError(f"this key has {MAX_NAMED} sessions, which is the most; use an X-Session-ID that is in use")
            self._named[name] = Session(self._recorder.another(), self._generate, key=self.key, linger_s=self._linger_s)
        return self._named[name]

    def seal(self) -> None:
        """Seal all of its sessions."""
        self._is_sealed = True
        for session in self._named.values():
            session.seal()


@dataclass(eq=False)
class ProxySessions:
    """All sessions of a proxy, by key. A call runs on for `linger_s` seconds without a client."""

    linger_s: float = 10.0
    _open: dict[str, Session | SessionGroup] = field(default_factory=dict)
    _sealed: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def open(self, recorder: Recorder, generate: Generate) -> Session:
        """Begin an episode. `close` has to be called at its end."""
        session = Session(recorder, generate, key=_new_key(), linger_s=self.linger_s)
        self._open[session.key] = session
        return session

    def open_group(self, recorder: Recorder, generate: Generate) -> SessionGroup:
        """Begin episodes that share a key, each with another recorder like this one. `close` has to be called at their end."""
        group = SessionGroup(recorder, generate, key=_new_key(), linger_s=self.linger_s)
        self._open[group.key] = group
        return group

    def close(self, ended: Session | SessionGroup) -> None:
        """Seal a session or a group, and remember only its key."""
        ended.seal()
        if self._open.pop(ended.key, None) is not None:
            self._sealed[ended.key] = None
            while len(self._sealed) > _MAX_SEALED:
                self._sealed.popitem(last=False)

    def session_of(self, key: str, name: str = "") -> Session:
        """Return the session into which a call records; its X-Session-ID, `name`, only counts for a key that several episodes share.

        Raises:
            UnknownKeyError: there is no such key.
            SealedError: its episode has ended.
            RefusedError: see `SessionGroup.session`.
        """
        if key in self._sealed:
            raise SealedError("this episode has ended, so its key records nothing any more; begin another")
        found = self._open.get(key)
        if found is None:
            raise UnknownKeyError(
                "no episode has this key; send the key that the episode was given as 'Authorization: Bearer KEY', as x-api-key, or in the"
                " path /sessions/KEY/v1")
        return found.session(name) if isinstance(found, SessionGroup) else found

    def close_all(self) -> None:
        """Close every session."""
        for ended in list(self._open.values()):
            self.close(ended)


def _new_key() -> str:
    return f"sk-{secrets.token_urlsafe(32)}"
