"""Other models than the one that is trained, a stand-in for a loss, and downloads as older SDKs make them, through the real SDK."""

import inspect
import io
import re
import subprocess
import tarfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker
from server import MODEL_NAME, PYTHON, Server
from small_model import build_model
from tinker import types
from work import DEADLINE_S, REFUSED, datum, ready, reference_logprobs, train_client

ALIAS, TEACHER = "offbeat/alias", "offbeat/teacher"
TOKENS = [7, 30, 12, 55, 9, 41, 8, 22]


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("teacher") / "big", seed=3)


@pytest.fixture(scope="module")
def teacher_url(teacher_dir: Path) -> Iterator[str]:
    """An engine that somebody else has started."""
    command = [PYTHON, "-m", "offbeat", "engine", "--model", teacher_dir, "--port", "0", "--threads", "1"]
    engine = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert engine.stdout is not None
    url = next(found[0] for line in engine.stdout if (found := re.search(r"http://[\w.]+:\d+", line)))
    yield url
    engine.kill()
    engine.wait()


@pytest.fixture(scope="module")
def service(model_dir: Path, teacher_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tinker.ServiceClient]:
    options = (
        "--serve.aliases", f'["{ALIAS}"]', "--serve.sampling_models", f'["{TEACHER}={teacher_url}"]',
        "--serve.stable_reinforce", "importance_sampling")
    with Server(model_dir, tmp_path_factory.mktemp("surface"), *options) as server:
        yield tinker.ServiceClient(base_url=server.url, api_key="tml-alice")


def test_a_teacher_is_scored_and_sampled_beside_the_model_that_is_trained(service: tinker.ServiceClient, teacher_dir: Path) -> None:
    models = {model.model_name for model in service.get_server_capabilities().supported_models}
    assert models == {MODEL_NAME, ALIAS, TEACHER}
    teacher = ready(service.create_sampling_client(base_model=TEACHER))
    prompt = types.ModelInput.from_ints(TOKENS)
    scored = teacher.compute_logprobs(prompt).result(DEADLINE_S)
    np.testing.assert_allclose(np.array(scored[1:], np.float32), reference_logprobs(teacher_dir, TOKENS), atol=1e-4)
    sampled = teacher.sample(prompt, 2, types.SamplingParams(max_tokens=5, stop=[])).result(DEADLINE_S)
    assert [len(sequence.tokens) for sequence in sampled.sequences] == [5, 5]
    with pytest.raises(REFUSED, match="can only be sampled on this server"):
        ready(service.create_lora_training_client(base_model=TEACHER, rank=8))


def test_a_recipe_that_names_another_model_trains_the_one_that_there_is(service: tinker.ServiceClient) -> None:
    client = ready(service.create_lora_training_client(base_model=ALIAS, rank=8, seed=1))
    assert client.get_info().model_data.model_name == MODEL_NAME
    policy = datum(TOKENS, logprobs=[-4.0] * 7, advantages=[0.5] * 7)
    expected = client.forward([policy], "importance_sampling").result(DEADLINE_S).metrics["loss:sum"]
    found = client.forward([policy], "stable_reinforce").result(DEADLINE_S).metrics["loss:sum"]
    assert found == pytest.approx(expected, rel=1e-6)
    assert ready(service.create_sampling_client(base_model=ALIAS)).compute_logprobs(
        types.ModelInput.from_ints(TOKENS)).result(DEADLINE_S)[1] is not None


def test_an_adapter_is_downloaded_as_one_file_by_sdks_that_know_no_other_way(service: tinker.ServiceClient) -> None:
    rest = service.create_rest_client()
    if not hasattr(rest, "get_checkpoint_archive_url_from_tinker_path"):
        pytest.skip("this SDK downloads file by file")
    path = train_client(service).save_weights_for_sampler("download").result(DEADLINE_S).path
    link = rest.get_checkpoint_archive_url_from_tinker_path(path).result()
    with urllib.request.urlopen(link.url, timeout=60) as answer, tarfile.open(fileobj=io.BytesIO(answer.read())) as tar:
        assert set(tar.getnames()) == {"adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"}


def test_a_loss_that_is_made_for_the_server_is_computed_by_the_client(service: tinker.ServiceClient) -> None:
    if not hasattr(service, "create_custom_loss"):
        pytest.skip("this SDK makes no losses for the server")

    def likelihood(logprobs, weights):
        return -(logprobs * weights).sum(), {}

    client, data = train_client(service), [datum(TOKENS)]
    loss = service.create_custom_loss(likelihood, {"logprobs": 1, "weights": 1}).result(DEADLINE_S)
    expected = client.forward(data, "cross_entropy").result(DEADLINE_S).metrics["loss:sum"]
    assert client.forward_backward_custom(data, loss).result(DEADLINE_S).metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)


def test_alternatives_to_the_tokens_of_a_prompt_are_drawn_by_the_teacher(service: tinker.ServiceClient) -> None:
    teacher = ready(service.create_sampling_client(base_model=TEACHER))
    if "prompt_alt_tokens_k" not in inspect.signature(teacher.sample).parameters:
        pytest.skip("this SDK knows of no alternatives")
    params = types.SamplingParams(max_tokens=1, temperature=0.8, seed=5)
    found = teacher.sample(types.ModelInput.from_ints(TOKENS), 1, params, prompt_alt_tokens_k=4).result(DEADLINE_S).prompt_alt_tokens
    assert found.tokens.shape == found.logprobs.shape == [len(TOKENS) - 1, 4]
    tokens, logprobs = found.tokens.to_numpy(), found.logprobs.to_numpy()
    for place in range(len(TOKENS) - 1):
        scored = teacher.compute_logprobs(types.ModelInput.from_ints([*TOKENS[: place + 1], int(tokens[place][0])])).result(DEADLINE_S)
        assert logprobs[place][0] == pytest.approx(scored[-1], abs=1e-4)
