"""An engine that a program starts: it answers prompts and chats, over HTTP too, and leaves nothing."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import psutil
import pytest

import offbeat
from offbeat.errors import ConfigError, ModelError, RefusedError


@pytest.fixture(scope="module")
def engine(model_dir: str) -> Iterator[offbeat.Engine]:
    with offbeat.Engine(model_dir, threads=1) as engine:
        yield engine


def test_one_prompt_gives_one_answer_and_several_give_a_list(engine: offbeat.Engine) -> None:
    one = engine.generate("321>", max_new_tokens=4, temperature=0)
    assert isinstance(one, offbeat.Completion) and str(one) == one.text
    assert len(one.tokens) == len(one.logprobs) <= 4 and one.finish_reason in ("stop", "length")
    several = engine.generate(["321>", "12>"], max_new_tokens=4, temperature=0)
    assert len(several) == 2 and several[0].tokens == one.tokens
    again = [engine.generate(["321>", "321>"], max_new_tokens=8, seed=5) for _ in range(2)]
    drawn = [[completion.tokens for completion in several] for several in again]  # log-probabilities depend a little on what runs beside
    assert drawn[0] == drawn[1] and drawn[0][0] == engine.generate("321>", max_new_tokens=8, seed=5).tokens


def test_a_chat_is_answered_by_the_template(engine: offbeat.Engine) -> None:
    asked = engine.chat("12", max_new_tokens=3, temperature=0)
    assert asked == engine.chat([{"role": "user", "content": "12"}], max_new_tokens=3, temperature=0)


def test_it_answers_over_http_to_who_has_the_key(engine: offbeat.Engine) -> None:
    def post(headers: dict[str, str]) -> dict:
        body = json.dumps({"prompt": "321>", "max_tokens": 4, "temperature": 0}).encode()
        request = urllib.request.Request(f"{engine.url}/v1/completions", body, {"content-type": "application/json", **headers})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    text = post({"authorization": f"Bearer {engine.key}"})["choices"][0]["text"]
    assert text == engine.generate("321>", max_new_tokens=4, temperature=0).text
    with pytest.raises(urllib.error.HTTPError, match="401"):
        post({})


def test_what_cannot_be_asked_is_told(engine: offbeat.Engine) -> None:
    with pytest.raises(RefusedError, match="context"):
        engine.generate("1" * 80)
    with pytest.raises(ConfigError, match="stop must be a list of texts, got 'x'"):
        engine.generate("1>", stop="x")
    assert engine.generate([]) == []


def test_an_engine_starts_when_it_is_asked_and_leaves_nothing_when_it_is_closed(model_dir: str) -> None:
    def children() -> set[psutil.Process]:
        return set(psutil.Process().children(recursive=True))

    before = children()
    engine = offbeat.Engine(model_dir, threads=1)
    assert engine.url == "" and children() == before
    engine.close()
    answer = engine.generate("1>", max_new_tokens=2)
    assert engine.url and len(children() - before) == 1 and len(answer.tokens) <= 2
    engine.close()
    engine.close()
    assert engine.url == "" and children() == before


def test_an_engine_rounds_its_weights_where_it_is_told_to(model_dir: str, engine: offbeat.Engine) -> None:
    with offbeat.Engine(model_dir, threads=1, dtype="auto", quantization="int8") as rounded:
        mine, exact = (each.generate("321>", max_new_tokens=1, temperature=0).logprobs for each in (rounded, engine))
    assert mine != exact and mine == pytest.approx(exact, abs=1)


def test_an_engine_that_cannot_be_is_refused_at_once(tmp_path) -> None:
    with pytest.raises(ConfigError, match="threads must be >= 0, got -1"):
        offbeat.Engine(tmp_path, threads=-1)
    with pytest.raises(ConfigError, match="quantization must be 'none' or 'int8', got 'int4'"):
        offbeat.Engine(tmp_path, quantization="int4")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="quantization must be 'none' with device = 0, got 'int8'; it is for engines on CPUs"):
        offbeat.Engine(tmp_path, quantization="int8", device=0)
    with pytest.raises(ModelError, match=str(tmp_path)):
        offbeat.Engine(tmp_path).start()
