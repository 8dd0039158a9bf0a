"""What engines read is sent to their machine once, again when it is another or is gone there, and removed when it is gone here."""

import asyncio
import shutil
from collections import Counter
from pathlib import Path

import pytest

from far import far_disk
from offbeat.errors import StorageError
from offbeat.workers.deliveries import Deliveries


def test_a_folder_is_sent_once_to_each_machine_and_again_when_it_has_changed_or_is_gone_there(tmp_path: Path) -> None:
    (folder := tmp_path / "here" / "v1").mkdir(parents=True)
    (folder / "adapter").write_bytes(b"one")
    calls: Counter[str] = Counter()
    a, b = (far_disk(tmp_path / name, name, meddle=lambda method, _payload: calls.update([method])) for name in ("a", "b"))

    async def main() -> None:
        deliveries = Deliveries()
        paths = await asyncio.gather(*(deliveries.deliver(folder, disk, timeout_s=60) for disk in (a, a, b)))
        assert paths[0] == paths[1] != paths[2] and all((Path(path) / "adapter").read_bytes() == b"one" for path in paths)
        assert calls["settle"] == 2
        (folder / "adapter").write_bytes(b"two!")
        assert (Path(await deliveries.deliver(folder, a, timeout_s=60)) / "adapter").read_bytes() == b"two!"
        shutil.rmtree(paths[0])
        assert (Path(await deliveries.deliver(folder, a, timeout_s=60)) / "adapter").read_bytes() == b"two!"
        assert calls["settle"] == 4
        folder.rename(newer := folder.with_name("v2"))
        assert Path(await deliveries.deliver(newer, a, timeout_s=60)).is_dir() and not Path(paths[0]).exists() and Path(paths[2]).exists()
        with pytest.raises(StorageError, match="v1 is gone, and cannot be sent to a"):
            await deliveries.deliver(folder, a, timeout_s=60)

    asyncio.run(main())
