"""[cluster]: launchers and deadlines."""

import pytest
from pydantic import ValidationError

from offbeat.config.cluster import ClusterConfig


def test_workers_are_local_processes_unless_ray_is_asked_for():
    assert ClusterConfig().launcher == "local"
    assert ClusterConfig(launcher="ray").launcher == "ray"


@pytest.mark.parametrize("values", [{"launcher": "slurm"}, {"start_timeout_s": 0}, {"stop_timeout_s": -1}])
def test_unknown_launchers_and_deadlines_of_nothing_are_refused(values):
    with pytest.raises(ValidationError):
        ClusterConfig(**values)
