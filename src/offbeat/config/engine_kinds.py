"""Kinds of engines and their abilities, for rules of the configuration. `fleet.kinds` starts and speaks to them. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class WeightForm:
    """A form to which an engine rounds its weights (`inference.quantization`).

    Attributes:
        name: "int8", "int4" or "fp8".
        formats: values of `model.dtype` from which it can be made; "auto" takes the first.
        on_devices: whether it can be computed with on accelerators, and not on CPUs alone.
    """

    name: str
    formats: tuple[str, ...] = ("float32", "bfloat16")
    on_devices: bool = True


@dataclass(frozen=True)
class EngineKind:
    """A kind of engine.

    Attributes:
        inside: whether it computes in a worker of Offbeat's own, instead of a server in an environment of its own.
        takes_changes: whether changes of weights can be published to it (`weights.whole_every_versions`).
        changes_in_place: whether it applies them to the weights that it computes with, instead of to a copy that it keeps for it.
        takes_broadcasts: whether weights can be sent to it by a collective (`weights.channel`).
        sleeps: whether it can give its device's memory to a train rank meanwhile (`cluster.take_turns`).
        forms: forms to which it can be told to round its weights (`inference.quantization`).
        splits: whether it divides a model over several devices (`inference.devices_per_engine`).
        batch_invariant: whether it can compute a token to the same bits in every batch (`inference.batch_invariant`).
        gives_routes: whether it returns the experts that each token used (`model.route_replay`).
        routes_need_devices: whether it does so on accelerators only.
        routes_need_prefixes: whether it does so only if it caches prefixes, and drops them at a switch of the weights.
        gives_supports: whether it returns the tokens among which each token was drawn (`model.support_replay`).
        adapts_experts: whether it serves adapters of a mixture's experts in PEFT's form (`model.lora.targets`).
        reads_images: whether it takes prompts with ids of images (`data.image_store`).
        image_types: types of models for which it does, as in their config.json; empty for all.
        reports_context: whether it can serve one of `serve.sampling_models`, which have to say how long their context is.
        goes_on: whether it tells the tokens of unfinished samples, and goes on from them (`checkpoint.journal_running_s`).
        setup: command that makes the environment in which it is installed; "" if the user does.
    """

    inside: bool = False
    takes_changes: bool = False
    changes_in_place: bool = False
    takes_broadcasts: bool = False
    sleeps: bool = False
    forms: tuple[WeightForm, ...] = ()
    splits: bool = False
    batch_invariant: bool = False
    gives_routes: bool = False
    routes_need_devices: bool = False
    routes_need_prefixes: bool = False
    gives_supports: bool = False
    adapts_experts: bool = False
    reads_images: bool = False
    image_types: tuple[str, ...] = ()
    reports_context: bool = False
    goes_on: bool = False
    setup: str = ""


ENGINE_KINDS: Mapping[str, EngineKind] = MappingProxyType({
    "embedded": EngineKind(
        inside=True, takes_changes=True, changes_in_place=True, takes_broadcasts=True, sleeps=True, batch_invariant=True,
        gives_routes=True, gives_supports=True, adapts_experts=True, reads_images=True, reports_context=True, goes_on=True,
        forms=(WeightForm("int8", on_devices=False),)),
    "vllm": EngineKind(
        takes_changes=True, takes_broadcasts=True, sleeps=True, splits=True, reports_context=True, setup="make vllm",
        gives_routes=True, routes_need_devices=True, routes_need_prefixes=True,
        reads_images=True, image_types=("idefics3", "internvl", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm"),
        forms=(WeightForm("int8"), WeightForm("int4", formats=("bfloat16",)), WeightForm("fp8", formats=("bfloat16",)))),
    "sglang": EngineKind(splits=True),
})
"""All kinds by name."""

KIND_NAMES = tuple(ENGINE_KINDS)


def kinds_that(ability: str) -> str:
    """Return the names of all kinds with an ability, such as "embedded and vllm" for "sleeps"."""
    return " and ".join(name for name, kind in ENGINE_KINDS.items() if getattr(kind, ability))


def kinds_with_form(name: str) -> str:
    """Return the names of all kinds that round their weights to a form, such as "embedded and vllm" for "int8"."""
    return " and ".join(kind for kind, can in ENGINE_KINDS.items() if any(form.name == name for form in can.forms))
