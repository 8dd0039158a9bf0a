"""[checkpoint]: checkpoints for resuming, and exports for use."""

from typing import Literal

from offbeat.config.base import Change, Section, field


class CheckpointConfig(Section):
    """Checkpoints in the run's `checkpoints` folder."""

    on_resume = Change.FREE

    every_steps: int = field(
        50, "Steps between resumable checkpoints, of supervised fine-tuning as well; 0 counts no steps. The end of a run is always saved.",
        ge=0)
    every_minutes: float = field(
        10.0, "Minutes since the last resumable checkpoint after which a step saves one as well, so that a crash costs little of a run"
        " whose steps are long or few; or twenty times as long as the last save took, if that is more. 0 saves by steps alone.", ge=0)
    journal: bool = field(
        True, "Record prompts, finished groups and batches in `journal/` as the run goes, so that a run that was killed goes on from there:"
        " steps since the checkpoint are redone on their own batches, and no finished group is generated again.")
    journal_keep: Literal["checkpoints", "all"] = field(
        "checkpoints", 'Records kept in `journal/`: those that a kept checkpoint needs ("checkpoints"), or "all", with which `offbeat'
        " replay` can train the whole run again. All of them take about 67 kB per step of 512 short answers.")
    journal_running_s: float = field(
        1.0, "Seconds between two looks at the tokens that unfinished samples have so far, which are recorded, and from which they go on"
        " after a kill; only the embedded engine tells them. A sample that takes less time is recorded when it is finished. 0 records none"
        " before.", ge=0)
    keep: int = field(2, "Resumable checkpoints kept.", ge=1)
    export: bool = field(True, "Write the final model as a Hugging Face folder, `export/` in the run.")
    export_every_steps: int = field(
        0, "Steps between exports `exports/step-00000050`, Hugging Face folders as large as the model, which are all kept; 0 writes"
        " none.", ge=0)
    timeout_s: float = field(600.0, "Seconds for one save.", gt=0)
