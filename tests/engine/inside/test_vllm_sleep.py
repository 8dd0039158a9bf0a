"""What a vLLM server's sleep takes besides vLLM; `tests/engines` puts a real one to sleep."""

import importlib
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch


@pytest.mark.skipif(sys.platform != "linux", reason="needs madvise of Linux")
def test_pages_within_tensors_are_given_back_and_others_stay() -> None:
    drop_pages = importlib.import_module("vllm_sleep").drop_pages
    whole = torch.ones(64 << 20, dtype=torch.uint8)
    small, view = torch.ones(100), whole[1:5000]
    before = psutil.Process().memory_info().rss
    drop_pages([view, small])
    assert before - psutil.Process().memory_info().rss > 60 << 20, "all of the storage, whatever part the view has of it"
    assert small.eq(1).all() and whole[8192:-8192].eq(0).all()
    whole.fill_(2)
    assert whole.eq(2).all()


def test_a_server_without_the_flag_is_refused_where_it_would_free_nothing() -> None:
    sleep = importlib.import_module("vllm_sleep")
    engine = SimpleNamespace(vllm_config=SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=False)))
    sleep.check_sleep(engine, on_cpu=True)
    with pytest.raises(importlib.import_module("vllm_files").RefusedError, match="because it runs without --enable-sleep-mode"):
        sleep.check_sleep(engine, on_cpu=False)
    engine.vllm_config.model_config.enable_sleep_mode = True
    sleep.check_sleep(engine, on_cpu=False)
