"""How a request to the service can be refused at once. The HTTP layer turns each into its status and one sentence.

409 and 5xx are not among them: clients repeat those for minutes. They repeat 408, too, which is for what did not arrive.
"""

import re

from offbeat.errors import OffbeatError, UserError

_INSIDES = re.compile(r"(?<![\w:/])/[\w.]|\bhttps?://|\n")
"""A path, an address, or more than a sentence; `tinker://` paths are neither."""


class RequestError(UserError):
    """A request that cannot be carried out as it is.

    Attributes:
        model_id, seq_id: of a training request where they could be read, so that later ones need not wait for it; "" and 0 elsewhere.
    """

    status = 400
    model_id = ""
    seq_id = 0


class BadRequestError(RequestError, ValueError):
    """A field is missing, of the wrong type, out of range or contradicts another."""

    status = 422


class UnknownKeyError(RequestError):
    """No API key, or one that this server does not know."""

    status = 401


class NameRefusedError(RequestError):
    """A request to a name that is none of this server's."""

    status = 403


class UnknownError(RequestError, LookupError):
    """There is no such thing, or it is another owner's, which is the same answer."""

    status = 404


class LostError(RequestError):
    """A request whose outcome this server does not know any more; the sentence says whether to send it again."""

    status = 410


class TooLargeError(RequestError):
    """A body, or what it unpacks to, exceeds the limit."""

    status = 413


class SlowBodyError(RequestError):
    """A body that arrives too slowly to be waited for; clients send it again."""

    status = 408


class OverLimitError(OffbeatError):
    """An owner has too much under way; the same request will be taken later."""

    status = 429

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def outside(sentence: str, *, name: str) -> str:
    """A sentence for the client whose request is called `name`, if it shows nothing of where and how this server keeps things.

    The last line of defence: what an error says is chosen where it is explained.
    """
    if _INSIDES.search(sentence):
        return f"the server cannot do this; its log has the reason under {name}"
    return sentence
