"""Changes of weights that are made whole for vLLM's workers; `tests/engines` has a real vLLM load them."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from offbeat.engine.forward import fingerprint_tensors
from offbeat.model.changes import FILE
from offbeat.model.changes_io import find_changes, write_changes
from offbeat.sync.broadcast import BroadcastGroup
from offbeat.sync.weight_broadcast import Changes, WeightBroadcast

States = list[dict[str, Tensor]]


@pytest.fixture
def states(tmp_path: Path) -> States:
    """Three versions in folders v0, which is whole, v1 and v2; `still` never changes."""
    found = [{"few": torch.randn(60, 50).bfloat16(), "all": torch.randn(40), "still": torch.randn(40)}]
    for version in (1, 2):
        few = found[-1]["few"].clone()
        few[version, 3] += 1
        found.append({"few": few, "all": found[-1]["all"] + 1, "still": found[-1]["still"]})
    (tmp_path / "v0").mkdir()
    save_file(found[0], tmp_path / "v0" / "model.safetensors")
    for version in (1, 2):
        assert write_changes(found[version], tmp_path / f"v{version}", since=found[version - 1], base=tmp_path / f"v{version - 1}")
    return found


def module() -> Any:
    return importlib.import_module("vllm_weights")


def held(folder: Path, state: dict[str, Tensor]) -> Any:
    return module().Weights(str(folder), "", True, importlib.import_module("vllm_files").MemoryFile(dict(state)))


def obtain(folder: Path, state: dict[str, Tensor], held: Any = None, *, broadcast: str = "") -> dict[str, Tensor]:
    """What workers would read."""
    weights = module().obtain(str(folder), fingerprint_tensors(state), broadcast=broadcast, keep=True, held=held)
    (file,) = weights.files
    return load_file(file)


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_changes_of_what_is_served_are_all_that_is_read_of_them(tmp_path: Path, states: States) -> None:
    (tmp_path / "v0" / "model.safetensors").rename(tmp_path / "away")
    served = held(tmp_path / "v1", states[1])
    assert same(obtain(tmp_path / "v2", states[2], served), states[2])
    assert same(load_file(served.files[0]), states[1]), "what is served stays as it is"
    (tmp_path / "away").rename(tmp_path / "v0" / "model.safetensors")
    whole = module().obtain(str(tmp_path / "v0"), "", broadcast="", keep=True, held=served)
    assert whole.memory is None and same(obtain(tmp_path / "v1", states[1], whole), states[1])


def test_whoever_is_behind_reads_the_last_whole_version_and_all_changes_since(tmp_path: Path, states: States) -> None:
    for base in (None, held(tmp_path / "other", states[1]), held(tmp_path / "v0", states[0])):
        assert same(obtain(tmp_path / "v2", states[2], base), states[2])


def changed_in(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda state: state | {name: state[name].clone().index_fill_(0, torch.tensor([20]), 9.0)}


@pytest.mark.parametrize("spoil", [changed_in("few"), changed_in("still"), lambda state: {"all": state["all"]}])
def test_what_is_served_and_is_not_what_it_should_be_is_left_alone(
    tmp_path: Path, states: States, spoil: Callable[[dict[str, Tensor]], dict[str, Tensor]],
) -> None:
    wrong = held(tmp_path / "v1", spoil(states[1]))
    assert same(obtain(tmp_path / "v2", states[2], wrong), states[2])
    (tmp_path / "v0" / "model.safetensors").unlink()
    refused = importlib.import_module("vllm_files").RefusedError
    with pytest.raises(refused, match=r"v2 cannot be read: .*v0 holds no \*\.safetensors file that can be read here"):
        obtain(tmp_path / "v2", states[2], wrong)


def test_folders_that_are_damaged_or_give_other_weights_are_refused(tmp_path: Path, states: States) -> None:
    refused = importlib.import_module("vllm_files").RefusedError
    with pytest.raises(refused, match=r"v2 cannot be read: with what they build on, its changes have fingerprint \w{32} instead of"):
        obtain(tmp_path / "v2", states[1])
    whole = (tmp_path / "v0" / "model.safetensors").read_bytes()
    (tmp_path / "v0" / "model.safetensors").write_bytes(whole[:-5])
    with pytest.raises(refused, match=r"v2 cannot be read: .*v0/model\.safetensors is not a complete safetensors file"):
        obtain(tmp_path / "v2", states[2])
    (tmp_path / "v0" / "model.safetensors").write_bytes(whole.replace(b'"F32"', b'"F16"', 1))
    with pytest.raises(refused, match="v2 cannot be read: .*header"):
        obtain(tmp_path / "v2", states[2])
    for damage, error in ((b"", "cannot be read as safetensors"), ((tmp_path / "v1" / FILE).read_bytes()[:-30], "cannot be read")):
        (tmp_path / "v2" / FILE).write_bytes(damage)
        with pytest.raises(refused, match=rf"v2/changes\.safetensors {error}"):
            obtain(tmp_path / "v2", states[2], held(tmp_path / "v1", states[1]))


@pytest.mark.parametrize(("base", "spoil", "sent"), [
    ("v1", dict, ["changes"]), ("v0", dict, ["whole"]), ("gone", dict, ["whole"]), ("v1", changed_in("few"), ["changes", "whole"]),
    ("v1", changed_in("still"), ["changes", "whole"])])
def test_changes_are_received_by_whoever_has_what_they_build_on_and_whole_weights_by_all_others(
    tmp_path: Path, states: States, monkeypatch: pytest.MonkeyPatch, base: str,
    spoil: Callable[[dict[str, Tensor]], dict[str, Tensor]], sent: list[str],
) -> None:
    found = find_changes(states[2], since=states[1])
    assert found is not None
    sizes = {"changes": sum(tensor.nbytes for tensor in found.values()), "whole": sum(tensor.nbytes for tensor in states[2].values())}
    counted: list[int] = []
    original = BroadcastGroup.broadcast

    def counting(group: BroadcastGroup, tensors: list[Tensor], *, device: torch.device) -> None:
        counted.append(sum(tensor.nbytes for tensor in tensors))
        original(group, tensors, device=device)

    monkeypatch.setattr(BroadcastGroup, "broadcast", counting)  # of the sender; the receiver has loaded its own
    served = held(tmp_path / base, spoil(states[1])) if base != "gone" else module().Weights(str(tmp_path / base), "")
    offer = WeightBroadcast(
        states[2], host="127.0.0.1", num_receivers=1, timeout_s=20, write_folder=lambda _: None,
        changes=Changes(str(tmp_path / ("gone" if base == "gone" else "v1")), found))
    try:
        assert same(obtain(tmp_path / "v2", states[2], served, broadcast=offer.address), states[2])
    finally:
        offer.close()
    assert counted == [sizes[what] for what in sent]


def test_memory_is_kept_where_it_is_wanted_and_a_folder_needs_none(tmp_path: Path, states: States) -> None:
    weights = module().Weights
    memory = importlib.import_module("vllm_files").MemoryFile(dict(states[0]))
    kept, given_back, whole = weights("a", "", True, memory), weights("a", "", False, memory), weights(str(tmp_path / "v0"), "")
    assert kept.lasting() is kept and given_back.lasting() is None and whole.lasting() is whole
    assert whole.files == [tmp_path / "v0" / "model.safetensors"] and kept.files == [memory.path]
