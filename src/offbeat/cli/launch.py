"""`offbeat launch slurm CONFIG`: writes the batch script that runs a configuration on a cluster's machines."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from offbeat.config.load import Override, load_config
from offbeat.config.root import TRAINING_KINDS
from offbeat.errors import StorageError
from offbeat.runs.slurm import SlurmJob, slurm_script

DESCRIPTION = """\
Write a Slurm batch script that runs CONFIG, to the terminal or into a file, without starting anything.

On one node, the script starts the run, which starts its train ranks and engines and assigns the node's GPUs to them. On several nodes, the
script starts a Ray cluster on them and the controller on the first node; with run.mode = "spmd" it calls torchrun on every node instead.
The beginning of the script states its assumptions, such as a disk that all nodes share. The configuration is checked now, and settings
given here are passed on.
"""

EXAMPLES = """\
examples:
  offbeat launch slurm run.toml --output job.sh && sbatch job.sh
  offbeat launch slurm run.toml --gpus-per-node 4 --partition gpu --account lab --time 2-00:00:00 --setup 'module load cuda/12.8'
  offbeat launch slurm run.toml --nodes 2 --train.num_ranks 8 --inference.num_engines 8 --sbatch=--constraint=h100
  offbeat launch slurm sft.toml --command sft --run.mode spmd --train.num_ranks 8

Submitted again after its time limit, a run continues from its newest checkpoint. `offbeat config check run.toml --memory` says
what a rank of a model takes on a GPU.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("where", choices=("slurm",), help="the cluster's scheduler")
    parser.add_argument("config", metavar="CONFIG", help="TOML file; --section.key value changes a setting, and is passed on")
    parser.add_argument("--output", metavar="FILE", help="write the script to this file (default: print it)")
    parser.add_argument("--nodes", type=int, default=0, metavar="N", help="machines (default: as many as the ranks and engines need)")
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="K", help="GPUs of each; 0 computes on CPUs (default: 8)")
    parser.add_argument("--cpus-per-node", type=int, default=0, metavar="C", help="cores of each (default: whole machines)")
    parser.add_argument("--time", default="24:00:00", help="limit of the job (default: 24:00:00)")
    parser.add_argument("--partition", default="", help="partition of the cluster (default: the cluster's)")
    parser.add_argument("--account", default="", help="account that pays (default: yours)")
    parser.add_argument("--sbatch", action="append", default=[], metavar="DIRECTIVE", help="another directive; may be given repeatedly")
    parser.add_argument("--setup", action="append", default=[], metavar="COMMAND", help="shell command to run first; may be repeated")
    parser.add_argument("--python", default=sys.executable, metavar="PATH", help="Python that has Offbeat (default: this one)")
    parser.add_argument("--command", choices=(*TRAINING_KINDS, "eval"), default="train", help="what is run (default: train)")


def run(args: argparse.Namespace, overrides: Sequence[Override]) -> int:
    """Write the script; raises ConfigError if an option or the configuration is invalid, StorageError if the file cannot be written."""
    config = load_config(args.config, overrides)
    job = SlurmJob(
        nodes=args.nodes, gpus_per_node=args.gpus_per_node, cpus_per_node=args.cpus_per_node, time=args.time, partition=args.partition,
        account=args.account, directives=tuple(args.sbatch), setup=tuple(args.setup), python=Path(args.python), folder=Path.cwd(),
        command=args.command)
    script = slurm_script(config, Path(args.config).absolute(), job, overrides)
    if args.output is None:
        print(script, end="")
        return 0
    path = Path(args.output)
    try:
        path.write_text(script, encoding="utf-8")
        path.chmod(0o755)
    except OSError as exc:
        raise StorageError(f"{path} cannot be written: {exc.strerror}; give another --output") from exc
    print("".join(f"{line.removeprefix('# ')}\n" for line in script.splitlines() if line.startswith(("# What", "# - "))), end="")
    print(f"submit it with: sbatch {path}")
    return 0
