"""Which strategy is chosen, and that FSDP2 shards every decoder layer. That strategies compute the same is tested with `ModelTrainer`."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from offbeat.errors import ModelError
from offbeat.model.load import load_causal_lm
from offbeat.trainer.strategies import Alone, Sharded, choose, whole
from ranks import run_alone
from train_samples import TINY, build_model


@pytest.mark.parametrize("name, kind", [("ddp", Alone), ("fsdp", Sharded)])
def test_one_rank_holds_the_model_bare_or_sharded(name, kind, tmp_path):
    model = load_causal_lm(build_model(tmp_path))
    strategy = run_alone(lambda groups, _: choose(name, model, groups=groups))
    assert type(strategy) is kind
    assert strategy.model is model


def test_a_model_whose_sequences_run_one_by_one_is_not_sharded(tmp_path):
    model = load_causal_lm(build_model(tmp_path), attention=None)
    with pytest.raises(ModelError, match=r'cannot pack its rows, which train.strategy = "fsdp" needs; use "ddp"'):
        run_alone(lambda groups, _: choose("fsdp", model, groups=groups))


def test_every_decoder_layer_is_a_unit_of_its_own(tmp_path):
    model = load_causal_lm(build_model(tmp_path))
    weight = model.get_input_embeddings().weight.detach().clone()

    def check(groups, _):
        strategy = choose("fsdp", model, groups=groups)
        units = [module for module in strategy.model.modules() if isinstance(module, FSDPModule)]
        assert len(units) == TINY.num_layers + 1
        sharded = strategy.model.get_input_embeddings().weight
        assert isinstance(sharded, DTensor)
        assert torch.equal(whole(sharded.detach()), weight)

    run_alone(check)
