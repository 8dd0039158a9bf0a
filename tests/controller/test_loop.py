"""What the loop does, read from the records of real runs."""

from offbeat.telemetry.trace import read_trace
from small_run import SmallRun


def test_every_step_trains_on_full_groups_within_the_bound_and_publishes_the_next_version(finished_run: SmallRun) -> None:
    for step in (1, 2):
        groups = finished_run.groups(step)
        assert [len(group["trajectories"]) for group in groups] == [2, 2]
        for trajectory in (t for group in groups for t in group["trajectories"]):
            generated = [version for version in trajectory["versions"] if version >= 0]
            assert generated
            assert all(0 <= step - 1 - version <= 1 for version in generated)
    assert [event["version"] for event in finished_run.events("publish")] == [0, 1, 2]
    assert all(event["canary_gap"] < 1e-3 and not event["quarantined"] for event in finished_run.events("publish"))
    assert [event["global_step"] for event in finished_run.events("evaluation")] == [0, 2]
    assert [event["global_step"] for event in finished_run.events("checkpoint")] == [2]


def test_staleness_stays_within_the_bound_over_many_steps(stopped_run: SmallRun) -> None:
    rows = stopped_run.metrics()
    assert len(rows) > 2
    assert all(row["rollout/staleness_max_versions"] <= 1 for row in rows)
    trained = [group["prompt_id"] for row in rows for group in stopped_run.groups(row["global_step"])]
    assert len(set(trained)) == len(trained) == 2 * len(rows)


def test_the_time_line_shows_trainer_and_engine_beside_the_controller(finished_run: SmallRun) -> None:
    spans = read_trace(finished_run.folder / "trace.json")
    assert {"controller", "rank 0", "engine 0"} <= {span.track for span in spans}
    own = [span.name for span in spans if span.track == "controller" and span.name in ("rollout", "advantage", "train", "publish")]
    assert own == ["rollout", "advantage", "train", "publish"] * 2


def test_batches_are_made_while_the_step_before_trains(stopped_run: SmallRun) -> None:
    spans = read_trace(stopped_run.folder / "trace.json")
    ahead = {span.args["step"]: span for span in spans if span.name == "make_ahead"}
    trains = {span.args["step"]: span for span in spans if span.track == "controller" and span.name == "train"}
    assert ahead, "engines are ahead of the trainer in some step"
    for step, span in ahead.items():
        assert span.start_s >= trains[step - 1].start_s
        assert step not in trains or span.end_s <= trains[step].start_s
