"""Keys: from a file or any, and who they are."""

from pathlib import Path

import pytest

from offbeat.errors import ConfigError
from offbeat.service.errors import UnknownKeyError
from offbeat.service.keys import Keys
from offbeat.service.limits import Limits
from offbeat.service.types import Caller


def write(folder: Path, text: str) -> Path:
    path = folder / "keys.toml"
    path.write_text(text)
    return path


def test_a_key_of_the_file_is_its_owner(tmp_path: Path) -> None:
    keys = Keys.load(write(tmp_path, '[owners.alice]\nkey = "tml-alice-6789abcdef"\n[owners."bob.b"]\nkey = "tml-bob-456789abcdef"\n'))
    assert keys.caller("tml-alice-6789abcdef") == Caller("alice")
    assert keys.caller("tml-bob-456789abcdef") == Caller("bob.b")


@pytest.mark.parametrize("api_key", [
    "", "tml-", "tml-Alice-6789abcdef", "tml-alice-6789abcdef ", "tml-alice-6789abcdef0", "alice", "tml-é", "tml-\udc80"])
def test_any_other_key_is_unknown_and_the_sentence_does_not_repeat_it(tmp_path: Path, api_key: str) -> None:
    keys = Keys.load(write(tmp_path, '[owners.alice]\nkey = "tml-alice-6789abcdef"\n'))
    with pytest.raises(UnknownKeyError, match="API key") as caught:
        keys.caller(api_key)
    assert caught.value.status == 401
    assert len(api_key) < 5 or api_key not in str(caught.value)


def test_limits_of_an_owner_stand_beside_its_key(tmp_path: Path) -> None:
    default = Limits(max_models=3, max_queued_tokens=10, max_disk_bytes=5)
    file = write(tmp_path, '[owners.alice]\nkey = "tml-alice-6789abcdef"\nmax_models = 7\n[owners.bob]\nkey = "tml-bob-456789abcdef"\n')
    keys = Keys.load(file, default=default)
    assert keys.limits_of("alice") == Limits(max_models=7, max_queued_tokens=10, max_disk_bytes=5)
    assert keys.limits_of("bob") == default


def test_in_an_open_house_each_key_is_an_owner_of_its_own() -> None:
    keys = Keys.open_house(default=Limits(max_models=1))
    one, other = keys.caller("tml-one"), keys.caller("tml-other")
    assert one == keys.caller("tml-one")
    assert one != other
    assert one.owner == "key-37186f648184"
    assert "one" not in one.owner
    assert keys.limits_of(one.owner) == Limits(max_models=1)
    with pytest.raises(UnknownKeyError, match="does not begin with tml-"):
        keys.caller("one")


@pytest.mark.parametrize(("text", "message"), [
    ("", "owners"),
    ("owners = 3", "owners"),
    ("[owners", "cannot be used"),
    ('[owners.alice]\nkee = "tml-a"', "key"),
    ('[owners.alice]\nkey = "tml-alice-6789abcdef"\nmax_modells = 3', "max_modells"),
    ('[owners.alice]\nkey = "tml-alice-6789abcdef"\nmax_models = -1', "max_models of owner alice in .* must be >= 0, got -1"),
    ('[owners.alice]\nkey = "secret"', "the key of owner alice in .* does not begin with tml-"),
    ('[owners.alice]\nkey = "tml-"', "does not begin with tml-"),
    ('[owners.alice]\nkey = "tml-x"', "the key of owner alice in .* must have at least 16 characters after tml-, got 1; take"),
    ('[owners.alice]\nkey = "tml-0123456789abcde"', "at least 16 characters after tml-, got 15"),
    ('[owners."a b"]\nkey = "tml-alice-6789abcdef"', "the owner 'a b' in .* has a name that cannot be used"),
    ('[owners.alice]\nkey = "tml-alice-6789abcdef"\n[owners.bob]\nkey = "tml-alice-6789abcdef"',
     "the owners alice and bob in .* have the same key"),
])
def test_a_file_that_cannot_be_used_is_a_sentence_without_keys(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Keys.load(write(tmp_path, text))
    assert "secret" not in str(caught.value)


def test_a_file_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        Keys.load(tmp_path / "keys.toml")
