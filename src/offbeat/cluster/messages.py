"""Messages between the controller and its workers, besides `trainer.messages`. Torch-free, so that both ends can import it."""

from dataclasses import dataclass, field

from offbeat.dist.peers import Card


@dataclass(frozen=True)
class StoreAddress:
    """Where rank 0 serves the store through which ranks meet, and its process; None in the request that asks for it."""

    host: str
    port: int
    server: Card | None = None


@dataclass(frozen=True)
class BuildRequest:
    """Write a tiny model with random weights to `folder`, beside the tokenizer in it; `tiny` is a `TinyConfig` as JSON."""

    folder: str
    tiny: str
    vocab_size: int
    eos_token_id: int
    pad_token_id: int | None
    seed: int

    @property
    def origin(self) -> list[str | int | None]:
        """Everything that the weights depend on."""
        return [self.tiny, self.vocab_size, self.eos_token_id, self.pad_token_id, self.seed]


@dataclass(frozen=True)
class JoinRequest:
    """A rank's place among its peers, and what it trains.

    Attributes:
        config: the whole configuration as JSON.
        model: folder or hub id of the initial weights.
        many: whether it trains adapters that come and go on the model, instead of what the configuration says.
    """

    rank: int
    world: int
    store: StoreAddress
    config: str
    model: str
    many: bool = False


@dataclass(frozen=True)
class EngineStart:
    """Serve an embedded engine: its options as JSON, the key among them, and where to listen; port 0 takes a free one."""

    options: str = field(repr=False)
    host: str = "127.0.0.1"
    port: int = 0


@dataclass(frozen=True)
class ServerStart:
    """Start a server process that takes --host and --port, and wait until its /health answers.

    Attributes:
        command: program and arguments.
        env: environment variables added to the worker's, the key among them.
        timeout_s: seconds within which it must answer.
        key: the key that the server requires; empty for none.
    """

    command: tuple[str, ...]
    env: dict[str, str] = field(repr=False)
    host: str
    timeout_s: float
    key: str = field(default="", repr=False)


@dataclass(frozen=True)
class EngineAddress:
    """Where an engine listens."""

    url: str


@dataclass(frozen=True)
class EngineAddresses:
    """Where a run's engines listen, by name, and the key that all of them require; empty for none."""

    urls: dict[str, str]
    key: str = field(repr=False)
