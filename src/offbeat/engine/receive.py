"""The engine's side of a weight broadcast. Called by `versions` on a thread beside the engine's, which keeps decoding."""

import torch
from torch import Tensor

from offbeat.errors import EngineError, first_line
from offbeat.sync.broadcast import receive


def receive_weights(address: str, *, device: torch.device) -> dict[str, Tensor] | None:
    """Receive weights offered at `address`; see `offbeat.sync.broadcast.receive`.

    Raises:
        EngineError: the weights were not received; the message says why.
    """
    try:
        return receive(address, device=device)
    except (OSError, RuntimeError, ValueError) as exc:
        raise EngineError(f"weights could not be received from {address}: {first_line(exc)}") from exc
