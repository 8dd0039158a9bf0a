"""Plays environments of verifiers: modules with `load_environment()` (verifiers up to 0.3) and tasksets (verifiers.v1, from 0.4 on).

Runs by itself under a Python that has verifiers, and imports nothing of Offbeat. `offbeat.agents.bridge` starts it, writes lines of JSON
to it and reads lines from it; output of the library goes to the log. With `--rows NAME [NUM]` it prints an environment's rows as JSON
lines, for `data.path`; each has the index of its task, which an episode of that row plays.

All calls of the model go through verifiers' own clients to the episode's base URL, which holds its key.
"""

import asyncio
import importlib
import itertools
import json
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

KEY_VARIABLE = "OFFBEAT_BRIDGE_KEY"
"""verifiers reads keys from variables; here the key is in the URL, and the variable's value is not used."""


class Classic:
    """An environment with `load_environment()`."""

    def __init__(self, module: Any, name: str, *, options: dict[str, Any], model: str, **_: Any) -> None:
        options.pop("harness", None)
        self._vf = importlib.import_module("verifiers")
        own = hasattr(module, "load_environment")
        self._env = module.load_environment(**options) if own else self._vf.load_environment(name, **options)
        self._model = model
        self._rows = self._env.get_dataset()

    async def open(self, stack: AsyncExitStack) -> None:
        """Start nothing."""

    def rows(self, num: int) -> list[dict[str, Any]]:
        """Return the first rows as prompts and answers."""
        return [
            {"prompt": row["prompt"], "answer": str(row.get("answer", "")), "index": str(index)}
            for index, row in enumerate(self._rows.select(range(min(num, len(self._rows)))))]

    async def play(self, task: dict[str, Any]) -> dict[str, Any]:
        """Play one episode; returns its weighted rewards and its metrics, both by name."""
        row = dict(self._rows[_index(task, len(self._rows))])
        client = importlib.import_module("verifiers.types" if "verifiers.types" in sys.modules else "verifiers.legacy.types").ClientConfig(
            api_base_url=task["base_url"], api_key_var=KEY_VARIABLE, max_retries=2)
        output = await self._env.run_rollout(
            {"example_id": row.get("example_id", 0), **row}, client, self._model, {}, state_columns=["trajectory"])
        if output.get("error"):
            return {"error": str(output["error"])}
        # A rollout is scored apart from its group, as groups are compared by the algorithm here.
        return {"reward": float(output["reward"]), "metrics": dict(output.get("metrics") or {})}


class Taskset:
    """A taskset of verifiers.v1, played by the harness that the module exports or that the option `harness` names."""

    def __init__(self, module: Any, name: str, *, options: dict[str, Any], model: str, max_turns: int) -> None:  # noqa: ARG002
        self._vf = importlib.import_module("verifiers.v1")
        agent: dict[str, Any] = {"runtime": {"type": options.pop("runtime", "subprocess")}, "max_turns": max_turns}
        harness = options.pop("harness", "")
        if harness:
            agent["harness"] = {"id": harness}
        config = self._vf.resolve_env_config({"taskset": {"id": name, **options}, "agent": agent})
        self._env = self._vf.load_environment(config)
        self._model = model
        self._tasks: list[Any] = []
        self._coming = iter(self._env.taskset)

    async def open(self, stack: AsyncExitStack) -> None:
        """Start the servers that all episodes share."""
        await stack.enter_async_context(self._env.serving())

    def rows(self, num: int) -> list[dict[str, Any]]:
        """Return the first tasks as prompts and answers."""
        tasks = self._up_to(num)
        return [
            {"prompt": _plain(task.data.prompt), "answer": str(getattr(task.data, "answer", "")), "index": str(index)}
            for index, task in enumerate(tasks)]

    async def play(self, task: dict[str, Any]) -> dict[str, Any]:
        """Play one episode; the reward of several agents is their mean."""
        wanted = _wanted(task)
        tasks = self._up_to(1 + (wanted if wanted is not None else 10_000))
        planned = self._env.slots(tasks[_index(task, len(tasks))])[0]
        client = self._vf.EvalClientConfig(base_url=task["base_url"], api_key_var=KEY_VARIABLE)
        context = self._vf.ModelContext(model=self._model, client=client, sampling=self._vf.Sampling())
        episode = await self._env.run_slot(planned, context)
        traces = list(episode.traces)
        failed = [str(error.message) for trace in traces if not trace.ok for error in trace.errors]
        if failed or not traces:
            return {"error": failed[0] if failed else "the episode has no trace"}
        metrics = {name: value for trace in traces for name, value in trace.metrics.items() if value is not None}
        parts = {name: reward.value for name, reward in traces[0].rewards.items() if reward is not None} if len(traces) == 1 else {}
        return {"reward": sum(trace.reward for trace in traces) / len(traces), "parts": parts, "metrics": metrics}

    def _up_to(self, num: int) -> list[Any]:
        self._tasks += itertools.islice(self._coming, max(0, num - len(self._tasks)))
        return self._tasks[:num]


def load(name: str, *, options: dict[str, Any], model: str, max_turns: int) -> Any:
    """Load the environment of this name, which is a module, or one that verifiers brings along."""
    os.environ.setdefault(KEY_VARIABLE, "in-the-url")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(name.rpartition("/")[2].partition("@")[0].replace("-", "_"))
    except ModuleNotFoundError:
        module = None
    classic = hasattr(module, "load_environment") if module is not None else not hasattr(importlib.import_module("verifiers"), "v1")
    return (Classic if classic else Taskset)(module, name, options=options, model=model, max_turns=max_turns)


def _plain(prompt: Any) -> Any:
    """Return a prompt as text, or as messages with text."""
    if isinstance(prompt, str) or prompt is None:
        return prompt or ""
    messages = [message if isinstance(message, dict) else message.model_dump() for message in prompt]
    return "\n\n".join(str(message.get("content", "")) for message in messages)


def _wanted(task: dict[str, Any]) -> int | None:
    given = str(task["row"].get("index", ""))
    return int(given) if given.isdigit() else None


def _index(task: dict[str, Any], num: int) -> int:
    """Return the index of the task to play: the row's field `index`, else one by the seed."""
    wanted = _wanted(task)
    return (int(task["seed"]) if wanted is None else wanted) % num


async def serve_bridge(out: Any) -> None:
    """Answer lines until there are no more."""
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=16 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    playing: dict[int, asyncio.Task] = {}

    def answer(number: int, message: dict[str, Any]) -> None:
        out.write(json.dumps({"id": number, **message}, default=str) + "\n")
        out.flush()

    async def play(environment: Any, task: dict[str, Any]) -> None:
        number = task["id"]
        try:
            answer(number, await environment.play(task))
        except asyncio.CancelledError:
            pass
        except (Exception, SystemExit) as exc:
            answer(number, {"error": f"{type(exc).__name__}: {exc}"})
        finally:
            playing.pop(number, None)

    async with AsyncExitStack() as stack:
        first = json.loads(await lines.readline())
        try:
            environment = load(first["environment"], options=first["options"], model=first["model"], max_turns=first["max_turns"])
            await environment.open(stack)
        except (Exception, SystemExit) as exc:
            answer(first["id"], {"error": f"{type(exc).__name__}: {exc}"})
            return
        answer(first["id"], {"ready": True})
        while line := await lines.readline():
            message = json.loads(line)
            if message.get("cancel"):
                if message["id"] in playing:
                    playing[message["id"]].cancel()
            else:
                playing[message["id"]] = asyncio.create_task(play(environment, message))
        for task in list(playing.values()):
            task.cancel()


def main() -> None:
    """Serve, or print rows."""
    if sys.argv[1:2] == ["--rows"]:
        environment = load(sys.argv[2], options={}, model="policy", max_turns=1)
        for row in environment.rows(int(sys.argv[3]) if len(sys.argv) > 3 else 1000):
            print(json.dumps(row))
        return
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of the library is no answer
    asyncio.run(serve_bridge(out))


if __name__ == "__main__":
    main()
