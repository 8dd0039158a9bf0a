"""[telemetry]: what a run shows and records."""

from typing import Literal

from offbeat.config.base import Section, field


class TelemetryConfig(Section):
    """Console, files and traces in the run directory."""

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
    sample_tables_every_steps: int = field(
        10, "Steps between those of which `sinks` get a table of 16 samples, from the largest reward to the smallest; 0 sends none.", ge=0)
