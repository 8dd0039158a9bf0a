"""Checks of rows when data is opened: of text that the model cannot read, and of images. Called by `inputs`, `preview`, `config check`.

What reads a prompt as text has U+FFFC in the place of an image, so rows with images are refused where a part of the run reads them so.
Torch-free.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from offbeat.config.data import DataConfig
from offbeat.config.inference import InferenceConfig
from offbeat.config.rollout import REWARD_MODEL, RolloutConfig
from offbeat.config.teacher import TeacherConfig
from offbeat.data.image_reader import same_images
from offbeat.data.model_folder import check_model_folder, read_model_config
from offbeat.data.pairs import Preference
from offbeat.data.prompt import check_images
from offbeat.data.reward import JUDGE_PREFIX
from offbeat.data.row import Row
from offbeat.data.tokenizer import Tokenizer
from offbeat.data.unknown_text import check_preference, check_row
from offbeat.errors import CodeError, ConfigError, ModelError
from offbeat.rollout.judges import read_judge


def check_of_rows(tokenizer: Tokenizer | None, data: DataConfig, *, answered: bool, blind: str) -> Callable[[Row, str], None]:
    """Return a check of a row, named by its place in the data.

    Args:
        tokenizer: of the run; None checks what needs none.
        blind: a part of the run that would not see images; see `blind_part`.

    Returns:
        A function that raises DataError for text that is unknown to the tokenizer or an image that cannot be used, and ConfigError for a
        row with images that a part of the run would not see.
    """
    knows = None if tokenizer is None else check_row(tokenizer, data, answered=answered)

    def check(row: Row, where: str) -> None:
        if row.images and blind:
            raise ConfigError(f"{where} has {'an image' if len(row.images) == 1 else f'{len(row.images)} images'}, which {blind}")
        if tokenizer is not None:
            check_images(row, tokenizer, where)
        if knows is not None:
            knows(row, where)

    return check


def check_of_pairs(tokenizer: Tokenizer, data: DataConfig) -> Callable[[Preference, str], None]:
    """Return a check that refuses a preference with an image that cannot be used, or as `check_preference`."""
    knows = check_preference(tokenizer, data)

    def check(preference: Preference, where: str) -> None:
        check_images(preference.row(), tokenizer, where)
        if knows is not None:
            knows(preference, where)

    return check


def blind_part(rewards: Iterable[str], rollout: RolloutConfig, teacher: TeacherConfig | None, *, environment: str, model: str) -> str:
    """Return which part of a run would not see images of its rows, and what to do, as the end of a sentence; empty if there is none.

    An `environment` is empty if none is played, and the folder of the policy, `model`, if it is made here.
    """
    setting = "rollout.rewards" if rollout.rewards else "rollout.reward"
    for name in rewards:
        if name.startswith(REWARD_MODEL):
            return f"the reward model of {setting} = {name!r} would not see; give a reward function, or rows without images"
        if name.startswith(JUDGE_PREFIX) and _judges_prompts(name.removeprefix(JUDGE_PREFIX)):
            return (
                f"the judge of {setting}, {name!r}, would not see; leave {{question}} out of its prompt, so that it compares with"
                " {reference}, or give rows without images")
    if rollout.workflow == "gym" or (rollout.workflow == "agent" and environment):
        return (
            f"agent.environment = {environment!r} does not show to the model; play tools or an agent of your own, or give rows without"
            " images")
    if teacher is None:
        return ""
    if teacher.url:
        return f"the teacher at teacher.url = {teacher.url!r} would not see; give its folder as teacher.path, or rows without images"
    if model and not _reads_alike(model, teacher.path):
        return (
            f"the teacher at teacher.path = {teacher.path!r} reads in another way than the policy, or not at all; give a model of the"
            " policy's type with the same processor files, or rows without images")
    return ""


def blind_engine(inference: InferenceConfig, *, model: str, rank: int, interrupt: str) -> str:
    """Return why engines would not see images for a model folder, as `blind_part` does; empty for kinds that take none at all.

    `rank` and `interrupt` are `model.lora.rank` and `weights.interrupt`.
    """
    kind, name = inference.kind, inference.engine
    if not kind.image_types or not (Path(model) / "config.json").is_file():
        return ""
    model_type = read_model_config(model)["model_type"]
    settings = {
        f"models of type {model_type!r}": model_type not in kind.image_types, "adapters (model.lora.rank)": rank > 0,
        "rounded weights (inference.quantization)": inference.quantization != "none",
        'weights.interrupt = "keep"': interrupt == "keep"}
    return next((
        f"inference.engine = {name!r} does not read with {setting}; use the embedded engine, or rows without images"
        for setting, is_set in settings.items() if is_set), "")


def _judges_prompts(path: str) -> bool:
    """Whether a judge reads prompts; a file that is wrong is told where the judge is started."""
    try:
        return read_judge(path).shows_prompts
    except CodeError:
        return False


def _reads_alike(model: str, teacher: str) -> bool:
    """Whether two models make the same of an image; a folder that is none is told where it is opened."""
    try:
        return same_images(*(str(check_model_folder(path)) for path in (model, teacher)))
    except ModelError:
        return True
