"""A call for samples means what the client says."""

import base64
import contextlib
import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.service.errors import BadRequestError, RequestError, TooLargeError
from offbeat.service.types import SampleRequest
from offbeat.service.wire.chunks import ReadImage, images_in
from offbeat.service.wire.limits import WireLimits
from offbeat.service.wire.sample_body import read_sample
from wire_golden import GOLDEN

LIMITS = WireLimits(vocab_size=100, context=8)
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
PLAIN = {"prompt": PROMPT, "sampling_params": {}, "sampling_session_id": "s", "seq_id": 10**18}


def read(**fields: Any) -> SampleRequest:
    body = read_sample(json.dumps({**PLAIN, **fields}).encode(), takes_images=False)
    return body.request(LIMITS, body.pieces(LIMITS))


def refused(**fields: Any) -> str:
    with pytest.raises(BadRequestError) as caught:
        read(**fields)
    return str(caught.value)


def test_a_call_has_the_protocols_defaults() -> None:
    assert asdict(read()) == asdict(SampleRequest(sampling_session_id="s", seq_id=10**18, prompt=(1, 2, 3)))


def test_a_call_of_the_client_is_read_in_full() -> None:
    request = read(**GOLDEN["json_bodies"]["SampleBody"])
    targets = request.target_prompt_logprobs
    assert targets is not None and (targets.shape, targets.cells.tolist(), targets.values.tolist()) == ((3, 8), [15], [5])
    assert asdict(replace(request, target_prompt_logprobs=None)) == asdict(SampleRequest(
        sampling_session_id="0f:sample:0", seq_id=3 * 10**9, prompt=(1, 2, 3), num_samples=2, max_tokens=4, seed=1, stop=("a", "b"),
        temperature=0.5, prompt_logprobs=True))


def test_every_field_arrives() -> None:
    params = {"max_tokens": 5, "seed": -1, "stop": ["a"], "temperature": 0, "top_k": 7, "top_p": 0.5}
    chunks = [{"type": "encoded_text", "tokens": [1]}, {"type": "encoded_text", "tokens": [2, 3]}]
    request = read(
        prompt={"chunks": chunks}, sampling_params=params, num_samples=4, prompt_logprobs=True, topk_prompt_logprobs=2,
        topk_sample_logprobs=3, prompt_alt_tokens_k=0, prompt_logprobs_last_n=2, record_stability_info=False, type="sample")
    assert asdict(request) == asdict(SampleRequest(
        sampling_session_id="s", seq_id=10**18, prompt=(1, 2, 3), num_samples=4, max_tokens=5, seed=-1, stop=("a",), temperature=0.0,
        top_k=7, top_p=0.5, prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=3, prompt_logprobs_last_n=2))


IMAGE = {"type": "image", "data": base64.b64encode(b"\x89PNG\r\n\x1a\n").decode(), "format": "png", "expected_tokens": 2}


def test_a_prompt_with_an_image_is_read_once_its_tokens_are_known() -> None:
    limits = replace(LIMITS, max_images=1)
    given = {**PLAIN, "prompt": {"chunks": [IMAGE, {"type": "encoded_text", "tokens": [1, 2]}]}}
    body = read_sample(json.dumps(given).encode(), takes_images=True)
    (image,) = images_in(pieces := body.pieces(limits))
    assert (image.name, image.data, image.expected_tokens) == ("prompt.chunks[0]", b"\x89PNG\r\n\x1a\n", 2)
    request = body.request(limits, pieces, {image: ReadImage(np.array([2**30] * 2, np.int32), 8)})
    assert (request.prompt, request.num_patches) == ((2**30, 2**30, 1, 2), 8)


def test_other_dimensions_are_refused_and_none_are_not() -> None:
    limits = replace(LIMITS, max_images=1)
    for wanted, is_refused in ((None, False), ({"width": 5, "height": 5}, True)):
        chunk = {**IMAGE, "override_dimensions": wanted}
        body = read_sample(json.dumps({**PLAIN, "prompt": {"chunks": [chunk]}}).encode(), takes_images=True)
        with pytest.raises(BadRequestError, match="asks for other dimensions") if is_refused else contextlib.nullcontext():
            body.pieces(limits)


def test_a_body_is_large_for_its_images_alone() -> None:
    file = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(4 << 20)).decode()
    with_image = json.dumps({**PLAIN, "prompt": {"chunks": [{**IMAGE, "data": file}]}}).encode()
    with_text = json.dumps({**PLAIN, "prompt": {"chunks": [{"tokens": [1] * (3 << 20)}]}}, separators=(",", ":")).encode()
    assert len(read_sample(with_image, takes_images=True).prompt.chunks[0].data) > 4 << 20
    for body, takes_images in ((with_image, False), (with_text, False), (with_text, True)):
        with pytest.raises(TooLargeError, match="may have at most 4194304"):
            read_sample(body, takes_images=takes_images)


@pytest.mark.parametrize(("stop", "means"), [
    (None, None), ([], ()), ("ab", ("ab",)), (["a", "b"], ("a", "b")), ([5], (5,)), ([5, 6], (5, 6))])
def test_stops_are_strings_or_tokens_or_none_at_all(stop: Any, means: Any) -> None:
    assert read(sampling_params={"stop": stop}).stop == means


@pytest.mark.parametrize(("params", "says"), [
    ({"stop": ["a", 5]}, "stop must hold either strings or token ids, got both"),
    ({"stop": ""}, "sampling_params.stop must be a string of length >= 1"),
    ({"stop": [-1]}, "sampling_params.stop[0] must be a whole number >= 0, got -1"),
    ({"stop": ["a"] * 65}, "sampling_params.stop must be a list of length <= 64"),
    ({"stop": ["a" * 1000] * 5}, "sampling_params.stop must have at most 4096 characters in all, got 5000"),
    ({"stop": 5}, "sampling_params.stop must be a string or a list or null, got 5"),
    ({"max_tokens": 0}, "sampling_params.max_tokens must be a whole number >= 1, got 0"),
    ({"temperature": -0.5}, "sampling_params.temperature must be a number >= 0.0, got -0.5"),
    ({"top_p": 0}, "sampling_params.top_p must be a number > 0.0, got 0"),
    ({"top_k": -2}, "sampling_params.top_k must be a whole number >= -1, got -2"),
    ({"seed": 2**63}, "sampling_params.seed must be a whole number <= 9223372036854775807"),
])
def test_settings_out_of_range_are_refused(params: dict[str, Any], says: str) -> None:
    assert refused(sampling_params=params).startswith(says)


@pytest.mark.parametrize(("fields", "says"), [
    ({"prompt": {"chunks": []}}, "prompt must have 1 to 8 tokens, got 0"),
    ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1] * 9}]}}, "prompt must have 1 to 8 tokens, got 9"),
    ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [100]}]}}, "prompt must hold token ids of 0 to 99, got 100"),
    ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [-1]}]}}, "prompt.chunks[0].tokens[0] must be a whole number >= 0, got -1"),
    ({"prompt": {"chunks": [{"type": "image", "data": "aaaa", "format": "png"}]}}, "prompt.chunks[0] is an image, and this model"),
    ({"prompt": {"chunks": [{"type": "image", "data": "a", "format": "png"}]}}, "prompt.chunks[0].data is wrong: Invalid base64"),
    ({"prompt": {"chunks": [{"type": "image_asset_pointer", "location": "https://a.b/c.png", "format": "png"}]}},
     "prompt.chunks[0] points to an image, and nothing is fetched; send its bytes as an image chunk"),
    ({"prompt": {"chunks": [{"type": "dmel", "dmel": "aaaa"}]}}, "prompt.chunks[0] is 'dmel'; this server takes encoded_text, with"),
    ({"prompt": {"chunks": [{"type": "encoded_text"}]}}, "prompt.chunks[0] is 'encoded_text'; this server takes encoded_text, with"),
    ({"prompt": "text"}, 'prompt must be an object, got "text"'),
    ({"num_samples": 0}, "num_samples must be a whole number >= 1, got 0"),
    ({"seq_id": 2**63}, "seq_id must be a whole number <="),
    ({"topk_prompt_logprobs": 257}, "topk_prompt_logprobs must be a whole number <= 256, got 257"),
    ({"prompt_alt_tokens_k": 257}, "prompt_alt_tokens_k must be a whole number <= 256, got 257"),
    ({"prompt_alt_tokens_k": -1}, "prompt_alt_tokens_k must be a whole number >= 0, got -1"),
    ({"prompt_logprobs_last_n": 2}, "prompt_logprobs_last_n needs prompt_logprobs"),
    ({"prompt_logprobs_last_n": 3, "prompt_logprobs": True}, "prompt_logprobs_last_n needs prompt_logprobs, and must be 1 to 2"),
])
def test_calls_that_cannot_be_carried_out_are_refused(fields: dict[str, Any], says: str) -> None:
    assert refused(**fields).startswith(says)


def test_targets_are_for_the_positions_after_the_first() -> None:
    dense = {"data": [4, -1, 5, 6], "dtype": "int64", "shape": [2, 2]}
    targets = read(target_prompt_logprobs=dense).target_prompt_logprobs
    assert targets is not None and targets.shape == (3, 2)
    assert (targets.cells.tolist(), targets.values.tolist()) == ([2, 4, 5], [4, 5, 6]), "-1 is no token"
    sparse = {"data": [9], "dtype": "int64", "shape": [2, 2], "sparse_crow_indices": [0, 0, 1], "sparse_col_indices": [1]}
    targets = read(target_prompt_logprobs=sparse).target_prompt_logprobs
    assert targets is not None and (targets.shape, targets.cells.tolist(), targets.values.tolist()) == ((3, 2), [5], [9])


@pytest.mark.parametrize(("tensor", "says"), [
    ({"data": [4.5], "shape": [2, 1]}, "target_prompt_logprobs.data[0] must be a whole number, got 4.5"),
    ({"data": [-2], "shape": [2, 1]}, "target_prompt_logprobs.data[0] must be a whole number >= -1, got -2"),
    ({"data": [1, 100], "shape": [2, 1]}, "target_prompt_logprobs must hold token ids of 0 to 99, got 100"),
    ({"data": [1, 2, 3], "shape": [3, 1]}, "target_prompt_logprobs must have the shape [2, K] for a prompt of 3 tokens, got [3, 1]"),
    ({"data": [1, 2], "shape": [2]}, "target_prompt_logprobs must have the shape [2, K]"),
    ({"data": [1], "shape": [2, 1]}, "target_prompt_logprobs must have 2 values for shape [2, 1], got 1"),
    ({"data": [], "shape": [2, 10**18]}, "target_prompt_logprobs must be [N] or [N, K] with K up to 1024, not empty, with"),
    ({"data": [1], "shape": [2, 1], "sparse_crow_indices": [0, 1, 1]}, "crow_indices of target_prompt_logprobs must rise from 0 to 0"),
    ({"data": [1, 2], "shape": [2, 1], "dtype": "float32"}, "a tensor of token ids must have the dtype int64, got 'float32'"),
])
def test_targets_that_do_not_fit_are_refused(tensor: dict[str, Any], says: str) -> None:
    assert refused(target_prompt_logprobs={"dtype": "int64", **tensor}).startswith(says)


NUMBERS = st.lists(st.integers(-2, 9), max_size=4)


@settings(max_examples=200, deadline=None)
@given(tensor=st.fixed_dictionaries(
    {"data": NUMBERS, "dtype": st.just("int64"), "shape": st.sampled_from([[2, 1], [2, 2], [2], [], [2, 3]])},
    optional={"sparse_crow_indices": NUMBERS, "sparse_col_indices": NUMBERS}))
def test_any_targets_are_read_or_refused(tensor: dict[str, Any]) -> None:
    with contextlib.suppress(RequestError):
        targets = read(target_prompt_logprobs=tensor).target_prompt_logprobs
        assert targets is not None and targets.shape == (3, tensor["shape"][1])
