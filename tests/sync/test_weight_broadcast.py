"""One version to many receivers: those who come together, late, die in the middle, never show up in their group, or fail for good."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.sync import broadcast
from offbeat.sync.broadcast import Held, receive
from offbeat.sync.weight_broadcast import Changes, WeightBroadcast
from small_run import ENVIRONMENT
from waiting import wait_until

CPU = torch.device("cpu")
DIES_AFTER_ONE_BUCKET = """
import os, sys, torch
from offbeat.sync import broadcast
broadcast.BUCKET_BYTES = 1000
torch.Tensor.copy_ = lambda self, received: os._exit(9)  # it has one bucket and was sent more
broadcast.receive(sys.argv[1], device=torch.device("cpu"))
"""


def make_state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"a": torch.randn(50, 40, generator=generator), "b": torch.randn(3, generator=generator).bfloat16(), "c": torch.arange(5)}


def same(received: dict[str, Tensor] | None) -> bool:
    return received is not None and all(torch.equal(received[name], tensor) for name, tensor in make_state().items())


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch):
    """Makes offers in buckets of 1000 bytes; all are closed with the test."""
    monkeypatch.setattr(broadcast, "BUCKET_BYTES", 1000)
    offers: list[WeightBroadcast] = []

    def make(
        num_receivers: int, *, timeout_s: float = 40, write_folder: Callable[[dict[str, Tensor]], None] = lambda _: None,
        changes: Changes | None = None,
    ) -> WeightBroadcast:
        offers.append(WeightBroadcast(
            make_state(), host="127.0.0.1", num_receivers=num_receivers, timeout_s=timeout_s, write_folder=write_folder, changes=changes))
        return offers[-1]

    yield make
    for one in offers:
        one.close()
        one._thread.join(20)
        assert not one._thread.is_alive()


def arrive(address: str, *, attempt: int = 0) -> tuple[dist.TCPStore, int]:
    """Come to an offer, and do nothing more."""
    host, port = address.split(":")
    store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    number = store.add("arrivals", 1)
    store.set(f"arrival/{number}", json.dumps({"attempt": attempt, "device": ""}))
    return store, number


def test_all_who_are_expected_share_one_round_and_others_get_their_own(offer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.sync.weight_broadcast._QUIET_S", 60.0)
    made = offer(3)
    with ThreadPoolExecutor(3) as pool:
        received = list(pool.map(lambda _: receive(made.address, device=CPU), range(3)))
    assert all(map(same, received)) and made._num_rounds == 1
    assert same(receive(made.address, device=CPU))
    assert made._num_rounds == 2


def test_one_who_never_comes_is_not_waited_for(offer) -> None:
    assert same(receive(offer(3).address, device=CPU))


CHANGES = Changes("v6", {"at:a": torch.tensor([3], dtype=torch.uint8), "to:a": torch.ones(1)})


def holding(name: str, *, fits: bool = True, seen: list[dict[str, Tensor]] | None = None) -> Held:
    def change(changes: dict[str, Tensor]) -> dict[str, Tensor] | None:
        if seen is not None:
            seen.append(changes)
        return make_state() if fits else None

    return Held(name, change)


def test_who_has_the_version_before_gets_what_has_changed_and_others_the_whole(offer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.sync.weight_broadcast._QUIET_S", 60.0)  # all three come before a round begins
    made, seen = offer(3, changes=CHANGES), list[dict[str, Tensor]]()
    assert made.changes_bytes == 5 and offer(1).changes_bytes == 0 and offer(1, changes=Changes("v6", {})).changes_bytes == 1
    held = [holding("v6", seen=seen), holding("v6", seen=seen), holding("v5", seen=seen)]
    with ThreadPoolExecutor(3) as pool:
        received = list(pool.map(lambda one: receive(made.address, device=CPU, held=one), held))
    assert all(map(same, received)) and made._num_rounds == 2
    assert len(seen) == 2 and all(changes.keys() == CHANGES.tensors.keys() for changes in seen)
    assert all(torch.equal(changes[name], tensor) for changes in seen for name, tensor in CHANGES.tensors.items())


def test_changes_that_do_not_fit_are_followed_by_the_whole(offer) -> None:
    made = offer(1, changes=CHANGES)
    assert same(receive(made.address, device=CPU, held=holding("v6", fits=False))) and made._num_rounds == 2
    assert same(receive(offer(1, changes=Changes("v6", {})).address, device=CPU, held=holding("v6")))


def test_a_receiver_that_dies_in_the_middle_leaves_the_others_served(offer) -> None:
    made = offer(3)
    dying = subprocess.Popen([sys.executable, "-c", DIES_AFTER_ONE_BUCKET, made.address], env=os.environ | ENVIRONMENT)
    try:
        wait_until(lambda: made._num_arrivals == 1, timeout_s=60)
        with ThreadPoolExecutor(2) as pool:
            assert all(map(same, pool.map(lambda _: receive(made.address, device=CPU), range(2))))
        assert dying.wait(30) == 9 and made._num_rounds >= 2
    finally:
        dying.kill()


def test_a_receiver_that_hangs_before_its_group_leaves_the_others_served(offer) -> None:
    made = offer(2, timeout_s=20)  # a quarter of it for the round that hangs, and as much for the next one on a busy machine
    hanging = arrive(made.address)
    assert same(receive(made.address, device=CPU))
    assert made._num_rounds == 2
    del hanging


def test_whoever_has_failed_twice_reads_the_folder_which_is_written_once(offer) -> None:
    written: list[dict[str, Tensor]] = []
    made = offer(2, write_folder=written.append)
    for store, number in [arrive(made.address, attempt=2) for _ in range(2)]:
        store.wait([f"ticket/{number}"], timedelta(seconds=30))
        assert json.loads(store.get(f"ticket/{number}")) == {}
    assert len(written) == 1 and same(written[0])


def test_a_group_that_breaks_every_time_ends_in_the_folder(offer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the network lost it")

    monkeypatch.setattr(broadcast.BroadcastGroup, "broadcast", fail)
    written: list[dict[str, Tensor]] = []
    made = offer(1, write_folder=written.append)
    assert receive(made.address, device=CPU) is None
    assert made._num_rounds == 2 and len(written) == 1


def test_a_folder_that_cannot_be_written_is_what_the_receiver_hears(offer, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(_: dict[str, Tensor]) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(broadcast, "count", lambda: iter([2]))
    made = offer(1, write_folder=no_space)
    with pytest.raises(RuntimeError, match="the broadcast broke 2 times, and then OSError: no space left"):
        receive(made.address, device=CPU)


def test_who_waits_hears_at_once_that_an_offer_was_closed(offer) -> None:
    made = offer(2)
    errors: list[RuntimeError] = []

    def come() -> None:
        try:
            receive(made.address, device=CPU)
        except RuntimeError as exc:
            errors.append(exc)

    thread = threading.Thread(target=come)
    thread.start()
    wait_until(lambda: made._num_arrivals, timeout_s=30)
    made.close()
    thread.join(30)
    assert len(errors) == 1


@pytest.mark.parametrize(("own", "theirs", "place"), [
    ("gpu-0", ["gpu-1", "gpu-2"], "cuda"), ("gpu-0", ["gpu-1", "gpu-1"], "cpu"), ("gpu-0", ["gpu-0"], "cpu"),
    ("gpu-0", ["gpu-1", ""], "cpu"), ("", ["gpu-1"], "cpu"),
])
def test_a_group_meets_on_accelerators_if_everyone_has_its_own(
    offer, monkeypatch: pytest.MonkeyPatch, own: str, theirs: list[str], place: str,
) -> None:
    made = offer(1)
    made._device = torch.device("cuda", 0)
    monkeypatch.setattr("offbeat.sync.weight_broadcast.device_name", lambda _: own)
    assert made._meeting_device(theirs).type == place
