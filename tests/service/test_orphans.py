"""What no row names is moved, not removed, and by hand or by itself it can come back."""

from pathlib import Path

import pytest

from offbeat.service.orphans import Orphans

DAY_S = 86400.0


class World:
    """A folder with two others in it, and a clock."""

    def __init__(self, root: Path, *, retention_s: float = 7 * DAY_S) -> None:
        self.root, self.now = root, 1_800_000_000.0
        for name in ("a", "b"):
            (root / name).mkdir()
            (root / name / "weights").write_text(name)
        self.orphans = Orphans(root, retention_s=retention_s, clock=lambda: self.now)


def test_orphans_lie_under_their_date_and_the_log_says_what_to_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = World(tmp_path)
    world.orphans.put_aside(["a", "b"])
    assert (tmp_path / "orphans" / "2027-01-15T08-00-00Z" / "a" / "weights").read_text() == "a"
    assert world.orphans.names() == {"a", "b"} and [path.name for path in tmp_path.iterdir()] == ["orphans"]
    assert "removed after 2027-01-22T08-00-00Z" in caplog.text and "put the newer one back" in caplog.text
    world.orphans.bring_back("a")
    assert (tmp_path / "a" / "weights").read_text() == "a" and world.orphans.names() == {"b"}


def test_what_comes_back_takes_nothings_place(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.orphans.put_aside(["a"])
    (tmp_path / "a").mkdir()
    world.orphans.bring_back("a")
    assert not list((tmp_path / "a").iterdir()) and world.orphans.names() == {"a"}


def test_orphans_go_when_they_are_old_and_what_people_put_beside_them_stays(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.orphans.sweep()
    world.orphans.put_aside(["a"])
    (tmp_path / "orphans" / "keep-this").mkdir()
    world.now += 7 * DAY_S - 1
    world.orphans.put_aside(["b"])
    world.orphans.sweep()
    assert world.orphans.names() == {"a", "b"}
    world.now += 1
    world.orphans.sweep()
    assert world.orphans.names() == {"b"} and (tmp_path / "orphans" / "keep-this").is_dir()


def test_orphans_that_are_never_to_go_do_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = World(tmp_path, retention_s=0)
    world.orphans.put_aside(["a"])
    world.now += 10_000 * DAY_S
    world.orphans.sweep()
    assert world.orphans.names() == {"a"} and "kept until somebody removes them" in caplog.text
