"""A checkpoint of an adapter comes back bit by bit, is replaced as a whole, and says what is wrong with it."""

import pytest
import torch
from safetensors.torch import save_file

from offbeat.errors import StorageError
from offbeat.model.peft_io import Adapter
from offbeat.trainer.adapter_files import FILE, AdapterState, read_adapter_state, write_adapter_state

HEADER = {"step": "1", "rank": "1", "scaling": "1.0"}


def random_adapter(seed):
    generator = torch.Generator().manual_seed(seed)

    def pair():
        return torch.randn(2, 5, generator=generator), torch.randn(3, 2, generator=generator)

    return Adapter(2, 1.7 / 3, {f"model.layers.{i}.mlp.up_proj": pair() for i in range(2)})


def make_state(seed=0, step=7):
    return AdapterState(step, *(random_adapter(seed + i) for i in range(3)))


def are_equal(one, other):
    return one.step == other.step and all(
        getattr(one, name).rank == getattr(other, name).rank and getattr(one, name).scaling == getattr(other, name).scaling
        and getattr(one, name).fingerprint() == getattr(other, name).fingerprint() for name in ("weights", "exp_avg", "exp_avg_sq"))


def test_a_checkpoint_comes_back_as_it_was_and_can_be_replaced(tmp_path):
    folder = tmp_path / "runs" / "alice"
    for state in (make_state(), make_state(seed=3, step=8)):
        write_adapter_state(state, folder)
        assert are_equal(read_adapter_state(folder), state)
    assert [path.name for path in folder.parent.iterdir()] == ["alice"]


def test_what_cannot_be_written_leaves_what_was_there(tmp_path):
    folder = tmp_path / "alice"
    write_adapter_state(make_state(), folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="could not be written"):
        write_adapter_state(make_state(), tmp_path / "file" / "alice")
    assert are_equal(read_adapter_state(folder), make_state())


def test_folders_that_are_no_checkpoints_are_refused(tmp_path):
    for name, tensors, about in (
        ("nothing", None, None), ("text", "hello", None), ("names", {"weights.x.C": torch.zeros(1)}, {}), ("about", {}, {"step": "1"}),
        ("side", {"weights.x.A": torch.zeros(1, 1)}, HEADER),
        ("moment", {"weights.x.A": torch.zeros(1, 1), "weights.x.B": torch.zeros(1, 1)}, HEADER),
        ("rank", {f"{part}.x.{side}": torch.zeros(2, 2) for part in ("weights", "exp_avg", "exp_avg_sq") for side in "AB"}, HEADER),
    ):
        (tmp_path / name).mkdir()
        if isinstance(tensors, str):
            (tmp_path / name / FILE).write_text(tensors)
        elif tensors is not None:
            save_file(tensors, tmp_path / name / FILE, metadata=about)
        with pytest.raises(StorageError, match=f"{name} is not a checkpoint of an adapter, or it is damaged"):
            read_adapter_state(tmp_path / name)
