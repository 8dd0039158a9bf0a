"""What a server is made of; `tests/cli/test_serve.py` runs whole ones."""

import asyncio
import resource
import socket
from contextlib import closing, nullcontext
from pathlib import Path

import psutil
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request

from offbeat.config.load import load_config
from offbeat.config.root import Config
from offbeat.controller.inputs import read_base
from offbeat.errors import ConfigError, StorageError
from offbeat.listening import GuestServer
from offbeat.service.errors import NameRefusedError
from offbeat.service.keys import Keys
from offbeat.service.limits import Limits
from offbeat.service.serve import (
    _Run,
    base_model_name,
    check_address,
    check_proxies,
    is_exempt,
    max_connections,
    names_of,
    open_record,
    read_keys,
    tokenizer_id,
)
from offbeat.service.store import Store


def config(model: str = "", **serve: str) -> Config:
    return load_config(None, [("model.path", model), *((f"serve.{name}", value) for name, value in serve.items())])


def test_the_base_model_is_called_as_asked_or_after_its_folder(model_dir: str) -> None:
    assert base_model_name(config(model_dir)) == Path(model_dir).name
    assert base_model_name(config("Qwen/Qwen3-0.6B")) == "Qwen/Qwen3-0.6B"
    assert base_model_name(config(model_dir, model_name="org/model")) == "org/model"


def test_clients_on_this_machine_load_the_tokenizer_from_its_folder_and_others_by_name(model_dir: str) -> None:
    here = config(model_dir, model_name="org/model")
    assert tokenizer_id(here, read_base(here)) == str(Path(model_dir).resolve())
    open_to_all = config(model_dir, model_name="org/model", host="0.0.0.0", keys="keys.toml")
    assert tokenizer_id(open_to_all, read_base(open_to_all)) == "org/model"


@pytest.mark.parametrize(("host", "keys", "allowed"), [
    ("127.0.0.1", "", True), ("localhost", "", True), ("0.0.0.0", "", False), ("::", "", False), ("0.0.0.0", "keys.toml", True)])
def test_nobody_is_let_in_from_elsewhere_without_keys(host: str, keys: str, allowed: bool) -> None:
    if allowed:
        check_address(config(host=host, keys=keys))
    else:
        with pytest.raises(ConfigError, match=r"serve\.keys must name a file"):
            check_address(config(host=host, keys=keys))


def test_owners_may_take_up_what_is_configured_unless_their_file_says_otherwise(tmp_path: Path) -> None:
    given = {
        "max_models": "3", "max_queued_tokens": "100", "max_disk_bytes": "5", "max_queued_bytes": "6", "max_sessions": "8",
        "max_samplers": "9"}
    assert read_keys(config(**given)).limits_of("key-1") == Limits(3, 100, 5, 6, 8, 9)
    (tmp_path / "keys.toml").write_text('[owners.alice]\nkey = "tml-alice-0123456789"\nmax_models = 7\nmax_sessions = 70\n')
    assert read_keys(config(keys=str(tmp_path / "keys.toml"), **given)).limits_of("alice") == Limits(7, 100, 5, 6, 70, 9)
    assert read_keys(config()).limits_of("key-1") == Limits()


def test_http_that_fails_ends_the_server(model_dir: str, tmp_path: Path) -> None:
    async def body(run: _Run) -> None:
        closed = socket.socket()
        closed.close()
        server = GuestServer(uvicorn.Config(Starlette(), lifespan="off", log_config=None))
        running = asyncio.create_task(run._until_stopped(server, closed))
        await asyncio.wait([running], timeout=60)
        assert running.done() and isinstance(running.exception(), OSError)

    settings = config(model_dir)
    with closing(Store.open(f"sqlite:///{tmp_path / 'service.db'}")) as store:
        asyncio.run(body(_Run(settings, read_base(settings), Keys.open_house(), store, print)))


def test_a_data_folder_is_one_servers(tmp_path: Path) -> None:
    with open_record(tmp_path), pytest.raises(ConfigError, match="is in use by another server; wait for it, or give another --data-dir"):
        open_record(tmp_path)
    with open_record(tmp_path):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written"):
        open_record(tmp_path / "file")


def test_connections_leave_files_for_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max_connections(config(max_connections="50")) == 50
    monkeypatch.setattr(resource, "getrlimit", lambda _: (400, 400))
    monkeypatch.setattr(psutil.Process, "num_fds", lambda _: 60)
    assert max_connections(config()) == 170, "as many clients that never finish a request leave half of ulimit -n 400"


@pytest.mark.parametrize(("address", "exempt"), [
    ("127.0.0.1", True), ("::1", True), ("10.2.3.4", True), ("192.0.2.1", True), ("192.0.2.2", False), ("2001:db8:0:1::/64", True),
    ("2001:db9:0:1::/64", False), ("", False)])
def test_this_machine_and_proxies_may_have_any_number_of_connections(address: str, exempt: bool) -> None:
    assert is_exempt(config(trusted_proxies='["10.0.0.0/8", "192.0.2.1", "2001:db8::/32"]'), address) is exempt
    assert is_exempt(config(), address) is (address in ("127.0.0.1", "::1"))


def test_proxies_are_addresses() -> None:
    check_proxies(config(trusted_proxies='["127.0.0.1", "fd00::/8"]'))
    with pytest.raises(ConfigError, match=r"serve\.trusted_proxies must hold addresses or networks such as 10\.0\.0\.0/8: .*'proxy'"):
        check_proxies(config(trusted_proxies='["proxy"]'))


@pytest.mark.parametrize(("host", "open_house", "with_keys"), [
    ("localhost", True, True), ("name.example", True, True), ("10.0.0.7", False, True), ("listens.example", False, True),
    ("evil.example", False, False)])
def test_a_server_without_keys_answers_to_fewer_names(host: str, open_house: bool, with_keys: bool) -> None:
    http = Request({"type": "http", "method": "GET", "path": "/", "headers": [(b"host", host.encode())]})
    names = {"allowed_hosts": '["name.example"]', "host": "listens.example"}
    for keys, allowed in (("", open_house), ("keys.toml", with_keys)):
        with nullcontext() if allowed else pytest.raises(NameRefusedError):
            names_of(config(keys=keys, **names)).demand(http)
