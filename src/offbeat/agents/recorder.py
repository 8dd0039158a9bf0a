"""Records the prompts and answers of one episode, token by token, while a client sees only messages.

`Recorder` keeps a tree of answers. A request is matched with the answers that it repeats, and the prompt continues their tokens as they
were sampled; a request that continues none is rendered as a whole and begins a chain. Exactly one trajectory trains on each answer.
Called by `sessions`; no I/O. docs/recording.md describes the rules by which messages are recognised.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from offbeat.chat.answering import Answering, Chat, check_structure
from offbeat.chat.image_parts import without_images
from offbeat.chat.messages import ChatRequest, Message, Reply
from offbeat.chat.parsing import AnswerParser
from offbeat.chat.rendering import Renderer
from offbeat.chat.size import check_chat_size
from offbeat.data.ends import split_stops
from offbeat.data.trajectory import Trajectory
from offbeat.errors import RefusedError
from offbeat.inference.sampling import Sample, Sampling
from offbeat.rollout.builder import TrajectoryBuilder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpisodeLimits:
    """Bounds of one episode: on the number of answers, and on the tokens of a prompt and its answer together."""

    max_turns: int = 1000
    max_tokens: int = 2**31


@dataclass(eq=False)
class Node:
    """An answer in the tree, with the tokens that the model was given since the answer before it.

    Attributes:
        parent: the answer whose tokens its prompt continues; None if its prompt was rendered as a whole.
        given: [P] token ids between the parent's last token and its own first one.
        order: number of the call that it answers, among all of the episode.
        state: messages of users and tools since the last answer, as JSON such as '[["user", "hello"]]'.
        is_read: whether a client has received it.
    """

    parent: "Node | None"
    given: tuple[int, ...]
    sample: Sample
    message: Message
    order: int
    state: str
    is_malformed: bool
    is_read: bool = False
    num_children: int = 0

    @property
    def path(self) -> list["Node"]:
        """The answers of its chain, from the first to itself."""
        path: list[Node] = []
        node: Node | None = self
        while node is not None:
            path.append(node)
            node = node.parent
        return path[::-1]


@dataclass(eq=False)
class PendingTurn:
    """A request that continues `prompt` [L] token ids, and waits for its answers, `nodes`; several if it asks for n of them."""

    request: ChatRequest
    prompt: tuple[int, ...]
    sampling: Sampling
    opening: str
    parent: Node | None
    given: tuple[int, ...]
    history: bytes
    order: int
    state: str
    nodes: list[Node] = field(default_factory=list)


@dataclass(frozen=True)
class Continuation:
    """A request, and the answer that it continues: `parent`, after `num_known` of its messages; None if it continues none."""

    request: ChatRequest
    opening: str
    parent: Node | None
    num_known: int
    history: bytes


@dataclass(frozen=True)
class Rendered:
    """A request's tokens: `given` follows the tokens of `parent`, or is the whole prompt where `parent` is None."""

    found: Continuation
    parent: Node | None
    given: tuple[int, ...]


class Recorder:
    """The calls of one episode.

    >>> turn = recorder.open(request)
    >>> [sample] = await generate(turn.prompt, turn.sampling, n=1)
    >>> reply = recorder.commit(turn, sample)
    >>> recorder.mark_read(turn)
    >>> trajectories = recorder.chains(1.0, episode=0)

    Calls may overlap: two that continue the same answer become its branches.
    """

    def __init__(
        self, renderer: Renderer, parser: AnswerParser, *, sampling: Sampling, limits: EpisodeLimits | None = None,
        keep_reasoning: bool = True,
    ) -> None:
        """Begin an episode.

        Args:
            sampling: the run's. A request sets only its length, stops and form of text, because the trainer has to know the distribution
                that tokens were sampled from, and equal seeds would make the samples of a group equal. Under a form, the engine's
                log-probabilities are normalised over the tokens that the form allows.
            keep_reasoning: leave reasoning that was sampled in the prompts of later turns, although clients and templates drop it. Without
                it, an answer with reasoning ends its chain.
        """
        self._renderer, self._parser, self._answering, self._sampling = renderer, parser, Answering(renderer, parser), sampling
        self._limits = limits or EpisodeLimits()
        self._keep_reasoning = keep_reasoning
        self._nodes: list[Node] = []
        self._by_history: dict[bytes, list[Node]] = {}
        self._same_history: dict[bytes, bytes] = {}  # digests of other forms of an answer, to the digest in `_by_history`
        self._num_opened = self._num_dropped = 0

    def another(self) -> "Recorder":
        """Return a recorder for another episode, with the same settings."""
        return Recorder(self._renderer, self._parser, sampling=self._sampling, limits=self._limits, keep_reasoning=self._keep_reasoning)

    @property
    def num_turns(self) -> int:
        """Number of answers that were given or are being sampled."""
        return self._num_opened - self._num_dropped

    def open(self, request: ChatRequest) -> PendingTurn:
        """Find the answer that the request continues, and return its prompt; raises as `find`, `render` and `begin_turn`."""
        return self.begin_turn(self.render(self.find_continuation(request)))

    def find_continuation(self, request: ChatRequest) -> Continuation:
        """Find the answer that the request continues; raises RefusedError for unsupported requests, or an episode past its limits."""
        if self.num_turns + request.n > self._limits.max_turns:
            raise RefusedError(
                f"this episode may have agent.max_turns = {self._limits.max_turns} answers and has had {self.num_turns}, so there is no"
                f" room for {request.n} more; end it")
        check_chat_size(request, self._renderer.tokenizer, context=self._limits.max_tokens)
        opening = self._renderer.opening(request.tool_choice, request.tool_name)
        check_structure(request)
        parent, num_known, history = self._find(request)
        return Continuation(request, opening, parent, num_known, history)

    def render(self, found: Continuation) -> Rendered:
        """Render and tokenize a request, on any thread, since it reads nothing that changes.

        Raises RefusedError or ModelError if the chat template refuses the messages.
        """
        request, parent = found.request, found.parent
        given = None if parent is None else self._continue(parent, request, found.num_known, found.opening)
        if given is None:
            parent, given = None, self._renderer.prompt(request.messages, request.tools, opening=found.opening)
        return Rendered(found, parent, tuple(given))

    def begin_turn(self, rendered: Rendered) -> PendingTurn:
        """Begin to answer a request; raises RefusedError if the prompt leaves no room for an answer."""
        found, parent, given = rendered.found, rendered.parent, rendered.given
        request, opening = found.request, found.opening
        path = () if parent is None else parent.path
        prompt = (*(token for node in path for part in (node.given, node.sample.token_ids) for token in part), *given)
        sampling, state = self._sampling_of(request, self._limits.max_tokens - len(prompt)), _observation(request.messages)
        if any(message.images for message in request.messages):  # kept for as long as the episode, and read already
            request = replace(request, messages=tuple(without_images(message) for message in request.messages))
        if parent is not None:
            parent.is_read = True  # its client has repeated it
            parent.num_children += 1
        turn = PendingTurn(request, prompt, sampling, opening, parent, given, found.history, self._num_opened, state)
        self._num_opened += request.n
        return turn

    def commit(self, turn: PendingTurn, sample: Sample) -> Reply:
        """Record an answer exactly as it was sampled, and return it as a message. It counts once its turn is marked as read."""
        chat = Chat(turn.request, turn.prompt, turn.opening, turn.sampling.stop, turn.sampling.stop_token_ids)
        reply = self._answering.reply(chat, sample)
        message = reply.message
        node = Node(turn.parent, turn.given, sample, message, turn.order + len(turn.nodes), turn.state, bool(reply.malformed))
        self._nodes.append(node)
        turn.nodes.append(node)
        known = _digest(turn.history, message)
        self._by_history.setdefault(known, []).append(node)
        if reply.stop:  # some clients put back the string that ended the answer
            self._same_history[_digest(turn.history, replace(message, content=message.content + reply.stop))] = known
        return reply

    def mark_read(self, turn: PendingTurn) -> None:
        """Count the answers of a turn, because its client has received them."""
        for node in turn.nodes:
            node.is_read = True

    def drop(self, turn: PendingTurn) -> None:
        """Forget a turn that failed; its unread answers do not count."""
        self._num_dropped += turn.request.n - len(turn.nodes)

    def chains(self, reward: float, *, episode: int | None, agent: str = "") -> list[Trajectory]:
        """Return one trajectory for each chain of answers that was read to its end; none if nothing was read.

        An answer that several chains share is trained on in the first and is context in the others. The reward is the whole episode's, also
        several by name, or a failed one.
        """
        read = [node for node in self._nodes if node.is_read]
        inner = {id(node.parent) for node in read}
        trained: set[int] = set()
        trajectories = []
        for leaf in read:
            if id(leaf) in inner:
                continue
            builder, num_malformed = TrajectoryBuilder(), 0
            for node in leaf.path:
                builder.given(node.given)
                if id(node) in trained:
                    builder.given(node.sample.token_ids)
                    continue
                trained.add(id(node))
                builder.state(node.state).generated(node.sample, order=node.order)
                num_malformed += node.is_malformed
            trajectories.append(builder.finish(reward, episode=episode, agent=agent, malformed_calls=num_malformed))
        return trajectories

    def _find(self, request: ChatRequest) -> tuple[Node | None, int, bytes]:
        """Find the longest beginning of the request that ends with an answer of ours.

        Returns the answer, None if there is none; the number of messages up to it; and the digest of the request's history.
        """
        history = _hash(b"", [[tool.name, tool.description, dict(tool.parameters)] for tool in request.tools])
        best, num_known = None, 0
        for num, message in enumerate(request.messages, 1):
            history = _digest(history, message)
            if history not in self._by_history:
                history = self._same_history.get(history, history)
            if (nodes := self._by_history.get(history)) and num < len(request.messages):
                # Of equal answers, prefer one that was read, then one without a continuation, which makes fewer branches.
                best, num_known = min(nodes, key=lambda node: (not node.is_read, node.num_children)), num
        return best, num_known, history

    def _continue(self, parent: Node, request: ChatRequest, num_known: int, opening: str) -> list[int] | None:
        """Return the ids between the parent's tokens and the next answer; None if its tokens cannot be continued."""
        if not self._keep_reasoning and any(node.message.reasoning for node in parent.path):
            return None
        following = self._renderer.following(parent.message, request.messages[num_known:], request.tools, opening=opening)
        return None if following is None else [*self._missing_end(parent.sample), *following]

    def _missing_end(self, sample: Sample) -> Sequence[int]:
        """Return the template's end of a turn if the sample lacks it, as it was cut, or ended by a string or another token."""
        end = self._renderer.end_of_turn
        return () if sample.token_ids[len(sample.token_ids) - len(end) :] == end else end

    def _sampling_of(self, request: ChatRequest, room: int) -> Sampling:
        if room < 1:
            raise RefusedError(
                f"the chat has {self._limits.max_tokens - room} tokens and there is room for {self._limits.max_tokens} with its answer, by"
                " the model's context and train.max_tokens_per_microbatch; shorten it, or begin a new one")
        ours, (stop, stop_token_ids) = self._sampling, split_stops(request.stop, self._renderer.tokenizer)
        if request.shaping.structure is not None and not ours.supports:
            _say_structured()
        wanted = ours.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
        return replace(
            ours, max_new_tokens=min(ours.max_new_tokens, wanted, room), stop=_distinct([*ours.stop, *stop]),
            stop_token_ids=_distinct([*ours.stop_token_ids, *stop_token_ids, *request.stop_token_ids]),
            top_logprobs=max(ours.top_logprobs, request.top_logprobs),
            shaping=replace(ours.shaping, structure=request.shaping.structure or ours.shaping.structure))


@cache
def _say_structured() -> None:
    """Warn once that structured outputs change the log-probabilities of samples."""
    logger.warning(
        "an agent asks for structured outputs: the log-probabilities of such samples are those among the tokens that the structure allows,"
        " and the trainer does not normalise over the same tokens, but over all (`offbeat docs numerics`)")


def _distinct(values: Iterable) -> tuple:
    return tuple(dict.fromkeys(values))


def _observation(messages: Sequence[Message]) -> str:
    """Return the messages since the assistant's last one, as a text for `Node.state`."""
    last = max((i for i, message in enumerate(messages) if message.role == "assistant"), default=-1)
    return json.dumps([(message.role, message.content, *_digests(message)) for message in messages[last + 1 :]])


def _digest(history: bytes, message: Message) -> bytes:
    """Return the digest of a chat: `history`, the digest of all messages but the last, extended by the last.

    Names and reasoning do not count, as clients leave them out, and neither do white space around an answer and the form of a call's
    arguments, which they rewrite.
    """
    content = message.content.strip() if message.role == "assistant" else message.content
    calls = [[call.id, call.name, _parsed(call.arguments)] for call in message.calls]
    return _hash(history, [message.role, content, calls, message.call_id, *_digests(message)])


def _digests(message: Message) -> list[str]:
    """Return the hashes of the files of a message's images."""
    return [image.digest for image in message.images]


def _hash(before: bytes, value: object) -> bytes:
    return hashlib.blake2b(before + json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()


def _parsed(arguments: str) -> object:
    try:
        return json.loads(arguments or "{}", parse_float=_number)
    except (ValueError, RecursionError):
        return arguments


def _number(text: str) -> int | float:
    """Read 1.0 as 1, as a client that parses and writes arguments again may have done."""
    number = float(text)
    return int(number) if number.is_integer() else number
