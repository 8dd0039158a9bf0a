"""The result of a run in words: names and units for the values of `result.json` that the console shows at the end."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from offbeat.telemetry.pace import duration

HELDOUT_FELL = "held-out accuracy is lower than before training, by more than chance explains; see `offbeat docs debugging`"
"""Said at the end of a run, by its result and its report."""

UNPROVEN = "{} NOT PROVEN, see `offbeat docs weights`"
"""Said of versions that engines serve without a conclusive proof."""


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _share(value: float) -> str:
    return f"{value:.3f}"


def proofs_in_words(proofs: Mapping[str, int]) -> str:
    """Return what engines were proven to serve, such as "12 of 12 versions, by the weights in use"; empty if there was nothing to prove."""
    if not (total := sum(proofs.values())):
        return ""
    by_weights, by_canary, missing = (proofs.get(name, 0) for name in ("by_weights", "by_canary", "not_proven"))
    ways = [f"{count} {way}" for count, way in ((by_weights, "by the weights in use"), (by_canary, "by the canary's moves")) if count]
    told = f"{total - missing} of {total} versions taken by engines are proven" + (f": {' and '.join(ways)}" if ways else "")
    return told + (f"; {UNPROVEN.format(missing)}" if missing else "")


def _hidden(_value: Any) -> str:
    return ""


_NAMES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "heldout_before": ("held-out accuracy before", _share),
    "heldout_after": ("held-out accuracy after", _share),
    "heldout_after_step": ("", _hidden),
    "accuracy": ("held-out accuracy", _share),
    "accuracy_step": ("", _hidden),
    "warm_up_steps": ("supervised warm-up steps", lambda count: str(count) if count else ""),
    "steps": ("training steps", _shown),
    "trained_tokens": ("tokens trained on", lambda value: f"{value:,}"),
    "final_loss": ("last loss", _shown),
    "train_wall_s": ("time to train", duration),
    "startup_wall_s": ("time to start", duration),
    "max_staleness_seen": ("largest staleness", lambda value: f"{value} version{'' if value == 1 else 's'}"),
    "max_logprob_gap": ("largest gap to the engines after a publish", _shown),
    "proofs": ("engines' weights", proofs_in_words),
    "seed": ("seed", _shown),
    "torch_in_controller": ("", _hidden),
    "controller_memory_bytes": ("memory of the controller", lambda value: f"{value / 1e6:.0f} MB"),
    "stopped_early": ("stopped early", lambda value: "yes, on request" if value else ""),
    "heldout_fell": ("remark", lambda value: HELDOUT_FELL if value else ""),
}
"""By name in `result.json`: the displayed name, and the function that writes the value; an empty text is not shown."""


def in_words(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and value of each entry of a summary, in its order; entries without a value, or for programs only, are left out.

    An entry `x_step` is the step after which `x` was measured. It is shown beside `x`, e.g. "0.700 after step 4", unless it was the last.
    An `x_after` that was not measured is shown where there is an `x_before`.
    """
    for key, value in summary.items():
        if key.removesuffix("_step") in summary and key.endswith("_step"):
            continue
        name, write = _NAMES.get(key, (key.replace("_", " "), _shown))
        if value is not None and (shown := write(value)):
            measured = summary.get(f"{key}_step")
            yield name, shown if measured in (None, summary.get("steps")) else f"{shown} after step {measured}"
        elif value is None and key.endswith("_after") and summary.get(f"{key.removesuffix('after')}before") is not None:
            yield name, "not measured"
