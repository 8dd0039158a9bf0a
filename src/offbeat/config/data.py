"""[data]: prompts for training and evaluation."""

from typing import Any, Literal, Self

from pydantic import field_validator, model_validator

from offbeat.config.base import Change, Section, field
from offbeat.config.template import parse_template, read_chat_template

RENDERED = (
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
    "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs")
"""Names that a user's arguments of a chat template may not have: Offbeat passes these variables, or they are no variables of a template."""

_MOST_HELDOUT, _HELDOUT_SHARE = 256, 5
"""Default number of held-out prompts, and the divisor of the number of rows that bounds it: 1/5 of the rows."""


class DataConfig(Section):
    """Where rows come from and how a row becomes a prompt and an answer."""

    on_resume = Change.CONTENT

    task: str = field(
        "", "A task that makes its rows: sort_digits, addition, countdown, seeds (nothing but a seed, for environments that make their own"
        " tasks), or reasoning_gym:NAME, several of them mixed by weight as in reasoning_gym:chain_sum*2,count_bits*1; empty reads `path`.",
        pattern="^(|sort_digits|addition|countdown|seeds|reasoning_gym:.+)$", basic=True)
    task_size: int = field(8, "Difficulty of a built-in task: digits to sort, digits per addend, or numbers to combine.", ge=1, le=64)
    task_options: tuple[str, ...] = field(
        (), "Options of reasoning-gym's tasks, each as in chain_sum.max_terms=3; reasoning-gym's defaults hold for the others.")
    path: str = field(
        "", "A file (.jsonl, .json, .csv, .tsv, .parquet; all but the last also with .gz, .zst or .xz), a pattern such as data/*.jsonl, a"
        " folder of such files, a folder that `save_to_disk` of `datasets` has written, or a hub id.", basic=True)
    split: str = field("train", "Split to train on, of a hub id or a folder.")
    format: Literal["auto", "prompt_answer", "gsm8k", "messages"] = field(
        "auto", "Row layout: fields prompt and answer; GSM8K's question and `... #### 42`; or a chat in `messages`, with an answer"
        " unless it ends with the assistant's. \"auto\" reads the first and the last, whichever a row has, and a chat in prompt.")
    prompt: str = field(
        "", "Template that makes the prompt of a row's fields, such as \"{question}\\nAnswer:\"; {{ and }} are braces. Empty takes the"
        " prompt's field as it is.")
    prompt_field: str = field("", "Name of the prompt's field; empty takes the format's own.")
    answer_field: str = field("", "Name of the answer's field; empty takes the format's own, answer or completion.")
    system_field: str = field("", "Name of a field with a system message for each row, which makes the row a chat; empty is none.")
    max_unusable_rows: int = field(
        0, "Rows that may be left out because they cannot be used, each of which is reported with its reason; one more is an error.", ge=0)
    max_images: int = field(16, "Most images of a row; docs/images.md describes how rows give them.", ge=0)
    max_image_bytes: int = field(20_000_000, "Most bytes of an image's file.", ge=1)
    max_image_pixels: int = field(
        16_777_216, "Most pixels of an image, width times height, before the model's processor resizes it; known from the file's header, so"
        " that a larger one is never unpacked.", ge=1)
    chat_template: bool | str = field(
        "auto", "Wrap a prompt that is plain text as a user message with the tokenizer's chat template; \"auto\" does so if the model ends"
        " its answers as its template does, as models that were taught chats do. A file or the text of a Jinja template does so with"
        " that template, which is then used wherever the tokenizer's would be, and exported; a checkpoint remembers its text.",
        on_resume=Change.TOLD)
    chat_template_kwargs: dict[str, bool | int | float | str] = field(
        {}, "What the chat template is given besides messages and tools, such as {enable_thinking = false}.", on_resume=Change.TOLD)
    system_prompt: str = field(
        "", "System message put before a chat that has none of its own; plain prompts are chats with `chat_template` alone.",
        on_resume=Change.TOLD)
    sets: dict[str, dict[str, Any]] = field(
        {}, "Data sets that are mixed, instead of one: a table [data.sets.NAME] with a weight and settings of this section, and tables"
        " rollout and agent that say how its rows are judged and played.", on_resume=Change.ROWS)
    shuffle: bool = field(True, "Visit rows in a new seeded order each epoch.", on_resume=Change.REFUSED)
    max_prompt_tokens: int = field(
        0, "Longest prompt allowed, in tokens; 0 allows the model's context less max_new_tokens.", ge=0, on_resume=Change.TOLD)
    heldout_path: str = field(
        "", "File of held-out rows; empty takes them from the end of `path`, which are then not trained on.",
        on_resume=Change.ROWS, basic=True)
    heldout_split: str = field(
        "", "Split of held-out rows, of a hub id or a folder; empty takes them from the end of `split`.", on_resume=Change.ROWS)
    heldout_size: int | Literal["auto"] = field(
        "auto", "Held-out prompts used by evaluation, an integer of at least 0, which holds none out. \"auto\" holds out 256, or a fifth of"
        " the rows if they are fewer than 1,280.", on_resume=Change.ROWS)

    def num_heldout(self, num_rows: int | None) -> int:
        """Return the number of held-out rows of `num_rows`, e.g. 200 of 1,000; None stands for a task, which makes any number of rows."""
        if self.heldout_size != "auto":
            return self.heldout_size
        return _MOST_HELDOUT if num_rows is None else min(_MOST_HELDOUT, num_rows // _HELDOUT_SHARE)

    @field_validator("heldout_size", mode="before")
    @classmethod
    def _check_heldout_size(cls, given: Any) -> Any:
        if given == "auto" or (isinstance(given, int) and not isinstance(given, bool) and given >= 0):
            return given
        raise ValueError(f"it must be an integer >= 0 or 'auto', got {given!r}; use 0 to hold no prompts out")

    @property
    def wraps(self) -> bool:
        """Whether plain prompts become chats; they do not while `chat_template` is open."""
        return bool(self.chat_template) and self.chat_template != "auto"

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, text: str) -> str:
        if text:
            parse_template(text)
        return text

    @field_validator("chat_template")
    @classmethod
    def _read_template(cls, given: bool | str) -> bool | str:
        """Replace a file by its text, so that a changed file is a changed setting."""
        return given if isinstance(given, bool) or given == "auto" else read_chat_template(given)

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_kwargs(cls, given: dict[str, bool | int | float | str]) -> dict[str, bool | int | float | str]:
        if taken := [name for name in given if name in RENDERED]:
            raise ValueError(f"it must not hold {taken[0]!r}, which Offbeat itself gives the template or takes care of; leave it out")
        return given

    @model_validator(mode="after")
    def _check_prompts(self) -> Self:
        for name in ("prompt_field", "task"):
            if self.prompt and (given := getattr(self, name)):
                raise ValueError(f"data.prompt and data.{name} exclude each other, got {self.prompt!r} and {given!r}; give one")
        for name in ("prompt", "prompt_field", "answer_field", "system_field"):
            if self.task and (given := getattr(self, name)):
                raise ValueError(
                    f"data.{name} must be empty with data.task = {self.task!r}, which makes its own rows, got {given!r}; leave it out")
        return self
