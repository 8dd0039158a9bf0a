"""Learning with a mixture of experts: `sort_digits` with a small Qwen3 MoE, beside a dense Qwen3 that computes as much for each token.

Each base has random weights and is warmed up by supervised steps until a quarter of its samples is right. From there GRPO trains
the whole model, or an adapter, for the mixture over its experts, too. Two more runs have noise planted in the routers of the engine that
samples: for a share of the tokens, each router chooses the next expert in place of its own. In one of them the trainer replays the
experts that the engine used (`model.route_replay = "rollout"`), in the other it chooses again.

Engine and trainer are those of `offbeat train`, here in one process and synchronous: sample, reward, train, publish. So a run takes half
a minute and no time decides its numbers. A seed draws weights, prompts, held-out prompts, samples and noise. Figures are the accuracy of
greedy answers to 256 held-out prompts before and after, by the engine that samples and by one whose routers are as trained, and the mean
over the steps of `policy/logprob_gap_mean`.

    python benchmarks/moe_learning.py [--seeds 0 1 2 3 4] [--steps 40] [--quick] [--resume] [--write-docs]

Runs are kept in benchmarks/moe_learning.jsonl, a line each. With --resume those that are there under the same settings are not done again.
--write-docs writes the table of docs/algorithms.md from that file in the end; with --seeds and nothing after it, nothing is run before.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import numpy as np
import torch
from measure import BENCHMARKS, ROOT, WORK, note
from packing import groups_of_one
from results import read_results, record, write_section
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from offbeat.algorithms.adam import adam_params
from offbeat.algorithms.experience import make_batch, sft_batch
from offbeat.config.root import Config
from offbeat.config.train import OptimizerConfig
from offbeat.data.batch import Batch
from offbeat.data.dataset import open_datasets
from offbeat.data.expert_routes import unknown_routes
from offbeat.data.packing import plan_microbatches
from offbeat.data.prompt import sft_sequence
from offbeat.data.row import Row
from offbeat.data.tokenizer import character_tokenizer
from offbeat.data.trajectory import Group, Trajectory
from offbeat.engine.loader import load_engine
from offbeat.engine.options import EngineOptions
from offbeat.engine.request import Output, Request, SamplingParams
from offbeat.rollout.rewards.exact_match import exact_match
from offbeat.sync.mesh import ProcessGroups
from offbeat.trainer.bank_trainer import BankTrainer
from offbeat.trainer.messages import TrainStep
from offbeat.trainer.model_trainer import ModelTrainer
from offbeat.trainer.snapshots import AdapterSnapshot

sys.path.insert(0, str(ROOT / "tests"))

from router_noise import plant_noise

FOLDER = WORK / "moe_learning"
RESULTS, SMOKE = BENCHMARKS / "moe_learning.jsonl", WORK / "moe_learning-quick.jsonl"
"""Runs, and those of smoke runs, which leave the others alone."""
DOCUMENT = ROOT / "docs" / "algorithms.md"
BEGIN, END = "<!-- begin: experts on sort_digits -->\n", "<!-- end: experts on sort_digits -->\n"
SIZES: Mapping[str, int] = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64}
NUM_EXPERTS, TOP_K, EXPERT_SIZE = 8, 2, 64
NUM_DIGITS, NUM_HELDOUT = 5, 256
PROMPTS_PER_STEP, SAMPLES_PER_PROMPT = 32, 8
NOISE = 0.5
"""Share of the tokens of which a router of the engine chooses the next expert."""
WARM_UP = OptimizerConfig(lr=3e-3, warmup_steps=20)
WARM_UP_STEPS, WARM_UP_ROWS, WARM_UP_EVERY, WARM_TO = 300, 128, 10, 0.25
"""Most steps of a warm-up, rows of each, steps between evaluations, and the share of right samples that ends it."""
RATES = {"all": 4e-4, "adapter": 5e-4}
LORA = {"rank": 16, "alpha": 32.0}
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}
"""Student's t for 95 % intervals of a mean, by the number of seeds."""


@dataclass(frozen=True)
class Case:
    """A kind of run.

    Attributes:
        model: "dense" or "moe".
        weights: what is trained, "all" or "adapter".
        noise: share of the tokens with planted noise.
        replay: `model.route_replay`.
    """

    model: str
    weights: str
    noise: float = 0.0
    replay: str = "off"


CASES = {
    "moe": Case("moe", "all"), "dense": Case("dense", "all"), "moe adapter": Case("moe", "adapter"),
    "dense adapter": Case("dense", "adapter"), "noise replayed": Case("moe", "all", NOISE, "rollout"), "noise": Case("moe", "all", NOISE)}
NAMES = {
    "moe": "mixture, all weights", "dense": "dense, all weights", "moe adapter": "mixture, adapter with experts",
    "dense adapter": "dense, adapter", "noise replayed": "mixture, noise planted, replayed",
    "noise": "mixture, noise planted, not replayed"}


@dataclass(frozen=True)
class Run:
    """One line of the results.

    Attributes:
        settings: what the run depends on beside its case and its seed, to tell results under another budget apart.
        before, after: accuracy of the engine that samples.
        after_right: accuracy after the run of an engine whose routers choose as the trainer's; `after` without noise.
        gap: mean over steps of `policy/logprob_gap_mean`, in nats.
    """

    case: str
    seed: int
    settings: str
    before: float
    after: float
    after_right: float
    gap: float
    wall_seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="kinds of runs (default: all)")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2, 3, 4], help="seeds (default: 0 1 2 3 4)")
    parser.add_argument("--steps", type=int, default=40, help="steps after the warm-up (default: 40)")
    parser.add_argument("--quick", action="store_true", help="a smoke run: two steps of one seed after a short warm-up")
    parser.add_argument("--resume", action="store_true", help="keep the results that there are, and do the rest")
    parser.add_argument("--write-docs", action="store_true", help=f"write the table of {DOCUMENT.relative_to(ROOT)} from the results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results, steps = (SMOKE, 2) if args.quick else (RESULTS, args.steps)
    if not args.resume and args.seeds:
        results.unlink(missing_ok=True)
    with groups_of_one() as groups:
        for seed in args.seeds[:1] if args.quick else args.seeds:
            for name in args.cases:
                wanted = (name, seed, settings_of(name, steps))
                if any((done.case, done.seed, done.settings) == wanted for done in read_results(results, Run)):
                    continue
                record(results, done := train(name, seed, steps=steps, groups=groups, quick=args.quick))
                print(json.dumps({"benchmark": "moe_learning", **asdict(done)}), flush=True)
    if args.write_docs:
        found = [done for done in read_results(results, Run) if done.settings == settings_of(done.case, steps)]
        write_section(DOCUMENT, render(found, steps=steps), begin=BEGIN, end=END)


def settings_of(name: str, steps: int) -> str:
    """What a kind of run depends on."""
    return json.dumps([
        list(SIZES.values()), NUM_EXPERTS, TOP_K, EXPERT_SIZE, NUM_DIGITS, NUM_HELDOUT, PROMPTS_PER_STEP, SAMPLES_PER_PROMPT, WARM_UP_STEPS,
        WARM_TO, list(RATES.values()), list(LORA.values()), CASES[name].noise, steps])


# -- models ------------------------------------------------------------------------------------------------------------------------------


def build(model: str, folder: Path, *, seed: int) -> None:
    """Write a model of random weights. The dense one is as wide as the experts that a token of the mixture uses."""
    tokenizer = character_tokenizer()
    tokenizer.save(folder)
    common: dict[str, Any] = {
        **SIZES, "vocab_size": tokenizer.vocab_size, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None, "tie_word_embeddings": True}
    config = Qwen3Config(intermediate_size=TOP_K * EXPERT_SIZE, **common) if model == "dense" else Qwen3MoeConfig(
        num_experts=NUM_EXPERTS, num_experts_per_tok=TOP_K, moe_intermediate_size=EXPERT_SIZE, norm_topk_prob=True, **common)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)


class Data:
    """Rows of a seed: those to train on, endless and in order, and the held-out ones."""

    def __init__(self, seed: int, *, first: int = 0) -> None:
        self.tokenizer = character_tokenizer()
        self.config = Config.model_validate(
            {"data": {"task": "sort_digits", "task_size": NUM_DIGITS, "heldout_size": NUM_HELDOUT}}).data
        self._train, self._heldout = open_datasets(self.config, seed=seed)
        self._next = first

    def take(self, count: int) -> list[Row]:
        """Return the next rows."""
        self._next += count
        return [self._train.row(index) for index in range(self._next - count, self._next)]

    @property
    def heldout(self) -> list[Row]:
        return [self._heldout.row(index) for index in range(NUM_HELDOUT)]

    def encode(self, row: Row) -> list[int]:
        """Return a row's prompt in tokens."""
        return self.tokenizer.prompt(str(row.prompt))


class Player:
    """An engine that serves what a trainer has."""

    def __init__(self, folder: Path, data: Data, *, seed: int, noise: float = 0.0) -> None:
        self._engine = load_engine(EngineOptions(model=str(folder), seed=seed, prefix_caching=False, max_adapter_rank=16))
        self._data = data
        self._adapter, self._version = "", 0
        if noise:
            plant_noise(self._engine, share=noise, seed=seed)

    def take(self, trainer: ModelTrainer | BankTrainer) -> None:
        """Serve the weights that a trainer has now."""
        snapshot, engine = trainer.snapshot("float32"), self._engine
        self._version += 1
        if isinstance(snapshot, AdapterSnapshot):
            engine.adapters.unload(self._adapter)
            self._adapter = f"policy@{self._version}"
            engine.adapters.add(self._adapter, "", snapshot.adapter)
        else:
            engine.stage(self._version, (f"v{self._version}", ""), engine._forward.prepare(snapshot.published()))  # pyright: ignore
            engine.switch(self._version, "recompute")

    def answer(self, rows: Sequence[Row], *, n: int, temperature: float, routes: bool = False) -> list[list[Output]]:
        """Return n answers to each row."""
        params = SamplingParams(max_new_tokens=NUM_DIGITS + 2, temperature=temperature, scaled_logprobs=True, routes=routes)
        found: dict[str, list[Output]] = {str(number): [] for number in range(len(rows))}
        for number, row in enumerate(rows):
            self._engine.submit(Request(id=str(number), prompt=self._data.encode(row), params=params, n=n, adapter=self._adapter))
        while self._engine.has_work:
            for event in self._engine.step():
                assert isinstance(event.result, Output), f"an answer failed: {event.result}"
                found[event.request_id].append(event.result)
        return list(found.values())

    def accuracy(self, *, temperature: float = 0.0) -> float:
        """Return the share of held-out prompts that are answered right."""
        rows = self._data.heldout
        answers = self.answer(rows, n=1, temperature=temperature)
        return mean(self.reward(row, output) for row, [output] in zip(rows, answers, strict=True))

    def reward(self, row: Row, output: Output) -> float:
        return exact_match(self._data.tokenizer.decode_continuation(output.token_ids), row)


def warmed_up(model: str, seed: int, *, groups: ProcessGroups, quick: bool) -> Path:
    """Return the folder of a base, which is made unless it is there."""
    most = 10 if quick else WARM_UP_STEPS
    begun, done = FOLDER / f"{model}-{seed}-random", FOLDER / f"{model}-{seed}-{'quick' if quick else 'warm'}"
    if (done / "config.json").exists():
        return done
    shutil.rmtree(begun, ignore_errors=True)
    build(model, begun, seed=seed)
    data = Data(seed)
    trainer = ModelTrainer.build(str(begun), config=Config().for_ranks, groups=groups)
    player, reached, steps = Player(begun, data, seed=seed), 0.0, 0
    while steps < most and reached < WARM_TO:
        for _ in range(WARM_UP_EVERY):
            rows = data.take(WARM_UP_ROWS)
            batch = sft_batch([sft_sequence(row, data.tokenizer, data.config) for row in rows])
            step(trainer, batch, WARM_UP, total_steps=most)
            steps += 1
        player.take(trainer)
        reached = player.accuracy(temperature=1.0)
    trainer.snapshot("float32").export(done, tokenizer_folder=begun)
    note(f"{model}, seed {seed}: {reached:.3f} after {steps} steps of warm-up")
    return done


# -- runs --------------------------------------------------------------------------------------------------------------------------------


def train(name: str, seed: int, *, steps: int, groups: ProcessGroups, quick: bool) -> Run:
    """One run from the base of its seed."""
    case, start_s = CASES[name], time.monotonic()
    folder = warmed_up(case.model, seed, groups=groups, quick=quick)
    targets = ("all-linear", "experts") if case.model == "moe" else ("all-linear",)
    lora = {**LORA, "targets": targets} if case.weights == "adapter" else {}
    config = Config.model_validate({
        "model": {"path": str(folder), "route_replay": case.replay, "lora": lora}, "run": {"seed": seed}})
    trainer = (BankTrainer if case.weights == "adapter" else ModelTrainer).build(str(folder), config=config.for_ranks, groups=groups)
    data = Data(seed, first=WARM_UP_STEPS * WARM_UP_ROWS)  # other rows than those of the warm-up
    player = Player(folder, data, seed=seed, noise=case.noise)
    optimizer, gaps, before = OptimizerConfig(lr=RATES[case.weights], warmup_steps=5), [], player.accuracy()
    player.take(trainer)
    for number in range(steps):
        rows = data.take(PROMPTS_PER_STEP)
        answers = player.answer(rows, n=SAMPLES_PER_PROMPT, temperature=1.0, routes=case.replay == "rollout")
        played = [
            Group(f"0:{number}-{place}", number, tuple(map(partial(trajectory, player, data, row, version=number), outputs)))
            for place, (row, outputs) in enumerate(zip(rows, answers, strict=True))]
        batch = make_batch(played, config=config.algorithm, max_new_tokens=NUM_DIGITS + 2)
        gaps.append(step(trainer, batch, optimizer, total_steps=steps)["policy/logprob_gap_mean"])
        player.take(trainer)
    right = player
    if case.noise:
        right = Player(folder, data, seed=seed)
        right.take(trainer)
    after, after_right = player.accuracy(), right.accuracy()
    done = Run(
        name, seed, settings_of(name, steps), round(before, 4), round(after, 4), round(after_right, 4), round(mean(gaps), 5),
        round(time.monotonic() - start_s, 1))
    note(f"{name}, seed {seed}: {before:.3f} to {done.after:.3f}, {done.after_right:.3f} by its own experts, in {done.wall_seconds:.0f} s")
    return done


def trajectory(player: Player, data: Data, row: Row, output: Output, *, version: int) -> Trajectory:
    """Return an answer as what is trained on."""
    prompt, length = data.encode(row), len(output.token_ids)
    mask = np.arange(len(prompt) + length) >= len(prompt)
    routes = None if output.routes is None else np.concatenate([output.routes, unknown_routes(1, output.routes)])
    return Trajectory(
        np.array([*prompt, *output.token_ids], np.int32), mask, np.array([*np.zeros(len(prompt)), *output.logprobs], np.float32),
        np.where(mask, version, -1).astype(np.int32), player.reward(row, output), output.finish_reason or "", routes=routes)


def step(trainer: ModelTrainer | BankTrainer, batch: Batch, optimizer: OptimizerConfig, *, total_steps: int) -> dict[str, float]:
    """Train one step on a batch; returns its metrics."""
    plan = plan_microbatches(batch, num_ranks=1, max_tokens=16_384, share_prefix=True)
    params = adam_params(trainer.step, config=optimizer, total_steps=total_steps)
    return trainer.train_step(TrainStep(batch, (tuple(plan.microbatches[0]),), params)).metrics


# -- the page ----------------------------------------------------------------------------------------------------------------------------


def render(runs: Sequence[Run], *, steps: int) -> str:
    """The table, and the intervals of the differences between runs of the same seed."""
    of = {name: {done.seed: done for done in runs if done.case == name} for name in CASES}
    lines = [
        "| what is trained | seeds | before | after, by the engine that samples | after, by the trained routers | log-probability gap |",
        "|---|---|---|---|---|---|"]
    for name, own in of.items():
        if own:
            cells = [_range([getattr(done, which) for done in own.values()]) for which in ("before", "after", "after_right")]
            gap = median(done.gap for done in own.values())
            lines.append(f"| {NAMES[name]} | {len(own)} | {' | '.join(cells)} | {gap:.2g} |")
    lines += ["", f"Medians over seeds, with ranges, after {steps} steps. Differences between runs of the same seed, with 95 % intervals of"
                  " their means:", ""]
    for one, other, which, what in (
        ("moe", "dense", "after", "mixture less dense, all weights"),
        ("moe adapter", "dense adapter", "after", "mixture less dense, adapters"),
        ("noise replayed", "noise", "after", "replayed less not replayed, by the engine that samples"),
        ("noise replayed", "noise", "after_right", "replayed less not replayed, by the trained routers"),
    ):
        both = sorted(of[one].keys() & of[other].keys())
        if len(both) in T_95:
            lines.append(f"- {what}: {_interval([getattr(of[one][seed], which) - getattr(of[other][seed], which) for seed in both])}")
    return "\n".join(lines) + "\n"


def _range(values: Sequence[float]) -> str:
    return f"{median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def _interval(values: Sequence[float]) -> str:
    half = T_95[len(values)] * stdev(values) / len(values) ** 0.5
    return f"{mean(values):+.3f} ({mean(values) - half:+.3f} to {mean(values) + half:+.3f})"


if __name__ == "__main__":
    main()
