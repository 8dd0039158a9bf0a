"""Options are checked where they are made, and need no torch."""

import subprocess
import sys

import pytest

from offbeat.data import wire
from offbeat.engine.options import EngineAddress, EngineOptions, EngineStart
from offbeat.errors import ConfigError, DataError

LEAST = {
    "max_running": 1, "max_queued": 1, "max_context": 0, "max_cache_bytes": 0, "num_engines": 1, "max_prefill_tokens": 1, "max_adapters": 1,
    "max_prefill_per_round": 1, "max_adapter_rank": 1, "version": -1,
}


@pytest.mark.parametrize(("setting", "least"), LEAST.items())
def test_options_out_of_range_are_refused(setting, least):
    EngineOptions(model="m", **{setting: least})
    with pytest.raises(ConfigError, match=f"engine option {setting} must be >= {least}, got {least - 1}"):
        EngineOptions(model="m", **{setting: least - 1})


def test_no_step_may_be_without_time():
    with pytest.raises(ConfigError, match=r"engine option stall_timeout_s must be > 0, got 0\.0"):
        EngineOptions(model="m", stall_timeout_s=0.0)


def test_importing_them_does_not_import_torch():
    code = "import sys, offbeat.engine.options; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("message", [EngineStart("{}"), EngineAddress("http://127.0.0.1:1")])
def test_a_message_comes_back_equal(message):
    assert wire.decode(type(message), wire.encode(message)) == message


def test_bytes_of_another_message_are_refused():
    with pytest.raises(DataError, match="not a EngineStart"):
        wire.decode(EngineStart, wire.encode(EngineAddress("x")))
