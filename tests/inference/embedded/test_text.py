"""Streamed text adds up to the whole text, cut before the first stop string."""

from hypothesis import given
from hypothesis import strategies as st

from offbeat.inference.embedded.text import TextStream, cut_at_stop


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
