"""Offbeat: asynchronous reinforcement-learning post-training for language models.

    import offbeat

    run = offbeat.train(model="models/smollm2-135m-instruct", data="words.jsonl", reward=my_reward, total_steps=60)
    print(run.heldout_before, run.heldout_after, run.model)

The names in `__all__` are the public interface; docs/python.md (`offbeat docs python`) shows each of them. A name is
imported when it is first used, so that `import offbeat` is quick, and brings neither torch nor any other library along.
"""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offbeat.algorithms.adam import AdamParams
    from offbeat.algorithms.experience import sft_batch
    from offbeat.api.engine import Completion, Engine
    from offbeat.api.evaluation import evaluate
    from offbeat.api.policy_batch import policy_batch
    from offbeat.api.run import Rollout, Run
    from offbeat.api.service import Service, serve
    from offbeat.api.session import Step
    from offbeat.api.tenants import open_tenants
    from offbeat.api.training import dpo, reward_model, sft, train
    from offbeat.controller.evaluate import Evaluation
    from offbeat.data.reward import of_group
    from offbeat.data.row import Row
    from offbeat.inference.sampling import Sample, Sampling
    from offbeat.runs.adapters import Adapters as Tenants

__all__ = [
    "AdamParams", "Completion", "Engine", "Evaluation", "Rollout", "Row", "Run", "Sample", "Sampling", "Service", "Step", "Tenants",
    "dpo", "evaluate", "of_group", "open_tenants", "policy_batch", "reward_model", "serve", "sft", "sft_batch", "train",
]

_PLACES = {
    "AdamParams": "algorithms.adam:AdamParams", "Completion": "api.engine:Completion", "Engine": "api.engine:Engine",
    "Evaluation": "controller.evaluate:Evaluation", "Rollout": "api.run:Rollout", "Row": "data.row:Row", "Run": "api.run:Run",
    "Sample": "inference.sampling:Sample", "Sampling": "inference.sampling:Sampling", "Service": "api.service:Service",
    "Step": "api.session:Step", "Tenants": "runs.adapters:Adapters", "evaluate": "api.evaluation:evaluate",
    "of_group": "data.reward:of_group", "open_tenants": "api.tenants:open_tenants", "policy_batch": "api.policy_batch:policy_batch",
    "serve": "api.service:serve", "sft_batch": "algorithms.experience:sft_batch", "train": "api.training:train",
}
"""Places of the names but those of kinds of training on examples, which are in `api.training.ON_EXAMPLES`."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("offbeat")
    if name not in _PLACES and not _is_training(name):
        raise AttributeError(f"module 'offbeat' has no attribute {name!r}")
    with warnings.catch_warnings():  # of tqdm, which libraries load, in a notebook without ipywidgets; a run shows its progress as text
        warnings.filterwarnings("ignore", message="IProgress not found")
        try:
            found = _find(name)
        except ModuleNotFoundError:
            extras = importlib.import_module("offbeat.extras")
            try:
                extras.require("train", extras.TRAIN, wanted_by=f"offbeat.{name}")
            except ImportError as missing:
                raise missing from None  # what module it was that came first says nothing
            raise
    globals()[name] = found
    return found


def _is_training(name: str) -> bool:
    """Whether this is the function of a kind of training on examples. The import system asks for private names and modules, too."""
    if name.startswith("_") or importlib.import_module("importlib.util").find_spec(f"offbeat.{name}") is not None:
        return False
    kinds = importlib.import_module("offbeat.config.root").TRAINING_KINDS
    return any(name == kind.function for kind in kinds.values() if kind.lesson)


def _find(name: str) -> Any:
    if name not in _PLACES:
        return importlib.import_module("offbeat.api.training").ON_EXAMPLES[name]
    module, _, place = _PLACES[name].partition(":")
    return getattr(importlib.import_module(f"offbeat.{module}"), place)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
