"""The batch script for Slurm: what it asks for, that it is safe shell, and what it does when it is run by stand-ins for Slurm."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from offbeat.config.load import load_config
from offbeat.config.root import Config
from offbeat.errors import ConfigError
from offbeat.runs.slurm import SlurmJob, slurm_script

FILE = Path("/shared/it's $(touch gone) here/run.toml")
JOB = SlurmJob(python=Path("/opt/a b/python"), folder=Path("/shared/work; rm"))
STANDINS = {
    "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"', "scontrol": "printf 'one\\ntwo\\n'", "hostname": "echo 10.0.0.1 10.0.0.2",
}
"""Of Slurm's programs; srun starts its task here."""
PYTHON = r"""#!/bin/bash
call="$(printf '%s\x1f' "$@")"
printf '%s\x1e' "$call" >> {calls}
[[ "$*" != *--block* ]] || exec sleep 30
until [[ "$*" != *ray_address* || "$(grep -o -e --block {calls} | wc -l)" -ge 2 ]]; do sleep 0.05; done
"""
"""Notes what it is called with. A node of Ray stays, and the run on it lasts until both are there."""


def config(**changes: str) -> Config:
    return load_config(None, [(name.replace("__", "."), value) for name, value in changes.items()])


def script(job: SlurmJob = JOB, **changes: str) -> str:
    return slurm_script(config(**changes), FILE, job, [("run.name", "it's")] if not changes else ())


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


SHAPES = {
    "one": {}, "ray": {"train__num_ranks": "8", "inference__num_engines": "8"}, "spmd": {"run__mode": "spmd", "train__num_ranks": "4"},
    "spmd on two": {"run__mode": "spmd", "train__num_ranks": "12", "inference__num_engines": "2"},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_script_is_valid_shell(shape: str, tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text(script(**SHAPES[shape]))
    subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--severity=warning", path], check=True)


@pytest.mark.parametrize(("changes", "gpus", "nodes"), [
    ({}, 8, 1), ({"train__num_ranks": "8"}, 8, 2), ({"train__num_ranks": "32", "inference__num_engines": "32"}, 8, 8), ({}, 0, 1),
    ({"inference__engine": "vllm", "inference__devices_per_engine": "4", "inference__num_engines": "3", "train__num_ranks": "4"}, 8, 2),
    ({"inference__engine": "vllm", "inference__devices_per_engine": "3", "inference__num_engines": "3"}, 4, 3),
    ({"inference__urls": '["http://there:1"]', "train__num_ranks": "8"}, 8, 1),
    ({"inference__urls": '["http://there:1"]', "inference__engine": "vllm", "inference__devices_per_engine": "8"}, 4, 1),
    ({"rollout__reward": "model:judge", "rollout__reward_workers": "7"}, 8, 2),
    ({"evaluate__sets__other__rollout__reward": "model:judge", "evaluate__sets__other__rollout__reward_workers": "7"}, 8, 2),
])
def test_as_many_nodes_are_asked_for_as_the_configuration_needs(changes: dict[str, str], gpus: int, nodes: int) -> None:
    asked = directives(script(SlurmJob(gpus_per_node=gpus), **changes))
    assert f"--nodes={nodes}" in asked and "--ntasks-per-node=1" in asked
    assert (f"--gpus-per-node={gpus}" in asked) == bool(gpus)


def test_an_evaluation_has_no_ranks() -> None:
    text = script(SlurmJob(gpus_per_node=1, command="eval"), train__num_ranks="8", run__mode="spmd")
    assert "--nodes=1" in directives(text) and "torch.distributed.run" not in text


def test_what_is_asked_of_slurm_stands_in_directives() -> None:
    job = SlurmJob(cpus_per_node=16, time="2-00:00:00", partition="gpu", account="lab", directives=("--constraint=h100", "--requeue"))
    asked = directives(script(job))
    assert {"--cpus-per-task=16", "--time=2-00:00:00", "--partition=gpu", "--account=lab", "--constraint=h100", "--requeue"} <= set(asked)
    assert "--exclusive" not in asked and "--exclusive" in directives(script())


@pytest.mark.parametrize(("options", "said"), [
    ({"time": "1:00\n#SBATCH --uid=0"}, "--time must be minutes, minutes:seconds"), ({"partition": "$(id)"}, "--partition must be a word"),
    ({"directives": ("--constraint=a b",)}, "--sbatch must be one directive"), ({"nodes": -1}, "--nodes must be >= 0"),
])
def test_what_would_break_a_directive_is_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SlurmJob(**options)


@pytest.mark.parametrize("time", ["30", "30:00", "24:00:00", "7-0", "7-12:30", "2-00:00:00"])
def test_times_in_forms_of_slurm_are_taken(time: str) -> None:
    assert f"--time={time}" in directives(script(SlurmJob(time=time)))


@pytest.mark.parametrize("time", ["", "1week", "1-", "2h", "-5", "1:2:3:4", "1-2:3:4:5", "24:00:00.5"])
def test_other_times_are_refused(time: str) -> None:
    with pytest.raises(ConfigError, match=r"--time must be minutes, .*, such as 24:00:00 or 7-0, got"):
        SlurmJob(time=time)


@pytest.mark.parametrize(("job", "changes", "said"), [
    (SlurmJob(nodes=1), {"train__num_ranks": "8"}, "8 train ranks and 1 engines of 1 GPUs need 2 nodes of 8 GPUs, but --nodes is 1"),
    (SlurmJob(gpus_per_node=4), {"inference__engine": "vllm", "inference__devices_per_engine": "8"}, "an engine lies on one machine"),
    (SlurmJob(nodes=2), {"run__mode": "spmd", "train__num_ranks": "5"}, "must be a multiple of the 2 nodes"),
    (SlurmJob(nodes=2), {"run__mode": "spmd", "train__num_ranks": "14", "inference__num_engines": "2"}, "run on the first node"),
])
def test_machines_that_are_too_few_are_refused(job: SlurmJob, changes: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        script(job, **changes)


def played(tmp_path: Path, **changes: str) -> list[list[str]]:
    """Run a script with stand-ins for Slurm and Python; returns the arguments that Python was called with, in their order."""
    for name, body in STANDINS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
    calls = tmp_path / "calls"
    (tmp_path / "python").write_text(PYTHON.format(calls=calls))
    for name in (*STANDINS, "python"):
        (tmp_path / name).chmod(0o755)
    work = tmp_path / "it's; a $(folder)"
    work.mkdir()
    job = SlurmJob(python=tmp_path / "python", folder=work, setup=('export SET_UP="$NEVER_SET"',))
    overrides = [("rollout.stop", '["$(touch gone)", "it\'s", "--no"]')]
    env = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "123", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_ON_NODE": "16"}
    text = slurm_script(config(**changes), FILE, job, overrides)
    subprocess.run(["bash", "-c", text], env=env, cwd=tmp_path, check=True, timeout=20, stdout=subprocess.DEVNULL)
    assert not list(work.iterdir()) and not (tmp_path / "gone").exists()
    return [call.split("\x1f")[:-1] for call in calls.read_text().split("\x1e")[:-1]]


TRAIN = ["-m", "offbeat", "train", str(FILE), """--rollout.stop=["$(touch gone)", "it's", "--no"]"""]


def test_on_one_node_the_run_is_started_as_it_is(tmp_path: Path) -> None:
    assert played(tmp_path) == [TRAIN]


def test_several_nodes_become_a_ray_cluster_with_the_controller_on_the_first(tmp_path: Path) -> None:
    calls = played(tmp_path, **SHAPES["ray"])
    starts = [call for call in calls if "start" in call]
    assert sorted("--head" in call for call in starts) == [False, True]
    assert all({"--num-cpus=16", "--num-gpus=8"} <= set(call) for call in starts)
    assert [call for call in calls if "offbeat" in call] == [[
        *TRAIN, "--cluster.launcher", "ray", "--train.devices_per_rank", "1", "--inference.devices_per_engine", "1",
        "--cluster.ray_address", "10.0.0.1:20123"]]


def test_in_spmd_mode_torchrun_starts_the_ranks_of_each_node(tmp_path: Path) -> None:
    assert played(tmp_path, **SHAPES["spmd on two"]) == [[
        "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=6", "--rdzv-backend=c10d", "--rdzv-endpoint=10.0.0.1:20123",
        "--rdzv-id=123", *TRAIN]]
    assert "less than 30 s, after which torchrun kills ranks" in script(**SHAPES["spmd on two"]) and "torchrun" not in script()
