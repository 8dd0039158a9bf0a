"""Ranks and an engine that all tests of the service's core share."""

from collections.abc import Iterator

import pytest

from small_service import SmallCluster, small_cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, model_dir: str) -> Iterator[SmallCluster]:
    """Each test opens a service of its own on it."""
    with small_cluster(tmp_path_factory.mktemp("service"), model_dir) as cluster:
        yield cluster
