"""[cluster]: where worker processes run."""

from typing import Literal

from offbeat.config.base import Change, Section, field


class ClusterConfig(Section):
    """The launcher of train workers and engines."""

    on_resume = Change.FREE

    launcher: Literal["local", "ray"] = field("local", "Where processes run: on this machine, or as Ray actors on many.")
    ray_address: str = field("", "Address of a running Ray cluster; empty starts one on this machine.")
    share_devices: bool = field(
        False, "Let engines use the train ranks' devices, for a machine with fewer devices than processes; on where both numbers of "
        "devices are 0 and there are too few.")
    take_turns: bool = field(
        False, "Let engines sleep while the train ranks compute, so that each side in turn has the devices, which they share: a sleeping"
        " engine holds neither weights nor a cache in its device's memory.")
    start_timeout_s: float = field(120.0, "Seconds for one worker to start.", gt=0)
    stop_timeout_s: float = field(10.0, "Seconds for a worker to stop before it is killed.", gt=0)
    scratch_dir: str = field(
        "", "Folder on Ray machines that do not see the run's folder, for checkpoints, adapters and exports on their way; must have room"
        " for a checkpoint, and is emptied at the end. Empty takes the system's folder of temporary files.")

    @property
    def devices_are_shared(self) -> bool:
        """Whether engines use the devices of the train ranks."""
        return self.share_devices or self.take_turns

    @property
    def computes_beside_engines(self) -> bool:
        """Whether engines hold a part of a train rank's device while it computes."""
        return self.devices_are_shared and not self.take_turns
