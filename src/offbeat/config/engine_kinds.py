"""Kinds of engines and their abilities, for rules of the configuration. `fleet.kinds` starts and speaks to them. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class EngineKind:
    """A kind of engine.

    Attributes:
        inside: whether it computes in a worker of Offbeat's own, instead of a server in an environment of its own.
        takes_changes: whether changes of weights can be published to it (`weights.whole_every_versions`).
        changes_in_place: whether it applies them to the weights that it computes with, instead of to a copy that it keeps for it.
        takes_broadcasts: whether weights can be sent to it by a collective (`weights.channel`).
        sleeps: whether it can give its device's memory to a train rank meanwhile (`cluster.take_turns`).
        quantises: whether it can be told to sample with a rounded form of the weights (`inference.quantization`).
        splits: whether it divides a model over several devices (`inference.devices_per_engine`).
        batch_invariant: whether it can compute a token to the same bits in every batch (`inference.batch_invariant`).
        gives_routes: whether it returns the experts that each token used (`model.route_replay`).
        reads_images: whether it takes prompts with ids of images (`data.image_store`).
        reports_context: whether it can serve one of `serve.sampling_models`, which have to say how long their context is.
        setup: command that makes the environment in which it is installed; "" if the user does.
    """

    inside: bool = False
    takes_changes: bool = False
    changes_in_place: bool = False
    takes_broadcasts: bool = False
    sleeps: bool = False
    quantises: bool = False
    splits: bool = False
    batch_invariant: bool = False
    gives_routes: bool = False
    reads_images: bool = False
    reports_context: bool = False
    setup: str = ""


ENGINE_KINDS: Mapping[str, EngineKind] = MappingProxyType({
    "embedded": EngineKind(
        inside=True, takes_changes=True, changes_in_place=True, takes_broadcasts=True, sleeps=True, quantises=True, batch_invariant=True,
        gives_routes=True, reads_images=True, reports_context=True),
    "vllm": EngineKind(
        takes_changes=True, takes_broadcasts=True, sleeps=True, splits=True, gives_routes=True, reports_context=True, setup="make vllm"),
    "sglang": EngineKind(splits=True),
})
"""All kinds by name."""

KIND_NAMES = tuple(ENGINE_KINDS)


def kinds_that(ability: str) -> str:
    """Return the names of all kinds with an ability, such as "embedded and vllm" for "sleeps"."""
    return " and ".join(name for name, kind in ENGINE_KINDS.items() if getattr(kind, ability))
