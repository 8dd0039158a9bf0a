"""[checkpoint]: checkpoints for resuming, and exports for use."""

from offbeat.config.base import Section, field


class CheckpointConfig(Section):
    """Checkpoints in the run's `checkpoints` folder."""

    every_steps: int = field(
        50, "Steps between resumable checkpoints, of supervised fine-tuning as well; 0 saves only at the end.", ge=0)
    keep: int = field(2, "Resumable checkpoints kept.", ge=1)
    export: bool = field(True, "Write the final model as a Hugging Face folder, `export/` in the run.")
    export_every_steps: int = field(
        0, "Steps between exports `exports/step-00000050`, Hugging Face folders as large as the model, which are all kept; 0 writes"
        " none.", ge=0)
    timeout_s: float = field(600.0, "Seconds for one save.", gt=0)
