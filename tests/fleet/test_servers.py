"""What servers of other makes are started with."""

import sys
from pathlib import Path

import pytest

from offbeat.errors import ConfigError
from offbeat.fleet.servers import engine_python, server_command
from small_run import small_config


def command(tmp_path: Path, **settings: str) -> tuple[list[str], dict[str, str]]:
    config = small_config(tmp_path, inference__python=sys.executable, **{"inference__engine": "vllm", **settings})
    words, env = server_command(config.for_engines, model="model", tokenizer="tokenizer", version=-1, seed=5, key="the-key")
    return list(words), env


def value(words: list[str], flag: str) -> str:
    """The last one counts."""
    return words[len(words) - words[::-1].index(flag)]


def test_vllm_is_started_on_the_model_with_our_endpoints_inside(tmp_path: Path) -> None:
    words, env = command(tmp_path, inference__max_running="7", inference__max_context="48", model__dtype="bfloat16")
    assert words[0] == sys.executable and Path(words[1]).name == "vllm_serve.py" and Path(words[1]).is_file()
    assert words[2:4] == ["serve", "model"]
    assert (value(words, "--tokenizer"), value(words, "--seed"), value(words, "--dtype")) == ("tokenizer", "5", "bfloat16")
    assert (value(words, "--max-num-seqs"), value(words, "--max-model-len")) == ("7", "48")
    assert value(words, "--logprobs-mode") == "processed_logprobs"
    assert env["OFFBEAT_VERSION"] == "-1"
    assert env["VLLM_API_KEY"] == "the-key" and "the-key" not in " ".join(words)
    assert [path.name for path in Path(env["PYTHONPATH"]).glob("*.py")].count("vllm_inside.py") == 1
    assert "--enable-lora" not in words and "--no-enable-prefix-caching" not in words


def test_on_cpus_memory_and_cores_are_shared(tmp_path: Path) -> None:
    words, env = command(tmp_path)
    assert value(words, "--kv-cache-memory-bytes").isdecimal()  # vLLM's own VLLM_CPU_KVCACHE_SPACE knows whole GiB only
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    words, env = command(tmp_path, inference__devices_per_engine="2")
    assert "--kv-cache-memory-bytes" not in words and "VLLM_CPU_OMP_THREADS_BIND" not in env
    assert value(words, "--tensor-parallel-size") == "2"


def test_an_engine_of_several_devices_splits_the_model_and_leaves_memory_to_a_rank_that_shares_them(tmp_path: Path) -> None:
    for kind, memory in (("vllm", "--gpu-memory-utilization"), ("sglang", "--mem-fraction-static")):
        apart, _ = command(tmp_path, inference__engine=kind, inference__devices_per_engine="4")
        shared, _ = command(tmp_path, inference__engine=kind, inference__devices_per_engine="1", cluster__share_devices="true")
        assert value(apart, "--tensor-parallel-size") == "4" and memory not in apart
        assert value(shared, "--tensor-parallel-size") == "1" and value(shared, memory) == "0.4"


def test_vllm_is_started_so_that_it_can_sleep_where_that_frees_memory(tmp_path: Path) -> None:
    words, _ = command(tmp_path, inference__devices_per_engine="1", cluster__take_turns="true")
    assert "--enable-sleep-mode" in words and value(words, "--gpu-memory-utilization") == "0.4"
    assert "--enable-sleep-mode" not in command(tmp_path, cluster__take_turns="true")[0], "vLLM for CPUs refuses to start with it"


def test_adapters_have_room_in_memory_for_all_that_are_loaded(tmp_path: Path) -> None:
    words, env = command(tmp_path, model__lora__rank="8", inference__max_adapters="6", inference__max_adapter_rank="20")
    assert "--enable-lora" in words
    assert (value(words, "--max-loras"), value(words, "--max-cpu-loras"), value(words, "--max-lora-rank")) == ("6", "6", "32")
    assert env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    with pytest.raises(ConfigError, match="max_adapter_rank must be <= 512 with vLLM, got 600"):
        command(tmp_path, model__lora__rank="8", inference__max_adapter_rank="600")


def test_keeping_caches_at_a_switch_goes_without_a_cache_of_prefixes(tmp_path: Path) -> None:
    assert "--no-enable-prefix-caching" in command(tmp_path, weights__interrupt="keep")[0]


def test_arguments_of_the_user_come_last(tmp_path: Path) -> None:
    words, _ = command(tmp_path, inference__arguments='["--max-num-seqs", "3"]')
    assert words[-2:] == ["--max-num-seqs", "3"]


def test_sglang_is_started_on_the_model(tmp_path: Path) -> None:
    words, env = command(tmp_path, inference__engine="sglang", model__lora__rank="8", inference__max_context="48")
    assert words[0] == sys.executable and Path(words[1]).name == "sglang_keyed.py" and Path(words[1]).is_file()
    assert env == {"OFFBEAT_ENGINE_KEY": "the-key"} and "the-key" not in " ".join(words)
    assert (value(words, "--model-path"), value(words, "--context-length"), value(words, "--random-seed")) == ("model", "48", "5")
    assert "--enable-lora" in words


@pytest.mark.parametrize(("kind", "advice"), [("vllm", "run `make vllm`, or set inference.python"), ("sglang", "set inference.python")])
def test_an_environment_that_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, advice: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"{tmp_path}/.venv-{kind}/bin/python does not exist; {advice}"):
        engine_python(small_config(tmp_path, inference__engine=kind).for_engines)


@pytest.mark.parametrize(("program", "reason"), [
    (sys.executable, "ended with exit code 1 when asked for it"), ("/bin/false", "exit code 1"), ("pyproject.toml", "Permission denied"),
])
def test_a_python_without_the_package_is_told(tmp_path: Path, program: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"needs a Python with sglang in it.*{program} is not one: .*{reason}.*; set inference.python"):
        engine_python(small_config(tmp_path, inference__engine="sglang", inference__python=program).for_engines)


def test_a_python_with_the_package_is_taken_as_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f"#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} \"$@\"\n")
    python.chmod(0o755)
    (tmp_path / "vllm.py").write_text("raise SystemExit('nobody imports it')")
    assert engine_python(small_config(tmp_path, inference__engine="vllm", inference__python=str(python)).for_engines) == python
