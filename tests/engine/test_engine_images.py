"""The embedded engine with images. That it samples what the trainer scores is tested, family by family, in `test_families` as well."""

import pytest

from image_world import World, score
from offbeat.data.image_store import FIRST_ID
from offbeat.engine.loader import load_engine
from offbeat.engine.options import EngineOptions
from offbeat.engine.request import SamplingParams, ScoreJob
from offbeat.errors import RefusedError


@pytest.fixture(scope="module", params=["gemma3", "qwen3_vl"])
def world(request, tmp_path_factory):
    return World(tmp_path_factory.mktemp("images"), request.param)


@pytest.fixture(scope="module")
def one(world):
    """The tokens of an image."""
    ids = world.sequences[0]
    return world.store.get(int(ids[ids >= FIRST_ID][0])).tokens.tolist()


def test_samples_of_prompts_with_images_are_what_the_trainer_scores(world):
    world.check_sampled()
    assert world.engine._forward._images.num_encoded == 2


def test_images_are_scored_for_proofs(world, one):
    tokens = [4, *one, 9, 8, 7]
    world.engine.submit(ScoreJob(id="s", tokens=tokens))
    [event] = [event for _ in range(5) if world.engine.has_work for event in world.engine.step()]
    assert event.result.logprobs[-2:] == pytest.approx(score(world.policy, tokens[:-2], tokens[-2:]).tolist(), abs=1e-4)


def test_an_engine_without_images_refuses_their_ids(world, one):
    engine = load_engine(EngineOptions(model=str(world.folder), max_context=64))
    with pytest.raises(RefusedError, match=f"prompt token {max(one)} is outside the vocabulary"):
        engine.generate([[4, *one, 9]], SamplingParams(max_new_tokens=1))


def test_a_stale_tower_has_another_fingerprint(world):
    forward = world.engine._forward
    before, features = forward.fingerprinter()(), forward._images._features
    state = {name: tensor.clone() for name, tensor in forward.tensors().items()}
    tower = next(name for name in state if "vision" in name or "visual" in name)
    state[tower] += 0.1
    forward.install(forward.prepare(state))
    assert forward.fingerprinter()() != before
    assert not features
    assert forward.vocab_size < FIRST_ID
