"""Which versions of adapters are known, after any history of publishes and pins."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import PublishError, RefusedError
from offbeat.fleet.catalog import Catalog
from offbeat.weights.adapters import split_adapter_name
from offbeat.weights.protocol import Manifest


def manifest(name: str, *, folder: str = "") -> Manifest:
    adapter, version = split_adapter_name(name)
    return Manifest(version, folder or name, folder or name, (1, 2), (-1.0,), adapter=adapter)


def publish(catalog: Catalog, *names: str, pinned: bool = False) -> None:
    for name in names:
        catalog.add(manifest(name), pinned=pinned)
        catalog.serves(name)


def current(catalog: Catalog, adapter: str) -> str | None:
    """The name of an adapter's current version."""
    try:
        return catalog.find(adapter).name
    except RefusedError:
        return None


def known(catalog: Catalog, *names: str) -> list[str]:
    return [name for name in names if catalog.get(name)]


def test_an_adapters_versions_count_up_and_the_newest_that_serves_is_current() -> None:
    catalog = Catalog(keep=2)
    publish(catalog, "alice@1", "bob@7")
    catalog.add(manifest("alice@2"))
    assert current(catalog, "alice") == "alice@1"
    assert [m.name for m in catalog.newest()] == ["alice@2", "bob@7"] and catalog.num_adapters == 2
    catalog.serves("alice@2")
    assert current(catalog, "alice") == "alice@2" and catalog.find("alice@1").name == "alice@1"
    with pytest.raises(PublishError, match="alice@2 is not newer than alice@2; a version is published once"):
        catalog.add(manifest("alice@2"))


def test_what_is_unknown_is_refused_with_its_own_adapters_current_version() -> None:
    catalog = Catalog(keep=2)
    publish(catalog, "alice@1")
    for name, hint in {"alice@3": "alice@1 is current", "bob": "publish it first", "bob@1": "publish it first"}.items():
        with pytest.raises(RefusedError, match=f"there is no adapter '{name}'; {hint}"):
            catalog.find(name)


def test_a_version_that_failed_is_withdrawn_and_may_be_published_again() -> None:
    catalog = Catalog(keep=2)
    publish(catalog, "alice@1")
    for name in ("alice@2", "bob@1"):
        catalog.add(manifest(name))
        catalog.withdraw(name)
        assert not known(catalog, name)
        catalog.add(manifest(name))
    catalog.add(manifest("carol@4"), pinned=True)
    catalog.withdraw("carol@4")
    catalog.withdraw("alice@1")  # it serves: another engine failed
    assert known(catalog, "alice@1", "carol@4") == ["alice@1"]


def test_the_folder_of_a_version_that_failed_goes_with_the_next_one() -> None:
    catalog = Catalog(keep=2)
    publish(catalog, "alice@1")
    catalog.add(manifest("alice@2"))
    catalog.withdraw("alice@2")
    catalog.add(manifest("bob@1"), pinned=True)
    catalog.withdraw("bob@1")
    assert catalog.prune(()) == []
    publish(catalog, "alice@3", "bob@2")
    assert catalog.prune({"alice@2"}) == []
    assert catalog.prune(()) == ["alice@2"]
    assert catalog.prune(()) == [] and known(catalog, "alice@1", "alice@3") == ["alice@1", "alice@3"]
    catalog.add(manifest("alice@4"))
    catalog.withdraw("alice@4")
    publish(catalog, "alice@4", "alice@5")
    assert catalog.prune(()) == ["alice@1", "alice@3"], "what is published after all stays"


def test_pinned_versions_stand_beside_what_is_published_in_any_order() -> None:
    catalog = Catalog(keep=1)
    catalog.pin(manifest("alice@3"))
    catalog.pin(manifest("alice@3"))
    with pytest.raises(PublishError, match="alice@3 is alice@3 and cannot become elsewhere"):
        catalog.pin(manifest("alice@3", folder="elsewhere"))
    assert current(catalog, "alice") is None and catalog.newest() == []
    publish(catalog, "alice@1", "alice@2", "alice@5")
    publish(catalog, "alice@6", "alice@4", pinned=True)
    assert current(catalog, "alice") == "alice@6"
    publish(catalog, "alice@7")
    assert catalog.prune(()) == ["alice@1", "alice@2", "alice@5"]
    assert known(catalog, *(f"alice@{i}" for i in range(9))) == ["alice@3", "alice@4", "alice@6", "alice@7"]
    assert [catalog.may_go(f"alice@{i}") for i in (3, 4, 5, 6, 7)] == [False, False, True, False, False]
    catalog.remove("alice")
    assert known(catalog, *(f"alice@{i}" for i in range(9))) == ["alice@3", "alice@4", "alice@6"]
    assert current(catalog, "alice") is None


def test_an_unpinned_version_is_unknown_and_its_folder_is_nobodys_to_remove() -> None:
    catalog = Catalog(keep=1)
    publish(catalog, "alice@1", "alice@2", pinned=True)
    catalog.unpin("alice@2")
    catalog.unpin("alice@2")
    assert current(catalog, "alice") is None and catalog.newest() == []
    assert known(catalog, "alice@1", "alice@2") == ["alice@1"]
    publish(catalog, "bob@1")
    catalog.pin(manifest("bob@1"))
    catalog.unpin("bob@1")
    catalog.unpin("nobody@1")
    publish(catalog, "alice@3", "alice@4", "bob@2", "bob@3")
    assert sorted(catalog.prune(())) == ["alice@3", "bob@2"]


def test_a_version_in_use_keeps_its_folder_until_it_is_not() -> None:
    catalog = Catalog(keep=1)
    publish(catalog, "alice@1", "alice@2", "alice@3")
    assert catalog.prune({"alice@1"}) == ["alice@2"]
    assert catalog.prune(()) == ["alice@1"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(
    st.sampled_from(["publish", "publish pinned", "fail", "pin", "unpin", "remove", "prune"]), st.sampled_from("xy"), st.integers(0, 6))))
def test_after_any_history_pins_are_known_and_never_pruned_and_what_is_current_is_known(history) -> None:
    catalog, pinned = Catalog(keep=1), set[str]()
    for act, adapter, version in history:
        name = f"{adapter}@{version}"
        try:
            if act.startswith("publish"):
                publish(catalog, name, pinned=act == "publish pinned")
                pinned |= {name} if act == "publish pinned" else set()
            elif act == "fail" and not known(catalog, name):
                catalog.add(manifest(name))
                catalog.withdraw(name)
            elif act == "pin":
                catalog.pin(manifest(name))
                pinned.add(name)
            elif act == "unpin":
                catalog.unpin(name)
                pinned.discard(name)
            elif act == "remove":
                catalog.remove(adapter)
            elif act == "prune":
                assert not pinned.intersection(catalog.prune(()))
        except PublishError:
            pass
        assert all(map(catalog.get, pinned)) and not any(map(catalog.may_go, pinned))
        for name in ("x", "y"):
            newest = current(catalog, name)
            assert newest is None or (catalog.get(newest) and newest.startswith(f"{name}@"))
        assert len(catalog.newest()) == catalog.num_adapters
