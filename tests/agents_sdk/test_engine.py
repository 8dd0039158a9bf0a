"""The embedded engine, and the recording proxy before it, asked by unmodified SDKs and agents: strict types, and structured outputs."""

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.test_chats import CALL, THOUGHT, write_model
from image_models import make_folder, picture
from offbeat.agents.proxy import Proxy
from offbeat.chat.parsing import AnswerParser
from offbeat.chat.rendering import Renderer
from offbeat.data.tokenizer import load_tokenizer
from offbeat.data.trajectory import Trajectory
from offbeat.engine.options import EngineOptions
from offbeat.engine.server import EngineServer
from offbeat.fleet.dispatch import Dispatcher
from offbeat.fleet.pool import EnginePool
from offbeat.inference.client import EngineClient, EngineSession
from offbeat.inference.sampling import Sampling

REPOSITORY, HERE = Path(__file__).parents[2], Path(__file__).parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("thinks"), {"\n": THOUGHT})


@pytest.fixture(scope="module")
def url(model: str) -> Iterator[str]:
    server = EngineServer(EngineOptions(model=model))
    yield server.start()
    server.stop()


def run(program: str, url: str, *arguments: str) -> list[str]:
    done = subprocess.run(
        [REPOSITORY / ".venv-agents-a/bin/python", HERE / "programs" / program, url, *arguments], capture_output=True, text=True,
        check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_answers_pass_the_strict_types_of_both_sdks(url: str) -> None:
    assert len(run("strict_types.py", url)) == 10


def test_streams_with_calls_add_up_to_whole_answers_in_both_sdks(tmp_path: Path) -> None:
    server = EngineServer(EngineOptions(model=write_model(tmp_path, {"\n": THOUGHT, THOUGHT: "x", "x": "y", "y": CALL, CALL: "z"})))
    try:
        told = run("streams.py", server.start())
    finally:
        server.stop()
    assert told == ["chat completions sevenxyz {\"a\": 3} 4", "Responses sevenxyz {\"a\": 3} 4", "Messages sevenxyz {'a': 3} 4"]


def test_agents_of_two_libraries_get_what_their_schemas_say(url: str) -> None:
    told = run("structured_outputs.py", url)
    assert len(told) == 4 and {line.split()[-1] for line in told} <= {"x", "y"}


def test_at_the_recording_proxy_they_get_the_same_and_are_recorded_token_by_token(url: str, model: str) -> None:
    tokenizer = load_tokenizer(model)

    async def played() -> tuple[list[str], list[Trajectory]]:
        renderer = Renderer(tokenizer)
        async with EngineSession() as engines, Proxy(renderer, AnswerParser(renderer)) as proxy:
            pool = EnginePool([EngineClient("engine", url, engines.session)])
            pool.admit("engine", 0)
            session = proxy.open(Dispatcher(pool, request_timeout_s=60).generate, Sampling(max_new_tokens=64))
            told = await asyncio.to_thread(run, "structured_outputs.py", proxy.path_url(session))
            return told, session.chains(1.0, episode=0)

    told, chains = asyncio.run(asyncio.wait_for(played(), 300))
    assert len(told) == 4 and {line.split()[-1] for line in told} <= {"x", "y"}
    written = [tokenizer.decode(chain.tokens[chain.loss_mask.astype(bool)].tolist()) for chain in chains]
    assert sorted(json.loads(text)["letter"] for text in written) == sorted(line.split()[-1] for line in told)


def test_pictures_are_read_alike_in_both_sdks_and_a_bad_one_is_one_sentence(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy", "smolvlm")
    picture().save(tmp_path / "a.png")
    server = EngineServer(EngineOptions(model=str(folder), images=str(tmp_path / "images")))
    try:
        counts, *refused = run("images.py", server.start(), str(tmp_path / "a.png"))
    finally:
        server.stop()
    assert len(set(counts.split())) == 1
    first, second, third = refused
    assert first == third and first.startswith("the chat: image 1 is no image in one of the formats")
    assert second.endswith("is the address 'https://example.org/a.png' (str), and nothing is fetched; send a data URI")
    assert len(list((tmp_path / "images").glob("*.image"))) == 1
