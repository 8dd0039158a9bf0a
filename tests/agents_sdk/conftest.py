"""Trains unmodified agents of other people's libraries, each under the Python of an environment of its own.

    make test-agents
"""

import json
from pathlib import Path
from typing import Protocol

import pytest

from agents_sdk.adder_model import QUESTION, RIGHT, train_adder
from agents_sdk.trained import Trained
from offbeat.data.tokenizer import load_tokenizer
from small_run import SmallRun, offbeat


class TrainAgent(Protocol):
    """Trains an agent for two steps of two episodes."""

    def __call__(self, settings: dict[str, str], *, question: str = QUESTION) -> Trained: ...


@pytest.fixture(scope="session")
def adder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model that mostly calls a tool and then answers."""
    return train_adder(tmp_path_factory.mktemp("adder"))


@pytest.fixture
def train_agent(adder: Path, tmp_path: Path) -> TrainAgent:
    def train(settings: dict[str, str], *, question: str = QUESTION) -> Trained:
        rows = tmp_path / "rows.jsonl"
        rows.write_text((json.dumps({"prompt": question, "answer": RIGHT}) + "\n") * 4)
        run = SmallRun(tmp_path, str(adder))
        arguments = run.arguments(**{
            "data.task": "", "data.path": str(rows), "data.format": "prompt_answer", "data.heldout_size": "0", "rollout.reward": "",
            "rollout.workflow": "agent", "rollout.consumer_batch_size": "1", "rollout.max_concurrent_rollouts": "1",
            "rollout.max_head_offpolicyness": "0", "rollout.max_new_tokens": "64", "rollout.temperature": "0.6",
            "algorithm.centre": "none", "algorithm.scale": "none",
            "algorithm.drop_zero_advantage": "false",  # so that the trainer computes log-probabilities of every sampled token
            **settings})
        done = offbeat("train", *arguments, timeout_s=550)
        assert done.returncode == 0, done.stdout + done.stderr
        return Trained(run, load_tokenizer(str(adder)))

    return train
