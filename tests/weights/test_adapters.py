"""Names of adapters become paths and model names, so they are checked."""

import pytest

from offbeat.errors import ConfigError
from offbeat.weights.adapters import AdapterManifest, adapter_name, check_tenant, split_adapter_name


def test_a_name_is_the_tenant_and_the_version() -> None:
    assert adapter_name("alice-1.a_b", 12) == "alice-1.a_b@12"
    assert split_adapter_name("alice-1.a_b@12") == ("alice-1.a_b", 12)
    assert AdapterManifest("bob", 3, "/x", "f", (1, 2), (-0.5,)).name == "bob@3"


@pytest.mark.parametrize("name", ["", "a/b", "../up", ".hidden", "a@b", "a b", "x" * 101, "ü"])
def test_a_tenant_that_could_leave_its_folder_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="a tenant's name is"):
        check_tenant(name)


@pytest.mark.parametrize("name", ["alice", "alice@", "@3", "alice@-1", "alice@x", "a/b@3", "alice@\u0663"])
def test_what_is_no_adapters_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        split_adapter_name(name)
