"""Many SDK clients at once, for minutes, each with an adapter of its own; with --faults the server and its workers are killed meanwhile.

    .venv-tinker/bin/python tests/sdk/load.py [--clients 32] [--seconds 180] [--faults | --hostile [--compare]]

Every client trains, saves, and samples what it has published. When something fails it goes on from its last acknowledged checkpoint, whose
loss on a probe has to be what it was, and so it has to be at the end. With --hostile one more owner attacks the server all the time
(`hostile.py`); with --compare there is a run without it before, on a server of its own, and the ratio of the two is told.

Prints one JSON line: rounds, errors, the slowest client against the median, and by kind of call the latency that clients saw, in seconds;
memory by process at the start, at most and at the end, in MB.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import tinker
from tinker import types

sys.path.insert(0, str(Path(__file__).parent))

from server import MODEL_NAME, Server
from small_model import build_model
from work import adam, datum, logprobs, random_tokens, ready

DEADLINE_S = 120
SAVE_EVERY = 5
MEMORY_EVERY_S = 1.0


@dataclass
class Tenant:
    """One client: what it has done, how long it took, and what it has been told is safe."""

    number: int
    rounds: int = 0
    errors: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    saved: tuple[str, float] | None = None
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def run(self, url: str, end: float) -> None:
        while time.monotonic() < end:
            try:
                self._work(url, end)
            except (tinker.TinkerError, TimeoutError, ValueError, OSError) as exc:
                self.errors.append(f"{type(exc).__name__}: {exc}"[:300])
                time.sleep(0.5)

    def verify(self, url: str) -> None:
        """What is safe is there, and the same."""
        if self.saved is None:
            return
        try:
            service = self._connect(url)
            self._go_on(service, self._probe())
            service.close("success") if hasattr(service, "close") else None
        except (tinker.TinkerError, TimeoutError, ValueError, OSError) as exc:
            self.lost.append(f"{self.saved[0]}: {type(exc).__name__}: {exc}"[:300])

    def _connect(self, url: str) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=url, api_key=f"tml-tenant-{self.number}")

    def _probe(self) -> list[types.Datum]:
        return [datum(random_tokens(np.random.default_rng(self.number), 20))]

    def _go_on(self, service: tinker.ServiceClient, probe: list[types.Datum]) -> tinker.TrainingClient:
        assert self.saved is not None
        path, loss = self.saved
        client = ready(service.create_training_client_from_state_with_optimizer(path))
        found = total(client, probe)
        if abs(found - loss) > 1e-4 * abs(loss):
            self.lost.append(f"{path} scores {found}, and scored {loss}")
        return client

    def _work(self, url: str, end: float) -> None:
        rng, probe = np.random.default_rng((self.number, self.rounds)), self._probe()
        service = self._connect(url)
        try:
            with self._timed("create"):
                if self.saved is None:
                    client = ready(service.create_lora_training_client(base_model=MODEL_NAME, rank=8, seed=self.number))
                else:
                    client = self._go_on(service, probe)
            while time.monotonic() < end:
                self._round(client, rng, probe)
                self.rounds += 1
        finally:
            service.close("success") if hasattr(service, "close") else None

    def _round(self, client: tinker.TrainingClient, rng: np.random.Generator, probe: list[types.Datum]) -> None:
        data = [datum(random_tokens(rng, int(length))) for length in rng.integers(10, 60, 4)]
        with self._timed("pass and step"):
            passed, stepped = client.forward_backward(data, "cross_entropy"), client.optim_step(adam(1e-3))
            passed.result(DEADLINE_S)
            stepped.result(DEADLINE_S)
        if self.rounds % SAVE_EVERY == 0:
            with self._timed("score"):
                loss = total(client, probe)
            with self._timed("save"):
                path = client.save_state(f"round-{self.rounds:06d}").result(DEADLINE_S).path
            self.saved = (path, loss)
        with self._timed("publish"):
            sampler = ready(client.save_weights_and_get_sampling_client())
        params = types.SamplingParams(max_tokens=16, stop=[])
        with self._timed("sample"):
            found = sampler.sample(types.ModelInput.from_ints(random_tokens(rng, 8)), 4, params).result(DEADLINE_S)
        assert len(found.sequences) == 4

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[what].append(time.monotonic() - start)


def total(client: tinker.TrainingClient, data: list[types.Datum]) -> float:
    return -sum(float(values.sum()) for values in logprobs(client, data))


class Memory:
    """Resident memory of the server and of each of its workers, looked at once a second."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._over_time: dict[str, list[int]] = defaultdict(list)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> dict[str, list[int]]:
        """At the start, at most and at the end, in MB, by process."""
        self._end.set()
        self._thread.join()
        return {name: [round(mb / 2**20) for mb in (seen[0], max(seen), seen[-1])] for name, seen in self._over_time.items()}

    @property
    def now_mb(self) -> int:
        return round(sum(seen[-1] for seen in self._over_time.values()) / 2**20)

    def _watch(self) -> None:
        while not self._end.wait(MEMORY_EVERY_S):
            for process in tree(self._server):
                try:
                    self._over_time[role(process)].append(process.memory_info().rss)
                except psutil.Error:  # it was killed
                    continue


def tree(server: Server) -> list[psutil.Process]:
    process = server.process  # another thread may be starting it again
    try:
        return [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)] if process else []
    except psutil.Error:
        return []


def role(process: psutil.Process) -> str:
    """"service", or what a worker is called in its command line."""
    command = process.cmdline()
    if "offbeat.process" in command:
        return command[command.index("offbeat.process") + 2]
    return "service" if "serve" in command else "others"


def hurt(server: Server, rng: np.random.Generator) -> str:
    """Kill the server and start it again, or one of its workers."""
    victims = [child for child in server.children() if "worker" in " ".join(child.cmdline()) or not child.children()]
    which = int(rng.integers(0, len(victims) + 1))
    if which == len(victims):
        server.kill()
        server.start()
        return "server"
    name = " ".join(victims[which].cmdline())[-60:]
    victims[which].kill()
    return name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--faults", action="store_true", help="kill the server, an engine or the trainer every 20 seconds")
    parser.add_argument("--hostile", action="store_true", help="let one more owner attack the server all the time")
    parser.add_argument("--compare", action="store_true", help="with --hostile: run without it, too, and tell the ratio")
    args = parser.parse_args()
    if args.compare and not args.hostile:
        parser.error("--compare needs --hostile, for that is what it compares")
    os.environ["TINKER_TELEMETRY"] = "0"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # with the server
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = build_model(folder / "base" / MODEL_NAME)
        calm = serve_and_run(model, folder / "calm", args, hostile=False) if args.compare else None
        found = serve_and_run(model, folder / "server", args, hostile=args.hostile)
    if calm is not None:
        found |= {"without": calm, "p95_ratio": ratios(found, calm)}
    print(json.dumps(found), flush=True)


def serve_and_run(model: Path, folder: Path, args: argparse.Namespace, *, hostile: bool) -> dict[str, object]:
    folder.mkdir()
    with Server(model, folder) as server:
        return run(server, args, hostile=hostile)


def run(server: Server, args: argparse.Namespace, *, hostile: bool) -> dict[str, object]:
    end = time.monotonic() + args.seconds
    tenants = [Tenant(number) for number in range(args.clients)]
    threads = [threading.Thread(target=tenant.run, args=(server.url, end), daemon=True) for tenant in tenants]
    memory = Memory(server)
    attacks = attack(server.url, args.seconds) if hostile else None
    for thread in threads:
        thread.start()
    faults, rng = [], np.random.default_rng(0)
    while time.monotonic() < end - 20:
        time.sleep(20)
        print(f"{sum(tenant.rounds for tenant in tenants)} rounds, {memory.now_mb} MB", file=sys.stderr, flush=True)
        if args.faults and time.monotonic() < end - 30:
            faults.append(hurt(server, rng))
            print("killed", faults[-1], file=sys.stderr, flush=True)
    for thread in threads:
        thread.join(timeout=DEADLINE_S)
    hanging = sum(thread.is_alive() for thread in threads)
    for tenant in tenants:
        tenant.verify(server.url)
    rounds = [tenant.rounds for tenant in tenants]
    errors = [error for tenant in tenants for error in tenant.errors]
    return {
        "clients": args.clients, "seconds": args.seconds, "rounds": sum(rounds),
        "median_over_slowest": round(statistics.median(rounds) / max(min(rounds), 1), 2),
        "hanging": hanging, "errors": len(errors), "first_errors": errors[:5],
        "verified_checkpoints": sum(tenant.saved is not None for tenant in tenants),
        "lost_checkpoints": [text for tenant in tenants for text in tenant.lost], "faults": faults, "latency_s": latencies(tenants),
        "memory_mb": memory.close(), "attacks": outcome(attacks) if attacks else {}}


def attack(url: str, seconds: float) -> "subprocess.Popen[str]":
    """The hostile owner, at work."""
    command = [sys.executable, str(Path(__file__).with_name("hostile.py")), url, str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def outcome(attacks: "subprocess.Popen[str]") -> dict[str, dict[str, int]]:
    """How often each attack was made, by the status that it got."""
    said, _ = attacks.communicate(timeout=DEADLINE_S)
    return json.loads(said)


def latencies(tenants: list[Tenant]) -> dict[str, dict[str, float]]:
    """By kind of call and of all calls together, over all clients."""
    seen: dict[str, list[float]] = defaultdict(list)
    for tenant in tenants:
        for what, seconds in tenant.seconds.items():
            seen[what] += seconds
            seen["any call"] += seconds
    return {
        what: {"calls": len(seconds)} | {f"p{share}": round(float(np.percentile(seconds, share)), 3) for share in (50, 95)}
        for what, seconds in sorted(seen.items())}


def ratios(found: dict, calm: dict) -> dict[str, float]:
    """The 95th percentile of each kind of call against what it was without the hostile owner."""
    return {
        what: round(numbers["p95"] / max(calm["latency_s"][what]["p95"], 1e-3), 2)
        for what, numbers in found["latency_s"].items() if what in calm["latency_s"]}


if __name__ == "__main__":
    main()
