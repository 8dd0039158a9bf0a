"""Many SDK clients at once, for minutes, each with an adapter of its own; with --faults the server and its workers are killed meanwhile.

    .venv-tinker/bin/python tests/sdk/load.py [--clients 32] [--seconds 180] [--faults]

Every client trains, saves, and samples what it has published. When something fails it goes on from its last acknowledged checkpoint, whose
loss on a probe has to be what it was. Prints one JSON line: rounds, errors, the slowest client against the median, memory.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
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


@dataclass
class Tenant:
    """One client: what it has done and what it has been told is safe."""

    number: int
    rounds: int = 0
    errors: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    saved: tuple[str, float] | None = None

    def run(self, url: str, end: float) -> None:
        while time.monotonic() < end:
            try:
                self._work(url, end)
            except (tinker.TinkerError, TimeoutError, ValueError, OSError) as exc:
                self.errors.append(f"{type(exc).__name__}: {exc}"[:300])
                time.sleep(0.5)

    def _work(self, url: str, end: float) -> None:
        rng = np.random.default_rng(self.number)
        probe = [datum(random_tokens(rng, 20))]
        service = tinker.ServiceClient(base_url=url, api_key=f"tml-tenant-{self.number}")
        try:
            if self.saved is None:
                client = ready(service.create_lora_training_client(base_model=MODEL_NAME, rank=8, seed=self.number))
            else:
                path, loss = self.saved
                client = ready(service.create_training_client_from_state_with_optimizer(path))
                found = total(client, probe)
                if abs(found - loss) > 1e-4 * abs(loss):
                    self.lost.append(f"{path} scores {found}, and scored {loss}")
            while time.monotonic() < end:
                self._round(client, rng, probe)
                self.rounds += 1
        finally:
            service.close("success") if hasattr(service, "close") else None

    def _round(self, client: tinker.TrainingClient, rng: np.random.Generator, probe: list[types.Datum]) -> None:
        data = [datum(random_tokens(rng, int(length))) for length in rng.integers(10, 60, 4)]
        passed, stepped = client.forward_backward(data, "cross_entropy"), client.optim_step(adam(1e-3))
        passed.result(DEADLINE_S)
        stepped.result(DEADLINE_S)
        if self.rounds % SAVE_EVERY == 0:
            loss = total(client, probe)
            path = client.save_state(f"round-{self.rounds:06d}").result(DEADLINE_S).path
            self.saved = (path, loss)
        sampler = ready(client.save_weights_and_get_sampling_client())
        params = types.SamplingParams(max_tokens=16, stop=[])
        found = sampler.sample(types.ModelInput.from_ints(random_tokens(rng, 8)), 4, params).result(DEADLINE_S)
        assert len(found.sequences) == 4


def total(client: tinker.TrainingClient, data: list[types.Datum]) -> float:
    return -sum(float(values.sum()) for values in logprobs(client, data))


def tree(server: Server) -> list[psutil.Process]:
    return [psutil.Process(server.process.pid), *server.children()] if server.process else []


def memory_mb(server: Server) -> float:
    """Of the server and its workers, each page counted once."""
    return sum(process.memory_full_info().pss for process in tree(server)) / 2**20


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
    args = parser.parse_args()
    os.environ["TINKER_TELEMETRY"] = "0"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = build_model(folder / "base" / MODEL_NAME)
        (folder / "server").mkdir()
        with Server(model, folder / "server") as server:
            print(json.dumps(run(server, args)), flush=True)


def run(server: Server, args: argparse.Namespace) -> dict[str, object]:
    end = time.monotonic() + args.seconds
    tenants = [Tenant(number) for number in range(args.clients)]
    threads = [threading.Thread(target=tenant.run, args=(server.url, end), daemon=True) for tenant in tenants]
    for thread in threads:
        thread.start()
    memory, faults, rng = [], [], np.random.default_rng(0)
    while time.monotonic() < end - 20:
        time.sleep(20)
        memory.append(round(memory_mb(server)))
        print(f"{sum(tenant.rounds for tenant in tenants)} rounds, {memory[-1]} MB", file=sys.stderr, flush=True)
        if args.faults and time.monotonic() < end - 30:
            faults.append(hurt(server, rng))
            print("killed", faults[-1], file=sys.stderr, flush=True)
    for thread in threads:
        thread.join(timeout=DEADLINE_S)
    rounds = [tenant.rounds for tenant in tenants]
    errors = [error for tenant in tenants for error in tenant.errors]
    return {
        "clients": args.clients, "seconds": args.seconds, "rounds": sum(rounds),
        "median_over_slowest": round(statistics.median(rounds) / max(min(rounds), 1), 2),
        "hanging": sum(thread.is_alive() for thread in threads), "errors": len(errors), "first_errors": errors[:5],
        "lost_checkpoints": [text for tenant in tenants for text in tenant.lost], "faults": faults, "memory_mb": memory}


if __name__ == "__main__":
    main()
