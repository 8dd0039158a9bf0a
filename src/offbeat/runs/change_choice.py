"""Chooses whether versions are published as changes, where `weights.whole_every_versions` leaves it open ("auto").

Called when the number format of engines has been chosen and before anything is started, so that a run's own `config.toml` states the
choice, and its `plan.json` the reason. Torch-free.
"""

from offbeat.config.for_processes import PlanConfig
from offbeat.runs.step_choice import Choice

_WHOLE_EVERY = 20
"""An engine that missed versions reads a whole one and half as many changes on average: at 1 % of the weights each, a tenth more."""


def choose_changes(config: PlanConfig) -> PlanConfig:
    """Return the sections, in which the number format is chosen, with a number in place of "auto"."""
    if config.weights.whole_every_versions != "auto":
        return config
    number = int(change_choice(config).value)
    return config.model_copy(update={"weights": config.weights.model_copy(update={"whole_every_versions": number})})


def change_choice(config: PlanConfig) -> Choice:
    """Return the number of versions from a whole one to the next, such as "20", and the reason."""
    weights, kind = config.weights, config.inference.kind
    if weights.whole_every_versions != "auto":
        return Choice("weights.whole_every_versions", str(weights.whole_every_versions), "as configured")
    value, why = 1, ""
    if config.model.lora.rank:
        why = "adapters are small"
    elif not kind.takes_changes:
        why = f"{config.inference.engine} takes whole weights only"
    elif config.inference.quantization != "none" and kind.changes_in_place:
        why = f"engines keep {config.inference.quantization} weights alone, to which no changes can be applied"
    elif config.model.number_format == "float32":
        why = "a step changes nearly every weight in float32"
    elif not (kind.changes_in_place or config.inference.urls or config.cluster.ray_address or weights.channel == "collective"):
        why = f"{config.inference.engine} would keep a copy of the weights for it, and has whole folders on this machine"
    else:
        value = _WHOLE_EVERY
        why = f"a step changes few weights in {config.model.number_format}"
    return Choice("weights.whole_every_versions", str(value), why)
