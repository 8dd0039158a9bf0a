"""A stand-in for vLLM's engine under Offbeat's endpoints: it computes nothing, and calls fail as told. Runs in vLLM's environment:

    PYTHONPATH=.../offbeat/engine/inside python tests/support/vllm_engine.py '[["sleep", ""], ["2", "load"], ["2", ""]]'

Each act ("sleep" without weights, "keep" to sleep with them, "wake", or the version to switch to) comes with the name of the call that
fails, once, while it is done. The calls of each act are one line on stdout, with the error that it raised, and whether the engine is
broken after it.
"""

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

import vllm_inside

vllm_inside.check_interface = vllm_inside.check_weights = lambda *_, **__: None
vllm_inside.current_platform = SimpleNamespace(is_cpu=lambda: False)


class Engine:
    """Prints its calls in order; the next call of the name in `fails` raises."""

    model_config = SimpleNamespace(hf_config=None, model="m", enable_sleep_mode=True)
    vllm_config = SimpleNamespace(model_config=model_config)
    live, fails = "0", ""

    async def _call(self, name: str) -> None:
        print(name, end=" ")
        if name == self.fails:
            self.fails = ""
            raise OSError(name + " broke")

    async def sleep(self, level: int, mode: str) -> None:
        await self._call(f"sleep-{level}-{mode}")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await self._call("wake-" + "+".join(tags or ["all"]))

    async def pause_generation(self, **_settings: Any) -> None:
        await self._call("pause")

    async def resume_generation(self) -> None:
        await self._call("resume")

    async def collective_rpc(self, name: str, **_arguments: Any) -> list[tuple[dict[str, Any], str]]:
        await self._call(name.removeprefix("offbeat_"))
        return [({"fingerprint": "f", "num_unread": 0}, "")]

    async def reset_prefix_cache(self) -> None:
        pass

    reset_encoder_cache = reset_prefix_cache

    async def get_weight_version(self) -> str:
        return self.live

    async def update_weight_version(self, version: str) -> None:
        self.live = version


async def play(acts: list[tuple[str, str]]) -> None:
    engine, inside = Engine(), vllm_inside.Inside(None)
    for act, fails in acts:
        engine.fails = fails
        try:
            if act in ("sleep", "keep"):
                await inside._sleep(engine, json.dumps({"keep_weights": act == "keep"}).encode())
            elif act == "wake":
                await inside._wake(engine, b"")
            else:
                if act != engine.live or inside._broken:
                    inside._staged[int(act)] = vllm_inside.Weights("a", "f")
                await inside._switch(engine, json.dumps({"version": int(act)}).encode())
        except OSError as exc:
            print("raised:", exc, end=" ")
        print("broken" if inside._broken else "fine")


if __name__ == "__main__":
    asyncio.run(play(json.loads(sys.argv[1])))
