"""Offbeat against its newest peers on this machine, and the page docs/performance.md; `make bench-peers` and `make bench-peers-avx2`.

    python benchmarks/peers.py [--quick] [--parts engine prefixes ...] [--resume] [--write-docs]

Runs the benchmarks below one after the other, each paired within itself, and keeps their figures in benchmarks/peers-KIND.jsonl, where
KIND is the CPU's instructions, such as avx2; those of smoke runs in build/benchmarks. Figures of a part replace its older ones; --resume
leaves out parts that are there. With --write-docs, the page is made from the figures of all kinds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from measure import BENCHMARKS, ROOT, WORK, emit, note
from results import read_results, record
from trees import run_tree

from offbeat.cpu import this_cpu

PAGE = ROOT / "docs" / "performance.md"
PARTS = {
    "engine": ["real.py", "--parts", "engine"],
    "prefixes": ["prefixes.py"],
    "trainer": ["plain_loop.py"],
    "step": ["step.py", "--steps", "12"],
    "pretrained": ["real.py", "--parts", "step"],
    "adapters": ["lora.py"],
    "quickstart": ["peers.py", "--quickstart"],
}
TITLES = {
    "engine": "Generation of SmolLM2-135M, against vLLM",
    "prefixes": "Prompts with known beginnings, SmolLM2-135M in float32",
    "trainer": "A training step, against a plain loop of transformers",
    "step": "A GRPO step of a small model, against TRL",
    "pretrained": "A GRPO step of SmolLM2-135M, against TRL",
    "adapters": "Many adapters in one step, against PEFT",
    "quickstart": "The quick start",
}
WANTED = {"engine": " vs vLLM", "adapters": " vs ", "pretrained": " vs TRL"}
"""What the cases of a part have to contain to stand on the page; others are for information."""
_OWN = (" vs no cache", " vs the engine before", " vs 1", " vs full fine-tuning")
"""Ends of cases that compare Offbeat with itself."""
QUICKSTART_AIM_S = 60.0


@dataclass(frozen=True)
class Figure:
    """One figure of a part; `cpu`, `load` and `versions` say under what it was measured."""

    part: str
    case: str
    ours: float
    peer: float
    ratio: float
    unit: str
    aim: float | None
    met: bool | None
    cpu: str
    load: float
    versions: str
    date: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run of each part")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--resume", action="store_true", help="leave out parts whose figures are there")
    parser.add_argument("--write-docs", action="store_true", help="write docs/performance.md")
    parser.add_argument("--quickstart", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quickstart:
        time_quickstart(repeats=1 if args.quick else 3)
        return
    results = (WORK if args.quick else BENCHMARKS) / f"peers-{this_cpu().instructions.lower().replace(' ', '-')}.jsonl"
    done = {figure.part for figure in read_results(results, Figure)} if args.resume else set()
    for part in args.parts:
        if part in done:
            note(f"{part} is there")
            continue
        figures = list(run_part(part, quick=args.quick))  # all or none, so that --resume does a part that failed again
        others = [figure for figure in read_results(results, Figure) if figure.part != part]
        results.unlink(missing_ok=True)
        for figure in [*others, *figures]:
            record(results, figure)
    if args.write_docs:
        PAGE.write_text(render(), encoding="utf-8")


def run_part(part: str, *, quick: bool) -> Iterator[Figure]:
    """Run one benchmark and yield its figures."""
    begin, load = time.monotonic(), os.getloadavg()[1]
    command = [sys.executable, BENCHMARKS / PARTS[part][0], *PARTS[part][1:], *["--quick"] * quick]
    with subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None, "is a pipe"
        for line in process.stdout:
            values = json.loads(line)
            del values["benchmark"]
            print(line, end="", flush=True)
            yield Figure(
                part=part, **values, cpu=str(this_cpu()), load=load, versions=versions(), date=time.strftime("%Y-%m-%d"))
    if process.returncode:
        sys.exit(f"{part} failed with exit code {process.returncode}")
    note(f"{part} took {time.monotonic() - begin:.0f} s")


def time_quickstart(*, repeats: int) -> None:
    """Wall and CPU seconds of the quick start, and the accuracy that it reaches."""
    runs = []
    for turn in range(repeats):
        command = [sys.executable, "-m", "offbeat", "quickstart", "--run.dir", WORK / "quickstart", "--run.seed", turn]
        done = run_tree(command, log=WORK / f"quickstart-{turn}.log", env={"OMP_WAIT_POLICY": "passive"})
        result = json.loads(max((WORK / "quickstart").glob("**/result.json"), key=lambda path: path.stat().st_mtime).read_text())
        runs.append({"s": done.wall_s, "CPU-s": done.cpu_s, "GB": done.peak_bytes / 1e9, "accuracy": result["heldout_after"]})
        note(f"quick start {turn + 1}/{repeats}: {runs[-1]}")
    for unit in runs[0]:
        value = statistics.median(run[unit] for run in runs)
        wanted = QUICKSTART_AIM_S if unit == "s" else value
        emit("peers", "quick start", ours=value, peer=wanted, unit=unit, aim=1.0 if unit == "s" else None, less_is_better=True)


def versions() -> str:
    """Versions of the peers that are installed, such as "torch 2.13.0, vLLM 0.32.0, TRL 1.16.0"."""
    found = []
    for name, folder, package in (("torch", ".venv", "torch"), ("vLLM", ".venv-vllm", "vllm"), ("TRL", ".venv-trl", "trl")):
        for path in sorted((ROOT / folder).glob(f"lib/python3*/site-packages/{package}-*.dist-info")):
            found.append(f"{name} {path.name.removeprefix(f'{package}-').removesuffix('.dist-info')}")
    return ", ".join(found)


# -- the page ------------------------------------------------------------------------------------------------------------------------------

INTRODUCTION = """# Speed beside other systems

What Offbeat and its peers take for the same work on the same machine, on CPUs. `make bench-peers` makes this page: sides take turns
within a run, each figure is a median of three rounds or more, and peers run in their fastest way (vLLM in one process, TRL on all cores).
`times` says how many times better Offbeat is; figures in **bold** miss their aim, and what is below 1 is listed first. On GPUs nothing
has been measured; [GPUs](gpu.md) says what is known.
"""

REASONS = """
## Why aims are missed

- Loads above 2 are those of programs that had a lower priority than what was measured, and used the memory beside it.
- The AVX2 figures are of masks for oneDNN, torch and MKL, and those of generation and of prompts with known beginnings for FBGEMM, too, by
  which the embedded engine multiplies in int8 and weighs rows in attention. That mask costs a decode step in float32 3 % of its CPU time
  (`decode_parts.py`, 8 and 64 rows). Processes of vLLM have huge pages, as engines have.
- Requests in flight, against vLLM: [the parts of a decode step](engine.md#where-a-decode-step-goes) are the reason. Both sides multiply by
  oneDNN. What is between is called one by one by the embedded engine; vLLM compiles it, with a compiler that a machine need not have here,
  and that this is what it gains is read from its code, not profiled.
- 8 prompts with 8 samples: with 64 rows, the products of a step take 47 ms in bfloat16, and the prompts 5 ms more for each of 64 steps.
  vLLM took 128 ms in all; half of that leaves 12 ms for attention, which takes 14, sampling, norms and the rest. So twice as fast is not
  in reach.
- Turns of an agent against the engine before, which had no prefix cache: of 99 CPU-s without a cache, decoding takes 25 (`turns vs no
  cache, if prompts took no time`) and the 26,240 tokens of all prompts 74. 3,840 of them are new and take 11, so 36 CPU-s are left for any
  cache in float32, where the engine before takes 97: at most 2.7 times. 83 % of a decode step of 8 rows are products, at what oneDNN takes
  for them alone. With weights in int8, which the engine before could not have, products take less than half.
- Groups against no cache have nothing to find, and what is kept costs them 4 % of their CPU time in these runs.
- A GRPO step of SmolLM2-135M against TRL: of 7.9 s with AVX2, training takes 7.4 s, against 8.2 s of TRL's. The engine generates meanwhile
  on the same two cores: 13.0 CPU-s of the 15.9 s that two cores have are used. 2.2 times TRL would be 7.5 s, 0.4 s less.
- A GRPO step of a small model against TRL: of 0.37 s with AVX2, 0.31 s is training, beside which the engine generates for the next step on
  the same two cores; 2.7 times TRL would be 0.31 s for all of it.
- A training step against a plain loop: timed by parts, forward and backward passes take 62 of 66 ms with the tiny model and 1,843 of 1,875
  with 27M weights, and those of the plain loop 64 and 1,868. Both are the same products; 10 % less would need quicker ones.
- SmolLM2-135M, memory of all processes: of 6.3 GB, `memory_parts.py` counts up to 4.0 in the trainer (0.4 of imports, 0.5 each of weights
  and gradients, 1.1 of AdamW's moments, and 1.2 to 1.4 of activations and what the C library keeps for the next pass), 2.3 in the engine
  while it stages a version (0.4 of imports, 0.65 of packed weights, as much for the next version, and 0.5 for the pages of the published
  file); controller and rewards have 0.2. Without activations and a second version it would be 3.8 GB, so that 3.5 is not in reach while
  trainer and engine have weights of their own. With micro-batches of at most 256 tokens it was as much, and a step took 12 % longer.
- SmolLM2-135M, start to the end of step 1: of 19.5 s, the first step takes 12.2 to 15.5, of which the first samples take 5.5 and training 6
  to 9; processes and models are ready after 5.
- Publishing SmolLM2-135M takes 0.5 of 7.9 s, 6 %: `publish_parts.py` counts 0.21 CPU-s for the canary, 0.06 for the fingerprint and 0.35
  for writing 538 MB to memory. 2 % would be 0.16 s, less than writing takes; in float32 each version is written whole by default.
- 16 adapters against one: the frozen model's passes take the same time. With the tiny model the adapters' products take 16 ms instead of 9,
  since each of 16 adapters has its own, and the update 5 instead of 1, of a step of 59 ms; with 27M weights, products 120 ms instead of 85
  and the update 38 instead of 3, of 989 ms (`lora.py --parts`, CPU time).
- The quick start: 5 s until processes are ready, 10 s of warm-up and 49 s of steps, in which training takes 39 s, six evaluations 4,
  waiting for samples 4 and publishing 2 (`quickstart_parts.py`, a run of 65 s). Meanwhile trainer, engine, controller and rewards take 30,
  22, 18 and 2 CPU-s, 72 of the 98 that two cores have. With the engine at a lower priority (nice 5) two runs took 62 s, and two without 64.
- The controller has no peer here. `controller.py --groups 3072` counts 0.098 us of CPU per generated token where samples have 4,096 tokens,
  0.31 in vLLM's form, and 0.19 ms per sample where they have 8; the aims are 0.1 us and 0.1 ms.
- Many adapters of the model of 27M weights against PEFT: the passes through the frozen model take 85 % of Offbeat's step with 16 adapters
  (0.92 of 1.08 CPU-s with AVX2). They cannot be saved by batching adapters, so 3 times is not in reach there; the tiny model's steps are
  mostly calls of small products, which batching saves.
"""


def render() -> str:
    """Return the page, from the figures of all kinds of CPU."""
    text = INTRODUCTION
    for results in sorted(BENCHMARKS.glob("peers-*.jsonl")):
        figures = read_results(results, Figure)
        loads, dates = (sorted(getattr(figure, name) for figure in figures) for name in ("load", "date"))
        text += (
            f"\n## On {figures[0].cpu}\n\n{dates[0]} to {dates[-1]}; {figures[0].versions}; {os.cpu_count()} cores; load of the machine"
            f" when a part began {loads[0]:.1f} to {loads[-1]:.1f}.\n")
        shown = [figure for figure in figures if WANTED.get(figure.part, "") in figure.case]
        behind = [
            figure for figure in shown
            if figure.ratio < 1 and not figure.case.endswith(_OWN) and ("CPU" not in figure.unit or figure.part == "trainer")
            and figure.part != "quickstart"]
        if behind:
            text += "\nA peer is ahead in:\n\n"
            text += "".join(f"- {_case(figure)}, {figure.unit}: {figure.ratio:.2f} times\n" for figure in behind)
        for part, title in TITLES.items():
            rows = [figure for figure in shown if figure.part == part]
            if rows:
                text += f"\n### {title}\n\n| | unit | Offbeat | {'wanted' if part == 'quickstart' else 'peer'} | times | aim |\n"
                text += "|---|---|---|---|---|---|\n"
                text += "".join(_row(figure) for figure in rows)
    return text + REASONS


def _row(figure: Figure) -> str:
    times = f"{figure.ratio:.2f}"
    shown = f"**{times}**" if figure.met is False else times
    aim = "" if figure.aim is None else f"{figure.aim:g}"
    peer = "" if figure.part == "quickstart" and figure.unit != "s" else f"{figure.peer:g}"
    return f"| {_case(figure)} | {figure.unit} | {figure.ours:g} | {peer} | {shown if peer else ''} | {aim} |\n"


def _case(figure: Figure) -> str:
    return figure.case.replace("engine/groups", "8 prompts with 8 samples").replace("engine/", "requests in flight: ")


if __name__ == "__main__":
    main()
