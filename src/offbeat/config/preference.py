"""[preference]: training on pairs of answers, `offbeat dpo`."""

from typing import Literal

from offbeat.config.base import Change, Section, field
from offbeat.config.objectives import OBJECTIVES, names_for, names_with
from offbeat.config.train import OptimizerConfig
from offbeat.config.training_kinds import TrainingKind

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

USUAL_GAMMA = 0.5
_LOSSES = names_for("preference")
PAIR_LOSSES = tuple(name for name in _LOSSES if OBJECTIVES[name].group == "pair")
"""Losses of pairs."""


class PreferenceConfig(Section):
    """Preference training, `offbeat dpo`: the chosen answer of each pair in [data] is to become likelier than the rejected one."""

    on_resume = Change.TOLD
    read_by = ("preference",)
    training = TrainingKind(
        command="dpo", section="preference", checkpoints="dpo", lesson="preference:PreferenceLesson",
        summary="train on chosen and rejected answers", description=_DESCRIPTION, examples=_EXAMPLES,
        data="pairs of answers: a file, a folder or a hub id", pairs=True,
        python=("Train a model on chosen and rejected answers", """\
pairs = [{"prompt": "7+5=", "chosen": "12", "rejected": "13"}]
run = offbeat.dpo(model="models/small", data=pairs, loss="simpo", beta=2.0, total_steps=20)
"""),
        word="preference", method="preference training", named_by="preference.loss", metrics=("preference",), rates="preference")

    loss: Literal[_LOSSES] = field(  # pyright: ignore[reportInvalidTypeForm]
        "dpo", "Formula (`offbeat docs algorithms`): DPO; IPO, which stops at a distance and suits clear preferences; SimPO and ORPO, which"
        " need no reference; KTO, which also learns from single answers with a label; or another of the table.",
        on_resume=Change.REFUSED, basic=True)
    mix: dict[str, float] = field(
        {}, "Several losses of pairs by name with their weights, such as {dpo = 0.8, sft = 0.2}, in place of `loss`; metrics are those of"
        " the first.", on_resume=Change.REFUSED)
    beta: float = field(
        0.0, "Strength with which the policy is kept close to the reference (SimPO: steepness of the loss; ORPO: weight of the odds); 0"
        " takes the default of the loss: 0.1, 2 for simpo, or 5 for sigmoid_norm.", ge=0)
    label_smoothing: float = field(
        0.0, "Assumed share of pairs with swapped labels, for dpo, robust and exo_pair; 0 is 0.001 for exo_pair.", ge=0, lt=0.5)
    gamma: float = field(USUAL_GAMMA, "Margin by which the chosen answer should lead; simpo only.", ge=0)
    desirable_weight: float = field(
        1.0, "Weight of the loss of good answers; kto only. Where good and bad answers are not balanced, choose weights so that number"
        " times weight of good ones is 1 to 1.33 times that of bad ones.", gt=0)
    undesirable_weight: float = field(1.0, "Weight of the loss of bad answers; kto only.", gt=0)
    total_steps: int = field(200, "Optimizer steps.", ge=1, basic=True)
    batch_size: int = field(32, "Pairs per step; rows of any kind for kto.", ge=1, basic=True)
    optimizer: OptimizerConfig = field(OptimizerConfig(warmup_steps=10), "AdamW and its schedule.")
    evaluate_every_steps: int = field(
        0, "Steps between evaluations on held-out pairs; 0 evaluates only at the end.", ge=0, on_resume=Change.FREE)

    @property
    def losses(self) -> tuple[str, ...]:
        """The losses that are trained on, by name."""
        return tuple(self.mix) or (self.loss,)

    def check(self) -> None:
        """Raise ValueError for a setting that none of the losses reads."""
        if self.mix and self.loss != type(self).model_fields["loss"].default:
            raise ValueError(f"preference.loss must be left out with preference.mix, got '{self.loss}'; name it in the mix")
        if unknown := [name for name in self.mix if name not in PAIR_LOSSES]:
            raise ValueError(f"preference.mix has no loss of pairs {unknown[0][:80]!r}; it takes {', '.join(PAIR_LOSSES)}")
        if bad := [name for name, weight in self.mix.items() if not 0 < weight < float("inf")]:
            raise ValueError(f"preference.mix.{bad[0]} must be a finite weight above 0, got {self.mix[bad[0]]:g}")
        shown = f"preference.mix of {', '.join(self.mix)}" if self.mix else f"preference.loss = '{self.loss}'"
        if self.label_smoothing and not self._has("label_smoothing"):
            raise ValueError(
                f"preference.label_smoothing must be 0 with {shown}, got {self.label_smoothing:g}; only"
                f" {', '.join(names_with('label_smoothing'))} smooth labels")
        if self.gamma != USUAL_GAMMA and not self._has("gamma"):
            raise ValueError(
                f"preference.gamma must be left out with {shown}, got {self.gamma:g}; only {', '.join(names_with('gamma'))} has a margin to"
                " reach")
        for name in ("desirable_weight", "undesirable_weight"):
            if getattr(self, name) != 1 and not self._has(name):
                raise ValueError(
                    f"preference.{name} must be 1 with {shown}, got {getattr(self, name):g}; only {', '.join(names_with(name))} weighs"
                    " labels")

    def _has(self, constant: str) -> bool:
        return any(constant in OBJECTIVES[name].constants for name in self.losses)
