"""Which tokens and texts end a sample, whether it runs or is to be gone on with."""

from offbeat.data.tokenizer import character_tokenizer
from offbeat.engine.request import SamplingParams
from offbeat.engine.sample_ends import end_ids, has_ended, text_to_stop

TOKENIZER = character_tokenizer()
EOS = TOKENIZER.eos_token_id


def test_a_request_adds_tokens_to_the_tokenizers_own_end_or_takes_its_place():
    assert end_ids(SamplingParams(), TOKENIZER) == (EOS,)
    assert end_ids(SamplingParams(stop_token_ids=(7, 9)), TOKENIZER) == (7, 9, EOS)
    assert end_ids(SamplingParams(stop_token_ids=(7,), ignore_eos=True), TOKENIZER) == (7,)


def test_a_sample_has_ended_with_an_end_token_or_a_stop_string():
    ids = TOKENIZER.encode("1+2=3")
    assert not has_ended(SamplingParams(), TOKENIZER, ids) and has_ended(SamplingParams(), TOKENIZER, [*ids, EOS])
    assert not has_ended(SamplingParams(ignore_eos=True), TOKENIZER, [*ids, EOS])
    assert has_ended(SamplingParams(stop_token_ids=(ids[-1],)), TOKENIZER, ids)
    assert has_ended(SamplingParams(stop=("2=",)), TOKENIZER, ids) and not has_ended(SamplingParams(stop=("2=4",)), TOKENIZER, ids)


def test_a_stop_string_may_begin_in_the_tokens_that_a_sample_has_begun_with():
    assert text_to_stop(SamplingParams(), TOKENIZER) is None
    stream = text_to_stop(SamplingParams(stop=("2=3",)), TOKENIZER, begun=TOKENIZER.encode("1+2"))
    assert stream is not None
    for token in TOKENIZER.encode("=3"):
        assert not stream.stopped
        stream.push(token)
    assert stream.stopped
