"""[weights]: how new weights reach the engines."""

from typing import Any, Literal

from pydantic import field_validator

from offbeat.config.base import Change, Section, field


class WeightsConfig(Section):
    """Publishing of one version per training step."""

    on_resume = Change.FREE

    channel: Literal["disk", "collective"] = field(
        "disk", "A folder per version, which engines read, or a broadcast from the trainer into the engines.")
    dir: str = field(
        "", "Folder for published versions, in which each run has one of its own; empty takes the run's `weights` folder; a folder in"
        " /dev/shm is fastest on one machine.")
    keep: int = field(2, "Published versions kept on disk.", ge=1)
    whole_every_versions: int | Literal["auto"] = field(
        "auto", "Versions from one that is written whole to the next, an integer of at least 1; those between are written, or broadcast to"
        " engines that have the one before, as the weights that have changed since, where that is smaller. For the embedded engine and"
        " vLLM. The ranks that write and vLLM's servers keep a copy of the weights in memory for it. \"auto\" takes 20 for whole models in"
        " bfloat16, where engines apply changes in place or may be on other machines, and 1 otherwise.")
    interrupt: Literal["recompute", "keep", "drain"] = field(
        "recompute", "Requests in flight when weights are switched: continue under the new weights with a recomputed cache (recompute) or"
        " with the old cache (keep), or finish first (drain).", on_resume=Change.TOLD, read_by=("rl",))
    stage_timeout_s: float = field(60.0, "Seconds for the trainer to write a version, and for an engine to load it.", gt=0)
    switch_timeout_s: float = field(60.0, "Seconds for an engine to switch; with drain, the longest generation.", gt=0)
    proof_tolerance: float = field(
        0.0, "Largest root mean square difference between the trainer's and the engine's log-probabilities of the canary, in nats; 0 takes"
        " the measured default for model.dtype, 1e-3 for float32 and 0.5 for bfloat16, 2 for int8 and fp8, or 6"
        " for int4 and nf4 (inference.quantization, model.quantization).", ge=0)

    @property
    def longest_chain(self) -> int:
        """Most folders that make up a version, a whole one and the changes since; 1 while it is left open."""
        return 1 if self.whole_every_versions == "auto" else self.whole_every_versions

    @property
    def sends_changes(self) -> bool:
        """Whether versions may be written or broadcast as changes of the one before."""
        return self.longest_chain > 1

    @field_validator("whole_every_versions", mode="before")
    @classmethod
    def _check_whole_every_versions(cls, given: Any) -> Any:
        if given == "auto" or (isinstance(given, int) and not isinstance(given, bool) and given >= 1):
            return given
        raise ValueError(f"it must be an integer >= 1 or 'auto', got {given!r}; use 1 to write every version whole")
