"""An engine that is offered a version serves what it received, or what it read where the sender said so."""

from pathlib import Path

import pytest
import torch

from offbeat.engine.forward import fingerprint_tensors
from offbeat.engine.receive import receive_weights
from offbeat.engine.server import EngineServer
from offbeat.engine.versions import VersionSource
from offbeat.errors import EngineError
from offbeat.model.changes_io import smaller_changes
from offbeat.model.hf_io import read_safetensors
from offbeat.sync import broadcast
from offbeat.sync.weight_broadcast import Changes, WeightBroadcast
from small_run import build_small_model

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
