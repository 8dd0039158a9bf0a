"""What a server is made of; `tests/cli/test_serve.py` runs whole ones."""

from pathlib import Path

import pytest

from offbeat.cluster.material import read_base
from offbeat.config.load import load_config
from offbeat.config.root import Config
from offbeat.errors import ConfigError, StorageError
from offbeat.service.serve import base_model_name, check_address, open_record, tokenizer_id


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


def test_a_data_folder_is_one_servers(tmp_path: Path) -> None:
    with open_record(tmp_path), pytest.raises(ConfigError, match="is in use by another server; wait for it, or give another --data-dir"):
        open_record(tmp_path)
    with open_record(tmp_path):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written"):
        open_record(tmp_path / "file")
