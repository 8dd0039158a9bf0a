"""The live page over HTTP."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from offbeat.dashboard.library import RunLibrary
from offbeat.dashboard.site import make_site
from offbeat.data.image_store import FIRST_ID
from rollout_samples import group, trajectory, write_rollouts, write_small_run

NASTY = "<script>alert(1)</script>"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_small_run(tmp_path / "runs" / "a")
    (tmp_path / "runs" / "a" / "metrics.jsonl").write_text('{"global_step": 1, "reward/mean": 0.5, "time_s": 1.0}\n')
    (tmp_path / "runs" / "a" / "events.jsonl").write_text(json.dumps({"kind": NASTY, "time_s": 1.0, "reason": NASTY}) + "\n")
    (tmp_path / "runs" / "a" / "config.toml").write_text(f"[data]\ntask = '{NASTY}'\n")
    (tmp_path / "runs" / "b").mkdir()
    (tmp_path / "runs" / "b" / "metrics.jsonl").write_text('{"global_step": 1, "reward/mean": 0.75, "time_s": 1.0}\n')
    (tmp_path / "secret.txt").write_text("secret")
    return tmp_path / "runs"


@pytest.fixture
def http(root: Path) -> Iterator[TestClient]:
    library = RunLibrary([root])
    yield TestClient(make_site(library, key=""), base_url="http://localhost")
    library.close()


def ask(http: TestClient, what: str, **parameters: object) -> dict:
    answer = http.get(f"/api/{what}", params={"run": "a"} | parameters)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_page_and_its_files_are_there_and_take_nothing_from_elsewhere(http: TestClient) -> None:
    page = http.get("/").text
    assert '<script src="/watch.js"></script>' in page and page.count("<script") == 1 and "<style" not in page and " style=" not in page
    assert "http://" not in page and "https://" not in page
    assert http.get("/watch.css").headers["content-type"].startswith("text/css")
    script = http.get("/watch.js")
    assert script.headers["content-type"].startswith("text/javascript") and "attachCharts" in script.text
    assert "eval(" not in script.text and "document.write" not in script.text


def test_runs_and_their_parts_are_shown(http: TestClient) -> None:
    runs = http.get("/api/runs").json()
    assert {run["name"]: run["last_step"] for run in runs} == {"a": 1, "b": 1}
    assert "Reward" in ask(http, "overview")["html"]
    assert "No time line was recorded" in ask(http, "timeline")["html"]
    assert "Events (1)" in ask(http, "records")["html"] and "Configuration" in ask(http, "records")["html"]
    compared = http.get("/api/compare", params=[("run", "a"), ("run", "b")]).json()["html"]
    assert "&quot;a&quot;" in compared and "&quot;b&quot;" in compared


def test_before_the_first_step_the_overview_says_how_far_the_warm_up_is_and_that_the_page_refreshes(root: Path, http: TestClient) -> None:
    folder = root / "warming"
    folder.mkdir()
    (folder / "config.toml").write_text("[sft]\ntotal_steps = 300\nstop_at_accuracy = 0.3\n")
    said = ask(http, "overview", run="warming")["html"]
    assert "This page refreshes by itself" in said and "report" not in said
    steps = [{"time_s": 1.0 + step, "kind": "sft_step", "step": step, "train/loss": 1 / step} for step in (1, 2, 2, 3)]
    steps[2] |= {"eval/accuracy": 0.125}
    (folder / "events.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    said = ask(http, "overview", run="warming")["html"]
    assert "step 3 of at most 300, held-out accuracy 0.125 after step 2. The warm-up ends at an accuracy of 0.3." in said
    assert "Loss of the warm-up" in said and "Held-out accuracy of the warm-up" in said and "No metrics yet" not in said
    (folder / "metrics.jsonl").write_text('{"global_step": 1, "reward/mean": 0.5, "time_s": 9.0}\n')
    said = ask(http, "overview", run="warming")["html"]
    assert "Warming up" not in said and "Loss of the warm-up" in said


def test_steps_of_supervised_fine_tuning_are_no_warm_up(root: Path, http: TestClient) -> None:
    (root / "a" / "events.jsonl").write_text('{"time_s": 1.0, "kind": "sft_step", "step": 1, "train/loss": 0.5}\n')
    assert "warm-up" not in ask(http, "overview")["html"]


def test_an_evaluation_shows_the_figures_of_its_models_as_text(root: Path, http: TestClient) -> None:
    folder = root / "a-eval"
    folder.mkdir()
    (folder / "metrics.jsonl").touch()
    assert "No model is evaluated yet" in ask(http, "overview", run="a-eval")["html"]
    metrics = {
        "eval/accuracy": 0.8125, "eval/accuracy_low": 0.736, "eval/accuracy_high": 0.871, "eval/prompts": 128, "eval/failed_prompts": 0}
    (folder / "evaluation.json").write_text(json.dumps({"models": [{"model": NASTY, "metrics": metrics}, {"model": "x"}, 3]}))
    shown = ask(http, "overview", run="a-eval")["html"]
    assert "<script" not in shown and "<td>accuracy</td><td>0.812 (0.736 to 0.871)</td>" in shown and shown.count("<tr>") == 2


def test_nothing_that_a_run_holds_becomes_markup(http: TestClient) -> None:
    for what in ("overview", "timeline", "records", "compare"):
        assert "<script" not in ask(http, what)["html"]
    assert "&lt;script&gt;" in ask(http, "records")["html"]
    answer = http.get("/api/rollout", params={"run": "a", "id": "3.0.0"})
    assert answer.headers["content-type"] == "application/json" and answer.headers["x-content-type-options"] == "nosniff"
    assert "".join(answer.json()["rollout"]["pieces"]).endswith(NASTY)


def test_rollouts_are_listed_filtered_and_counted(http: TestClient) -> None:
    everything = ask(http, "rollouts")
    for _ in range(500):
        if everything["progress"]["num_indexed"] == 4:
            break
        everything = ask(http, "rollouts")
    assert everything["total"] == 11 and len(everything["rollouts"]) == 11
    assert ["stop", "trained", 7] in everything["reasons"]
    assert [each["address"] for each in ask(http, "rollouts", text="is 42", order="oldest")["rollouts"]] == ["1.0.0", "2.0.0"]
    assert ask(http, "rollouts", min_reward="0.5", max_reward="1", status="trained")["total"] == 3
    assert ask(http, "rollouts", same_prompt="2.0.1")["total"] == 4
    assert ask(http, "rollouts", offset=10)["rollouts"][0]["address"] == "1.1.1"


def test_a_rollout_comes_with_its_tokens_messages_and_group(root: Path, http: TestClient) -> None:
    ratio = trajectory("ab", "cd", 1.0, prox_logprobs=[0, 0, -0.5, -0.5 + math.log(1.5)], rollout_logprobs=[0, 0, -0.5, None])
    write_rollouts(root / "a", 9, [group("ab", ratio, ("x", 0.0))])
    answer = ask(http, "rollout", id="9.0.0")
    shown = answer["rollout"]
    assert shown["pieces"] == ["a", "b", "c", "d"] and shown["logprobs"] == [None, None, -0.5, None]
    assert shown["ratios"] == [None, None, 1.0, None] and shown["versions"] == [None, None, 3, 3]
    assert shown["advantages"] == [None, None, 0.5, 0.5]
    assert [(m["role"], m["start"], m["end"]) for m in shown["messages"]] == [("given", 0, 2), ("policy", 2, 4)]
    assert [(each["address"], each["reward"]) for each in answer["samples"]] == [("9.0.0", 1.0), ("9.0.1", 0.0)]
    assert answer["group"]["answer"] == "42" and answer["group"]["rejected"] is None


def test_a_rejected_group_says_why_even_without_samples(http: TestClient) -> None:
    assert ask(http, "rollout", id="2r.0.1")["group"]["why"] == "equal rewards"
    never_played = ask(http, "rollout", id="2r.1.0")
    assert never_played["rollout"] is None and never_played["samples"] == []
    assert never_played["group"]["rejected"] == "PromptError: too many tokens"


def test_the_stamp_changes_as_soon_as_the_run_goes_on(root: Path, http: TestClient) -> None:
    before = ask(http, "stamp")
    assert ask(http, "stamp") == before
    write_rollouts(root / "a", 10, [group("p", ("x", 1.0))])
    assert ask(http, "stamp") != before


@pytest.mark.parametrize(("what", "parameters", "said"), [
    ("overview", {"run": "../secret"}, "there is no run"), ("overview", {"run": ""}, "there is no run"),
    ("rollout", {"id": "../../../etc/passwd"}, "a rollout is named by"), ("rollout", {"id": "99.0.0"}, "has no rollout 99.0.0"),
    ("rollouts", {"run": "/etc"}, "there is no run"), ("rollouts", {"order": "step; DROP TABLE samples"}, "order must be one of"),
    ("rollouts", {"status": "' OR 1"}, "status must be one of"), ("rollouts", {"min_step": "x"}, "min_step must be a number"),
    ("rollouts", {"min_reward": "nan"}, "min_reward must be a number"), ("rollouts", {"max_step": "9" * 40}, "max_step must be a number"),
    ("rollouts", {"text": "**"}, "give letters or digits"), ("rollouts", {"same_prompt": "x"}, "a rollout is named by"),
    ("compare", {"run": [str(i) for i in range(9)]}, "between 1 and 8")])
def test_what_cannot_be_asked_is_answered_with_a_sentence(what: str, parameters: dict, said: str, http: TestClient) -> None:
    answer = http.get(f"/api/{what}", params={"run": "a"} | parameters)
    assert answer.status_code == 400 and said in answer.json()["error"]


@pytest.mark.parametrize("path", [
    "/../secret.txt", "/..%2fsecret.txt", "/%2e%2e/secret.txt", "/api/../../secret.txt", "//etc/passwd", "/watch.css/../../secret.txt",
    "/runs/a/config.toml", "/api/nothing"])
def test_no_path_leads_to_a_file(path: str, http: TestClient) -> None:
    answer = http.get(path)
    assert answer.status_code == 404 and "secret" not in answer.text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(method: str, root: Path, http: TestClient) -> None:
    before = sorted(path.name for path in (root / "a").iterdir())
    for path in ("/", "/watch.js", "/api/runs", "/api/rollouts?run=a"):
        assert http.request(method, path).status_code == 405
    assert sorted(path.name for path in (root / "a").iterdir()) == before


def test_a_rollout_comes_with_pictures_of_its_images(root: Path, http: TestClient) -> None:
    seen = trajectory("iib", "3", 1.0)
    seen["tokens"][:2] = [FIRST_ID + 7] * 2
    write_rollouts(root / "a", 9, [group("ab", seen)])
    assert ask(http, "rollout", id="9.0.0")["rollout"]["images"] == {}, "none is stored"
    (root / ".images").mkdir()
    (root / ".images" / f"{FIRST_ID + 7}.png").write_bytes(b"PNG")
    assert ask(http, "rollout", id="9.0.0")["rollout"]["images"] == {str(FIRST_ID + 7): "data:image/png;base64,UE5H"}


def test_a_damaged_file_of_rollouts_is_an_answer(root: Path, http: TestClient) -> None:
    (root / "a" / "rollouts" / "step-000001.jsonl.zst").write_bytes(b"rubbish")
    answer = http.get("/api/rollout", params={"run": "a", "id": "1.0.0"})
    assert answer.status_code == 400 and "cannot be read" in answer.json()["error"]


def test_a_key_guards_everything(root: Path) -> None:
    http = TestClient(make_site(RunLibrary([root]), key="a-key"), base_url="http://example.org")
    for path in ("/", "/watch.js", "/watch.css", "/api/runs", "/api/rollout?run=a&id=1.0.0"):
        assert http.get(path).status_code == 401
        assert http.get(path, headers={"authorization": "Bearer a-key"}).status_code == 200


def test_half_a_surrogate_pair_in_a_run_is_shown_as_its_escape(root: Path, http: TestClient) -> None:
    (root / "a" / "events.jsonl").write_text('{"kind": "broken \\ud800 text", "time_s": 1.0}\n')
    assert "broken \ud800 text" in ask(http, "records")["html"]
