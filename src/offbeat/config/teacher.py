"""[teacher]: the model that a run with algorithm.teacher learns from, or how the policy becomes its own teacher."""

from typing import Literal

from pydantic import field_validator

from offbeat.config.base import Change, Section, field
from offbeat.config.engine_kinds import KIND_NAMES

PROMPT, ANSWER = "{prompt}", "{answer}"
"""Placeholders of `TeacherConfig.template` for the text of a prompt and of its row's answer."""


class TeacherConfig(Section):
    """The teacher of distillation: path or url for algorithm.teacher = "model", the template for "policy" or "reference"."""

    on_resume = Change.TOLD
    read_by = ("rl",)

    path: str = field(
        "", "Folder or hub id of a model with the policy's tokenizer, which the train ranks hold beside the policy, frozen, in the number"
        " format model.dtype.")
    url: str = field(
        "", "An engine that serves the teacher, instead of path; it is asked for log-probabilities of the samples, and gets the key"
        " $OFFBEAT_TEACHER_API_KEY if there is one.")
    engine: Literal[KIND_NAMES] = field("embedded", "Kind of engine at url.")  # pyright: ignore[reportInvalidTypeForm]
    top_k: int = field(
        0, "Number of the teacher's likeliest tokens at each position that the policy learns, renormalised over them, for"
        " algorithm.objective = \"forward_kl\" or \"reverse_kl\"; 0 compares the sampled tokens alone.", ge=0, le=1024)
    template: str = field(
        "{prompt}\n\nThis is an example for a response to the question:\n{answer}\n\nNow answer with a response of your own, including"
        " the thinking process:\n",
        "With algorithm.teacher = \"policy\" or \"reference\": what the teacher sees in place of a prompt, or of a chat's last message by"
        " the user; {answer} is the row's answer, or its solution where it has one.")
    max_concurrent: int = field(64, "Requests to url at once.", ge=1, on_resume=Change.FREE)
    timeout_s: float = field(120.0, "Seconds for one request to url.", gt=0, on_resume=Change.FREE)
    max_retries: int = field(
        2, "Times that a request to url that failed is repeated; then its sample is left out.", ge=0, on_resume=Change.FREE)

    @field_validator("template")
    @classmethod
    def _check_template(cls, template: str) -> str:
        if missing := [name for name in (PROMPT, ANSWER) if name not in template]:
            raise ValueError(f"a template must contain {PROMPT} and {ANSWER}, but it lacks {' and '.join(missing)}; add it")
        return template
