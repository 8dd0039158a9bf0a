"""The bytes of a model's parameters, to compare with fingerprints and with what was written."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn


def named_bytes(model: nn.Module) -> Iterator[tuple[str, np.ndarray]]:
    """(Hugging Face name, [bytes] uint8) of each parameter of a model, bare or inside DDP; tied ones appear once."""
    for name, parameter in getattr(model, "module", model).named_parameters():
        yield name, parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
