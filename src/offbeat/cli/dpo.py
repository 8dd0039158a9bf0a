"""`offbeat dpo CONFIG`: preference training on pairs of answers."""

import argparse

from offbeat.cli.common import add_training_command

_DESCRIPTION = """\
Preference training: makes the chosen answer of each pair likelier than the rejected one. The result is in the run's folder export.

data.path names a file, a folder or a hub id whose rows have one of these layouts:
  {"prompt": "7+5=", "chosen": "12", "rejected": "13"}
  {"prompt": [messages], "chosen": [the assistant's message], "rejected": [the assistant's message]}
  {"chosen": [the whole chat], "rejected": [the whole chat]}
  {"prompt": "7+5=", "completion": "12", "label": true}          only for preference.loss = "kto"

preference.loss is dpo, ipo, simpo, orpo, kto or another of docs/algorithms.md; preference.mix sums several. All but simpo, orpo and sft
keep the model near the initial model, whose log-probabilities of all answers are computed once, before the first step. Watch
eval/accuracy, the share of held-out pairs that the model ranks correctly, and preference/chosen_logratio_mean: if it falls together with
that of rejected answers, both become less likely; then lower the learning rate or raise beta.
"""
_EXAMPLES = """\
examples:
  offbeat dpo examples/preferences.toml
  offbeat dpo examples/preferences.toml --preference.loss simpo --preference.beta 2 --run.name simpo
  offbeat dpo examples/preferences.toml --model.path org/model --model.lora.rank 16 --preference.optimizer.lr 5e-6 --run.name adapter
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `dpo` to the parser."""
    add_training_command(
        subparsers, "dpo", "run_preference", description=_DESCRIPTION, examples=_EXAMPLES)
