"""The versions that an engine holds."""

import pytest

from offbeat.errors import RefusedError
from offbeat.inference.embedded.versions import VersionStore


def test_a_version_is_staged_then_live_and_older_staged_ones_are_dropped() -> None:
    store = VersionStore(live=0, folder="v0")
    assert store.has(0, "v0") and not store.has(1, "v1")
    for version in (1, 2, 3):
        store.add(version, f"v{version}", f"weights {version}")
    store.check_staged(2)
    assert store.make_live(2) == "weights 2"
    assert store.has(2, "v2") and store.has(3, "v3") and not store.has(1, "v1")
    with pytest.raises(RefusedError, match=r"version 1 is not staged; staged are \[3\] and 2 is live"):
        store.check_staged(1)


def test_a_version_is_bound_to_its_folder_while_it_is_staged_or_live() -> None:
    store = VersionStore(live=0, folder="v0")
    store.add(1, "v1", "weights")
    store.add(2, "v2", "weights")
    store.make_live(1)
    assert not store.has(0, "of another run")
    for version in (1, 2):
        with pytest.raises(RefusedError, match=f"version {version} is v{version} and cannot become other; a version is immutable"):
            store.has(version, "other")
