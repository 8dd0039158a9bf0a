"""[telemetry]: console, files and traces of a run."""

from typing import Literal, Self

from pydantic import model_validator

from offbeat.config.base import Change, Section, field


class WandbConfig(Section):
    """How a run is kept in Weights & Biases, where telemetry.sinks has "wandb". Empty settings leave it to W&B's own environment
    variables, which are in brackets."""

    on_resume = Change.FREE

    mode: Literal["", "online", "offline", "disabled"] = field(
        "", "Whether metrics go to W&B's server, after `wandb login`, or to files that `wandb sync` uploads (WANDB_MODE); else offline.")
    project: str = field("", "Project of the W&B run (WANDB_PROJECT); else offbeat.")
    entity: str = field("", "User or team that owns it (WANDB_ENTITY); else W&B's default for whoever is logged in.")
    name: str = field("", "Its name (WANDB_NAME); else the name of the run.")
    id: str = field(
        "", "Its id, by which `resume` finds it again (WANDB_RUN_ID); else made once and kept in the run's folder.",
        pattern=r"^[^/\\#?%:]*$")
    resume: Literal["", "allow", "must", "never", "auto"] = field(
        "", "Whether a run that is resumed here goes on as the same W&B run, whose rows of repeated steps stay as they were logged first"
        " (WANDB_RESUME); else each process of a run is a W&B run of its own, in the group of the run's name.")


class TelemetryConfig(Section):
    """Console, files and traces in the run directory."""

    on_resume = Change.FREE

    console: bool = field(True, "Live table of progress on the terminal.")
    rollouts_every_steps: int = field(1, "Steps between those whose rollouts are written to `rollouts/`; 0 writes none.", ge=0)
    rollouts_max_bytes: int = field(
        2_000_000_000,
        "Bound on the size of `rollouts/`, compressed: beyond it every second of the older steps is removed, and again until the rest fits;"
        " 0 sets no bound. A token needs 4 to 8 bytes.", ge=0)
    trace: bool = field(True, "Record a time line, `trace.json`, that Perfetto opens.")
    peak_tflop_per_s: float = field(
        0.0, "What a train rank's device can do at most, in 10^12 dense bfloat16 operations per second, by which `train/mfu` is measured; 0"
        " takes it from a table of devices, and where that has no entry, as for CPUs, there is no `train/mfu`.", ge=0)
    sinks: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...] = field(
        (), "Where metrics go besides `metrics.jsonl`, which is always written; each needs the extra of its name, `offbeat[tensorboard]`.")
    wandb: WandbConfig = field(WandbConfig(), "How the run is kept in Weights & Biases.")
    sample_tables_every_steps: int = field(
        10, "Steps between those of which `sinks` get a table of 16 samples, from the largest reward to the smallest; 0 sends none.", ge=0)

    @model_validator(mode="after")
    def _check_wandb(self) -> Self:
        if "wandb" not in self.sinks and (given := [name for name, value in self.wandb.model_dump().items() if value]):
            raise ValueError(
                f"telemetry.wandb.{given[0]} acts only with the sink, got telemetry.sinks = {list(self.sinks)}; add \"wandb\" to it")
        return self
