"""The choices of a model's routers in training, counted: how even experts are used, how sure routers are, and how often a replay differs.

`RouterWatch` is made once for a model, and counts during the forward passes within `watching`. It reads what routers give, so that it works
for any family whose routers tell the experts that they choose, with a load-balancing loss or without. Called by `trainer.router_loss`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.model.route_replay import find_routers, last_choice, records_routes, unknown_in


class RouterWatch:
    """Sums over the tokens that run here; a prompt that samples share runs once.

    L = `num_layers` and E = `num_experts` are 0 for a model whose routers do not tell what they choose.
    """

    def __init__(self, model: PreTrainedModel, *, replays: bool) -> None:
        """Watch the routers of a model; `replays` says whether its rows bring routes."""
        routers = find_routers(model) if records_routes(model) else []
        self.num_layers, self.num_experts = len(routers), max((router.num_experts for router in routers), default=0)
        self._replays = replays
        self._is_on = False
        self._clear()
        for layer, router in enumerate(routers):
            self._watch(router, layer)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count in the body's forward pass, and not where activations are computed again."""
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def take(self) -> Tensor:
        """Return the sums since the last call, [L * E + 4] float64 on the CPU, which may be added over ranks for `metrics_of`."""
        sums = torch.cat([part.cpu() for part in (*self._counts, self._sums)])
        self._clear()
        return sums

    def metrics_of(self, sums: Tensor) -> dict[str, float]:
        """Return metrics by name, from sums as `take` returns them; those without a token are 0. `stats.merge` explains them."""
        counts_LE, rest = sums[:-4].view(self.num_layers, self.num_experts), sums[-4:].tolist()
        entropy, num_choices, agreed, num_known = rest
        busiest = counts_LE.max(dim=1).values / counts_LE.mean(dim=1).clamp(min=1e-9)
        found = {
            "router/load_imbalance": busiest.mean().item(),
            "router/unused_fraction": (counts_LE == 0).double().mean().item(),
            "router/entropy": entropy / max(num_choices, 1.0)}
        return found | ({"router/replay_agreement": agreed / max(num_known, 1.0)} if self._replays else {})

    def _clear(self) -> None:
        self._counts = [torch.zeros(self.num_experts, dtype=torch.float64)] * self.num_layers
        self._sums = torch.zeros(4, dtype=torch.float64)

    def _watch(self, router: nn.Module, layer: int) -> None:
        forward = router.forward

        @wraps(forward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            outputs = forward(*args, **kwargs)
            if self._is_on:
                self._note(layer, outputs)
            return outputs

        router.forward = watched

    @torch.no_grad()
    def _note(self, layer: int, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
        """Count what a router gives: logits [T, E], weights, and experts [T, k]."""
        logprobs_TE, experts = outputs[0].flatten(0, -2).float().log_softmax(-1), outputs[2].flatten()
        ones = torch.ones(len(experts), dtype=torch.float64, device=experts.device)
        counts = torch.zeros(self.num_experts, dtype=torch.float64, device=experts.device).index_add_(0, experts, ones)
        self._counts[layer] = self._counts[layer].to(counts.device) + counts
        entropy = -(logprobs_TE.exp() * logprobs_TE).sum().double()
        sums = [entropy, entropy.new_tensor(len(logprobs_TE)), *self._agreement(entropy)]
        self._sums = self._sums.to(entropy.device) + torch.stack(sums)

    def _agreement(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many of the experts that the router would have chosen are replayed, and how many could be; tensors [] float64."""
        choice = last_choice() if self._replays else None
        if choice is None:
            return torch.zeros_like(like), torch.zeros_like(like)
        own_TK, given_TK = choice
        is_known_TK = given_TK != unknown_in(given_TK)
        agrees_TK = (own_TK[:, :, None] == given_TK.long()[:, None, :]).any(dim=2) & is_known_TK
        return agrees_TK.sum().double(), is_known_TK.sum().double()
