"""Standard streams that are missing, cannot write a character, or whose reader went away."""

import copy
import io
import json
import os
import sys

import pytest

from offbeat.telemetry.streams import TolerantStream, tolerant, tolerant_output


class Pipe(io.TextIOWrapper):
    """A pipe that nobody reads."""

    def __init__(self) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        super().__init__(io.BufferedWriter(io.FileIO(writer, "w")), encoding="utf-8")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437", "utf-8"])
def test_a_character_that_an_encoding_has_not_stays_what_it_is_in_json(encoding: str) -> None:
    raw = io.BytesIO()
    text = io.TextIOWrapper(raw, encoding=encoding)
    said = {"text": "a · naïve 𝛼 \ud800 end"}
    print(json.dumps(said, ensure_ascii=False), file=tolerant(text), flush=True)
    assert json.loads(raw.getvalue().decode(encoding)) == said


def test_what_nobody_reads_is_dropped_and_remembered() -> None:
    stream = TolerantStream(Pipe())
    for _ in range(3):
        print("step", file=stream, flush=True)  # type: ignore[arg-type]
    assert isinstance(stream.lost, BrokenPipeError)
    assert tolerant(None).write("abc") == 3 and not tolerant(None).isatty()
    with pytest.raises(BrokenPipeError):
        print("x", file=TolerantStream(Pipe(), survives=False), flush=True)  # type: ignore[arg-type]


def test_a_body_goes_on_without_its_reader_and_it_is_said_on_the_other_stream(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    pipe = Pipe()
    monkeypatch.setattr(sys, "stdout", pipe)
    with tolerant_output(survives=True):
        print("first", flush=True)
        print("second", flush=True)
    assert sys.stdout is pipe
    told = "offbeat: standard output could not be written any more (Broken pipe); what came after was not shown\n"
    assert capsys.readouterr().err == told
    pipe.close()  # its buffer can be written now, to nobody


def test_a_stream_keeps_the_attributes_of_what_it_writes_to() -> None:
    inner = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    assert tolerant(inner).encoding == "latin-1"
    assert tolerant(tolerant(inner)) is not inner
    with pytest.raises(AttributeError, match="there is no stream, and so it has no encoding"):
        _ = tolerant(None).encoding
    assert copy.copy(tolerant(inner)).encoding == "latin-1"
