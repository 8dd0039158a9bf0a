"""Changes of tensors: bit for bit what they were made from, and smaller where they can be; `test_changes_io.py` has those of folders."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbeat.model import changes
from offbeat.model.changes import ChangesError, apply, apply_changes, encode

SPECIAL = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-30]


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32), size=st.integers(0, 3000), share=st.sampled_from([0.0, 0.001, 0.01, 0.2, 0.9]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.int64]))
def test_changes_give_the_new_tensor_bit_for_bit(seed: int, size: int, share: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    old = (torch.randn(size, generator=generator) * 100).to(dtype)
    new = old.clone()
    at = (torch.rand(size, generator=generator) < share).nonzero().view(-1)
    values = torch.tensor(SPECIAL) if dtype.is_floating_point else torch.arange(6)
    new[at] = values[torch.randint(6, (len(at),), generator=generator)].to(dtype)
    found = encode(old, new)
    if found is None:
        assert size == 0 or share >= 0.2 or size < 200, "changes so few are smaller than the tensor"
        return
    steps, to = found
    assert steps.nbytes + to.nbytes < max(new.nbytes, 1)
    assert bits(apply(old, steps, to)) == bits(new)


def test_a_negative_zero_and_another_nan_are_changes() -> None:
    old = torch.zeros(100)
    new = old.clone()
    new[3] = -0.0
    new.view(torch.int32)[[50, 51]] = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32)
    found = encode(old, new)
    assert found is not None and found[0].tolist() == [4, 47, 1]
    assert bits(apply(old, *found)) == bits(new)


def test_changes_farther_apart_than_a_byte_can_say_name_elements_on_the_way() -> None:
    old = torch.zeros(2000, dtype=torch.bfloat16)
    new = old.clone()
    new[[254, 509, 1999]] = 1.0
    found = encode(old, new)
    assert found is not None
    assert found[0].tolist() == [255, 255, 255, 255, 255, 255, 255, 215]
    assert found[1].tolist() == [1, 1, 0, 0, 0, 0, 0, 1]


def test_another_shape_or_number_format_has_no_changes() -> None:
    assert encode(torch.zeros(4), torch.zeros(2, 2)) is None
    assert encode(torch.zeros(400), torch.zeros(400, dtype=torch.float64)) is None


def test_changes_of_something_else_are_noticed_and_what_they_were_applied_to_stays() -> None:
    old = {"a": torch.zeros(400), "b": torch.zeros(3)}
    steps, to = torch.tensor([7], dtype=torch.uint8), torch.ones(1)
    found = {"at:a": steps, "to:a": to, "sum:a": torch.tensor([0x3F800000])}
    state = dict(old)
    apply_changes(state, found)
    assert state["a"].nonzero().tolist() == [[6]] and not old["a"].any()
    for wrong, error in (
        ({"a": torch.ones(400)}, "changes of 'a' that do not fit"), ({"a": torch.zeros(3)}, "do not fit a tensor of 3 elements"),
        ({"b": old["b"]}, "a tensor that is not there: 'a'"), ({"a": torch.zeros(400).half()}, "torch.float32, do not fit"),
    ):
        with pytest.raises(ChangesError, match=error):
            apply_changes(dict(wrong), found)
    with pytest.raises(ChangesError, match="not there: 'sum:a'"):
        apply_changes(dict(old), {"at:a": steps, "to:a": to})


def test_what_other_engines_processes_load_by_its_path_needs_nothing_of_offbeat() -> None:
    code = f"import runpy, sys; runpy.run_path({str(Path(changes.__file__))!r}); sys.exit('offbeat' in sys.modules)"
    subprocess.run([sys.executable, "-I", "-c", code], check=True, timeout=60)
