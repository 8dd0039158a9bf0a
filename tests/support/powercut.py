"""A power cut: of a process that was killed, what is on its disk if that kept only what was synced, or more, as it happened.

    power = PowerCut(work, root)                     # root is the folder that is watched
    child = Popen(..., env=os.environ | power.environment)
    child.kill()
    power.cut(after, Disk.STRICT)                    # what root would be after the cut

A name exists once its folder was synced, and a byte once its file was. What was not synced may be there all the same, whole or in part, and
in any order: a disk writes back when it likes. So there are several disks, and what was acknowledged must be on each.
"""

import ctypes
import enum
import random
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_suffix(".c")
_PAGE = 4096


class Disk(enum.Enum):
    """What of that which was not synced is there."""

    STRICT = "nothing"
    NAMES = "names that were made, changed and removed, and no bytes"
    MIXED = "any of it"


class PowerCut:
    """The disk below a folder, kept beside it; processes with `environment` write to it."""

    def __init__(self, work: Path, root: Path) -> None:
        """Build the library into `work`; skips the test where there is no compiler."""
        if (compiler := shutil.which("cc")) is None:
            pytest.skip("a simulated power cut needs a C compiler, and there is no cc")
        work.mkdir(parents=True, exist_ok=True)
        library = work / "powercut.so"
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, _SOURCE, "-ldl"], check=True)
        self._root = root.resolve()
        self._disk = work / "disk"
        self._disk.mkdir()
        self._library = ctypes.CDLL(str(library))
        self.environment = {"LD_PRELOAD": str(library), "POWERCUT_ROOT": str(self._root), "POWERCUT_DISK": str(self._disk)}

    def cut(self, after: Path, disk: Disk, *, seed: int = 0) -> None:
        """Make the folder `after` what the root is when the power is back. Nobody may write to the root any more."""
        after.mkdir(parents=True)
        self._restore(self._key(self._root), self._root, after, disk, random.Random(seed))

    def _restore(self, key: str, live: Path | None, after: Path, disk: Disk, rng: random.Random) -> None:
        synced, now = self._synced_names(key), self._names(live)
        for name in sorted(synced.keys() | now.keys()):
            choice = {
                Disk.STRICT: synced, Disk.NAMES: now, Disk.MIXED: rng.choice([synced, now])}[disk].get(name)
            if choice is None:
                continue
            child, is_folder = choice
            there = live / name if live is not None and now.get(name) == choice else None
            if is_folder:
                (after / name).mkdir()
                self._restore(child, there, after / name, disk, rng)
            else:
                held = self._disk / child
                data = held.read_bytes() if held.exists() else b""
                if disk is Disk.MIXED and there is not None:
                    data = _mixed(data, there.read_bytes(), rng)
                (after / name).write_bytes(data)

    def _synced_names(self, key: str) -> Mapping[str, tuple[str, bool]]:
        file = self._disk / key
        lines = file.read_text().splitlines() if file.exists() else []
        return {name: (child, kind == "d") for child, kind, name in (line.split(" ", 2) for line in lines)}

    def _names(self, live: Path | None) -> Mapping[str, tuple[str, bool]]:
        return {path.name: (self._key(path), path.is_dir()) for path in (live.iterdir() if live is not None else ())}

    def _key(self, path: Path) -> str:
        key = ctypes.create_string_buffer(96)
        self._library.powercut_key(str(path).encode(), key, ctypes.c_size_t(96))
        return key.value.decode()


def _mixed(synced: bytes, live: bytes, rng: random.Random) -> bytes:
    """A file of which some pages were written back since it was synced."""
    size = rng.choice([len(synced), len(live)])
    pages = [
        (source[place : place + _PAGE]).ljust(_PAGE, b"\0") for place in range(0, size, _PAGE) for source in [rng.choice([synced, live])]]
    return b"".join(pages)[:size]
