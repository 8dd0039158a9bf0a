"""A model's parameters as named bytes, for fingerprints and for engines that take raw weights."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn


def named_bytes(model: nn.Module) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (Hugging Face name, [bytes] uint8) of each parameter; tied ones appear once.

    Args:
        model: the bare model or one inside DDP, with whole parameters, not shards.

    Returns:
        On a CPU, views of the live weights, which change as the model trains; elsewhere copies.
    """
    bare = getattr(model, "module", model)
    for name, parameter in bare.named_parameters():
        yield name, parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
