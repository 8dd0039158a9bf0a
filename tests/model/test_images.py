"""Images in packed rows: log-probabilities and gradients equal transformers' own forward of each sequence alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from image_models import file_of, make_folder, picture
from offbeat.config.train import TrainConfig
from offbeat.data.batch import Batch, SharedPrompts
from offbeat.data.image_sources import ImageSource
from offbeat.data.image_store import FIRST_ID, find_images
from offbeat.data.packing import pack_row
from offbeat.errors import DataError, ModelError
from offbeat.model.freeze import freeze
from offbeat.model.images import IMAGE_FAMILIES, images_of
from offbeat.model.load import load_causal_lm
from offbeat.model.logprobs import packs_rows, token_logprobs
from offbeat.model.lora import find_targets
from offbeat.trainer.policy import load_policy
from shared_image_reader import reader_in_process

TEXT, ANSWERS = [5, 9, 20, 3], [[8, 19, 2, 30], [21, 7, 9], [6, 12]]


class World:
    """A model of a family, and a batch: two answers share a prompt of two images, and a third has another image."""

    def __init__(self, folder, family):
        self.folder = make_folder(folder / family, family)
        reader = reader_in_process(self.folder, folder / f"{family}.images")
        self.store = reader.store
        images = [reader.read(ImageSource(data=file_of(picture(seed, size=size))), "row").tokens
                  for seed, size in enumerate([(40, 28), (28, 40), (30, 30)])]
        prompts = [[4, *images[0], *TEXT, *images[1], 11], [7, *images[2], *TEXT]]
        self.sequences = [np.array([*prompts[prompt], *answer], np.int32) for prompt, answer in zip((0, 0, 1), ANSWERS, strict=True)]
        self.prompt_lens = [len(prompts[prompt]) for prompt in (0, 0, 1)]
        self.policy = load_policy(str(self.folder), config=TrainConfig(), images=self.store.folder)

    def batch(self):
        trained = np.concatenate([np.arange(len(each)) >= start for each, start in zip(self.sequences, self.prompt_lens, strict=True)])
        return Batch.of_next_tokens(
            np.concatenate(self.sequences), trained, lengths=list(map(len, self.sequences)), columns={}, losses=(),
            shared=SharedPrompts(np.array([0, 0, 1]), np.array(self.prompt_lens)))

    def alone(self, model):
        """Log-probabilities of the answers by transformers' forward of each sequence with its processor's arrays."""
        found, token = [], model.config.image_token_id
        for sequence, start in zip(self.sequences, self.prompt_lens, strict=True):
            images = [image for image, _ in find_images(sequence, self.store)]
            tokens = torch.from_numpy(np.where(sequence >= FIRST_ID, token, sequence).astype(np.int64))[None]
            arrays = {
                name: torch.from_numpy(np.concatenate([image.arrays[name] for image in images], axis=axis))
                for name, axis in IMAGE_FAMILIES[model.config.model_type].joins.items() if name in images[0].arrays}
            kinds = {"mm_token_type_ids": (tokens == token).int()} if "image_grid_thw" in arrays else {}
            logits = model(input_ids=tokens, use_cache=False, **arrays, **kinds).logits[0]
            found.append(logits.log_softmax(-1)[start - 1 : -1].gather(1, tokens[0, start:, None])[:, 0])
        return torch.cat(found)


@pytest.fixture(scope="module", params=list(IMAGE_FAMILIES))
def world(request, tmp_path_factory):
    return World(tmp_path_factory.mktemp("images"), request.param)


@pytest.fixture(scope="module")
def reference(world):
    model = AutoModelForImageTextToText.from_pretrained(world.folder, attn_implementation="eager").eval()
    logprobs = world.alone(model)
    logprobs.sum().backward()
    return model, logprobs.detach()


@pytest.mark.parametrize("share_prefix", [True, False])
def test_log_probabilities_and_gradients_are_those_of_each_sequence_alone(world, reference, share_prefix):
    model, expected = reference
    policy = world.policy
    assert packs_rows(policy)
    policy.zero_grad()
    before = images_of(policy).num_encoded
    logprobs = token_logprobs(policy, pack_row(world.batch(), share_prefix=share_prefix))
    assert images_of(policy).num_encoded - before == 3
    order = torch.from_numpy(pack_row(world.batch(), share_prefix=share_prefix).batch_index)
    assert torch.allclose(logprobs[order], expected, atol=1e-5, rtol=0)
    logprobs.sum().backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in policy.named_parameters():
        if wanted[name] is not None:
            assert (parameter.grad - wanted[name]).norm() <= 1e-5 * max(wanted[name].norm(), 1), name
    assert any(name.startswith(images_of(policy).family.tower) and grad is not None and grad.norm() > 0 for name, grad in wanted.items())


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
