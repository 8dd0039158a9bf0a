"""Judges against a real HTTP server that answers as it is told."""

import asyncio
import json
import math
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from offbeat.data.image_sources import MARK, ImageSource
from offbeat.data.reward import FailedReward, NamedReward, is_of_group
from offbeat.data.row import Row
from offbeat.errors import CodeError
from offbeat.rollout.judges import Judge, judge_reward, last_score, read_judge
from offbeat.rollout.reward_pool import RewardPool

ROW = Row("Say hello.", "hello")
Answer = str | tuple[int, bytes, dict[str, str]]


class Endpoint:
    """An endpoint whose model is a function of the last message's text."""

    def __init__(self, answer: Callable[[str], Answer]) -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/chat/completions"
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.bodies.append(body)
                outer.keys.append(self.headers["Authorization"])
                said = outer.answer(body["messages"][-1]["content"])
                status, content, headers = (200, completion(said), {}) if isinstance(said, str) else said
                try:
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)
                except ConnectionError:
                    pass

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()


def completion(text: str, finish_reason: str = "stop") -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}]}).encode()


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[str], Answer]], Endpoint]]:
    made: list[Endpoint] = []

    def start(answer: Callable[[str], Answer]) -> Endpoint:
        made.append(Endpoint(answer))
        return made[-1]

    yield start
    for endpoint in made:
        endpoint.server.shutdown()
        endpoint.thread.join()
        endpoint.server.server_close()


def by_length(prompt: str) -> str:
    """A judge that likes long answers."""
    answer = re.search(r"Answer:\n(.*)\n\nWeigh", prompt, re.DOTALL)
    assert answer
    return f"It is fine. Score: {min(10, len(answer[1]))}"


def test_completions_are_scored_on_a_scale_from_0_to_1(serve) -> None:
    endpoint = serve(by_length)
    judge = Judge(endpoint.url, "judge", system="Be fair.", extra={"seed": 3})
    assert judge.scores(["", "hello", "x" * 20], ROW) == [0.0, 0.5, 1.0]
    assert judge.score("ab", ROW) == 0.2
    body = endpoint.bodies[0]
    assert {key: body[key] for key in ("model", "temperature", "max_tokens", "seed")} == {
        "model": "judge", "temperature": 0.0, "max_tokens": 1024, "seed": 3}
    assert body["messages"][0] == {"role": "system", "content": "Be fair."}
    assert "Say hello." in body["messages"][1]["content"] and "from 0 (useless) to 10 (perfect)" in body["messages"][1]["content"]
    assert endpoint.keys[0] is None


def test_what_a_completion_says_in_braces_is_not_filled_in(serve) -> None:
    endpoint = serve(lambda _: "Score: 1")
    Judge(endpoint.url, "judge", prompt='{answer} {"json": 1} {question}').score("{reference}{question}", ROW)
    assert endpoint.bodies[0]["messages"][0]["content"] == '{reference}{question} {"json": 1} Say hello.'


def test_a_chat_is_shown_with_who_spoke(serve) -> None:
    endpoint = serve(lambda _: "Score: 1")
    chat = {"role": "system", "content": "Hi."}, {"role": "user", "content": "Q"}
    Judge(endpoint.url, "judge", prompt="{question}").score("a", Row(chat, ""))
    assert endpoint.bodies[0]["messages"][0]["content"] == "system: Hi.\n\nuser: Q"


@pytest.mark.parametrize(("text", "score"), [
    ("Score: 7", 7), ("**Score**: 7.5", 7.5), ("score = 3. Then again, Score: 4", 4), ("Score: **8**/10", 8), ("7", None), ("", None),
    ("Score: seven", None), ("Score: -1", -1), ("Score: **-2.5**", -2.5), ("Score: .5", 0.5),
])
def test_the_last_score_counts(text: str, score: float | None) -> None:
    assert last_score(text) == score


@pytest.mark.parametrize(("answer", "why"), [
    ("I cannot say.", "there is no score in 'I cannot say.'"), ("Score: 11", "the score 11 is not from 0 to 10"),
    ("", "its answer is empty"), ((401, b"no such key", {}), "status 401: no such key"), ((200, b"<html>", {}), "is not a chat completion"),
    ((200, completion("Score: 4", "length"), {}), "was cut at max_tokens"),
    ((200, b'{"choices": []}', {}), "is not a chat completion"), ((500, b"oh", {}), "status 500: oh, after 2 attempts"),
])
def test_what_is_no_judgement_is_a_missing_reward_and_never_0(serve, answer: Answer, why: str) -> None:
    endpoint = serve(lambda _: answer)
    reward = Judge(endpoint.url, "judge", num_retries=1).score("a", ROW)
    assert isinstance(reward, FailedReward) and why in reward.reason
    assert math.isnan(reward)


def test_one_failure_leaves_the_others_scored(serve) -> None:
    def answer(prompt: str) -> Answer:
        return (400, b"bad", {}) if "bad one" in prompt else "Score: 10"

    good, bad = Judge(serve(answer).url, "judge").scores(["good one", "bad one"], ROW)
    assert good == 1.0
    assert isinstance(bad, FailedReward)


def test_a_request_that_did_not_come_through_is_sent_again(serve) -> None:
    answers: list[Answer] = [(429, b"slow down", {"Retry-After": "0"}), (503, b"", {}), "Score: 5"]
    endpoint = serve(lambda _: answers.pop(0))
    assert Judge(endpoint.url, "judge").score("a", ROW) == 0.5
    assert len(endpoint.bodies) == 3
    away = Judge("http://127.0.0.1:9/v1", "judge", num_retries=0).score("a", ROW)
    assert isinstance(away, FailedReward) and "refused" in away.reason


def test_what_is_late_is_missing_alone_and_in_time(serve) -> None:
    ended = threading.Event()

    def answer(prompt: str) -> Answer:
        if "slow" in prompt:
            ended.wait(30)
        return "Score: 10"

    endpoint = serve(answer)
    started = time.monotonic()
    slow, quick = Judge(endpoint.url, "judge", timeout_s=1.0, max_concurrent=2).scores(["slow", "quick"], ROW)
    assert time.monotonic() - started < 5
    ended.set()
    assert quick == 1.0
    assert isinstance(slow, FailedReward)


def test_calls_are_made_side_by_side_up_to_the_bound(serve) -> None:
    counting, running, most = threading.Lock(), [0], [0]

    def answer(_prompt: str) -> Answer:
        with counting:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.2)
        with counting:
            running[0] -= 1
        return "Score: 1"

    judge = Judge(serve(answer).url, "judge", max_concurrent=3)
    assert judge.scores([str(n) for n in range(9)], ROW) == [0.1] * 9
    assert most[0] == 3


def test_answers_are_kept_by_what_was_asked_and_only_if_they_could_be_read(serve, tmp_path: Path) -> None:
    answers = ["no", "Score: 5"]
    endpoint = serve(lambda _: answers.pop(0))
    cache = str(tmp_path / "judge.sqlite")
    assert isinstance(Judge(endpoint.url, "judge", cache=cache).score("a", ROW), FailedReward)
    assert Judge(endpoint.url, "judge", cache=cache).score("a", ROW) == 0.5
    assert Judge(endpoint.url, "judge", cache=cache).score("a", ROW) == 0.5
    assert len(endpoint.bodies) == 2
    assert isinstance(Judge(endpoint.url, "other", cache=cache, num_retries=0).score("a", ROW), FailedReward)


def test_pairs_are_judged_in_both_orders(serve) -> None:
    def longer(prompt: str) -> str:
        a, b = re.findall(r"Answer [AB]:\n(.*)\n", prompt)
        return "Verdict: tie" if len(a) == len(b) else f"Verdict: {'A' if len(a) > len(b) else 'B'}"

    judge = Judge(serve(longer).url, "judge")
    assert [judge.prefer("aa", "b", ROW), judge.prefer("a", "bb", ROW), judge.prefer("a", "b", ROW)] == [1.0, 0.0, 0.5]
    assert judge.win_rates(["aaa", "b", "cc"], ROW) == [1.0, 0.0, 0.5]
    assert judge.win_rates(["aaa", "b"], ROW, against="cc") == [1.0, 0.0]
    assert judge.win_rates(["alone"], ROW) == [0.5]


def test_a_judge_that_prefers_a_place_decides_nothing(serve) -> None:
    judge = Judge(serve(lambda _: "Verdict: A").url, "judge")
    assert judge.win_rates(["a", "bb", "ccc"], ROW) == [0.5, 0.5, 0.5]


def test_a_completion_without_any_verdict_has_no_reward(serve) -> None:
    def answer(prompt: str) -> str:
        return "I refuse." if "bad" in prompt else "Verdict: tie"

    first, second, bad = Judge(serve(answer).url, "judge").win_rates(["a", "b", "bad"], ROW)
    assert (first, second) == (0.5, 0.5)
    assert isinstance(bad, FailedReward) and "no verdict in 'I refuse.'" in bad.reason


def test_a_rubric_gives_rewards_by_name_that_sum_to_1_at_most(serve) -> None:
    def answer(prompt: str) -> str:
        assert "kind: It is kind.\nright: It is right." in prompt
        return "- **Right**: 5\nkind: 10" if "both" in prompt else "kind: 10"

    judge = Judge(serve(answer).url, "judge", rubric={"kind": (1, "It is kind."), "right": (3, "It is right.")})
    both, half = judge.scores(["both", "half"], ROW)
    assert isinstance(both, NamedReward) and both.parts == {"kind": 0.25, "right": 0.375}
    assert isinstance(half, FailedReward) and "there is no score for right" in half.reason


def test_the_key_comes_from_the_environment(serve, monkeypatch) -> None:
    endpoint = serve(lambda _: "Score: 5")
    judge = Judge(endpoint.url, "judge", key_env="OFFBEAT_TEST_JUDGE_KEY")
    missing = judge.score("a", ROW)
    assert isinstance(missing, FailedReward) and "the variable OFFBEAT_TEST_JUDGE_KEY is not set here" in missing.reason
    monkeypatch.setenv("OFFBEAT_TEST_JUDGE_KEY", "sesame")
    assert judge.score("a", ROW) == 0.5
    assert endpoint.keys == ["Bearer sesame"]


def test_a_judge_on_this_machine_is_asked_past_the_proxies_of_the_environment(serve, monkeypatch) -> None:
    proxy = serve(lambda prompt: (502, b"no such host", {}))
    monkeypatch.setenv("http_proxy", proxy.url)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    urllib.request.install_opener(None)  # it would be another test's
    endpoint = serve(by_length)
    assert Judge(endpoint.url, "judge").scores(["ab"], ROW) == [0.2]
    assert len(endpoint.bodies) == 1 and not proxy.bodies


def test_a_generative_reward_model_is_asked_and_read_in_its_own_form(serve) -> None:
    endpoint = serve(lambda prompt: "<think>no, 0</think>Yes" if prompt == "[Say hello.|hello]" else "?")
    judge = Judge(
        endpoint.url, "grm", prompt="[{question}|{answer}]", low=0, high=1,
        parse=lambda text: {"Yes": 1.0, "No": 0.0}.get(text.rpartition("</think>")[2]))
    assert judge.score("hello", ROW) == 1.0
    assert isinstance(judge.score("other", ROW), FailedReward)


def test_a_judge_is_read_from_a_file(serve, tmp_path: Path) -> None:
    endpoint = serve(lambda _: "kind: 1")
    file = tmp_path / "judge.toml"
    file.write_text(f'url = "{endpoint.url}"\nmodel = "judge"\nhigh = 2\nrubric.kind = {{weight = 2, text = "It is kind."}}\n')
    reward = judge_reward(file)
    assert is_of_group(reward)
    assert reward(["a", "b"], ROW) == [0.5, 0.5]


def test_a_judge_is_a_reward_by_the_name_of_its_file(serve, tmp_path: Path) -> None:
    endpoint = serve(by_length)
    (tmp_path / "judge.toml").write_text(f'url = "{endpoint.url}"\nmodel = "judge"\n')

    async def main() -> list[float]:
        async with RewardPool(f"judge:{tmp_path / 'judge.toml'}", num_workers=1, timeout_s=20, log_dir=None) as pool:
            assert await pool.check(ROW) == 0.5
            return await pool.score(["a", "bb"], ROW)

    assert asyncio.run(main()) == [0.1, 0.2]


@pytest.mark.parametrize(("text", "why"), [
    ("", "missing 2 required"), ('url = "http://x/v1"\nmodel = "m"\nkey = "secret"', "unknown keys key; it takes cache, extra, high"),
    ('url = "x"\nmodel = "m"', "must begin with http:// or https://, got 'x'"), ("url = ", "TOMLDecodeError"),
    ('url = "http://x/v1"\nmodel = "m"\nlow = 3\nhigh = 3', "from low to a greater high"),
    ('url = "http://x/v1"\nmodel = "m"\nrubric.a = {weight = 0, text = "b"}', "greater than 0"),
])
def test_a_file_that_is_wrong_is_said(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "judge.toml").write_text(text)
    with pytest.raises(CodeError, match=re.escape(why)):
        read_judge(tmp_path / "judge.toml")


def test_a_judge_gives_no_verdict_on_a_prompt_whose_images_it_is_not_shown(serve) -> None:
    endpoint = serve(lambda _: "Score: 1")
    seen = Row(f"{MARK}how many?", "3", images=(ImageSource(data=b"file"),))
    [failed] = Judge(endpoint.url, "judge").scores(["3"], seen)
    assert isinstance(failed, FailedReward) and "it is not shown the images of the prompt, of which there are 1" in failed.reason
    assert isinstance(Judge(endpoint.url, "judge").prefer("3", "4", seen), FailedReward)
    assert not endpoint.bodies
    assert Judge(endpoint.url, "judge", prompt="Is {answer} the number {reference}?").scores(["3"], seen) == [0.1]
    assert endpoint.bodies[0]["messages"][-1]["content"] == "Is 3 the number 3?"
