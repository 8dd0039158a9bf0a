#!/usr/bin/env python3
"""Checks what `operator_schemas.py` cannot read from an import: private attributes of objects, names in strings, the order of arguments.

    python tools/private_interfaces.py [--json]

`INTERFACES` has each of them with the file that uses it. `tests/test_private_interfaces.py` reads the sources and demands that none is
missing. Nothing here imports `offbeat` or needs a device, so `make gpu-matrix` runs this file in environments with other versions of torch.
One line is printed for each interface; the exit code is 1 if one does not fit.
"""

import argparse
import importlib
import inspect
import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

from operator_schemas import resolve


@dataclass(frozen=True)
class Call:
    """One way to call an interface.

    Attributes:
        positional: names that the arguments given by position have there, in their order.
        keywords: names of the others.
        if_known: names of further arguments, given by position where the installed version knows them, and left out elsewhere.
        num_results: number of results that are taken apart; 0 for a call whose result is used as it is.
    """

    positional: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    if_known: tuple[str, ...] = ()
    num_results: int = 0


@dataclass(frozen=True)
class Interface:
    """One private or unstable interface.

    Attributes:
        name: an operator, "space::name" or "space::name.overload"; else the dotted name of a callable or an attribute.
        file: what uses it, below src/offbeat.
        calls: how; none for what is only read, subclassed or replaced.
        needs: a module whose import registers the operator.
        of: a maker of the object that has the attribute, where its class does not.
    """

    name: str
    file: str
    calls: tuple[Call, ...] = ()
    needs: str = ""
    of: Callable[[], Any] | None = None

    @property
    def is_operator(self) -> bool:
        """Whether it is called through torch's dispatcher, by a schema."""
        return "::" in self.name


def call(*positional: str, keywords: str = "", if_known: str = "", num_results: int = 0) -> Call:
    """Return a call; `keywords` and `if_known` are separated by spaces."""
    return Call(positional, tuple(keywords.split()), tuple(if_known.split()), num_results)


def _linear() -> Any:
    return importlib.import_module("torch").nn.Linear(1, 1)


def _storage() -> Any:
    return importlib.import_module("torch").zeros(1).untyped_storage()


def _overload() -> Any:
    return importlib.import_module("torch").ops.aten.mm.default


def _hf_config() -> Any:
    return importlib.import_module("transformers").PreTrainedConfig()


def _parser() -> Any:
    """Return something with the attributes that a parser of answers is given as it is made, which needs a template and a prompt."""
    made = importlib.import_module("transformers.utils.chat_parsing").ResponseParser.__init__
    return SimpleNamespace(**dict.fromkeys(made.__code__.co_names))


_VARLEN = "torch.nn.attention.varlen"
_SHAPES = ("cu_seq_q", "cu_seq_k", "max_q", "max_k", "is_causal")
_MODULE = "torch.nn.Module"
_HF_MODEL = "transformers.modeling_utils.PreTrainedModel"
_PARSER = "transformers.utils.chat_parsing.ResponseParser"
_KEPT = (
    "mm", "addmm", "bmm", "_grouped_mm", "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention")

INTERFACES = (
    # Operators whose arguments are many and given by position, and those that are named in strings.
    Interface("torch_attn::_varlen_attn", "model/varlen.py", (
        call("query", "key", "value", *_SHAPES, "scale", "window_size", if_known="enable_gqa", num_results=3),), needs=_VARLEN),
    Interface("torch_attn::_varlen_attn_backward", "model/varlen.py", (
        call("grad_out", "query", "key", "value", "out", "lse", *_SHAPES, "rng_state", "scale", "window_size", num_results=3),),
        needs=_VARLEN),
    Interface("torch_attn::_varlen_attn", "model/blocks.py", needs=_VARLEN),
    *(Interface(f"aten::{name}", "model/blocks.py") for name in _KEPT),
    Interface("torch._ops.OpOverload._schema", "model/blocks.py", of=_overload),
    # torch's Python.
    Interface("torch.UntypedStorage._cdata", "trainer/memory.py", of=_storage),
    Interface("torch.autograd.graph._engine_run_backward", "pulse.py"),
    Interface("torch.nn.parallel.distributed.DistributedDataParallel._pre_forward", "pulse.py"),
    Interface("torch.distributed.device_mesh.DeviceMesh._flatten", "sync/mesh.py", (call("self", "mesh_dim_name"),)),
    Interface("torch.distributed.tensor.DTensor._spec", "trainer/offload.py"),
    Interface("torch.distributed.checkpoint.FileSystemReader._get_metadata_path", "trainer/metadata.py", (call("self", "rank"),)),
    *(Interface(f"{_MODULE}._parameters", f"model/{name}.py", of=_linear)
      for name in ("expert_dispatch", "gathered", "images", "norm", "parallel")),
    *(Interface(f"{_MODULE}._buffers", f"model/{name}.py", of=_linear) for name in ("gathered", "parallel")),
    *(Interface(f"{_MODULE}.{name}", "model/head.py", of=_linear) for name in ("_forward_hooks", "_forward_pre_hooks")),
    # transformers.
    *(Interface("transformers.PreTrainedConfig._attn_implementation", file, of=_hf_config)
      for file in ("model/gathered.py", "model/images.py", "model/logprobs.py", "model/rows.py", "engine/forward_hf.py")),
    Interface(f"{_HF_MODEL}._no_split_modules", "model/blocks.py"),
    Interface(f"{_HF_MODEL}._keys_to_ignore_on_load_unexpected", "model/divided_read.py"),
    Interface(f"{_HF_MODEL}._resolve_parallel_plans", "model/parallel.py", (call("self", "distributed_config"),)),
    *(Interface(f"{_HF_MODEL}.{name}", "model/divided_read.py") for name in ("prepare_distribute_model", "maybe_distribute_model")),
    Interface("transformers.core_model_loading.WeightConverter.convert", "model/checkpoint_names.py", (
        call("self", "layer_name", keywords="model config"),)),
    Interface("transformers.models.mixtral.modeling_mixtral.MixtralExperts._apply_gate", "model/fused_experts.py", (
        call("self", "gate_up_out"),)),
    Interface("transformers.models.llava_onevision.LlavaOnevisionProcessor._get_number_of_features", "data/image_process.py", (
        call("self", "orig_height", "orig_width", "height", "width"),)),
    Interface(f"{_PARSER}.finalize", "chat/reading.py", (call("self"),)),
    Interface(f"{_PARSER}._scan", "chat/reading.py", (call("self", "watch", "eos"),)),
    *(Interface(f"{_PARSER}.{name}", "chat/reading.py", of=_parser) for name in ("_buffer", "_pos")),
)


def differences(interface: Interface) -> Iterator[str]:
    """Yield what does not fit in the installed versions, in a few words each."""
    try:
        found = _operator(interface) if interface.is_operator else _resolved(interface)
    except (ImportError, AttributeError, RuntimeError) as exc:
        yield f"is gone: {exc}"
        return
    check = partial(_schema_differences, found._schema) if interface.is_operator else partial(_signature_differences, found)
    for each in interface.calls:
        yield from check(each)


def _operator(interface: Interface) -> Any:
    """Return the overload that the interface names; that without a name is "default"."""
    if interface.needs:
        importlib.import_module(interface.needs)
    space, _, rest = interface.name.partition("::")
    name, _, overload = rest.partition(".")
    return getattr(getattr(getattr(importlib.import_module("torch").ops, space), name), overload or "default")


def _resolved(interface: Interface) -> Any:
    """Return the object that a dotted name means."""
    if interface.of is not None:
        return getattr(interface.of(), interface.name.rpartition(".")[2])
    return resolve(interface.name)


def _schema_differences(schema: Any, given: Call) -> Iterator[str]:
    names = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    wanted = [*given.positional, *(name for name in given.if_known if name in names)]
    if len(wanted) > len(names):
        yield f"takes {len(names)} arguments by position, and is given {len(wanted)}"
    for number, (name, there) in enumerate(zip(wanted, names, strict=False), start=1):
        if name != there:
            yield f"argument {number} is {there}, and not {name}"
    by_name = {argument.name for argument in schema.arguments}
    yield from (f"has no argument {name}" for name in given.keywords if name not in by_name)
    known = {*wanted, *given.keywords, *names[:len(wanted)]}
    yield from (
        f"wants {argument.name} too" for argument in schema.arguments if not argument.has_default_value() and argument.name not in known)
    if given.num_results and given.num_results != len(schema.returns):
        yield f"has {len(schema.returns)} results, and not {given.num_results}"


def _signature_differences(found: Any, given: Call) -> Iterator[str]:
    signature = inspect.signature(found)
    try:
        bound = signature.bind(*given.positional, **dict.fromkeys(given.keywords))
    except TypeError as exc:
        yield f"{exc}; it takes {signature}"
        return
    # Each argument by position is its own name here, so a parameter that got another one has been renamed or moved.
    for name, value in bound.arguments.items():
        if isinstance(value, str) and value != name:
            yield f"argument {value} is now {name}"
    unknown = [name for name in given.keywords if name not in signature.parameters]
    yield from (f"has no argument {name}, and takes it with others" for name in unknown)


def versions() -> dict[str, str]:
    """Return the versions that were looked at."""
    return {"python": platform.python_version()} | {name: version(name) for name in ("torch", "transformers")} | {
        "torch build": importlib.import_module("torch").__version__}


def main(argv: Sequence[str] | None = None, interfaces: Sequence[Interface] = INTERFACES) -> int:
    """Print a line for each interface, or one JSON object; returns the exit code."""
    parser = argparse.ArgumentParser(description="Check the private interfaces that Offbeat calls against the installed versions.")
    parser.add_argument("--json", action="store_true", help="print one JSON object: the versions, and by interface what differs")
    json_wanted = parser.parse_args(argv).json
    found = [(each, list(differences(each))) for each in interfaces]
    if json_wanted:
        print(json.dumps({"versions": versions(), "interfaces": [
            {"name": each.name, "file": each.file, "differences": wrong} for each, wrong in found]}))
    else:
        print(", ".join(f"{name} {number}" for name, number in versions().items()))
        for each, wrong in found:
            print(f"{each.name} ({each.file}): {'; '.join(wrong) or 'fits'}")
    return int(any(wrong for _, wrong in found))


if __name__ == "__main__":
    sys.exit(main())
