"""[data]: prompts for training and evaluation."""

from typing import Literal

from offbeat.config.base import Section, field


class DataConfig(Section):
    """Where rows come from and how a row becomes a prompt and an answer."""

    task: str = field(
        "", "A task that makes its rows: sort_digits, addition, countdown, seeds (nothing but a seed, for environments that make their own"
        " tasks), or reasoning_gym:NAME, several of them mixed by weight as in reasoning_gym:chain_sum*2,count_bits*1; empty reads `path`.",
        pattern="^(|sort_digits|addition|countdown|seeds|reasoning_gym:.+)$")
    task_size: int = field(8, "Difficulty of a built-in task: digits to sort, digits per addend, or numbers to combine.", ge=1, le=64)
    task_options: tuple[str, ...] = field(
        (), "Options of reasoning-gym's tasks, each as in chain_sum.max_terms=3; reasoning-gym's defaults hold for the others.")
    path: str = field("", "JSON-lines or Parquet file, or a hub id read through `datasets`.")
    split: str = field("train", "Split to train on, for a hub id.")
    format: Literal["prompt_answer", "gsm8k", "messages"] = field(
        "prompt_answer", "Row layout: fields prompt and answer; GSM8K's question and `... #### 42`; or a chat in `messages`, with an answer"
        " unless it ends with the assistant's.")
    prompt_field: str = field("", "Name of the prompt's field; empty takes the format's own.")
    answer_field: str = field("", "Name of the answer's field; empty takes the format's own.")
    chat_template: bool = field(False, "Wrap the prompt as a user message with the tokenizer's chat template.")
    system_prompt: str = field("", "System message put before the prompt when `chat_template` is on.")
    shuffle: bool = field(True, "Visit rows in a new seeded order each epoch.")
    max_prompt_tokens: int = field(0, "Longest prompt allowed, in tokens; 0 allows the model's context less max_new_tokens.", ge=0)
    heldout_path: str = field("", "File of held-out rows; empty takes them from the end of `path`, which are then not trained on.")
    heldout_split: str = field("", "Split of held-out rows, for a hub id; empty takes them from the end of `split`.")
    heldout_size: int = field(256, "Held-out prompts used by evaluation; 0 holds none out.", ge=0)
