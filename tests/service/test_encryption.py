"""Exports that only the owners of the named keys can read."""

from pathlib import Path

import pyrage
import pytest

from offbeat.errors import StorageError
from offbeat.service.encryption import encrypt_files, read_recipient

SSH = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHsKLqeplhpW+uObz5dvMgjz1OxfM/XXUB+VHtZ6isGN alice@rust"
"""The public half of a key of age's own tests."""


def test_files_are_replaced_by_encrypted_ones(tmp_path: Path) -> None:
    identity = pyrage.x25519.Identity.generate()
    (tmp_path / "a.json").write_bytes(b"{}")
    (tmp_path / "b.safetensors").write_bytes(bytes(200_000))
    encrypt_files(tmp_path, [str(identity.to_public()), SSH])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json.age", "b.safetensors.age"]
    assert pyrage.decrypt((tmp_path / "a.json.age").read_bytes(), [identity]) == b"{}"
    assert pyrage.decrypt((tmp_path / "b.safetensors.age").read_bytes(), [identity]) == bytes(200_000)


RSA_WITHOUT_EXPONENT = "ssh-rsa AAAAB3NzaC1yc2EAAAABAAAAAQE="
"""A key of RSA with exponent 0, on which age's library panics."""


@pytest.mark.parametrize(
    "text", ["", "age1", "AGE-SECRET-KEY-1", "ssh-ed25519 nothing", "ssh-dss AAAA", "password", RSA_WITHOUT_EXPONENT])
def test_what_is_no_public_key_is_said(text: str) -> None:
    with pytest.raises(ValueError, match="is no recipient of age; give a public key"):
        read_recipient(text)


def test_a_folder_that_is_not_there_is_an_error_of_storage(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be encrypted"):
        encrypt_files(tmp_path / "none", [SSH])
