"""Which runs may use one engine, and for how long."""

import pytest

from offbeat.engine.inside.owners import SILENT_S, Owners, read


class World:
    """An engine's owners under a clock of the test's own."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self._owners = Owners()

    def asks(self, header: str) -> bool:
        """Whether a request is answered."""
        return not self.why(header)

    def why(self, header: str) -> str:
        return self._owners.refusal(header, now_s=self.now_s)


def test_a_run_that_publishes_whole_weights_has_the_engine_for_itself_until_it_leaves_or_is_silent() -> None:
    world = World()
    assert world.asks("a 1 exclusive") and world.asks("a 1 exclusive")
    world.now_s += 12
    assert world.why("b 1 exclusive") == (
        "this engine is used by start 1 of the run a, 12 s ago, and cannot be shared with the run b, because that one publishes whole"
        " weights; end the other run, wait until it was silent for 60 s, or use another engine")
    assert not world.asks("c 1 shared")
    assert world.asks(""), "who publishes nothing is not counted"
    assert world.asks("a 1 leaves") and world.asks("b 1 exclusive")
    world.now_s += SILENT_S
    assert world.asks("c 1 shared") and not world.asks("b 1 exclusive")


def test_a_later_start_of_a_run_takes_the_engine_over_and_the_earlier_one_is_told() -> None:
    world = World()
    assert world.asks("a 1 exclusive") and world.asks("a 2 exclusive")
    assert world.why("a 1 exclusive") == "this engine is used by start 2 of the run a, and start 1 is an earlier one of it"
    world.now_s += 10 * SILENT_S
    assert not world.asks("a 1 exclusive")
    assert not world.asks("a 1 leaves") and world.asks("a 2 exclusive"), "the earlier one cannot take the engine away, either"


def test_runs_that_publish_adapters_share_an_engine() -> None:
    world = World()
    assert world.asks("a 1 shared") and world.asks("b 4 shared") and world.asks("a 1 shared")
    assert not world.asks("c 1 exclusive")


@pytest.mark.parametrize("header", ["a", "a 1", "a one shared", "a 1 owner", " 1 shared", "a  1 shared", "a 1 shared more"])
def test_what_is_no_owner_is_refused(header: str) -> None:
    assert read(header) == ("", 0, "") and World().why(header).startswith("x-offbeat-owner must be a run")
