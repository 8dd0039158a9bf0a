"""Sending a run's model to a hub: huggingface_hub itself, and a hub on this machine."""

import json
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

import offbeat
from hub_serving import TOKEN, Hub, serving_hub
from offbeat.api.push import Commit, plan_push, send
from offbeat.errors import ConfigError, DataError, HubError, ModelError

WEIGHTS = bytes(range(256)) * 40


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving_hub() as hub:
        for name, value in {
                "ENDPOINT": hub.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True, "HF_TOKEN_PATH": str(tmp_path / "none"),
                "HF_STORED_TOKENS_PATH": str(tmp_path / "none either")}.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "runs" / "digits")


def write_run(folder: Path) -> Path:
    """A run with an export, its adapter, and the export of a step."""
    for export in ("export", "export/adapter", "exports/step-00000002"):
        (folder / export).mkdir(parents=True)
    for export in ("export", "exports/step-00000002"):
        (folder / export / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
        (folder / export / "model.safetensors").write_bytes(export.encode() + WEIGHTS)
    (folder / "export" / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "/home/me/base", "r": 8}')
    (folder / "export" / "adapter" / "adapter_model.safetensors").write_bytes(WEIGHTS)
    (folder / "config.toml").write_text('[model]\npath = "/home/me/base"\n[algorithm]\npreset = "grpo"\n')
    (folder / "metrics.jsonl").write_text('{"global_step": 4, "reward/mean": 0.5}\n')
    return folder


def test_a_model_goes_to_the_hub_in_one_commit_with_a_card(hub: Hub, run_dir: Path) -> None:
    assert offbeat.Run(run_dir).push("me/digits") == f"{hub.url}/me/digits"
    assert [(each["organization"], each["name"], "visibility" in each) for each in hub.created] == [("me", "digits", False)]
    ((branch, message, files),) = hub.commits
    assert (branch, message) == ("main", "Push the run digits of Offbeat")
    assert sorted(files) == ["README.md", "config.json", "model.safetensors"]
    assert files["model.safetensors"] == b"export" + WEIGHTS and files["config.json"] == (run_dir / "export" / "config.json").read_bytes()
    assert files["README.md"].startswith(b"---\nlibrary_name: transformers\n") and b"offbeat engine --model me/digits" in files["README.md"]


def test_a_repository_that_exists_is_pushed_to_again(hub: Hub, run_dir: Path) -> None:
    for _ in range(2):
        send(plan_push(run_dir, "me/digits"))
    assert len(hub.created) == 1 and len(hub.commits) == 2


def test_branch_message_privacy_and_the_export_of_a_step_are_chosen(hub: Hub, run_dir: Path) -> None:
    address = send(plan_push(run_dir, "me/digits", checkpoint="2", commit=Commit("half", "Half way"), private=True))
    assert address == f"{hub.url}/me/digits/tree/half"
    assert hub.created[0]["visibility"] == "private" and hub.branches == {"me/digits": ["half"]}
    ((branch, message, files),) = hub.commits
    assert (branch, message) == ("half", "Half way") and files["model.safetensors"] == b"exports/step-00000002" + WEIGHTS
    assert b"| steps | 2 |" in files["README.md"]


def test_an_adapter_goes_by_itself_and_names_its_base_as_the_hub_does(hub: Hub, run_dir: Path) -> None:
    send(plan_push(run_dir, "me/adapter", adapter=True, base_model="them/base"))
    ((_, _, files),) = hub.commits
    assert sorted(files) == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert json.loads(files["adapter_config.json"]) == {"base_model_name_or_path": "them/base", "r": 8}
    assert b'base_model: "them/base"' in files["README.md"] and b"library_name: peft" in files["README.md"]


def test_the_folder_that_a_model_was_loaded_from_is_not_sent(hub: Hub, run_dir: Path) -> None:
    (run_dir / "export" / "config.json").write_text('{"_name_or_path": "/home/me/base", "model_type": "llama"}')
    send(plan_push(run_dir, "me/digits"))
    assert json.loads(hub.commits[0][2]["config.json"]) == {"model_type": "llama"}


def test_a_card_of_ones_own_is_sent_as_it_is(hub: Hub, run_dir: Path) -> None:
    (run_dir / "export" / "README.md").write_text("mine")
    send(plan_push(run_dir, "me/digits"))
    assert hub.commits[0][2]["README.md"] == b"mine"


@pytest.mark.parametrize("name", ["digits", "me/di/gits", "me/..", "me/a--b", "../digits", "me/digits.git", "", "me/ digits", "/digits"])
def test_a_name_that_no_repository_can_have_is_refused(name: str, run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="the repository must be named as OWNER/NAME, such as your-name/my-model"):
        plan_push(run_dir, name)


def test_what_is_not_there_is_told(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist; give a folder such as runs/NAME"):
        plan_push(tmp_path / "none", "me/digits")
    with pytest.raises(ModelError, match="has no export 'best', which would be in .*--checkpoint can be last, 2"):
        plan_push(run_dir, "me/digits", checkpoint="best")
    with pytest.raises(ConfigError, match="has no adapter, since model.lora.rank was 0; leave out --adapter"):
        plan_push(run_dir, "me/digits", checkpoint="2", adapter=True)
    with pytest.raises(ConfigError, match="--base-model must be named as OWNER/NAME"):
        plan_push(run_dir, "me/digits", base_model="/home/me/base")
    (run_dir / "export" / "config.json").unlink()
    with pytest.raises(ModelError, match="has no export 'last'"):
        plan_push(run_dir, "me/digits")


def test_without_a_token_nothing_is_asked(hub: Hub, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubError, match=f"there is no token for the hub {hub.url}; set HF_TOKEN to one that may write, or log in"):
        send(plan_push(run_dir, "me/digits"))
    assert hub.requests == []


def test_what_the_hub_refuses_is_told_in_a_sentence(hub: Hub, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    push = plan_push(run_dir, "me/digits")
    for status, said in {403: r"does not let this token write to me/digits \(.*the owner says no", 413: r"status 413"}.items():
        hub.refuse = status
        with pytest.raises(HubError, match=said):
            send(push)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(HubError, match="does not accept the token .*; set HF_TOKEN to one that is valid") as caught:
        send(push)
    assert "hf_wrong" not in str(caught.value) and hub.commits == []


def test_a_hub_that_cannot_be_reached_is_told(hub: Hub, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match="could not be sent to the hub http://127.0.0.1:9: .*; check the network, HF_ENDPOINT"):
        send(plan_push(run_dir, "me/digits"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="offline mode is enabled"):
        send(plan_push(run_dir, "me/digits"))
