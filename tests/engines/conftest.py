"""Servers that live as long as the session, for starting vLLM takes half a minute; tests say which weights they want."""

from collections.abc import Iterator

import pytest

from contract import KINDS, MAX_ADAPTERS, MAX_RANK, Engine, Models, embedded, vllm_group
from offbeat.inference.dialects.vllm import VllmDialect


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="session")
def vllm_servers(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[str, str]]]:
    """URLs and keys: a server that takes adapters, of a model with tied heads, and one that keeps caches at a switch, of untied ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")  # for /pause and /resume
        lora = {
            "model__lora__rank": "4", "inference__max_adapters": str(MAX_ADAPTERS), "inference__max_adapter_rank": str(MAX_RANK)}
        runs = (models.folder(), lora), (models.folder(tied=False), {"weights__interrupt": "keep"})
        with vllm_group(tmp_path_factory.mktemp("vllm"), *runs) as servers:
            yield servers


@pytest.fixture(scope="session", params=KINDS)
def engine(request: pytest.FixtureRequest, models: Models) -> Iterator[Engine]:
    """An engine of each kind, of a model with tied heads, that takes adapters and whole weights."""
    model = models.folder()
    if request.param == "embedded":
        with embedded(model) as served:
            yield served
    else:
        (url, key), _ = request.getfixturevalue("vllm_servers")
        yield Engine("vllm", url, VllmDialect(model=model, whole_weights=True, lora=True, on_cpu=True), model, model, key=key)


@pytest.fixture(scope="session", params=KINDS)
def untied(request: pytest.FixtureRequest, models: Models) -> Iterator[Engine]:
    """An engine of each kind, of a model with untied heads, that keeps caches at a switch."""
    model = models.folder(tied=False)
    if request.param == "embedded":
        with embedded(model) as served:
            yield served
    else:
        _, (url, key) = request.getfixturevalue("vllm_servers")
        yield Engine("vllm", url, VllmDialect(model=model, whole_weights=True, lora=False), model, model, key=key)
