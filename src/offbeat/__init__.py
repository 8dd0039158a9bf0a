"""Offbeat: asynchronous reinforcement-learning post-training for language models.

    import offbeat

    run = offbeat.train(model="models/smollm2-135m-instruct", data="words.jsonl", reward=my_reward, total_steps=60)
    print(run.heldout_before, run.heldout_after, run.model)

The names in `__all__` are the public interface; docs/python.md shows each of them. A name is imported when it is first used, so that
`import offbeat` is quick, and brings neither torch nor any other library along.
"""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offbeat.api.engine import Completion, Engine
    from offbeat.api.evaluation import evaluate
    from offbeat.api.run import Rollout, Run
    from offbeat.api.service import Service, serve
    from offbeat.api.session import Step
    from offbeat.api.tenants import open_tenants
    from offbeat.api.training import dpo, reward_model, sft, train
    from offbeat.controller.evaluate import Evaluation
    from offbeat.data.reward import of_group
    from offbeat.data.row import Row

__all__ = [
    "Completion", "Engine", "Evaluation", "Rollout", "Row", "Run", "Service", "Step",
    "dpo", "evaluate", "of_group", "open_tenants", "reward_model", "serve", "sft", "train",
]

_MODULES = {
    "Completion": "api.engine", "Engine": "api.engine", "Evaluation": "controller.evaluate", "Rollout": "api.run", "Row": "data.row",
    "Run": "api.run", "Service": "api.service", "Step": "api.session", "dpo": "api.training", "evaluate": "api.evaluation",
    "of_group": "data.reward", "open_tenants": "api.tenants", "reward_model": "api.training", "serve": "api.service",
    "sft": "api.training", "train": "api.training",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("offbeat")
    if name not in _MODULES:
        raise AttributeError(f"module 'offbeat' has no attribute {name!r}")
    with warnings.catch_warnings():  # of tqdm, which libraries load, in a notebook without ipywidgets; a run shows its progress as text
        warnings.filterwarnings("ignore", message="IProgress not found")
        found = getattr(importlib.import_module(f"offbeat.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
