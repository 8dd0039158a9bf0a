"""Points that ranks miss in every way, in real processes: the verdict names the right rank and cause, alike on all, and in time.

Each set of processes plays several scenes one after the other, so that a test reads what its scene left. Who is late is so until a peer
has raised, which it tells by a sign: a file; so no scene depends on how fast the machine is.
"""

import ctypes
import json
import os
import re
import shlex
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from offbeat.config.dist import DistConfig
from offbeat.errors import ConfigError, SyncError
from offbeat.phase import phase
from offbeat.sync import exchange
from offbeat.sync.links import MeetingPlace
from offbeat.sync.mesh import connect_store, host_store
from offbeat.sync.peers import Card
from offbeat.sync.sync import Sync
from ranks import run_alone, run_ranks
from waiting import wait_until

DEADLINE_S, PATIENT_S = 1.0, 4.0
SOON_S = 20
"""At once, on a machine that may be busy; points whose deadline is not the matter have one of 60 s or more."""
_tensor = exchange._tensor


def _outcome(act, *arguments, **options):
    """[class, text, seconds] of the error, or the value."""
    started = time.monotonic()
    try:
        return act(*arguments, **options)
    except SyncError as exc:
        return [type(exc).__name__, str(exc), time.monotonic() - started]


def _missed(groups, folder, name, late):
    """Rank 1 does `late` until others have missed it; everybody's error, and whether the group works afterwards."""
    missed = Path(folder, name)
    groups.sync.barrier(f"before {name}")
    if groups.rank == 1:
        late(missed)
    error = _outcome(groups.sync.barrier, name, timeout_s=DEADLINE_S)
    missed.touch()
    return [*error, groups.sync.sum_scalars(f"after {name}", {"x": 1.0})["x"]]


def _wait_for(*signs):
    wait_until(lambda: all(sign.exists() for sign in signs), timeout_s=60)


def _shell_waits_for(*signs):
    """As `_wait_for`, for a shell."""
    there = " && ".join(f"[ -e {shlex.quote(str(sign))} ]" for sign in signs)
    return f"for _ in $(seq 1200); do {there} && break; sleep 0.05; done"


def _load_slowly(sign):
    with phase("load batch 17"):
        _wait_for(sign)


def _spin_in_python(sign):
    while not sign.exists():
        for _ in range(3_000_000):  # a tenth of a second without letting go of the interpreter by itself
            pass


def _hold_the_interpreter(sign):
    ctypes.PyDLL(None).system(_shell_waits_for(sign).encode())  # Unlike CDLL, calls with the interpreter lock held.


def _stop_until(*signs, then_s=0.0):
    subprocess.Popen(["sh", "-c", f"{_shell_waits_for(*signs)}; sleep {then_s}; kill -CONT {os.getpid()}"])
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def _receive(groups, folder):
    missed = Path(folder, "receive")

    def receive():
        dist.recv(torch.zeros(1), 2, group=groups.cpu_group)

    def send():
        _wait_for(missed)
        dist.send(torch.zeros(1), 1, group=groups.cpu_group)

    groups.sync.barrier("before receive")
    if groups.rank:
        (receive if groups.rank == 1 else send)()
    error = _outcome(groups.sync.barrier, "receive", timeout_s=DEADLINE_S)
    missed.touch()
    return [*error, groups.sync.sum_scalars("after receive", {"x": 1.0})["x"]]


def _patience(groups, folder):
    """Rank 0 comes after more than twice the deadline, with beats, which may be late; then when it has been missed, without one."""
    results = []
    missed = Path(folder, "patience")
    for beats in (True, False):
        groups.sync.barrier("before patience")
        if groups.rank == 0 and beats:
            end = time.monotonic() + 2.2 * PATIENT_S
            while time.monotonic() < end:
                time.sleep(PATIENT_S / 40)
                groups.sync.beat()
        elif groups.rank == 0:
            _wait_for(missed)
        timeout_s = PATIENT_S if beats else DEADLINE_S
        value = _outcome(groups.sync.broadcast, "prompts", b"drawn" if groups.rank == 0 else None, timeout_s=timeout_s)
        results.append(value if isinstance(value, list) else value.decode())
        if not beats:
            missed.touch()
    return results


def _exchanged(groups):
    sync, rank = groups.sync, groups.rank
    parts = [bytes(range(n % 256)) * 3 for n in (5, 0, 90)]
    return {
        "sums": sync.sum_scalars("sums", {"b": 1.0 + rank, "a": 0.1 * 3**rank}),
        "maxima": sync.max_scalars("maxima", {"c": -1.0 - rank}),
        "undefined": str(sync.sum_scalars("undefined", {"x": float("nan") if rank == 1 else 1.0})["x"]),
        "gathered": [[card.rank, card.host] for card in sync.gather("gather", _card(rank))],
        "broadcast": [
            sync.broadcast("some", b"abc" if rank == 2 else None, source=2).hex(),
            len(sync.broadcast("none", b"" if rank == 0 else None))],
        "scattered": [sync.scatter("parts", parts if rank == source else None, source=source) == parts[rank] for source in range(3)],
        "nothing": sync.scatter("nothing", [b""] * 3 if rank == 0 else None).hex(),
    }


def _scattered_late(groups):
    """The source, then a receiver, needs longer than a slice of the others' waits for its part of the exchange."""
    results = []
    for late in (0, 1):
        if groups.rank == late:
            exchange._tensor = _tensor_late
        parts = [b"a", b"b" * 1000, b"c"] if groups.rank == 0 else None
        results.append(len(groups.sync.scatter("parts", parts)))
        exchange._tensor = _tensor
    return results


def _tensor_late(data):
    time.sleep(0.4)
    return _tensor(data)


def _card(rank):
    return Card(rank=rank + 1, host=f"{rank + 1}" * rank, pid=1, started=1, machine="", hosts_store=False)


def _failure(groups):
    """Rank 1 fails in a meeting of its own while rank 0 waits and rank 2 is elsewhere."""
    hosted = host_store(60) if groups.rank == 0 else None
    port = int(groups.sync.broadcast("port", str(hosted.port).encode() if hosted else None))
    store = hosted or connect_store("127.0.0.1", port, timeout_s=60)
    sync = Sync.start(rank=groups.rank, world=3, place=MeetingPlace(store), config=DistConfig(), hosts_store=bool(hosted))
    sync.arrive("start")
    groups.sync.barrier("started")  # a failure would also end somebody's wait at "start"
    if groups.rank == 1:
        sync.fail("ValueError: no such prompt")
        sync.fail("something else")
    if groups.rank == 2:
        time.sleep(0.5)
    errors = [_outcome(sync.arrive, name, timeout_s=60) for name in ("export", "evaluate")]
    groups.sync.barrier("failure seen")
    sync.close()
    return errors


def _killed_inside(groups):
    with groups.sync.region("train_step", timeout_s=60):
        if groups.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.zeros(1), group=groups.cpu_group)


def _play(groups, folder):
    """[scene -> outcome, by rank], then the outcomes of the scene that rank 1 does not survive."""
    scenes = {
        "slow": _missed(groups, folder, "slow", _load_slowly),
        "spinning": _missed(groups, folder, "spinning", _spin_in_python),
        "receiving": _receive(groups, folder),
        "holding": _missed(groups, folder, "holding", _hold_the_interpreter),
        "stopped": _missed(groups, folder, "stopped", _stop_until),
        "mismatch": _outcome(groups.sync.barrier, "evaluate" if groups.rank == 1 else "save"),
        "patience": _patience(groups, folder),
        "exchanged": _exchanged(groups),
        "scattered late": _scattered_late(groups),
        "failure": _failure(groups),
    }
    everybody = groups.sync.gather("scenes", json.dumps(scenes))
    killed = [_outcome(_killed_inside, groups), _outcome(groups.sync.barrier, "save", timeout_s=60)]
    return [[json.loads(scenes) for scenes in everybody], killed]


def _play_without_store(groups, folder):
    """Rank 0, which hosts the store, is stopped for a while; then it is killed while the others wait."""
    stopped = _missed_by_host(groups, Path(folder))
    everybody = groups.sync.gather("stopped", json.dumps(stopped))
    if groups.rank == 0:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    if groups.rank == 2:
        time.sleep(0.6)
    killed = [_outcome(groups.sync.barrier, name, timeout_s=60) for name in ("save", "evaluate")]
    return [[json.loads(outcome) for outcome in everybody], killed]


def _missed_by_host(groups, folder):
    groups.sync.barrier("before")
    if groups.rank == 0:
        _stop_until(folder / "missed by 1", folder / "missed by 2", then_s=1.0)  # their judges want to write what their callers said
        (folder / "goes on").touch()
    error = _outcome(groups.sync.barrier, "export", timeout_s=DEADLINE_S)
    (folder / f"missed by {groups.rank}").touch()
    _wait_for(folder / "goes on")
    return [*error, groups.sync.sum_scalars("after", {"x": 1.0})["x"]]


def _exit_while_others_wait(groups, _argument):
    groups.sync.barrier("start")
    if groups.rank == 2:
        os._exit(3)
    if groups.rank == 1:
        time.sleep(1.0)
    return [_outcome(groups.sync.barrier, name, timeout_s=60) for name in ("save", "evaluate")]


def _raise_while_others_wait(groups, _argument):
    if groups.rank == 1:
        raise ValueError("no such prompt")
    return _outcome(groups.sync.barrier, "save", timeout_s=60)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    results = run_ranks(_play, world=3, argument=str(tmp_path_factory.mktemp("signs")), check=False)
    assert isinstance(results[0], list), results
    assert isinstance(results[2], list), results
    return results


@pytest.fixture(scope="module")
def scenes(played):
    """By scene, then by rank."""
    by_rank = played[0][0]
    return {name: [scenes[name] for scenes in by_rank] for name in by_rank[0]}


def _check_missed(outcomes, *, kind="SyncTimeout"):
    """All ranks raised the same, those that waited in time, and the group works on; returns the text."""
    assert [outcome[0] for outcome in outcomes] == [kind] * 3
    assert len({outcome[1] for outcome in outcomes}) == 1
    assert DEADLINE_S <= max(outcomes[0][2], outcomes[2][2]) < SOON_S  # of the one that came first
    assert all(outcome[3] == 3.0 for outcome in outcomes)
    return outcomes[0][1]


def test_a_slow_rank_is_named_with_its_phase_and_stack_and_the_late_one_raises_the_same(scenes):
    text = _check_missed(scenes["slow"])
    found = re.match(r"sync point 'slow' timed out after 1 s with 2 of 3 ranks there: "
                     r"rank 1 is slow, for (\d+\.\d) s in phase 'load batch 17'\n", text)
    assert found and 0 < float(found[1]) < SOON_S
    assert "in _load_slowly: _wait_for(sign)" in text


def test_a_tight_python_loop_shows_its_stack(scenes):
    text = _check_missed(scenes["spinning"])
    assert "rank 1 is slow, for" in text
    assert "in _spin_in_python: " in text


def test_a_rank_blocked_in_a_collective_shows_its_stack(scenes):
    outcomes = scenes["receiving"]
    text = outcomes[0][1]
    assert "with 1 of 3 ranks there: rank 1 is slow" in text
    assert "in receive: dist.recv(" in text
    assert "in send: _wait_for(missed)" in text
    assert [outcome[1] for outcome in outcomes] == [text] * 3
    assert outcomes[0][3] == 3.0


def test_a_rank_that_holds_the_interpreter_is_unresponsive(scenes):
    text = _check_missed(scenes["holding"])
    assert re.search(
        r"2 of 3 ranks there: rank 1 is unresponsive, so native code holds its interpreter "
        r"\(its process is sleeping, after \d+\.\d s of CPU time\)$", text)


def test_a_stopped_rank_is_told_apart_and_raises_the_same_when_it_goes_on(scenes):
    text = _check_missed(scenes["stopped"])
    assert text.endswith("with 2 of 3 ranks there: rank 1 is stopped by a signal (SIGSTOP or a debugger)")


def test_ranks_at_different_points_hear_of_it_at_once(scenes):
    for kind, text, seconds in scenes["mismatch"]:
        assert kind == "SyncMismatch"
        assert text.startswith("ranks came to different sync points at once: ")
        assert "rank 1 came to 'evaluate'" in text
        assert seconds < SOON_S
    assert len({text for _, text, _ in scenes["mismatch"]}) == 1


def test_a_source_that_beats_is_waited_for_and_one_that_does_not_is_missed(scenes):
    for beating, silent in scenes["patience"]:
        assert beating == "drawn"
        assert silent[0] == "SyncTimeout"
        assert "'prompts' timed out after 1 s with 2 of 3 ranks there: rank 0 is slow" in silent[1]
    assert len({silent[1] for _, silent in scenes["patience"]}) == 1


def test_values_and_bytes_come_to_every_rank(scenes):
    first = scenes["exchanged"][0]
    assert scenes["exchanged"] == [first] * 3
    assert first["sums"] == pytest.approx({"a": 0.1 + 0.1 * 3 + 0.1 * 9, "b": 6.0}, rel=1e-15)
    assert first["maxima"] == {"c": -1.0}
    assert first["undefined"] == "nan"
    assert first["gathered"] == [[1, ""], [2, "2"], [3, "33"]]
    assert first["broadcast"] == [b"abc".hex(), 0]
    assert first["scattered"] == [True, True, True]
    assert first["nothing"] == ""


def test_parts_that_come_late_come(scenes):
    assert scenes["scattered late"] == [[1, 1], [1000, 1000], [1, 1]]


def test_a_failure_ends_all_waits_and_every_later_point(scenes):
    for rank, errors in enumerate(scenes["failure"]):
        for name, (kind, text, seconds) in zip(("export", "evaluate"), errors, strict=True):
            assert kind == "PeerError"
            assert text == f"sync point {name!r} cannot be passed: rank 1 failed: ValueError: no such prompt"
            assert seconds < SOON_S, rank


def test_a_rank_killed_inside_a_collective_is_named(played):
    for rank in (0, 2):
        for name, (kind, text, seconds) in zip(("train_step", "save"), played[rank][1], strict=True):
            assert kind == "PeerError"
            assert text == f"sync point {name!r} cannot be passed: rank 1 was killed by SIGKILL"
            assert seconds < SOON_S


def _stopped_inside(groups, folder):
    groups.sync._judge._patience_s = DEADLINE_S
    groups.sync.barrier("start")
    named = [Path(folder, f"named by {rank}") for rank in (0, 2)]
    if groups.rank == 1:
        groups.sync.arrive("parts")
        _stop_until(*named)
        return [_outcome(groups.sync.barrier, "save")]
    error = _outcome(groups.sync.gather, "parts", "a")
    named[groups.rank // 2].touch()
    return [error, _outcome(groups.sync.barrier, "save")]


def test_a_rank_that_is_stopped_inside_a_collective_is_named_to_those_that_are_in_it(tmp_path):
    results = run_ranks(_stopped_inside, world=3, argument=str(tmp_path), check=False)
    for rank in range(3):
        kind, text, seconds = results[rank][0]
        assert kind == "StuckError"
        assert re.fullmatch(
            r"rank 1 is stopped by a signal \(SIGSTOP or a debugger\), for \d+\.\d s, while others wait for it in 'parts'", text)
        assert seconds < SOON_S


@pytest.fixture(scope="module")
def played_without_store(tmp_path_factory):
    results = run_ranks(
        _play_without_store, world=3, argument=str(tmp_path_factory.mktemp("signs")), check=False, rank_0_hosts=True)
    assert isinstance(results[1], list), results
    assert isinstance(results[2], list), results
    return results


def test_a_stopped_host_of_the_store_is_named_by_those_that_wait_and_by_itself(played_without_store):
    outcomes = played_without_store[1][0]
    text = ("sync point 'export' timed out after 1 s: rank 0 is stopped by a signal (SIGSTOP or a debugger), "
            "and with it the store that it hosts")
    assert [outcome[:2] for outcome in outcomes] == [["SyncTimeout", text]] * 3
    assert all(DEADLINE_S <= outcome[2] < SOON_S for outcome in outcomes[1:])
    assert all(outcome[3] == 3.0 for outcome in outcomes)


def test_a_killed_host_of_the_store_is_named(played_without_store):
    for rank in (1, 2):
        for name, (kind, text, seconds) in zip(("save", "evaluate"), played_without_store[rank][1], strict=True):
            assert kind == "PeerError"
            assert text == f"sync point {name!r} cannot be passed: rank 0 was killed by SIGKILL, and with it the store that it hosts"
            assert seconds < SOON_S


def test_an_exit_is_named_at_once_to_those_that_wait_and_those_that_come_later():
    for errors in run_ranks(_exit_while_others_wait, world=3, check=False)[:2]:
        for name, (kind, text, seconds) in zip(("save", "evaluate"), errors, strict=True):
            assert kind == "PeerError"
            assert text == f"sync point {name!r} cannot be passed: rank 2 exited with code 3"
            assert seconds < SOON_S


def test_an_exception_that_ends_a_rank_is_told_to_those_that_wait():
    kind, text, seconds = run_ranks(_raise_while_others_wait, world=2, check=False)[0]
    assert kind == "PeerError"
    assert text == "sync point 'save' cannot be passed: rank 1 failed: ValueError: no such prompt"
    assert seconds < SOON_S


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf")])
def test_a_timeout_that_is_not_a_positive_number_is_refused(timeout_s):
    with pytest.raises(ConfigError, match=f"timeout of sync point 'save' must be a number of seconds > 0, got {timeout_s}"):
        run_alone(lambda groups, _: groups.sync.barrier("save", timeout_s=timeout_s))


def test_a_single_rank_waits_for_nobody():
    def act(groups, _):
        groups.sync.barrier("save")
        groups.sync.fail("nobody hears it")
        with groups.sync.region("step"):
            dist.all_reduce(torch.zeros(1), group=groups.cpu_group)
        return [groups.sync.sum_scalars("sum", {"x": 2.0}), groups.sync.gather("gather", "a"), groups.sync.broadcast("bytes", b"b"),
                groups.sync.scatter("parts", [b"c"])]

    assert run_alone(act) == [{"x": 2.0}, ["a"], b"b", b"c"]
