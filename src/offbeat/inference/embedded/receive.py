"""The engine's side of weights by broadcast. Called by `versions` on a thread beside the engine's, which goes on decoding."""

import torch
from torch import Tensor

from offbeat.dist.broadcast import receive
from offbeat.errors import EngineError, first_line


def receive_weights(address: str, *, device: torch.device) -> dict[str, Tensor] | None:
    """See `offbeat.dist.broadcast.receive`.

    Raises:
        EngineError: the weights were not received; says why.
    """
    try:
        return receive(address, device=device)
    except (OSError, RuntimeError, ValueError) as exc:
        raise EngineError(f"weights could not be received from {address}: {first_line(exc)}") from exc
