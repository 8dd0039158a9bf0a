"""Requests for passes, as the public client writes them, become the batches that they describe; all others are refused with a sentence."""

import contextlib
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.algorithms.objectives import CLIENT_LOSSES, client_loss, reads_of
from offbeat.service.errors import BadRequestError, RequestError, TooLargeError
from offbeat.service.models import Model
from offbeat.service.tables import ModelRow
from offbeat.service.wire.chunks import ReadImage
from offbeat.service.wire.limits import WireLimits
from offbeat.service.wire.proto import decode_proto, encode
from offbeat.service.wire.schema import FLOAT32, INT64
from offbeat.service.wire.training import ForwardBackward, UnreadPass, read_forward_backward
from offbeat.service.work import Pass, Work, pass_done
from offbeat.trainer.messages import Scores
from small_service import LORA
from wire_golden import REQUESTS, golden_bytes

LIMITS = WireLimits(vocab_size=100, context=16)
NAMES = {"loss_weights": "weights", "rollout_logprobs": "logprobs", "advantages": "advantages", "ratio_mask": "sequence_ratio_mask"}
CONFIG = {"clip_low_threshold": "clip_low", "clip_high_threshold": "clip_high", "beta": "beta"}


def tensor(values: Any) -> dict[str, Any]:
    array = np.asarray(values)
    kind = INT64 if array.dtype.kind == "i" else FLOAT32
    return {"dense": array.astype("<i8" if kind == INT64 else "<f4").tobytes(), "dtype": kind, "shape": array.shape}


def datum(*tokens: int, **inputs: Any) -> dict[str, Any]:
    chunk = {"encoded_text": {"tokens": np.array(tokens, "<i4").tobytes()}}
    read = {name: value if isinstance(value, dict) else tensor(value) for name, value in inputs.items()}
    return {"model_input": [chunk], "loss_fn_inputs": read}


PLAIN = datum(1, 2, target_tokens=[2, 3], weights=[0.0, 1.0])
POLICY = {"target_tokens": [2, 3], "logprobs": [-1.0, -2.0], "advantages": [0.5, -0.5]}


def read(*data: dict[str, Any], limits: WireLimits = LIMITS, **fields: Any) -> ForwardBackward:
    message = {"model_id": "m", "seq_id": 4, "loss_fn": "cross_entropy", "data": data, **fields}
    found = read_forward_backward(encode("ForwardBackwardRequest", message), limits=limits)
    assert isinstance(found, ForwardBackward), "there are no images"
    return found


# -- losses --------------------------------------------------------------------------------------------------------------------------------


def test_a_loss_whose_formula_nobody_knows_is_refused_unless_another_stands_in_for_it() -> None:
    loss = {"loss_fn": "stable_reinforce", "loss_fn_config_v2": {"kl_coeff": {"number": 0.1}, "mode": {"text": "x"}}}
    with pytest.raises(BadRequestError, match=r"formula is not public; set loss_fn to one of .*serve\.stable_reinforce on the server"):
        read(datum(1, 2, **POLICY), **loss)
    body = encode("ForwardBackwardRequest", {"model_id": "m", "seq_id": 4, "data": [datum(1, 2, **POLICY)], **loss})
    for stand_in in ("importance_sampling", "ppo", "cispo"):
        (spec,) = read_forward_backward(body, limits=LIMITS, stable_reinforce=stand_in).data.batch.losses
        assert spec == client_loss(stand_in), "with its own settings, for those that came are the other formula's"
    body = encode("ForwardBackwardRequest", {"model_id": "m", "seq_id": 4, "data": [PLAIN], **loss})
    with pytest.raises(BadRequestError, match="ppo takes target_tokens, logprobs, advantages, got 'weights'"):
        read_forward_backward(body, limits=LIMITS, stable_reinforce="ppo")


# -- what the client sends -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_of_the_client_is_read_in_full(name: str) -> None:
    sent = REQUESTS[name]
    request = read_forward_backward(golden_bytes(sent), limits=LIMITS)
    assert (request.model_id, request.seq_id, request.forward_only) == ("0f:train:1", 12, sent["forward_only"])
    batch, (loss,) = request.data.batch, request.data.batch.losses
    assert loss.name == sent["loss"]
    constants = {**client_loss(loss.name).constants, **{CONFIG[key]: value for key, value in sent["config"].items()}}
    assert loss.constants == constants
    assert len(batch) == len(request.data.layouts) == len(sent["datums"])
    for index, (plain, layout) in enumerate(zip(sent["datums"], request.data.layouts, strict=True)):
        one = batch.select([index])
        targets = np.array(plain["target_tokens"])
        assert one.tokens.tolist() == plain["tokens"] and layout.shape == targets.shape
        cells = np.arange(targets.size) if layout.cells is None else layout.cells
        width = targets.shape[1] if targets.ndim == 2 else 1
        assert one.positions.tolist() == (cells // width).tolist()
        assert one.targets.tolist() == targets.reshape(-1)[cells].tolist()
        read_columns = reads_of(loss) or ("loss_weights",)
        assert one.columns.keys() == {"loss_weights", *read_columns}
        if "advantages" in read_columns:
            assert one.columns["loss_weights"].tolist() == (one.columns["advantages"] != 0).tolist()
        for field in read_columns:
            given = np.array(plain.get(NAMES[field], np.zeros(targets.shape)), np.float32).reshape(-1)
            assert one.columns[field].tolist() == given[cells].tolist(), field
            unlisted = np.setdiff1d(np.arange(targets.size), cells)
            assert not given[unlisted].any() and not targets.reshape(-1)[unlisted].any()


def test_sparse_targets_take_up_no_more_than_what_is_listed() -> None:
    (layout,) = read_forward_backward(golden_bytes(REQUESTS["sparse"]), limits=LIMITS).data.layouts
    assert layout.shape == (6, 5)
    # Three targets, and a weight where no target is listed, which is a weight of token 0.
    assert layout.cells is not None and layout.cells.tolist() == [1, 10, 13, 24]


def test_without_weights_every_target_counts_once() -> None:
    assert read(datum(1, 2, target_tokens=[2, 3])).data.batch.columns["loss_weights"].tolist() == [1, 1]


def test_whole_numbers_do_as_weights() -> None:
    assert read(datum(1, 2, target_tokens=[2, 3], weights=[0, 1])).data.batch.columns["loss_weights"].tolist() == [0, 1]


def test_settings_without_their_newer_form_are_read_too() -> None:
    loss = read(datum(1, 2, **POLICY), loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.5}).data.batch.losses[0]
    assert loss.constants == {"clip_low": 0.5, "clip_high": 1.2}


def test_datums_of_different_widths_stand_in_one_batch() -> None:
    data = read(PLAIN, datum(1, target_tokens=[[4, 5, 6]], weights=[[0.0, 1.0, 2.0]])).data
    assert [layout.shape for layout in data.layouts] == [(2,), (1, 3)]
    assert data.batch.positions.tolist() == [0, 1, 2, 2, 2] and data.batch.targets.tolist() == [2, 3, 4, 5, 6]


# -- images --------------------------------------------------------------------------------------------------------------------------------

SEEING = WireLimits(vocab_size=100, context=16, max_images=2)
ID = 2**30 + 7
PNG = {"data": b"\x89PNG\r\n\x1a\n", "format": "png"}


def with_image(*text: int, **inputs: Any) -> dict[str, Any]:
    """A token, an image of three tokens, and a text."""
    made = datum(*text, **inputs)
    return {**made, "model_input": [{"encoded_text": {"tokens": np.array([1], "<i4").tobytes()}}, {"image": PNG}, *made["model_input"]]}


def read_images(*data: dict[str, Any], limits: WireLimits = SEEING, **fields: Any) -> ForwardBackward:
    message = {"model_id": "m", "seq_id": 4, "loss_fn": "cross_entropy", "data": data, **fields}
    unread = read_forward_backward(encode("ForwardBackwardRequest", message), limits=limits)
    assert isinstance(unread, UnreadPass) and (unread.model_id, unread.seq_id) == ("m", 4)
    return unread.read(dict.fromkeys(unread.images, ReadImage(np.array([5, ID, ID], np.int32), 8)))


def test_an_image_stands_in_its_place_and_its_tokens_are_not_trained() -> None:
    data = read_images(with_image(6, 7, target_tokens=[0, 0, 0, 6, 7, 8]), datum(1, target_tokens=[2])).data
    assert data.batch.tokens.tolist() == [1, 5, ID, ID, 6, 7, 1] and data.patches == (8, 0)
    assert data.batch.columns["loss_weights"].tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert read_images(
        with_image(6, target_tokens=[[0, 0]] * 5)).data.batch.columns["loss_weights"].tolist() == [0] * 6 + [1] * 4
    assert not read(PLAIN).data.patches


def test_losses_stand_on_text_alone() -> None:
    zeros = [0.0] * 6
    targets, late, early = [0, 0, 0, 6, 7, 8], [*zeros[:5], 1.0], [*zeros[:2], 1.0, *zeros[3:]]
    assert read_images(with_image(6, 7, target_tokens=targets, weights=late)).data.batch.columns["loss_weights"].tolist() == late
    says = "must be 0 where the next token is an image's, as at position 2; only text is trained"
    with pytest.raises(BadRequestError, match=rf"data\[0\].weights {says}") as caught:
        read_images(with_image(6, 7, target_tokens=targets, weights=early))
    assert (caught.value.model_id, caught.value.seq_id) == ("m", 4)
    policy = {"target_tokens": targets, "logprobs": zeros}
    for loss in ("importance_sampling", "ppo"):
        assert read_images(with_image(6, 7, **policy, advantages=late), loss_fn=loss).data.batch.columns["advantages"].tolist() == late
        with pytest.raises(BadRequestError, match=rf"data\[0\].advantages {says}"):
            read_images(with_image(6, 7, **policy, advantages=early), loss_fn=loss)
    with pytest.raises(BadRequestError, match=rf"data\[0\].sequence_ratio_mask {says}"):
        read_images(with_image(6, 7, **policy, advantages=late, sequence_ratio_mask=early), loss_fn="gspo")
    wide = [[0.0, 0.0]] * 6
    wide[2] = [0.0, 0.5]
    with pytest.raises(BadRequestError, match=rf"data\[0\].weights {says}"):
        read_images(with_image(6, 7, target_tokens=[[0, 0]] * 6, weights=wide))


def test_what_does_not_fit_an_image_is_refused_with_its_place() -> None:
    with pytest.raises(BadRequestError, match=r"data\[0\].target_tokens must have the shape .* for N = 5 tokens of model_input, got \[3\]"):
        read_images(with_image(6, target_tokens=[0, 0, 6]))
    with pytest.raises(BadRequestError, match=r"data\[0\].model_input must have 1 to 4 tokens, got 5"):
        read_images(with_image(6, target_tokens=[0] * 5), limits=WireLimits(vocab_size=100, context=4, max_images=2))
    many = {"model_input": [{"image": PNG}] * 3, "loss_fn_inputs": {}}
    with pytest.raises(BadRequestError, match=r"data\[1\].model_input has 3 images, allowed are 2 here; leave some out"):
        read_images(PLAIN, many)
    resized = {"model_input": [{"image": {**PNG, "override_dimensions": b""}}], "loss_fn_inputs": {}}
    with pytest.raises(BadRequestError, match=r"data\[0\].model_input.chunks\[0\] asks for other dimensions"):
        read_images(resized)


# -- what is refused -----------------------------------------------------------------------------------------------------------------------

IMAGE = {"model_input": [{"image": PNG}], "loss_fn_inputs": {}}


@pytest.mark.parametrize(("data", "fields", "says"), [
    ([], {}, "data must hold at least one datum"),
    ([PLAIN], {"loss_fn": "custom"}, "no loss 'custom'; set loss_fn to one of ppo, gspo, cispo, importance_sampling, cross_entropy, dro"),
    ([PLAIN], {"loss_fn_config_v2": {"beta": {"number": 1.0}}}, "cross_entropy has no 'beta'; it has no settings"),
    ([datum(1, 2, **POLICY)], {"loss_fn": "ppo", "loss_fn_config_v2": {"x": {"number": 1.0}}},
     "ppo has no 'x'; it has clip_low_threshold, clip_high_threshold"),
    ([datum(1, 2, **POLICY)], {"loss_fn": "dro", "loss_fn_config_v2": {"beta": {"text": "high"}}}, "beta .* must be a number, got 'high'"),
    ([datum(1, 2, **POLICY)], {"loss_fn": "dro", "loss_fn_config_v2": {"beta": {"number": float("nan")}}}, "beta of dro must be finite"),
    ([datum(1, 2, **POLICY)], {"loss_fn": "ppo", "loss_fn_config_v2": {"clip_low_threshold": {"number": 2.0}}}, "0 <= low <= high"),
    ([PLAIN, IMAGE], {}, r"data\[1\].model_input.chunks\[0\] is an image, and this model reads text alone here"),
    ([{"model_input": [{"dmel": b"1"}]}], {}, r"data\[0\].model_input holds dmel"),
    ([{"model_input": [{}]}], {}, r"data\[0\].model_input holds nothing"),
    ([{"model_input": [{"encoded_text": {"tokens": b"123"}}]}], {}, r"data\[0\].model_input must hold int32 tokens of 4 bytes"),
    ([datum(target_tokens=[1])], {}, r"data\[0\].model_input must have 1 to 16 tokens, got 0"),
    ([datum(*range(17), target_tokens=[1])], {}, "1 to 16 tokens, got 17"),
    ([datum(-1, target_tokens=[1])], {}, r"data\[0\].model_input must hold token ids of 0 to 99, got -1"),
    ([datum(1, target_tokens=[100])], {}, r"data\[0\].target_tokens must hold token ids of 0 to 99, got 100"),
    ([datum(1, target_tokens=[1 << 40])], {}, f"got {1 << 40}"),
    ([datum(1, target_tokens=[1.0])], {}, r"data\[0\].target_tokens must be int64, got float32"),
    ([datum(1, weights=[1.0])], {}, "cross_entropy needs target_tokens, weights; target_tokens is missing"),
    ([datum(1, target_tokens=[1], mask=[1.0])], {}, "cross_entropy takes target_tokens, weights, got 'mask'"),
    ([datum(1, 2, **POLICY, weights=[1.0, 1.0])], {"loss_fn": "ppo"}, "ppo takes target_tokens, logprobs, advantages, got 'weights'"),
    ([datum(1, target_tokens=[1], logprobs=[0.0])], {"loss_fn": "cispo"}, "advantages is missing"),
    ([datum(1, target_tokens=[1, 2])], {}, r"data\[0\].target_tokens must have the shape \[N\] or \[N, K\] for N = 1 tokens .*, got \[2\]"),
    ([datum(1, target_tokens=[[1]], logprobs=[[0.0]], advantages=[[0.0]])], {"loss_fn": "ppo"}, r"the shape \[N\] for N = 1"),
    ([datum(1, target_tokens=[[1, 2]], weights=[1.0])], {}, r"data\[0\].weights must have the shape \[1, 2\] of target_tokens, got \[1\]"),
    ([datum(1, target_tokens=[1], weights=[float("inf")])], {}, r"data\[0\].weights must be finite, got inf"),
    ([datum(1, 2, **POLICY, sequence_ratio_mask=[0.5, 1.0])], {"loss_fn": "gspo"}, r"data\[0\].sequence_ratio_mask must hold only 0 and 1"),
])
def test_a_wrong_request_is_refused_with_its_place_and_what_is_allowed(data: list[Any], fields: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequestError, match=says) as caught:
        read(*data, **fields)
    assert (caught.value.model_id, caught.value.seq_id) == ("m", 4)


@pytest.mark.parametrize(("limits", "says"), [
    ({"max_datums": 1}, "at most 1 datums, got 2"), ({"max_tokens": 3}, "at most 3 tokens"), ({"max_fields": 20}, "more than 20 fields")])
def test_a_request_that_is_too_large_is_refused(limits: dict[str, int], says: str) -> None:
    with pytest.raises(TooLargeError, match=says) as caught:
        read(PLAIN, PLAIN, limits=WireLimits(vocab_size=100, context=16, **limits))
    assert (caught.value.model_id, caught.value.seq_id) == ("m", 4)


def test_a_request_that_is_cut_off_still_has_its_place() -> None:
    with pytest.raises(BadRequestError, match="cut off") as caught:
        read_forward_backward(golden_bytes(REQUESTS["dense"])[:-1], limits=LIMITS)
    assert (caught.value.model_id, caught.value.seq_id) == ("0f:train:1", 12)


def test_cells_count_whether_they_are_listed_or_not() -> None:
    sparse = {"values": np.array([1], "<i8").tobytes(), "crow_indices": np.array([0, 1], "<i8").tobytes(), "col_indices": bytes(8)}
    wide = datum(1, target_tokens={"sparse_csr": sparse, "dtype": INT64, "shape": [1, 600]})
    limits = WireLimits(vocab_size=100, context=16, max_cells=1000)
    read(wide, limits=limits)
    with pytest.raises(BadRequestError, match=r"data\[1\].target_tokens must be .* at most 400 cells"):
        read(wide, wide, limits=limits)


def test_a_sparse_tensor_is_never_made_dense() -> None:
    """A body of some hundred bytes, whose targets took 256 MiB when they were laid out."""
    sparse = {"values": np.array([1], "<i8").tobytes(), "crow_indices": np.array([0, 1], "<i8").tobytes(), "col_indices": bytes(8)}
    limits = WireLimits(vocab_size=100, context=16, max_width=1 << 24, max_datum_cells=1 << 24)
    huge = datum(1, target_tokens={"sparse_csr": sparse, "dtype": INT64, "shape": [1, 1 << 24]})
    tracemalloc.start()
    data = read(huge, limits=limits).data
    work = Work(0, Model(ModelRow("m", "s", "alice", 0.0, 0.0, "base", LORA), counted=True), 1, Pass(data, learn=False), None)
    work.passes = [Scores(np.ones(1, np.float32), np.ones(1, np.float32))]
    outcome = pass_done(work)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20 and outcome.logprobs[0].shape == (1, 1 << 24)
    assert work.cost.tokens == 1 << 22 and work.cost.answer_bytes >= 1 << 26, "and what its answer takes is charged"


@pytest.mark.parametrize(("width", "says"), [(1025, "K up to 1024"), (1024, "at most 2048 cells, got shape .3, 1024.")])
def test_targets_are_bounded_at_a_position_and_in_a_datum(width: int, says: str) -> None:
    dense = datum(1, 2, 3, target_tokens=np.ones((3, width), np.int64))
    with pytest.raises(BadRequestError, match=says):
        read(dense, limits=WireLimits(vocab_size=100, context=16, max_datum_cells=2048))


@pytest.mark.parametrize("fields", [{"model_id": ""}, {"seq_id": 0}, {"seq_id": -1}])
def test_a_request_without_its_place_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError, match="model_id must be given and seq_id at least 1") as caught:
        read(PLAIN, **fields)
    assert not caught.value.model_id or caught.value.seq_id < 1


# -- anything at all -----------------------------------------------------------------------------------------------------------------------


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_a_damaged_request_is_read_or_refused(data: st.DataObject) -> None:
    body = bytearray(golden_bytes(REQUESTS[data.draw(st.sampled_from(sorted(REQUESTS)))]))
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(0, len(body) - 1))
        body[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    with contextlib.suppress(RequestError):
        read_forward_backward(bytes(body[: data.draw(st.integers(0, len(body)))]), limits=LIMITS)


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_a_request_with_a_field_of_another_kind_is_read_or_refused(data: st.DataObject) -> None:
    """Swaps whole values of well-formed messages, where flipped bytes rarely get to."""
    given = golden_bytes(REQUESTS[data.draw(st.sampled_from(sorted(REQUESTS)))])
    message = decode_proto("ForwardBackwardRequest", given, max_fields=10_000)
    inputs = data.draw(st.sampled_from(message["data"]))["loss_fn_inputs"]
    one, other = data.draw(st.sampled_from(sorted(inputs))), data.draw(st.sampled_from([*sorted(inputs), "mask"]))
    inputs[one], inputs[other] = inputs.get(other, {}), inputs[one]
    for part in ("dtype", "shape"):
        if data.draw(st.booleans()):
            inputs[one][part] = data.draw(st.integers(0, 4) if part == "dtype" else st.lists(st.integers(-1, 6), max_size=3))
    message["loss_fn"] = data.draw(st.sampled_from([*CLIENT_LOSSES, ""]))
    with contextlib.suppress(RequestError):
        read_forward_backward(encode("ForwardBackwardRequest", message), limits=LIMITS)
