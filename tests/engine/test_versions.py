"""The versions that an engine holds."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from offbeat.engine.versions import VersionSource, VersionStore, read_version
from offbeat.errors import ModelError, RefusedError
from offbeat.model.changes_io import write_changes


def test_a_version_is_staged_then_live_and_others_that_are_staged_are_dropped() -> None:
    store = VersionStore(live=0, folder="v0")
    assert store.has(0, VersionSource("v0")) and not store.has(1, VersionSource("v1"))
    for version in (1, 2, 3):
        store.add(version, VersionSource(f"v{version}"), f"weights {version}")
    store.check_staged(2)
    assert store.make_live(2) == "weights 2"
    assert store.has(2, VersionSource("v2")) and not store.has(1, VersionSource("v1")) and not store.has(3, VersionSource("v3"))
    with pytest.raises(RefusedError, match=r"version 1 is not staged; staged are \[\] and 2 is live"):
        store.check_staged(1)


def test_a_number_that_comes_again_with_other_weights_is_another_version() -> None:
    store = VersionStore(live=0, folder="v0")
    store.add(1, VersionSource("v1", "lost"), "lost weights")
    for other in (VersionSource("v1", "new"), VersionSource("v1-b", "lost")):
        assert not store.has(1, other)
        store.add(1, other, f"weights of {other}")
        assert store.has(1, other) and not store.has(1, VersionSource("v1", "lost"))
    assert store.make_live(1) == f"weights of {other}"
    assert store.has(1, other) and not store.is_staged(1)
    store.add(1, VersionSource("v1-c"), "again")
    assert not store.has(1, other)  # what is live is about to be replaced
    assert store.make_live(1) == "again"


class Serving:
    """A forward path that has weights, and prepares others by taking them as they are."""

    takes_changes = True

    def __init__(self, live: dict[str, Tensor]) -> None:
        self.live = live
        self.num_looks = 0

    def tensors(self) -> dict[str, Tensor]:
        self.num_looks += 1
        return self.live

    def installed(self) -> dict[str, Tensor]:
        return self.live

    def prepare(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return state


def test_the_folder_that_is_live_is_not_read_again(tmp_path: Path) -> None:
    serving = Serving({"a": torch.zeros(3)})
    assert read_version(serving, f"{tmp_path}/model/", live=str(tmp_path / "model")) is serving.live
    with pytest.raises(ModelError):
        read_version(serving, str(tmp_path / "model"), live=str(tmp_path / "other"))


def test_a_folder_that_is_a_version_may_hold_another_one_by_now_and_is_read_again() -> None:
    started, published = VersionStore(live=-1, folder="/models/a"), VersionStore(live=3, folder="/models/a")
    assert started.base_for("/models/a/") == started.base_for("/models/b") == published.base_for("/models/b") == "/models/a"
    assert published.base_for("/models/a/") == ""


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("behind", [False, True])
def test_changes_are_applied_to_what_is_live_or_to_what_they_build_on(tmp_path: Path, damaged: bool, behind: bool) -> None:
    old = {"a": torch.randn(1000), "b": torch.randn(10)}
    new = old | {"a": old["a"].clone()}
    new["a"][17] += 1
    (tmp_path / "v0").mkdir()
    save_file(old, tmp_path / "v0" / "model.safetensors")
    assert write_changes(new, tmp_path / "v1", since=old, base=tmp_path / "v0")
    live = {name: tensor.clone() for name, tensor in old.items()}
    if damaged:
        live["a"][500] = 7.0
    serving = Serving(live)
    found = read_version(serving, str(tmp_path / "v1"), live=str(tmp_path / ("elsewhere" if behind else "v0")))
    assert all(torch.equal(found[name], new[name]) for name in new) and serving.num_looks == (not behind)
    if not damaged and not behind:
        (tmp_path / "v0" / "model.safetensors").unlink()
        assert torch.equal(read_version(serving, str(tmp_path / "v1"), live=str(tmp_path / "v0"))["a"], new["a"])
