"""The sections of a configuration that train ranks get, those that engines and launchers are made by, and those that a plan fills in.

`Config.for_ranks`, `for_engines`, `for_launcher` and `for_plan` make them; the rest does not concern them. The first crosses to the ranks'
processes as JSON.
"""

from pathlib import Path

from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.base import Section
from offbeat.config.checkpoint import CheckpointConfig
from offbeat.config.cluster import ClusterConfig
from offbeat.config.critic import CriticConfig
from offbeat.config.dist import DistConfig
from offbeat.config.inference import InferenceConfig
from offbeat.config.model import ModelConfig, NumberFormat
from offbeat.config.rollout import RolloutConfig
from offbeat.config.run import RunConfig
from offbeat.config.teacher import TeacherConfig
from offbeat.config.telemetry import TelemetryConfig
from offbeat.config.train import TrainConfig
from offbeat.config.weights import WeightsConfig


class RankConfig(Section):
    """The sections that train ranks read, and the process that calls them; `run_dir` is the run's folder, such as "runs/quickstart"."""

    run: RunConfig
    model: ModelConfig
    algorithm: AlgorithmConfig
    teacher: TeacherConfig
    train: TrainConfig
    critic: CriticConfig
    rollout: RolloutConfig
    weights: WeightsConfig
    checkpoint: CheckpointConfig
    cluster: ClusterConfig
    dist: DistConfig
    telemetry: TelemetryConfig
    run_dir: Path


class EngineConfig(Section):
    """The sections by which engines are started, published to and healed; further fields are those of `Config`."""

    run: RunConfig
    model: ModelConfig
    inference: InferenceConfig
    weights: WeightsConfig
    cluster: ClusterConfig
    run_dir: Path
    weights_dir: Path
    canary_dtype: NumberFormat


class PlanConfig(Section):
    """The sections whose open settings, such as `train.threads`, are chosen by the machine; see `runs.plan`."""

    run: RunConfig
    model: ModelConfig
    algorithm: AlgorithmConfig
    train: TrainConfig
    inference: InferenceConfig
    weights: WeightsConfig
    cluster: ClusterConfig


class LauncherConfig(Section):
    """The settings of the launcher that starts all workers of a run.

    Attributes:
        num_cores: number of cores that all workers request together, such as 6.
        wants_devices: whether any of them requests an accelerator.
    """

    cluster: ClusterConfig
    num_cores: int
    wants_devices: bool
