"""One owner that means harm: every attack that a server has to bear, over and over, by raw HTTP, in a process of its own.

    .venv-tinker/bin/python tests/sdk/hostile.py URL SECONDS [--only NAME ...]

Each attack has a thread, a session and a model of its own, and all have one key. Prints one JSON line: for each attack how often it was
made, and what the server said by status. A connection that the server closed counts as "closed". Used by `load.py --hostile`.
"""

import argparse
import http.client
import itertools
import json
import os
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from urllib.parse import urlsplit

import numpy as np
from server import MODEL_NAME
from tinker.proto import tinker_public_pb2 as pb

KEY = "tml-hostile"
TIMEOUT_S = 90.0
PROTOBUF = "application/x-protobuf"
HALF_REQUESTS = 300
"""Open at once."""
HEADER_BYTES = 64 << 20


class Attacker:
    """One attack's own session, model and sampler, and what the server answered."""

    def __init__(self, url: str, name: str) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        self.name = name
        self.answers: Counter[str] = Counter()
        self.numbers = itertools.count(1)
        self._session = self._model = self._sampler = ""

    # -- talking -----------------------------------------------------------------------------------------------------------------------

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, dict]:
        """One request; a body that is not bytes goes as JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        with closing(http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)) as connection:
            connection.request(method, f"/api/v1/{path}", data, {"X-API-Key": KEY, **headers})
            answer = connection.getresponse()
            content = answer.read()
        try:
            found = json.loads(content)
        except ValueError:
            found = {}
        return answer.status, found if isinstance(found, dict) else {}

    def attack(self, method: str, path: str, body: object = None, **headers: str) -> dict:
        """A request that counts."""
        status, found = self.ask(method, path, body, **headers)
        self.answers[str(status)] += 1
        return found

    def raw(self) -> socket.socket:
        """A connection on which anything may be said."""
        return socket.create_connection((self.host, self.port), timeout=TIMEOUT_S)

    def wait(self, request_id: str) -> dict:
        """The outcome of a request."""
        while True:
            status, found = self.ask("POST", "retrieve_future", {"request_id": request_id})
            if status != 408:
                return found

    # -- what most attacks need --------------------------------------------------------------------------------------------------------

    @property
    def session(self) -> str:
        if not self._session:
            self._session = self.ask("POST", "create_session", {"tags": [], "sdk_version": "0.38.0"})[1]["session_id"]
        return self._session

    @property
    def model(self) -> str:
        if not self._model:
            body = {"session_id": self.session, "model_seq_id": 0, "base_model": MODEL_NAME, "lora_config": {"rank": 8, "seed": 1}}
            self._model = self.wait(self.ask("POST", "create_model", body)[1]["request_id"])["model_id"]
        return self._model

    @property
    def sampler(self) -> str:
        if not self._sampler:
            body = {"session_id": self.session, "sampling_session_seq_id": 0, "base_model": MODEL_NAME}
            self._sampler = self.ask("POST", "create_sampling_session", body)[1]["sampling_session_id"]
        return self._sampler

    def sample(self, *, num_samples: int = 1, prompt: int = 8, params: dict | None = None, **wanted: int) -> None:
        """Ask for samples, and never fetch them."""
        self.attack("POST", "asample", {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5 + i % 80 for i in range(prompt)]}]},
            "sampling_params": {"stop": [], **(params or {})}, "sampling_session_id": self.sampler, "seq_id": next(self.numbers),
            "num_samples": num_samples, "type": "sample", **wanted})

    def forward(self, datums: int, shape: tuple[int, int], *, listed: int = 0, learn: bool = False) -> None:
        """A pass over datums of one row of sparse targets that claims to be as wide as may be, of which a few cells are listed."""
        message = pb.ForwardBackwardRequest(
            model_id=self.model, seq_id=next(self.numbers), loss_fn="cross_entropy", forward_only=not learn)
        for _ in range(datums):
            datum = message.data.add()
            datum.model_input.add().encoded_text.tokens = np.full(shape[0], 7, "<i4").tobytes()
            for name, dtype, values in (
                    ("target_tokens", pb.DTYPE_INT64, np.full(listed, 9, "<i8")), ("weights", pb.DTYPE_FLOAT32, np.ones(listed, "<f4"))):
                tensor = datum.loss_fn_inputs[name]
                tensor.dtype = dtype
                tensor.shape.extend(shape)
                tensor.sparse_csr.values = values.tobytes()
                tensor.sparse_csr.col_indices = np.arange(listed, dtype="<i8").tobytes()
                tensor.sparse_csr.crow_indices = np.array([0] + [listed] * shape[0], "<i8").tobytes()
        self.attack("POST", "forward_backward", message.SerializeToString(), **{"Content-Type": PROTOBUF})


# -- attacks -------------------------------------------------------------------------------------------------------------------------------


def wide_targets(a: Attacker) -> None:
    """A hundred bytes that stand for 16 Mi cells."""
    a.forward(1, (1, 2**24 - 1))


def wide_passes(a: Attacker) -> None:
    """A few kilobytes that are a token each for the queue, and thousands of targets for the trainers."""
    a.forward(4, (1, 4000), listed=4000, learn=True)


def many_datums(a: Attacker) -> None:
    """As many datums as may be, of a token each."""
    a.forward(2000, (1, 1), listed=1)


def large_top_k(a: Attacker) -> None:
    """The likeliest 256 tokens at each place of a long prompt and of its continuation, and as many drawn ones."""
    a.sample(prompt=100, params={"max_tokens": 150}, topk_prompt_logprobs=256, topk_sample_logprobs=256, prompt_alt_tokens_k=256)


def many_samples(a: Attacker) -> None:
    """512 long samples in one call."""
    a.sample(num_samples=512, params={"max_tokens": 240})


def many_stops(a: Attacker) -> None:
    """As many stop strings as may be, as long as may be, that nearly come to pass at every place."""
    stops = ["a" * 900 + f"{i:03d}" for i in range(64)]
    a.sample(num_samples=8, params={"max_tokens": 240, "stop": stops})


def deep_json(a: Attacker) -> None:
    """Lists within lists, and numbers without end, packed 10,000 to one."""
    packed = _packed([b'{"session_id": [', b"[" * (15 << 20)]), _packed([b'{"tags": [', b"1," * 4, b" " * (12 << 20), b"1]}"])
    for body in packed:
        a.attack("POST", "create_session", body, **{"Content-Encoding": "zstd"})


def slow_bodies(a: Attacker) -> None:
    """Four large bodies of which the last byte does not come."""
    body = b" " * (1 << 20)
    lines = ("POST /api/v1/create_session HTTP/1.1", "Host: 127.0.0.1", f"X-API-Key: {KEY}", f"Content-Length: {len(body) + 1}")
    head = ("\r\n".join(lines) + "\r\n\r\n").encode()
    sockets = [a.raw() for _ in range(4)]
    try:
        for each in sockets:
            each.sendall(head + body)
        a.answers["held"] += len(sockets)
        time.sleep(10)
    finally:
        for each in sockets:
            each.close()


def half_requests(a: Attacker) -> None:
    """Connections on which a request never comes to its end."""
    sockets = []
    try:
        for _ in range(HALF_REQUESTS):
            sockets.append(a.raw())
            sockets[-1].sendall(b"GET /api/v1/healthz HTTP/1.1\r\nHost: 127")
        a.answers["held"] += len(sockets)
        time.sleep(5)
    finally:
        for each in sockets:
            each.close()


def large_headers(a: Attacker) -> None:
    """Headers until the server has had enough, or has taken 64 MiB of them."""
    line = b"X-Filler: " + b"a" * 8000 + b"\r\n"
    with a.raw() as connection:
        connection.sendall(b"GET /api/v1/healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        for _ in range(HEADER_BYTES // len(line)):
            connection.sendall(line)
    a.answers["taken"] += 1


def sessions(a: Attacker) -> None:
    """Sessions, each with as much metadata as may be, and models and samplers in them that nobody wants."""
    found = a.attack("POST", "create_session", {"tags": ["a" * 160] * 100, "user_metadata": {"a": "b" * 60_000}})
    if session := found.get("session_id"):
        for number in range(3):
            a.attack("POST", "create_sampling_session", {
                "session_id": session, "sampling_session_seq_id": number, "base_model": MODEL_NAME})
        a.attack("POST", "create_model", {
            "session_id": session, "model_seq_id": 0, "base_model": MODEL_NAME, "lora_config": {"rank": 16}})


def saves(a: Attacker) -> None:
    """Savings of every kind, of one name, and deletions while they are under way."""
    kinds = {"save_weights": "weights", "save_weights_for_sampler": "sampler_weights", "save_weights_external": "external_weights"}
    for name, path in kinds.items():
        a.attack("POST", name, {"model_id": a.model, "seq_id": next(a.numbers), "path": "again", "overwrite": True})
        a.attack("DELETE", f"training_runs/{a.model}/checkpoints/{path}/again")


def steps(a: Attacker) -> None:
    """Steps without a pass."""
    a.attack("POST", "optim_step", {"model_id": a.model, "seq_id": next(a.numbers), "adam_params": {"learning_rate": 1e-4}})


def lists(a: Attacker) -> None:
    """Everything there is, again and again."""
    for path in ("training_runs?limit=1000", "checkpoints?limit=1000", "sessions?limit=1000"):
        a.attack("GET", path)


def wrong_keys(a: Attacker) -> None:
    """Keys that nobody has, and ids that nobody gave out."""
    a.attack("GET", f"samplers/{random.randrange(10**9)}", **{"X-API-Key": f"tml-{random.randrange(10**9)}"})
    a.attack("POST", "retrieve_future", {"request_id": "00000000-0000-0000-0000-000000000000:train:0:1"})


ATTACKS: dict[Callable[[Attacker], None], float] = {
    wide_targets: 1.0, wide_passes: 0.5, many_datums: 2.0, large_top_k: 0.5, many_samples: 0.5, many_stops: 0.5, deep_json: 1.0,
    slow_bodies: 0.1, half_requests: 0.1, large_headers: 1.0, sessions: 0.2, saves: 0.5, steps: 0.1, lists: 0.2, wrong_keys: 0.1}
"""And the seconds between two of each: what is measured is the server, not how fast this process can shout on the same machine."""


def _packed(parts: list[bytes]) -> bytes:
    """A zstd frame by hand: short parts as they are, long ones of one repeated byte as blocks of four bytes for 128 KiB."""
    size = sum(map(len, parts))
    frame = bytearray(b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", size))  # single segment, content size of four bytes
    blocks: list[tuple[int, int, bytes]] = []
    for part in parts:
        if len(part) < 1000:
            blocks.append((0, len(part), part))
        else:
            blocks += [(1, min(1 << 17, len(part) - start), part[:1]) for start in range(0, len(part), 1 << 17)]
    for index, (kind, length, content) in enumerate(blocks):
        frame += struct.pack("<I", (length << 3) | (kind << 1) | (index == len(blocks) - 1))[:3] + content
    return bytes(frame)


def repeat(act: Callable[[Attacker], None], pause_s: float, attacker: Attacker, end: float) -> None:
    """One attack for the whole time, whatever comes of it."""
    while time.monotonic() < end:
        try:
            act(attacker)
        except (OSError, http.client.HTTPException):
            attacker.answers["closed"] += 1
        except (KeyError, ValueError):  # what the attack needs was refused
            attacker.answers["refused"] += 1
            time.sleep(1.0)
        time.sleep(pause_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("seconds", type=float)
    parser.add_argument("--only", nargs="*", choices=[act.__name__ for act in ATTACKS])
    args = parser.parse_args()
    with suppress(OSError):
        os.nice(10)  # on one machine with those whom it attacks
    end = time.monotonic() + args.seconds
    chosen = {act: pause_s for act, pause_s in ATTACKS.items() if not args.only or act.__name__ in args.only}
    attackers = [(act, pause_s, Attacker(args.url, act.__name__)) for act, pause_s in chosen.items()]
    threads = [threading.Thread(target=repeat, args=(*attack, end), daemon=True) for attack in attackers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(end + 5 - time.monotonic(), 0.1))
    print(json.dumps({attacker.name: dict(sorted(attacker.answers.items())) for _, _, attacker in attackers}), flush=True)


if __name__ == "__main__":
    main()
