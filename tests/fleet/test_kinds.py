"""Each kind of engine has what speaks to it, and what starts it where it is a server."""

from pathlib import Path

import pytest

from image_models import make_folder
from offbeat.config.engine_kinds import ENGINE_KINDS
from offbeat.fleet.kinds import MAKERS, Serving
from offbeat.inference.dialects.embedded import EmbeddedDialect
from offbeat.inference.dialects.sglang import SGLangDialect
from offbeat.inference.dialects.vllm import VllmDialect
from small_run import small_config


def test_the_two_tables_have_the_same_kinds() -> None:
    assert MAKERS.keys() == ENGINE_KINDS.keys()


@pytest.mark.parametrize(("engine", "dialect"), [("embedded", EmbeddedDialect), ("vllm", VllmDialect), ("sglang", SGLangDialect)])
def test_each_kind_has_a_dialect_to_publish_in_and_one_to_ask_in(engine: str, dialect: type, tmp_path: Path) -> None:
    config = small_config(tmp_path, inference__engine=engine)
    assert type(MAKERS[engine].dialect(config.for_engines, "model")) is dialect is type(MAKERS[engine].reader())


@pytest.mark.parametrize("engine", [name for name, kind in ENGINE_KINDS.items() if not kind.inside])
def test_a_servers_key_is_in_its_environment_alone(engine: str, tmp_path: Path) -> None:
    words, env = MAKERS[engine].command(small_config(tmp_path, inference__engine=engine), Serving("model", "words", 3, 5, "the-key"))
    assert "the-key" in env.values() and not any("the-key" in word for word in words)
    assert {"model", "words", "5"} <= set(words)


@pytest.mark.parametrize(("family", "reads"), [("qwen3_vl", True), ("gemma3", False), ("", False)])
def test_a_vllm_server_gets_the_folder_of_images_if_it_reads_them(family: str, reads: bool, tmp_path: Path) -> None:
    model = str(make_folder(tmp_path / "model", family)) if family else "a/model-of-the-hub"
    words, env = MAKERS["vllm"].command(small_config(tmp_path / "runs", inference__engine="vllm"), Serving(model, "words", 3, 5, "key"))
    assert env.get("OFFBEAT_IMAGES", "") == (str(tmp_path / "runs" / ".images") if reads else "")
    assert ("--limit-mm-per-prompt" in words) == reads
