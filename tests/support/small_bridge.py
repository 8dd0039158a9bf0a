"""A bridge as those of offbeat.agents.bridges, to an environment that sleeps."""

import asyncio
import json
import os
import sys


async def main():
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    first = json.loads(await lines.readline())
    known = first["environment"] != "missing"
    print("something that a library prints")
    say(0, **({"ready": True} if known else {"error": "ModuleNotFoundError: missing"}))
    tasks, cancelled = {}, []

    async def play(number, row):
        match row["answer"]:
            case "fail":
                say(number, error="ValueError: no number")
            case "exit":
                os._exit(1)
            case "cancelled":
                say(number, reward=float(len(cancelled)))
            case seconds:
                await asyncio.sleep(float(seconds))
                say(number, parts={"slept": float(seconds)}, metrics={"naps": 1, "dreams": "none"})

    while line := await lines.readline():
        message = json.loads(line)
        if message.get("cancel"):
            tasks[message["id"]].cancel()
            cancelled.append(message["id"])
        else:
            tasks[message["id"]] = asyncio.create_task(play(message["id"], message["row"]))


def say(number, **message):
    print(json.dumps({"id": number, **message}), flush=True)


asyncio.run(main())
