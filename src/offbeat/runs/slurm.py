"""Writes the batch script that runs a configuration under Slurm. Pure and torch-free; `offbeat launch slurm` calls it.

On one node the script starts the command itself, whose `local` launcher starts the rest. On several, it makes them a Ray cluster for a
controller, or calls torchrun on each for SPMD mode. Input is quoted for the shell, or refused.
"""

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offbeat.config.load import Override
from offbeat.config.root import Config
from offbeat.controller.reward_choice import num_reward_models, num_set_reward_models
from offbeat.errors import ConfigError

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,:@+-]*")
_DIRECTIVE = re.compile(r"--[a-z][a-z-]*(=[A-Za-z0-9_.,:@+/%\[\]-]+)?")
_TIME = re.compile(r"[0-9]+(:[0-9]+){0,2}|[0-9]+-[0-9]+(:[0-9]+){0,2}")
"""Slurm's forms of a time limit: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]."""
_SAVE_S = 300
"""Seconds before the end of the job's time at which the run is asked to save and end."""
_TORCHRUN_S = 30
"""Seconds that torchrun gives ranks to end when it is asked to; it has no setting for that."""


@dataclass(frozen=True)
class SlurmJob:
    """Options of a Slurm job.

    Attributes:
        nodes: number of machines; 0 takes as many as the configuration needs.
        gpus_per_node: GPUs of each; 0 computes on CPUs.
        cpus_per_node: cores of each; 0 takes whole machines.
        time: time limit in a form of Slurm's, such as 24:00:00 or 2-00:00:00.
        partition, account: names in Slurm; empty for the default.
        directives: further ones, such as --constraint=h100.
        setup: shell commands that come first, such as module load cuda.
        python: the Python that has Offbeat, at the same path on every machine.
        folder: where the command is run.
        command: command of Offbeat, such as train.
    """

    nodes: int = 0
    gpus_per_node: int = 8
    cpus_per_node: int = 0
    time: str = "24:00:00"
    partition: str = ""
    account: str = ""
    directives: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    python: Path = Path("python")
    folder: Path = Path()
    command: str = "train"

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node", "cpus_per_node"):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be >= 0, got {getattr(self, name)}")
        if not _TIME.fullmatch(self.time):
            raise ConfigError(
                "--time must be minutes, minutes:seconds, hours:minutes:seconds or days-hours[:minutes[:seconds]], such as 24:00:00 or"
                f" 7-0, got {self.time!r}")
        for name in ("partition", "account"):
            value = getattr(self, name)
            if value and not _WORD.fullmatch(value):
                raise ConfigError(f"--{name} must be a word of letters, digits and _.,:@+-, got {value!r}")
        for directive in self.directives:
            if not _DIRECTIVE.fullmatch(directive):
                raise ConfigError(f"--sbatch must be one directive without spaces, such as --constraint=h100, got {directive!r}")


def slurm_script(config: Config, file: Path, job: SlurmJob, overrides: Sequence[Override] = ()) -> str:
    """Return the batch script that runs `file`, which was loaded as `config` with these overrides.

    Raises:
        ConfigError: the machines are too few for the ranks, engines and reward models of the configuration.
    """
    nodes = _nodes(config, job)
    words = [job.command, str(file), *(f"--{key}={value}" for key, value in overrides)]  # one word each, as values may begin with --
    one = [f'"$python" -m offbeat {shlex.join(words)} &', *_WAIT]
    body = _spmd(config, nodes, words) if _is_spmd(config, job) else one if nodes == 1 else _ray(config, job, words)
    assumed = ["# What this script assumes:", *(f"# - {sentence}" for sentence in assumptions(config, job, nodes)), ""]
    return "\n".join([*_head(config, job, nodes), *assumed, *_common(job), *body]) + "\n"


def assumptions(config: Config, job: SlurmJob, nodes: int) -> list[str]:
    """Return the assumptions of a script, one sentence each."""
    spmd = _is_spmd(config, job)
    said = [
        "This folder, the Python below and the folder of a local model are at the same path on every node.",
        "The run's folder (run.dir) is on a disk that all nodes share; checkpoints are written there by every train rank.",
        "A model or data set named by hub id is in every node's cache, or the nodes can reach the hub.",
        f"The run is asked to save and end {_SAVE_S} s before the time limit; submitted again, it continues from there.",
    ]
    if spmd:
        said.append(
            f"A step and a checkpoint together take less than {_TORCHRUN_S} s, after which torchrun kills ranks that were asked to end; if"
            " they take longer, set checkpoint.every_steps, so that little is lost.")
    if nodes > 1:
        ports = "torchrun meets on one port" if spmd else "Ray takes one port of the first node, and free ones of all"
        said.append(f"Nodes reach each other on all ports above 1024: {ports}, and engines and ranks listen on free ports.")
    if not config.inference.kind.inside and not config.inference.urls:
        said.append(f"inference.python, which holds {config.inference.engine}, is at the same path on every node.")
    return said


def _nodes(config: Config, job: SlurmJob) -> int:
    """Return the number of nodes, which hold every rank and every engine."""
    gpus, inference = job.gpus_per_node, config.inference
    ranks = 0 if job.command == "eval" else config.train.num_ranks
    plays = job.command in ("train", "eval")
    num_engines = inference.num_engines if plays and not inference.urls else 0
    num_judges = num_reward_models(config) + num_set_reward_models(config) if plays else 0
    per_engine = max(1, inference.devices_per_engine)
    if not gpus:
        wanted = 1
    elif per_engine > gpus and num_engines:
        raise ConfigError(
            f"inference.devices_per_engine = {per_engine} needs a machine with as many GPUs, but --gpus-per-node is {gpus}; an engine lies"
            " on one machine")
    else:
        # Engines never lie across machines, so machines with a remainder are left with room that only ranks can use.
        for_engines = math.ceil(num_engines / (gpus // per_engine)) if num_engines else 0
        wanted = max(1, for_engines, math.ceil((ranks + num_engines * per_engine + num_judges) / gpus))
    nodes = job.nodes or wanted
    if nodes < wanted:
        judges = f" and {num_judges} reward models" if num_judges else ""
        raise ConfigError(
            f"{ranks} train ranks and {num_engines} engines of {per_engine} GPUs{judges} need {wanted} nodes of {gpus} GPUs, but --nodes is"
            f" {nodes}; ask for more, or lower train.num_ranks or inference.num_engines")
    if _is_spmd(config, job):
        _check_spmd(config, job, nodes, engine_gpus=num_engines * per_engine)
    return nodes


def _is_spmd(config: Config, job: SlurmJob) -> bool:
    """Whether torchrun starts the ranks; an evaluation has none."""
    return config.run.mode == "spmd" and job.command != "eval"


def _check_spmd(config: Config, job: SlurmJob, nodes: int, *, engine_gpus: int) -> None:
    ranks = config.train.num_ranks
    if ranks % nodes:
        raise ConfigError(
            f"train.num_ranks = {ranks} must be a multiple of the {nodes} nodes with run.mode = 'spmd', as torchrun starts equally many on"
            " each; change it, or --nodes")
    if job.gpus_per_node and ranks // nodes + engine_gpus > job.gpus_per_node:
        raise ConfigError(
            f"{ranks // nodes} ranks and all engines, {engine_gpus} GPUs, run on the first node with run.mode = 'spmd', which has"
            f" {job.gpus_per_node}; use more nodes, fewer engines, or run.mode = 'controller'")


def _head(config: Config, job: SlurmJob, nodes: int) -> list[str]:
    directives = [
        f"--job-name=offbeat-{config.run.name}", f"--nodes={nodes}", "--ntasks-per-node=1",
        f"--cpus-per-task={job.cpus_per_node}" if job.cpus_per_node else "--exclusive",
        *([f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
        "--mem=0" if not job.cpus_per_node else "", f"--time={job.time}", f"--signal=B:TERM@{_SAVE_S}",
        f"--output=offbeat-{config.run.name}-%j.log", "--open-mode=append",
        f"--partition={job.partition}" if job.partition else "", f"--account={job.account}" if job.account else "", *job.directives]
    return ["#!/bin/bash", *(f"#SBATCH {directive}" for directive in directives if directive), "#"]


def _common(job: SlurmJob) -> list[str]:
    return [
        "set -euo pipefail",
        f"cd {shlex.quote(str(job.folder))}",
        *(["set +u", *job.setup, "set -u"] if job.setup else []),  # scripts of conda and modules read variables that are not set
        f"python={shlex.quote(str(job.python))}",
        "export OMP_WAIT_POLICY=passive",
        ""]


_WAIT = [
    # A signal ends the first `wait`; the second waits for the run to save.
    "run=$!",
    """trap 'kill -TERM "$run"' TERM""",
    'wait "$run" && code=0 || code=$?',
    'if [ "$code" -gt 128 ] && kill -0 "$run" 2>/dev/null; then wait "$run" && code=0 || code=$?; fi',
    'exit "$code"']


_MEET = [
    'cpus="$SLURM_CPUS_ON_NODE"',
    'read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
    '''address="$(srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')"''',
    "port=$((20000 + SLURM_JOB_ID % 10000))",
    ""]


def _ray(config: Config, job: SlurmJob, words: Sequence[str]) -> list[str]:
    """Return the lines for a Ray node on each machine, and the controller on the first, where this script runs."""
    given = ["--cluster.launcher", "ray"]
    if job.gpus_per_node:  # on a cluster, 0 is the CPU
        given += ["--train.devices_per_rank", "1", "--inference.devices_per_engine", str(max(1, config.inference.devices_per_engine))]
    start = (
        '"$python" -m ray.scripts.scripts start --block --disable-usage-stats --object-store-memory=200000000'
        f' --num-cpus="$cpus" --num-gpus={job.gpus_per_node}')
    return [
        *_MEET,
        'export RAY_TMPDIR="/tmp/offbeat-$SLURM_JOB_ID"',
        "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT",
        'srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" --cpus-per-task="$cpus" \\',
        f'  {start} --head --include-dashboard=false --node-ip-address="$address" --port="$port" &',
        "for _ in $(seq 120); do",
        '  if "$python" -m ray.scripts.scripts health-check --address="$address:$port" >/dev/null 2>&1; then break; fi',
        "  sleep 1",
        "done",
        'srun --overlap --nodes="$((SLURM_JOB_NUM_NODES - 1))" --ntasks-per-node=1 --exclude="$head" --cpus-per-task="$cpus" \\',
        f'  {start} --address="$address:$port" &',
        "",
        "# The run waits until the other nodes have joined, for cluster.start_timeout_s at most.",
        f'"$python" -m offbeat {shlex.join([*words, *given])} --cluster.ray_address "$address:$port" &',
        *_WAIT]


def _spmd(config: Config, nodes: int, words: Sequence[str]) -> list[str]:
    return [
        *_MEET,
        'srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task="$cpus" \\',
        f'  "$python" -m torch.distributed.run --nnodes={nodes} --nproc-per-node={config.train.num_ranks // nodes} --rdzv-backend=c10d \\',
        '  --rdzv-endpoint="$address:$port" --rdzv-id="$SLURM_JOB_ID" \\',
        f"  -m offbeat {shlex.join(words)} &",
        *_WAIT]
