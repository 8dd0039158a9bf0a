"""The engine's side of a weight broadcast. Called by `versions` on a thread beside the engine's, which keeps decoding."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from offbeat.errors import EngineError, first_line
from offbeat.model.changes import ChangesError, apply_changes
from offbeat.sync.broadcast import Held, receive


def receive_weights(
    address: str, *, device: torch.device, live: str = "", tensors: Callable[[], Mapping[str, Tensor]] = dict,
) -> dict[str, Tensor] | None:
    """Receive weights offered at `address`; see `offbeat.sync.broadcast.receive`. Raises EngineError if they were not received.

    Args:
        live: folder of the weights in use, to which changes are enough; empty if whole weights are wanted.
        tensors: returns the weights in use by their published names, such as "lm_head.weight" [V, H]; they are not modified.
    """
    def change(changes: dict[str, Tensor]) -> dict[str, Tensor] | None:
        state = dict(tensors())
        try:
            apply_changes(state, changes)
        except ChangesError:  # the weights in use differ from the published ones
            return None
        return state

    try:
        return receive(address, device=device, held=Held(live, change) if live else None)
    except (OSError, RuntimeError, ValueError) as exc:
        raise EngineError(f"weights could not be received from {address}: {first_line(exc)}") from exc
