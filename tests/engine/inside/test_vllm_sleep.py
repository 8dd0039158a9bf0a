"""What a vLLM server's sleep takes besides vLLM; `tests/engines` puts a real one to sleep."""

import importlib
from types import SimpleNamespace

import pytest


def test_a_server_without_the_flag_is_refused_where_it_would_free_nothing() -> None:
    sleep = importlib.import_module("vllm_sleep")
    engine = SimpleNamespace(vllm_config=SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=False)))
    sleep.check_sleep(engine, on_cpu=True)
    with pytest.raises(importlib.import_module("vllm_files").RefusedError, match="because it runs without --enable-sleep-mode"):
        sleep.check_sleep(engine, on_cpu=False)
    engine.vllm_config.model_config.enable_sleep_mode = True
    sleep.check_sleep(engine, on_cpu=False)
