"""Images in packed rows. Their numbers are compared with transformers' own, family by family, in `test_families`."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from image_world import World
from offbeat.config.train import TrainConfig
from offbeat.data.image_store import FIRST_ID
from offbeat.data.packing import pack_row
from offbeat.errors import DataError, ModelError
from offbeat.model.freeze import freeze
from offbeat.model.images import images_of
from offbeat.model.load import load_causal_lm
from offbeat.model.logprobs import token_logprobs
from offbeat.model.lora_targets import find_targets
from offbeat.trainer.policy import load_policy


@pytest.fixture(scope="module", params=["gemma3", "qwen3_vl"])
def world(request, tmp_path_factory):
    return World(tmp_path_factory.mktemp("images"), request.param)


def test_each_image_of_a_row_runs_once(world):
    before = images_of(world.policy).num_encoded
    with torch.no_grad():
        world.scored(world.policy, share_prefix=False)
    assert images_of(world.policy).num_encoded - before == 3


def test_other_images_give_other_log_probabilities(world):
    batch = world.batch()
    first, second = (each[each >= FIRST_ID] for each in (world.sequences[0], world.sequences[2]))
    own, other = (world.store.get(int(ids[0])) for ids in (first, second))
    if own.num_placeholders != other.num_placeholders:
        pytest.skip("the images have different numbers of placeholders")
    swapped = replace(batch, tokens=np.where(batch.tokens == own.id, other.id, batch.tokens))
    with torch.no_grad():
        plain, changed = (token_logprobs(world.policy, pack_row(each, share_prefix=True)) for each in (batch, swapped))
    assert (plain[:4] - changed[:4]).abs().max() > 1e-3


def test_a_placeholder_too_few_stops_the_pass(world):
    batch = world.batch()
    at = int(np.flatnonzero(batch.tokens >= FIRST_ID)[1])
    with pytest.raises(DataError, match="placeholders"):
        token_logprobs(world.policy, pack_row(replace(batch, tokens=np.where(np.arange(len(batch.tokens)) == at, 5, batch.tokens)),
                                              share_prefix=False))


def test_a_model_without_images_refuses_their_ids(world):
    model = load_causal_lm(str(world.folder))
    with pytest.raises(ModelError, match="was given none to read"):
        token_logprobs(model, pack_row(world.batch(), share_prefix=False))


def test_adapters_are_of_the_language_part(world):
    family = images_of(world.policy).family
    assert all(name.startswith(family.language) for name in find_targets(world.policy, ["all-linear"]))


def test_parts_are_frozen(world):
    model = load_policy(str(world.folder), config=TrainConfig(freeze=("language", "tower")), images=world.store.folder)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all(name.startswith(images_of(model).family.projector) for name in trained)
    token_logprobs(model, pack_row(world.batch(), share_prefix=True)).sum().backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if name in trained and "bias" not in name)
    with pytest.raises(ModelError, match="names all parts"):
        freeze(model, ["projector"])
