"""Images in prompts and datums through the SDK: what is sampled and trained is what a run computes of the same pictures."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from server import MODEL_NAME, PYTHON, ROOT, Server
from tinker import types
from work import DEADLINE_S, REFUSED, adam, ready, train_client

from conftest import Clients

Parts = Sequence[int | str]
"""A sequence of tokens, in which a name stands for a picture."""
PROMPT: Parts = [5, 9, "one.png", 20, 3, "photo.jpeg", 11]


class Pictures:
    """Files of pictures, the number of tokens of each that can be used, and what a run computes of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lengths: dict[str, int] = json.loads(self._call("make"))

    def _call(self, command: str, *more: str) -> str:
        done = subprocess.run(
            [PYTHON, ROOT / "tests" / "sdk" / "small_image_model.py", command, self.folder, *more], capture_output=True, text=True,
            check=True)
        return done.stdout.splitlines()[-1]

    def chunk(self, name: str, **fields: object) -> types.ImageChunk:
        given = {"format": name.rpartition(".")[2], "expected_tokens": self.lengths.get(name)} | fields
        return types.ImageChunk(data=(self.folder / name).read_bytes(), **given)

    def input(self, parts: Parts) -> types.ModelInput:
        return types.ModelInput(chunks=[
            self.chunk(part) if isinstance(part, str) else types.EncodedTextChunk(tokens=[part]) for part in parts])

    def datum(self, parts: Parts) -> types.Datum:
        """Each token of text that follows another token is to be predicted; targets and weights of an image's tokens are 0."""
        targets = [
            (0, 0.0) if isinstance(part, str) else (part, 1.0) for part in parts
            for _ in range(self.lengths[part] if isinstance(part, str) else 1)][1:]
        return types.Datum(model_input=self.input(parts[:-1]), loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array([target for target, _ in targets], np.int64)),
            "weights": types.TensorData.from_numpy(np.array([weight for _, weight in targets], np.float32))})

    def scores(self, *sequences: Parts) -> list[np.ndarray]:
        """Log-probabilities of each token but the first by a run's trainer; NaN for those of images."""
        return [np.array(each, np.float64) for each in json.loads(self._call("score", json.dumps(list(map(list, sequences)))))]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Pictures:
    return Pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def seeing(pictures: Pictures, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a model that reads images."""
    with Server(pictures.folder / "model", tmp_path_factory.mktemp("seeing"), "--data.max_images", "3") as server:
        yield server


@pytest.fixture
def service(seeing: Server) -> Iterator[tinker.ServiceClient]:
    client = tinker.ServiceClient(base_url=seeing.url, api_key="tml-alice")
    yield client
    if hasattr(client, "close"):
        client.close("success")


def passed(client: tinker.TrainingClient, data: list[types.Datum]) -> list[np.ndarray]:
    outputs = client.forward(data, "cross_entropy").result(DEADLINE_S).loss_fn_outputs
    return [np.array(output["logprobs"].to_numpy(), np.float64) for output in outputs]


def close(found: Sequence[float | None], expected: np.ndarray) -> None:
    """Compare where a score is expected."""
    known = ~np.isnan(expected)
    np.testing.assert_allclose(np.array(found, np.float64)[known], expected[known], atol=1e-4)


def test_a_datum_with_images_has_the_log_probabilities_of_a_run_and_is_learned(
        service: tinker.ServiceClient, pictures: Pictures) -> None:
    client = train_client(service)
    sequences: list[Parts] = [[*PROMPT, 7, 8], ["turned.jpeg", 6, 30, 12], [4, 5, 6, 7]]
    data = list(map(pictures.datum, sequences))
    # The step is sent before the images of the pass have been read, which take longer than a gap is waited for.
    first, step = client.forward_backward(data, "cross_entropy"), client.optim_step(adam(3e-2))
    step.result(DEADLINE_S)
    result = first.result(DEADLINE_S)
    expected = pictures.scores(*sequences)
    for output, scored in zip(result.loss_fn_outputs, expected, strict=True):
        close(output["logprobs"].to_numpy(), scored)
    assert result.metrics["loss:sum"] == pytest.approx(-sum(np.nansum(scored) for scored in expected), abs=1e-3)
    after = client.forward(data, "cross_entropy").result(DEADLINE_S)
    assert after.metrics["loss:sum"] < result.metrics["loss:sum"] - 0.1
    assert client.forward_backward(data, "cross_entropy").result(DEADLINE_S).metrics["loss:sum"] == pytest.approx(
        after.metrics["loss:sum"], abs=1e-3)


def test_a_loss_of_the_client_may_use_all_positions_of_text(service: tinker.ServiceClient, pictures: Pictures) -> None:
    client = train_client(service)
    data = [pictures.datum([*PROMPT, 7, 8])]
    weights = torch.tensor(data[0].loss_fn_inputs["weights"].data)

    def loss(_: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -(logprobs[0] * weights).sum(), {}

    own = client.forward_backward_custom(data, loss).result(DEADLINE_S).metrics["loss:sum"]
    assert own == pytest.approx(-np.nansum(pictures.scores([*PROMPT, 7, 8])[0]), abs=1e-3)
    assert client.optim_step(adam()).result(DEADLINE_S).metrics["grad_norm"] > 0


def test_samples_of_a_prompt_with_images_have_the_log_probabilities_of_a_run(service: tinker.ServiceClient, pictures: Pictures) -> None:
    sampler = ready(service.create_sampling_client(base_model=MODEL_NAME))
    prompt = pictures.input(PROMPT)
    found = sampler.sample(prompt, 3, types.SamplingParams(max_tokens=5, stop=[], seed=1), include_prompt_logprobs=True).result(DEADLINE_S)
    whole: list[Parts] = [[*PROMPT, *sequence.tokens] for sequence in found.sequences]
    expected = pictures.scores(PROMPT, *whole)
    assert len({tuple(each) for each in whole}) == 3
    for sequence, scored in zip(found.sequences, expected[1:], strict=True):
        close(sequence.logprobs, scored[-5:])
    for logprobs in (found.prompt_logprobs, sampler.compute_logprobs(prompt).result(DEADLINE_S)):
        assert [logprob is None for logprob in logprobs] == [True, *np.isnan(expected[0])], "an image's tokens have none"
        close([logprob or 0.0 for logprob in logprobs[1:]], expected[0])


def test_a_trained_model_samples_with_its_own_log_probabilities(service: tinker.ServiceClient, pictures: Pictures) -> None:
    client = train_client(service)
    data = [pictures.datum([*PROMPT, 7, 8])]
    for _ in range(3):
        client.forward_backward(data, "cross_entropy")
        client.optim_step(adam(1e-2)).result(DEADLINE_S)
    sampler = ready(client.save_weights_and_get_sampling_client())
    for sequence in sampler.sample(
            pictures.input(PROMPT), 2, types.SamplingParams(max_tokens=4, stop=[])).result(DEADLINE_S).sequences:
        (scored,) = passed(client, [pictures.datum([*PROMPT, *sequence.tokens])])
        close(sequence.logprobs, scored[-4:])


BAD = {
    "cut.png": "cannot be decoded", "wide.png": "20000 x 2 pixels", "bomb.png": "16000 x 16000 pixels", "empty.png": "no such file",
    "text.png": "no such file", "noise.png": "is no image in one of the formats|cannot be decoded"}


@pytest.mark.parametrize(("name", "words"), BAD.items())
def test_an_image_that_cannot_be_used_is_refused_in_a_sentence_and_nothing_is_lost(
        service: tinker.ServiceClient, pictures: Pictures, name: str, words: str) -> None:
    client = train_client(service)
    good, bad = pictures.datum([*PROMPT, 7]), types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[5]), pictures.chunk(name)])
    gathered = client.forward_backward([good], "cross_entropy")
    wrong = types.Datum(model_input=bad, loss_fn_inputs=good.loss_fn_inputs)
    with pytest.raises(REFUSED, match=rf"data\[1\].model_input.chunks\[1\] .*({words})"):
        client.forward_backward([good, wrong], "cross_entropy").result(DEADLINE_S)
    assert gathered.result(DEADLINE_S).metrics["loss:sum"] > 0
    assert client.optim_step(adam()).result(DEADLINE_S).metrics["grad_norm"] > 0, "what was gathered before is there"
    sampler = ready(service.create_sampling_client(base_model=MODEL_NAME))
    with pytest.raises(REFUSED, match=rf"prompt.chunks\[1\] .*({words})"):
        sampler.sample(bad, 1, types.SamplingParams(max_tokens=1)).result(DEADLINE_S)


def test_what_does_not_fit_is_refused_in_a_sentence(service: tinker.ServiceClient, pictures: Pictures) -> None:
    sampler = ready(service.create_sampling_client(base_model=MODEL_NAME))
    length = pictures.lengths["one.png"]
    pointer = types.ImageAssetPointerChunk(format="png", location="https://example.org/one.png", expected_tokens=length)
    for chunks, words in (
        ([pictures.chunk("one.png", expected_tokens=length + 1)], f"has {length} tokens .* expected_tokens are {length + 1}"),
        ([pictures.chunk("one.png", format="jpeg")], "its format is jpeg, and its data is no such file"),
        ([pictures.chunk("one.png")] * 4, "has 4 images, allowed are 3"), ([pointer], "nothing is fetched"),
        ([types.EncodedTextChunk(tokens=[2**30 + 5])], "token ids of 0 to")):
        with pytest.raises(REFUSED, match=words):
            sampler.sample(types.ModelInput(chunks=chunks), 1, types.SamplingParams(max_tokens=1)).result(DEADLINE_S)
    client = train_client(service)
    trained = pictures.datum([*PROMPT, 7])
    trained.loss_fn_inputs["weights"] = types.TensorData.from_numpy(np.ones(len(trained.loss_fn_inputs["weights"].data), np.float32))
    with pytest.raises(REFUSED, match="weights must be 0 where the next token is an image's, as at position 1; only text is trained"):
        client.forward_backward([trained], "cross_entropy").result(DEADLINE_S)


def test_a_model_of_text_refuses_images_in_a_sentence(connect: Clients, pictures: Pictures) -> None:
    client = train_client(connect())
    with pytest.raises(REFUSED, match="is an image, and this model reads text alone here"):
        client.forward_backward([pictures.datum([*PROMPT, 7])], "cross_entropy").result(DEADLINE_S)
    sampler = ready(connect().create_sampling_client(base_model=MODEL_NAME))
    with pytest.raises(REFUSED, match="is an image, and this model reads text alone here"):
        sampler.compute_logprobs(pictures.input(PROMPT)).result(DEADLINE_S)
