"""Every named sync point of a run, and every place inside the regions, where it comes and how long ranks wait there; a test compares the
names with the source.

A drill resumes a run for two steps. Its fault strikes in the second of them where the point comes in every step, so that one step has
been trained and saved before.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

MODES = ("spmd", "local", "ray")
KINDS = ("exception", "slow", "stop", "kill", "mismatch")
INSIDE_KINDS = ("stop", "hang")
SYNC_TIMEOUT_S, ANSWER_TIMEOUT_S, JOIN_TIMEOUT_S, WRITE_TIMEOUT_S = 2.0, 1.0, 5.0, 3.0
HEADS = {"rollout.single_rank_load": "false", "rollout.balance_batch": "false"}
REFERRING = {"algorithm.kl_loss": "k3", "algorithm.kl_coefficient": "1e-3"}
CRITICISED = {"algorithm.preset": "ppo", "critic.normalise": "true"}


@dataclass(frozen=True)
class Point:
    """One name.

    Attributes:
        nth: the arrival at which the fault strikes; weights are also published, and users asked to stop, before the first step.
        everywhere: all modes have it; else SPMD mode alone.
        rank_0: rank 0 misbehaves there too, who hosts the store in single-controller mode and leads in SPMD mode.
        rank: that misbehaves there.
        inside: it is a place inside a region or a call, where ranks wait for each other in collectives, or not at all.
        heads: only where every rank draws its own data.
        timeout_s: seconds that ranks wait there.
        busy_s: seconds for which the survivor may have work of its own before it comes there and its wait begins.
        settings: what the run needs for the point to come, or for its deadline to be as short.
    """

    name: str
    nth: int = 2
    everywhere: bool = False
    rank_0: bool = False
    rank: int = 1
    inside: bool = False
    heads: bool = False
    timeout_s: float = SYNC_TIMEOUT_S
    busy_s: float = 0.0
    settings: Mapping[str, str] = field(default_factory=dict)


POINTS = (
    Point("join", 1, everywhere=True, rank_0=True, timeout_s=JOIN_TIMEOUT_S, settings={"dist.init_timeout_s": str(JOIN_TIMEOUT_S)}),
    Point("build_model", 1),
    Point("load_policy", 1),
    Point("engines", 1, busy_s=4.0),  # rank 0 starts them: processes that load torch
    Point("warm_up", 1, settings={"run.warm_up": "true"}),
    Point("recover", 1),
    Point("recover_steps", 1),
    Point("load_recover", 1, everywhere=True),
    Point("load_recover_read", 1, everywhere=True),
    Point("canary", 3, everywhere=True),
    Point("publish", 3, everywhere=True),
    Point("published", 3, timeout_s=WRITE_TIMEOUT_S),
    Point("stop", 3),
    Point("score_batch", settings=REFERRING),
    Point("score_rows", heads=True, settings=REFERRING),
    Point("score", everywhere=True, settings=REFERRING),
    Point("scores", settings=REFERRING),
    Point("rollouts"),
    Point("distributed_batch", rank_0=True),
    Point("train_batch", heads=True),
    Point("train_step", everywhere=True, rank_0=True),
    Point("value_scale", everywhere=True, settings=CRITICISED),
    Point("train_stats_maxima", everywhere=True),
    Point("train_stats_sums", everywhere=True),
    Point("step_times"),
    Point("export_stats"),
    Point("evaluate_fn"),
    Point("evaluate"),
    Point("commit_stats"),
    Point("save_heads"),
    Point("save_recover", everywhere=True, rank_0=True),
    Point("save_recover_done", everywhere=True),
    Point("save_complete"),
    Point("save_hf", 1, everywhere=True),
    Point("save_hf_done", 1, timeout_s=WRITE_TIMEOUT_S),
    Point("leave", 1),
)

# Inside: where the work of a step, a publish, a checkpoint and an export is done. Only rank 0 writes weights that each rank has, while the
# others wait for it at a point of SPMD mode, or have answered the controller.
PLACES = (
    Point("load_model", 1, everywhere=True, inside=True),
    Point("read_checkpoint", 1, everywhere=True, inside=True),
    Point("forward", everywhere=True, inside=True),
    Point("backward", everywhere=True, inside=True),
    Point("optimizer", 1, everywhere=True, inside=True),  # a step without any advantage has none
    Point("copy_weights", 1, everywhere=True, inside=True),
    Point("write_weights", 1, everywhere=True, inside=True, rank=0, timeout_s=WRITE_TIMEOUT_S),
    Point("offer_weights", 1, everywhere=True, inside=True, rank=0, settings={"weights.channel": "collective"}),
    Point("write_checkpoint", everywhere=True, inside=True),
)
OTHER_PLACES = ("write_adapter", "compare_weights", "load_teacher")
"""As `write_weights`, in runs that train an adapter, or that write what has changed; and as `load_model`, in runs with a teacher."""

OTHER_POINTS = (
    "teach", "unsaved", "reference_found", "reference_written", "evaluate_pairs", "device_memory",
    "publish_folder", "publish_layout", "publish_writers", "publish_changes", "publish_written")
"""As `score`, in runs with a teacher; where ranks of a run that ends early wait for rank 0, as at `stop`; where ranks of `offbeat dpo` do,
as at `recover` and `evaluate_fn`; before `load_policy` loads, on accelerators; and around `publish`, where weights are in shards
(tests/trainer/test_parts.py)."""

# No rank of `offbeat train` comes to these, so they are no rows of the table; a failure of ranks of tenants is drilled in
# tests/ranks/test_trainers.py.
TENANT_POINTS = ("forward_rows", "load_adapter", "optim_step", "optim_step_gradients", "restore_adapter")


@dataclass(frozen=True)
class Drill:
    """One row of the table: a rank misbehaves at a point."""

    mode: str
    rank: int
    point: Point
    kind: str

    @property
    def survivor(self) -> int:
        return 1 - self.rank

    @property
    def deadline_s(self) -> float:
        """What may pass before the fault is known. A rank that dies or fails is known at once, one that comes under another name as soon as
        the survivor comes, and one that does not come when the survivor has waited for it.
        """
        if self.kind in ("exception", "kill"):
            return 0.0
        return self.point.busy_s + (self.point.timeout_s if self.kind in ("slow", "stop", "hang") else 0.0)

    @property
    def key(self) -> str:
        return f"{self.mode} rank {self.rank} {self.kind} {self.point.name}"


def all_drills() -> list[Drill]:
    """The table's rows."""
    return [
        Drill(mode, rank, point, kind) for mode in MODES for point in (*POINTS, *PLACES) if mode == "spmd" or point.everywhere
        for rank in ((point.rank, 0) if point.rank_0 else (point.rank,)) for kind in (INSIDE_KINDS if point.inside else KINDS)]
