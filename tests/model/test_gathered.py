"""A divided model's whole twin gives what the model would give on one rank, keeps no weights, and shows if layers are divided wrongly."""

import pytest
import torch

from offbeat.errors import ModelError
from offbeat.model.gathered import whole_twin
from offbeat.model.load import load_causal_lm
from offbeat.model.parallel import check_slices, slice_layers
from offbeat.model.rows import probe, settle_rows
from offbeat.model.values import put_value_head
from offbeat.sync.mesh import ProcessGroups
from ranks import run_ranks
from train_samples import arranged, build_model


def _compare(groups: ProcessGroups, folder: str) -> None:
    mesh = arranged(groups, "tp2").mesh["tp"]

    def read(give_head=None):
        model = load_causal_lm(
            folder, attention=None, divide=lambda empty: slice_layers(empty, mesh, experts=False), give_head=give_head)
        settle_rows(model, share_prefix=True)
        return model

    for give_head in (None, put_value_head):
        model, whole = read(give_head), load_causal_lm(folder)
        if give_head is not None:
            give_head(whole)
        twin = whole_twin(model)
        torch.testing.assert_close(probe(twin), probe(whole), rtol=1e-5, atol=1e-5)
        own = {name for name, parameter in twin.named_parameters() if not parameter.is_meta}
        assert own == ({"placed"} if give_head is None else {"placed", "lm_head.weight", "lm_head.bias"}), "weights are let go"
        check_slices(model, mesh)
        layer = model.get_submodule("model.layers.1.mlp.down_proj")
        forward = layer.forward
        layer.forward = lambda x, forward=forward: forward(x) + torch.linspace(-1, 1, x.shape[1])[:, None]
        with pytest.raises(ModelError, match="Qwen3ForCausalLM gives the tokens over 2 ranks (states|log-probabilities) that are off by"):
            check_slices(model, mesh)


def test_a_twin_gives_what_the_undivided_model_would(tmp_path):
    run_ranks(_compare, world=2, argument=build_model(tmp_path))
