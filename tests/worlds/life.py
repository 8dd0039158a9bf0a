"""One life of a simulated run: from a start of `offbeat train` to its end or its kill, in a process of its own.

The run is the real one, from `run_training` on. Given to it are an event loop in virtual time, child processes and engines in memory
(`stand_in_...`), and a disk that can be full or torn. What happens is noted in the world's ledger, which `account` reads.
"""

import asyncio
import gc
import json
import logging
import os
import random
import traceback
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from offbeat import ending, memory
from offbeat.aio import ASKED_TO_STOP, listener
from offbeat.config.load import load_config
from offbeat.config.root import Config
from offbeat.controller.batches import StepBatches
from offbeat.controller.rescue import Rescue
from offbeat.data.tokenizer import character_tokenizer
from offbeat.errors import OffbeatError
from offbeat.journal.run_journal import RunJournal
from offbeat.outside import outside
from offbeat.process.child import ChildSpec
from offbeat.rollout.executor import RolloutExecutor
from offbeat.runs.recorded_rollouts import RecordedRollouts
from offbeat.runs.run import run_training
from offbeat.telemetry.console import Console
from worlds.drawn import Fault, World
from worlds.stand_in_child import StandInChild, StandInReward
from worlds.stand_in_engine import Network, StandInEngine, StandInSession
from worlds.stand_in_trainer import Model, StandInRank
from worlds.torn_disk import TornDisk
from worlds.virtual_time import EndlessWaitError, install, tasks_left

NAME = "w"
"""Name of each run, in the world's folder."""

_SERVICES = {"TrainWorker": StandInRank, "EngineWorker": StandInEngine, "RewardWorker": StandInReward}
_ENGINES = "engines.json"
"""File in the world's folder: what engines by URL hold between two starts of the run."""
_KILLED = 9


class Life:
    """What stands outside of one life. Implements `offbeat.outside.Outside`.

    Attributes:
        children: child processes by name, the last of each.
        model: of the train ranks.
        taken: groups that each step trains on, by the rank that has drawn them.
    """

    def __init__(self, world: World, folder: Path, number: int) -> None:
        self.world = world
        self.rng = random.Random(world.seed * 1000 + number)
        self.children: dict[str, StandInChild] = {}
        self.model = Model()
        self.taken: dict[int, dict[int, list[dict[str, Any]]]] = {}
        self.network = Network(self)
        self.number = number
        self._folder = folder
        self._ledger = os.open(folder / "ledger.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._lasting: dict[tuple[str, int], float] = {}
        self._ask_to_end: dict[int, Any] = {}
        self._executors: dict[int, RolloutExecutor] = {}
        self.loop: Any = self._install(random.Random(world.seed * 1000 + number + 500))
        self.disk = TornDisk(folder / NAME, lambda: self.lasts("disk_full"))
        self.disk.install()
        usual_s = self.loop.blocking_s
        self.loop.blocking_s = lambda: usual_s() + (self.rng.uniform(0, 4) if self.lasts("disk_slow") else 0)
        self._by_url = [StandInEngine(self, f"engine {number}") for number in range(len(world.settings.get("inference.urls", ())))]
        self._open_engines_by_url()
        for fault in world.faults:
            if fault.life == number:
                self.loop.call_at(fault.at_s, self._strike, fault)

    def _install(self, rng: random.Random) -> Any:
        return install(rng)

    @property
    def head(self) -> int:
        """Rank of the process that this is called in."""
        return 0

    # -- for the stand-ins ---------------------------------------------------------------------------------------------------------------

    async def start_child(self, spec: ChildSpec, *, timeout_s: float) -> StandInChild:
        """See `Outside`."""
        del timeout_s
        await self.takes(self.world.start_s)
        kind, _, who = spec.name.partition(" ")
        self._lasting.pop((f"{kind}_hangs", int(who)), None)  # the process that hung was replaced
        service = _SERVICES[spec.target.rpartition(":")[2]](self, spec.name)
        child = self.children[spec.name] = StandInChild(self, spec.name, service)
        return child

    def open_session(self) -> StandInSession:
        """See `Outside`."""
        return StandInSession(self.network)

    def process_of(self, engine: StandInEngine) -> StandInChild | None:
        """Return the process that an engine runs in, None if it has ended. One by URL is started again by others after a while."""
        child = self.children.get(engine.name)
        is_new = engine in self._by_url and (child is None or child.service is not engine)
        if is_new and not self.lasts("engine_away", _number_of(engine.name)):
            child = self.children[engine.name] = StandInChild(self, engine.name, engine)
        return child if child is not None and child.alive and child.service is engine else None

    async def takes(self, mean_s: float) -> None:
        """Let about this time pass."""
        await asyncio.sleep(mean_s * self.rng.uniform(0.5, 1.5))

    def wall_s(self) -> float:
        """Return the time of the wall clock."""
        return self.loop.now_s + self.loop.wall_offset_s

    def lasts(self, kind: str, who: int = 0) -> bool:
        """Whether a fault lasts."""
        return self._lasting.get((kind, who), -1.0) > self.loop.now_s

    def left_s(self, kind: str, who: int = 0) -> float:
        """Return how long a fault will still last."""
        return max(self._lasting.get((kind, who), 0.0) - self.loop.now_s, 0.0)

    def lasts_of(self, name: str) -> bool:
        """Whether a process hangs, such as "rank 0"."""
        kind, _, number = name.partition(" ")
        return self.lasts(f"{kind}_hangs", int(number))

    async def hung(self, name: str) -> None:
        """Wait while a process hangs."""
        kind, _, number = name.partition(" ")
        while (left_s := self.left_s(f"{kind}_hangs", int(number))) > 0:  # noqa: ASYNC110
            await asyncio.sleep(left_s)

    def note(self, **row: Any) -> None:
        """Write a row of the ledger."""
        os.write(self._ledger, json.dumps({"at": round(self.loop.now_s, 2), **row}).encode() + b"\n")

    # -- faults --------------------------------------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        kind, who = fault.kind, fault.who
        self.note(fault=kind, who=who)
        name = f"{kind.partition('_')[0]} {who}"
        match kind:
            case "kill" | "power_cut":
                self._end(kind)
            case "stop":
                for ask_to_end in self._ask_to_end.values():
                    ask_to_end(ASKED_TO_STOP)
            case "engine_dies" | "rank_dies" | "reward_dies":
                if name in self.children:
                    self.children[name].die()
                if kind == "engine_dies" and self._by_url:
                    self._lasting["engine_away", who] = self.loop.now_s + fault.for_s
                    self._by_url[who] = StandInEngine(self, name)
                    self.network.listen(self._by_url[who], who)
            case "engine_taken":
                self._publish_from_outside(who, "another-run 1 exclusive", until_s=self.loop.now_s + fault.for_s)
            case "engine_late":
                if (header := self._earlier_owner()) is not None:
                    self._publish_from_outside(who, header, until_s=0.0)
            case "clock_jumps":
                self.loop.wall_offset_s += fault.for_s
            case _:
                who = 0 if kind in ("lost", "twice", "disk_full", "disk_slow", "reward_hangs") else who
                self._lasting[kind, who] = self.loop.now_s + fault.for_s

    def _publish_from_outside(self, who: int, header: str, *, until_s: float) -> None:
        """Have somebody else than this start of the run publish to an engine by URL, again and again until a time."""
        engine = self._by_url[who]
        if not self.lasts("engine_away", who) and not self.lasts_of(engine.name):
            engine.publish_from_outside(header)
        if (next_s := self.loop.now_s + 10) < until_s:
            self.loop.call_at(next_s, lambda: self._publish_from_outside(who, header, until_s=until_s))

    def _earlier_owner(self) -> str | None:
        """Return the header of the start before this one."""
        path = self._folder / NAME / "owner.json"
        if not path.exists():
            return None
        owner = json.loads(path.read_text())
        return f"{owner['run']} {owner['start'] - 1} {'shared' if self.world.lora else 'exclusive'}"

    def _open_engines_by_url(self) -> None:
        path = self._folder / _ENGINES
        for number, engine in enumerate(self._by_url):
            self.network.listen(engine, number)
            if path.exists():
                engine.restore(json.loads(path.read_text())[number], after_s=self.rng.choice([1.0, 30.0, 200.0]))

    def _keep_engines_by_url(self) -> None:
        if self._by_url:
            (self._folder / _ENGINES).write_text(json.dumps([engine.state() for engine in self._by_url]))

    def _end(self, kind: str) -> None:
        self._keep_engines_by_url()
        self.note(killed=kind, held=[
            [head, group.prompt_id] for head, executor in self._executors.items() for group in executor.held])
        if kind == "power_cut":
            self.disk.cut(self.world.seed * 1000 + self.number)
        os._exit(_KILLED)

    # -- the run -------------------------------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Note what rollouts and the loop do, from outside."""
        life = self
        take, save, enter, end = StepBatches.take, Rescue.save_step, RolloutExecutor.__aenter__, ending._end
        on_drawn, on_rejected, on_anew = (
            RecordedRollouts.on_drawn, RecordedRollouts.on_rejected, RecordedRollouts.on_played_anew)

        async def noted_take(self: Any, groups: Any, step: Any, algorithm: Any) -> Any:
            life.taken.setdefault(step.global_step, {})[life.head] = [
                {"head": life.head, "prompt": group.prompt_id, "samples": [
                    [each.tokens[each.loss_mask].tolist(), each.versions[each.loss_mask].tolist()] for each in group.trajectories]}
                for group in groups]
            return await take(self, groups, step, algorithm)

        async def noted_save(self: Any, step: Any, **named: Any) -> None:
            await save(self, step, **named)
            last = {"fingerprints": life.model.fingerprints, "steps": life.model.steps} if step.global_step == life.world.num_steps else {}
            if life.head == 0:
                life.note(saved=step.global_step, **last)

        async def noted_enter(self: Any) -> Any:
            if isinstance(self._listener, RecordedRollouts) and isinstance(self._listener.journal, RunJournal):
                life._executors[life.head] = self
            return await enter(self)

        async def noted_end(loop: Any, threads: Any) -> Any:
            own = {asyncio.current_task(), *life.network.own_tasks, *(call for child in life.children.values() for call in child.calls)}
            life.note(left=tasks_left(loop, own))
            return await end(loop, threads)

        def noted_drawn(self: Any, prompt_id: str, version: int) -> None:
            life.note(drawn=prompt_id, version=version, head=life.head)
            on_drawn(self, prompt_id, version)

        def noted_rejected(self: Any, settled: Any) -> None:
            life.note(settled=settled.prompt_id, head=life.head, why=settled.kind, again=settled.drawn_again, reason=settled.rejected[:300])
            on_rejected(self, settled)

        def noted_anew(self: Any, prompt_id: str, reason: str) -> None:
            life.note(anew=prompt_id, reason=reason)
            on_anew(self, prompt_id, reason)

        RecordedRollouts.on_played_anew = noted_anew  # type: ignore[method-assign]
        StepBatches.take, Rescue.save_step, RolloutExecutor.__aenter__, ending._end = (  # type: ignore[method-assign]
            noted_take, noted_save, noted_enter, noted_end)
        RecordedRollouts.on_drawn, RecordedRollouts.on_rejected = noted_drawn, noted_rejected  # type: ignore[method-assign]

    def run(self, config: Config) -> None:
        """Run to the end, and note how it ended."""
        self.watch()
        row = self.ending(config)
        self._keep_engines_by_url()
        self.note(**row)

    def ending(self, config: Config) -> dict[str, Any]:
        """Run a process to its end; returns how it ended, as a row of the ledger."""
        outside.set(self)
        listener.set(lambda _loop, end: self._ask_to_end.update({self.head: end}))
        try:
            result = run_training(config, Console("quiet"))
            if result is None:
                return {"done": 0}
            return {
                "done": result.steps, "stopped": result.stopped_early, "fingerprints": self.model.fingerprints, "steps": self.model.steps}
        except KeyboardInterrupt:
            return {"ended": "asked to end before it had begun"}
        except OffbeatError as exc:
            return {"ended": f"{type(exc).__name__}: {exc}"[:600]}
        except EndlessWaitError as exc:
            return {"endless": str(exc)}
        except BaseException as exc:
            return {"raised": "".join(traceback.format_exception(exc))[-1400:]}


def _number_of(name: str) -> int:
    return int(name.rpartition(" ")[2])


def make_model(folder: Path) -> None:
    """Write what the controller reads of a model: a tokenizer, a configuration, and a file of weights without any."""
    if (folder / "model.safetensors").exists():
        return
    tokenizer = character_tokenizer()
    tokenizer.save(folder)
    sizes = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "intermediate_size": 32, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(
        {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": tokenizer.vocab_size, "dtype": "float32",
         "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, **sizes}))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


def configure(world: World, folder: Path) -> Config:
    """Return the settings of a world's run, below its folder; writes its data."""
    data, model = folder / "rows.jsonl", folder.parent / "model"
    make_model(model)
    heldout = world.settings["data.heldout_size"]
    if not data.exists():
        data.write_text("".join(json.dumps({"prompt": f"{row:03d}", "answer": "1"}) + "\n" for row in range(world.num_rows + heldout)))
    own = {"run.name": NAME, "run.dir": str(folder), "data.path": str(data), "model.path": str(model)}
    return load_config(None, values=own | dict(world.settings))


def complete(row: Mapping[str, Any]) -> bool:
    """Whether this row of a ledger says that the run was complete before this start.

    So it is where the last step was trained and saved, and an error, such as that no engine took its weights, ended the run after that.
    """
    return "is already complete" in row.get("ended", "")


def live(kind: type[Life], world: World, config: Config, folder: Path, number: int) -> None:
    """Live one life in this process, and exit."""
    random.seed(world.seed)
    gc.disable()  # a life is short, and a collection would copy the pages that it shares with the process that it was forked from
    memory.few_collections = memory.kept_pages = nullcontext
    logging.disable(logging.INFO)
    out = os.open(folder / "out.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    try:
        kind(world, folder, number).run(config)
    except BaseException:
        traceback.print_exc()
        os._exit(3)
    os._exit(0)
