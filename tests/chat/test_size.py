"""What cannot fit in a context is refused before it is rendered or tokenized, and nothing that can."""

from unittest.mock import patch

import pytest

from offbeat.agents.recorder import EpisodeLimits, Recorder
from offbeat.chat.messages import ChatRequest, Message, Tool
from offbeat.chat.parsing import AnswerParser
from offbeat.chat.rendering import Renderer
from offbeat.chat.size import check_chat_size, check_text_size, longest_token_bytes
from offbeat.data.tokenizer import Tokenizer
from offbeat.errors import RefusedError
from offbeat.inference.sampling import Sampling
from support.chat_templates import QWEN, tokenizer_with


def test_the_longest_token_is_counted_in_bytes() -> None:
    tokenizer = tokenizer_with(QWEN)
    assert longest_token_bytes(tokenizer) == max(len(name.encode()) for name in tokenizer.hf.get_vocab())


def test_a_chat_of_more_bytes_than_the_context_can_hold_is_refused() -> None:
    tokenizer = tokenizer_with(QWEN)
    longest = longest_token_bytes(tokenizer)
    context = (1 << 17) // longest + 1
    fits = ChatRequest((Message("user", "x" * (context * longest)),))
    check_chat_size(fits, tokenizer, context=context)
    for request in (
            ChatRequest((Message("user", "x" * (context * longest + 1)),)),
            ChatRequest((Message("user", "é" * (context * longest // 2 + 1)),)),
            ChatRequest((Message("user", "x"),), tools=(Tool("f", "", {"enum": ["x" * (context * longest)]}),))):
        with pytest.raises(RefusedError, match=f"more than {context} tokens of at most {longest} bytes each can hold; shorten it"):
            check_chat_size(request, tokenizer, context=context)
    with pytest.raises(RefusedError, match="the prompt has"):
        check_text_size("x" * (context * longest + 1), tokenizer, context=context)
    check_text_size("x" * (1 << 16), tokenizer, context=1)


def test_an_episode_refuses_a_chat_of_megabytes_without_tokenizing_it() -> None:
    renderer = Renderer(tokenizer_with(QWEN))
    recorder = Recorder(renderer, AnswerParser(renderer), sampling=Sampling(8), limits=EpisodeLimits(max_tokens=512))
    tokenized = AssertionError("it was tokenized")
    with patch.object(Tokenizer, "encode", side_effect=tokenized), pytest.raises(RefusedError, match="more than 512 tokens"):
        recorder.open(ChatRequest((Message("user", "hello " * 700_000),)))
