"""The embedded engine with images: what it samples is what the trainer scores."""

import numpy as np
import pytest
import torch

from image_models import file_of, make_folder, picture
from offbeat.config.train import TrainConfig
from offbeat.data.batch import Batch
from offbeat.data.image_sources import ImageSource
from offbeat.data.image_store import FIRST_ID
from offbeat.data.packing import pack_row
from offbeat.engine.loader import load_engine
from offbeat.engine.options import EngineOptions
from offbeat.engine.request import SamplingParams, ScoreJob
from offbeat.errors import RefusedError
from offbeat.model.images import IMAGE_FAMILIES
from offbeat.model.logprobs import token_logprobs
from offbeat.trainer.policy import load_policy
from shared_image_reader import reader_in_process


@pytest.fixture(scope="module", params=list(IMAGE_FAMILIES))
def world(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    folder = make_folder(root / "model", request.param)
    reader = reader_in_process(folder, root / "images")
    images = [reader.read(ImageSource(data=file_of(picture(seed, size=(40, 28)))), "row").tokens.tolist() for seed in range(2)]
    engine = load_engine(EngineOptions(
        model=str(folder), images=str(reader.store.folder), max_running=16, max_prefill_per_round=24, max_context=256))
    return folder, reader.store, images, engine


def scored(policy, prompt, answer):
    tokens = np.array([*prompt, *answer], np.int32)
    batch = Batch.of_next_tokens(tokens, np.arange(len(tokens)) >= len(prompt), lengths=[len(tokens)], columns={}, losses=())
    with torch.no_grad():
        return token_logprobs(policy, pack_row(batch, share_prefix=False)).tolist()


def test_samples_of_prompts_with_images_are_what_the_trainer_scores(world):
    folder, store, (one, other), engine = world
    policy = load_policy(str(folder), config=TrainConfig(), images=store.folder)
    text = [(5 + 3 * i) % 40 + 3 for i in range(21)]
    prompts = [[4, *one, 7, *text], [4, *one, 9], [4, *other, 9], [4, *text, *other, *one, 3, *text], [5, 6, 7]]
    for _ in range(2):  # the second time, beginnings of prompts are in the cache, also up to the middle of an image
        answers = engine.generate(prompts, SamplingParams(max_new_tokens=6, seed=3, ignore_eos=True), n=2)
        for prompt, outputs in zip(prompts, answers, strict=True):
            for output in outputs:
                assert output.logprobs == pytest.approx(scored(policy, prompt, output.token_ids), abs=1e-4)
    assert engine.num_cached_tokens > 0
    assert engine._forward._images.num_encoded == 2


def test_images_are_scored_for_proofs(world):
    folder, store, (one, _), engine = world
    policy = load_policy(str(folder), config=TrainConfig(), images=store.folder)
    tokens = [4, *one, 9, 8, 7]
    engine.submit(ScoreJob(id="s", tokens=tokens))
    [event] = [event for _ in range(5) if engine.has_work for event in engine.step()]
    assert event.result.logprobs[-2:] == pytest.approx(scored(policy, tokens[:-2], tokens[-2:]), abs=1e-4)


def test_an_engine_without_images_refuses_their_ids(world):
    folder, _, (one, _), _ = world
    engine = load_engine(EngineOptions(model=str(folder), max_context=64))
    with pytest.raises(RefusedError, match=f"prompt token {max(one)} is outside the vocabulary"):
        engine.generate([[4, *one, 9]], SamplingParams(max_new_tokens=1))


def test_a_stale_tower_has_another_fingerprint(world):
    *_, engine = world
    before = engine._forward.fingerprinter()()
    features = engine._forward._images._features
    state = {name: tensor.clone() for name, tensor in engine._forward.tensors().items()}
    tower = next(name for name in state if "vision_model" in name or "visual" in name)
    state[tower] += 0.1
    forward = engine._forward
    forward.install(forward.prepare(state))
    assert forward.fingerprinter()() != before
    assert not features
    assert forward.vocab_size < FIRST_ID
