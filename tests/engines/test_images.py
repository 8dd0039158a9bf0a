"""vLLM with images in prompts, of every family that it takes, against the trainer."""

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from contract import WITH_VLLM, Engine, run_in_vllm, vllm_group
from image_models import file_of, make_folder, picture
from image_world import World, score
from offbeat.config.engine_kinds import ENGINE_KINDS
from offbeat.data import wire
from offbeat.data.image_sources import ImageSource
from offbeat.data.image_store import FIRST_ID, StoredImage, images_folder
from offbeat.errors import EngineError, RefusedError
from offbeat.inference.client import EngineClient
from offbeat.inference.dialects.vllm import VllmDialect
from offbeat.inference.sampling import Sample, Sampling
from offbeat.model.images import images_of
from offbeat.trainer.policy import canary_logprobs
from offbeat.trainer.snapshots import ModelSnapshot
from offbeat.trainer.state import full_state
from offbeat.weights.proof import ProofJudge
from offbeat.weights.protocol import Manifest, Proof
from shared_image_reader import reader_in_process
from small_run import small_config

pytestmark = [pytest.mark.timeout(400), pytest.mark.skipif(not WITH_VLLM, reason="make test-vllm runs it")]
TIMEOUT_S = 60.0
FAMILIES = ENGINE_KINDS["vllm"].image_types


@pytest.fixture(scope="module", params=[
    pytest.param(name, marks=() if name == "qwen2_5_vl" else pytest.mark.whole_run) for name in FAMILIES])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, Engine]]:
    """A model of each family in the trainer, and vLLM with it as a run starts it."""
    root = tmp_path_factory.mktemp(request.param)
    model = str(make_folder(root / request.param, request.param, head_dim=32))
    world = World(root, request.param, store=images_folder(small_config(root, model).run_dir))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")  # for /collective_rpc
        with vllm_group(root, (model, {})) as [(url, key)]:
            yield world, Engine("vllm", url, VllmDialect(model=model, whole_weights=True, lora=False), model, model, key=key)


def check_samples(world: World, engine: Engine, prompts: list[list[int]]) -> None:
    """Compare the log-probabilities of samples of prompts that run beside each other with the trainer's."""

    async def body(client: EngineClient) -> list[list[Sample]]:
        return await asyncio.gather(*(client.generate(tuple(p), Sampling(6, ignore_eos=True), n=2, timeout_s=TIMEOUT_S) for p in prompts))

    for prompt, samples in zip(prompts, engine.run(body), strict=True):
        for sample in samples:
            found, wanted = torch.tensor(sample.logprobs), score(world.policy, prompt, sample.token_ids)
            assert torch.allclose(found, wanted, atol=1e-4, rtol=0), (found - wanted).abs().max()


def test_log_probabilities_of_samples_are_the_trainers(served: tuple[World, Engine]) -> None:
    world, engine = served
    one, other = (world.store.get(int(ids[ids >= FIRST_ID][0])).tokens.tolist() for ids in world.sequences[::2])
    text = [(5 + 3 * i) % 40 + 3 for i in range(21)]
    prompts = [[4, *one, 7, *text], [4, *one, 9], [4, *other, 9], [4, *text, *other, *one, 3, *text], [5, 6, 7]]
    for _ in range(2):  # the second time, beginnings of prompts are in the cache
        check_samples(world, engine, prompts)


def test_images_that_are_not_what_was_trained_on_are_refused(served: tuple[World, Engine]) -> None:
    world, engine = served
    reader = reader_in_process(world.folder, world.store.folder)
    images = [reader.read(ImageSource(data=file_of(picture(seed, size=(40, 28)))), "row") for seed in (11, 12, 13, 14)]
    resized, swapped, short, gone = images
    values = resized.arrays["pixel_values"]
    write(world, replace(resized, arrays=resized.arrays | {"pixel_values": values[..., ::2].repeat(2, axis=-1)}))
    write(world, replace(swapped, arrays=short.arrays))
    (world.store.folder / f"{gone.id}.image").unlink()
    tokens = short.tokens.tolist()
    last = max(place for place, token in enumerate(tokens) if token == short.id)
    cut = tokens[:last] + tokens[last + 1 :]
    shown = world.reference.config.image_token_id
    for prompt, sentence in (
        (resized.tokens.tolist(), "holds other pixel values than those that its id stands for"),
        (swapped.tokens.tolist(), "holds other pixel values than those that its id stands for"),
        (cut, f"has {short.num_placeholders - 1} placeholders in a row of image {short.id}, which has {short.num_placeholders}"),
        (gone.tokens.tolist(), f"image {gone.id} is not in"),
        ([*tokens, shown], f"the prompt has the image token {shown} where no image is"),
    ):
        with pytest.raises(RefusedError, match=sentence):
            engine.run(partial(generate_one, prompt=(4, *prompt, 9)))
    check_samples(world, engine, [[4, *tokens, 9]])


def test_a_version_with_a_new_tower_is_served_and_proven_and_a_stale_tower_is_not(served: tuple[World, Engine], tmp_path: Path) -> None:
    world, engine = served
    prompt = world.sequences[2][: world.prompt_lens[2]].tolist()
    check_samples(world, engine, [prompt])  # its features are kept from now on
    tower = images_of(world.policy).family.tower
    with torch.no_grad():
        for name, parameter in world.policy.named_parameters():
            parameter.mul_(1.25 if name.startswith(tower) else 1.01)
    snapshot = ModelSnapshot(world.policy, world.folder, full_state(world.policy, dtype="float32", keep=True), "float32")
    snapshot.write(tmp_path / "v1")
    canary = tuple(map(int, world.sequences[0]))
    manifest = Manifest(engine.next_version, str(tmp_path / "v1"), snapshot.fingerprint(), canary, canary_logprobs(world.policy, canary))

    async def publish(client: EngineClient) -> Proof:
        await client.stage(manifest, timeout_s=TIMEOUT_S)
        await client.switch(manifest, interrupt="recompute", timeout_s=TIMEOUT_S)
        return await client.prove(canary, timeout_s=TIMEOUT_S)

    verdict = ProofJudge(tolerance=1e-3).judge("engine 0", manifest, engine.run(publish))
    assert verdict.by_weights and verdict.gap < 1e-4, "all weights can be read back, the tower's included"
    check_samples(world, engine, [prompt])

    with safe_open(tmp_path / "v1" / "model.safetensors", "pt") as new, safe_open(world.folder / "model.safetensors", "pt") as old:
        stale = {name: (old if any(part in name for part in ("vision", "visual")) else new).get_tensor(name) for name in new.keys()}  # noqa: SIM118
    (tmp_path / "stale").mkdir()
    save_file(stale, tmp_path / "stale" / "model.safetensors")
    load_behind(engine, tmp_path / "stale")
    with pytest.raises(EngineError, match="are not what was read"):
        engine.run(lambda client: client.prove(canary, timeout_s=TIMEOUT_S))


def test_a_server_without_a_folder_and_a_model_of_another_type_say_so() -> None:
    told = run_in_vllm("-c", """
import torch
from vllm.exceptions import VLLMValidationError
from vllm_images import ImagePrompts
for folder, kind in (("", "qwen3_vl"), ("/tmp", "gemma3")):
    prompts = ImagePrompts(folder, model_type=kind, token=7, dtype=torch.float32)
    assert prompts.read({"type": "token", "prompt_token_ids": [5, 7]})["prompt_token_ids"] == [5, 7]
    try:
        prompts.read({"type": "token", "prompt_token_ids": [5, 1 << 30]})
    except VLLMValidationError as exc:
        print(exc)
""")
    assert told[-2].startswith("the server has no images: start it with OFFBEAT_IMAGES")
    assert told[-1].startswith("images are not read for models of type 'gemma3' on vLLM, but for idefics3, ")


async def generate_one(client: EngineClient, prompt: tuple[int, ...]) -> None:
    await client.generate(prompt, Sampling(2), n=1, timeout_s=TIMEOUT_S)


def write(world: World, image: StoredImage) -> None:
    (world.store.folder / f"{image.id}.image").write_bytes(wire.encode(image))


def load_behind(engine: Engine, folder: Path) -> None:
    """Have vLLM load weights that its endpoints do not know of."""
    for path, body in (
        ("collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}), ("reset_encoder_cache", {}),
    ):
        asked = urllib.request.Request(
            f"{engine.url}/{path}", json.dumps(body).encode(),
            {"Authorization": f"Bearer {engine.key}", "Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60) as response:
            assert response.status == 200
