"""Folders of changes: what they give, whatever wrote them, and what is noticed in those that are damaged or of something else."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from offbeat.errors import ModelError, StorageError
from offbeat.model.changes import FILE, base_of
from offbeat.model.changes_io import changes_file, find_changes, read_weights, save_changes, write_changes


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def states() -> list[dict[str, Tensor]]:
    """Three versions: few elements of `few` change, all of `all`, none of `none`."""
    few, every, none = torch.randn(50, 40).bfloat16(), torch.randn(300).bfloat16(), torch.randn(7)
    found = []
    for version in range(3):
        few, every = few.clone(), every + 1
        few[version, 3] += 1
        found.append({"few": few, "all": every, "none": none})
    return found


def write_all(root: Path, found: list[dict[str, Tensor]]) -> list[Path]:
    """The first one whole, the others as changes."""
    folders = [root / f"v{version}" for version in range(len(found))]
    folders[0].mkdir()
    save_file(found[0], folders[0] / "model.safetensors")
    for version in range(1, len(found)):
        written = write_changes(found[version], folders[version], since=found[version - 1], base=folders[version - 1])
        assert 0 < written < sum(tensor.nbytes for tensor in found[version].values())
    return folders


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(bits(found[name]) == bits(wanted[name]) for name in wanted)


def test_a_chain_of_folders_gives_each_version_and_holds_only_what_has_changed(tmp_path: Path) -> None:
    found = states()
    folders = write_all(tmp_path, found)
    for folder, state in zip(folders, found, strict=True):
        assert same(read_weights(folder), state)
    assert sorted(load_file(folders[1] / FILE)) == ["at:few", "sum:few", "to:few", "whole:all"]
    assert base_of(folders[2]) == folders[1] and base_of(folders[0]) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v0", "v1", "v2"]


def test_whoever_has_the_base_reads_no_more_than_the_changes_and_keeps_the_base_as_it_is(tmp_path: Path) -> None:
    found = states()
    folders = write_all(tmp_path, found)
    (folders[0] / "model.safetensors").unlink()
    before = {name: tensor.clone() for name, tensor in found[1].items()}
    held = {folders[1]: found[1]}.get
    assert same(read_weights(folders[2], held=held), found[2]) and same(found[1], before)
    with pytest.raises(ModelError, match=r"v0 holds no model\.safetensors"):
        read_weights(folders[2], held=lambda folder: {"none": found[1]["none"]} if folder == folders[1] else None)


def test_changes_are_of_no_use_on_other_weights_than_their_base(tmp_path: Path) -> None:
    found = states()
    folders = write_all(tmp_path, found)
    stale = dict(found[1])
    stale["few"] = found[1]["few"].clone()
    stale["few"][40, 7] = 5.0
    with pytest.raises(ModelError, match="changes of 'few' that do not fit"):
        read_weights(folders[2], held={folders[1]: stale}.get)
    with pytest.raises(ModelError, match="do not fit a tensor of 300 elements"):
        read_weights(folders[2], held={folders[1]: {**found[1], "few": torch.zeros(300)}}.get)


def test_what_is_not_smaller_is_not_written_as_changes(tmp_path: Path) -> None:
    old = {"a": torch.zeros(1000)}
    assert write_changes({"a": torch.ones(1000)}, tmp_path / "v1", since=old, base=tmp_path / "v0") == 0
    assert write_changes({"a": old["a"], "b": old["a"]}, tmp_path / "v1", since=old, base=tmp_path / "v0") == 0
    assert write_changes(old, tmp_path / "v1", since=old, base=tmp_path / "v0") == 1, "no change at all is a version, too"
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]


def test_a_version_is_written_once_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    old = {"a": torch.zeros(1000)}
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "here").touch()
    with pytest.raises(StorageError, match="could not be written to .*v1"):
        write_changes(old, tmp_path / "v1", since=old, base=tmp_path / "v0")
    assert [path.name for path in tmp_path.rglob("*")] == ["v1", "here"]


def test_changes_may_be_in_several_files_none_of_which_may_be_missing(tmp_path: Path) -> None:
    found = states()
    folders = write_all(tmp_path, found)
    (folders[1] / FILE).unlink()
    for number, names in enumerate((("few",), ("all", "none")), start=1):
        parts = [{name: state[name] for name in names} for state in found[:2]]
        changes = find_changes(parts[1], since=parts[0])
        assert changes is not None
        save_changes(changes, folders[1] / changes_file(number, 2), base=folders[0])
    assert same(read_weights(folders[2]), found[2]) and same(read_weights(folders[1], held={folders[0]: found[0]}.get), found[1])
    (folders[1] / changes_file(2, 2)).unlink()
    with pytest.raises(ModelError, match=r"v1 has 1 files of changes, and changes-00001-of-00002\.safetensors tells of others"):
        read_weights(folders[2])
    save_changes({}, folders[1] / changes_file(2, 2), base=folders[2])
    with pytest.raises(ModelError, match="which is not another folder beside it"):
        read_weights(folders[1])


@pytest.mark.parametrize("base", ["../v0", "", "..", "v1", "/etc"])
def test_a_base_is_another_folder_beside_it(tmp_path: Path, base: str) -> None:
    (tmp_path / "v1").mkdir()
    save_file({"at:a": torch.zeros(1)}, tmp_path / "v1" / FILE, metadata={"base": base})
    with pytest.raises(ModelError, match="which is not another folder beside it"):
        read_weights(tmp_path / "v1")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    folders = write_all(tmp_path, states())
    (folders[1] / FILE).write_bytes((folders[1] / FILE).read_bytes()[:100])
    with pytest.raises(ModelError, match=r"v1/changes\.safetensors cannot be read as safetensors"):
        read_weights(folders[2])
