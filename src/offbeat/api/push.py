"""Sends a run's model to a Hugging Face hub, with a model card, for `offbeat push` and `Run.push`.

`plan_push` lists the files without a network; `send` sends them in one commit. `huggingface_hub` finds the endpoint ($HF_ENDPOINT) and the
token ($HF_TOKEN, or the one that `hf auth login` has stored).
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from offbeat.dashboard.model_card import CardDetails, base_of, card_text
from offbeat.dashboard.run_files import RunFiles, check_run, read_run
from offbeat.errors import ConfigError, DataError, HubError
from offbeat.extras import require
from offbeat.runs.evaluated_model import run_export

_CARD = "README.md"
_ADAPTER = "adapter"
_ADAPTER_CONFIG = "adapter_config.json"
_CONFIG, _ORIGIN = "config.json", "_name_or_path"
_MAIN = "main"
_MOST_SAID = 300


@dataclass(frozen=True)
class Push:
    """The files of one push, and where they go.

    Attributes:
        repo_id: the repository, as OWNER/NAME.
        private: whether a new repository is private; otherwise the owner's default decides, which is public.
        files: files of the run, by their paths in the repository, such as "config.json".
        texts: files made for the push: the model card, unless the folder has one, and copies that name no folder of this machine.
    """

    repo_id: str
    revision: str
    message: str
    private: bool
    files: dict[str, Path]
    texts: dict[str, str]

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file by its path in the repository, in the order of paths."""
        sizes = {name: path.stat().st_size for name, path in self.files.items()}
        return dict(sorted((sizes | {name: len(text.encode()) for name, text in self.texts.items()}).items()))


@dataclass(frozen=True)
class Commit:
    """A commit to a repository: its branch, and its message, which names the run if it is empty."""

    revision: str = _MAIN
    message: str = ""


def plan_push(
    run_dir: Path, repo_id: str, *, checkpoint: str = "last", adapter: bool = False, base_model: str = "",
    commit: Commit | None = None, private: bool = False,
) -> Push:
    """Plan a push.

    Args:
        checkpoint: which export: "last", "best", or the number of a step.
        adapter: whether to send the LoRA adapter by itself, instead of the model into which it is merged.
        base_model: hub id of the model that was trained, where the run began with a local folder of it.
        commit: by default to main.

    Raises:
        ConfigError: the name is not as OWNER/NAME, or the run has no adapter.
        DataError: there is no such run.
        ModelError: the run has not exported its model.
        MissingExtraError: huggingface_hub is not installed.
    """
    _check_name(repo_id, "the repository")
    if base_model:
        _check_name(base_model, "--base-model")
    commit = commit or Commit()
    if not commit.revision:
        raise ConfigError("--revision must name a branch, got nothing; leave it out for main")
    check_run(run_dir)
    folder = run_export(run_dir, checkpoint)
    if adapter:
        folder /= _ADAPTER
        if not (folder / _ADAPTER_CONFIG).is_file():
            raise ConfigError(f"{folder} has no adapter, since model.lora.rank was 0; leave out --adapter to push the model")
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    if not adapter:
        files = {name: path for name, path in files.items() if not name.startswith(f"{_ADAPTER}/")}
    run = read_run(run_dir)
    card = CardDetails(
        repo_id, base=base_model or base_of(run, run_dir), step=_step(run, checkpoint), is_adapter=adapter,
        is_classifier=_is_classifier(folder))
    texts = {} if _CARD in files else {_CARD: card_text(run, run_dir, card)}
    if _ORIGIN in (config := _json(folder / _CONFIG) if _CONFIG in files else {}):  # a folder of this machine, which nothing reads
        texts[_CONFIG] = json.dumps({key: value for key, value in config.items() if key != _ORIGIN}, indent=2) + "\n"
        del files[_CONFIG]
    if adapter and base_model:  # PEFT loads the base by this id
        texts[_ADAPTER_CONFIG] = json.dumps(_json(folder / _ADAPTER_CONFIG) | {"base_model_name_or_path": base_model}, indent=2) + "\n"
        del files[_ADAPTER_CONFIG]
    return Push(repo_id, commit.revision, commit.message or f"Push the run {run.name} of Offbeat", private, files, texts)


def send(push: Push) -> str:
    """Create the repository and the branch where they do not exist, send everything in one commit, and return the repository's address.

    Raises:
        HubError: there is no token, the hub cannot be reached, or it refuses.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, get_token  # noqa: PLC0415 - needs the extra

    api = HfApi()
    if not get_token():
        raise HubError(f"there is no token for the hub {api.endpoint}; set HF_TOKEN to one that may write, or log in with 'hf auth login'")
    added: list[Any] = [CommitOperationAdd(name, path) for name, path in push.files.items()]
    added += [CommitOperationAdd(name, text.encode()) for name, text in push.texts.items()]
    with _refusals(push, api.endpoint):
        address = api.create_repo(push.repo_id, private=push.private or None, exist_ok=True)
        if push.revision != _MAIN:
            api.create_branch(push.repo_id, branch=push.revision, exist_ok=True)
        api.create_commit(push.repo_id, added, commit_message=push.message, revision=push.revision)
    return str(address) if push.revision == _MAIN else f"{address}/tree/{push.revision}"


@contextmanager
def _refusals(push: Push, endpoint: str) -> Iterator[None]:
    """Turn errors of the hub's client into one sentence."""
    from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415

    of_client = cast("type[Exception]", HfHubHTTPError.__bases__[0])  # of httpx or, with a newer huggingface_hub, of httpx2
    try:
        yield
    except HfHubHTTPError as exc:
        status = exc.response.status_code if exc.response is not None else 0
        said = (exc.server_message or str(exc).partition("\n")[0])[:_MOST_SAID]
        what = {
            401: f"does not accept the token ({said}); set HF_TOKEN to one that is valid, or log in with 'hf auth login'",
            403: f"does not let this token write to {push.repo_id} ({said}); take a token with write access, or another owner",
        }.get(status, f"refused to take {push.repo_id} (status {status}): {said}")
        raise HubError(f"the hub {endpoint} {what}") from exc
    except (of_client, OSError, ValueError, RuntimeError) as exc:
        said = (str(exc).partition("\n")[0] or type(exc).__name__)[:_MOST_SAID]
        raise HubError(
            f"{push.repo_id} could not be sent to the hub {endpoint}: {said}; check the network, HF_ENDPOINT and HF_HUB_OFFLINE, and push"
            " again") from exc


def _check_name(name: str, what: str) -> None:
    require("hub", ["huggingface_hub"], wanted_by="push")
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415
    from huggingface_hub.utils import validate_repo_id  # noqa: PLC0415

    try:
        validate_repo_id(name)
        valid = name.count("/") == 1
    except HFValidationError:
        valid = False
    if not valid:
        raise ConfigError(
            f"{what} must be named as OWNER/NAME, such as your-name/my-model, of letters, digits, '-', '_' and '.', got {name[:80]!r}")


def _step(run: RunFiles, checkpoint: str) -> int | None:
    """Return the step after which an export was written; None for the last."""
    best = run.result.get("best")
    if checkpoint == "best":
        return best.get("global_step") if isinstance(best, dict) else None
    return None if checkpoint == "last" else int(checkpoint)


def _is_classifier(folder: Path) -> bool:
    config = folder / _CONFIG
    architectures = _json(config).get("architectures") if config.is_file() else None
    return any(re.search("SequenceClassification", str(name)) for name in architectures or ())


def _json(path: Path) -> dict[str, Any]:
    """Read a file that was exported; raises DataError if it is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise DataError(f"{path} is damaged: {exc}; export the model again") from exc
    return found if isinstance(found, dict) else {}
