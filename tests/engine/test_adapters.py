"""Which adapters an engine holds: immutable names, room, unloading."""

from types import SimpleNamespace

import pytest
import torch

from offbeat.engine.adapters import EngineAdapters, UnknownAdapterError
from offbeat.engine.lora import Linear
from offbeat.engine.options import EngineOptions
from offbeat.errors import BusyError, ModelError, RefusedError
from offbeat.model.peft_io import Adapter, write_adapter

FORWARD = SimpleNamespace(lora_groups={"out": (Linear("layers.0.out", 3, 4),)}, device=torch.device("cpu"), row_multiple=1)
PLAIN = Adapter(2, 1.0, {"layers.0.out": (torch.ones(2, 3), torch.ones(4, 2))})


@pytest.fixture
def used():
    """Names that requests hold, changed by the tests."""
    return set()


@pytest.fixture
def adapters(used):
    requests = SimpleNamespace(adapters_in_use=lambda: used)
    return EngineAdapters(FORWARD, EngineOptions(model="m", max_adapters=3, max_adapter_rank=8), requests=requests)


def add(adapters: EngineAdapters, *names: str) -> None:
    for name in names:
        adapters.add(name, f"/{name}", PLAIN)


def test_a_name_is_bound_to_its_folder_while_it_is_held(adapters):
    assert not adapters.has("a@1", "/x")
    adapters.add("a@1", "/x", PLAIN)
    adapters.add("a@1", "/x", PLAIN)
    assert adapters.has("a@1", "/x") and adapters.names == ("a@1",)
    for attempt in (lambda: adapters.has("a@1", "/y"), lambda: adapters.add("a@1", "/y", PLAIN)):
        with pytest.raises(RefusedError, match="a@1 is /x and cannot become /y; an adapter is immutable"):
            attempt()
    adapters.unload("a@1")
    adapters.add("a@1", "/y", PLAIN)


@pytest.mark.parametrize("name", ["", "a" * 201])
def test_a_name_has_a_sensible_length(name, adapters):
    with pytest.raises(RefusedError, match="1 to 200 characters"):
        adapters.has(name, "/x")


def test_the_least_recently_used_adapter_that_is_idle_makes_room(adapters, used):
    add(adapters, "a", "b", "c")
    adapters.use("a")
    used.add("b")
    add(adapters, "d")
    assert set(adapters.names) == {"a", "b", "d"} and adapters.num_evicted == 1
    used.update("ad")
    with pytest.raises(BusyError, match="no room for adapter e: requests use all 3 adapters"):
        add(adapters, "e")
    used.clear()
    add(adapters, "e")
    assert set(adapters.names) == {"a", "d", "e"}


def test_an_adapter_that_is_not_held_cannot_be_used(adapters):
    adapters.use("")
    with pytest.raises(UnknownAdapterError, match="'a@1' is not loaded"):
        adapters.use("a@1")


def test_an_unloaded_adapter_serves_those_that_hold_it_and_nobody_new(adapters, used):
    add(adapters, "a", "b")
    used.add("a")
    for name in ("a", "b", "unknown"):
        adapters.unload(name)
    assert adapters.names == ()
    with pytest.raises(UnknownAdapterError):
        adapters.use("a")
    adapters.place(["a", ""])
    assert adapters.rows(["a", ""]) is not None
    with pytest.raises(RefusedError, match="immutable"):
        adapters.has("a", "/other")
    used.clear()
    adapters.drop_leaving()
    assert not adapters.has("a", "/other")


def test_loading_it_again_keeps_an_adapter_that_was_leaving(adapters, used):
    add(adapters, "a")
    used.add("a")
    adapters.unload("a")
    add(adapters, "a")
    used.clear()
    adapters.drop_leaving()
    assert adapters.names == ("a",)


def test_rows_are_kept_while_the_batch_is_the_same(adapters):
    add(adapters, "a", "b")
    adapters.place(["a"])
    rows = adapters.rows(["a", "", "a"])
    assert adapters.rows(["a", "", "a"]) is rows and adapters.rows(["", ""]) is None and adapters.rows(["a", "", "a"]) is rows
    assert adapters.rows(["a", "", "a"], repeat=2) is not rows
    adapters.place(["b", "a"])
    assert adapters.rows(["a", "", "a"]) is not rows


def test_live_weights_are_copies_of_what_serves(adapters):
    add(adapters, "a")
    adapters.place(["a"])
    live = adapters.live("a")
    assert live.fingerprint() == PLAIN.fingerprint()
    adapters._stack.weights("out").b[0] += 1
    assert live.fingerprint() == PLAIN.fingerprint() != adapters.live("a").fingerprint()


@pytest.mark.parametrize(
    ("rank", "module", "shape", "message"),
    [
        (9, "layers.0.out", (3, 4), "rank 9; this engine takes at most max_adapter_rank = 8"),
        (2, "layers.1.out", (3, 4), "adapts 'layers.1.out', which is not a linear layer of this model's decoder"),
        (2, "layers.0.out", (3, 5), "maps 3 to 5 numbers beside 'layers.0.out', which maps 3 to 4"),
    ],
)
def test_an_adapter_that_does_not_fit_the_model_is_refused(rank, module, shape, message, adapters, tmp_path):
    inputs, outputs = shape
    folder = tmp_path / "adapter"
    write_adapter(Adapter(rank, 1.0, {module: (torch.ones(rank, inputs), torch.ones(outputs, rank))}), folder, base_model="m")
    with pytest.raises(RefusedError, match=message):
        adapters.read(str(folder))


def test_a_folder_without_an_adapter_is_refused(adapters, tmp_path):
    with pytest.raises(ModelError, match="is no adapter"):
        adapters.read(str(tmp_path))
