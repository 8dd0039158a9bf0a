"""Makes, parses and checks IDs and `tinker://` paths.

An ID is made from the parent's ID and a number, so that a repeated request has the same ID: for example, a model of a session is
"SESSION:train:0", and a training request to it "SESSION:train:0:5". Nobody can guess a session ID. Input is checked here before use.
"""

import re
import uuid
from dataclasses import dataclass
from typing import Self

from offbeat.service.errors import BadRequestError
from offbeat.service.types import CheckpointKind

_SESSION = r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})"
_SEQ = r"(?:0|[1-9][0-9]{0,18})"
_MODEL_ID = re.compile(rf"{_SESSION}:train:{_SEQ}")
_ANY_ID = re.compile(rf"{_SESSION}(?::train:{_SEQ}(?::(?:create|{_SEQ}))?|:sample:{_SEQ}(?::{_SEQ})?)?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
SCHEME = "tinker://"
_SEGMENTS: dict[str, CheckpointKind] = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_SEGMENT_OF = {kind: segment for segment, kind in _SEGMENTS.items()}


def new_session_id() -> str:
    return str(uuid.uuid4())


def model_id(session_id: str, seq: int) -> str:
    """Return the ID of a session's model and training run, such as "SESSION:train:0". Clients compute it themselves, too."""
    return f"{session_id}:train:{seq}"


def sampler_id(session_id: str, seq: int) -> str:
    """Return the ID of a session's sampler, such as "SESSION:sample:0"."""
    return f"{session_id}:sample:{seq}"


def create_request(model_id: str) -> str:
    """Return the ID of the request that creates a model, fresh or from a checkpoint, such as "SESSION:train:0:create"."""
    return f"{model_id}:create"


def training_request(model_id: str, seq: int) -> str:
    return f"{model_id}:{seq}"


def sample_request(sampler_id: str, seq: int) -> str:
    return f"{sampler_id}:{seq}"


def session_of(some_id: str) -> str:
    """Return the session that a session, model, sampler or request ID belongs to; raises BadRequestError if the text is not such an ID."""
    if (match := _ANY_ID.fullmatch(some_id)) is None:
        raise BadRequestError(f"{some_id[:100]!r} is not an id that this server gives out; use one from its answers")
    return match[1]


def check_name(name: str) -> str:
    """Return the name of a checkpoint unchanged if it is valid; raises BadRequestError if the name is invalid."""
    if _NAME.fullmatch(name) is None:
        raise BadRequestError(
            f"the checkpoint name {name[:250]!r} cannot be used; take 1 to 200 of A-Z a-z 0-9 . _ - and begin with a letter or digit")
    return name


@dataclass(frozen=True)
class CheckpointPath:
    """Path of a checkpoint for clients, of weights, sampler_weights or external_weights: "tinker://SESSION:train:0/weights/final"."""

    run_id: str
    kind: CheckpointKind
    name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a path; raises BadRequestError if the text is not a checkpoint's path."""
        parts = text.removeprefix(SCHEME).split("/")
        if not text.startswith(SCHEME) or len(parts) != 3 or parts[1] not in _SEGMENTS or _MODEL_ID.fullmatch(parts[0]) is None:
            raise BadRequestError(f"{text[:300]!r} is not the path of a checkpoint; one is {SCHEME}<run>/<{'|'.join(_SEGMENTS)}>/<name>")
        return cls(parts[0], _SEGMENTS[parts[1]], check_name(parts[2]))

    @property
    def short(self) -> str:
        """The path within its run, such as `weights/NAME`."""
        return f"{_SEGMENT_OF[self.kind]}/{self.name}"

    def __str__(self) -> str:
        return f"{SCHEME}{self.run_id}/{self.short}"
