"""What a pass gives to its device arrives whole, and nothing waits for it."""

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import Tensor

from offbeat.model.uploads import upload
from waits import DEVICE, HostWaits


def test_on_a_cpu_an_array_is_the_tensor() -> None:
    array = np.arange(3)
    tensor = upload(array, "cpu")
    array[0] = 7
    assert tensor.tolist() == [7, 1, 2]
    assert upload(tensor, torch.device("cpu")) is tensor


def test_nothing_waits_for_a_copy_to_a_device() -> None:
    with HostWaits() as waits:
        assert upload(np.zeros((2, 3), np.float32), DEVICE).shape == (2, 3)
        assert waits.found == []
        torch.zeros(3).to(DEVICE)
        assert waits.found == ["elsewhere aten._to_copy.default (3,)"]


@pytest.mark.parametrize("reads", [
    lambda x: x.max().item(), lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: x.unique(), lambda x: x.to("cpu")])
def test_what_reads_values_of_the_device_is_found(reads: Callable[[Tensor], object]) -> None:
    with HostWaits() as waits:
        with suppress(RuntimeError, NotImplementedError):  # there are no values
            reads(torch.zeros(3, device=DEVICE))
            assert waits.found
