"""Names of adapters become paths and model names, so they are checked."""

import pytest

from offbeat.errors import ConfigError
from offbeat.weights.adapters import adapter_name, check_adapter, is_policy, policy_adapter, split_adapter_name
from offbeat.weights.protocol import Manifest


def test_a_name_is_the_adapter_and_the_version() -> None:
    assert adapter_name("alice-1.a_b", 12) == "alice-1.a_b@12"
    assert split_adapter_name("alice-1.a_b@12") == ("alice-1.a_b", 12)
    assert Manifest(3, "/x", "f", (1, 2), (-0.5,), adapter="bob").name == "bob@3"


@pytest.mark.parametrize("name", ["", "a/b", "../up", ".hidden", "a@b", "a b", "x" * 101, "ü"])
def test_an_adapter_that_could_leave_its_folder_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="an adapter's name is"):
        check_adapter(name)


@pytest.mark.parametrize("name", ["alice", "alice@", "@3", "alice@-1", "alice@x", "a/b@3", "alice@\u0663"])
def test_what_is_no_adapters_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        split_adapter_name(name)


def test_names_of_the_policy_are_told_from_other_adapters() -> None:
    assert policy_adapter("3fa9c1") == "policy.3fa9c1"
    assert all(map(is_policy, ("policy@3", "policy.3fa9c1@12"))) and not any(map(is_policy, ("policy", "policymaker@3", "alice@3")))
