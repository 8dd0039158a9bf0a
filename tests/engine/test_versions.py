"""The versions that an engine holds."""

import pytest

from offbeat.engine.versions import Source, VersionStore
from offbeat.errors import RefusedError


def test_a_version_is_staged_then_live_and_others_that_are_staged_are_dropped() -> None:
    store = VersionStore(live=0, folder="v0")
    assert store.has(0, Source("v0")) and not store.has(1, Source("v1"))
    for version in (1, 2, 3):
        store.add(version, Source(f"v{version}"), f"weights {version}")
    store.check_staged(2)
    assert store.make_live(2) == "weights 2"
    assert store.has(2, Source("v2")) and not store.has(1, Source("v1")) and not store.has(3, Source("v3"))
    with pytest.raises(RefusedError, match=r"version 1 is not staged; staged are \[\] and 2 is live"):
        store.check_staged(1)


def test_a_number_that_comes_again_with_other_weights_is_another_version() -> None:
    store = VersionStore(live=0, folder="v0")
    store.add(1, Source("v1", "lost"), "lost weights")
    for other in (Source("v1", "new"), Source("v1-b", "lost")):
        assert not store.has(1, other)
        store.add(1, other, f"weights of {other}")
        assert store.has(1, other) and not store.has(1, Source("v1", "lost"))
    assert store.make_live(1) == f"weights of {other}"
    assert store.has(1, other) and not store.is_staged(1)
    store.add(1, Source("v1-c"), "again")
    assert not store.has(1, other)  # what is live is about to be replaced
    assert store.make_live(1) == "again"
