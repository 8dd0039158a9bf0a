"""Encrypts exports with age (age-encryption.org) for the recipients that a client names.

`wire` checks recipients as they arrive, and `saving` encrypts. The library, `pyrage`, is loaded at its first use.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from offbeat.errors import StorageError
from offbeat.extras import require

SUFFIX = ".age"
"""Ending of an encrypted file's name, as in `adapter_model.safetensors.age`."""
MAX_RECIPIENTS = 10


def read_recipient(text: str) -> Any:
    """Read a public key of age (`age1...`) or SSH (`ssh-ed25519 ...`, `ssh-rsa ...`); raises ValueError for others, MissingExtraError."""
    pyrage = _pyrage()
    kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
    try:
        return kind.Recipient.from_str(text)
    except BaseException as exc:
        # The library panics on some keys, such as an RSA key with exponent 0: a BaseException of a type that no module exports.
        if isinstance(exc, pyrage.RecipientError) or type(exc).__name__ == "PanicException":
            sentence = f"{text[:80]!r} is no recipient of age; give a public key that begins with age1, ssh-ed25519 or ssh-rsa"
            raise ValueError(sentence) from exc
        raise


def encrypt_files(folder: Path, recipients: Sequence[str]) -> None:
    """Replace each file of a folder by one encrypted for all recipients, whose name ends in `SUFFIX`; raises StorageError if that fails."""
    pyrage, readers = _pyrage(), [read_recipient(text) for text in recipients]
    try:
        for file in sorted(folder.iterdir()):
            pyrage.encrypt_file(str(file), str(file) + SUFFIX, readers)
            file.unlink()
    except (OSError, pyrage.EncryptError) as exc:
        raise StorageError(f"the export in {folder} cannot be encrypted: {exc}") from exc


def _pyrage() -> Any:
    require("train", ("pyrage",), wanted_by="an encrypted export")
    return import_module("pyrage")
