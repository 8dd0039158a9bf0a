"""The versions that an engine holds."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from offbeat.engine.forward import fingerprint_tensors
from offbeat.engine.server import EngineServer
from offbeat.engine.versions import VersionSource, VersionStore, read_version, receive_weights
from offbeat.errors import EngineError, ModelError, RefusedError
from offbeat.model.changes_io import smaller_changes, write_changes
from offbeat.model.hf_io import read_safetensors
from offbeat.sync import broadcast
from offbeat.sync.weight_broadcast import Changes, WeightBroadcast
from small_run import build_small_model


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


CPU = torch.device("cpu")


@pytest.mark.parametrize("is_reached", [True, False])
def test_a_version_that_was_offered_is_served(start_engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_reached: bool) -> None:
    server: EngineServer = start_engine()[0]
    newer = dict(read_safetensors(build_small_model(tmp_path / "newer", seed=2)))
    wanted = fingerprint_tensors(newer)
    monkeypatch.setattr(broadcast, "count", lambda: iter([0 if is_reached else 2]))  # the second has failed before
    folder = tmp_path / "v1"
    offer = WeightBroadcast(
        newer, host="127.0.0.1", num_receivers=1, timeout_s=20, write_folder=lambda _: (tmp_path / "newer").rename(folder) and None)
    try:
        server._loop.hold_version(1, VersionSource(str(folder)), offer.address)
        assert folder.exists() != is_reached
        server._loop.call(lambda: server._engine.switch(1, "recompute")).result(10).result(10)
        assert server._engine.fingerprinter()[1]() == wanted
        server._loop.hold_version(1, VersionSource(str(folder)), "127.0.0.1:1")  # once it is there, it is not received again
    finally:
        offer.close()


@pytest.mark.parametrize("is_at_base", [True, False])
def test_an_engine_at_the_version_before_receives_no_more_than_what_has_changed(
    start_engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_at_base: bool,
) -> None:
    server: EngineServer = start_engine()[0]
    versions = [dict(read_safetensors(build_small_model(tmp_path / f"v{seed}", seed=seed))) for seed in (1, 2)]
    versions[1] |= {name: tensor for name, tensor in versions[0].items() if not name.endswith("q_proj.weight")}
    for name, tensor in versions[1].items():
        if name.endswith("q_proj.weight"):
            versions[1][name] = versions[0][name].clone()
            versions[1][name][1, 2] = tensor[1, 2]
    received: list[int] = []
    original = broadcast.BroadcastGroup.broadcast

    def counting(group: broadcast.BroadcastGroup, tensors: list[torch.Tensor], *, device: torch.device) -> None:
        received.append(sum(tensor.nbytes for tensor in tensors))
        original(group, tensors, device=device)

    monkeypatch.setattr(broadcast.BroadcastGroup, "broadcast", counting)
    base = tmp_path / "base"
    (tmp_path / "v1").rename(base)
    server._loop.hold_version(0, VersionSource(str(base)))
    server._loop.call(lambda: server._engine.switch(0, "recompute")).result(10).result(10)
    found = smaller_changes(versions[1], since=versions[0])
    assert found is not None
    offer = WeightBroadcast(
        versions[1], host="127.0.0.1", num_receivers=1, timeout_s=20, write_folder=lambda _: None,
        changes=Changes(str(base if is_at_base else tmp_path / "other"), found))
    try:
        server._loop.hold_version(1, VersionSource(str(tmp_path / "v2")), offer.address)
        server._loop.call(lambda: server._engine.switch(1, "recompute")).result(10).result(10)
        assert server._engine.fingerprinter()[1]() == fingerprint_tensors(versions[1])
        whole = sum(tensor.nbytes for tensor in versions[1].values())
        assert received == [offer.changes_bytes if is_at_base else whole] * 2, "both ends are in this process"
    finally:
        offer.close()


def test_weights_that_are_not_what_changes_are_to_are_received_whole() -> None:
    state = {"a": torch.arange(100.0)}
    found = smaller_changes(state, since={"a": torch.arange(100.0).clamp(max=98)})
    assert found is not None
    offer = WeightBroadcast(
        state, host="127.0.0.1", num_receivers=1, timeout_s=20, write_folder=lambda _: None, changes=Changes("base", found))
    try:
        for live in ({"a": torch.arange(100.0).clamp(max=98)}, {"a": torch.zeros(100)}, {"a": torch.zeros(3)}, {}):
            before = {name: tensor.clone() for name, tensor in live.items()}
            received = receive_weights(offer.address, device=CPU, live="base", tensors=lambda live=live: live)
            assert received is not None and torch.equal(received["a"], state["a"])
            assert all(torch.equal(live[name], tensor) for name, tensor in before.items())
        assert offer._num_rounds == 7
    finally:
        offer.close()


def test_an_offer_that_is_gone_is_an_error_of_the_engine() -> None:
    offer = WeightBroadcast({"a": torch.ones(3)}, host="127.0.0.1", num_receivers=1, timeout_s=10, write_folder=lambda _: None)
    offer.close()
    offer._thread.join(10)
    with pytest.raises(EngineError, match=rf"weights could not be received from {offer.address}: .*refused"):
        receive_weights(offer.address, device=CPU)
