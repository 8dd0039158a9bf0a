"""A value model: a causal language model whose head gives one number at each position instead of logits.

Built from a language model by `put_value_head`, also before it has weights, and checked by `check_value_head` once it has them; called by
trainers of critics and of reward models.
"""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from offbeat.data.packing import PackedRow
from offbeat.errors import ModelError
from offbeat.model.context import share_of
from offbeat.model.logprobs import head_outputs, scored_positions
from offbeat.model.uploads import upload

_PROBE = 3.0


class ValueHead(nn.Linear):
    """A linear layer to one number, which computes in float32 under autocast, too. It begins with zeros, so that every value is 0.

    A value of a layer with a bias is `mean` plus `scale`, [] float32 each, times the layer's output.
    """

    def __init__(self, hidden_size: int, *, bias: bool = True) -> None:
        super().__init__(hidden_size, 1, bias=bias)
        self.mean: Tensor
        self.scale: Tensor
        if bias:
            self.register_buffer("mean", torch.zeros(()))
            self.register_buffer("scale", torch.ones(()))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()

    def forward(self, input: Tensor) -> Tensor:  # the parameter name of nn.Linear
        """Map hidden states [..., H] to values [..., 1] float32."""
        with torch.autocast(input.device.type, enabled=False):
            values = linear(input.float(), self.weight, self.bias)
            return values.clone() if self.bias is None else self.mean + self.scale * values  # never a view, which FSDP2 warns about

    @torch.no_grad()
    def change_units(self, *, mean: float, scale: float) -> None:
        """Set `mean` and `scale`, and change weight and bias so that no value changes."""
        old_mean, old_scale = self.mean.item(), self.scale.item()
        self.weight.mul_(old_scale / scale)
        self.bias.mul_(old_scale / scale).add_((old_mean - mean) / scale)
        self.mean.fill_(mean)
        self.scale.fill_(scale)


def put_value_head(model: PreTrainedModel, *, bias: bool = True) -> None:
    """Replace the output head by a `ValueHead`, untied from the embeddings. Raises ModelError if there is no linear head to replace.

    The model may be one that has no weights yet.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(f"{type(model).__name__} has no linear output head, which a value model replaces; use another model")
    config = model.config.get_text_config()
    if getattr(config, "final_logit_softcapping", None) is not None:
        config.final_logit_softcapping = None  # it bounds logits, and a value has no bound
    model.config.tie_word_embeddings = config.tie_word_embeddings = False
    model.set_output_embeddings(ValueHead(head.in_features, bias=bias))


@torch.no_grad()
def check_value_head(model: PreTrainedModel) -> None:
    """Raise ModelError if the model changes its head's output; collective if the model is divided."""
    head = model.get_output_embeddings()
    assert isinstance(head, ValueHead), "the head has been replaced"
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    seen: list[Tensor] = []

    def probe(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        seen.append(torch.full_like(output, _PROBE))
        return seen[0]

    handle = head.register_forward_hook(probe)
    try:
        given = model(input_ids=tokens, use_cache=False).logits
    finally:
        handle.remove()
    if len(seen) != 1 or not torch.equal(given.float(), torch.full_like(given, _PROBE, dtype=torch.float32)):
        raise ModelError(f"{type(model).__name__} changes what its output head gives, so that it cannot give values; use another model")


def token_values(model: nn.Module, row: PackedRow) -> Tensor:
    """Return [M] float32 with gradient: the value at the position that predicts each of a row's targets, in the order of `row.target`.

    The model, bare or wrapped, has a `ValueHead`; the row is as for `offbeat.model.logprobs.token_logprobs`.
    """
    share = share_of(model, row)
    source, inverse = np.unique(share.source, return_inverse=True)
    outputs = head_outputs(model, share, scored_positions(source))[:, 0].float()
    return share.gather(outputs[upload(inverse, outputs.device)])
