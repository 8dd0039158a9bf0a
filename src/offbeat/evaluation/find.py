"""Finds an evaluation by a name: a run, the output of `offbeat eval`, or a file of answers. Called by `offbeat compare`."""

import re
from collections.abc import Mapping
from pathlib import Path

from offbeat.errors import DataError
from offbeat.evaluation.files import newest_evaluation, read_samples, samples_beside
from offbeat.evaluation.samples import EvaluatedSet
from offbeat.telemetry.evaluation_log import RESULT_NAME

_OF_MODEL = re.compile(r"(?P<file>.+?\.jsonl?):(?P<model>.+)", re.DOTALL)


def find_evaluation(name: str) -> Mapping[str, EvaluatedSet]:
    """Return the answers of an evaluation by the names of its sets.

    Args:
        name: a run's folder, for the last evaluation of each set; the folder or the JSON file that `offbeat eval` has written; or a file of
            answers. FILE:MODEL chooses one of several models in a file.

    Raises:
        DataError: there is no evaluation, or several models have answered and none is named.
    """
    path, model = Path(name), ""
    if not path.exists() and (match := _OF_MODEL.fullmatch(name)) is not None:
        path, model = Path(match["file"]), match["model"]
    if path.is_dir():
        if not (path / RESULT_NAME).is_file():
            return _of_run(path)
        path = path / RESULT_NAME
    if path.suffix == ".json":
        path = samples_beside(path)
    found = read_samples(path)
    if model and model not in found:
        raise DataError(f"{path} holds no answers of {model!r}; it has {', '.join(found)}")
    if not model and len(found) > 1:
        raise DataError(f"{name} holds answers of several models; name one of them, as {name}:{next(iter(found))}")
    return found[model] if model else next(iter(found.values()))


def _of_run(folder: Path) -> Mapping[str, EvaluatedSet]:
    sets = {name: _set_in(path, name) for name, path in newest_evaluation(folder).items()}
    if not sets:
        raise DataError(
            f"{folder} holds no evaluation: neither {RESULT_NAME} of `offbeat eval`, nor evaluations/ of a run; set evaluate.keep_samples,"
            " or evaluate its model with `offbeat eval`")
    return sets


def _set_in(path: Path, name: str) -> EvaluatedSet:
    """Return the answers to the set of this name in a run's file."""
    found = {(model, of_set): answers for model, sets in read_samples(path).items() for of_set, answers in sets.items()}
    if ("", name) not in found:
        there = ", ".join(f"{of_set or 'held-out prompts'}{f' of the model {model}' if model else ''}" for model, of_set in found)
        raise DataError(
            f"{path} is named as answers to {name or 'held-out prompts'} and holds those to {there}; give it back its name, or compare"
            " the file itself")
    return found["", name]
