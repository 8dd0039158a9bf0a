"""What a process says that it does."""

import threading

from offbeat.phase import current, marks, phase, stack, waiting_for


def test_the_innermost_phase_counts_and_ends_with_its_block():
    assert current().name == ""
    with phase("outer"):
        with phase("inner"):
            assert current().name == "inner"
        assert current().name == "outer"
        assert current().thread == threading.get_ident()
    assert current().name == ""


def test_a_phase_may_say_how_far_it_is():
    done = 3
    with phase("load", describe=lambda: f"{done} of 8 batches"):
        assert (current().name, current().text) == ("load", "load: 3 of 8 batches")
        done = 4
        assert current().text == "load: 4 of 8 batches"
    assert current().text == ""


def test_a_wait_names_those_who_are_not_done():
    with waiting_for("loading the model", ["rank 0", "rank 1"]) as done:
        assert current().text == "loading the model: waiting for rank 0, rank 1"
        done("rank 0")
        done("rank 0")
        assert current().text == "loading the model: waiting for rank 1"
        done("rank 1")
        assert current().text == "loading the model: done"
    with waiting_for("starting", [f"rank {number}" for number in range(9)]):
        assert current().text == "starting: waiting for rank 0, rank 1, rank 2, rank 3 and 5 more"


def test_all_phases_are_known_in_the_order_in_which_they_were_entered():
    with phase("outer"), phase("inner"):
        assert [mark.name for mark in marks()] == ["outer", "inner"]
    assert marks() == ()


def test_a_phase_that_cannot_say_how_far_it_is_keeps_its_name():
    with phase("load", describe=lambda: {}["gone"]):
        assert current().text == "load: unknown how far (KeyError: 'gone')"


def test_a_phase_of_another_thread_ends_without_harm_to_ours():
    entered, leave = threading.Event(), threading.Event()

    def work():
        with phase("theirs"):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(10)
    with phase("ours"):
        leave.set()
        thread.join()
        assert current().name == "ours"


def test_a_stack_shows_the_innermost_calls_of_the_thread():
    def deep(n):
        return deep(n - 1) if n else stack(threading.get_ident())

    lines = deep(30)
    assert len(lines) == 12
    assert all("test_phase.py:" in line and " in deep: return deep(n - 1)" in line for line in lines[:-2])
    assert "offbeat/phase.py" in lines[-1]


def test_a_thread_that_is_gone_has_no_stack():
    assert stack(0) == ()
