"""An engine that is offered a version serves what it received, or what it read where the sender said so."""

from pathlib import Path

import pytest
import torch

from offbeat.engine.receive import receive_weights
from offbeat.engine.server import EngineServer
from offbeat.engine.versions import Source, fingerprint_tensors
from offbeat.errors import EngineError
from offbeat.model.hf_io import read_safetensors
from offbeat.sync import broadcast
from offbeat.sync.offer import WeightBroadcast
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
        server._loop.stage(1, Source(str(folder)), offer.address)
        assert folder.exists() != is_reached
        server._loop.call(lambda: server._engine.switch(1, "recompute")).result(10).result(10)
        assert fingerprint_tensors(server._engine.weights()[1]) == wanted
        server._loop.stage(1, Source(str(folder)), "127.0.0.1:1")  # once it is there, it is not received again
    finally:
        offer.close()


def test_an_offer_that_is_gone_is_an_error_of_the_engine() -> None:
    offer = WeightBroadcast({"a": torch.ones(3)}, host="127.0.0.1", num_receivers=1, timeout_s=10, write_folder=lambda _: None)
    offer.close()
    offer._thread.join(10)
    with pytest.raises(EngineError, match=rf"weights could not be received from {offer.address}: .*refused"):
        receive_weights(offer.address, device=CPU)
