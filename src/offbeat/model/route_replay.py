"""Routers of a mixture of experts: which experts they choose, and the replay of experts that an engine has chosen.

The embedded engine records choices with `RouteRecorder`. `load_policy` lets a model replay them with `replay_routes`: from then on the
routers of each row with routes (`PackedRow.routes`) take the given experts in place of their own, and weigh them by their own scores, so
that the routers' weights have their gradient. Tokens of unknown routes, and rows without routes, are routed as before.

All routers of transformers choose by `torch.topk` over the experts' scores, and go on from its values or indices. A replay answers this
one call with the given experts and the scores at their places, so that every family keeps its own rule for weights. A router whose
weights do not follow is refused when it is loaded.

Source: Rollout Routing Replay, arXiv:2510.11370.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from offbeat.data.expert_routes import route_dtype
from offbeat.errors import ModelError

_TOP_K = (torch.topk, torch.Tensor.topk)


def find_routers(model: nn.Module) -> list[Any]:
    """Return the routers of a model that choose `top_k` of `num_experts` experts, in the order of the layers; [] for a dense model."""
    return [module for module in model.modules() if _is_router(module)]


def _is_router(module: Any) -> bool:
    sizes = (getattr(module, "top_k", None), getattr(module, "num_experts", None))
    weight = getattr(module, "weight", None)
    return all(isinstance(size, int) for size in sizes) and isinstance(weight, nn.Parameter) and weight.shape[0] == sizes[1]


class RouteRecorder:
    """Collects the experts that a model's routers choose in a forward pass: `num_ids` = K per token, 0 for a model without routers."""

    def __init__(self, model: nn.Module) -> None:
        routers = find_routers(model)
        self.num_ids = sum(router.top_k for router in routers)
        self.dtype = torch.from_numpy(np.zeros(0, route_dtype(max((router.num_experts for router in routers), default=0)))).dtype
        self._chosen: list[Tensor] = []
        for router in routers:
            router.register_forward_hook(self._note)

    def clear(self) -> None:
        """Forget the last forward pass."""
        self._chosen.clear()

    def routes(self) -> Tensor:
        """Return the routes of the T tokens since `clear`, [T, K] of `dtype`."""
        return torch.cat(self._chosen, dim=1).to(self.dtype)

    def _note(self, _router: nn.Module, _inputs: Any, outputs: Any) -> None:
        self._chosen.append(outputs[2].flatten(0, -2))


def records_routes(model: nn.Module) -> bool:
    """Whether a model has routers, and each tells the experts that it chooses, [T, k] integers, as the third of its results."""
    routers = find_routers(model)
    return bool(routers) and all(_tells(router, model) for router in routers)


def _tells(router: Any, model: Any) -> bool:
    outputs: Any = None
    with _own_code():
        outputs = _fresh(router, model)(_states(router))
    return _are_complete(outputs) and outputs[2].shape == (_NUM_PROBED, router.top_k)


def _are_complete(outputs: Any) -> bool:
    """Whether a router gives logits, weights and experts."""
    return isinstance(outputs, tuple) and len(outputs) == 3


class _Current(threading.local):
    """What this thread's routers replay.

    Attributes:
        routes: those of the row whose layers run, [T, K] on the model's device; None to choose.
        choice: the last router's own experts and those that it was given, [T, k] each; None if it chose.
        log: notes the experts of routers that choose; None to note nothing.
    """

    routes: Tensor | None = None
    choice: tuple[Tensor, Tensor] | None = None
    log: "RouteLog | None" = None


_current = _Current()


def set_routes(routes: Tensor | None) -> None:
    """Let the routers that follow in this thread replay `routes` [T, K], or choose with None.

    Each layer's attention calls it before the layer's router runs, also where activations are computed again.
    """
    _current.routes = routes


def last_choice() -> tuple[Tensor, Tensor] | None:
    """Return the experts that this thread's last router would have chosen, and those that it replayed, [T, k] each; None if it chose."""
    return _current.choice


class RouteLog:
    """The experts that a model which can replay chooses in a forward pass of this thread."""

    def __init__(self) -> None:
        self._chosen: list[Tensor] = []
        self._num_routers = 0
        self._dtype = np.dtype(np.uint8)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note what routers choose in the body, instead of what was noted before."""
        self._chosen = []
        _current.log = self
        try:
            yield
        finally:
            _current.log = None

    def add_choice(self, experts: Tensor, *, num_routers: int, num_experts: int) -> None:
        """Note the experts [T, k] that one of the model's routers has chosen."""
        self._chosen.append(experts)
        self._num_routers, self._dtype = num_routers, route_dtype(num_experts)

    def last_routes(self) -> np.ndarray:
        """Return the routes [T, K] of the last forward pass; a pass may have begun anew with another head."""
        return torch.cat(self._chosen[-self._num_routers :], dim=1).cpu().numpy().astype(self._dtype)


def unknown_in(routes: Tensor) -> int:
    """Return the id that stands for an unknown route in a tensor of routes."""
    return torch.iinfo(routes.dtype).max


def replay_routes(model: PreTrainedModel) -> None:
    """Let a model replay the routes of its rows. Raises ModelError if it has no routers, or some whose choice cannot be replaced."""
    name, routers = type(model).__name__, find_routers(model)
    if not routers:
        raise ModelError(f'{name} has no routers of experts to replay; set model.route_replay to "off"')
    if len({router.top_k for router in routers}) > 1:
        raise ModelError(f'{name} uses different numbers of experts in its layers; set model.route_replay to "off"')
    if why := _why_not(routers[0], model):
        raise ModelError(f'{name} cannot replay experts: {why}; set model.route_replay to "off"')
    layers = _layers_of(model, routers)
    num_layers, top_k = model.config.get_text_config().num_hidden_layers, routers[0].top_k
    for place, (layer, router) in enumerate(zip(layers, routers, strict=True)):
        # An engine tells the layers that have experts, or all layers, of which the others mean nothing.
        places = {len(routers) * top_k: place, num_layers * top_k: layer}
        columns = {width: slice(first * top_k, (first + 1) * top_k) for width, first in places.items()}
        _replay(router, num_routers=len(routers), columns=columns)


def _layers_of(model: nn.Module, routers: Sequence[nn.Module]) -> list[int]:
    """Return the number of each router's layer, such as 3 of "model.layers.3.mlp.gate"."""
    names = {id(module): name for name, module in model.named_modules()}
    return [int(next(part for part in names[id(router)].split(".") if part.isdigit())) for router in routers]


def _replay(router: Any, *, num_routers: int, columns: Mapping[int, slice]) -> None:
    """Let one router take its experts from the current routes; `columns` are its own, by the number of ids per token."""
    forward, num_experts = router.forward, router.num_experts

    @wraps(forward)
    def replaying(*args: Any, **kwargs: Any) -> Any:
        _current.choice = None
        if _current.routes is None:
            outputs = forward(*args, **kwargs)
            if _current.log is not None:
                _current.log.add_choice(outputs[2], num_routers=num_routers, num_experts=num_experts)
            return outputs
        if (own := columns.get(_current.routes.shape[1])) is None:
            raise ModelError(
                f"the engine gave {_current.routes.shape[1]} experts for each token, where this model uses {min(columns)}; it serves"
                " another model")
        with choosing(_current.routes[:, own], num_experts) as given:
            outputs = forward(*args, **kwargs)
        _current.choice = given.own, _current.routes[:, own]
        return outputs

    router.forward = torch.compiler.disable(replaying)


@contextmanager
def choosing(routes_TK: Tensor, num_experts: int) -> "Iterator[_Given]":
    """Let the router called in the body choose given ids [T, k] of `num_experts` experts; those of unknown tokens are its own choice."""
    with _Given(routes_TK, num_experts) as given:
        yield given
    assert given.num_calls == 1, f"a router chose {given.num_calls} times instead of once"


class _Given(TorchFunctionMode):
    """Answers the choice of k of E experts, by scores [T, E], with given ones; `own` [T, k] int64 are those that would have been chosen."""

    own: Tensor

    def __init__(self, routes_TK: Tensor, num_experts: int) -> None:
        super().__init__()
        self.num_calls = 0
        self._routes_TK = routes_TK
        self._num_experts = num_experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        chosen = func(*args, **(kwargs or {}))
        if func not in _TOP_K or args[0].dim() != 2 or args[0].shape[1] != self._num_experts:
            return chosen
        self.num_calls += 1
        if len(self._routes_TK) != len(args[0]):
            raise ModelError(f"the routes of {len(self._routes_TK)} tokens were given to a router that has {len(args[0])}")
        self.own = chosen.indices
        experts_TK = torch.where(self._routes_TK == unknown_in(self._routes_TK), chosen.indices, self._routes_TK.long())
        return torch.return_types.topk((args[0].gather(1, experts_TK), experts_TK))  # pyright: ignore


_NUM_PROBED = 16
_RAW_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, NotImplementedError, AssertionError)


def _why_not(router: Any, model: PreTrainedModel) -> str:
    """Return why the choice of a router cannot be replaced; empty if it can."""
    kind, fresh, states, plain = type(router).__name__, None, None, None
    with _own_code():
        fresh, states = _fresh(router, model), _states(router)
        plain = fresh(states)
    if fresh is None:
        return f"a {kind} cannot be made by itself to be checked"
    if not _are_complete(plain):
        return f"a {kind} does not tell the experts that it chooses"
    num_experts, own = router.num_experts, plain[2].detach()
    for experts in (own, (own + 1) % num_experts):
        outputs: Any = None
        with _own_code(), choosing(experts, num_experts):
            outputs = fresh(states)
        if outputs is None:
            return f"a {kind} does not choose by scores that could be read at given experts"
        if not torch.equal(outputs[2], experts) or (experts is own and not torch.equal(outputs[1], plain[1])):
            return f"a {kind} does not compute with the experts that it is given"
        if not (outputs[1] > 0).all() or not outputs[1].requires_grad:
            return f"a {kind} gives other experts than its own no weight"
    return ""


def _fresh(router: nn.Module, model: Any) -> nn.Module:
    """Return a router of the same kind on the CPU with random weights."""
    with torch.random.fork_rng(), torch.inference_mode(mode=False):
        torch.manual_seed(0)
        fresh = type(router)(model.config.get_text_config())  # pyright: ignore
        for parameter in fresh.parameters():
            parameter.data = torch.randn(parameter.shape)
    return fresh


def _states(router: Any) -> Tensor:
    return torch.randn(_NUM_PROBED, router.weight.shape[1], generator=torch.Generator().manual_seed(0))


@contextmanager
def _own_code() -> Iterator[None]:
    """Run code of a model's family outside of inference mode, and end the body where it raises."""
    with suppress(*_RAW_ERRORS), torch.inference_mode(mode=False), torch.enable_grad():
        yield
