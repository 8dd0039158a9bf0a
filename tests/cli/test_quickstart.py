"""`offbeat quickstart`: how a run is judged, and that its configuration is valid. The whole of it runs in a minute, not here."""

import pytest

from offbeat.cli import main as cli
from offbeat.config.root import Config
from offbeat.runs.run import RunResult


def result(before: float | None, after: float | None, *, stopped_early: bool = False) -> RunResult:
    return RunResult(
        heldout_before=before, heldout_after=after, heldout_after_step=100, warm_up_steps=40, steps=100,
        train_wall_s=50.0, startup_wall_s=5.0, max_staleness_seen=1, max_logprob_gap=0.0, seed=0, torch_in_controller=False,
        controller_memory_bytes=1, stopped_early=stopped_early)


@pytest.fixture
def judge(monkeypatch, tmp_path):
    """Runs the command on a made-up result; gives its exit code and the configuration that it would have run."""
    ran: list[Config] = []

    def run(outcome: RunResult, *words: str) -> int:
        def run_training(config: Config, *_: object, fresh: bool, **__: object) -> RunResult:
            assert fresh, "each quick start begins anew"
            ran.append(config)
            config.run_dir.mkdir(parents=True, exist_ok=True)
            (config.run_dir / "config.toml").touch()
            (config.run_dir / "metrics.jsonl").write_text('{"global_step": 1, "reward/mean": 0.5}\n')
            return outcome

        monkeypatch.setattr("offbeat.runs.run.run_training", run_training)
        return cli.main(["quickstart", "--run.dir", str(tmp_path), *words])

    run.ran = ran
    return run


def test_a_run_that_learned_says_so(judge, capsys) -> None:
    assert judge(result(0.33, 0.91), "--seed", "7") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "held-out accuracy: 0.330 before, 0.910 after, in 50 s"
    assert (judge.ran[0].run.name, judge.ran[0].run.seed, judge.ran[0].run.warm_up) == ("quickstart", 7, True)


@pytest.mark.parametrize(("before", "after"), [(0.3, 0.84), (0.6, 0.89), (None, None), (0.9, 0.95)])
def test_a_run_that_did_not_learn_enough_is_exit_code_1(judge, capsys, before, after) -> None:
    assert judge(result(before, after)) == 1
    assert f"to {after or 0:.3f}; expected at least 0.85 and 0.3 more than before" in capsys.readouterr().err


def test_a_stopped_run_is_not_judged(judge, capsys) -> None:
    assert judge(result(0.3, 0.3, stopped_early=True)) == 130
    assert capsys.readouterr().err == ""
