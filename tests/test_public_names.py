"""`import offbeat` gives exactly these names, quickly, without torch, and typed."""

import subprocess
import sys
from importlib.metadata import version
from importlib.resources import files
from inspect import getdoc

import pytest

import offbeat
from offbeat.config.root import TRAINING_KINDS

NAMES = [
    "AdamParams", "Completion", "Engine", "Evaluation", "Rollout", "Row", "Run", "Sample", "Sampling", "Service", "Step", "Tenants",
    "dpo", "evaluate", "of_group", "open_tenants", "policy_batch", "reward_model", "serve", "sft", "sft_batch", "train",
]
PLAIN = ("AdamParams", "Evaluation", "Row", "Sample", "Sampling", "Tenants", "of_group", "sft_batch")
"""Those whose docstrings need no example, since the page has one."""
_MOST_MODULES = 30


def test_the_public_names_are_these_and_no_others() -> None:
    assert offbeat.__all__ == NAMES
    assert set(NAMES) <= set(dir(offbeat))
    assert offbeat.__version__ == version("offbeat")
    assert files("offbeat").joinpath("py.typed").is_file()
    with pytest.raises(AttributeError, match="module 'offbeat' has no attribute 'trian'"):
        _ = offbeat.trian  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_there_and_says_what_it_does_by_an_example(name: str) -> None:
    text = getdoc(getattr(offbeat, name)) or ""
    assert text and (name in PLAIN or "offbeat." in text), f"{name} has no example"


def test_every_kind_of_training_has_its_function() -> None:
    assert {kind.function for kind in TRAINING_KINDS.values()} <= set(NAMES)


def test_importing_is_quick_and_brings_no_torch() -> None:
    code = (
        "import sys; before = set(sys.modules); import offbeat; new = set(sys.modules) - before;"
        "assert not {'torch', 'numpy', 'pydantic', 'transformers'} & new, new;"
        "print(len(new)); offbeat.train, offbeat.evaluate, offbeat.Engine, offbeat.open_tenants;"
        "assert 'torch' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < _MOST_MODULES, "what takes time is what is imported"


def test_a_notebook_without_widgets_sees_no_warning_of_them() -> None:
    code = (
        "import sys, types; sys.modules['ipykernel.zmqshell'] = types.ModuleType('zmqshell'); sys.modules['ipywidgets'] = None;"
        "ipython = sys.modules['IPython'] = types.ModuleType('IPython'); ipython.get_ipython = lambda: None; ipython.version_info = (9,);"
        "import offbeat; offbeat.train; import tqdm.auto; print(tqdm.auto.tqdm.__module__)")
    done = subprocess.run([sys.executable, "-W", "default", "-c", code], capture_output=True, text=True, check=True)
    assert "IProgress" not in done.stderr and done.stdout == "tqdm.asyncio\n"
