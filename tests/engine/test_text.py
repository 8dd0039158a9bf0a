"""Streamed text adds up to the whole text, cut before the first stop string."""

import time

from hypothesis import given
from hypothesis import strategies as st

from offbeat.engine.request import MAX_STOPS
from offbeat.engine.text import StopStrings, TextStream, cut_at_stop


class Bytes:
    """One token per byte, so that a character may take several."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


@given(st.text(alphabet="abé€😀", max_size=20), st.lists(st.text(alphabet="abé€", min_size=1, max_size=3), max_size=3))
def test_pieces_add_up_to_the_text_before_the_first_stop(text, stops):
    stream = TextStream(Bytes(), tuple(stops))
    pieces, ids = [], []
    for byte in text.encode():
        ids.append(byte)
        pieces.append(stream.push(byte))
        if stream.stopped:
            break
    pieces.append(stream.finish())
    seen = bytes(ids).decode()
    assert "".join(pieces) == cut_at_stop(seen, tuple(stops))
    assert stream.stopped == any(stop in seen for stop in stops) == any(stop in text for stop in stops)


@given(
    st.text(alphabet="abé", max_size=16), st.lists(st.text(alphabet="abé", min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(0, 8), st.booleans())
def test_stop_strings_end_a_text_only_after_its_least_number_of_tokens_and_may_stay(text, stops, min_tokens, keep_stop):
    stream, data = TextStream(Bytes(), tuple(stops), min_tokens=min_tokens, keep_stop=keep_stop), text.encode()
    pieces = [*map(stream.push, data), stream.finish()]
    found = []  # (where it ends, where it begins)
    for end in range(1, len(text) + 1):
        found += [(end, end - len(stop)) for stop in stops if text[:end].endswith(stop) and len(text[:end].encode()) > min_tokens]
    cut = min((end if keep_stop else begin for end, begin in found), default=len(text)) if found else len(text)
    assert stream.stopped == bool(found)
    if keep_stop or len({end for end, _ in found}) < 2:
        assert "".join(pieces) == text[:cut]
    if not min_tokens:
        first = [at for at in map(text.find, stops) if at >= 0]
        assert cut_at_stop(text, tuple(stops), keep_stop=keep_stop) == (text[:cut] if keep_stop or not first else text[: min(first)])


def test_a_stop_string_is_seen_with_its_last_token():
    stream = TextStream(Bytes(), ("ab",))
    assert [stream.push(b) for b in b"xa"] == ["x", ""]
    assert not stream.stopped
    assert stream.push(ord("b")) == "" and stream.stopped


def test_what_only_began_like_a_stop_string_is_released():
    stream = TextStream(Bytes(), ("abc",))
    assert "".join(stream.push(b) for b in b"ab") == ""
    assert stream.push(ord("x")) == "abx"


def test_an_incomplete_character_is_shown_at_the_end():
    stream = TextStream(Bytes())
    assert stream.push(0xC3) == "" and stream.finish() == "\ufffd"


@given(st.text(alphabet="ab", max_size=40), st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=6))
def test_every_stop_string_is_found_where_it_ends(text: str, stops: list[str]) -> None:
    automaton, state = StopStrings(tuple(stops)), 0
    for end, char in enumerate(text, start=1):
        state = automaton.step(state, char)
        assert automaton.found(state) == max((len(stop) for stop in stops if text[:end].endswith(stop)), default=0)
        beginnings = {stop[:size] for stop in stops for size in range(1, len(stop) + 1)}
        assert automaton.begun(state) == max((len(part) for part in beginnings if text[:end].endswith(part)), default=0)


@given(st.binary(max_size=200), st.lists(st.text(alphabet="ab\ufffd", min_size=1, max_size=3), max_size=2))
def test_bytes_that_are_no_text_add_up_too(data: bytes, stops: list[str]) -> None:
    stream, whole = TextStream(Bytes(), tuple(stops)), Bytes().decode(list(data))
    pieces = []
    for byte in data:
        pieces.append(stream.push(byte))
        if stream.stopped:
            break
    pieces.append(stream.finish())
    assert "".join(pieces) == cut_at_stop(whole, tuple(stops))


def test_bytes_that_never_become_text_cost_the_same_at_every_token() -> None:
    class Counted(Bytes):
        num_decoded = 0

        def decode(self, ids: list[int]) -> str:
            self.num_decoded += len(ids)
            return super().decode(ids)

    tokenizer = Counted()
    stream = TextStream(tokenizer)
    pieces = [stream.push(0x80) for _ in range(2000)]
    assert "".join(pieces) + stream.finish() == "\ufffd" * 2000
    assert tokenizer.num_decoded < 2001 * 64


@given(
    st.text(alphabet="ab😀", max_size=90), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=2), st.integers(0, 3),
    st.integers(0, 100))
def test_tokens_that_are_given_at_once_are_as_if_they_had_been_pushed(text: str, stops: list[str], min_tokens: int, at: int) -> None:
    data = text.encode()
    at = min(at, len(data))
    pushed, begun = (TextStream(Bytes(), tuple(stops), min_tokens=min_tokens, after=b"xa") for _ in range(2))
    for token in data[:at]:
        pushed.push(token)
    begun.begin(data[:at])
    assert begun.stopped == pushed.stopped
    for token in data[at:]:
        pieces = begun.push(token), pushed.push(token)
        assert pieces[0] == pieces[1] and begun.stopped == pushed.stopped
    assert begun.finish() == pushed.finish()


def test_thousands_of_tokens_that_are_given_at_once_are_decoded_once() -> None:
    class Counted(Bytes):
        num_decoded = 0

        def decode(self, ids: list[int]) -> str:
            self.num_decoded += len(ids)
            return super().decode(ids)

    tokenizer = Counted()
    stream = TextStream(tokenizer, ("#",))
    stream.begin(b"a" * 4000)
    assert tokenizer.num_decoded < 4000 + 64 * 64 and stream.push(ord("#")) == "" and stream.stopped


def test_many_long_stop_strings_that_almost_match_cost_next_to_nothing() -> None:
    stops = ("a" * 999 + "x", *("b" * 998 + chr(0x100 + i) for i in range(MAX_STOPS - 1)))
    begin = time.process_time()
    stream = TextStream(Bytes(), stops)
    assert "".join(stream.push(ord("a")) for _ in range(1500)) == "a" * (1500 - 999)
    assert time.process_time() - begin < 1.0  # it was 14 s when the end of the text was compared with every beginning of each
