"""Ids and paths: what is made is read back, and nothing else is taken."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.service.errors import BadRequestError
from offbeat.service.ids import (
    CheckpointPath,
    check_name,
    create_request,
    model_id,
    new_session_id,
    sample_request,
    sampler_id,
    session_of,
    training_request,
)

SESSION = "123e4567-e89b-42d3-a456-426614174000"


def test_ids_have_the_forms_that_clients_know() -> None:
    assert model_id(SESSION, 0) == f"{SESSION}:train:0"
    assert sampler_id(SESSION, 3) == f"{SESSION}:sample:3"
    assert create_request(model_id(SESSION, 1)) == f"{SESSION}:train:1:create"
    assert training_request(model_id(SESSION, 1), 12) == f"{SESSION}:train:1:12"
    assert sample_request(sampler_id(SESSION, 3), 10**18) == f"{SESSION}:sample:3:{10**18}"


def test_every_id_tells_its_session() -> None:
    session = new_session_id()
    model, sampler = model_id(session, 7), sampler_id(session, 0)
    for some_id in (session, model, sampler, create_request(model), training_request(model, 2**63 - 1), sample_request(sampler, 0)):
        assert session_of(some_id) == session


@pytest.mark.parametrize("text", [
    "", "session", SESSION.upper(), f"{SESSION}:", f"{SESSION}:train", f"{SESSION}:train:-1", f"{SESSION}:train:01", f"{SESSION}:train:1\n",
    f"{SESSION}:train:1:2:3", f"{SESSION}:sample:1:create", f"{SESSION}:train:١", f"{SESSION}:train:{10**19}", f" {SESSION}"])
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(BadRequestError, match="is not an id"):
        session_of(text)


def test_sessions_cannot_be_guessed_from_others() -> None:
    assert len({new_session_id() for _ in range(1000)}) == 1000


@pytest.mark.parametrize(("segment", "kind"), [("weights", "training"), ("sampler_weights", "sampler"), ("external_weights", "external")])
def test_a_path_is_read_and_written_back(segment: str, kind: str) -> None:
    text = f"tinker://{SESSION}:train:0/{segment}/step-10.final"
    path = CheckpointPath.parse(text)
    assert (path.run_id, path.kind, path.name) == (f"{SESSION}:train:0", kind, "step-10.final")
    assert str(path) == text
    assert path.short == f"{segment}/step-10.final"


@pytest.mark.parametrize("text", [
    "", "tinker://", f"{SESSION}:train:0/weights/a", f"tinker://{SESSION}:train:0/weights", f"tinker://{SESSION}:train:0/weights/a/b",
    f"tinker://{SESSION}:train:0/other/a", f"tinker://{SESSION}/weights/a", "tinker://../weights/a",
    f"tinker://tinker://{SESSION}:train:0/weights/a", f"tinker://{SESSION}:sample:0/weights/a"])
def test_what_is_no_path_is_refused(text: str) -> None:
    with pytest.raises(BadRequestError, match="is not the path of a checkpoint"):
        CheckpointPath.parse(text)


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "-x", "a/b", "a\\b", "a b", "a\n", "é", "a" * 201, "a\0"])
def test_a_name_that_could_mean_something_to_a_file_system_is_refused(name: str) -> None:
    with pytest.raises(BadRequestError, match="cannot be used"):
        check_name(name)
    with pytest.raises(BadRequestError):
        CheckpointPath.parse(f"tinker://{SESSION}:train:0/weights/{name}")


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", fullmatch=True))
def test_every_proper_name_makes_a_path_that_is_read_back(name: str) -> None:
    path = CheckpointPath(f"{SESSION}:train:4", "sampler", check_name(name))
    assert CheckpointPath.parse(str(path)) == path


@given(st.text())
def test_any_text_is_read_or_refused_in_one_sentence(text: str) -> None:
    for read in (session_of, CheckpointPath.parse, check_name):
        try:
            read(text)
        except BadRequestError as exc:
            assert "\n" not in str(exc)
