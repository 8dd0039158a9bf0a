"""Errors that refuse a request to the service at once. The HTTP layer turns each into its status code and one sentence.

409 and 5xx are not among them, because clients retry those for minutes. They also retry 408, which is for bodies that did not arrive.
"""

import re

from offbeat.errors import OffbeatError, UserError

_INSIDES = re.compile(r"(?<![\w:/])/[\w.]|\bhttps?://|\n")
"""Matches a file path, an address, or text of more than one line; `tinker://` paths do not match."""


class RequestError(UserError):
    """A request that cannot be carried out without a change.

    Attributes:
        model_id, seq_id: a training request's, if they could be read, so that later ones need not wait for it; else "" and 0.
    """

    status = 400
    model_id = ""
    seq_id = 0


class BadRequestError(RequestError, ValueError):
    """A field is missing, of the wrong type, out of range or contradicts another."""

    status = 422


class UnknownKeyError(RequestError):
    """The API key is missing or unknown to this server."""

    status = 401


class NameRefusedError(RequestError):
    """A request addressed to a host name that this server does not have."""

    status = 403


class UnknownError(RequestError, LookupError):
    """The object does not exist or belongs to another owner; the answer is the same in both cases."""

    status = 404


class LostError(RequestError):
    """The server no longer knows the outcome of a request; the sentence says whether to send it again."""

    status = 410


class TooLargeError(RequestError):
    """A body, compressed or unpacked, exceeds the limit."""

    status = 413


class SlowBodyError(RequestError):
    """A body arrives too slowly to wait for; clients send it again."""

    status = 408


class OverLimitError(OffbeatError):
    """An owner has too much under way; the same request will be accepted later."""

    status = 429

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class FailedError(OffbeatError):
    """Accepted work failed, and the request is not at fault; it may succeed when it is sent again."""

    status = 503


def outside(sentence: str, *, name: str) -> str:
    """Return a sentence for the client, replaced by a reference to the log entry `name` if it reveals paths or addresses of this server.

    This is the last line of defence: the texts of errors are already chosen with clients in mind.
    """
    if _INSIDES.search(sentence):
        return f"the server cannot do this; its log has the reason under {name}"
    return sentence
