"""Every module has its test file, in the same place below `tests` as below `src/offbeat`."""

from pathlib import Path

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "offbeat"
# One contract suite runs over every launcher, and one over every forward.
ELSEWHERE = {
    **{f"workers/{name}.py": "workers/test_launchers.py" for name in ("worker", "local", "ray")},
    **{f"engine/forward_{name}.py": "engine/test_forward.py" for name in ("direct", "hf")},
    # Run only inside vLLM.
    "engine/inside/vllm_canary.py": "engines/test_weights.py", "engine/inside/vllm_images.py": "engines/test_images.py",
    "engine/inside/vllm_inside.py": "engines/test_weights.py", "engine/inside/vllm_worker.py": "engines/test_drills.py",
    "engine/inside/vllm_quantized.py": "engines/test_drills.py",
    "runs/assemble.py": "runs/test_run.py",  # tested by whole runs
    # One suite runs over every library's adapter.
    **{f"agents/environments/{name}.py": "agents/environments/test_find.py" for name in (
        "textarena_games", "skyrl_gyms", "gem_games", "openenv_server", "reasoning_items")},
    # Adapted or started by others, whose tests play real processes.
    "agents/environments/own.py": "agents/test_played.py", "agents/environments/tools.py": "agents/test_played.py",
    "agents/worker.py": "agents/test_pool.py", "agents/launch.py": "agents/test_command.py",
    "agents/bridges/verifiers_bridge.py": "agents/test_bridge.py",
    # Names and annotations: nothing to run.
    "types.py": "", "rollout/episode.py": "", "weights/protocol.py": "", "agents/environment.py": "", "chat/messages.py": "",
}


def test_every_module_has_its_test_file() -> None:
    modules = [path.relative_to(SOURCE) for path in sorted(SOURCE.rglob("*.py")) if not path.name.startswith("__")]
    assert set(ELSEWHERE) <= {str(module) for module in modules}, "an exception names a module that is gone"
    wanted = {str(module): ELSEWHERE.get(str(module), str(module.with_name(f"test_{module.name}"))) for module in modules}
    missing = [f"{module} -> tests/{test}" for module, test in wanted.items() if not (TESTS / test).exists()]
    assert not missing, "modules without a test file:\n" + "\n".join(missing)
