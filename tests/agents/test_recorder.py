"""The recorder against random clients, models and templates: what was sampled is what is trained, token by token, exactly once."""

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chats import CHATML, FORGETS_THOUGHTS, words
from image_models import file_of, make_folder, picture
from offbeat.agents.recorder import EpisodeLimits, PendingTurn, Recorder, _say_structured
from offbeat.chat.messages import ChatRequest, Message, Reply, Tool, ToolCall
from offbeat.chat.parsing import AnswerParser
from offbeat.chat.rendering import Renderer
from offbeat.chat.shaping import Shaping, Structure
from offbeat.data.image_sources import MARK, ImageSource
from offbeat.data.image_store import FIRST_ID
from offbeat.data.tokenizer import load_tokenizer
from offbeat.errors import RefusedError
from offbeat.inference.sampling import Sample, Sampling
from shared_image_reader import reader_in_process

MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("o", "k"), ("<", "t"))
WITH_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) }}"
    "{{ ' <tool_call>{\"name\", \"arguments\"}</tool_call><|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message.tool_calls or [] %}{{ '<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
STRIPS = CHATML.replace("message['content'] + '<|im_end|>'", "message['content'].strip() + '<|im_end|>'")
WITHOUT_END = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}assistant: "
APPENDABLE = {"chatml": CHATML, "tools": WITH_TOOLS, "strips": STRIPS}
TEMPLATES = APPENDABLE | {"forgets": FORGETS_THOUGHTS, "no end": WITHOUT_END}

ADD = Tool("add", "adds", {"type": "object", "properties": {"a": {"type": "integer"}}})
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1.0,  "b": "é"}}\n</tool_call>'
SAMPLING = Sampling(max_new_tokens=64, temperature=1.0)

_MADE: dict[str, tuple[Renderer, AnswerParser]] = {}


def parts(template: str) -> tuple[Renderer, AnswerParser]:
    if template not in _MADE:
        renderer = Renderer(words(TEMPLATES[template], *MERGES))
        _MADE[template] = renderer, AnswerParser(renderer)
    return _MADE[template]


def recorder(template: str = "chatml", **options) -> Recorder:
    renderer, parser = parts(template)
    return Recorder(renderer, parser, **{"sampling": SAMPLING} | options)


@dataclass
class Model:
    """Answers with given tokens. Each log-probability is used once, so that it identifies its token."""

    num_tokens: int = 0
    sampled: dict[tuple[float, ...], PendingTurn] = field(default_factory=dict)

    def sample(self, turn: PendingTurn, ids: list[int], finish: str = "stop") -> Sample:
        numbers = range(self.num_tokens + 1, self.num_tokens + len(ids) + 1)
        self.num_tokens += len(ids)
        sample = Sample(tuple(ids), tuple(-i / 1024 for i in numbers), tuple(numbers), "", finish)
        self.sampled[sample.logprobs] = turn
        return sample


def say(recorded: Recorder, messages, text: str, *, model: Model, tools=(), finish: str = "stop", read=True, **fields) -> Reply:
    """Play one call, which the model answers with the tokens of `text`."""
    turn = recorded.open(ChatRequest(tuple(messages), tuple(tools), **fields))
    tokenizer = recorded._renderer.tokenizer
    reply = recorded.commit(turn, model.sample(turn, tokenizer.encode(text), finish))
    if read:
        recorded.mark_read(turn)
    return reply


def check(trajectories, model: Model, read: Counter) -> None:
    """Compare what is trained with what was sampled: `read` counts the samples that clients have read, by their log-probabilities."""
    trained = Counter()
    for trajectory in trajectories:
        assert not trajectory.unusable, trajectory.reason
        runs = np.flatnonzero(np.diff([0, *trajectory.loss_mask.astype(int), 0])).reshape(-1, 2)
        assert [end for _, end in runs] == [turn.end for turn in trajectory.turns]
        for start, end in runs:
            logprobs = tuple(trajectory.rollout_logprobs[start:end].tolist())
            turn = model.sampled[logprobs]
            [sample] = [node.sample for node in turn.nodes if node.sample.logprobs == logprobs]
            assert tuple(trajectory.tokens[start:end]) == sample.token_ids
            assert tuple(trajectory.versions[start:end]) == sample.versions
            assert tuple(trajectory.tokens[:start]) == turn.prompt, "it is trained after the very tokens after which it was sampled"
            trained[logprobs] += 1
        assert not trajectory.rollout_logprobs[~trajectory.loss_mask].any()
        assert (trajectory.versions[~trajectory.loss_mask] == -1).all()
    assert trained == read


# -- random clients -----------------------------------------------------------------------------------------------------------------------


HELLO = Message("user", "hello")
Chat = tuple[tuple[Message, ...], tuple[Tool, ...]]


class Client:
    """A program that holds several chats, repeats what it was answered in its own way, and sometimes gives up."""

    def __init__(self, draw, template: str, **options) -> None:
        self.draw, self.recorder, self.model = draw, recorder(template, **options), Model()
        self.chats: list[Chat] = [((HELLO,), ()), ((HELLO,), (ADD,))]
        self.waiting: list[PendingTurn] = []
        self.read: Counter = Counter()
        self.tokenizer = parts(template)[0].tokenizer

    def step(self) -> None:
        getattr(self, self.draw(st.sampled_from(["ask", "ask", "answer", "answer", "answer", "lose", "edit", "begin", "fail"])))()

    def ask(self) -> None:
        messages, tools = self._chat()
        stop = self.draw(st.sampled_from([(), ("</code>",)]))
        n = self.draw(st.sampled_from([1, 1, 1, 2]))
        self.waiting.append(self.recorder.open(ChatRequest(messages, tools, stop=stop, n=n)))

    def answer(self) -> None:
        for turn, samples, replies in self._sampled():
            self.recorder.mark_read(turn)
            self.read.update(sample.logprobs for sample in samples)
            for reply in replies:
                self.chats.append(((*turn.request.messages, self._repeated(reply), *self._next(reply)), turn.request.tools))

    def lose(self) -> None:
        """The answer comes, and nobody reads it."""
        list(self._sampled())

    def fail(self) -> None:
        if self.waiting:
            self.recorder.drop(self.waiting.pop())

    def edit(self) -> None:
        messages, tools = self._chat()
        edited = list(messages)
        at = self.draw(st.integers(0, len(edited) - 1))
        edited[at] = replace(edited[at], content=edited[at].content + "!")
        self.chats.append((tuple(edited), tools))

    def begin(self) -> None:
        self.chats.append(((Message("system", "be brief"), self.draw(st.sampled_from([HELLO, Message("user", "sum it up")]))), (ADD,)))

    def _chat(self) -> "Chat":
        """One of the latest chats, so that several calls continue the same."""
        return self.draw(st.sampled_from(self.chats[-3:]))

    def _sampled(self):
        if not self.waiting:
            return
        turn = self.waiting.pop(self.draw(st.integers(0, len(self.waiting) - 1)))
        samples = [self.model.sample(turn, *self._ids(turn)) for _ in range(turn.request.n)]
        yield turn, samples, [self.recorder.commit(turn, sample) for sample in samples]

    def _ids(self, turn: PendingTurn) -> tuple[list[int], str]:
        """What the model writes: text in its own tokens, calls, random tokens, in any way of ending."""
        ids = list(self.draw(st.sampled_from([
            self.tokenizer.encode("hello ok"), [self.tokenizer.encode(c)[0] for c in "hello"], self.tokenizer.encode(CALL),
            self.tokenizer.encode("</tool_call><tool_call>{"), self.tokenizer.encode("let me see\n" + CALL + CALL)])))
        ids += self.draw(st.lists(st.integers(0, self.tokenizer.vocab_size - 1), max_size=3))
        ends = {"length": [], "end": [self.tokenizer.eos_token_id], "other end": [0]}
        if turn.request.stop:
            ends["string"] = self.tokenizer.encode("</code>\n")
        how = self.draw(st.sampled_from(sorted(ends)))
        return ids + ends[how], "length" if how == "length" else "stop"

    def _repeated(self, reply: Reply) -> Message:
        """The answer as various clients send it back."""
        message = replace(reply.message, reasoning="")
        how = self.draw(st.sampled_from(["same", "stop", "compact", "stripped"]))
        if how == "stop":
            return replace(message, content=message.content + reply.stop)
        if how == "compact":
            calls = [replace(call, arguments=json.dumps({"b": "é", "a": 1}, separators=(",", ":"))) for call in message.calls]
            return replace(message, calls=tuple(calls))
        return replace(message, content=message.content.strip()) if how == "stripped" else message

    def _next(self, reply: Reply) -> list[Message]:
        results = [Message("tool", "3", call_id=call.id, name=self.draw(st.sampled_from(["", call.name]))) for call in reply.message.calls]
        return results or [Message("user", self.draw(st.sampled_from(["go on", "hello"])))]


@settings(max_examples=150)
@given(data=st.data(), template=st.sampled_from(sorted(TEMPLATES)), keep=st.booleans(), num_steps=st.integers(1, 25))
def test_what_was_sampled_and_read_is_trained_exactly_once_whatever_clients_do(data, template, keep, num_steps):
    client = Client(data.draw, template, keep_reasoning=keep)
    for _ in range(num_steps):
        client.step()
    trajectories = client.recorder.chains(1.0, episode=3)
    check(trajectories, client.model, client.read)
    assert all(trajectory.episode == 3 and trajectory.reward == 1.0 for trajectory in trajectories)


@settings(max_examples=100)
@given(data=st.data(), template=st.sampled_from(sorted(APPENDABLE)), num_turns=st.integers(1, 6))
def test_a_client_that_appends_makes_one_chain(data, template, num_turns):
    client = Client(data.draw, template)
    tools = data.draw(st.sampled_from([(), (ADD,)]))
    for _ in range(num_turns):
        turn = client.recorder.open(ChatRequest(client.chats[-1][0], tools, stop=("</code>",)))
        client.waiting.append(turn)
        client.answer()
    [trajectory] = client.recorder.chains(0.5, episode=0)
    check([trajectory], client.model, client.read)
    assert [turn.order for turn in trajectory.turns] == list(range(num_turns))


# -- single rules -------------------------------------------------------------------------------------------------------------------------


def test_parallel_calls_are_branches_and_what_they_share_is_trained_once():
    recorded, model = recorder(), Model()
    first = say(recorded, [HELLO], "hello<|im_end|>", model=model)
    chat = [HELLO, first.message, Message("user", "ok")]
    turns = [recorded.open(ChatRequest(tuple(chat))) for _ in range(2)]
    for turn in reversed(turns):
        recorded.commit(turn, model.sample(turn, recorded._renderer.tokenizer.encode("ok<|im_end|>")))
        recorded.mark_read(turn)
    one, two = recorded.chains(1.0, episode=0)
    assert [len(one.turns), len(two.turns)] == [2, 1]
    assert one.tokens.tolist() == two.tokens.tolist()
    assert one.loss_mask.sum() > two.loss_mask.sum()
    check([one, two], model, Counter(dict.fromkeys(model.sampled, 1)))


def test_other_tools_or_another_system_message_begin_a_chain():
    recorded, model = recorder(), Model()
    first = say(recorded, [HELLO], "hello<|im_end|>", model=model)
    chat = [HELLO, first.message, Message("user", "ok")]
    say(recorded, chat, "ok<|im_end|>", model=model, tools=[ADD])
    say(recorded, [Message("system", "x"), *chat], "ok<|im_end|>", model=model)
    assert len(recorded.chains(1.0, episode=0)) == 3


def test_an_answer_cut_at_its_length_gets_an_end_that_is_not_trained():
    recorded, model = recorder(), Model()
    reply = say(recorded, [HELLO], "hello", model=model, finish="length")
    assert reply.finish == "length"
    say(recorded, [HELLO, reply.message, Message("user", "go on")], "ok<|im_end|>", model=model)
    [trajectory] = recorded.chains(1.0, episode=0)
    text = recorded._renderer.tokenizer.decode(trajectory.tokens.tolist(), skip_special_tokens=False)
    assert text == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n"
        "<|im_start|>assistant\nok<|im_end|>")
    check([trajectory], model, Counter(dict.fromkeys(model.sampled, 1)))


@pytest.mark.parametrize("put_back", ["", "</code>"])
def test_a_stop_string_is_left_out_of_the_answer_and_may_come_back(put_back):
    recorded, model = recorder(), Model()
    reply = say(recorded, [HELLO], "hello</code>\n", model=model, stop=("</code>", "never"))
    assert (reply.message.content, reply.stop, reply.finish) == ("hello", "</code>", "stop")
    again = replace(reply.message, content="hello" + put_back)
    say(recorded, [HELLO, again, Message("user", "ok")], "ok<|im_end|>", model=model)
    [trajectory] = recorded.chains(1.0, episode=0)
    assert recorded._renderer.tokenizer.decode(trajectory.tokens.tolist(), skip_special_tokens=False).count("hello</code>\n<|im_end|>") == 1


def test_reasoning_stays_in_the_prompt_unless_it_is_not_to():
    for keep, num_chains in ((True, 1), (False, 2)):
        recorded, model = recorder(keep_reasoning=keep), Model()
        reply = say(recorded, [HELLO], "<think>\nhmm\n</think>\n\nhello<|im_end|>", model=model)
        assert (reply.message.content, reply.message.reasoning) == ("hello", "hmm")
        say(recorded, [HELLO, Message("assistant", "hello"), HELLO], "ok<|im_end|>", model=model)
        trajectories = recorded.chains(1.0, episode=0)
        assert len(trajectories) == num_chains
        assert (b"hmm" in bytes(recorded._renderer.tokenizer.decode(trajectories[-1].tokens.tolist()), "utf-8")) == keep


def test_an_answer_that_nobody_read_is_dropped_unless_it_is_repeated():
    recorded, model = recorder(), Model()
    reply = say(recorded, [HELLO], "hello<|im_end|>", model=model, read=False)
    assert recorded.chains(1.0, episode=0) == []
    say(recorded, [HELLO, reply.message, HELLO], "ok<|im_end|>", model=model, read=False)
    [trajectory] = recorded.chains(1.0, episode=0)
    assert len(trajectory.turns) == 1


def test_calls_are_matched_by_id_and_parsed_arguments():
    recorded, model = recorder("tools"), Model()
    reply = say(recorded, [HELLO], CALL + "<|im_end|>", model=model, tools=[ADD])
    [call] = reply.message.calls
    assert reply.finish == "tool_calls" and call.name == "add"
    result = Message("tool", "3", call_id=call.id)
    rewritten = replace(call, arguments='{"b":"\\u00e9","a":1}')
    say(recorded, [HELLO, Message("assistant", calls=(rewritten,)), result], "ok<|im_end|>", model=model, tools=[ADD])
    assert len(recorded.chains(1.0, episode=0)) == 1
    other = replace(call, id="call_other")
    say(recorded, [HELLO, Message("assistant", calls=(other,)), replace(result, call_id="call_other")], "ok", model=model, tools=[ADD])
    assert len(recorded.chains(1.0, episode=0)) == 2


def test_a_malformed_call_is_text_and_is_counted_where_it_is_trained():
    recorded, model = recorder("tools"), Model()
    broken = '<tool_call>\n{"name": "add", \n</tool_call>'
    reply = say(recorded, [HELLO], broken + "<|im_end|>", model=model, tools=[ADD])
    assert reply.malformed and reply.message.content == broken and reply.finish == "stop"
    for text in ("ok", "hello"):
        say(recorded, [HELLO, reply.message, HELLO], text + "<|im_end|>", model=model, tools=[ADD])
    assert [trajectory.malformed_calls for trajectory in recorded.chains(1.0, episode=0)] == [1, 0]


def test_a_forced_call_begins_with_given_tokens():
    recorded, model = recorder("tools"), Model()
    turn = recorded.open(ChatRequest((HELLO,), (ADD,), tool_choice="required", tool_name="add"))
    tokenizer = recorded._renderer.tokenizer
    assert tokenizer.decode(turn.prompt).endswith('"arguments": ')
    reply = recorded.commit(turn, model.sample(turn, tokenizer.encode('{"a": 1}}\n</tool_call><|im_end|>')))
    assert json.loads(reply.message.calls[0].arguments) == {"a": 1}
    recorded.mark_read(turn)
    [trajectory] = recorded.chains(1.0, episode=0)
    assert tokenizer.decode(trajectory.tokens[trajectory.loss_mask].tolist()) == '{"a": 1}}\n</tool_call>'


def test_only_one_call_is_given_where_calls_are_not_to_be_parallel():
    recorded, model = recorder("tools"), Model()
    reply = say(recorded, [HELLO], CALL + CALL + "<|im_end|>", model=model, tools=[ADD], parallel_calls=False)
    assert len(reply.message.calls) == 1


def test_nothing_is_a_call_where_tools_are_not_to_be_called():
    recorded, model = recorder("tools"), Model()
    reply = say(recorded, [HELLO], CALL + "<|im_end|>", model=model, tools=[ADD], tool_choice="none")
    assert not reply.message.calls and reply.message.content == CALL


def test_a_request_past_a_limit_is_refused():
    recorded, model = recorder(limits=EpisodeLimits(max_turns=2, max_tokens=60)), Model()
    reply = say(recorded, [HELLO], "hello<|im_end|>", model=model)
    with pytest.raises(RefusedError, match="2 answers and has had 1"):
        recorded.open(ChatRequest((HELLO,), n=2))
    with pytest.raises(RefusedError, match="has 4[0-9]{2} tokens and there is room for 60"):
        recorded.open(ChatRequest((Message("user", "x" * 400),)))
    turn = recorded.open(ChatRequest((HELLO, reply.message, HELLO)))
    assert len(turn.prompt) + turn.sampling.max_new_tokens == 60
    with pytest.raises(RefusedError, match="has had 2"):
        recorded.open(ChatRequest((HELLO,)))
    recorded.drop(turn)
    recorded.open(ChatRequest((HELLO,), max_new_tokens=3))


def test_sampling_is_the_runs_but_for_its_ends():
    turn = recorder(sampling=replace(SAMPLING, stop=("a",), temperature=0.7)).open(ChatRequest(
        (HELLO,), temperature=0.0, top_p=0.5, top_k=1, seed=3, max_new_tokens=5, stop=("b", "<|im_start|>", "a")))
    start = words(CHATML).special_tokens.get("<|im_start|>")
    assert turn.sampling == Sampling(5, temperature=0.7, stop=("a", "b"), stop_token_ids=(start,))


def test_log_probabilities_are_told_if_wanted():
    recorded, model = recorder(), Model()
    reply = say(recorded, [HELLO], "hello<|im_end|>", model=model, logprobs=True)
    assert [text for text, *_ in reply.logprobs] == ["hell", "o", "<|im_end|>"]
    assert reply.num_tokens == 3


def test_the_state_of_a_turn_is_what_was_said_since_the_last_answer():
    recorded, model = recorder(), Model()
    reply = say(recorded, [HELLO], "hello<|im_end|>", model=model)
    say(recorded, [HELLO, reply.message, HELLO], "ok<|im_end|>", model=model)
    say(recorded, [Message("user", "other")], "ok<|im_end|>", model=model)
    first, second = recorded.chains(1.0, episode=0)
    assert first.turns[0].state == first.turns[1].state != second.turns[0].state


def test_an_unknown_call_in_the_history_is_rendered():
    recorded, model = recorder("tools"), Model()
    call = ToolCall("call_1", "add", "{}")
    history = [HELLO, Message("assistant", calls=(call,)), Message("tool", "3", call_id="call_1")]
    say(recorded, history, "ok<|im_end|>", model=model, tools=[ADD])
    [trajectory] = recorded.chains(1.0, episode=0)
    assert trajectory.loss_mask.sum() == 2


SMOL = Path(__file__).parents[2] / ".models" / "smollm2-135m-instruct"


@pytest.mark.skipif(not SMOL.is_dir(), reason="make smollm2 has not made the model")
def test_no_token_drifts_over_turns_of_a_real_tokenizer():
    renderer = Renderer(load_tokenizer(SMOL))
    parser, rng = AnswerParser(renderer), np.random.default_rng(0)
    num_chains = num_drifting = 0
    for episode in range(60):
        recorded, model = Recorder(renderer, parser, sampling=SAMPLING), Model()
        chat, read = [Message("user", f"question {episode}")], Counter()
        for _ in range(4):
            turn = recorded.open(ChatRequest(tuple(chat), (ADD,)))
            ids = rng.integers(0, renderer.tokenizer.vocab_size, 24).tolist()
            num_drifting += renderer.tokenizer.encode(renderer.tokenizer.decode(ids, skip_special_tokens=False)) != ids
            sample = model.sample(turn, [*ids, renderer.end_of_turn[0]] if rng.random() < 0.8 else ids, "stop")
            reply = recorded.commit(turn, sample)
            recorded.mark_read(turn)
            read[sample.logprobs] += 1
            results = [Message("tool", "3", call_id=call.id) for call in reply.message.calls]
            chat += [reply.message, *(results or [Message("user", "and now?")])]
        trajectories = recorded.chains(1.0, episode=episode)
        check(trajectories, model, read)
        num_chains += len(trajectories)
    assert num_chains == 60
    assert num_drifting > 100, "encoded again, most of these would be other tokens"


def test_it_says_once_that_the_trainer_does_not_normalise_over_the_tokens_of_a_structure(caplog):
    _say_structured.cache_clear()
    for _ in range(2):
        turn = recorder().open(ChatRequest((HELLO,), shaping=Shaping(structure=Structure("regex", "ok"))))
        assert turn.sampling.shaping.structure == Structure("regex", "ok")
    recorder().open(ChatRequest((HELLO,)))
    _say_structured.cache_clear()
    supporting = recorder(sampling=replace(SAMPLING, supports=True))
    assert supporting.open(ChatRequest((HELLO,), shaping=Shaping(structure=Structure("regex", "ok")))).sampling.asks_supports
    assert [record.message.count("the trainer does not normalise over the same tokens") for record in caplog.records] == [1]


def test_chats_that_differ_in_an_image_are_not_the_same_and_an_image_is_kept_no_longer_than_it_is_read(tmp_path) -> None:
    folder = make_folder(tmp_path / "model", "smolvlm")
    renderer = Renderer(replace(load_tokenizer(folder), images=reader_in_process(folder, tmp_path / "images")))
    tokenizer, recorded = renderer.tokenizer, Recorder(renderer, AnswerParser(renderer), sampling=SAMPLING)
    one, other = (Message("user", f"{MARK}?", images=(ImageSource(data=file_of(picture(seed))),)) for seed in (0, 1))

    def ask(*messages: Message) -> tuple[PendingTurn, Message]:
        turn = recorded.open(ChatRequest(messages))
        ids = (*tokenizer.encode("3"), tokenizer.eos_token_id)
        reply = recorded.commit(turn, Sample(ids, (-0.5,) * len(ids), (0,) * len(ids), "3", "stop"))
        recorded.mark_read(turn)
        return turn, reply.message

    first, said = ask(one)
    goes_on, _ = ask(one, said, other)
    assert goes_on.parent is not None and goes_on.prompt[: len(first.prompt)] == first.prompt
    anew, _ = ask(other, said, other)
    assert anew.parent is None and first.state != anew.state
    assert not any(message.images for turn in (first, goes_on, anew) for message in turn.request.messages)
    [chain, alone] = recorded.chains(1.0, episode=0)
    images = [token for token in dict.fromkeys(chain.tokens.tolist()) if token >= FIRST_ID]
    assert len(images) == 2 and not chain.loss_mask[chain.tokens >= FIRST_ID].any()
    assert {token for token in alone.tokens.tolist() if token >= FIRST_ID} == {images[1]}
    assert tokenizer.images.num_made == 2
