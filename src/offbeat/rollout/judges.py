"""Judges: models behind any OpenAI-style endpoint that score completions, for a user's own rewards or as `rollout.reward = "judge:FILE"`.

    from offbeat.data.reward import of_group
    from offbeat.rollout.judges import Judge

    JUDGE = Judge(url="http://localhost:8001/v1", model="judge", cache="judge.sqlite")

    @of_group
    def reward(completions, row):
        return JUDGE.scores(completions, row)

If the endpoint is away, too slow, or answers without a score, the reward is missing (`FailedReward`) and never 0: its completion is left
out of training. With a cache, answers are kept by the content of the request, for all processes.
"""

import hashlib
import itertools
import json
import os
import re
import sqlite3
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from offbeat.data.reward import FailedReward, NamedReward, check_reward, of_group
from offbeat.data.row import Row
from offbeat.errors import CodeError, describe, printable
from offbeat.hosts import open_url
from offbeat.user_code.boundary import Caught

SCORE_PROMPT = """Judge how well the answer meets the request.

Request:
{question}

Answer:
{answer}

Weigh its strengths and its weaknesses in a few words.
Then end with a line "Score: N", where N is from {low} (useless) to {high} (perfect)."""

PAIR_PROMPT = """Judge which of two answers meets the request better.

Request:
{question}

Answer A:
{first}

Answer B:
{second}

Compare them in a few words. Then end with a line "Verdict: A", "Verdict: B", or "Verdict: tie" if neither is better."""

RUBRIC_PROMPT = """Judge how well the answer meets each of these criteria.

Request:
{question}

Answer:
{answer}

Criteria:
{criteria}

Answer with one line for each criterion, its name, a colon, and a number from {low} (not at all) to {high} (fully)."""

_QUESTION = "{question}"

_NUMBER = r"(-?(?:\d+(?:\.\d+)?|\.\d+))"
_BETWEEN = r"[^\w.+-]"
"""Characters between a colon and a number, such as white space and asterisks, but no part of the number."""

AGAIN = frozenset((408, 409, 425, 429, 500, 502, 503, 504, 529))
"""Statuses after which the same request may succeed."""
PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0


class JudgeError(Exception):
    """There is no judgement; the message says why."""


def last_score(text: str) -> float | None:
    """Return the number of the last "Score: N" in a text, or None."""
    found = re.findall(rf"score\W{{0,5}}[:=]{_BETWEEN}{{0,5}}{_NUMBER}", text, re.IGNORECASE)
    return float(found[-1]) if found else None


@dataclass(frozen=True)
class Judge:
    """A model that judges, and how it is asked.

    Attributes:
        url: base URL of an OpenAI-style endpoint, up to and with /v1.
        model: name by which the endpoint knows the model.
        key_env: environment variable with the key; it has to be let through to rewards by `rollout.reward_env`. Empty sends none.
        prompt: the request for a score; {question}, {answer}, {reference}, {low} and {high} are filled in. A generative reward model is
            asked in the form that it was trained on.
        pair_prompt: the request to compare two answers, {first} and {second}; the judge has to end with "Verdict: A", "B" or "tie".
        rubric: criteria by name, each with its weight and a sentence. With one, `scores` gives a `NamedReward` of all of them.
        system: system message; none if empty.
        low, high: ends of the scale that the prompt names; they become rewards of 0 and 1.
        parse: finds the score in the judge's text; None where there is none.
        temperature, max_tokens: sampling of the judge. An answer that is cut at `max_tokens` is no judgement.
        extra: further fields of the request's body.
        timeout_s: seconds for all judgements of one call together, with their retries; only late judgements are missing. The default is
            below `rollout.reward_timeout_s`, after which the whole call is lost: raise both.
        num_retries: number of times that a failed request is sent again.
        max_concurrent: largest number of requests at the same time.
        cache: SQLite file of answers; none if empty.
    """

    url: str
    model: str
    key_env: str = ""
    prompt: str = SCORE_PROMPT
    pair_prompt: str = PAIR_PROMPT
    rubric: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    system: str = ""
    low: float = 0.0
    high: float = 10.0
    parse: Callable[[str], float | None] = last_score
    temperature: float = 0.0
    max_tokens: int = 1024
    extra: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 12.0
    num_retries: int = 3
    max_concurrent: int = 8
    cache: str = ""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise CodeError(f"a judge's url must begin with http:// or https://, got {self.url!r}")
        if not self.low < self.high:
            raise CodeError(f"a judge's scale must go from low to a greater high, got {self.low:g} to {self.high:g}")
        if any(weight <= 0 for weight, _ in self.rubric.values()):
            raise CodeError(f"the weights of a rubric must be greater than 0, got {dict(self.rubric)}")

    def score(self, completion: str, row: Row) -> float:
        """Return the reward of one completion, from 0 to 1."""
        return self.scores([completion], row)[0]

    def scores(self, completions: Sequence[str], row: Row) -> list[float]:
        """Return the reward of each completion, from 0 to 1, asked about side by side; a `FailedReward` where there is no judgement."""
        judge = self._grade if self.rubric else self._score_answer
        return self._side_by_side([partial(judge, completion, row) for completion in completions])

    def prefer(self, first: str, second: str, row: Row) -> float:
        """Return 1 if the first is better, 0 if the second is, asked in both orders: 0.5 for a tie, and where the order decides."""
        return self.preferences([(first, second)], row)[0]

    def preferences(self, pairs: Sequence[tuple[str, str]], row: Row) -> list[float]:
        """Return `prefer` of each pair, asked about side by side."""
        orders = [order for first, second in pairs for order in ((first, second), (second, first))]
        verdicts = self._side_by_side([partial(self._compare, *order, row) for order in orders])
        return [_both(one, other) for one, other in zip(verdicts[::2], verdicts[1::2], strict=True)]

    def win_rates(self, completions: Sequence[str], row: Row, *, against: str | None = None) -> list[float]:
        """Return the share of the others that each completion is better than, from 0 to 1, or whether it is better than `against`.

        Without `against` each pair of the group is asked about in both orders: n (n - 1) requests for n completions. A pair without a
        judgement counts for neither; a completion with none at all has no reward. One alone has 0.5.
        """
        if against is not None:
            return self.preferences([(completion, against) for completion in completions], row)
        pairs = list(itertools.combinations(range(len(completions)), 2))
        wins: list[list[float]] = [[] for _ in completions]
        failures: dict[int, float] = {}
        for (i, j), value in zip(pairs, self.preferences([(completions[i], completions[j]) for i, j in pairs], row), strict=True):
            if isinstance(value, FailedReward):
                failures |= {i: value, j: value}
            else:
                wins[i].append(value)
                wins[j].append(1 - value)
        return [sum(won) / len(won) if won else failures.get(index, 0.5) for index, won in enumerate(wins)]

    @property
    def shows_prompts(self) -> bool:
        """Whether `scores` shows the judge the text of a row's prompt, without its images."""
        return _QUESTION in self._scoring_prompt

    @property
    def _scoring_prompt(self) -> str:
        return RUBRIC_PROMPT if self.rubric and self.prompt is SCORE_PROMPT else self.prompt

    def _score_answer(self, completion: str, row: Row, until: float) -> float:
        def read(text: str) -> float:
            return self._scaled(self.parse(text), text)

        return self._ask(_filled(self._scoring_prompt, self._asked(completion, row), row), read, until)

    def _grade(self, completion: str, row: Row, until: float) -> float:
        total = sum(weight for weight, _ in self.rubric.values())

        def read(text: str) -> float:
            parts = {}
            for name, (weight, _) in self.rubric.items():
                found = re.findall(rf"^\W*{re.escape(name)}\W*?:{_BETWEEN}*{_NUMBER}", text, re.IGNORECASE | re.MULTILINE)
                parts[name] = self._scaled(float(found[-1]) if found else None, text, name) * weight / total
            return NamedReward(parts)

        asked = self._asked(completion, row) | {"criteria": "\n".join(f"{name}: {text}" for name, (_, text) in self.rubric.items())}
        return self._ask(_filled(self._scoring_prompt, asked, row), read, until)

    def _compare(self, first: str, second: str, row: Row, until: float) -> float:
        def read(text: str) -> float:
            found = re.findall(r"verdict\W{0,5}[:=]\W{0,5}(a|b|tie)\b", text, re.IGNORECASE)
            if not found:
                raise JudgeError(f"there is no verdict in {printable(text[-100:])!r}")
            return {"a": 1.0, "b": 0.0, "tie": 0.5}[found[-1].lower()]

        asked = {"question": _question(row), "first": first, "second": second, "reference": row.answer}
        return self._ask(_filled(self.pair_prompt, asked, row), read, until)

    def _asked(self, completion: str, row: Row) -> dict[str, str]:
        scale = {"low": f"{self.low:g}", "high": f"{self.high:g}"}
        return {"question": _question(row), "answer": completion, "reference": row.answer, **scale}

    def _scaled(self, value: float | None, text: str, name: str = "") -> float:
        if value is None:
            raise JudgeError(f"there is no score{f' for {name}' if name else ''} in {printable(text[-100:])!r}")
        if not self.low <= value <= self.high:
            raise JudgeError(f"the score {value:g} is not from {self.low:g} to {self.high:g}")
        return (value - self.low) / (self.high - self.low)

    def _side_by_side(self, calls: Sequence[Callable[[float], float]]) -> list[float]:
        until = time.monotonic() + self.timeout_s
        threads = ThreadPoolExecutor(max(1, min(self.max_concurrent, len(calls))))
        try:
            futures = [threads.submit(self._judged, call, until) for call in calls]
            done, _ = wait(futures, timeout=self.timeout_s)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
        late = FailedReward(f"the judge {self.model} did not answer within {self.timeout_s:g} s")
        return [future.result() if future in done else late for future in futures]

    def _judged(self, call: Callable[[float], float], until: float) -> float:
        with Caught() as caught:  # the user's `parse` and the cache's disk may raise, too
            return check_reward(call(until))
        exc = caught.take()
        return FailedReward(f"the judge {self.model}: {exc if isinstance(exc, JudgeError) else describe(exc)}")

    def _ask(self, text: str, read: Callable[[str], float], until: float) -> float:
        """Return the score that `read` finds in the judge's answer, from the cache if it is there. Only answers with a score are kept."""
        messages = [*([{"role": "system", "content": self.system}] if self.system else ()), {"role": "user", "content": text}]
        body = json.dumps(
            {"model": self.model, "messages": messages, "temperature": self.temperature, "max_tokens": self.max_tokens, **self.extra},
            sort_keys=True).encode()
        key = hashlib.sha256(self.url.encode() + b"\0" + body).hexdigest()
        if self.cache and (kept := self._kept(key)) is not None:
            return read(kept)
        answer = self._request(body, until)
        value = read(answer)
        if self.cache:
            with closing(self._open_cache()) as cache, cache:
                cache.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, answer))
        return value

    def _kept(self, key: str) -> str | None:
        with closing(self._open_cache()) as cache:
            row = cache.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        return row[0] if row else None

    def _open_cache(self) -> sqlite3.Connection:
        cache = sqlite3.connect(self.cache, timeout=10)
        cache.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)")
        return cache

    def _request(self, body: bytes, until: float) -> str:
        headers = {"Content-Type": "application/json"}
        if self.key_env:
            if not (key := os.environ.get(self.key_env, "")):
                raise JudgeError(f"the variable {self.key_env} is not set here")
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(f"{self.url.rstrip('/')}/chat/completions", body, headers)
        for attempt in itertools.count():
            pause = min(PAUSE_S * 2**attempt, LONGEST_PAUSE_S)
            try:
                with open_url(request, timeout_s=max(0.01, until - time.monotonic())) as response:
                    return _answer_text(response.read())
            except urllib.error.HTTPError as exc:
                with exc:
                    why = f"status {exc.code}: {printable(exc.read(300).decode(errors='replace'))}"
                if exc.code not in AGAIN:
                    raise JudgeError(why) from exc
                wished = exc.headers.get("Retry-After", "")
                pause = max(pause, float(wished)) if wished.isdigit() else pause
            except OSError as exc:
                why = describe(exc)
            if attempt >= self.num_retries or time.monotonic() + pause > until:
                raise JudgeError(f"{why}, after {attempt + 1} attempts")
            time.sleep(pause)
        raise AssertionError("the attempts end before they are counted out")


def read_judge(path: str | Path) -> Judge:
    """Return the judge that a TOML file describes, which has the attributes of `Judge` but `parse`, with each criterion of the rubric as

        rubric.NAME = {weight = 2, text = "..."}

    Raises:
        CodeError: there is no such file, or it is wrong.
    """
    known = {each.name for each in fields(Judge)} - {"parse"}
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        if unknown := sorted(values.keys() - known):
            raise CodeError(f"the judge {str(path)!r} has unknown keys {', '.join(unknown)}; it takes {', '.join(sorted(known))}")
        values["rubric"] = {name: (float(each["weight"]), str(each["text"])) for name, each in values.get("rubric", {}).items()}
        return Judge(**values)
    except (OSError, ValueError, TypeError, KeyError) as exc:
        raise CodeError(f"the judge {str(path)!r} cannot be used: {describe(exc)}") from exc


def judge_reward(path: str | Path) -> Callable[[list[str], Row], list[float]]:
    """Return the reward for `rollout.reward = "judge:FILE"`."""
    judge = read_judge(path)

    @of_group
    def reward(completions: list[str], row: Row) -> list[float]:
        return judge.scores(completions, row)

    return reward


def _question(row: Row) -> str:
    """Return the prompt as a text; a chat's messages as "user: ..." and so on."""
    if isinstance(row.prompt, str):
        return row.prompt
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in row.prompt)


def _filled(template: str, values: Mapping[str, str], row: Row) -> str:
    """Fill in the names in braces that are known, in one pass: braces in the values are left alone."""
    if row.images and _QUESTION in template:
        raise JudgeError(
            f"it is not shown the images of the prompt, of which there are {len(row.images)}; leave {_QUESTION} out of what it is asked")
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), template)


def _both(one: float, other: float) -> float:
    """Return the preference for the first, from the verdicts of both orders."""
    failed = next((verdict for verdict in (one, other) if isinstance(verdict, FailedReward)), None)
    return failed if failed is not None else (one + 1 - other) / 2


def _answer_text(content: bytes) -> str:
    try:
        choice = json.loads(content)["choices"][0]
        text, why = choice["message"]["content"], choice.get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError) as exc:
        raise JudgeError(f"its answer is not a chat completion: {printable(content[:200].decode(errors='replace'))}") from exc
    if why == "length":
        raise JudgeError("its answer was cut at max_tokens")
    if not isinstance(text, str) or not text.strip():
        raise JudgeError("its answer is empty")
    return text
