"""A cache's bound where none is set."""

from pathlib import Path

import psutil
import pytest
import torch

from offbeat.engine.budget import default_cache_bytes

CPU = torch.device("cpu")


def test_engines_of_a_machine_share_a_quarter_of_its_memory():
    whole = default_cache_bytes(CPU, num_engines=1)
    assert 0 < whole <= psutil.virtual_memory().total / 4
    assert default_cache_bytes(CPU, num_engines=3) == pytest.approx(whole / 3, abs=1)


@pytest.mark.parametrize(("limit", "expected"), [("8000", 2000), ("max", psutil.virtual_memory().total // 4)])
def test_a_containers_limit_counts(monkeypatch, limit, expected):
    monkeypatch.setattr(Path, "read_text", lambda *_args, **_kwargs: f"{limit}\n")
    assert default_cache_bytes(CPU, num_engines=1) == expected
