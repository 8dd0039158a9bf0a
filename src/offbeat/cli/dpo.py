"""`offbeat dpo`: preference training on pairs of answers."""

import argparse

from offbeat.cli.common import add_training_command

_DESCRIPTION = """\
Preference training: makes the chosen answer of each pair likelier than the rejected one. The result is in the run's folder export.

The data are a file, a folder or a hub id, whose rows have one of these layouts:
  {"prompt": "7+5=", "chosen": "12", "rejected": "13"}
  {"prompt": [messages], "chosen": [message], "rejected": [message]}
  {"chosen": [the whole chat], "rejected": [the whole chat]}
  {"prompt": "7+5=", "completion": "12", "label": true}
The last one is for preference.loss = "kto" alone.

preference.loss is dpo, ipo, simpo, orpo, kto or another that `offbeat config docs` lists; preference.mix sums several. All but simpo,
orpo and sft keep the model near the initial model, whose log-probabilities of all answers are computed once, before the first step. Watch
eval/accuracy, the share of held-out pairs that the model ranks correctly, and preference/chosen_logratio_mean: if it falls together with
that of rejected answers, both become less likely; then lower the learning rate or raise beta.
"""
_EXAMPLES = """\
examples:
  offbeat dpo --model HuggingFaceTB/SmolLM2-135M-Instruct --data pairs.jsonl
  offbeat dpo --model org/model --data pairs.jsonl --preference.loss simpo --preference.beta 2 --name simpo
  offbeat dpo pairs.toml --model.lora.rank 16 --name adapter
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `dpo` to the parser."""
    add_training_command(
        subparsers, "dpo", "run_preference", description=_DESCRIPTION, examples=_EXAMPLES,
        data="pairs of answers: a file, a folder or a hub id")
