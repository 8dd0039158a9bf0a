"""Divides a model over the ranks of a tensor group, by the plan that transformers has for its architecture.

Called by the trainer before a model is distributed in any other way, before or after its weights are read. After
that every parameter is a DTensor on the group's mesh: sliced where the plan says so, whole elsewhere. Attention, which sees fewer heads,
and everything else is called as before, with the same rows on every rank. Experts are sliced as all other layers, or each stays whole on
one rank. The model's log-probabilities are compared with the undivided model's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, apply_tensor_parallelism

from offbeat.errors import ModelError, first_line
from offbeat.model.gathered import whole_twin
from offbeat.model.head import local_part
from offbeat.model.images import is_language
from offbeat.model.layer_slices import note_division
from offbeat.model.rows import RAW_ERRORS, check_rows, probe

_PARTIAL = "replicated_with_grad_allreduce"
"""Transformers' name for parameters that are whole on every rank, which sees only its own heads' part of their gradient. Its own way of
adding these parts counts them again with every micro-batch."""

_HEAD = "colwise_gather_output"

Plan = dict[str, str]


def divide(model: PreTrainedModel, mesh: DeviceMesh, *, experts: bool) -> None:
    """Slice a whole model's layers in place, and check the result; collective over `mesh`, whose ranks hold equal models.

    Raises:
        ModelError: as `slice_layers`, or the model's log-probabilities have changed.
    """
    expected = probe(model)
    slice_layers(model, mesh, experts=experts)
    with _explained(model, mesh):
        check_rows(model, probe(model), expected, what=f"over {mesh.size()} ranks")


def check_slices(model: PreTrainedModel, mesh: DeviceMesh, *, computes: torch.dtype | None = None) -> None:
    """Check a model that `slice_layers` divided before its weights were read; collective over all ranks that hold parts of it.

    `computes` is as for `offbeat.model.rows.settle_rows`. Raises ModelError if log-probabilities differ from the undivided model's.
    """
    with _explained(model, mesh):
        check_rows(model, probe(model), probe(whole_twin(model)), what=f"over {mesh.size()} ranks", computes=computes)


def slice_layers(model: PreTrainedModel, mesh: DeviceMesh, *, experts: bool) -> None:
    """Slice a model's layers in place; collective over `mesh`, of one dimension. The model may be one that has no weights yet.

    With `experts`, each expert of a mixture stays whole, on one of the ranks.

    Raises:
        ModelError: transformers has no plan for the model, or its sizes do not suit the number of ranks.
    """
    plan, expert_plan = _plans(model, mesh.size(), experts=experts)
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and head.weight is embeddings.weight
    head_name = next((name for name, module in model.named_modules() if module is head), "")
    slices_head = plan.pop(head_name, None) is not None and type(head) is nn.Linear
    if tied or not slices_head:
        plan = {name: style for name, style in plan.items() if not name.startswith(f"{head_name}.")}
    partial = {name for name, style in plan.items() if style == _PARTIAL}
    with _explained(model, mesh):
        apply_tensor_parallelism(model, mesh, {name: style for name, style in plan.items() if style != _PARTIAL})
        if experts:
            apply_expert_parallelism(model, mesh, mesh, expert_plan)
        if tied and head is not None:
            head._parameters["weight"] = embeddings._parameters["weight"]
            slices_head = type(head) is nn.Linear  # as it must, if the embeddings are in slices
        if slices_head and head is not None and isinstance(head.weight, DTensor):
            if head.weight.placements[0].is_shard(1):
                raise ModelError(
                    f"{type(model).__name__} shares its head with embeddings that transformers' plan slices by width, which a head cannot"
                    " compute with; set train.parallel.tp to 1")
            ALL_PARALLEL_STYLES[_HEAD].install_forward(head, mesh)
        _keep_others_whole(model, mesh, partial)
        for module in model.modules():  # parameters are on the mesh's device by now, unless there are none yet
            module._buffers.update({
                name: buffer.to(mesh.device_type) for name, buffer in module._buffers.items() if buffer is not None and not buffer.is_meta})
        note_division(model, mesh, plan | expert_plan)


@contextmanager
def _explained(model: PreTrainedModel, mesh: DeviceMesh) -> Iterator[None]:
    """Turn errors of transformers into one sentence about the model."""
    try:
        yield
    except ModelError:
        raise
    except RAW_ERRORS as exc:
        raise ModelError(
            f"{type(model).__name__} cannot be divided over {mesh.size()} ranks by transformers' plan: {first_line(exc)}; set"
            " train.parallel.tp to 1") from exc


def _plans(model: PreTrainedModel, size: int, *, experts: bool) -> tuple[Plan, Plan]:
    """Return the plans for all layers and for experts, by the names of modules and parameters."""
    name, config = type(model).__name__, model.config.get_text_config()
    if not model.tp_plan:
        raise ModelError(f"transformers has no plan to divide {name} by tensors; set train.parallel.tp to 1 and use train.parallel.shard")
    if experts and not model.ep_plan:
        raise ModelError(f"transformers has no plan to divide the experts of {name}; set train.parallel.ep to 1")
    for what in ("num_attention_heads", "num_key_value_heads"):
        if isinstance(count := getattr(config, what, None), int) and count % size:
            raise ModelError(f"train.parallel.tp must divide {what} = {count} of {name}, got {size}; use a divisor")
    try:
        plan, expert_plan, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=size, ep_size=size if experts else 1))
        plan, expert_plan = ({key: style for key, style in each.items() if is_language(model.config, key)} for each in (plan, expert_plan))
    except ValueError as exc:
        raise ModelError(f"{name} cannot be divided over {size} ranks: {first_line(exc)}; set train.parallel.tp to 1") from exc
    if packed := sorted(key for key, style in plan.items() if style.startswith("packed")):
        raise ModelError(
            f"{name} fuses weights ({packed[0]}) whose slices interleave, which checkpoints cannot hold; "
            + ("set train.parallel.ep = train.parallel.tp, so that experts stay whole" if model.ep_plan else "set train.parallel.tp to 1"))
    return plan, expert_plan


def _keep_others_whole(model: nn.Module, mesh: DeviceMesh, partial: set[str]) -> None:
    """Make DTensors of the parameters that are not sliced, and let their modules compute with them as plain tensors.

    Gradients of the modules named in `partial` are summed over the ranks.
    """
    seen: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        plain = {key: each for key, each in module._parameters.items() if each is not None and not isinstance(each, DTensor)}
        for key, parameter in plain.items():
            if id(parameter) not in seen:
                whole = DTensor.from_local(parameter.detach(), mesh, [Replicate()], run_check=False)
                seen[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            module._parameters[key] = seen[id(parameter)]
        if plain:
            _compute_locally(module, tuple(plain), mesh.get_group() if name in partial else None)


def _compute_locally(module: nn.Module, names: tuple[str, ...], group: dist.ProcessGroup | None) -> None:
    forward = module.forward

    @wraps(forward)
    def on_local(*args: Any, **kwargs: Any) -> Any:
        with _local(module, names, group):
            return forward(*args, **kwargs)

    module.forward = on_local


@contextmanager
def _local(module: nn.Module, names: tuple[str, ...], group: dist.ProcessGroup | None) -> Iterator[None]:
    held: dict[str, Any] = module._parameters
    kept = {name: held[name] for name in names}
    for name, parameter in kept.items():
        local = local_part(parameter)
        held[name] = local if group is None else _SumGradient.apply(local, group)
    try:
        yield
    finally:
        held.update(kept)


class _SumGradient(torch.autograd.Function):
    """Returns x; its gradient is summed over a group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        summed = grads[0].contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None
