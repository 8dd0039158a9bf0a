"""[serve]: the service for many tenants."""

from collections.abc import Mapping
from typing import Literal
from urllib.parse import parse_qs, urlsplit

from pydantic import field_validator

from offbeat.config.base import Change, Section, field
from offbeat.config.engine_kinds import ENGINE_KINDS

_SAMPLING_KINDS = tuple(name for name, kind in ENGINE_KINDS.items() if kind.reports_context)


class ServeConfig(Section):
    """`offbeat serve`: its address, its files, and how work is shared out."""

    on_resume = Change.FREE

    host: str = field("127.0.0.1", "Address to listen on; another one than this machine's own needs `keys`.", min_length=1)
    port: int = field(8000, "Port to listen on; 0 takes a free one.", ge=0, le=65535)
    data_dir: str = field("offbeat-data", "Folder for checkpoints, results, logs and, by default, the database.", min_length=1)
    database: str = field(
        "", "URL of the database, such as postgresql://user@host/name, with the password in $PGPASSWORD or ~/.pgpass; empty takes SQLite "
        "in `data_dir`.")
    keys: str = field("", "TOML file with owners and their API keys; empty accepts any key and treats each as a separate owner.")
    model_name: str = field("", "What clients call the base model, such as org/model; empty takes the last part of `model.path`.")
    aliases: tuple[str, ...] = field((), "Other names by which clients may ask for the base model, such as those that recipes name.")
    sampling_models: tuple[str, ...] = field(
        (), "Models that are only sampled, such as teachers, each NAME=URL of an engine that runs already; a name may come several times. "
        "$OFFBEAT_API_KEY is sent as the engines' key.")
    sampling_engine: Literal[_SAMPLING_KINDS] = field(  # pyright: ignore[reportInvalidTypeForm]
        "embedded", "Kind of the engines in `sampling_models`.")
    max_models: int = field(64, "Models that an owner may have at a time, unless `keys` says otherwise.", ge=0)
    max_queued_tokens: int = field(16 * 2**20, "Tokens in an owner's unfinished requests, unless `keys` says otherwise.", ge=0)
    max_disk_bytes: int = field(
        100 * 2**30, "Bytes of an owner's checkpoints, unnamed samplers and kept answers, unless `keys` says otherwise.", ge=0)
    max_queued_bytes: int = field(
        2**30, "Bytes of memory for an owner's unfinished requests, answers included, unless `keys` says otherwise.", ge=0)
    max_sessions: int = field(4096, "Sessions of an owner that are remembered, unless `keys` says otherwise.", ge=0)
    max_samplers: int = field(4096, "Samplers that an owner may have at a time, unless `keys` says otherwise.", ge=0)
    max_resident_models: int = field(
        0, "Models that the trainers hold at a time; the least recently used are parked on disk. 0 takes as many as fit a quarter of the "
        "machine's memory, by the largest rank and the base model's layers.", ge=0)
    allowed_hosts: tuple[str, ...] = field(
        (), "Host names besides this machine's own that requests may use, for example those of a proxy; checked where no key is needed.")
    trusted_proxies: tuple[str, ...] = field(
        (), "Addresses or networks of proxies whose X-Forwarded-For and X-Forwarded-Proto are trusted; none by default.")
    max_connections: int = field(
        8192, "Connections at a time, if half of the files that the process may open are as many; each poll holds one.", ge=16)
    max_connections_per_address: int = field(
        1024, "Connections at a time from one address, or one /64 network of IPv6, but for this machine's own and trusted proxies.", ge=1)
    public_status: bool = field(False, "Show the status page and /metrics to other machines, too.")
    max_tokens_per_pass: int = field(
        65536, "Tokens of all tenants in one forward and backward; more make better use of the trainers, fewer shorten waits.", ge=1)
    max_samples_in_flight: int = field(256, "Samples generated at once per engine; others wait for their owner's turn.", ge=1)
    max_body_bytes: int = field(
        256 * 2**20, "Largest body of a forward-backward, in bytes, also after unpacking; JSON may have less.", ge=2**20)
    gap_patience_s: float = field(5.0, "Seconds that a model's next request waits for an earlier one that has not arrived.", gt=0)
    session_timeout_s: float = field(
        600.0, "Seconds without a heartbeat after which a session's models are parked on disk; clients send one every 10 s.", gt=0)
    session_retention_s: float = field(
        86400.0, "Seconds without a heartbeat after which a session that owns nothing is forgotten, together with its unused samplers and"
        " ended runs without checkpoints.", ge=600)
    parked_retention_s: float = field(
        30 * 86400.0, "Seconds without a heartbeat after which parked models of a session end; saved checkpoints stay.", ge=3600)
    sampler_timeout_s: float = field(
        3600.0, "Seconds without a request after which an unnamed sampler is forgotten, unless it is the newest of its model and "
        "its session is not silent.", gt=0)
    orphan_retention_s: float = field(
        7 * 86400.0, "Seconds for which checkpoint folders unknown to the database, for example after an older database was restored, are"
        " kept in `checkpoints/orphans`; 0 keeps them until they are removed by hand.", ge=0)
    result_retention_s: float = field(3600.0, "Seconds for which a finished result can be fetched.", ge=600)
    stable_reinforce: Literal["", "importance_sampling", "ppo", "cispo"] = field(
        "", "Loss used in place of `stable_reinforce`, whose formula is not public; empty refuses that name.")

    @field_validator("sampling_models")
    @classmethod
    def _check_sampling_models(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for entry in given:
            name, _, url = entry.partition("=")
            if not name or not url.startswith(("http://", "https://")):
                raise ValueError(f"each must be NAME=URL of an engine, such as 'org/teacher=http://127.0.0.1:8001', got {entry!r}")
        return given

    @property
    def sampling_urls(self) -> Mapping[str, tuple[str, ...]]:
        """URLs of the engines of each model that is only sampled."""
        urls: dict[str, tuple[str, ...]] = {}
        for entry in self.sampling_models:
            name, _, url = entry.partition("=")
            urls[name] = (*urls.get(name, ()), url)
        return urls

    @field_validator("database")
    @classmethod
    def _refuse_password(cls, url: str) -> str:
        """Refuse a password in the URL, because every user of the machine can read command lines."""
        try:
            given = urlsplit(url)
            has_password = given.password is not None or "password" in parse_qs(given.query)
        except ValueError:  # not a URL at all, which is reported when the database is opened
            return url
        if has_password:
            raise ValueError(
                "the database's URL must not contain a password, which is visible on the command line; leave it out, and set PGPASSWORD or"
                " write it to ~/.pgpass")
        return url
